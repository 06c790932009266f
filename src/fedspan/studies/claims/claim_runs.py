"""A claim carried out: step sizes by equal trials on development seeds, then all rows on the reported ones.

Nothing is kept here: every run has a directory named by what decides its numbers, so a claim that was interrupted goes
on where it stopped, and one that is repeated finds its runs done.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from fedspan.config import RunConfig, assemble_data
from fedspan.data.digest import data_digest
from fedspan.errors import ConfigError
from fedspan.learn import accelerator
from fedspan.simulation.environment import versions
from fedspan.studies.claims.claim_file import PUBLISHED, SECONDS, TUNED, Claim, ClaimRow
from fedspan.studies.claims.fair_play import all_rows, config_of
from fedspan.studies.claims.outcome_file import ClaimOutcome, RowEffort, verdict_of
from fedspan.studies.claims.step_search import ChosenStep, choose_step, confirm_step
from fedspan.studies.claims.verdict import EXACT
from fedspan.studies.papers.experiment_file import slug
from fedspan.studies.papers.group_figures import group_measures
from fedspan.studies.tuning.effort import steps_of
from fedspan.studies.tuning.search import trial_config

Result = Mapping[str, Any]
"""What `result.json` of a run holds."""
RowFigures = dict[str, dict[str, dict[str, float | None]]]
"""column → measure → seed → value."""
DECIDING = ("data", "language", "layers", "learn", "linalg", "method", "methods", "models", "simulation", "wire")
"""Folders whose code decides a run's numbers."""


@dataclass(frozen=True, kw_only=True)
class ClaimJob:
    """One run of a claim."""

    config: RunConfig
    row: str
    purpose: str
    """`trial` or `report`."""

    @property
    def label(self) -> str:
        """For progress."""
        return f"{self.row}, lr {self.config.method['lr']:g}, {self.purpose}, seed {self.config.seed}"

    @property
    def folder(self) -> str:
        """A name that everything that decides the numbers goes into."""
        text = json.dumps([self.config.identity(), self.config.rounds], sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return f"{self.purpose}-{slug(self.row)[:40].rstrip('-.')}-s{self.config.seed}-{digest}"


Runner = Callable[[ClaimJob], Result | None]
"""Carries a job out, or finds it done, and gives its result; None if it diverged."""
Checker = Callable[[Claim], Mapping[str, Any]]
"""Performs a claim's check and gives its numbers."""
Spread = Callable[[Callable[[ClaimRow], Any], Sequence[ClaimRow]], Iterable[Any]]
"""As `map`."""


def perform(claim: Claim, run: Runner, check: Checker, each: Spread = map) -> ClaimOutcome:
    """Carry a claim out and decide it.

    Args:
        each: does the work of every row and gives what comes of it, in order; rows may be done side by side.

    Raises:
        ConfigError: if it cannot be tried here.
    """
    if claim.not_testable:
        raise ConfigError(f"claims: {claim.name} is not testable here: {claim.not_testable}.")
    if claim.check is not None:
        return _of_check(claim, check)
    rows = all_rows(claim)
    check_all(claim, rows)
    figures: dict[str, RowFigures] = {}
    effort: dict[str, RowEffort] = {}
    spent: list[float] = []

    def timed(job: ClaimJob) -> Result | None:
        result = run(job)
        spent.append(0.0 if result is None else sum(result["seconds"].values()))
        return result

    def done(row: ClaimRow) -> tuple[RowFigures, RowEffort]:
        return _report(claim, row, tune(claim, row, timed), timed)

    for row, (found, told) in zip(rows, each(done, rows)):
        figures[row.name], effort[row.name] = found, told
    return ClaimOutcome(
        claim=claim.name,
        claim_digest=claim.digest,
        seeds={"development": [*claim.tuning.seeds, *claim.tuning.confirm], "reported": list(claim.seeds)},
        figures=figures,
        effort=effort,
        data=data_hashes(claim, rows),
        code=code_digest(),
        versions=versions(accelerator.find("auto")[0]),
        seconds=round(sum(spent), 1),
        verdict=verdict_of(claim, figures),
    ).sealed()


def check_all(claim: Claim, rows: Sequence[ClaimRow]) -> None:
    """See to it, before the first run, that every row is an experiment that can be made."""
    for row in rows:
        for lr in grid_of(claim, row):
            config_of(claim, row, {"lr": lr}, claim.seeds[0])
        if row.published is not None:
            config_of(claim, row, row.published, claim.seeds[0])


def grid_of(claim: Claim, row: ClaimRow) -> tuple[float, ...]:
    """The step sizes a row's trials begin with."""
    return row.lr or claim.tuning.lr


def tune(claim: Claim, row: ClaimRow, run: Runner) -> ChosenStep:
    """A row's step size by its trials on validation parts of development seeds, mean over them.

    The winner must not diverge on the seeds of `confirm`; where it does, the next best is asked.
    """

    def trial(lr: float, seed: int) -> float | None:
        config = trial_config(config_of(claim, row, {"lr": lr}, seed))
        config = replace(config, rounds=claim.tuning.rounds or config.rounds)
        result = run(ClaimJob(config=config, row=row.name, purpose="trial"))
        return None if result is None else judged(result)

    def attempt(lr: float) -> float | None:
        values = [trial(lr, seed) for seed in claim.tuning.seeds]
        known = [v for v in values if v is not None]
        return None if len(known) < len(values) else sum(known) / len(known)

    chosen = choose_step(grid_of(claim, row), claim.tuning.trials, attempt)
    return confirm_step(chosen, lambda lr: all(trial(lr, seed) is not None for seed in claim.tuning.confirm))


def judged(result: Result) -> float | None:
    """What trials are compared by, higher is better: accuracy, else minus the error or the loss."""
    for name, sign in (("accuracy", 1.0), ("rmse", -1.0), ("loss", -1.0)):
        value = result["measures"].get(name, {}).get("mean")
        if value is not None:
            return sign * value if math.isfinite(value) else None
    raise ConfigError("claims: a run must have accuracy, rmse or loss to choose step sizes by. Got none.")


def reported_jobs(claim: Claim, row: ClaimRow, lr: float | None) -> dict[str, list[ClaimJob]]:
    """The runs that are reported of a row, by column and seed."""
    recipes: dict[str, dict[str, Any]] = {} if lr is None else {TUNED: {"lr": lr}}
    if row.published is not None:
        recipes[PUBLISHED] = row.published
    return {
        column: [
            ClaimJob(config=config_of(claim, row, recipe, seed), row=row.name, purpose="report")
            for seed in claim.seeds_of(row)
        ]
        for column, recipe in recipes.items()
    }


def measured(results: Mapping[int, Result | None], timed: bool = False) -> dict[str, dict[str, float | None]]:
    """measure → seed → value: means over clients, accuracy by other protocols and named groups, what all clients sent.

    `megabytes` are those of the whole run, up, down and announced.

    Args:
        timed: whether the time of a round is a measure too; no two runs have the same, whatever else is alike.
    """
    names: dict[str, None] = {"accuracy": None} if all(r is None for r in results.values()) else {}
    of: dict[int, dict[str, float]] = {}
    for seed, result in results.items():
        if result is None:
            continue
        found = {k: v["mean"] for k, v in result["measures"].items() if v.get("mean") is not None}
        others = {k: result["accuracy"].get(k) for k in ("weighted", "last5", "best", "p10")}
        found |= {f"accuracy_{k}": v for k, v in others.items() if v is not None}
        found |= group_measures(result)
        found["megabytes"] = sum(result["bytes"][way] for way in ("up", "down", "announce")) / 1e6
        if timed:
            found[SECONDS] = result["seconds"]["train"] / result["rounds"]
        of[seed] = found
        names |= dict.fromkeys(found)
    return {name: {str(seed): of.get(seed, {}).get(name) for seed in results} for name in names}


def _report(claim: Claim, row: ClaimRow, chosen: ChosenStep, run: Runner) -> tuple[RowFigures, RowEffort]:
    figures: RowFigures = {}
    seconds = 0.0
    for column, jobs in reported_jobs(claim, row, chosen.lr).items():
        results = {job.config.seed: run(job) for job in jobs}
        figures[column] = measured(results, claim.timed)
        seconds += sum(sum(r["seconds"].values()) for r in results.values() if r is not None)
    if chosen.lr is None:  # every trial diverged: so does the row
        figures[TUNED] = {"accuracy": {str(seed): None for seed in claim.seeds_of(row)}}
    steps, before = steps_of(config_of(claim, row, {}, claim.seeds[0]))
    told = RowEffort(
        method=row.method,
        trials=len(chosen.tried),
        diverged=chosen.diverged,
        tried={f"{lr:g}": value for lr, value in chosen.tried.items()},
        lr=chosen.lr,
        edge=chosen.edge,
        steps=round(steps, 2),
        steps_before_use=round(before, 2),
        seconds=round(seconds, 1),
    )
    return figures, told


def data_hashes(claim: Claim, rows: Sequence[ClaimRow]) -> dict[str, dict[str, str]]:
    """Hashes of examples, labels and split of every reported seed, and of every setting of the data."""
    out: dict[str, dict[str, str]] = {}
    for row in rows:
        for seed in claim.seeds_of(row):
            config = config_of(claim, row, {}, seed)
            data = [config.data, config.partition, config.seed, config.train.precision]
            data += ["whole records"] if config.data.whole_records else []
            key = f"{seed}-{hashlib.blake2b(repr(data).encode(), digest_size=4).hexdigest()}"
            if key not in out:
                out[key] = data_digest(assemble_data(config).to(config.train.torch_dtype))
    return out


def code_digest() -> str:
    """A hash of the code that decides numbers, so that a later difference can be told from one of the machine."""
    root = Path(str(resources.files("fedspan")))
    h = hashlib.sha256()
    for path in sorted(p for folder in DECIDING for p in (root / folder).rglob("*.py")):
        h.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return h.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ checks


def _of_check(claim: Claim, check: Checker) -> ClaimOutcome:
    began = time.perf_counter()
    figures = check_figures(claim, check(claim))
    return ClaimOutcome(
        claim=claim.name,
        claim_digest=claim.digest,
        seeds={"development": [], "reported": _seeds(claim, figures)},
        figures=figures,
        code=code_digest(),
        versions=versions(),
        seconds=round(time.perf_counter() - began, 1),
        verdict=verdict_of(claim, figures),
    ).sealed()


def _seeds(claim: Claim, figures: Mapping[str, RowFigures]) -> list[int]:
    drawn = any(seeds.keys() != {EXACT} for f in figures.values() for m in f.values() for seeds in m.values())
    return list(claim.seeds) if drawn else []


def check_figures(claim: Claim, numbers: Mapping[str, Any]) -> dict[str, RowFigures]:
    """The figures of a check, where the claim says they lie.

    Raises:
        ConfigError: for a path that leads nowhere.
    """
    assert claim.check is not None
    out: dict[str, RowFigures] = {}
    for name, path in claim.check.figures.items():
        found = at_path(numbers, path, f"{claim.name}: {name}")
        values = found if isinstance(found, list) else [found]
        if isinstance(found, list) and len(found) != len(claim.seeds):
            raise ConfigError(
                f"claims: {claim.name}: '{path}' must have a value for each of {len(claim.seeds)} seeds. Got"
                f" {len(found)}."
            )
        seeds = [str(s) for s in claim.seeds] if isinstance(found, list) else [EXACT]
        out[name] = {TUNED: {"value": {s: float(v) for s, v in zip(seeds, values)}}}
    return out


def at_path(numbers: Any, path: str, who: str) -> Any:
    """The number at a path with slashes, or a list: `*` takes the rest of the path in every entry of a list."""
    at, parts = numbers, path.split("/")
    for k, part in enumerate(parts):
        if part == "*" and isinstance(at, list):
            rest = "/".join(parts[k + 1 :])
            return [at_path(entry, rest, who) if rest else entry for entry in at]
        if isinstance(at, list) and part.lstrip("-").isdecimal() and -len(at) <= int(part) < len(at):
            at = at[int(part)]
        elif isinstance(at, Mapping) and part in at:
            at = at[part]
        else:
            known = (
                list(at) if isinstance(at, Mapping) else f"0 to {len(at) - 1}" if isinstance(at, list) else "nothing"
            )
            raise ConfigError(f"claims: {who}: the path '{path}' leads nowhere at '{part}'. There is {known}.")
    if not isinstance(at, list | int | float):
        raise ConfigError(f"claims: {who}: the path '{path}' must lead to a number or a list. Got {str(at)[:60]!r}.")
    return at
