"""Runs on a Ray cluster: addresses, rows that stay elsewhere and are lost, and real clusters of two nodes."""

from __future__ import annotations

import builtins
import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.loopback_cluster import inside, usable
from torch import nn

from conftest import method_of
from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError, Divergence
from fedspan.learn.task import Task
from fedspan.methods.ditto import Ditto
from fedspan.simulation.cluster import cluster_transport, ray_connection, ray_workers, remote_rows
from fedspan.simulation.cluster.ray_connection import ClusterError, from_bytes, to_bytes
from fedspan.simulation.cluster.remote_rows import RemoteRows, RowPack, RowPlace, packs
from fedspan.simulation.record import RowsLost
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.simulation.workers import ChunkHandler, Job, JobWindow, Meta, WorkerDied, WorkerError
from fedspan.tree import EMPTY, Tree

SCENARIOS = Path(__file__).resolve().parent.parent / "tools" / "cluster_scenarios.py"

# ------------------------------------------------------------------------------------------- joining


@pytest.mark.parametrize("address", ["", "ray://x:1", "here", "host:0", "host:99999", "a b:6379", "host:6379/x"])
def test_an_address_must_be_one(address: str) -> None:
    with pytest.raises(ClusterError, match="must be auto or HOST:PORT"):
        ray_connection._found(address)


def test_an_address_where_nobody_answers_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with pytest.raises(ClusterError, match=f"nobody answers at 127.0.0.1:{port} .*refused.*ray start --head"):
        ray_connection._try_door(f"127.0.0.1:{port}")


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 400 Bad Request\r\n", b""])
def test_what_answers_must_be_ray(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            guest, _ = door.accept()
            with guest, contextlib.suppress(ConnectionError):  # the other side has heard enough
                guest.sendall(answer)
                guest.shutdown(socket.SHUT_WR)
                while guest.recv(100):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ClusterError, match="is not Ray"):
            ray_connection._try_door(f"127.0.0.1:{door.getsockname()[1]}")
        thread.join(10)


def test_silence_at_an_address_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "DOOR_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as door, pytest.raises(ClusterError, match="nobody answers"):
        ray_connection._try_door(f"127.0.0.1:{door.getsockname()[1]}")


def test_without_ray_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return usual(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'fedspan\[ray\]'"), ray_connection.joined("auto"):
        pass


# ------------------------------------------------------------------------------------------- what is sent


def test_trees_travel_as_bytes_and_come_back_in_memory_of_their_own() -> None:
    data: Tree = {
        "a": {"w": torch.arange(6.0, dtype=torch.float64).view(2, 3).T, "none": {}},
        "half": torch.tensor([1.5, -2.0]).bfloat16(),
        "n": torch.tensor(7),
        "yes": torch.tensor([True, False]),
        "nothing": torch.empty(0, 4),
    }
    told = to_bytes(data)
    back = from_bytes(told)
    assert tree.digest(back) == tree.digest(data) and back["a"]["none"] == {}
    assert {p: t.shape for p, t in tree.items(back)} == {p: t.shape for p, t in tree.items(data)}
    back["half"].zero_()
    assert data["half"][0] == 1.5


def test_rows_are_packed_by_a_rule_on_sizes() -> None:
    assert packs(3, 1 << 20) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert packs(5, 64 << 10) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert packs(100, 40) == [slice(0, 100)]


def test_whoever_takes_a_job_takes_what_suits_it_and_leaves_what_others_wait_for() -> None:
    window = JobWindow("abcd", 4, 4)
    assert window.take({"a": 0.1, "b": 0.9, "c": 0.9, "d": -1.0}.__getitem__) == (1, "b")
    assert window.take({"a": -1.0, "c": -1.0, "d": -1.0}.__getitem__) is None
    assert window.take() == (0, "a")


def test_places_of_rows_are_replaced_and_taken_back() -> None:
    rows = RemoteRows(Counter())
    old, new = (RowPlace(RowPack(k, 8, "node"), 0) for k in "ab")
    rows.stage([3], [old])
    assert rows.place(3) is None
    rows.accept()
    rows.settle()
    rows.stage([3, 4], [new, new])
    rows.accept()
    assert rows.place(3) == rows.place(4) == new
    rows.undo()
    assert rows.place(3) == old and rows.place(4) is None
    rows.stage([3], [new])
    rows.settle()
    rows.accept()
    assert rows.place(3) == old


# ------------------------------------------------------------------------------------------- rows that are lost


class PretendedPool:
    """Keeps rows as a cluster does, in this process; those of a node that is `gone` are lost."""

    home = "home"
    gone: set[str] = set()

    def __init__(self, handler: ChunkHandler, *_: Any) -> None:
        self.handler = handler
        self.shared: dict[str, Tree] = {}

    def share(self, name: str, data: Tree) -> None:
        self.shared[name] = data

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Meta, Tree]]:
        for k, job in enumerate(jobs):
            data = dict(job.data)
            if job.rows:
                blocks = [place and fetched([place.pack])[0][place.index] for place in job.rows]
                data["kept"] = blocks
            meta, answer = self.handler(job.meta, data, self.shared.get(job.shared, EMPTY))
            if job.packs and "rows" in answer:
                rows, node = answer.pop("rows"), f"node {k % 2}"
                made = [RowPack((node, rows[part]), rows[part].nbytes, node) for part in job.packs]
                answer["rows"] = [RowPlace(p, n) for p in made for n in range(len(p.reference[1]))]
            yield meta, answer

    def close(self) -> None:
        pass


def fetched(wanted: list[RowPack]) -> list[Any]:
    if any(pack.reference[0] in PretendedPool.gone for pack in wanted):
        raise RowsLost("Cluster: private states of clients were on a node that is gone")
    return [pack.reference[1] for pack in wanted]


class PretendedRay:
    """Puts objects where `fetched` finds them."""

    def put(self, block: Any) -> Any:
        return "home", np.array(block)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[PretendedPool]:
    monkeypatch.setattr(cluster_transport, "RayPool", PretendedPool)
    monkeypatch.setattr(remote_rows, "_fetched", fetched)
    monkeypatch.setattr(remote_rows, "the_ray", PretendedRay)
    monkeypatch.setattr(ray_connection, "the_ray", lambda: type("Joined", (), {"is_initialized": lambda: True}))
    PretendedPool.gone = set()
    return PretendedPool


def simulation(rounds: int = 7, lr: float = 0.1, **how: Any) -> Simulation:
    draw = torch.Generator().manual_seed(3)
    clients = [
        (torch.randn(24 + 4 * i, 6, generator=draw), torch.randint(0, 3, (24 + 4 * i,), generator=draw))
        for i in range(6)
    ]
    more = {k: how.pop(k) for k in ("out", "cluster", "evaluate") if k in how}
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    settings = Settings(batch_size=8, chunk=2, participation=0.6, evaluate_every=2, workers=1, **how)
    return Simulation(
        method_of(Ditto, lr=lr, safeguard=False),
        Task(net),
        FederatedData.from_arrays(clients),
        rounds=rounds,
        settings=settings,
        **more,
    )


def test_rows_elsewhere_give_the_numbers_of_rows_at_home(pretended: type[PretendedPool]) -> None:
    here, there = simulation().run(), simulation(cluster="x:1").run()
    assert there.digest == here.digest and there.per_client == here.per_client
    assert there.cluster["bytes"]["rows for checkpoints"] > 0


@pytest.mark.parametrize("saved", [True, False], ids=["directory", "memory"])
def test_a_run_goes_back_to_its_checkpoint_when_rows_are_lost(
    pretended: type[PretendedPool], saved: bool, tmp_path: Path
) -> None:
    heard: list[int] = []

    def lose(line: dict[str, Any]) -> None:
        heard.append(line["round"])
        pretended.gone = {"node 1"} if line["round"] == 5 and heard.count(5) == 1 else set()

    metrics = {"metrics": ["balanced_accuracy"]}
    how: dict[str, Any] = {"checkpoint_every": 3, "checkpoint_seconds": 0.0, "evaluate": metrics}
    here = simulation(**how).run()
    run = simulation(cluster="x:1", **how, **({"out": tmp_path} if saved else {}))
    go_back, returns = run.record.go_back, []

    def noted() -> None:
        pretended.gone = set()  # another node has taken its place
        go_back()
        returns.append(run.record.progress.round)

    run.record.go_back = noted  # type: ignore[method-assign]
    there = run.run(lose)
    assert returns == [3 if saved else 0]
    assert there.digest == here.digest and there.measures == here.measures
    assert [x["bytes"] for x in there.curve] == [x["bytes"] for x in here.curve]
    assert heard == list(range(1, 8))  # nobody hears of a round twice
    assert sum("are computed again, with the same numbers" in m for m in there.messages) == 1
    if saved:
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(x)["round"] for x in lines] == list(range(1, 8))
        history, same = run.record.history, simulation(**how)
        same.run()
        assert history is not None and same.record.history is not None
        for name, values in same.record.history.arrays().items():
            np.testing.assert_array_equal(history.arrays()[name], values)


def test_rows_that_are_lost_again_and_again_end_the_run_in_one_sentence(pretended: type[PretendedPool]) -> None:
    def lose(_: dict[str, Any]) -> None:
        pretended.gone = {"node 0", "node 1"}

    with pytest.raises(RowsLost, match="6 times after round 0; the run can be resumed"):
        simulation(cluster="x:1").run(lose)


def test_learning_rates_halved_after_a_checkpoint_are_halved_again_from_it(
    pretended: type[PretendedPool], tmp_path: Path
) -> None:
    how: dict[str, Any] = {"on_divergence": "halve", "lr": 1e30, "rounds": 3}
    with pytest.raises(Divergence) as here:
        simulation(**how).run()
    run, calls = simulation(cluster="x:1", **how), []
    usual = run.transport.take_back

    def take_back() -> None:
        usual()
        calls.append(run.record.progress.halvings)
        if len(calls) == 2:  # after one halving, which the state to go back to has not seen
            raise RowsLost("Cluster: private states of clients were on a node that is gone")

    run.transport.take_back = take_back  # type: ignore[method-assign]
    with pytest.raises(Divergence) as there:
        run.run()
    assert str(there.value) == str(here.value) and calls == [0, 1, 0, 1, 2, 3]
    assert run.method.lr == pytest.approx(1e30 / 8)


def test_the_state_of_a_client_can_be_read_while_it_is_elsewhere(pretended: type[PretendedPool]) -> None:
    run, same = simulation(cluster="x:1"), simulation()
    seen: list[str] = []
    run.run(lambda _: seen.append(tree.digest({str(i): run.record.row(i) for i in range(6)})))
    want: list[str] = []
    same.run(lambda _: want.append(tree.digest({str(i): same.record.row(i) for i in range(6)})))
    assert seen == want and len(set(seen)) == 7


def test_a_run_is_resumed_with_rows_that_the_cluster_has_not(pretended: type[PretendedPool], tmp_path: Path) -> None:
    simulation(rounds=3, cluster="x:1", out=tmp_path).run()
    assert simulation(cluster="x:1", out=tmp_path).run().digest == simulation().run().digest


# ------------------------------------------------------------------------------------------- the pool


N0, N1 = "a" * 56, "b" * 56  # as Ray names nodes


class Reference:
    """What a call gives at once: its value, or the error that `get` raises."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def hex(self) -> str:
        return str(id(self))


class SmallRay:
    """A cluster in this process: calls are computed when they are made, and answers come last first."""

    import ray.exceptions as exceptions

    def __init__(self, cpus: dict[str, int]) -> None:
        self.cpus, self.calls, self.killed = cpus, 0, 0
        self.dies: set[int] = set()

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": n, "Alive": True, "Resources": {"CPU": c}} for n, c in self.cpus.items()]

    def get_runtime_context(self) -> Any:
        return type("Context", (), {"get_node_id": lambda _: N0})()

    def put(self, value: Any) -> Reference:
        return Reference(value)

    def get(self, wanted: Any, timeout: float | None = None) -> Any:
        if isinstance(wanted, list):
            return [self.get(one) for one in wanted]
        if isinstance(wanted.value, Exception):
            raise wanted.value
        return wanted.value

    def wait(self, wanted: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return (wanted[::-1], []) if num_returns == len(wanted) else (wanted[-1:], wanted[:-1])

    def kill(self, _: Any) -> None:
        self.killed += 1

    def remote(self, cls: Any) -> Any:
        small = self

        class Handle:
            def __init__(self, *arguments: Any) -> None:
                self.actor = cls(*arguments)
                self.about = type("Call", (), {"remote": lambda _: Reference(self.actor.about())})()
                self.work = self

            def options(self, num_returns: int) -> Any:
                def call(*arguments: Any) -> Any:
                    small.calls += 1
                    if small.calls in small.dies:
                        found: list[Any] = [small.exceptions.ActorDiedError()] * num_returns
                    else:
                        made = self.actor.work(*arguments)
                        found = list(made) if num_returns > 1 else [made]
                    references = [Reference(value) for value in found]
                    return references if num_returns > 1 else references[0]

                return type("Options", (), {"remote": staticmethod(call)})()

        return type("Class", (), {"options": lambda _, **how: type("Made", (), {"remote": staticmethod(Handle)})()})()


@pytest.fixture
def small_ray(monkeypatch: pytest.MonkeyPatch) -> SmallRay:
    made = SmallRay({N0: 1, N1: 2})
    for module in (ray_connection, ray_workers, remote_rows):
        monkeypatch.setattr(module, "the_ray", lambda: made)
    monkeypatch.setattr(ray_workers, "LOOK_SECONDS", 0.0)
    return made


def handle(meta: Meta, data: Tree, shared: Tree) -> tuple[Meta, Tree]:
    if meta.get("do") == "crash":
        raise KeyError("no such layer")
    if meta.get("do") == "refuse":
        raise Divergence("client 3 left the finite numbers")
    rows = {"rows": np.full((2, 4), meta["k"], np.uint8)} if meta.get("do") == "train" else {}
    return {"k": meta["k"], "kept": data.get("kept")}, {"sum": data["x"].sum() + shared["bias"], **rows}


def jobs(number: int, **more: Any) -> Iterator[Job]:
    for k in range(number):
        yield Job({"k": k, **more}, {"x": torch.full((3,), float(k))}, "a")


def pool_of(told: list[str]) -> ray_workers.RayPool:
    pool = ray_workers.RayPool(handle, told=told.append)
    pool.share("a", {"bias": torch.tensor(1.0)})
    return pool


def sums(results: Iterable[tuple[Meta, Tree]]) -> list[float]:
    return [float(answer["sum"]) for _, answer in results]


def test_answers_come_in_order_from_whichever_actor_and_chunks_of_dead_ones_are_repeated(small_ray: SmallRay) -> None:
    told: list[str] = []
    pool = pool_of(told)
    small_ray.dies = {2, 5, 6}
    assert sums(pool.run(jobs(20))) == [3.0 * k + 1 for k in range(20)]
    assert len(told) == 3 and pool.facts.deaths == 3 and small_ray.killed == 3
    assert pool.facts.nodes.keys() == {N0, N1}
    pool.share("a", {"bias": torch.tensor(-1.0)})
    assert sums(pool.run(jobs(4))) == [3.0 * k - 1 for k in range(4)]


def test_answers_that_nobody_waits_for_any_more_are_not_taken_for_later_ones(small_ray: SmallRay) -> None:
    pool = pool_of([])
    some = pool.run(jobs(20))
    next(some)
    some.close()  # type: ignore[attr-defined]
    pool.share("a", {"bias": torch.tensor(5.0)})
    assert sums(pool.run(jobs(9))) == [3.0 * k + 5 for k in range(9)]


def test_a_chunk_that_ends_actor_after_actor_is_given_up(small_ray: SmallRay) -> None:
    small_ray.dies = set(range(1, 1000))
    with pytest.raises(WorkerDied, match="5 actors of the cluster ended unexpectedly on the same chunk"):
        list(pool_of([]).run(jobs(3)))


def test_errors_of_a_chunk_are_raised_as_they_are(small_ray: SmallRay) -> None:
    with pytest.raises(Divergence, match="client 3 left"):
        list(pool_of([]).run(jobs(3, do="refuse")))
    with pytest.raises(WorkerError, match="KeyError: 'no such layer'"):
        list(pool_of([]).run(jobs(3, do="crash")))


def test_new_rows_stay_and_go_to_whoever_has_them(small_ray: SmallRay) -> None:
    pool = pool_of([])
    first = [Job(j.meta, j.data, "a", [None, None], [slice(0, 2)]) for j in jobs(6, do="train")]
    places = [answer["rows"] for _, answer in pool.run(first)]
    assert {p.pack.node for some in places for p in some} == {N0, N1}
    assert all(some[0].pack is some[1].pack and [p.index for p in some] == [0, 1] for some in places)
    again = [Job(j.meta, j.data, "a", some) for j, some in zip(jobs(6), places)]
    for k, (meta, _) in enumerate(pool.run(again)):
        assert [row.tolist() for row in meta["kept"]] == [[k] * 4] * 2
    assert pool.facts.traffic["rows between nodes"] == 0
    mixed = [Job({"k": 9}, {"x": torch.zeros(3)}, "a", [some[0] for some in places])]
    ((meta, _),) = pool.run(mixed)
    assert [row[0] for row in meta["kept"]] == list(range(6)) and pool.facts.traffic["rows between nodes"] > 0


def test_rows_that_are_gone_are_said_to_be_lost(small_ray: SmallRay) -> None:
    gone = RowPack(Reference(small_ray.exceptions.ObjectLostError("0" * 56, None, "")), 8, N1)
    lost = [Job({"k": 0}, {"x": torch.zeros(3)}, "a", [RowPlace(gone, 0)])]
    with pytest.raises(RowsLost, match="were on a node that is gone"):
        list(pool_of([]).run(lost))


def test_a_cluster_without_cpus_is_left_in_one_sentence(small_ray: SmallRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "WAIT_SECONDS", 0.1)
    small_ray.cpus = {N0: 0}
    with pytest.raises(ClusterError, match="no CPU is left to compute on"):
        list(pool_of([]).run(jobs(2)))


# ------------------------------------------------------------------------------------------- nodes that differ


def test_machines_that_differ_are_said_once_and_recorded() -> None:
    said: list[str] = []
    pool = ray_workers.RayPool.__new__(ray_workers.RayPool)
    pool.told, pool.facts, pool._nodes = said.append, ray_workers.ClusterFacts(), {"a": 2, "b": 4, "c": 4}
    here = ray_workers.versions()
    for node in "abcc":
        pool._note_node(node, here if node == "a" else here | {"cpu": "another", "torch": "1.0"})
    assert len(said) == 2 and "torch 1.0 instead of" in said[0] and "cpu another instead of" in said[0]
    machines = pool.facts.to_json()["machines"]
    assert [(m["nodes"], m["cpus"], m["versions"]["torch"]) for m in machines] == [(1, 2, here["torch"]), (2, 4, "1.0")]


# ------------------------------------------------------------------------------------------- real clusters


def scenario(name: str, seconds: float = 280) -> Any:
    if why := usable():
        pytest.skip(why)
    done = inside(SCENARIOS, name, seconds=seconds)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_nodes_give_the_bits_of_local_workers() -> None:
    found = scenario("methods")
    machines = found.pop("machines")
    assert len(found) == 6 and all(found.values()), found
    assert sum(m["nodes"] for m in machines) == 2


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_actor_killed_ten_times_changes_nothing_and_its_rows_outlive_it() -> None:
    found = scenario("actor")
    assert found["same"] and found["killed"] == 10 and found["cluster"]["actors_lost"] == 10
    assert found["returns"] == 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_node_killed_in_a_round_changes_nothing() -> None:
    found = scenario("node")
    assert found["same"] and found["heard"] == found["lines"] == list(range(1, 11))
    assert any("its chunk was repeated" in m for m in found["messages"])
    assert any("rounds from 4 on are computed again" in m for m in found["messages"])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_cluster_that_shrinks_to_nothing_ends_a_run_in_one_sentence_and_it_is_resumed() -> None:
    found = scenario("nothing")
    assert "no CPU is left to compute on" in found["said"] and found["same"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_node_that_joins_later_takes_part() -> None:
    found = scenario("joining")
    assert found["same"] and sum(m["nodes"] for m in found["machines"]) == 2


@pytest.mark.long
@pytest.mark.timeout(300)
def test_whole_runs_are_spread_and_those_of_a_lost_node_begun_anew() -> None:
    found = scenario("whole_runs")
    assert found["code"] == 0, found["output"]
    assert found["runs"] == 8 and found["same"] and found["again"] == 8


@pytest.mark.long
@pytest.mark.timeout(300)
def test_tables_and_trials_are_the_same_on_a_cluster() -> None:
    found = scenario("studies")
    assert found["here"] == found["there"] and found["here"]["codes"] == [0, 0]
    assert len(found["here"]["runs"]) >= 8 and len(found["here"]["diverged"]) == 2
