"""Tables of claims and their outcomes, for the terminal and for pages: everything in them is read from stored files."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from fedspan.studies.claims.claim_file import PUBLISHED, TUNED, Claim
from fedspan.studies.claims.outcome_file import ClaimOutcome
from fedspan.studies.claims.verdict import EXACT, Decision
from fedspan.studies.tuning.seeds import DEVELOPMENT

COLUMNS = {TUNED: "as tuned", PUBLISHED: "as published"}
LEFT_OUT = ("accuracy_p10",)


@dataclass(frozen=True)
class PlainTable:
    """Titles and rows of text."""

    titles: list[str]
    rows: list[list[str]]


def test_table(claim: Claim, decision: Decision) -> PlainTable | None:
    """The tests that decide a claim, with effect, interval and side of the bar."""
    if not decision.tests:
        planned = [[t.words, t.only_if] for t in claim.tests]
        return PlainTable(["deciding test", "decides only if"], planned) if planned else None
    rows = [
        [t.says, t.interval, "" if t.size is None else f"{t.size:.2f}", str(t.seeds), t.state, t.only_if]
        for t in decision.tests
    ]
    titles = ["deciding test", "effect [90 % interval]", "effect / spread", "seeds", "state", "decides only if"]
    return PlainTable(titles, rows)


def figure_table(claim: Claim, outcome: ClaimOutcome | None) -> PlainTable | None:
    """Figures by row: of a check its numbers; of runs every measure as tuned and as published, mean and spread."""
    if outcome is None:
        return None
    if claim.check is not None:
        found = {name: columns[TUNED]["value"] for name, columns in outcome.figures.items()}
        return PlainTable(
            ["figure", "value"], [[name, summary(values, percent=False)] for name, values in found.items()]
        )
    shown = _shown(outcome)
    titles = ["row", *(f"{m.replace('_', ' ')}, {COLUMNS[c]}" for c, m in shown)]
    if any(seed in DEVELOPMENT for seed in outcome.seeds["reported"]):
        titles[0] = "row (a reported seed was used for choosing)"
    rows = []
    for row, columns in outcome.figures.items():
        cells = [summary(columns.get(c, {}).get(m, {}), percent=m.startswith("accuracy")) for c, m in shown]
        rows.append([row, *cells])
    return PlainTable(titles, rows)


def _shown(outcome: ClaimOutcome) -> list[tuple[str, str]]:
    """Columns and measures that any row has, accuracies by every protocol first."""
    found = {(c, m): None for c in COLUMNS for f in outcome.figures.values() for m in f.get(c, {})}
    return sorted((k for k in found if k[1] not in LEFT_OUT), key=lambda k: (k[0] != TUNED, not k[1].startswith("acc")))


def summary(values: Mapping[str, float | None], *, percent: bool) -> str:
    """Mean and sample standard deviation over seeds; `diverged` where a run did."""
    if not values:
        return ""
    known = [v for v in values.values() if v is not None]
    if len(known) < len(values):
        return f"diverged ({len(values) - len(known)} of {len(values)})"
    scale = 100 if percent else 1
    mean = scale * statistics.fmean(known)
    if set(values) == {EXACT}:
        return f"{mean:.6g}"
    end = f" ± {scale * statistics.stdev(known):.2g}" if len(known) > 1 else ""
    return f"{mean:.2f}{end}" if percent else f"{mean:.4g}{end}"


def effort_table(claim: Claim, outcome: ClaimOutcome | None) -> PlainTable | None:
    """What each row was given: trials, the step size chosen and where it lies, gradient steps, seconds."""
    if outcome is None or not outcome.effort:
        return None
    rows = []
    for name, told in outcome.effort.items():
        lr = "none" if told.lr is None else f"{told.lr:g}{'*' if told.edge else ''}"
        tried = ", ".join(told.tried)
        trials = f"{told.trials} ({told.diverged} diverged)" if told.diverged else str(told.trials)
        steps = f"{told.steps:g}" + (f" + {told.steps_before_use:g}" if told.steps_before_use else "")
        rows.append([name, told.method, trials, tried, lr, steps, f"{told.seconds:.0f}"])
    titles = ["row", "method", "trials", "step sizes tried", "chosen", "steps a round + before use", "seconds"]
    return PlainTable(titles, rows)
