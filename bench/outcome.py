"""What has been measured: kept in a file after every measurement, and summed up in rows of medians and ratios."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.contestants import CONTESTANTS, FLOOR, title_of

Row = dict[str, Any]
MEDIANS = ("evaluate_seconds", "whole_seconds", "wall_seconds")


@dataclass
class Outcome:
    """The content of bench.json."""

    path: Path
    machine: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Gradients by workload, row and number of rounds."""
    measurements: list[Row] = field(default_factory=list)
    scale: list[Row] = field(default_factory=list)
    """What `bench.scale` told of many clients."""

    @staticmethod
    def load(path: Path) -> Outcome:
        """What an earlier run has left; empty if there is nothing."""
        if not path.is_file():
            return Outcome(path)
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Outcome(path, kept["machine"], kept["counts"], kept["measurements"], kept["scale"])

    def save(self) -> None:
        """Write everything, in one step."""
        whole = {"machine": self.machine, "rows": self.rows(), "scale": self.scale}
        whole |= {"counts": self.counts, "measurements": self.measurements}
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)

    def has(self, workload: str, contestant: str, turn: int) -> bool:
        """Whether that turn was measured; one that failed was not."""
        return any(
            (m["workload"], m["contestant"], m["turn"]) == (workload, contestant, turn) and "error" not in m
            for m in self.measurements
        )

    def add(self, found: Row) -> None:
        """Keep a measurement in the place of an earlier one of the same turn."""
        key = [found[k] for k in ("workload", "contestant", "turn")]
        self.measurements = [
            m for m in self.measurements if [m[k] for k in ("workload", "contestant", "turn")] != key
        ] + [found]
        self.save()

    def rows(self) -> list[Row]:
        """One row for every contestant on every workload: medians over the turns, ratios to the floor of the turn."""
        found = []
        for workload in dict.fromkeys(m["workload"] for m in self.measurements):
            here = [m for m in self.measurements if m["workload"] == workload]
            order = [name for name in CONTESTANTS if any(m["contestant"] == name for m in here)]
            floors = {m["turn"]: m["examples"] / m["seconds"] for m in here if m["contestant"] == FLOOR and _good(m)}
            for name in order:
                found.append(_row(workload, name, [m for m in here if m["contestant"] == name], floors))
        return found


def _good(m: Row) -> bool:
    return "error" not in m and bool(m.get("seconds"))


def _row(workload: str, name: str, turns: list[Row], floors: dict[int, float]) -> Row:
    c = CONTESTANTS[name]
    row: Row = {"workload": workload, "column": title_of(workload), "contestant": name, "title": c.title}
    good = [m for m in turns if "error" not in m]
    if not good:
        return row | {"error": turns[-1]["error"]}
    for what in ("gradients", "examples"):
        timed = [m for m in good if m.get("seconds") and what in m]
        if timed:
            row[f"{what}_per_s"] = statistics.median(m[what] / m["seconds"] for m in timed)
            ratios = [m[what] / m["seconds"] / floors[m["turn"]] for m in timed if m["turn"] in floors]
            if ratios:
                row[f"{what}_ratio"] = statistics.median(ratios)
                row[f"{what}_ratios"] = [min(ratios), max(ratios)]
    for what in MEDIANS:
        values = [m[what] for m in good if what in m]
        if values:
            row[what] = statistics.median(values)
    row["peak_mb"] = max(m["peak_mb"] for m in good)
    row["turns"] = len(good)
    row |= {k: good[-1][k] for k in ("rounds", "mapping", "version", "accuracy", "note") if k in good[-1]}
    return row


# ------------------------------------------------------------------------------------------------ the machine


def machine() -> dict[str, Any]:
    """What was measured on, as far as the system tells."""
    from importlib.metadata import version

    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    facts = {k.strip(): v.strip() for k, v in facts.items()}
    flags = facts.get("flags", "").split()
    return {
        "cpu": facts.get("model name", platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "avx512": "avx512f" in flags,
        "amx": "amx_bf16" in flags,
        "torch": version("torch"),
        "python": platform.python_version(),
        "system": platform.system(),
    }


# ------------------------------------------------------------------------------------------------ tables


def long_table(rows: Iterable[Row]) -> list[str]:
    """One line for every row, as the console shows them."""
    titles = ("samples/s", "x plain", "examples/s", "x plain", "eval s", "run s", "MB")
    lines = [f"{'workload':<16}{'row':<38}" + "".join(f"{t:>11}" for t in titles)]
    for r in rows:
        head = f"{r['workload']:<16}{r['title']:<38}"
        if "error" in r:
            lines.append(f"{head}  not run: {r['error']}")
            continue
        whole = r.get("whole_seconds", r["wall_seconds"] if "examples_per_s" not in r else None)
        cells = [
            *(_number(r.get(k), f) for k, f in (("gradients_per_s", ",.0f"), ("gradients_ratio", ".2f"))),
            *(_number(r.get(k), f) for k, f in (("examples_per_s", ",.0f"), ("examples_ratio", ".2f"))),
            *(_number(v, f) for v, f in ((r.get("evaluate_seconds"), ".2f"), (whole, ".1f"), (r["peak_mb"], ",.0f"))),
        ]
        lines.append(head + "".join(f"{c:>11}" for c in cells) + (f"  {r['note']}" if "note" in r else ""))
    return lines


def wide_table(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles and lines of the table of ratios: a line for every contestant, a column for every workload."""
    rated = [r for r in rows if "gradients_ratio" in r or "error" in r]
    columns = list(dict.fromkeys(r["column"] for r in rated if "gradients_ratio" in r))
    lines = []
    for name in dict.fromkeys(r["contestant"] for r in rated):
        mine = {r["column"]: r for r in rated if r["contestant"] == name}
        if any(column in mine for column in columns):
            lines.append([next(iter(mine.values()))["title"], *(_ratio(mine.get(column)) for column in columns)])
    return ["", *columns], lines


def _ratio(row: Row | None) -> str:
    """The ratio by gradients; in brackets by examples where that is another one."""
    if row is None:
        return "–"
    if "error" in row:
        return "not run"
    by_gradient, by_example = row["gradients_ratio"], row.get("examples_ratio")
    text = f"{by_gradient:.2f}"
    return text if by_example is None or abs(by_gradient - by_example) < 0.005 else f"{text} ({by_example:.2f})"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
