"""The small blocks: keyed random numbers, summaries, settings, who takes part, and the same numbers twice."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from torch import nn
from torch.func import vmap

from conftest import assert_same, make_data, make_task, method_of
from fedspan import randomness
from fedspan.errors import ConfigError
from fedspan.learn.folded import has_folded_form
from fedspan.learn.task import Task
from fedspan.method import Method
from fedspan.method.fields import build
from fedspan.methods import FedAvg, FedRep, PflMf, name_of
from fedspan.randomness import fold, generator, key, normal, number, torch_seed, uniform
from fedspan.simulation import evaluation
from fedspan.simulation.engine import choose_mapping, chunk_cuts, chunk_size
from fedspan.simulation.identity import of_settings
from fedspan.simulation.settings import Settings, dropped, sample
from fedspan.simulation.simulator import Simulation

FAST = hypothesis(deadline=None, max_examples=40, database=None)

# ------------------------------------------------------------------------------------------------ randomness


@pytest.mark.parametrize("f", [uniform, normal])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 0)])
def test_random_numbers_mapped_and_looped_are_the_same(f: Any, shape: tuple[int, ...]) -> None:
    keys = torch.stack([key(1, "x", i) for i in range(4)])
    mapped = vmap(lambda k: f(fold(k, 3), shape, torch.float64))(keys)
    for i, k in enumerate(keys):
        assert_same(mapped[i], f(fold(k, 3), shape, torch.float64))
    assert mapped.shape == (4, *shape)


def test_fold_takes_numbers_as_tensors_and_mapped() -> None:
    k = key(7)
    steps = torch.arange(6)
    mapped = vmap(lambda n: fold(k, n))(steps)
    assert mapped.tolist() == [int(fold(k, n)) for n in range(6)]
    assert len(set(mapped.tolist())) == 6 and (mapped >= 0).all()
    assert int(fold(k, 5)) != int(fold(k, 5 + 2**32)) and int(fold(k, 5)) != int(fold(k ^ 2**40, 5))


@FAST
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**40))
def test_different_keys_and_numbers_fold_to_different_keys(a: int, b: int, m: int, n: int) -> None:
    x, y = torch.tensor(a), torch.tensor(b)
    assert (int(fold(x, m)) == int(fold(y, m))) == (a == b)
    assert (int(fold(x, m)) == int(fold(x, n))) == (m == n)
    assert (uniform(x, (8,)).tolist() == uniform(y, (8,)).tolist()) == (a == b)


def test_moments() -> None:
    n = 40_000
    for i in range(3):
        u, z = uniform(key("u", i), (n,), torch.float64), normal(key("z", i), (n,), torch.float64)
        assert float(u.min()) > 0.0 and float(u.max()) < 1.0
        assert abs(float(u.mean()) - 1 / 2) < 0.01 and abs(float(u.var()) - 1 / 12) < 0.003
        assert abs(float(z.mean())) < 0.03 and abs(float(z.var()) - 1) < 0.04
        assert abs(float(z.pow(3).mean())) < 0.1 and abs(float(z.pow(4).mean()) - 3) < 0.25
        # Neighbours, and streams of neighbouring keys, are unrelated.
        v = uniform(key("u", i + 100), (n,), torch.float64)
        for other in (u.roll(1), u.roll(7), v):
            assert abs(float(torch.corrcoef(torch.stack([u, other]))[0, 1])) < 0.02
        assert torch.histc(u, 20, 0, 1).sub(n / 20).abs().max() < 6 * math.sqrt(n / 20)


def test_uniform_numbers_never_reach_one_in_any_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (0, 2**32 - 1):
        monkeypatch.setattr(randomness, "_bits", lambda k, shape, bits=bits: torch.full(tuple(shape), bits))
        for dtype in (torch.float64, torch.float32):
            assert 0.0 < float(uniform(key(1), (), dtype)) < 1.0


def test_the_numbers_of_a_key_are_pinned() -> None:
    # A change here changes every result there is.
    assert number(3, "batches", 1, 2) == 434259371093348951 and int(fold(key(1), 2)) == 4463480467691542140
    assert uniform(key(1), (2,), torch.float64).tolist() == [0.5755184079753235, 0.6898619279963896]
    assert normal(key(1), (2,), torch.float64).tolist() == pytest.approx([-0.4356816366011892, -1.8928577111942155])
    assert generator(1, "a").permutation(6).tolist() == [4, 1, 0, 5, 2, 3]


def test_every_part_of_a_key_counts() -> None:
    assert number(1) != number("1") and number(1, 2) != number(2, 1) and number(12) != number(1, 2)
    assert number("a", "b") != number("ab") and 0 <= number("x") < 2**63
    assert number(np.int64(5)) == number(5)
    a, b = generator(1, "a").random(4), generator(1, "a").random(4)
    assert a.tolist() == b.tolist() != generator(2, "a").random(4).tolist()
    assert int(key(1, "a")) == number(1, "a")


def test_torch_seed_is_keyed_and_puts_the_generator_back() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    draws = []
    for parts in ((1, "a"), (1, "a"), (1, "b")):
        with torch_seed(*parts):
            draws.append(torch.rand(3).tolist())
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(torch.get_rng_state(), before)

    def fail() -> None:
        with torch_seed(1):
            torch.rand(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------ summaries


@FAST
@given(st.lists(st.tuples(st.one_of(st.none(), st.floats(0, 1)), st.integers(1, 50)), min_size=1, max_size=12))
def test_summary_is_numpys_over_the_clients_that_have_a_value(rows: list[tuple[float | None, int]]) -> None:
    values, n = [v for v, _ in rows], [w for _, w in rows]
    got = evaluation.summary(values, n)
    kept = [(v, w) for v, w in rows if v is not None]
    if not kept:
        assert got == {}
        return
    v, w = np.array([a for a, _ in kept]), np.array([b for _, b in kept])
    expected = {
        "mean": np.mean(v),
        "weighted": np.average(v, weights=w),
        "std": np.std(v),
        "p10": np.percentile(v, 10),
    }
    assert got == pytest.approx(expected, abs=1e-12)
    assert all(type(x) is float for x in got.values())


def test_per_client_means_and_none_for_clients_without_examples() -> None:
    sums = {"n": np.array([4.0, 0.0, 2.0]), "squared_error": np.array([16.0, 0.0, 0.5]), "loss": np.array([1.0, 0, 3])}
    got = evaluation.per_client(sums)
    assert got == {
        "n": [4, 0, 2],
        "squared_error": [4.0, None, 0.25],
        "rmse": [2.0, None, 0.5],
        "loss": [0.25, None, 1.5],
    }
    found = evaluation.summarise(got)
    assert "n" not in found and found["rmse"]["mean"] == 1.25
    assert found["loss"]["weighted"] == pytest.approx((4 * 0.25 + 2 * 1.5) / 6)
    assert evaluation.summarise({"n": [0], "loss": [None]}) == {"loss": {}}


def line(t: int, mean: float | None, up: int = 10, down: int = 20, **more: int) -> dict[str, Any]:
    measured = {} if mean is None else {"accuracy": {"mean": mean, "p10": mean / 2}}
    return {"round": t, "bytes": {"up": up, "down": down, **more}, "seconds": 0.5, **measured}


LINES = [line(1, None), line(2, 0.3, announce=5), line(3, None), line(4, 0.7), line(5, 0.6), line(6, 0.8, evaluate=999)]


def test_curves_and_protocols() -> None:
    assert evaluation.curve(LINES) == [(2, 0.3), (4, 0.7), (5, 0.6), (6, 0.8)]
    assert evaluation.curve(LINES, of="p10")[0] == (2, 0.15)
    assert evaluation.last(LINES, 3) == pytest.approx(0.7) and evaluation.last(LINES) == pytest.approx(0.6)
    assert evaluation.best(LINES) == 0.8 and evaluation.best(LINES[:5]) == 0.7
    assert evaluation.last([]) is None and evaluation.best([]) is None and evaluation.best(LINES, "loss") is None


def test_to_target_counts_up_to_the_first_round_that_reaches_it() -> None:
    assert evaluation.to_target(LINES, 0.6) == {"round": 4, "up": 40, "down": 85, "seconds": 2.0}
    assert evaluation.to_target(LINES, 0.3) == {"round": 2, "up": 20, "down": 45, "seconds": 1.0}  # at, not above
    assert evaluation.to_target(LINES, 0.75) == {"round": 6, "up": 60, "down": 125, "seconds": 3.0}
    assert evaluation.to_target(LINES, 0.81) is None and evaluation.to_target([], 0.1) is None


# ------------------------------------------------------------------------------------------------ settings

REFUSED: dict[str, tuple[list[Any], str]] = {
    "participation": ([0.0, -0.1, 1.01, math.nan, math.inf, "all"], "a number in (0, 1]"),
    "sampling": (["poisson", ""], "'fraction' or 'bernoulli'"),
    "batch_size": ([0, -1, 2.5, "half", True, None], "an integer >= 1"),
    "epochs": ([-1, 1.5, True, None], "an integer >= 0"),
    "evaluate_every": ([0, -3, 1.0], "an integer >= 1"),
    "evaluate_clients": ([0, 2.5, True], "an integer >= 1"),
    "evaluate_part": (["train", ""], "'test', 'validation'"),
    "evaluate_after": ([1, "yes", None], "true or false"),
    "drop_rate": ([-0.1, 1.1, math.nan], "a number in [0, 1]"),
    "drop": (["never"], "'after', 'before'"),
    "on_divergence": (["ignore"], "'stop', 'halve'"),
    "precision": (["float16", "double"], "'float32', 'float64', 'bf16'"),
    "device": (["gpu", "cuda:x"], "cpu"),
    "mapping": (["both"], "'auto', 'vmap', 'loop'"),
    "chunk": ([0, -1, 1.5, True], "an integer >= 1"),
    "workers": ([0, -1, 1.5], "an integer >= 1"),
    "start_method": (["thread", 1], "auto, fork or spawn"),
    "checkpoint_every": ([0, 1.5], "an integer >= 1"),
    "checkpoint_seconds": ([-1.0, math.nan, math.inf], "a number >= 0"),
    "memory_mb": ([0, -5, 1.5], "an integer >= 1"),
}


def test_every_setting_is_in_the_list() -> None:
    assert set(REFUSED) == set(Settings.__dataclass_fields__)


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, (values, _) in REFUSED.items() for v in values])
def test_bad_settings_are_refused_at_the_door_in_one_sentence(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as e:
        build(Settings, {name: value}, "Train")
    text = str(e.value)
    assert text.startswith(f"Train: {name} must be ") and f"Got {value!r}" in text and "\n" not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [(k, v) for k, (values, _) in REFUSED.items() for v in values if not isinstance(v, str) or k != "participation"],
)
def test_bad_settings_are_refused_by_the_class_itself(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as e:
        Settings(**{name: value})
    text = str(e.value)
    assert text.startswith(f"Train: {name} must be ") and f"Got {value!r}" in text
    for word in REFUSED[name][1].replace(",", "").replace(" or ", " ").split():
        assert word in text.replace(",", "")


def test_good_settings_at_their_limits() -> None:
    Settings(participation=1.0, batch_size="full", epochs=0, drop_rate=1.0, checkpoint_seconds=0.0, evaluate_clients=1)
    Settings(participation=1e-9, batch_size=1, chunk=1, workers=1, memory_mb=1, drop_rate=0.0)
    with pytest.raises(ConfigError, match=r"unknown key 'batchsize'. Did you mean 'batch_size'\?"):
        build(Settings, {"batchsize": 3}, "Train")
    free = Settings(workers=3, checkpoint_every=5, checkpoint_seconds=0.0, memory_mb=7)
    assert of_settings(free) == of_settings(Settings())
    assert of_settings(Settings(chunk=3)) != of_settings(Settings()) != of_settings(Settings(mapping="loop"))


@pytest.mark.parametrize("rounds", [-1, 1.5, True, "3"])
def test_bad_rounds_are_refused(rounds: Any) -> None:
    with pytest.raises(ConfigError, match="Simulation: rounds must be an integer >= 0"):
        Simulation(FedAvg(), make_task(), make_data(), rounds=rounds)


def test_mapping_and_chunks_follow_a_rule() -> None:
    assert choose_mapping(make_task(), "auto", 100) == "folded"
    assert choose_mapping(make_task("batchnorm"), "auto", 1) == "loop"
    assert choose_mapping(make_task("cnn"), "auto", 100) == "vmap"
    wide = Task(nn.Sequential(nn.Linear(1100, 1000), nn.LayerNorm(1000), nn.Linear(1000, 2)))
    assert choose_mapping(wide, "auto", 1) == "loop" and has_folded_form(wide.module)
    named = Task(nn.Sequential(nn.Embedding(9, 5), nn.Flatten(), nn.Linear(5, 2)))
    assert choose_mapping(named, "auto", 100) == "vmap"
    assert choose_mapping(make_task("cnn"), "loop", 1) == "loop"
    assert chunk_size("vmap", 100, 1000, 7) == chunk_size("loop", 5, 10, 7) == 7
    for participants in (1, 2, 5, 16, 100, 1001):
        for mapping in ("vmap", "folded", "loop"):
            size = chunk_size(mapping, participants, 1000, None)
            assert 1 <= size <= participants and -(-participants // size) <= max(16, participants // 8)
    assert chunk_size("folded", 100, 200_000, None) == 12 and chunk_size("folded", 10, 200_000, None) == 5
    assert chunk_size("vmap", 100, 4_000_000, None) == chunk_size("vmap", 100, 10**9, None) == 1


def test_chunks_have_equally_much_to_do() -> None:
    loads = [863, 825, 570, 505, 504, 333, 321, 307, 227, 122]
    assert chunk_cuts("folded", loads, 200_000, None) == [0, 3]
    assert chunk_cuts("folded", loads, 200_000, 4) == [0, 4, 8]
    for mapping in ("folded", "vmap", "loop"):
        for many in (1, 2, 10, 100):
            some = sorted((7 * k % 101 for k in range(many)), reverse=True)
            cuts = [*chunk_cuts(mapping, some, 200_000, None), many]
            size = chunk_size(mapping, many, 200_000, None)
            assert cuts[0] == 0 and cuts == sorted(set(cuts)) and len(cuts) - 1 <= -(-many // size)
            alike = [sum(some[k : k + size]) for k in range(0, many, size)]
            assert max(sum(some[a:b]) for a, b in pairwise(cuts)) <= max(alike)


# ------------------------------------------------------------------------------------------------ who takes part


@FAST
@given(st.integers(1, 60), st.floats(0.001, 1.0), st.integers(0, 5), st.integers(1, 9))
def test_a_fraction_is_rounded_and_never_nobody(clients: int, share: float, seed: int, t: int) -> None:
    got = sample(clients, Settings(participation=share), seed, t)
    assert len(got) == max(1, round(share * clients)) and got == sorted(set(got))
    assert got[0] >= 0 and got[-1] < clients
    assert got == sample(clients, Settings(participation=share), seed, t)


def test_samples_differ_between_rounds_and_seeds_and_are_fair() -> None:
    s = Settings(participation=0.3)
    assert sample(20, s, 0, 1) != sample(20, s, 0, 2) and sample(20, s, 0, 1) != sample(20, s, 1, 1)
    seen = Counter(i for t in range(500) for i in sample(10, s, 0, t))
    assert len(seen) == 10 and all(100 < c < 200 for c in seen.values())


def test_bernoulli_sampling_has_the_right_rate_and_may_be_empty() -> None:
    s = Settings(participation=0.2, sampling="bernoulli")
    sizes = [len(sample(10, s, 0, t)) for t in range(600)]
    assert abs(np.mean(sizes) - 2.0) < 0.2 and abs(np.var(sizes) - 1.6) < 0.4 and 0 in sizes
    assert sample(10, Settings(participation=1.0, sampling="bernoulli"), 0, 1) == list(range(10))


def test_dropped_is_a_keyed_part_of_the_sampled() -> None:
    who = list(range(0, 40, 2))
    assert dropped(who, Settings(), 0, 1) == set() and dropped(who, Settings(drop_rate=1.0), 0, 1) == set(who)
    s = Settings(drop_rate=0.25)
    lost = [dropped(who, s, 0, t) for t in range(200)]
    assert all(x <= set(who) for x in lost) and abs(np.mean([len(x) for x in lost]) - 5) < 0.5
    assert lost[3] == dropped(who, s, 0, 3) and len({frozenset(x) for x in lost}) > 100


def run(method: Method, rounds: int = 3, seed: int = 1, **settings: Any) -> Simulation:
    chosen = {"batch_size": 8, "participation": 0.5, "workers": 1, "precision": "float64"} | settings
    sim = Simulation(method, make_task(), make_data(), rounds=rounds, seed=seed, settings=Settings(**chosen))
    sim.result = sim.run()  # type: ignore[attr-defined]
    return sim


def test_an_empty_bernoulli_round_is_skipped_and_recorded() -> None:
    settings = Settings(participation=0.15, sampling="bernoulli")
    seed = next(s for s in range(200) if not sample(7, settings, s, 2) and sample(7, settings, s, 1))
    one, two = (run(FedAvg(), rounds=t, seed=seed, participation=0.15, sampling="bernoulli") for t in (1, 2))
    assert one.record.digest() == two.record.digest()
    first, second = two.record.lines
    assert not first["skipped"] and first["answered"] == len(sample(7, settings, seed, 1))
    assert second["skipped"] and second["sampled"] == second["answered"] == 0
    assert second["bytes"] | {"evaluate": 0} == {"up": 0, "down": 0, "announce": 0, "meta": 0, "evaluate": 0}
    assert second["accuracy"]["mean"] == one.record.lines[0]["accuracy"]["mean"]


@pytest.mark.parametrize("method", [method_of(FedAvg, momentum=0.5), FedRep(head_epochs=1), PflMf(rank=2)], ids=name_of)
@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_the_same_seed_twice_gives_the_same_digest(method: Method, mapping: str) -> None:
    torch.manual_seed(1)
    a = run(method, mapping=mapping, precision="float64")
    torch.manual_seed(2)
    np.random.seed(3)
    b = run(method, mapping=mapping, precision="float64")
    assert a.result.digest == b.result.digest == a.record.digest()  # type: ignore[attr-defined]
    assert a.result.per_client == b.result.per_client  # type: ignore[attr-defined]
    assert run(method, mapping=mapping, seed=2).record.digest() != a.record.digest()
