"""FedPara and pFedPara: limiting cases, ranks, and what is shared.

W2 frozen at 0 in W1 * (W2 + 1), or at 1 in W1 * W2, is plain low-rank FedAvg; the rank of a product is r squared; ranks
keep to the wanted share of numbers; second factors never leave a client of pFedPara.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import assert_close, assert_same, make_data, make_task, method_of
from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.layers import Plain, Structured, choose, convert, structured
from fedspan.learn.task import Task
from fedspan.method import Converts, Method, Sent, Visit
from fedspan.methods import FedAvg, FedPara, PFedPara, make
from fedspan.methods.fedpara import HadamardForm, factors
from fedspan.models import build
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Tree

STEPS: dict[str, Any] = {"lr": 0.1, "momentum": 0.5}


def run(method: Method, kind: str = "mlp", rounds: int = 3, **settings: Any) -> Simulation:
    chosen = {"participation": 0.6, "batch_size": 8, "epochs": 2, "workers": 1, "precision": "float64"} | settings
    settled = Settings(evaluate_every=100, **chosen)
    sim = Simulation(method, make_task(kind), make_data(kind), rounds=rounds, seed=5, settings=settled)
    sim.run()
    return sim


class Low(Structured):
    """X Yᵀ, by itself."""

    def __init__(self, like: Plain) -> None:
        super().__init__(like)
        o, i = self.shape
        self.X1 = nn.Parameter(like.weight.new_zeros(o, 2))
        self.Y1 = nn.Parameter(like.weight.new_zeros(i, 2))

    def compose(self) -> Tensor:
        return self.X1 @ self.Y1.T


class LowRankFedAvg(FedAvg, Converts):
    """FedAvg of the factors X₁ and Y₁, from where FedPara's start."""

    like: FedPara = method_of(FedPara, rank=2)

    def model(self, task: Task, capacity: Any) -> Task:
        new = task.converted(lambda m: convert(m, choose(task, "all", "T"), Low))
        start = self.like.model(task, None).init()
        return new.converted(lambda m: filled(m, {k: start[k] for k in new.names}))


class LowRankFedAvgPlus(LowRankFedAvg):
    """The same, from where pFedPara's start."""

    like = method_of(PFedPara, rank=2)


def filled(module: nn.Module, params: Tree) -> nn.Module:
    module.load_state_dict(params, strict=False)
    return module


class Frozen:
    """The second factors stay at the given constant: X₂Y₂ᵀ is 0 or 1 everywhere."""

    constant: float

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        start = self.whole(client, down)  # type: ignore[attr-defined]
        second = {k: p for k, p in start.items() if k[-2:] in ("X2", "Y2")}
        for k, p in second.items():
            second[k] = torch.zeros_like(p) + torch.tensor([self.constant, 0.0], dtype=p.dtype)
        free = {k: p for k, p in start.items() if k not in second}
        loss = lambda p, batch: task.loss(p | second, batch)
        theta, h = self.split(task, self.fit(loss, free, visit["train"]) | second)  # type: ignore[attr-defined]
        return {"h": h}, Sent(weight=self.weigh(visit), mean={"theta": theta})  # type: ignore[attr-defined]


class Ones(Frozen, FedPara):
    constant = 1.0


class Zeros(Frozen, PFedPara):
    constant = 0.0


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
@pytest.mark.parametrize(("cls", "low"), [(Ones, LowRankFedAvg), (Zeros, LowRankFedAvgPlus)])
def test_with_a_constant_second_matrix_it_is_plain_low_rank_fedavg(cls: Any, low: Any, mapping: str) -> None:
    a = run(method_of(cls, rank=2, private_head=False, **STEPS), mapping=mapping)
    b = run(method_of(low, **STEPS), mapping=mapping)
    mine = a.record.server["theta"]
    assert_close({k: mine[k] for k in b.record.server["theta"]}, b.record.server["theta"])
    start = b.engine.model(None).init()
    assert float((tree.ravel(b.record.server["theta"]) - tree.ravel(start)).norm()) > 1e-2


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_fedpara_is_fedavg_of_the_converted_model(kind: str) -> None:
    class Converted(FedAvg, Converts):
        def model(self, task: Task, capacity: Any) -> Task:
            return FedPara().model(task, capacity)

    assert_close(
        run(method_of(FedPara, **STEPS), kind).record.server, run(method_of(Converted, **STEPS), kind).record.server
    )


def test_pfedpara_keeps_its_second_factors_and_sends_the_first() -> None:
    sim = run(method_of(PFedPara, private_head=False, **STEPS), "cnn", participation=1.0)
    task = sim.engine.model(None)
    shared, kept = sim.record.server["theta"], sim.record.row(0)["h"]
    assert {k[-2:] for k in kept} == {"X2", "Y2", "T2"}
    assert not set(shared) & set(kept) and set(shared) | set(kept) == set(task.names)
    assert not torch.equal(kept["hidden.X2"], sim.record.row(1)["h"]["hidden.X2"])
    assert_same(run(PFedPara(), "cnn", rounds=0).record.row(0), run(PFedPara(), "cnn", rounds=0).record.row(1))
    both = (method_of(FedPara, **STEPS), method_of(PFedPara, private_head=False, **STEPS))
    whole, half = (run(m, "cnn", rounds=1, participation=1.0).record.progress.totals["up"] for m in both)
    plain = sum(p.numel() for k, p in shared.items() if k[-2:] not in ("X1", "Y1", "T1")) * 8 * 7
    assert 2 * (half - plain) == whole - plain
    assert set(PFedPara(private_head=True).private(task)) == set(kept) | set(task.head)


def test_ranks_of_linear_layers() -> None:
    layer = nn.Linear(784, 200)
    low, high = math.ceil(math.sqrt(200)), 784 * 200 // (2 * 984)
    assert HadamardForm(gamma=0.0).rank_of(layer) == low == 15
    assert HadamardForm(gamma=1.0).rank_of(layer) == high == 79
    assert factors(layer, high) <= layer.weight.numel() < factors(layer, high + 1)
    assert HadamardForm(gamma=0.5).rank_of(layer) == 47
    assert HadamardForm(rank=3).rank_of(layer) == 3
    assert HadamardForm(gamma=1.0).rank_of(nn.Linear(6, 3)) == 2  # never below the rank that allows full rank


@pytest.mark.parametrize("ratio", [0.3, 0.6, 0.9])
def test_ranks_of_convolutions_meet_the_wanted_share(ratio: float) -> None:
    layer = nn.Conv2d(128, 256, 3)
    r = HadamardForm(ratio=ratio).rank_of(layer)
    wanted = ratio * layer.weight.numel()
    assert factors(layer, r) >= wanted > factors(layer, r - 1)
    assert HadamardForm(ratio=0.0).rank_of(layer) == 16
    task = method_of(FedPara, ratio=ratio, layers=("conv3",)).model(
        Task(build("resnet9", (3, 32, 32), 10, width=8)), None
    )
    made = task.module.get_submodule("conv3.conv")
    held = sum(p.numel() for k, p in made.named_parameters() if k != "bias")
    plain = nn.Conv2d(16, 32, 3)
    assert held == factors(plain, HadamardForm(ratio=ratio).rank_of(plain))


def test_only_layers_that_shrink_if_wanted() -> None:
    task = Task(nn.Sequential(nn.Linear(100, 80), nn.Linear(80, 3)))
    assert structured(method_of(FedPara, gamma=0.0, only_smaller=True).model(task, None).module) == ["0"]
    assert structured(method_of(FedPara, gamma=0.0).model(task, None).module) == ["0", "1"]
    with pytest.raises(ConfigError, match="no layer becomes smaller by its factors"):
        method_of(FedPara, only_smaller=True).model(make_task(), None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank must be an integer >= 1"),
        ({"gamma": 1.5}, "gamma must be a number in [0, 1]. Got 1.5"),
        ({"ratio": -0.1}, "ratio must be a number in [0, 1]"),
        ({"init": "zeros"}, "init must be one of"),
        ({"layers": "head"}, "layers must be"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        make("pfedpara", **fields)
    assert message in str(e.value)
