"""One exchange with the nodes of a deployment: a message to each, and their answers until enough are good."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx
import torch
from flwr.app import Message
from torch import Tensor

from fedspan import tree, wire
from fedspan.deploy.envelope import Facts, printable, seal, unseal
from fedspan.deploy.server.admission import PARTS
from fedspan.deploy.server.answers import Answer, HelloAnswer, StaleAnswer, TrainAnswer, parse_answer
from fedspan.deploy.server.deployed_state import NOTHING
from fedspan.deploy.server.quota_grid import NodeGrid, QuotaGrid
from fedspan.errors import Refused
from fedspan.method import Sent
from fedspan.simulation.record import Record
from fedspan.tree import Tree
from fedspan.wire import Direction, Ledger

_TYPES = {"hello": "query", "train": "train", "evaluate": "evaluate"}

REPORTS = "its node reports:"
"""What a node's own error begins with, among the reasons why there is no answer."""

Request: TypeAlias = tuple[Facts, Tree]
"""What a client is told and sent."""

Check: TypeAlias = Callable[[int, Any, bytes], Any]
"""What a parsed answer of a client is worth; raises `Refused` for a bad one."""


@dataclass(frozen=True)
class Roster:
    """Which node is which client: `nodes[i]` is the id of client i's node, as it was registered by its key.

    Attributes:
        places: by which a run knows its clients again, as a renewed key changes a node's id; without them its ids.
        absent: why there is no node for a client.
    """

    nodes: tuple[int, ...]
    names: tuple[str, ...]
    groups: Tensor | None = None
    places: tuple[str, ...] = ()
    absent: Mapping[int, str] = field(default_factory=dict)


class Exchange:
    """Asks clients for one thing in one round. A client has one vote, and a bad answer costs its sender only.

    Attributes:
        got: what `check` made of the good answers.
        refused: why an answer was not accepted.
        missing: why there is none.
        quotas: bytes of payload that the answer of a client may bring; none where nothing is said.
        live: the roster as it is now; whoever has left it since the question has no vote any more.
    """

    def __init__(
        self,
        grid: NodeGrid,
        roster: Roster,
        record: Record,
        do: str,
        t: int,
        requests: Mapping[int, Request],
        check: Check,
        ledger: Ledger,
        log: Callable[[str], None],
        quotas: Mapping[int, int],
        live: Callable[[], Roster],
    ) -> None:
        self.grid, self.roster, self.record, self.do, self.t = grid, roster, record, do, t
        self.requests, self.check, self.ledger, self.log, self.quotas = requests, check, ledger, log, quotas
        self.live = live
        self.got: dict[int, Any] = {}
        self.refused: dict[int, str] = {}
        self.missing: dict[int, str] = {}
        self._pending: dict[int, str] = {}  # numbers of the messages that have no answer yet
        self._again: set[int] = set()
        self._end = 0.0

    def run(self, enough: int, deadline: float, poll: float) -> None:
        """Ask all, and collect until enough answers are good or the deadline has come, in seconds."""
        self._end = time.monotonic() + deadline
        there = set(self.grid.get_node_ids())
        for i in self.requests:
            if self.roster.nodes[i] in there:
                self._ask(i, self._node(i)["heard"])
            else:
                self.missing[i] = self.roster.absent.get(i, "its node is not connected")
        over = False
        while self._pending and len(self.got) < enough and not over:
            over = time.monotonic() >= self._end  # then one last look: what has come in time counts
            for i in list(self._pending):
                self._look(i)
            self._dismiss()
            if self._pending and len(self.got) < enough and not over:
                time.sleep(poll)
        late = "not needed any more" if len(self.got) >= enough else "no answer before the deadline"
        self.missing |= dict.fromkeys(self._pending, late)

    def _dismiss(self) -> None:
        """Take the answers away, and wait no longer, of nodes that were revoked, renewed or expired meanwhile."""
        now = self.live()
        for i in [*self._pending, *self.got]:
            if now.nodes[i] == self.roster.nodes[i]:
                continue
            why = now.absent.get(i, "its key was renewed")
            if self._pending.pop(i, None) is None:
                del self.got[i]
            self.refused[i] = f"client {self.roster.names[i]}: its answer counts no more: {why}."

    # ------------------------------------------------------------------------------------------------ asking

    def _node(self, i: int) -> dict[str, Any]:
        """What the server knows of client i's node."""
        known: dict[str, Any] = self.record.progress.deployed["nodes"][str(i)]
        return known

    def _ask(self, i: int, heard: int) -> None:
        """Send client i its request, with what it has not heard yet."""
        facts, payload = self._with_news(*self.requests[i], heard)
        facts |= {"do": self.do, "round": self.t, "lineage": self.record.progress.deployed["lineage"]}
        packed = wire.pack(payload)
        self.ledger.add(Direction.WIRE, len(packed))
        ttl = max(1.0, self._end - time.monotonic())
        content = seal(facts, packed)
        message = Message(content, self.roster.nodes[i], _TYPES[self.do], group_id=str(self.t), ttl=ttl)
        numbers = list(self.grid.push_messages([message]))
        if not numbers or not numbers[0]:
            self.missing[i] = "its message could not be sent"
        else:
            self._pending[i] = numbers[0]

    def _with_news(self, facts: Facts, payload: Tree, heard: int) -> Request:
        """A request with the announcements that a client has not heard, or the whole state where that is less."""
        r, told = self.record, self.record.progress.deployed["told"]
        facts = facts | {"told": told, "base": heard, "whole": False}
        if 0 <= heard <= told and told - heard <= len(r.news):
            numbers = [str(k) for k in range(heard + 1, told + 1)]
            news = {k: r.news[k] for k in numbers if k in r.news}
            complete = len(news) == len(numbers)
            if complete and (tree.nbytes(news) <= tree.nbytes(r.common) or not news):
                self.ledger.add(Direction.ANNOUNCE, tree.nbytes(news))
                return facts, payload | {"news": news}
        self.ledger.add(Direction.ANNOUNCE, tree.nbytes(r.common))
        return facts | {"whole": True}, payload | {"common": r.common}

    # ------------------------------------------------------------------------------------------------ collecting

    def _look(self, i: int) -> None:
        """See whether client i has answered, and what its answer is worth."""
        reply = self._pull(i, self._pending[i])
        if reply is None:
            return
        del self._pending[i]  # the one vote of this client in this round
        if isinstance(reply, str):
            self.missing[i] = printable(reply)
            return
        try:
            if isinstance(reply, Refused):
                raise Refused(f"client {self.roster.names[i]}: {reply}")
            answer, payload = self._opened(i, reply)
            if isinstance(answer, StaleAnswer):
                self._ask_again(i)
            else:
                self._accept(i, answer, payload)
        except Refused as e:
            self.refused[i] = printable(str(e))

    def _ask_again(self, i: int) -> None:
        """Send client i the whole state, once."""
        if i in self._again:
            raise Refused(f"client {self.roster.names[i]}: it was sent the whole state, and still misses some of it.")
        self._again.add(i)
        self._ask(i, NOTHING)

    def _accept(self, i: int, answer: Answer, payload: bytes) -> None:
        who, node = f"client {self.roster.names[i]}", self._node(i)
        if payload and not isinstance(answer, TrainAnswer):
            raise Refused(f"{who}: its answer to {self.do} must bring no payload. Got {len(payload):,} bytes.")
        if not isinstance(answer, HelloAnswer):
            told = self.record.progress.deployed["told"]
            if answer.heard != told:
                raise Refused(f"{who}: it must have heard the {told} announcements it was sent. Got {answer.heard}.")
        self.got[i] = self.check(i, answer, payload)
        if not isinstance(answer, HelloAnswer):
            node["heard"] = answer.heard
        if isinstance(answer, TrainAnswer):
            if answer.ahead:
                self.log(f"Client {self.roster.names[i]} goes on from a later round than the server's.")
            node["answered"] += 1
            self.ledger.add_names(Direction.UP, _upload_sizes(payload))

    def _pull(self, i: int, number: str) -> Message | Refused | str | None:
        """The answer to one message; why it cannot be read; why there will be none; None if it is not there yet.

        One at a time: a reply that cannot be read must not cost the others theirs.
        """
        if isinstance(self.grid, QuotaGrid):
            self.grid.quota, self.grid.end = self.quotas.get(i, 0), self._end
        try:
            replies = list(self.grid.pull_messages([number]))
            if replies and replies[0].has_error():
                return f"{REPORTS} {own_words(str(replies[0].error.reason))[:300]}"
            return replies[0] if replies else None
        except (httpx.HTTPError, OSError):
            raise  # the connection to the SuperLink, not a reply
        except Refused as e:
            return e
        except Exception as e:
            return Refused(f"its reply cannot be read ({type(e).__name__}).")

    def _opened(self, i: int, reply: Message) -> tuple[Answer, bytes]:
        """The parsed facts and the payload of an answer that is this client's to this very question."""
        who, meta = f"client {self.roster.names[i]}", reply.metadata
        if meta.src_node_id != self.roster.nodes[i]:
            raise Refused(f"{who}: the answer comes from another node, {meta.src_node_id}.")
        try:
            facts, payload = unseal(reply.content)
        except Refused as e:
            raise Refused(f"{who}: {e}") from None
        self.ledger.add(Direction.WIRE, len(payload))
        answer = parse_answer(facts, self.do, self.t, who)
        if meta.group_id != str(self.t):
            raise Refused(f"{who}: the answer must belong to round {self.t}. Got {meta.group_id[:20]}.")
        return answer, payload


def own_words(reason: str) -> str:
    """The sentence of a node's error, without the class that Flower writes around it."""
    return reason.removesuffix("'>").partition("'>:<'")[2] or reason


def _upload_sizes(payload: bytes) -> dict[str, int]:
    """Bytes per top-level name of an accepted upload, as it was written."""
    brought = wire.unpack(payload)
    return wire.count(Sent(torch.empty(0), *(brought.get(part, {}) for part in PARTS)).parts)
