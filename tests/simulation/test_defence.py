"""The defence: changes are clipped and weights capped, the same mapped, looped, on workers, on a grid and resumed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import assert_same_run, deployed_on, experiment_of
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import assert_close, assert_same, make_data, make_task
from fedspan.config import RunConfig, from_dict, to_toml
from fedspan.deploy.experiment import Experiment, read_config, with_defence
from fedspan.errors import CheckpointError, ConfigError
from fedspan.method import Abilities, Method, Sent
from fedspan.methods import make
from fedspan.simulation import defence
from fedspan.simulation.defence import WEIGHT, Defence, DefenceHistory, Measured
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Outer, Tree

TIGHT = Defence(rule="clip", quantile=0.4, window=2, most_weight=1.2)
"""Binds in every round."""

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedrep": {},
    "pfl-mf": {"rank": 2},
    "pfl-mf full": {"rank": 2, "wire": "full"},
    "pfl-mf-paper": {"rank": 2},
    "fedproto": {},
    "ifca": {"clusters": 2},
    "fedara": {},
}
"""A mean, a private part, factors, sums, an `Outer`, weights of parts, single uploads, codecs and ranks."""


def method_named(name: str) -> Method:
    return make(name.partition(" ")[0], **METHODS[name])


def simulation(method: Method, guard: Defence | None = TIGHT, rounds: int = 3, **chosen: Any) -> Simulation:
    out = chosen.pop("out", None)
    values = {"batch_size": 8, "epochs": 2, "precision": "float64", "evaluate_every": 100, "workers": 1} | chosen
    task, data = make_task(), make_data(clients=5)
    return Simulation(method, task, data, rounds=rounds, seed=5, settings=Settings(**values), out=out, defence=guard)


@pytest.mark.parametrize("name", METHODS)
def test_mapped_looped_and_on_a_grid_alike(name: str, tmp_path: Path) -> None:
    method = method_named(name)
    mapped, looped = (simulation(method, rounds=2, mapping=m) for m in ("vmap", "loop"))
    mapped.run()
    expected = looped.run()
    assert_close(mapped.record.server, looped.record.server)
    experiment = replace(experiment_of(method, make_task(), 2), defence=TIGHT)
    server, grid = deployed_on(experiment, looped.data, tmp_path)
    result = server.run()
    assert_same_run(looped, expected, server, grid, result)
    lines = zip(looped.record.lines, server.record.lines)
    assert all(a["defence"]["bounds"] == pytest.approx(b["defence"]["bounds"]) for a, b in lines)
    cut = [(line["defence"]["clipped"], line["defence"]["capped"]) for line in looped.record.lines]
    assert cut == [(line["defence"]["clipped"], line["defence"]["capped"]) for line in server.record.lines]
    assert cut[-1] != (0, 0)


@pytest.mark.parametrize("name", ["fedavg", "pfl-mf"])
def test_one_client_at_a_time_gives_the_bits_of_the_grid(name: str, tmp_path: Path) -> None:
    method = method_named(name)
    alone = simulation(method, mapping="loop", chunk=1)
    alone.run()
    experiment = replace(experiment_of(method, make_task(), 3), defence=TIGHT)
    server, _ = deployed_on(experiment, alone.data, tmp_path)
    server.run()
    assert_same(alone.record.server, server.record.server)
    assert [x["defence"]["bounds"] for x in alone.record.lines] == [x["defence"]["bounds"] for x in server.record.lines]


@pytest.mark.parametrize("name", ["fedavg", "fedproto"])
def test_workers_and_resuming_change_no_bit(name: str, tmp_path: Path) -> None:
    method = method_named(name)
    whole = simulation(method, rounds=4, chunk=2)
    expected = whole.run().digest
    assert simulation(method, rounds=4, chunk=2, workers=2).run().digest == expected
    simulation(method, rounds=2, chunk=2, out=tmp_path / "run").run()
    again = simulation(method, rounds=4, chunk=2, out=tmp_path / "run")
    assert again.record.progress.usual and again.run().digest == expected
    assert again.record.progress.usual == whole.record.progress.usual


@pytest.mark.long
def test_spawned_workers_change_no_bit() -> None:
    expected = simulation(make("fedavg"), rounds=2, chunk=2).run().digest
    assert simulation(make("fedavg"), rounds=2, chunk=2, workers=2, start_method="spawn").run().digest == expected


@pytest.mark.parametrize("name", METHODS)
def test_bounds_that_never_bind_change_no_bit(name: str) -> None:
    method = method_named(name)
    wide, off = simulation(method, Defence(rule="clip", window=100), rounds=2), simulation(method, None, rounds=2)
    first = simulation(method, Defence(rule="clip"), rounds=1)
    first.run()
    wide.record.progress.usual = [{key: [1e9] * 1000 for key in first.record.progress.usual[0]}]
    assert wide.run().digest == off.run().digest
    assert all(line["defence"]["clipped"] == line["defence"]["capped"] == 0 for line in wide.record.lines)
    assert "defence" not in off.record.lines[0]


# ---------------------------------------------------------------------------------------------------- single uploads

ABLE = Abilities(make("fedavg"))
numbers = st.floats(-1e6, 1e6, allow_subnormal=True)


def sent_of(values: list[float], weight: float = 4.0) -> tuple[Sent, Tree]:
    """An upload of every kind of part, and the download before it."""
    x = torch.tensor(values, dtype=torch.float64).reshape(3, 2)
    sent = Sent(
        torch.tensor(weight, dtype=torch.float64),
        mean={"theta": {"a": x, "b": x[0]}, "g": 3 * x, "p": x, "k": torch.arange(3)},
        each={"o": Outer(x[:, 0], x[0])},
        weights={"p": torch.tensor([1.0, 0.0, 5.0], dtype=torch.float64)},
    )
    down = {"theta": {"a": torch.ones(3, 2, dtype=torch.float64), "b": torch.zeros(7)}, "p": torch.zeros_like(x)}
    return sent, down


@settings(max_examples=60, deadline=None)
@given(st.lists(numbers, min_size=6, max_size=6), st.floats(1e-9, 1e9), st.floats(1e-3, 1e3))
def test_nothing_exceeds_its_bound(values: list[float], weight: float, bound: float) -> None:
    sent, down = sent_of(values, weight)
    before = defence.measure(ABLE, sent, down)
    bounds = dict.fromkeys(before.values, bound)
    shares = before.shares(bounds)
    after = defence.cut(ABLE, sent, down, shares)
    for key, value in defence.measure(ABLE, after, down).values.items():
        assert value <= bound * (1 + 1e-9) + 1e-9 * max(map(abs, [*values, 1.0])), key
        if key not in shares:
            assert value == before.values[key]
    assert torch.equal(after.mean["k"], sent.mean["k"])  # integers are no change
    again = defence.cut(ABLE, sent, down, {})
    assert_same(again._asdict(), sent._asdict())


def test_what_is_judged_is_the_change() -> None:
    sent, down = sent_of([1.0, 1.0, 1.0, 1.0, 1.0, 4.0])
    found = defence.measure(ABLE, sent, down).values
    assert found["theta"] == pytest.approx(math.sqrt(9 + 2))  # one entry moved by 3; `b` has another shape: as it is
    assert found["g"] == pytest.approx(3 * math.sqrt(5 + 16))  # not in the download: as it is
    assert found["p"] == pytest.approx(math.sqrt(2 + 17))  # its second row weighs nothing
    assert found["o"] == pytest.approx(math.sqrt(3) * math.sqrt(2))  # of the matrix
    assert found[WEIGHT] == 4.0 and found["weight of p"] == 6.0
    half = defence.cut(ABLE, sent, down, {"theta": 0.5, "o": 0.5, WEIGHT: 0.25, "weight of p": 0.5})
    assert half.mean["theta"]["a"][2, 1] == 2.5 and half.mean["theta"]["a"][0, 0] == 1.0
    assert torch.equal(half.mean["theta"]["b"], sent.mean["theta"]["b"] / 2) and half.weight == 1.0
    assert torch.equal(half.each["o"].a, sent.each["o"].a / 2) and torch.equal(half.each["o"].b, sent.each["o"].b)
    assert half.weights["p"].tolist() == [0.5, 0.0, 2.5] and torch.equal(half.mean["g"], sent.mean["g"])


def test_a_change_beyond_all_numbers_is_dropped() -> None:
    top = torch.finfo(torch.float64).max
    sent = Sent(torch.tensor(1.0), mean={"theta": torch.full((2,), top, dtype=torch.float64)})
    down = {"theta": torch.full((2,), -top, dtype=torch.float64)}
    measured = defence.measure(ABLE, sent, down)
    shares = measured.shares({"theta": 1.0})
    assert measured.values["theta"] == math.inf and shares == {"theta": 0.0}
    assert torch.equal(defence.cut(ABLE, sent, down, shares).mean["theta"], down["theta"])
    history = DefenceHistory(TIGHT, [])
    history.note([measured])
    assert history.rounds == [{WEIGHT: [1.0]}]  # infinity is not remembered


def test_single_precision_differences_keep_their_digits() -> None:
    base = torch.full((4,), 1e4)
    sent = Sent(torch.tensor(1.0), mean={"theta": base + torch.tensor([0.0, 1.0, 0.0, 0.0])})
    assert defence.measure(ABLE, sent, {"theta": base}).values["theta"] == pytest.approx(1.0)
    assert defence.cut(ABLE, sent, {"theta": base}, {"theta": 0.5}).mean["theta"].tolist() == [1e4, 1e4 + 0.5, 1e4, 1e4]


def test_clusters_are_compared_with_the_model_that_was_chosen() -> None:
    method = make("ifca", clusters=2)
    down = {"theta": {"w": torch.tensor([[0.0, 0.0], [5.0, 5.0]])}}
    sent = Sent(torch.tensor(1.0), each={"theta": {"w": torch.tensor([5.0, 6.0])}, "s": torch.tensor([0.0, 1.0])})
    assert defence.measure(Abilities(method), sent, down).values["theta"] == 1.0


# ---------------------------------------------------------------------------------------------------- rounds


def of(**values: float) -> Measured:
    return Measured(values)


def test_bounds_come_from_the_rounds_before_and_else_from_the_round() -> None:
    guard = Defence(rule="clip", quantile=0.5, window=2, most_weight=3.0)
    history = DefenceHistory(guard, [])
    first = [of(theta=x, weight=2.0) for x in (1.0, 2.0, 9.0)]
    assert history.before == {} and history.with_round(first) == {"theta": 2.0, "weight": 6.0}
    history.note(first)
    second = DefenceHistory(guard, history.rounds)
    later = [of(theta=100.0, weight=2.0, new=1.0), of(theta=1.0, weight=2.0, new=0.0), of(new=3.0), of(new=8.0)]
    assert second.with_round(later) == {"theta": 2.0, "weight": 6.0, "new": 3.0}  # what was zero says nothing
    for _ in range(3):
        second.note([of(theta=4.0)])
    assert second.rounds == [{"theta": [4.0]}, {"theta": [4.0]}]
    second.note([])
    assert len(second.rounds) == 2
    assert guard.bounds([{"theta": [1.0, 5.0]}]) == {}  # two say too little


def test_weights_are_capped_by_the_median() -> None:
    sim = simulation(make("fedavg"), Defence(rule="clip", most_weight=1.0), rounds=1)
    sim.run()
    sizes = sorted(len(rows) for rows in sim.data.train)
    facts = sim.record.lines[0]["defence"]
    assert facts["bounds"][WEIGHT] == np.median(sizes)
    assert facts["capped"] == sum(n > np.median(sizes) for n in sizes) == 2
    guard = Defence(rule="clip", most_weight=2.0)
    assert guard.capped_sizes(np.array([3, 4, 5, 10**7, 0])).tolist() == [3, 4, 5, 9, 0]
    assert guard.capped_sizes(np.array([3, 10**7])).tolist() == [3, 10**7]
    assert Defence().capped_sizes(np.array([3, 4, 10**7])).tolist() == [3, 4, 10**7]


def test_the_run_directory_belongs_to_its_defence(tmp_path: Path) -> None:
    simulation(make("fedavg"), rounds=1, out=tmp_path).run()
    with pytest.raises(CheckpointError, match="defence"):
        simulation(make("fedavg"), Defence(rule="clip"), rounds=1, out=tmp_path)


@pytest.mark.parametrize("damage", [{"theta": [1.0]}, [3], [{"theta": [-1.0]}], [{"theta": ["x"]}]])
def test_norms_that_no_run_wrote_are_refused(damage: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^Checkpoint: what it holds of recent norms is damaged\."):
        DefenceHistory(TIGHT, damage)


# ---------------------------------------------------------------------------------------------------- the file


def config(**section: Any) -> RunConfig:
    return from_dict({"rounds": 1, **({"defence": section} if section else {})})


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"rule": "krum"}, "Defence: rule must be one of 'none', 'clip'. Got 'krum'."),
        ({"quantile": 0.0}, "Defence: quantile must be a number in (0, 1]. Got 0.0."),
        ({"quantile": 1.5}, "Defence: quantile must be a number in (0, 1]. Got 1.5."),
        ({"window": 0}, "Defence: window must be an integer >= 1. Got 0."),
        ({"most_weight": 0.5}, "Defence: most_weight must be a number in [1, inf]. Got 0.5."),
        ({"rules": "clip"}, "Defence: unknown key 'rules'. Did you mean 'rule'?"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as e:
        config(**section)
    assert str(e.value) == sentence
    with pytest.raises(ConfigError, match=r"^Config: defence must be a section"):
        from_dict({"defence": "clip"})


def test_the_section_is_part_of_the_identity_and_deployed_files_have_it() -> None:
    silent, off, on = config(), config(rule="none"), config(rule="clip")
    assert silent.identity() == off.identity() != on.identity()
    assert "defence" not in silent.to_dict() and from_dict(on.to_dict()) == on
    assert with_defence(silent) == on and with_defence(off) == off
    assert read_config(to_toml(with_defence(silent))).defence == Defence(rule="clip")
    key = lambda c: Experiment(make("fedavg"), make_task(), 0, c.train, 1, "x", c.recorded()).key
    assert key(silent) == key(off) != key(on)
    assert from_dict({}, ["defence.rule=clip", "defence.window=7"]).defence == Defence(rule="clip", window=7)
