"""What is read off runs: the measure they report, its value per run and client, and learning curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedspan.errors import FedspanError
from fedspan.report.runs import Group, Run
from fedspan.report.text import clean, number

Axis = Literal["round", "bytes", "seconds", "clock"]


@dataclass(frozen=True)
class Measure:
    """A number that says how well a client is served."""

    name: str
    percent: bool
    higher: bool  # whether a higher value is better

    @property
    def title(self) -> str:
        """Its name in a heading."""
        return f"{self.words} %" if self.percent else self.words

    @property
    def words(self) -> str:
        """Its name as people write it."""
        stem = max((k for k in _WORDS if self.name == k or self.name.startswith(f"{k}_")), key=len, default="")
        return _WORDS.get(stem, "") + self.name.removeprefix(stem).replace("_", " ")

    def text(self, value: float | None) -> str:
        """A value as shown to a person: percent with two decimals, or four digits."""
        if value is None:
            return "n/a"
        return f"{100 * value:.2f}" if self.percent else f"{value:.4g}"

    def phrase(self, value: float | None) -> str:
        """A value inside a sentence, with its unit."""
        return f"{self.text(value)} %" if self.percent else f"{self.words} {self.text(value)}"

    def gap(self, value: float) -> str:
        """A difference inside a sentence."""
        return f"{100 * value:.2f} points" if self.percent else f"{value:.4g}"

    def gain(self, a: float, b: float) -> float:
        """How much better `a` is than `b`; negative if worse."""
        return a - b if self.higher else b - a


_WORDS = {"rmse": "RMSE", "mae": "MAE", "mse": "MSE", "ece": "ECE", "roc_auc": "ROC AUC", "r2": "R2", "f1": "F1"}
ACCURACY = Measure("accuracy", percent=True, higher=True)
_LOWER = ("rmse", "loss", "squared_error", "perplexity")


def measures_of(runs: Sequence[Run]) -> list[Measure]:
    """The measures that runs were asked for, one that all of them have first; the usual one where none were."""
    asked: dict[str, Measure] = {}
    for run in runs:
        for name, higher in _asked(run).items():
            asked.setdefault(name, Measure(name, percent=name.endswith("accuracy"), higher=higher))
    have = {n: sum(number(_summary(run, n).get("mean")) is not None for run in runs) for n in asked}
    found = [m for n, m in asked.items() if have[n]]
    usual = _usual(runs)
    if not any(have[m.name] == len(runs) for m in found):
        return [usual, *(m for m in found if m != usual)]
    return sorted(found, key=lambda m: have[m.name] < len(runs))


def measure_of(runs: Sequence[Run], name: str | None = None) -> Measure:
    """The measure that tables and figures show: the one named, else the first that was asked for, else the usual one.

    Raises:
        FedspanError: if the runs have no such measure.
    """
    if name is None:
        return measures_of(runs)[0]
    known = {m.name: m for m in measures_of(runs)}
    for run in runs:
        for column in run.result["measures"]:
            stem = next((m for m in known.values() if column.startswith(f"{m.name}_")), None)
            if column not in known and column.startswith("accuracy"):
                known[column] = Measure(column, percent=True, higher=True)
            elif column not in known and (stem is not None or column.startswith(_LOWER)):
                known[column] = Measure(column, stem is not None and stem.percent, stem is not None and stem.higher)
    if name not in known:
        raise FedspanError(f"Report: the measure must be one of {', '.join(known)}. Got {name[:60]!r}.")
    return known[name]


def _asked(run: Run) -> dict[str, bool]:
    """The metrics that a run was asked for, and whether higher is better."""
    told = run.result.get("evaluation")
    metrics = told.get("metrics") if isinstance(told, dict) else None
    some = metrics if isinstance(metrics, dict) else {}
    named = {k: v for k, v in some.items() if isinstance(k, str) and k.isidentifier() and len(k) <= 60}  # files too
    return {k: not (isinstance(v, dict) and v.get("higher") is False) for k, v in named.items()}


def _usual(runs: Sequence[Run]) -> Measure:
    """Accuracy where there is one, else RMSE, else loss."""
    for name in ("accuracy", "rmse", "loss"):
        if any(number(_summary(run, name).get("mean")) is not None for run in runs):
            return ACCURACY if name == "accuracy" else Measure(name, percent=False, higher=False)
    return ACCURACY


def value(run: Run, measure: Measure, of: str = "mean") -> float | None:
    """A summary over the run's clients: `mean`, `std`, `weighted`, or `worst` (the tenth percentile from below)."""
    if of != "worst":
        return number(_summary(run, measure.name).get(of))
    if measure.higher:
        return number(_summary(run, measure.name).get("p10"))
    values = [c.value for c in clients(run, measure)]
    return float(np.percentile(values, 90)) if values else None


@dataclass(frozen=True)
class ClientValue:
    """One client's final value."""

    index: int
    name: str
    group: int | None
    examples: float | None
    seed: int
    value: float


def clients(run: Run, measure: Measure) -> list[ClientValue]:
    """The clients that have a value, in the order of the file."""
    columns = run.result["per_client"]
    values, counts, ids = (_list(columns.get(k)) for k in (measure.name, "n", "id"))
    names, groups = _list(run.result.get("names")), _list(run.result.get("groups"))
    out = []
    for k, v in enumerate(number(v) for v in values):
        if v is None:
            continue
        at = number(ids[k]) if k < len(ids) else None
        index = k if at is None else int(at)
        known = 0 <= index < len(names)
        in_group = number(groups[index]) if 0 <= index < len(groups) else None
        out.append(
            ClientValue(
                index,
                clean(str(names[index])) if known else str(index),
                None if in_group is None else int(in_group),
                number(counts[k]) if k < len(counts) else None,
                run.seed,
                v,
            )
        )
    return out


def alone(run: Run, other: Run, measure: Measure) -> dict[int, float] | None:
    """`other`'s value per client, if both runs deal with the same clients under the same seed."""
    mine, theirs = clients(run, measure), clients(other, measure)
    if run.seed != other.seed or [(c.index, c.name, c.examples) for c in mine] != [
        (c.index, c.name, c.examples) for c in theirs
    ]:
        return None
    return {c.index: c.value for c in theirs}


def points(run: Run, measure: Measure, x: Axis) -> list[tuple[int, float, float]]:
    """(round, x, value) of every evaluated round; x is the round, or what has been spent so far in MB or seconds.

    "clock" is the time on the clients' devices; a round without it adds nothing.
    """
    out = []
    sent = seconds = clock = 0.0
    for line in run.lines:
        sent += sum(number(line["bytes"].get(k)) or 0.0 for k in ("up", "down", "announce"))
        seconds += number(line.get("seconds")) or 0.0
        clock += time_on_devices(line) or 0.0
        found = line.get(measure.name)
        y = number(found.get("mean")) if isinstance(found, dict) else None
        if y is not None:
            at = {"round": float(line["round"]), "bytes": sent / 1e6, "seconds": seconds, "clock": clock}[x]
            out.append((int(line["round"]), at, y))
    last = value(run, measure)
    # A resumed run evaluates once more at the end without a line of its own.
    if last is not None and run.lines and (not out or out[-1][0] < run.rounds):
        spent = {"round": float(run.rounds), "bytes": sent / 1e6, "seconds": seconds, "clock": clock}
        out.append((run.rounds, spent[x], last))
    return out


def time_on_devices(line: Mapping[str, Any]) -> float | None:
    """How long a round would have taken on the clients' devices, if that was asked for."""
    told = line.get("clock")
    return number(told.get("seconds")) if isinstance(told, Mapping) else None


@dataclass(frozen=True)
class Curve:
    """The mean over seeds at the rounds all of them evaluated, and the standard deviation if there are several."""

    label: str
    x: list[float]
    y: list[float]
    spread: list[float] | None


def curve_of(group: Group, measure: Measure, x: Axis) -> Curve:
    """The learning curve of a group."""
    each = [{r: (at, y) for r, at, y in points(run, measure, x)} for run in group.runs]
    rounds = sorted(set.intersection(*(set(e) for e in each)))
    xs = [float(np.mean([e[r][0] for e in each])) for r in rounds]
    ys = [float(np.mean([e[r][1] for e in each])) for r in rounds]
    spread = [float(np.std([e[r][1] for e in each], ddof=1)) for r in rounds] if len(each) > 1 else None
    return Curve(group.label, xs, ys, spread)


def monitored(lines: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(round, value) of everything the method's monitor told at the evaluations."""
    out: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        seen = line.get("monitor")
        for name, told in seen.items() if isinstance(seen, dict) else ():
            value = number(told)
            if value is not None:
                out.setdefault(str(name), []).append((int(line["round"]), value))
    return out


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values there are."""
    kept = [v for v in values if v is not None]
    return math.fsum(kept) / len(kept) if kept else None


def deviation(values: Sequence[float | None]) -> float | None:
    """The sample standard deviation (n - 1) of the values there are; None below two."""
    kept = [v for v in values if v is not None]
    return float(np.std(kept, ddof=1)) if len(kept) > 1 else None


def _summary(run: Run, name: str) -> dict[str, Any]:
    found = run.result["measures"].get(name) or (run.result.get("accuracy") if name == "accuracy" else None)
    return found if isinstance(found, dict) else {}


def _list(column: Any) -> list[Any]:
    return column if isinstance(column, list) else []
