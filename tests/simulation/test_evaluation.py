"""Evaluation of many clients: one pass where they share a model, no wider than needed, never all in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import assert_close, make_data, make_task, method_of
from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError
from fedspan.learn.task import Task
from fedspan.method import Method, Visit
from fedspan.methods import FedAvg, make
from fedspan.simulation import local_transport
from fedspan.simulation.engine import Engine
from fedspan.simulation.record import Record
from fedspan.simulation.result import Result
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.storage import row_table
from fedspan.tree import Tree

pytestmark = pytest.mark.slow  # seconds together: make test has them

SHARED: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fedprox", {"mu": 0.5}),
    ("fedpara", {}),
    ("fedloru", {"rank": 2}),
    ("fedhm", {"rho": (1.0, 3.0)}),
    ("mfedloru", {"rank": 3, "ranks": (3, 1)}),
    ("prism", {"keep": (0.5, 0.8)}),
]
"""Methods whose clients predict with one model, those with ranks with one for each capacity."""


def simulated(method: Method, data: FederatedData, task: Task | None = None, rounds: int = 2, **more: Any) -> Result:
    """A small run in float64, in this process."""
    extra = {k: more.pop(k) for k in ("evaluate",) if k in more}
    chosen = {"participation": 0.6, "batch_size": 8, "workers": 1, "precision": "float64", "evaluate_every": 1}
    settings = Settings(**chosen | more)
    return Simulation(method, task or make_task(), data, rounds=rounds, seed=1, settings=settings, **extra).run()


def numbers(result: Result) -> Tree:
    """All that was measured, clients that have none of a measure as NaN."""
    return {
        "clients": {k: torch.tensor([torch.nan if v is None else v for v in some]).nan_to_num(-1.0).double()
                    for k, some in result.per_client.items()},
        "found": {k: torch.tensor(list(v.values()), dtype=torch.float64) for k, v in result.measures.items()},
    }  # fmt: skip


def apart(patch: pytest.MonkeyPatch, run: Callable[[], Result]) -> Result:
    """The same run with every client judged for itself."""
    with patch.context() as m:
        m.setattr(Engine, "judges_together", lambda *_: False)
        return run()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many examples, empty slots included, each forward pass of an evaluation looked at."""
    seen: list[int] = []
    measures = Task.measures

    def counted(self: Task, output: Tensor, y: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        seen.append(len(y))
        return measures(self, output, y, mask)

    monkeypatch.setattr(Task, "measures", counted)
    return seen


def named_differently(data: FederatedData) -> FederatedData:
    turns = torch.tensor([[0, 1, 2], [1, 2, 0], [2, 1, 0]])
    return replace(data, relabel=turns[torch.arange(data.clients) % 3])


# ------------------------------------------------------------------------------------------------ one pass


@pytest.mark.parametrize(("name", "fields"), SHARED)
def test_one_pass_over_all_clients_equals_one_pass_each(
    name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, passes: list[int]
) -> None:
    data = named_differently(make_data())
    data.test[2] = data.test[2][:0]  # a client without held-out examples

    def run() -> Result:
        return simulated(make(name, lr=0.1, **fields), data)

    together = run()
    few = len(passes)
    passes.clear()
    each = apart(monkeypatch, run)
    assert_close(numbers(together), numbers(each))
    assert together.digest == each.digest and together.bytes == each.bytes
    assert few < len(passes), "the clients were not judged together"


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_metrics_of_predictions_are_the_same_in_one_pass(mapping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, asked = named_differently(make_data()), {"metrics": ["ece", "balanced_accuracy", "roc_auc"]}
    data.test[1] = data.test[1][:1]  # one example has no ROC curve

    def run() -> Result:
        return simulated(make("fedavg", lr=0.1), data, evaluate=asked, mapping=mapping)

    together, each = run(), apart(monkeypatch, run)
    assert_close(numbers(together), numbers(each))
    assert together.evaluation["left_out"] == each.evaluation["left_out"] != {}
    assert together.measures["ece"].keys() >= {"mean", "pooled"}


def test_chunks_of_one_pass_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, passes: list[int]) -> None:
    whole = simulated(make("fedavg", lr=0.1), make_data())
    calls = len(passes)
    monkeypatch.setattr(local_transport, "POOLED_ROWS", 10)
    cut = simulated(make("fedavg", lr=0.1), make_data())
    assert_close(numbers(whole), numbers(cut))
    assert len(passes) - calls > calls == 2


def test_clients_with_one_test_set_and_model_are_judged_once(
    monkeypatch: pytest.MonkeyPatch, passes: list[int]
) -> None:
    apart_data = make_data()
    common = replace(apart_data, test=[apart_data.test[3]] * 7)
    size, sizes = len(common.test[0]), sum(map(len, apart_data.test))
    alike = torch.arange(3).expand(7, 3).clone()
    cases = [
        (common, {}, size),
        (replace(common, relabel=alike), {}, size),
        (named_differently(common), {}, 3 * size),  # three ways to name the classes
        (apart_data, {}, sizes),
        (common, {"private_head": True}, 7 * size),
    ]
    for data, fields, examples in cases:

        def run(data: FederatedData = data, fields: dict[str, Any] = fields) -> Result:
            asked = {"metrics": ["ece"]}
            return simulated(method_of(FedAvg, lr=0.1, **fields), data, rounds=1, mapping="loop", evaluate=asked)

        passes.clear()
        once = run()
        assert sum(passes) == examples
        assert_close(numbers(once), numbers(apart(monkeypatch, run)))


@dataclass(frozen=True, kw_only=True)
class AskingWho(FedAvg):
    """Averaging whose models are disturbed by a client's own key."""

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        size: Tree = tree.map(
            lambda t: t + (visit.key % 7).to(t.dtype) / 10, super().personal(task, client, down, visit)
        )
        return size


class Crowded(nn.Module):
    """A model whose outputs depend on the other examples of a batch, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["asks who", "crowded", "loss of batches", "own head", "fitted first"])
def test_clients_whose_models_differ_are_judged_for_themselves(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method: Method = AskingWho(lr=0.1) if what == "asks who" else make("fedavg", lr=0.1)
    method = {"own head": make("fedper", lr=0.1), "fitted first": make("fedavg-ft", lr=0.1)}.get(what, method)
    task = make_task()
    if what == "crowded":
        task = Task(Crowded(), dtype=torch.float64)
    if what == "loss of batches":
        wide = nn.CrossEntropyLoss()
        task = Task(make_task().module, dtype=torch.float64, loss=lambda o, y: wide(o, y).sqrt(), loss_of="batch")

    def run() -> Result:
        return simulated(method, make_data(), task, mapping="loop", rounds=1)

    found, each = run(), apart(monkeypatch, run)
    assert numbers(found)["clients"]["loss"].tolist() == numbers(each)["clients"]["loss"].tolist()
    monkeypatch.setattr(Engine, "evaluate_together", None)
    run()


# ------------------------------------------------------------------------------------------------ mapped


def test_mapped_evaluation_is_no_wider_than_the_longest_test_part_of_a_chunk(passes: list[int]) -> None:
    data = make_data(clients=6)
    data.test[:] = [np.resize(t, n) for t, n in zip(data.test, (9, 2, 7, 3, 1, 4))]
    found = simulated(make("ditto", lr=0.1), data, rounds=1, mapping="vmap", chunk=2)
    assert passes == [9, 4, 2]  # the largest clients first, two by two
    assert found.per_client["n"] == [9, 2, 7, 3, 1, 4]
    looped = simulated(make("ditto", lr=0.1), data, rounds=1, mapping="loop", chunk=2)
    assert_close(numbers(found), numbers(looped))
    assert sorted(passes[3:]) == [1, 2, 3, 4, 7, 9]


def test_long_test_parts_are_cut_alike_mapped_and_looped(monkeypatch: pytest.MonkeyPatch, passes: list[int]) -> None:
    monkeypatch.setattr(Engine.__dataclass_fields__["evaluation_batch"], "default", 4)
    monkeypatch.setattr(Engine.__init__, "__defaults__", (4, *Engine.__init__.__defaults__[1:]))  # type: ignore[index]
    both = [simulated(make("ditto", lr=0.1), make_data(), rounds=1, mapping=m) for m in ("vmap", "loop")]
    assert max(passes) == 4
    assert_close(numbers(both[0]), numbers(both[1]))


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("name", ["ditto", "cfl", "fedavg"])
def test_rows_are_taken_when_a_chunk_is_handed_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    take, update, evaluate = Record.take, Engine.update, Engine.evaluate
    monkeypatch.setattr(row_table, "_memory_file", lambda size: None)  # rows in a table are not taken at all
    monkeypatch.setattr(Record, "take", lambda *a: (events.append("take"), take(*a))[1])
    monkeypatch.setattr(Engine, "update", lambda *a, **k: (events.append("done"), update(*a, **k))[1])
    monkeypatch.setattr(Engine, "evaluate", lambda *a, **k: (events.append("done"), evaluate(*a, **k))[1])
    monkeypatch.setattr(Engine, "judges_together", lambda *_: False)
    simulated(make(name, lr=0.1), make_data(clients=9), rounds=1, chunk=1, participation=1.0)
    told = "".join(e[0] for e in events)
    assert told == "td" * 9 + "t" + "td" * 9  # train; what the first one has; evaluate


def test_downloads_of_single_clients_are_made_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Result:
        return simulated(make("oracle", lr=0.1), make_data(clients=9), chunk=2)

    whole = run()
    asked: list[int] = []
    download = type(make("oracle")).download
    noted = lambda self, server, ids, *rest: (asked.append(len(ids)), download(self, server, ids, *rest))[1]
    monkeypatch.setattr(type(make("oracle")), "download", noted)
    monkeypatch.setattr(local_transport, "OWN_BYTES", 1)
    cut = run()
    assert_close(numbers(whole), numbers(cut))
    assert whole.bytes == cut.bytes and whole.digest == cut.digest
    assert asked == [5, 1, 2, 2, 2, 2, 1] * 2  # train; evaluate: the first client, then chunk by chunk


def test_the_digest_is_that_of_one_tree_of_everything() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("ditto", {}),
        ("fedhm", {"rho": (1.0, 3.0), "private_head": True}),
        ("fedavg", {}),
    ]
    for name, fields in cases:
        sim = simulated(make(name, lr=0.1, **fields), make_data(clients=12)).simulation
        assert sim is not None
        record = sim.record
        rows = {str(i): record.row(i) for i in range(12)}
        assert record.digest() == tree.digest({"server": record.server, "common": record.common, "clients": rows})


def test_the_digest_holds_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = simulated(make("ditto", lr=0.1), make_data(clients=12)).simulation
    assert sim is not None
    whole, (store,) = sim.record.digest(), sim.record.stores.values()
    taken: list[int] = []
    take = type(store).take
    monkeypatch.setattr(type(store), "take", lambda self, ids: (taken.append(len(ids)), take(self, ids))[1])
    monkeypatch.setattr("fedspan.simulation.record.BLOCK_BYTES", 2 * store.row_bytes)
    assert sim.record.digest() == whole and taken == [2] * 6


def test_memory_that_does_not_hold_one_client_is_refused() -> None:
    task = Task(nn.Linear(200_000, 3), dtype=torch.float64)
    data = FederatedData.from_arrays([(torch.zeros(2, 200_000), torch.tensor([0, 1]))] * 2)
    with pytest.raises(ConfigError, match=r"memory_mb must hold the state of one client, .* 4\.6 MB; .* 5 .* Got 4\."):
        Simulation(make("ditto"), task, data, rounds=1, settings=Settings(memory_mb=4, precision="float64"))


def test_memory_is_for_the_clients_of_all_kinds_together() -> None:
    def kind(width: int) -> Task:
        return Task(nn.Sequential(nn.Linear(5, width), nn.Linear(width, 2), nn.Linear(2, 3)), dtype=torch.float64)

    task = Task.family({"a": kind(10_000), "b": kind(20_000)}, ("a", "b"))
    for memory, on_disk in ((8, [False, False]), (4, [False, True])):  # three clients with 0.6 MB, three with 1.2 MB
        settings = Settings(memory_mb=memory, precision="float64")
        sim = Simulation(make("local"), task, make_data(clients=6), rounds=1, settings=settings)
        assert [store.on_disk for store in sim.record.stores.values()] == on_disk
