"""Stored outcomes held to account: hashes, claims and verdicts of all, and some of them computed again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedspan.learn import accelerator
from fedspan.randomness import generator
from fedspan.simulation.environment import versions
from fedspan.studies.claims.claim_file import SECONDS, Claim
from fedspan.studies.claims.claim_runs import (
    Checker,
    Runner,
    check_figures,
    code_digest,
    data_hashes,
    measured,
    reported_jobs,
)
from fedspan.studies.claims.fair_play import all_rows
from fedspan.studies.claims.outcome_file import ClaimOutcome, faults
from fedspan.studies.claims.verdict import Figures, decide

State = Literal["as stored", "equal bits", "within the interval", "differs"]
Place = Callable[[], AbstractContextManager[str]]


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was found of one outcome."""

    claim: str
    state: State
    says: str

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.state != "differs"


def rehashed(claim: Claim, outcome: ClaimOutcome) -> Verified:
    """An outcome's own hash, its claim's, and its verdict, without computing anything again."""
    wrong = faults(claim, outcome)
    said = "; ".join(wrong) if wrong else f"hash, claim and verdict ({outcome.verdict['verdict']}) agree"
    return Verified(claim=claim.name, state="differs" if wrong else "as stored", says=said)


def drawn(outcomes: Mapping[str, ClaimOutcome], count: int, seed: int, minutes: float | None) -> list[str]:
    """Claims to be computed again: so many at random, of those that took at most so many minutes."""
    able = sorted(n for n, o in outcomes.items() if minutes is None or o.seconds_again <= 60 * minutes)
    order = generator(seed, "verify").permutation(len(able))
    return [able[k] for k in order[:count]]


def recomputed(claim: Claim, outcome: ClaimOutcome, run: Callable[[Path], Runner], check: Checker) -> Verified:
    """Compute an outcome's figures again, at the step sizes it chose, and compare them.

    Args:
        run: what carries runs out below a folder; every figure is computed anew, in a folder of its own.
    """
    now = versions(accelerator.find("auto")[0] if claim.trains else accelerator.HOST)
    before = {"device": "cpu", **outcome.versions}  # before there was a choice
    unlike = [f"{k} {now[k]} instead of {before.get(k)}" for k in now if before.get(k) != now[k]]
    with tempfile.TemporaryDirectory(prefix="fedspan-claims-") as place:
        figures = again(claim, outcome, run(Path(place)), check)
    same_data = not claim.trains or data_hashes(claim, all_rows(claim)) == outcome.data
    code = "" if code_digest() == outcome.code else "; the code has been changed since"
    where = f"other versions: {', '.join(unlike)}" if unlike else "the CPU type and versions recorded"
    if not same_data:
        return _verified(claim, "differs", f"the data or their split are not those recorded ({where})")
    if figures == outcome.figures:
        return _verified(claim, "equal bits", f"every figure is equal to the last bit, on {where}{code}")
    gap = largest_gap(outcome.figures, figures)
    if inside(claim, outcome, figures) and (unlike or code):
        return _verified(claim, "within the interval", f"largest difference {gap:.3g}, on {where}{code}")
    return _verified(claim, "differs", f"figures differ by up to {gap:.3g}, on {where}{code}")


def _verified(claim: Claim, state: State, says: str) -> Verified:
    return Verified(claim=claim.name, state=state, says=says)


def again(claim: Claim, outcome: ClaimOutcome, run: Runner, check: Checker) -> dict[str, object]:
    """The figures of an outcome, computed anew: the same measures, no trials; times of rounds are taken over."""
    if claim.check is not None:
        return dict(check_figures(claim, check(claim)))
    figures: dict[str, object] = {}
    for row in all_rows(claim):
        told = outcome.effort.get(row.name)
        columns = reported_jobs(claim, row, None if told is None else told.lr)
        found = {column: measured({j.config.seed: run(j) for j in jobs}) for column, jobs in columns.items()}
        stored = outcome.figures.get(row.name)
        figures[row.name] = (
            found if stored is None else {k: _known(found[k], f) if k in found else f for k, f in stored.items()}
        )
    return figures


def _known(found: Mapping[str, object], stored: Mapping[str, object]) -> dict[str, object]:
    """Those measures that were stored, as a newer version may have more; nobody can compute times of rounds again."""
    times = {k: v for k, v in stored.items() if k == SECONDS}
    return {k: v for k, v in found.items() if k in stored} | times


def inside(claim: Claim, outcome: ClaimOutcome, figures: object) -> bool:
    """Whether every effect lies in the interval of the outcome's, and the verdict is the same."""
    before = decide(claim, outcome.figures)
    after = decide(claim, figures)  # type: ignore[arg-type]
    for old, new in zip(before.tests, after.tests):
        if old.low is None or old.high is None or new.effect is None:
            continue
        slack = 1e-6 * max(1.0, abs(old.effect or 0.0))  # of a figure without spread the last digits may differ
        if not old.low - slack <= new.effect <= old.high + slack:
            return False
    return before.text == after.text


def largest_gap(one: Figures, other: Mapping[str, object]) -> float:
    """The largest difference between two sets of figures; infinite where one lacks what the other has."""
    a, b = _flat(one), _flat(other)
    if a.keys() != b.keys():
        return float("inf")
    gaps = [0.0 if a[k] == b[k] else abs(a[k] - b[k]) if None not in (a[k], b[k]) else float("inf") for k in a]  # type: ignore[operator]
    return max(gaps, default=0.0)


def _flat(values: Mapping[str, object], at: Sequence[str] = ()) -> dict[tuple[str, ...], float | None]:
    out: dict[tuple[str, ...], float | None] = {}
    for k, v in values.items():
        if isinstance(v, Mapping):
            out |= _flat(v, (*at, k))
        else:
            out[(*at, k)] = v  # type: ignore[assignment]
    return out
