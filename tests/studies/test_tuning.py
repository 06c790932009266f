"""Search spaces, and the search itself on a made-up response: what is tried, given up, chosen and marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fedspan.config import RunConfig, from_dict
from fedspan.errors import ConfigError
from fedspan.studies.tuning import (
    Space,
    TrialJob,
    TuningOutcome,
    development_seeds,
    reported_seeds,
    search,
    split_spaces,
    steps_of,
)
from fedspan.studies.tuning.search import measure_of
from fedspan.studies.tuning.spaces import Value

pytest.importorskip("optuna")

LR = "method.lr=log:1e-4:10"


def made(values: Mapping[str, Value], seed: int) -> RunConfig:
    """A small experiment with these values; nothing of it is run."""
    base = {"rounds": 8, "partition": {"kind": "iid", "clients": 4}, "model": {"hidden": [4]}}
    return from_dict(base, [f"{k}={v}" for k, v in values.items()]).resolve(seed=seed)


class Response:
    """Stands in for runs: accuracy peaks at lr = 0.1 and grows with rounds; beyond lr = 5 runs diverge."""

    def __init__(self, best: float = 0.1, measure: str = "accuracy") -> None:
        self.best, self.measure, self.jobs = best, measure, list[TrialJob]()

    def __call__(self, jobs: Sequence[TrialJob]) -> list[dict[str, Any] | None]:
        self.jobs += jobs
        return [self.line(job.config) for job in jobs]

    def line(self, config: RunConfig) -> dict[str, Any] | None:
        lr = config.method["lr"]
        if lr > 5:
            return None
        mean = 1 - 0.2 * abs(math.log10(lr / self.best)) - 0.1 / config.rounds + 0.001 * config.seed
        value = mean if self.measure == "accuracy" else -mean
        return {"round": config.rounds, self.measure: {"mean": value}, "sampled": 4}


def tried(run: Any, trials: int = 16, **more: Any) -> TuningOutcome:
    return search(split_spaces([LR])[0], made, run, who="fedavg", trials=trials, seeds=[0], **more)


def test_the_best_is_found_and_bracketed() -> None:
    run = Response()
    found = tried(run)
    assert 0.03 < found.best.values["method.lr"] < 0.3 and not found.edges  # type: ignore[operator]
    assert len(found.trials) == 16 and found.best.state == "complete" and found.best.rounds == 8
    assert found.measure.name == "accuracy" and found.measure.higher
    first = sorted(math.log10(float(t.values["method.lr"])) for t in found.trials[:4])
    assert [math.floor((v + 4) / 5 * 4) for v in first] == [0, 1, 2, 3], "the first batch covers the range evenly"
    for job in run.jobs:
        assert job.config.train.evaluate_part == "validation" and job.config.partition.validation == 0.2
        assert job.config.seed == 0 and job.config.rounds % job.config.train.evaluate_every == 0


@pytest.mark.parametrize("measure", ["loss", "rmse"])
def test_measures_of_which_less_is_better(measure: str) -> None:
    a, b = tried(Response()), tried(Response(measure=measure), measure=measure)
    assert [t.values for t in a.trials] == [t.values for t in b.trials] and not b.measure.higher
    assert a.best.number == b.best.number and [t.state for t in a.trials] == [t.state for t in b.trials]


def test_pruning_gives_up_the_worse_half_early_and_never_the_first_batch() -> None:
    run = Response()
    found = tried(run)
    assert {t.state for t in found.trials[:4]} <= {"complete", "diverged"}
    pruned = [t for t in found.trials if t.state == "pruned"]
    assert pruned and all(t.rounds < 8 for t in pruned)
    whole = tried(Response(), prune=False)
    assert not whole.count("pruned") and all(t.rounds == 8 for t in whole.trials if t.state == "complete")
    assert sum(j.config.rounds for j in run.jobs if j.config.rounds == 8) < 8 * 16


def test_what_diverges_is_the_worst_and_counts_as_tried() -> None:
    found = search(split_spaces(["method.lr=log:1:1000"])[0], made, Response(), who="x", trials=8, seeds=[0])
    assert found.count("diverged") and found.best.values["method.lr"] < 5  # type: ignore[operator]
    with pytest.raises(ConfigError, match="no trial of x came to its end, 4 of 4 diverged; search smaller values"):
        search(split_spaces(["method.lr=log:10:1000"])[0], made, Response(), who="x", trials=4, seeds=[0])


def test_a_winner_that_nothing_brackets_is_marked() -> None:
    found = tried(Response(best=1e-6))
    assert found.edges == {"method.lr": "smallest"}
    assert not Space("k", "choice", choices=("0", "0.9")).edge("0.9", ["0", "0.9"])
    assert Space("k", "choice", choices=("1", "2", "3")).edge("3", ["2", "3"]) == "largest"
    assert not Space("k", "choice", choices=("a", "b", "c")).edge("c", ["a", "b", "c"])
    assert Space("k", "int", 1, 9).edge(4, [4, 7]) == "smallest"


def test_seeds_are_averaged_and_a_search_without_keys_is_one_trial() -> None:
    run = Response()
    found = search([], made, run, who="x", trials=9, seeds=[0, 1, 2])
    assert len(found.trials) == 1 and found.best.values == {}
    alone = [run.line(j.config) for j in run.jobs if j.config.rounds == 8]
    assert found.best.value == pytest.approx(sum(line["accuracy"]["mean"] for line in alone if line) / 3)
    assert [j.config.seed for j in run.jobs[-3:]] == [0, 1, 2]


def test_a_method_is_not_judged_before_its_own_part_begins() -> None:
    run = Response()
    late = lambda values, seed: from_dict(
        {"rounds": 8, "partition": {"clients": 4}, "method": {"name": "cfl", "start_round": 5}},
        [f"{k}={v}" for k, v in values.items()],
    ).resolve(seed=seed)
    search(split_spaces([LR])[0], late, run, who="cfl", trials=4, seeds=[0])
    assert {j.config.rounds for j in run.jobs} == {8}


def test_a_measure_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"--measure must be one that the runs have: accuracy\. Got 'roc'"):
        tried(Response(), measure="roc")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("method.lr=log:1", "must be log:a:b, float:a:b, int:a:b or choice:a,b,c with a below b"),
        ("method.lr=log:1:0.1", "with a below b"),
        ("method.lr=log:0:1", "above 0 on a logarithmic scale"),
        ("method.lr=float:nan:1", "with a below b"),
        ("method.lr=int:1:2.5", "whole numbers"),
        ("method.lr=choice:1", "at least two different choices"),
        ("method.lr=choice:1,,2", "at least two different choices"),
        ("lr=log:0.1:1", "a key of a section"),
        ("method.name=choice:fedavg,local", "a key of a section"),
        ("partition.test=float:0.1:0.3", "must not change what it is judged by"),
        ("train.evaluate_part=choice:test,validation", "must not change what it is judged by"),
    ],
)
def test_bad_spaces_are_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_spaces([text])
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_spaces_and_settings_are_told_apart() -> None:
    spaces, rest = split_spaces([LR, "rounds=3", "train.epochs=int:1:5", "data.root=C:/x", "method.k=choice:a, b"])
    assert [s.text for s in spaces] == ["log:0.0001:10", "int:1:5", "choice:a,b"]
    assert rest == ["rounds=3", "data.root=C:/x"]
    assert {spaces[1].at(s) for s in (0.0, 0.19, 0.21, 0.999)} == {1, 2, 5}
    with pytest.raises(ConfigError, match=r"Got two of method\.lr"):
        split_spaces([LR, LR])


def test_seeds_are_kept_apart() -> None:
    assert development_seeds(0, 3) == [0, 1, 2] and reported_seeds(200, 2) == [200, 201]
    for first, count in ((100, 1), (200, 5), (8, 3), (10, 1)):
        with pytest.raises(ConfigError, match="never on reported ones"):
            development_seeds(first, count)
    with pytest.raises(ConfigError, match="add seed=200"):
        reported_seeds(9, 1)


def test_steps_of_a_client() -> None:
    """Digits over four clients: 450 or 449 examples, three quarters of them to train on, batches of 32."""
    plain = {"partition": {"clients": 4}, "model": {"hidden": [4]}, "train": {"epochs": 2, "batch_size": 32}}
    of = lambda **method: steps_of(from_dict({**plain, "method": method}))
    assert of(name="fedavg") == (22.0, 0.0)
    assert of(name="fedavg-head", finetune_epochs=3) == (22.0, 33.0)
    assert of(name="fedrep", head_epochs=1, body_epochs=1) == (22.0, 0.0)


def test_trials_are_judged_by_the_first_metric_asked_for_in_its_direction() -> None:
    line = {"round": 3, **{k: {"mean": 0.5} for k in ("accuracy", "loss", "roc_auc", "ece")}}
    asked = {"roc_auc": True, "ece": False}
    first, low = measure_of([line], None, asked), measure_of([line], "ece", asked)
    assert first is not None and (first.name, first.higher) == ("roc_auc", True)
    assert low is not None and (low.name, low.higher) == ("ece", False)
    usual = measure_of([line], None, {})
    assert usual is not None and (usual.name, usual.higher) == ("accuracy", True)
    assert measure_of([], None, asked) is None
    with pytest.raises(ConfigError, match="must be one that the runs have"):
        measure_of([line], "r2", asked)
