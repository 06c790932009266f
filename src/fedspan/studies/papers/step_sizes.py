"""The runs of a row: learning rates on validation parts of one seed, then the test at the chosen one for all seeds."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedspan.config import RunConfig, from_dict
from fedspan.errors import ConfigError
from fedspan.studies.papers.experiment_file import PaperExperiment, PaperRow, copied, put
from fedspan.studies.papers.group_figures import by_group
from fedspan.studies.tuning.seeds import check_development

Result = Mapping[str, Any]
Runner = Callable[["PaperJob"], Result | None]
"""Carries a job out (or finds it done) and gives its result; None if it diverged."""


@dataclass(frozen=True, kw_only=True)
class PaperJob:
    """One run: `folder` is where it goes below the output directory, a different one for every configuration."""

    row: PaperRow
    config: RunConfig
    rule: Mapping[str, Any]
    purpose: str  # "validation" or "test"

    @property
    def lr(self) -> float:
        """The learning rate, as it stands in the configuration: an override may have changed it."""
        return float(self.config.method["lr"])

    @property
    def setting(self) -> str:
        """The learning rate and the rule in words."""
        return ", ".join([f"lr {self.lr:g}", *(f"{k}={v}" for k, v in self.rule.items())])

    @property
    def folder(self) -> Path:
        """Everything that decides the numbers is in the name's digest, so a changed experiment never meets old runs."""
        identity = json.dumps([self.config.identity(), self.config.rounds], sort_keys=True)
        digest = hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
        return Path(self.purpose) / f"{self.row.slug[:50].rstrip('-.')}-lr{self.lr:g}-s{self.config.seed}-{digest}"


@dataclass(frozen=True, kw_only=True)
class RowOutcome:
    """A row of the table; accuracies are fractions."""

    row: PaperRow
    chosen: PaperJob | None = None  # None: every learning rate diverged
    at_edge: bool = False
    tried: tuple[tuple[PaperJob, float | None], ...] = ()
    tests: tuple[tuple[PaperJob, Result | None], ...] = field(default=())

    @property
    def diverged(self) -> int:
        """How many of the tests diverged."""
        return sum(result is None for _, result in self.tests)

    @property
    def accuracies(self) -> list[float]:
        """Mean accuracy over clients, one per seed."""
        return [accuracy(result) for _, result in self.tests if result is not None]

    @property
    def mean(self) -> float | None:
        """Over seeds; None if any seed diverged, as the mean of the lucky ones would flatter."""
        return statistics.fmean(self.accuracies) if self.tests and not self.diverged else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds; None for one seed."""
        return statistics.stdev(self.accuracies) if self.mean is not None and len(self.tests) > 1 else None

    @property
    def groups(self) -> dict[str, list[float]]:
        """Mean accuracy over the clients of each named group, one per seed; none if any seed diverged."""
        if self.mean is None:
            return {}
        found = [by_group(result) for _, result in self.tests if result is not None]
        return {name: [f[name] for f in found] for name in found[0] if all(name in f for f in found)}

    @property
    def seconds(self) -> float | None:
        """Wall time of a test run, mean over seeds."""
        times = [sum(r["seconds"].values()) for _, r in self.tests if r is not None]
        return statistics.fmean(times) if times else None

    @property
    def megabytes_up(self) -> float | None:
        """What the clients of a test run sent, mean over seeds."""
        return self._megabytes("up")

    @property
    def megabytes_down(self) -> float | None:
        """What the clients of a test run received, announcements included, mean over seeds."""
        return self._megabytes("down", "announce")

    def _megabytes(self, *ways: str) -> float | None:
        sent = [sum(r["bytes"][way] for way in ways) / 1e6 for _, r in self.tests if r is not None]
        return statistics.fmean(sent) if sent else None


def accuracy(result: Result) -> float:
    """Mean accuracy over clients at the end of a run.

    Raises:
        ConfigError: if no client had an example to be judged by.
    """
    value = result["accuracy"].get("mean")
    if value is None or not math.isfinite(value):
        raise ConfigError("Reproduce: no client has examples to be judged by; raise validation in [runs].")
    return float(value)


def config_of(
    experiment: PaperExperiment, row: PaperRow, lr: float, rule: Mapping[str, Any], overrides: Sequence[str]
) -> RunConfig:
    """The checked experiment of one row and learning rate; what is typed on the command line comes last."""
    values = copied(experiment.base)
    for key, value in row.set.items():
        put(values, key, value)
    if experiment.quickened:  # a row's own settings must not undo the scaling down
        for key, value in experiment.quick.set.items():
            put(values, key, value)
    values["method"] = {**values.get("method", {}), "name": row.method, **row.fields, **rule, "lr": lr}
    return from_dict(values, overrides, name=experiment.name).resolve()


def candidates(experiment: PaperExperiment, row: PaperRow, overrides: Sequence[str] = ()) -> list[PaperJob]:
    """The validation runs of a row, each configuration once; rows that are tuned alike have the same ones."""
    if row.tuned_as:
        row = replace(row, label=f"{row.method} tuned", fields={**row.fields, **row.tuned_as})
    jobs: dict[Path, PaperJob] = {}
    for rule in row.rules:
        for lr in row.lr:
            config = config_of(experiment, row, lr, rule, overrides)
            rounds = min(experiment.tuning_rounds or config.rounds, config.rounds)
            config = replace(
                config,
                rounds=rounds,
                partition=replace(config.partition, validation=experiment.validation),
                train=replace(config.train, evaluate_part="validation", evaluate_every=max(1, rounds)),
            )
            job = PaperJob(row=row, config=config, rule=rule, purpose="validation")
            jobs.setdefault(job.folder, job)
    return list(jobs.values())


def trials(jobs: Sequence[PaperJob]) -> Sequence[PaperJob]:
    """Those of a row's candidates that must be run: a grid of one leaves nothing to choose.

    Raises:
        ConfigError: if something would be chosen on a reported seed.
    """
    if len(jobs) < 2:
        return ()
    check_development([job.config.seed for job in jobs], "reproduce")
    return jobs


def finals(
    experiment: PaperExperiment,
    row: PaperRow,
    lr: float,
    rule: Mapping[str, Any],
    seeds: int,
    overrides: Sequence[str] = (),
) -> list[PaperJob]:
    """The runs that count: the chosen learning rate, no validation part, one per seed."""
    config = config_of(experiment, row, lr, rule, overrides)
    first = config.seed if experiment.first_seed is None else experiment.first_seed
    seeded = [replace(config, seed=first + k) for k in range(seeds)]
    return [PaperJob(row=row, config=c, rule=rule, purpose="test") for c in seeded]


def reproduce_row(
    experiment: PaperExperiment, row: PaperRow, seeds: int, overrides: Sequence[str], run: Runner
) -> RowOutcome:
    """Choose a row's learning rate by validation accuracy, then test it; a diverged run is the worst of its grid."""
    jobs = candidates(experiment, row, overrides)
    tried: list[tuple[PaperJob, float | None]] = []
    for job in trials(jobs):
        result = run(job)
        tried.append((job, None if result is None else accuracy(result)))
    best: tuple[PaperJob, float] | None = None
    for job, value in tried:
        if value is not None and (best is None or value > best[1]):  # of equals the first, which is the smallest step
            best = job, value
    if best is None and tried:
        return RowOutcome(row=row, tried=tuple(tried))
    chosen = jobs[0] if best is None else best[0]
    steps = sorted({job.lr for job in jobs})
    done = [(job, run(job)) for job in finals(experiment, row, chosen.lr, chosen.rule, seeds, overrides)]
    edge = len(steps) > 2 and chosen.lr in (steps[0], steps[-1])
    return RowOutcome(row=row, chosen=chosen, at_edge=edge, tried=tuple(tried), tests=tuple(done))
