"""Parts of an upload with weights of their own: the same means mapped, looped, on workers and on a grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_grid import deployed, held_by
from torch import Tensor

from conftest import assert_close, assert_same, make_data, make_task
from fedspan.deploy.server.admission import Declared, admit, norm_of
from fedspan.errors import ConfigError, Refused
from fedspan.learn.aggregate import Mean, sums_by_part, weighted_mean
from fedspan.learn.batches import All, Amount
from fedspan.learn.task import Task
from fedspan.method import Abilities, Capacity, Coded, Down, Federation, Lifts, Method, Round, Sent, Visit
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Outer, Tree
from fedspan.wire import Codec, Direction, Rows, pack

DOUBLE = torch.float64
NOBODY = 2
"""The class whose rows have no weight anywhere."""


@dataclass(frozen=True, kw_only=True)
class ClassMeans(Method, Coded, Lifts):
    """m: mean input, by examples; c: a number in a tree, all alike; p: class means, by class counts, coded."""

    sign: float = 1.0

    def codecs(self, round: int) -> Mapping[str, Codec]:
        return {"p": Rows()}

    def plan(self) -> Mapping[str, Amount]:
        return {"all": All()}

    def init_server(self, task: Task, federation: Federation) -> Tree:
        totals = {"c": torch.zeros((), dtype=DOUBLE), "p": torch.zeros(3, dtype=DOUBLE)}
        p = torch.zeros(3, 5, dtype=DOUBLE)
        return {"m": torch.zeros(5, dtype=DOUBLE), "c": {"n": torch.zeros((), dtype=DOUBLE)}, "p": p, "totals": totals}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"m": server["m"]})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        batch = visit["all"].whole()
        member = torch.nn.functional.one_hot(batch.y, 3) * batch.w[:, None]
        n = member.sum(0)
        p = member.T @ batch.x / n.clamp_min(1)[:, None]
        m = (batch.x * batch.w[:, None]).sum(0) / visit.examples
        counts = n * torch.tensor([1.0, 1.0, 0.0], dtype=DOUBLE)
        own = {"c": self.sign * torch.ones_like(visit.examples), "p": counts}
        return client, Sent(visit.examples, mean={"m": m, "c": {"n": visit.examples}, "p": p}, weights=own)

    def lift(self, mean: Tree, shared: Tree, capacity: Capacity) -> Tree:
        return {**mean, "p": 2 * mean["p"]}

    def server_update(self, server: Tree, round: Round) -> Tree:
        return {**round.mean, "totals": dict(round.totals)}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return task.init()


def simulated(method: Method, **settings: Any) -> Simulation:
    chosen = {"precision": "float64", "workers": 1, "participation": 0.6, "evaluate_every": 100} | settings
    sim = Simulation(method, make_task(), make_data(), rounds=2, seed=5, settings=Settings(**chosen))
    sim.run()
    return sim


def expected(sim: Simulation, ids: list[int]) -> Tree:
    """Straight from the definition: Σ w x / Σ w with each part's own w."""
    data = sim.data
    xs = [data.x[torch.from_numpy(data.train[i])] for i in ids]
    ys = [data.y[torch.from_numpy(data.train[i])] for i in ids]
    x, y = torch.cat(xs), torch.cat(ys)
    p = torch.zeros(3, 5, dtype=DOUBLE)
    for c in range(3):
        if c != NOBODY and (y == c).any():
            p[c] = 2 * x[y == c].mean(0)
    sizes = torch.tensor([float(len(v)) for v in xs], dtype=DOUBLE)
    counts = torch.tensor([float((y == c).sum()) if c != NOBODY else 0.0 for c in range(3)], dtype=DOUBLE)
    totals = {"c": torch.tensor(float(len(ids)), dtype=DOUBLE), "p": counts}
    return {"m": x.mean(0), "c": {"n": sizes.mean()}, "p": p, "totals": totals}


def test_every_part_is_averaged_with_its_own_weights() -> None:
    sim = simulated(ClassMeans(), mapping="vmap", participation=1.0)
    assert_close(sim.record.server, expected(sim, list(range(7))))
    assert not sim.record.server["p"][NOBODY].any()  # nobody's row: zero, not NaN


@pytest.mark.parametrize(
    "settings",
    [{"mapping": "loop"}, {"mapping": "vmap", "chunk": 2}, {"mapping": "vmap", "workers": 2, "chunk": 1}],
    ids=["loop", "chunks", "workers"],
)
def test_all_mappings_agree(settings: dict[str, Any]) -> None:
    assert_close(
        simulated(ClassMeans(), mapping="vmap").record.server, simulated(ClassMeans(), **settings).record.server
    )


def test_the_grid_agrees_and_counts_the_same_bytes(tmp_path: Path) -> None:
    server, grid = deployed(ClassMeans(), tmp_path, rounds=2)
    result = server.run()
    settings = Settings(precision="float64", mapping="loop", workers=1, batch_size=8, epochs=2, evaluate_every=100)
    sim = Simulation(ClassMeans(), make_task(), make_data(clients=3), rounds=2, seed=5, settings=settings)
    wanted = sim.run()
    assert not server.transport.refusals
    assert_close(server.record.server, sim.record.server)
    assert result.bytes["names"] == wanted.bytes["names"]
    assert held_by(grid, server, 0).row == {}


def test_weights_are_counted_under_the_name_of_their_part() -> None:
    sim = simulated(ClassMeans(), mapping="loop", participation=1.0)
    up = sim.record.progress.bytes.by_name(Direction.UP)
    assert up["c weights"] == 2 * 7 * 8 and up["p weights"] == 2 * 7 * 3 * 8 and up["m"] == 2 * 7 * 5 * 8


def test_a_negative_weight_is_refused_by_the_simulator() -> None:
    with pytest.raises(Refused, match=r"client \d: the weights of 'c' must lie in 0\.\.1e\+12\. Got -1"):
        simulated(ClassMeans(sign=-1.0), mapping="vmap")


UPLOAD: Tree = {"mean": {"a": torch.ones(2, 3)}, "each": {}, "weights": {"a": torch.tensor([1.0, 0.0])}}


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"a": torch.tensor([1.0, -1.0])}, "weights of 'a' must lie in 0..1e+12. Got [1.0, -1.0]."),
        ({"a": torch.tensor([1.0, 1e30])}, "weights of 'a' must lie in 0..1e+12."),
        ({"a": torch.tensor([1.0, torch.nan])}, "'weights.a' holds NaN or infinity."),
        ({"a": torch.tensor([1.0])}, "'weights.a' must be float32 of shape [2]. Got float32 of shape [1]."),
        ({}, "'weights.a' is missing from the upload."),
        ({"a": torch.ones(2), "b": torch.ones(2)}, "'weights.b' is not part of this method's upload."),
    ],
    ids=["negative", "too-large", "nan", "shape", "missing", "more"],
)
def test_the_gate_refuses_weights_that_are_not_as_declared(weights: Tree, sentence: str) -> None:
    declared = Declared(**UPLOAD)

    def given(upload: Tree) -> Sent:
        return admit(
            4.0, pack(upload), who="client 1", able=Abilities(ClassMeans()), declared=declared, codecs={},
            examples=4, dtype=DOUBLE,
        )  # fmt: skip

    assert_same(given(UPLOAD).weights, UPLOAD["weights"])
    with pytest.raises(Refused) as caught:
        given(UPLOAD | {"weights": weights})
    assert sentence in str(caught.value).replace("/", ".")


def test_an_outlier_is_found_by_what_it_would_add() -> None:
    one = torch.ones((), dtype=DOUBLE)
    sent = Sent(one, mean={"a": torch.ones(4), "b": torch.ones(1)}, weights={"a": torch.tensor(3.0)})
    assert norm_of(sent) == pytest.approx((4 * 9 + 1 + 9) ** 0.5)


def test_partial_sums_add_up_to_the_mean_of_all() -> None:
    g = torch.Generator().manual_seed(0)
    stacked: Tree = {
        "a": torch.randn(6, 3, 2, generator=g, dtype=DOUBLE),
        "o": {"x": Outer(torch.randn(6, 4, generator=g, dtype=DOUBLE), torch.randn(6, 5, generator=g, dtype=DOUBLE))},
    }
    w, own = torch.arange(1.0, 7.0, dtype=DOUBLE), {"o": torch.rand(6, generator=g, dtype=DOUBLE)}
    mean = Mean()
    for part in (slice(0, 2), slice(2, 6)):
        sums, totals = sums_by_part(
            {"a": stacked["a"][part], "o": {"x": Outer(*(f[part] for f in stacked["o"]["x"]))}},
            w[part],
            {"o": own["o"][part]},
            keep_factors=True,
        )
        mean.add(sums, float(w[part].sum()), totals)
    want = weighted_mean({"a": stacked["a"]}, w) | weighted_mean({"o": stacked["o"]}, own["o"])
    assert_close(mean.result(), want)
    assert_close(mean.totals, {"o": own["o"].sum()})


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"z": torch.ones(6)}, "weights must be named after parts of `mean`. Got 'z'"),
        ({"a": torch.ones(6, 2)}, "must have the leading axes of every leaf. Got [2] for 'a' of shape [3, 2]"),
        ({"o": torch.ones(6, 4)}, "a part with an Outer must have one number as its weight"),
    ],
    ids=["unknown", "shape", "outer"],
)
def test_weights_that_fit_no_part_are_an_error_of_the_method(own: Tree, sentence: str) -> None:
    stacked: Tree = {"a": torch.ones(6, 3, 2), "o": Outer(torch.ones(6, 4), torch.ones(6, 4))}
    with pytest.raises(ConfigError) as caught:
        sums_by_part(stacked, torch.ones(6), own)
    assert sentence in str(caught.value)
