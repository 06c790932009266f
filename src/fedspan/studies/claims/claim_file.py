"""A claim as a file: the sentence and where it stands, our setting beside the paper's, what is run, and what decides.

    sentence, place, minutes (what it costs on one core); not_testable = "why" where it cannot be tried here
    [setting]      paper, ours, differences
    [experiment]   an experiment in the layout of its own file, with [[rows]]: name, method; perhaps fields, set (dotted
                   keys), lr (another grid as long), published (fields of the paper's own recipe, lr included), seeds
    [tuning]       lr (the grid every row starts from), trials (of every row), seeds, rounds, confirm
    [check]        in place of training: name and options of a check, and [check.figures] with paths into its numbers
    [[tests]]      row, minus (another row, or a number), measure, column; one of above, below, within; perhaps only_if.
                   measure = "seconds_per_round" has the rounds timed: run such a claim on a machine that does nothing
                   else
    seeds          those that are reported, 200 and on
    left_out       controls that cannot be afforded; [setting] differences must name each and say why
    runs           the folder of its runs, where several claims are decided by rows of one table; otherwise its own

Controls stand in every table by themselves (`fair_play`). What may be written anew without a new run (`[setting]`,
`minutes`, `runs`) is no part of a claim's digest; everything else is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Literal

from fedspan.errors import ConfigError, nearest, safe_name
from fedspan.method.fields import build
from fedspan.storage.toml import parse_toml, short
from fedspan.studies.tuning.seeds import REPORTED, check_development, check_reported

FREE = frozenset({"setting", "minutes", "runs"})
"""Keys of a claim's file that no figure and no verdict depends on."""
TUNED, PUBLISHED = "tuned", "published"
"""Columns of a table: each row at the step size its trials chose, and with the paper's own recipe."""
SECONDS = "seconds_per_round"
"""The measure that no seed decides: wall-clock time of a round, evaluation left out."""


@dataclass(frozen=True, kw_only=True)
class PaperSetting:
    """The paper's setting, ours, and what differs."""

    paper: str = ""
    ours: str = ""
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """A row of the table: a method with its fields."""

    name: str
    method: str
    fields: dict[str, Any] = field(default_factory=dict)
    set: dict[str, Any] = field(default_factory=dict)
    """Dotted keys of the experiment that differ in this row."""
    lr: tuple[float, ...] | None = None
    """The step sizes its trials begin with, as many as those of the other rows; those of [tuning] if not given."""
    published: dict[str, Any] | None = None
    """Fields of the paper's own recipe, step size included; there is no such column if not given."""
    seeds: tuple[int, ...] = ()
    """The seeds that are reported of this row, where it is too dear for all of the claim's; those if not given."""
    control: bool = False


@dataclass(frozen=True, kw_only=True)
class TuningBudget:
    """What every row is given: trials of the same number and length."""

    lr: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0)
    trials: int = 6
    seeds: tuple[int, ...] = (0,)
    rounds: int | None = None
    confirm: tuple[int, ...] = ()
    """Development seeds on which the chosen step must not diverge; otherwise the next best is taken."""

    def __post_init__(self) -> None:
        check_development((*self.seeds, *self.confirm), "claims")
        steps = list(self.lr)
        if len(steps) < 2 or sorted(set(steps)) != steps or steps[0] <= 0:
            raise ConfigError(f"claims: [tuning] lr must be two or more rising numbers above 0. Got {steps}.")
        if self.trials < len(steps):
            raise ConfigError(f"claims: [tuning] trials must be at least the grid's {len(steps)}. Got {self.trials}.")


@dataclass(frozen=True, kw_only=True)
class CheckCall:
    """A check that computes numbers without a federation, and where its figures lie in them."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    """Paths with slashes; `*` runs over a list, one value per seed."""


@dataclass(frozen=True, kw_only=True)
class DecidingTest:
    """A difference with its bar, taken seed by seed; accuracies and their differences are in points of percent."""

    row: str
    minus: str | float = 0.0
    measure: str = "accuracy"
    column: Literal["tuned", "published"] = "tuned"
    above: float | None = None
    below: float | None = None
    within: float | None = None
    only_if: str = ""
    """The condition under which the claim holds if this test passes where those without one do not."""

    def __post_init__(self) -> None:
        if sum(bar is not None for bar in (self.above, self.below, self.within)) != 1:
            raise ConfigError(f"claims: the test of '{self.row[:60]}' must have one of above, below and within.")

    @property
    def percent(self) -> bool:
        """Whether its numbers are points of percent."""
        return self.measure.startswith("accuracy")

    @property
    def words(self) -> str:
        """The test in words."""
        against = self.minus if isinstance(self.minus, str) else f"{self.minus:g}" if self.minus else ""
        what = f"{self.row} − {against}" if against else self.row
        bar = {"above": self.above, "below": self.below, "within ±": self.within}
        said = next(f"{name} {value:g}".replace("± ", "±") for name, value in bar.items() if value is not None)
        measure = "" if self.measure in ("accuracy", "value") else f", {self.measure.replace('_', ' ')}"
        column = ", as published" if self.column == PUBLISHED else ""
        return f"{what} {said}{' points' if self.percent else ''}{measure}{column}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper says, ready to be decided."""

    paper: str
    stem: str
    digest: str
    sentence: str
    place: str
    minutes: float
    setting: PaperSetting
    seeds: tuple[int, ...]
    tests: tuple[DecidingTest, ...]
    not_testable: str = ""
    runs: str = ""
    left_out: tuple[str, ...] = ()
    experiment: Mapping[str, Any] | None = None
    rows: tuple[ClaimRow, ...] = ()
    tuning: TuningBudget = field(default_factory=TuningBudget)
    check: CheckCall | None = None

    @property
    def name(self) -> str:
        """As it is called: paper/claim."""
        return f"{self.paper}/{self.stem}"

    @property
    def folder(self) -> str:
        """The folder of its runs, below that of all claims."""
        return f"{self.paper}-{self.runs or self.stem}"

    @property
    def trains(self) -> bool:
        """Whether it is decided by runs of federations."""
        return self.check is None and not self.not_testable

    @property
    def timed(self) -> bool:
        """Whether the time of a round decides something, so that its runs must have a machine for themselves."""
        return any(test.measure == SECONDS for test in self.tests)

    def seeds_of(self, row: ClaimRow) -> tuple[int, ...]:
        """The seeds that are reported of a row."""
        return row.seeds or self.seeds


@dataclass(frozen=True, kw_only=True)
class _Head:
    sentence: str
    place: str
    minutes: float = 0.0
    not_testable: str = ""
    runs: str = ""
    left_out: tuple[str, ...] = ()
    seeds: tuple[int, ...] = tuple(REPORTED[:3])


_SECTIONS: dict[str, type] = {"setting": dict, "experiment": dict, "tuning": dict, "check": dict}
_LISTS = ("rows", "tests")


def parse_claim(raw: bytes, paper: str, stem: str) -> Claim:
    """A checked claim from the text of its file.

    Raises:
        ConfigError: for anything that does not fit, in one sentence.
    """
    who = f"claims: {paper}/{stem}"
    values = parse_toml(raw, f"{stem}.toml")
    for key, kind in _SECTIONS.items():
        if not isinstance(values.get(key, {}), kind):
            raise ConfigError(f"{who}: {key} must be a section ([{key}]). Got {short(values[key])}.")
    for key in _LISTS:
        if not isinstance(values.get(key, []), list) or not all(isinstance(v, dict) for v in values.get(key, [])):
            raise ConfigError(f"{who}: {key} must be sections ([[{key}]]). Got {short(values[key])}.")
    head = build(_Head, {k: v for k, v in values.items() if k not in _SECTIONS and k not in _LISTS}, who)
    check = build(CheckCall, values["check"], f"{who}: [check]") if "check" in values else None
    made = Claim(
        paper=safe_name(paper, "A paper"),
        stem=safe_name(stem, "A claim"),
        digest=_digest(values),
        sentence=head.sentence,
        place=head.place,
        minutes=head.minutes,
        not_testable=head.not_testable,
        left_out=head.left_out,
        runs=head.runs and safe_name(head.runs, f"{who}: runs"),
        setting=build(PaperSetting, values.get("setting", {}), f"{who}: [setting]"),
        seeds=head.seeds,
        tests=tuple(
            build(DecidingTest, ({} if check is None else {"measure": "value"}) | t, f"{who}: [[tests]]")
            for t in values.get("tests", [])
        ),
        experiment=values.get("experiment"),
        rows=tuple(build(ClaimRow, r, f"{who}: [[rows]]") for r in values.get("rows", [])),
        tuning=build(TuningBudget, values.get("tuning", {}), f"{who}: [tuning]"),
        check=check,
    )
    _refuse_unfit(made, who)
    return made


def _refuse_unfit(claim: Claim, who: str) -> None:
    if not claim.sentence or not claim.place:
        raise ConfigError(f"{who}: a claim must have a sentence and its place in the paper. Got none.")
    if claim.not_testable:
        return
    for name in claim.left_out:
        if not any(name in said for said in claim.setting.differences):
            raise ConfigError(f"{who}: [setting] differences must say why {name[:60]} is left out. Got nothing.")
    if claim.trains:
        check_reported(claim.seeds, "claims")
        if claim.experiment is None or not claim.rows:
            raise ConfigError(f"{who}: a claim must have a [check], or an [experiment] and [[rows]]. Got neither.")
        for row in claim.rows:
            if row.lr is not None and len(row.lr) != len(claim.tuning.lr):
                raise ConfigError(
                    f"{who}: row '{row.name}' must begin with as many step sizes as the others, {len(claim.tuning.lr)}."
                    f" Got {len(row.lr)}."
                )
            if not set(row.seeds) <= set(claim.seeds) or len(set(row.seeds)) < len(row.seeds):
                raise ConfigError(
                    f"{who}: seeds of row '{row.name}' must be some of the claim's, {list(claim.seeds)}. Got"
                    f" {list(row.seeds)}."
                )
    if not any(not t.only_if for t in claim.tests):
        raise ConfigError(f"{who}: a claim must have a test without only_if. Got none.")
    seeds = {row.name: set(claim.seeds_of(row)) for row in claim.rows}
    every = set(claim.seeds)
    for test in claim.tests if claim.trains else ():
        common = seeds.get(test.row, every) & (seeds.get(test.minus, every) if isinstance(test.minus, str) else every)
        if len(common) < 2:
            raise ConfigError(
                f"{who}: the rows of a test must have at least two seeds in common, as one decides nothing. Got"
                f" {sorted(common)} for '{test.words}'."
            )
    names = [row.name for row in claim.rows]
    if len(set(names)) < len(names):
        raise ConfigError(f"{who}: rows must have different names. Got {names}.")


def _digest(values: Mapping[str, Any]) -> str:
    """A hash of what decides: the parsed values, so that comments and layout are free."""
    kept = {k: v for k, v in values.items() if k not in FREE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ finding


@cache
def papers() -> dict[str, dict[str, str]]:
    """The papers by their folders, in their order: `title`, `reference`."""
    raw = resources.files("fedspan.studies.claims").joinpath("catalogue", "papers.toml").read_bytes()
    return dict(parse_toml(raw, "papers.toml"))


@cache
def catalogue() -> tuple[Claim, ...]:
    """All claims that come with fedspan, paper by paper."""
    return tuple(_read())


def _read() -> Iterator[Claim]:
    root = resources.files("fedspan.studies.claims").joinpath("catalogue")
    for paper in papers():
        for file in sorted(_files(root.joinpath(paper)), key=lambda f: f.name):
            yield parse_claim(file.read_bytes(), paper, file.name.removesuffix(".toml"))


def _files(folder: Traversable) -> Iterator[Traversable]:
    """The claims of a folder and of those inside it."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir():
            yield from _files(entry)
        elif entry.name.endswith(".toml"):
            yield entry


def find_claim(name: str, among: Sequence[Claim] | None = None) -> Claim:
    """A claim by paper/claim, or by the claim alone where no other paper has one of that name.

    Raises:
        ConfigError: for an unknown name, with the nearest.
    """
    known = catalogue() if among is None else among
    found = [c for c in known if name in (c.name, c.stem)]
    if len(found) > 1:
        raise ConfigError(f"claims: '{name}' is the name of several; write one of {', '.join(c.name for c in found)}.")
    if not found:
        names = [n for c in known for n in (c.name, c.stem)]
        raise ConfigError(f"claims: there is no claim '{name[:60]}'.{nearest(name[:60], names)}")
    return found[0]
