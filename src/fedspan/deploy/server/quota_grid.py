"""Flower's grid with a limit on every answer: too much is refused by its number of pieces, or while it is fetched.

Flower's own grid fetches and joins whatever lies at the SuperLink, and waits two hours for pieces that never come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, inflate_object_from_contents, pull_objects
from flwr.superlink.grid.http_grid import HttpGrid

from fedspan.deploy.envelope import MOST_FACTS
from fedspan.errors import Refused

AROUND = MOST_FACTS + (1 << 16)
"""Bytes of an answer beside its payload: its facts, and Flower's headers."""

PIECE = 1 << 20
"""Bytes of payload per object, at the least; Flower cuts arrays into pieces of 5 MiB."""

PIECES = 8
"""Objects of an answer beside the pieces of its payload: the message, its records, its array."""


class NodeGrid(Protocol):
    """What the server needs of Flower's grid."""

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are connected."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages over; their numbers."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The answers to these messages, as far as they are there."""


class QuotaGrid:
    """The grid of a ServerApp, whose answers have a quota and a time.

    Attributes:
        quota: bytes of payload that the next answer may bring.
        end: when waiting for its pieces is over, on the monotonic clock.
    """

    def __init__(self, grid: HttpGrid) -> None:
        self.grid, self.quota, self.end = grid, 0, 0.0

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are connected."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to the SuperLink; their numbers."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The answers to these messages, as far as they are there.

        Raises:
            Refused: if one holds more than its quota, or its pieces do not come in time. It is gone from the SuperLink.
        """
        client = self.grid._runtime_client
        found = client.PullMessages(PullAppMessagesRequest(message_ids=list(message_ids)))
        return [
            self._fetched(client, m.metadata.message_id, tree)
            for m, tree in zip(found.messages_list, found.message_object_trees, strict=True)
        ]

    def _fetched(self, client: Any, number: str, tree: Any) -> Message:
        run, node = cast(Any, self.grid._run).run_id, self.grid.node
        try:
            pieces = [piece.object_id for piece in iterate_object_tree(tree)]
            most = PIECES + self.quota // PIECE
            if len(pieces) > most:
                raise Refused(f"its answer must consist of at most {most} pieces. Got {len(pieces)}.")
            pull = make_pull_object_fn_protobuf(client.PullObject, node, run)
            contents = self._within_quota(pieces, pull)
        finally:  # whatever it is, the SuperLink need not keep it
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=number)
            )
        message = cast(Message, inflate_object_from_contents(number, contents))
        message.metadata.__dict__["_message_id"] = number
        return message

    def _within_quota(self, pieces: list[str], pull: Callable[[str], bytes]) -> dict[str, bytes]:
        """The pieces of an answer, fetched one at a time so that at most one is too many."""
        most, lock, total = self.quota + AROUND, threading.Lock(), 0

        def counted(piece: str) -> bytes:
            nonlocal total
            content = pull(piece)
            with lock:
                total += len(content)
            if total > most:
                raise ObjectPullError(piece, "too much")
            return content

        try:
            seconds = max(0.0, self.end - time.monotonic())
            return pull_objects(pieces, counted, max_concurrent_pulls=1, max_time=seconds)
        except ObjectPullError:
            if total > most:
                raise Refused(f"its answer must have at most {most:,} bytes. Got {total:,} or more.") from None
            raise Refused("its answer was announced, and not all of it has come.") from None
