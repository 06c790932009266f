"""What an answer may cost before anybody has read it, and what is left of it in the SuperLink's database."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flower_grid import FIRST_NODE
from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fedspan.deploy.envelope import seal, unseal
from fedspan.deploy.server.database import MOST_FREE, trim_database
from fedspan.deploy.server.quota_grid import AROUND, PIECE, QuotaGrid
from fedspan.errors import Refused


class Link:
    """A SuperLink that holds one answer, and counts what is fetched of it."""

    def __init__(self, payload: bytes, available: bool = True) -> None:
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
        message = Message(seal({"do": "train"}, payload), FIRST_NODE, "train", group_id="1", ttl=60)
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects = {k: o.deflate() for k, o in get_all_nested_objects(message).items()}
        self.tree, self.available, self.fetched, self.confirmed = get_object_tree(message), available, 0, 0
        bare = Message(seal({}), FIRST_NODE, "train", group_id="1", ttl=60)
        bare.metadata.__dict__["_message_id"] = message.object_id
        self.proto = message_to_proto(bare)

    def PullMessages(self, request: Any) -> Any:
        return PullAppMessagesResponse(messages_list=[self.proto], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> Any:
        content = self.objects[request.object_id]
        self.fetched += len(content)
        return PullObjectResponse(object_found=True, object_available=self.available, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed += 1


def grid_of(link: Link, quota: int, seconds: float = 60.0) -> QuotaGrid:
    flower: Any = SimpleNamespace(_runtime_client=link, _run=SimpleNamespace(run_id=1), node=Node(node_id=1))
    grid = QuotaGrid(flower)
    grid.quota, grid.end = quota, time.monotonic() + seconds
    return grid


@pytest.mark.parametrize("size", [0, 50_000, 12 << 20])
def test_an_answer_within_its_quota_arrives(size: int) -> None:
    payload = os.urandom(size)
    link = Link(payload)
    (reply,) = grid_of(link, quota=size).pull_messages(["1"])
    assert unseal(reply.content) == ({"do": "train"}, payload) and link.confirmed == 1


def test_many_pieces_are_refused_before_one_is_fetched() -> None:
    link = Link(os.urandom(100 << 20))
    with pytest.raises(Refused, match=r"at most 8 pieces\. Got 2"):
        grid_of(link, quota=50_000).pull_messages(["1"])
    assert link.fetched == 0 and link.confirmed == 1


def test_a_large_piece_is_the_last_that_is_fetched() -> None:
    link = Link(os.urandom(11 << 20))  # three pieces of up to 5 MiB
    with pytest.raises(Refused, match=rf"at most {AROUND + 1000:,} bytes"):
        grid_of(link, quota=1000).pull_messages(["1"])
    assert link.fetched < 6 * PIECE and link.confirmed == 1


def test_pieces_that_never_come_are_waited_for_until_the_deadline() -> None:
    link, start = Link(b"x", available=False), time.monotonic()
    with pytest.raises(Refused, match="not all of it has come"):
        grid_of(link, quota=1, seconds=0.2).pull_messages(["1"])
    assert time.monotonic() - start < 5 and link.confirmed == 1


def test_the_database_gives_back_what_answers_left(tmp_path: Path) -> None:
    path, said = tmp_path / "state.db", list[str]()
    link = sqlite3.connect(path)  # stays open, as the SuperLink's does
    link.execute("PRAGMA journal_mode = WAL")
    link.execute("CREATE TABLE objects (content BLOB)")
    link.execute("INSERT INTO objects VALUES (?)", (b"kept",))
    link.executemany("INSERT INTO objects VALUES (?)", [(os.urandom(5 << 20),) for _ in range(8)])
    link.commit()
    assert trim_database(path, said.append) >= 0  # all of it is in use
    link.execute("DELETE FROM objects WHERE length(content) > 4")
    link.commit()
    assert path.stat().st_size > 40 << 20
    link.execute("INSERT INTO objects VALUES (?)", (b"busy",))  # it is in the middle of something
    assert trim_database(path, said.append) == 0
    assert "tried again after the next round" in said.pop()
    link.commit()
    assert trim_database(path, said.append) > 40 << 20
    assert path.stat().st_size < MOST_FREE and not said
    assert link.execute("SELECT content FROM objects").fetchall() == [(b"kept",), (b"busy",)]
    assert trim_database(tmp_path / "none.db", said.append) == 0
    link.close()
