"""Trials: which values are tried next (Optuna's TPE), which trials are given up early (its median rule), and the best.

Trials come in batches of `BATCH`. What a batch tries depends on the batches before it, and on nothing else: each trial
has a sampler keyed by its number, and whether it is given up is decided after all of its batch have reached a rung. So
neither the number of processes nor an interruption changes a trial. Nothing is stored here: runs are kept in
directories named by what decides their numbers, and a search that is repeated finds them done.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedspan.config import RunConfig
from fedspan.errors import ConfigError
from fedspan.method import Abilities
from fedspan.randomness import generator, number
from fedspan.report.measures import Measure
from fedspan.studies.tuning.spaces import Space, Value

BATCH = 4
VALIDATION = 0.2
"""The validation part of trials where the experiment has none."""
_LOWER_IS_BETTER = frozenset({"loss", "rmse"})

Line = Mapping[str, Any]
"""The line of an evaluated round: measures with their summaries."""


@dataclass(frozen=True, kw_only=True)
class TrialJob:
    """A run of a trial up to a rung; `folder` is its place, the same for all of its rungs."""

    config: RunConfig
    label: str

    @property
    def folder(self) -> str:
        """A name that everything that decides the numbers goes into."""
        text = json.dumps(self.config.identity(), sort_keys=True)
        return f"s{self.config.seed}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


Runner = Callable[[Sequence[TrialJob]], Sequence[Line | None]]
"""Carries jobs out, or finds them done, and gives the line of each one's last round; None if it diverged."""


@dataclass(kw_only=True)
class Trial:
    """One set of values, and how it went."""

    number: int
    values: dict[str, Value]
    state: Literal["running", "complete", "pruned", "diverged"] = "running"
    value: float | None = None
    rounds: int = 0


@dataclass(frozen=True, kw_only=True)
class TuningOutcome:
    """All trials of a search, and the best of them."""

    trials: list[Trial]
    measure: Measure
    best: Trial
    edges: dict[str, str] = field(default_factory=dict)
    """Keys whose best value is the smallest or largest of all that were tried."""

    def count(self, state: str) -> int:
        """How many trials ended so."""
        return sum(t.state == state for t in self.trials)


def search(
    spaces: Sequence[Space],
    make: Callable[[Mapping[str, Value], int], RunConfig],
    run: Runner,
    *,
    who: str,
    trials: int,
    seeds: Sequence[int],
    measure: str | None = None,
    prune: bool = True,
) -> TuningOutcome:
    """Try values and return the best by a measure on validation parts, mean over clients, then seeds.

    Args:
        make: the experiment with these values and this seed, as a reported run would have it.
        who: the method's name, for messages.
        measure: its name; by default the experiment's first metric, else accuracy, RMSE or loss.

    Raises:
        ConfigError: without optuna, for a measure that the runs do not have, or if every trial diverged.
    """
    optuna = _optuna()
    # Optuna minimises: a measure of which more is better is told with its sign changed.
    study = optuna.create_study(direction="minimize", pruner=optuna.pruners.MedianPruner(n_startup_trials=BATCH - 1))
    count = trials if spaces else 1  # without a key to tune there is one trial: what the experiment says
    for n in range(min(BATCH, count)):
        study.enqueue_trial(_spread(spaces, n, min(BATCH, count)))
    found: list[Trial] = []
    judge: Measure | None = None
    for start in range(0, count, BATCH):
        batch = [_ask(optuna, study, spaces, n) for n in range(start, min(start + BATCH, count))]
        found += [t for t, _ in batch]
        plain = make(batch[0][0].values, seeds[0])
        full, directions = plain.rounds, {m.name: m.higher for m in plain.evaluate.found()}
        for rung in _rungs(plain) if prune else [full]:
            alive = [(t, asked) for t, asked in batch if t.state == "running"]
            jobs = [
                TrialJob(
                    config=replace(trial_config(make(t.values, seed)), rounds=rung),
                    label=f"{who}, trial {t.number + 1} of {count}, seed {seed}",
                )
                for t, _ in alive
                for seed in seeds
            ]
            lines = run(jobs)
            judge = judge or measure_of([line for line in lines if line is not None], measure, directions)
            for k, (t, _) in enumerate(alive):
                _reached(t, lines[k * len(seeds) : (k + 1) * len(seeds)], judge, rung)
            for t, asked in alive:  # after all of the batch are at the rung
                _decide(optuna, study, t, asked, judge, last=rung == full)
    done = [t for t in found if t.state == "complete"]
    if judge is None or not done:
        raise ConfigError(
            f"tune: no trial of {who} came to its end, {sum(t.state == 'diverged' for t in found)} of {count} diverged;"
            " search smaller values, e.g. method.lr=log:1e-5:1e-2."
        )
    best = min(done, key=lambda t: _badness(t, judge))  # of equals the first
    marks = {s.key: s.edge(best.values[s.key], [t.values[s.key] for t in found]) for s in spaces}
    return TuningOutcome(
        trials=found, measure=judge, best=best, edges={k: v for k, v in marks.items() if v is not None}
    )


def trial_config(config: RunConfig) -> RunConfig:
    """The experiment judged on validation parts, after every quarter of its rounds."""
    share = config.partition.validation or VALIDATION
    return replace(
        config,
        partition=replace(config.partition, validation=share),
        train=replace(config.train, evaluate_part="validation", evaluate_every=_quarter(config.rounds)),
    )


def measure_of(lines: Sequence[Line], name: str | None, metrics: Mapping[str, bool]) -> Measure | None:
    """The measure that trials are judged by, and its direction; None as long as there is no line.

    Args:
        metrics: those that the experiment asks for, and whether higher is better.

    Raises:
        ConfigError: for a measure that the runs do not have.
    """
    if not lines:
        return None
    have = [k for k, v in lines[0].items() if isinstance(v, Mapping) and "mean" in v]
    wanted = [name] if name is not None else [*metrics, "accuracy", "rmse", "loss"]
    for each in wanted:
        if each in have:
            higher = metrics.get(each, each not in _LOWER_IS_BETTER)
            return Measure(each, percent=each.endswith("accuracy"), higher=higher)
    raise ConfigError(f"tune: --measure must be one that the runs have: {', '.join(have)}. Got {str(name)[:60]!r}.")


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError("tune: this needs optuna. Install it with: pip install 'fedspan[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _spread(spaces: Sequence[Space], n: int, count: int) -> dict[str, Value]:
    """Value n of a first batch that covers every space evenly: one from the middle of each of `count` equal parts."""
    return {s.key: s.at((generator(0, "tune", s.key).permutation(count)[n] + 0.5) / count) for s in spaces}


def _ask(optuna: Any, study: Any, spaces: Sequence[Space], n: int) -> tuple[Trial, Any]:
    study.sampler = optuna.samplers.TPESampler(
        seed=number(0, "tune", n) % 2**32, n_startup_trials=1, constant_liar=True
    )
    asked = study.ask()
    return Trial(number=n, values={s.key: s.suggest(asked) for s in spaces}), asked


def _rungs(config: RunConfig) -> list[int]:
    """Rounds at which trials are looked at: a quarter, a half, the end; none before the method's own part begins."""
    rounds, part = config.rounds, _quarter(config.rounds)
    begins = Abilities(config.only(config.method["name"])).cautions.begins()
    first = 0 if begins is None else begins.round
    return [r for r in sorted({part, 2 * part}) if first < r < rounds] + [rounds]


def _quarter(rounds: int) -> int:
    return max(1, math.ceil(rounds / 4))


def _reached(trial: Trial, lines: Sequence[Line | None], measure: Measure | None, rung: int) -> None:
    """Note a trial's value at a rung, or that one of its seeds diverged before it."""
    values = [None if line is None or measure is None else line[measure.name].get("mean") for line in lines]
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    if len(known) < len(lines):
        trial.state = "diverged"
        return
    trial.value, trial.rounds = statistics.fmean(known), rung


def _decide(optuna: Any, study: Any, trial: Trial, asked: Any, measure: Measure | None, last: bool) -> None:
    """End a trial that diverged, is at its end, or lies behind the median of those before it."""
    if trial.state == "diverged":
        study.tell(asked, state=optuna.trial.TrialState.PRUNED)  # without a value: the worst there is
        return
    bad = _badness(trial, measure)
    asked.report(bad, trial.rounds)
    if last:
        trial.state = "complete"
        study.tell(asked, bad)
    elif asked.should_prune():
        trial.state = "pruned"
        study.tell(asked, state=optuna.trial.TrialState.PRUNED)


def _badness(trial: Trial, measure: Measure | None) -> float:
    assert trial.value is not None and measure is not None
    return -trial.value if measure.higher else trial.value
