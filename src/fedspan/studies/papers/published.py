"""Reading experiment files with a paper's figures: an ordinary experiment plus five sections of their own.

[paper]    title, reference, table, columns, remarks; [paper.values]: percent as printed, [mean, ±] or [mean]; perhaps
           groups, names of groups of clients with figures of their own, and [paper.group_values] with one for each
[grid]     lr = the learning rates that every row may choose from
[runs]     seeds, first_seed (of the tests; default: the file's seed, on which learning rates are chosen), validation
           (fraction for choosing), tuning_rounds (default: all rounds)
[quick]    seeds, lr, rows, and [quick.set] with dotted keys: what --quick changes
[[rows]]   label, method; perhaps fields, vary (every combination of values, written into the label as {key}),
           paper (its name in [paper.values]), lr, rules (alternative further fields), set (dotted keys),
           tuned_as (fields while the learning rate is chosen, so that rows share one choice)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fedspan.errors import ConfigError, safe_name
from fedspan.method.fields import Count, build
from fedspan.storage.toml import parse_toml, short
from fedspan.studies.papers.experiment_file import Paper, PaperExperiment, PaperRow, Quick

MOST_ROWS = 500


@dataclass(frozen=True, kw_only=True)
class _Grid:
    lr: tuple[float, ...] = (0.03, 0.1, 0.3, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class _Runs:
    seeds: int = 3
    first_seed: Count | None = None
    validation: float = 0.05
    tuning_rounds: int | None = None

    def __post_init__(self) -> None:
        if self.seeds < 1 or (self.tuning_rounds is not None and self.tuning_rounds < 1):
            raise ConfigError("Reproduce: seeds and tuning_rounds in [runs] must be at least 1. Got less.")
        if not 0 < self.validation < 0.7:
            raise ConfigError(f"Reproduce: validation must be a fraction in (0, 0.7). Got {self.validation}.")


@dataclass(frozen=True, kw_only=True)
class _Line:
    label: str = ""
    method: str = ""
    paper: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    vary: dict[str, list[Any]] = field(default_factory=dict)
    lr: tuple[float, ...] | None = None
    rules: tuple[dict[str, Any], ...] = ()
    set: dict[str, Any] = field(default_factory=dict)
    tuned_as: dict[str, Any] = field(default_factory=dict)


def parse(raw: bytes | str, name: str) -> PaperExperiment:
    """An experiment from the text of its file.

    Raises:
        ConfigError: if anything in it does not fit, in one sentence.
    """
    values = parse_toml(raw, f"{name}.toml")
    safe_name(name, "Reproduce: the file's name")
    sections: dict[str, dict[str, Any]] = {}
    for key in ("paper", "grid", "runs", "quick"):
        sections[key] = values.pop(key, {})
        if not isinstance(sections[key], dict):
            raise ConfigError(f"Reproduce: {key} must be a section ([{key}]). Got {short(sections[key])}.")
    lines = values.pop("rows", [])
    if not isinstance(lines, list) or not lines or not all(isinstance(line, dict) for line in lines):
        raise ConfigError(f"Reproduce: {name}.toml must list its rows as [[rows]] sections. Got none.")
    paper = build(Paper, sections["paper"], "Reproduce: [paper]")
    grid = build(_Grid, sections["grid"], "Reproduce: [grid]")
    runs = build(_Runs, sections["runs"], "Reproduce: [runs]")
    for label, figures in paper.values.items():
        if len(figures) not in (1, 2):
            raise ConfigError(f"Reproduce: the figure of '{label[:60]}' must be [mean, ±] or [mean]. Got {figures}.")
    for label, figures in paper.group_values.items():
        if label not in paper.values or len(figures) != len(paper.groups):
            raise ConfigError(
                f"Reproduce: [paper.group_values] must have a figure for each of {len(paper.groups)} groups and for"
                f" rows of [paper.values]. Got {len(figures)} for '{label[:60]}'."
            )
    rows = tuple(row for line in lines for row in _rows(line, grid.lr, paper))
    slugs = [row.slug for row in rows]
    if not 0 < len(rows) <= MOST_ROWS or len(set(slugs)) < len(slugs) or not all(slugs):
        raise ConfigError(f"Reproduce: {name}.toml must have 1 to {MOST_ROWS} rows, all with different labels.")
    return PaperExperiment(
        name=name,
        paper=paper,
        rows=rows,
        base=values,
        missing=tuple(label for label in paper.values if label not in {row.paper for row in rows}),
        seeds=runs.seeds,
        first_seed=runs.first_seed,
        validation=runs.validation,
        tuning_rounds=runs.tuning_rounds,
        quick=build(Quick, sections["quick"], "Reproduce: [quick]"),
    )


def _rows(values: dict[str, Any], lr: tuple[float, ...], paper: Paper) -> Iterator[PaperRow]:
    line = build(_Line, values, "Reproduce: [[rows]]")
    if not line.label or not line.method:
        raise ConfigError(f"Reproduce: every row must have a label and a method. Got {short(values)}.")
    if not (lr if line.lr is None else line.lr):
        raise ConfigError(f"Reproduce: row '{line.label[:60]}' must have at least one learning rate. Got none.")
    for point in itertools.product(*line.vary.values()):
        varied = dict(zip(line.vary, point))
        label, figure = _filled(line.label, varied), line.paper and _filled(line.paper, varied)
        if figure and figure not in paper.values:
            raise ConfigError(f"Reproduce: row '{label[:60]}' must name a figure of [paper.values]. Got '{figure}'.")
        yield PaperRow(
            label=label,
            method=line.method,
            fields={**line.fields, **varied},
            paper=figure or (label if label in paper.values else None),
            lr=line.lr or lr,
            rules=line.rules or ({},),
            set=line.set,
            tuned_as=line.tuned_as,
        )


def _filled(text: str, values: dict[str, Any]) -> str:
    # Not str.format: a file may come from anywhere, and format strings can reach into objects.
    for key, value in values.items():
        text = text.replace("{" + key + "}", str(value))
    return text
