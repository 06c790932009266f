"""Outcomes: carried out in pieces they are the same, and what is changed afterwards is found out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedspan.cli.claims import runner
from fedspan.errors import ConfigError, FedspanError
from fedspan.studies.claims import (
    Claim,
    ClaimOutcome,
    catalogue,
    find_claim,
    parse_claim,
    read_outcome,
    sound_outcomes,
    stored_outcomes,
)
from fedspan.studies.claims.claim_runs import ClaimJob, Result, at_path, data_hashes, perform
from fedspan.studies.claims.fair_play import all_rows
from fedspan.studies.claims.outcome_file import faults, file_of
from fedspan.studies.claims.verification import drawn, inside, recomputed, rehashed

TEXT = """
sentence = "Sharing helps."
place = "Table 1"
seeds = [200, 201]
[experiment]
rounds = 1
[experiment.data]
limit = 100
[experiment.partition]
kind = "iid"
clients = 4
split = "common"
test = 0.25
[experiment.model]
kind = "linear"
[experiment.train]
workers = 1
[tuning]
lr = [0.1, 0.3]
trials = 2
[[rows]]
name = "FedProx"
method = "fedprox"
published = { lr = 0.01 }
[[tests]]
row = "FedProx"
minus = "fedavg"
within = 90.0
"""
CHECK = """
sentence = "Two is more than one."
place = "Section 1"
[check]
name = "made-up"
figures = { two = "list/1", each = "seeds/*/x" }
[[tests]]
row = "two"
above = 1.0
"""


def claim(text: str = TEXT) -> Claim:
    """The claim of a text."""
    return parse_claim(text.encode(), "paper", "made-up")


def no_check(_: Claim) -> Mapping[str, Any]:
    """Stands in where a claim has no check."""
    raise AssertionError


def numbers(_: Claim) -> Mapping[str, Any]:
    """What a check gives."""
    return {"list": [1, 2], "seeds": [{"x": 1.0}, {"x": 2.0}, {"x": 4.0}]}


def checked() -> ClaimOutcome:
    """The outcome of the check."""
    return perform(claim(CHECK), lambda _: None, numbers)


@pytest.fixture(scope="module")
def carried_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[ClaimOutcome, Path]:
    """A small claim, and the folder of its runs."""
    place = tmp_path_factory.mktemp("claim")
    return perform(claim(), runner(place, quiet=True), no_check), place


@pytest.mark.slow
def test_a_claim_that_was_stopped_goes_on_to_the_same_outcome(
    carried_out: tuple[ClaimOutcome, Path], tmp_path: Path
) -> None:
    whole, _ = carried_out
    run, done = runner(tmp_path, quiet=True), 0

    def stopped(job: ClaimJob) -> Result | None:
        nonlocal done
        done += 1
        if done > 5:
            raise KeyboardInterrupt
        return run(job)

    with pytest.raises(KeyboardInterrupt):
        perform(claim(), stopped, no_check)
    again = perform(claim(), run, no_check)
    assert (again.figures, again.data, again.verdict) == (whole.figures, whole.data, whole.verdict)
    effort = [{k: v for k, v in e.model_dump().items() if k != "seconds"} for e in again.effort.values()]
    assert effort == [{k: v for k, v in e.model_dump().items() if k != "seconds"} for e in whole.effort.values()]


@pytest.mark.slow
def test_rows_that_are_done_side_by_side_give_the_same_outcome(carried_out: tuple[ClaimOutcome, Path]) -> None:
    whole, place = carried_out
    with ThreadPoolExecutor(4) as threads:  # as `claims run --cluster` does them; the runs themselves are found done
        again = perform(claim(), runner(place, quiet=True), no_check, threads.map)
    assert (again.figures, again.data, again.verdict) == (whole.figures, whole.data, whole.verdict)
    assert list(again.figures) == list(whole.figures) and again.seconds == whole.seconds


@pytest.mark.slow
def test_rows_have_equal_trials_on_development_seeds_and_figures_on_reported_ones(
    carried_out: tuple[ClaimOutcome, Path],
) -> None:
    outcome, place = carried_out
    assert set(outcome.figures) == set(outcome.effort) == {"FedProx", "fedavg", "local"}
    assert {e.trials for e in outcome.effort.values()} == {2}
    trials = [p.name for p in place.iterdir() if p.name.startswith("trial-")]
    reports = [p.name for p in place.iterdir() if p.name.startswith("report-")]
    assert len(trials) == 6 and all("-s0-" in name for name in trials)
    assert len(reports) == 8 and all("-s200-" in name or "-s201-" in name for name in reports)
    assert all("seconds_per_round" not in columns["tuned"] for columns in outcome.figures.values())
    assert set(outcome.figures["FedProx"]) == {"tuned", "published"} and set(outcome.figures["fedavg"]) == {"tuned"}
    assert all(set(d) >= {"examples", "labels", "split"} for d in outcome.data.values()) and len(outcome.data) == 2
    assert outcome.effort["FedProx"].steps > 0 and outcome.verdict["verdict"] == "holds"


@pytest.mark.slow
def test_computed_again_every_bit_is_equal(carried_out: tuple[ClaimOutcome, Path]) -> None:
    outcome, _ = carried_out
    found = recomputed(claim(), outcome, lambda at: runner(at, quiet=True), no_check)
    assert found.state == "equal bits" and "CPU type and versions recorded" in found.says


@pytest.mark.slow
def test_the_data_of_a_stored_outcome_are_named_and_hashed_as_before() -> None:
    made = find_claim("fedloru/accumulation-digits")
    outcome = stored_outcomes((made,)).outcomes[made.name]
    assert data_hashes(made, all_rows(made)) == outcome.data


def test_rounds_are_timed_where_a_test_asks_for_it_and_times_are_not_computed_again(tmp_path: Path) -> None:
    timed = claim(TEXT + '[[tests]]\nrow = "FedProx"\nmeasure = "seconds_per_round"\nabove = 0.0\n')
    outcome = perform(timed, runner(tmp_path, quiet=True), no_check)
    taken = [columns["tuned"]["seconds_per_round"] for columns in outcome.figures.values()]
    assert all(set(seeds) == {"200", "201"} and all(v and v > 0 for v in seeds.values()) for seeds in taken)
    assert recomputed(timed, outcome, lambda at: runner(at, quiet=True), no_check).state == "equal bits"


def test_computed_again_a_difference_is_told() -> None:
    outcome = checked()
    same = recomputed(claim(CHECK), outcome, lambda at: lambda _: None, numbers)
    assert same.state == "equal bits"
    other = recomputed(claim(CHECK), outcome, lambda at: lambda _: None, lambda _: {**numbers(_), "list": [1, 3]})
    assert other.state == "differs" and not other.good
    elsewhere = outcome.model_copy(update={"versions": {**outcome.versions, "cpu": "another"}})
    near = recomputed(
        claim(CHECK), elsewhere, lambda at: lambda _: None, lambda _: {**numbers(_), "list": [1, 2 + 1e-9]}
    )
    assert near.state == "within the interval" and "instead of another" in near.says
    assert not inside(claim(CHECK), outcome, {**outcome.figures, "two": {"tuned": {"value": {"exact": 0.5}}}})


@pytest.mark.parametrize("part", ["figure", "verdict", "seconds"])
def test_a_changed_outcome_is_found_out(part: str) -> None:
    outcome = checked()
    assert rehashed(claim(CHECK), outcome).good
    values = outcome.model_dump()
    if part == "figure":
        values["figures"]["two"]["tuned"]["value"]["exact"] = 1.5
    elif part == "verdict":
        values["verdict"]["verdict"] = "does not hold"
    else:
        values["seconds"] += 1.0
    changed = ClaimOutcome.model_validate(values)
    assert "sha256 differs" in rehashed(claim(CHECK), changed).says
    # With its hash made anew, a figure still has to give the verdict.
    forged = changed.sealed()
    assert rehashed(claim(CHECK), forged).good == (part == "seconds")


def test_a_changed_claim_is_found_out() -> None:
    other = claim(CHECK.replace("above = 1.0", "above = 1.5"))
    assert "claim's file has been changed" in faults(other, checked())[0]


def test_an_outcome_of_another_claim_decides_nothing(tmp_path: Path) -> None:
    other = claim(CHECK.replace("above = 1.0", "above = 1.5"))
    checked().write(file_of(other, tmp_path))
    stored = sound_outcomes((other,), tmp_path)
    assert not stored.outcomes and "claim's file has been changed" in stored.damaged[other.name]


def test_files_are_read_back_and_damaged_ones_named(tmp_path: Path) -> None:
    made, outcome = claim(CHECK), checked()
    path = outcome.write(file_of(made, tmp_path))
    assert read_outcome(path) == outcome and stored_outcomes((made,), tmp_path).outcomes == {made.name: outcome}
    path.write_text(json.dumps({"format": 1}))
    assert list(stored_outcomes((made,), tmp_path).damaged) == [made.name]
    with pytest.raises(FedspanError, match="is no outcome"):
        read_outcome(path)


def test_claims_are_drawn_by_seed_and_cost() -> None:
    outcomes = {str(k): checked().model_copy(update={"seconds": 60.0 * k}) for k in range(8)}
    assert len(drawn(outcomes, 2, 0, None)) == 2 and drawn(outcomes, 2, 0, None) == drawn(outcomes, 2, 0, None)
    assert len({tuple(drawn(outcomes, 2, seed, None)) for seed in range(9)}) > 1
    assert set(drawn(outcomes, 8, 0, 2.0)) == {"0", "1", "2"}


def test_paths_lead_to_numbers() -> None:
    assert at_path({"a": [{"b": 1}, {"b": 2}]}, "a/*/b", "x") == [1, 2]
    assert at_path({"a": [1, 2]}, "a/-1", "x") == 2
    for path in ("a/2", "b", "a/x"):
        with pytest.raises(ConfigError, match="leads nowhere"):
            at_path({"a": [1, 2]}, path, "x")


def test_stored_outcomes_are_sound() -> None:
    assert not sound_outcomes(catalogue()).damaged
