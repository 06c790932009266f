"""A running server learns who is there: places are filled, keys renewed and nodes revoked between and within rounds."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flower_grid import FIRST_NODE, LocalGrid, deployed, deployed_on, experiment_of
from flwr.app import Message

from conftest import assert_same, make_data, make_task
from fedspan.deploy.envelope import unseal
from fedspan.deploy.server.exchange import Roster
from fedspan.deploy.server.server import Server
from fedspan.errors import CheckpointError
from fedspan.methods import FedAvg, FedLoRU

REVOKED = "its node is revoked"


@pytest.fixture(autouse=True)
def quick_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


class Changing:
    """A roster that a test changes while the server runs, and what the server writes into its audit log."""

    def __init__(self, server: Server) -> None:
        self.now = server.roster
        self.events: list[tuple[str, dict[str, Any]]] = []
        server.transport.live = lambda: self.now
        server.transport.audit = lambda event, facts: self.events.append((event, facts))

    def leave(self, i: int, why: str) -> None:
        nodes = tuple(0 if k == i else n for k, n in enumerate(self.now.nodes))
        self.now = replace(self.now, nodes=nodes, absent={**self.now.absent, i: why})

    def take(self, i: int, name: str, node: int) -> None:
        nodes = tuple(node if k == i else n for k, n in enumerate(self.now.nodes))
        names = tuple(name if k == i else n for k, n in enumerate(self.now.names))
        absent = {k: v for k, v in self.now.absent.items() if k != i}
        self.now = replace(self.now, nodes=nodes, names=names, absent=absent)

    def used(self) -> list[list[str]]:
        return [facts["used"] for event, facts in self.events if event == "round"]


def on_answer(grid: LocalGrid, client: int, round: int, do: Any, lost: bool = False) -> None:
    """Do something when a client has answered in a round, before the server has looked."""

    def spoil(i: int, reply: Message) -> Message | None:
        facts = unseal(reply.content)[0]
        if i == client and facts["do"] == "train" and facts["round"] == round:
            do()
            return None if lost else reply
        return reply

    grid.spoil = spoil


def test_a_reserved_place_is_an_absent_client_until_it_is_taken(tmp_path: Path) -> None:
    server, _ = deployed(FedLoRU(rank=2, tau=1), tmp_path, rounds=4, clients=4)
    changing = Changing(server)
    changing.take(3, "place-3", 0)
    changing.leave(3, "its place is empty")
    server.run(lambda line: changing.take(3, "late", FIRST_NODE + 3) if line["round"] == 2 else None)
    lines = server.record.lines
    assert [line["answered"] for line in lines] == [3, 3, 4, 4] and [line["sampled"] for line in lines] == [4] * 4
    assert lines[0]["missing"] == {"place-3": "its place is empty"} and not lines[2]["missing"]
    assert changing.used()[1:3] == [["n0", "n1", "n2"], ["n0", "n1", "n2", "late"]]
    joined = [f["node"] for event, f in changing.events if event == "joined"]
    assert joined == ["n0", "n1", "n2", "late"] and server.roster.names[3] == "late"
    assert server.record.progress.deployed["nodes"]["3"]["heard"] == 4  # it was told the whole common state
    # The same numbers as with a node that was registered, and silent, from the start.
    other, silent = deployed(FedLoRU(rank=2, tau=1), tmp_path / "other", rounds=4, clients=4)
    silent.away = {3}
    other.run(lambda line: silent.away.clear() if line["round"] == 2 else None)
    assert_same((server.record.server, server.record.common), (other.record.server, other.record.common))


@pytest.mark.parametrize("why", [REVOKED, "its key was renewed"])
def test_an_answer_under_way_of_a_revoked_or_renewed_key_is_refused(why: str, tmp_path: Path) -> None:
    server, grid = deployed(FedAvg(), tmp_path, rounds=3, clients=4)
    changing = Changing(server)
    gone = why == REVOKED
    on_answer(grid, 1, 2, lambda: changing.leave(1, why) if gone else changing.take(1, "n1", 999))
    server.run()
    lines = server.record.lines
    assert [line["answered"] for line in lines] == [4, 3, 3]
    assert lines[1]["refused"] == {"n1": f"client n1: its answer counts no more: {why}."}
    assert lines[2]["missing"] == {"n1": why if gone else "its node is not connected"}
    assert changing.used()[1:] == [["n0", "n2", "n3"]] * 2
    assert ("refused", {"round": 2, "node": "n1", "why": lines[1]["refused"]["n1"]}) in changing.events
    other, silent = deployed(FedAvg(), tmp_path / "other", rounds=3, clients=4)
    other.run(lambda line: silent.away.add(1))
    assert_same(server.record.server, other.record.server)


def test_the_good_answers_of_others_are_not_waited_for_in_vain(tmp_path: Path) -> None:
    server, grid = deployed(FedAvg(), tmp_path, rounds=1, clients=4)  # with a deadline of 60 s
    changing = Changing(server)
    on_answer(grid, 0, 1, lambda: changing.leave(0, REVOKED), lost=True)
    begun = time.monotonic()
    server.run()
    assert server.record.lines[0]["answered"] == 3 and time.monotonic() - begun < 30


def test_an_answer_that_was_accepted_before_the_revocation_is_taken_away(tmp_path: Path) -> None:
    server, grid = deployed(FedAvg(), tmp_path, rounds=1, clients=4)
    changing = Changing(server)
    look = grid.pull_messages

    def revoked_when_the_last_comes(numbers: Any) -> Any:
        replies = list(look(numbers))
        last = bool(replies) and replies[0].metadata.src_node_id == FIRST_NODE + 3
        if last and unseal(replies[0].content)[0]["do"] == "train":
            changing.leave(0, REVOKED)  # whose answer was looked at before
        return replies

    grid.pull_messages = revoked_when_the_last_comes  # type: ignore[method-assign]
    server.run()
    assert list(server.record.lines[0]["refused"]) == ["n0"]
    assert "n0" not in changing.used()[0]


def test_a_run_goes_on_with_a_renewed_key_and_not_in_another_federation(tmp_path: Path) -> None:
    experiment, data = experiment_of(FedAvg(), make_task(), 2), make_data(clients=3)

    def server_of(nodes: tuple[int, ...], places: tuple[str, ...]) -> Server:
        made, grid = deployed_on(experiment, data, tmp_path)
        made.record.close()
        roster = Roster(nodes, ("a", "b", "c"), None, places)
        return Server(experiment, made.transport.kind, grid, roster, policy=made.transport.policy, out=tmp_path / "run")

    def die(line: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server_of((100, 101, 102), ("x", "y", "z")).run(die)
    with pytest.raises(CheckpointError):
        server_of((100, 101, 102), ("x", "y", "other"))
    again = server_of((100, 999, 102), ("x", "y", "z"))
    again.run()
    assert [line["answered"] for line in again.record.lines] == [3, 2]
