"""Experiments with a paper's figures: what they consist of, which rows are wanted, and where they are found."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from fedspan.errors import ConfigError, nearest
from fedspan.storage.toml import read_small


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What was published; figures are percent, (mean, ±) or (mean,) as printed."""

    title: str = ""
    reference: str = ""
    table: str = ""
    columns: tuple[str, ...] = ()
    remarks: str = ""
    values: dict[str, list[float]] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    """The named groups of clients that it prints figures of, as the partition calls them."""
    group_values: dict[str, list[float]] = field(default_factory=dict)
    """By row, a figure for each of `groups`."""


@dataclass(frozen=True, kw_only=True)
class Quick:
    """What --quick changes; `set` holds dotted keys of the experiment."""

    seeds: int = 1
    lr: tuple[float, ...] | None = None
    rows: tuple[str, ...] | None = None
    set: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A line of the table: a method with fields, and what its learning rate is chosen from."""

    label: str
    method: str
    fields: Mapping[str, Any]
    paper: str | None
    lr: tuple[float, ...]
    rules: tuple[Mapping[str, Any], ...]
    set: Mapping[str, Any]
    tuned_as: Mapping[str, Any] = field(default_factory=dict)  # fields during the choice: one choice for several rows

    @property
    def slug(self) -> str:
        """The label as `--rows` and directories write it."""
        return slug(self.label)


@dataclass(frozen=True, kw_only=True)
class PaperExperiment:
    """A file, ready to be run: `base` is the experiment proper in the layout of `fedspan.config`."""

    name: str
    paper: Paper
    rows: tuple[PaperRow, ...]
    base: Mapping[str, Any]
    missing: tuple[str, ...] = ()  # rows of the paper's table that no row of the file stands for
    seeds: int = 3
    first_seed: int | None = None  # of the tests; None: the seed on which learning rates are chosen
    validation: float = 0.05
    tuning_rounds: int | None = None
    quick: Quick = field(default_factory=Quick)
    quickened: bool = False

    def select(self, wanted: Sequence[str]) -> PaperExperiment:
        """Only some rows, by label, by their label's slug or its beginning (`pfl-mf-r10`), or by a pattern with *.

        Raises:
            ConfigError: for a name that fits no row.
        """
        chosen: set[str] = set()
        for name in wanted:
            s = name if any(c in name for c in "*?") else slug(name)
            fits = {r.label for r in self.rows if r.slug == s or r.slug.startswith(f"{s}-") or _like(r.slug, name)}
            if not fits:
                raise ConfigError(
                    f"{self.name}: there is no row '{name[:60]}'.{nearest(s[:60], [r.slug for r in self.rows])}"
                )
            chosen |= fits
        return replace(self, rows=tuple(r for r in self.rows if r.label in chosen))

    def retune(self, lr: Sequence[float] = (), tuning_rounds: int | None = None) -> PaperExperiment:
        """Other learning rates for every row to choose from, or another number of rounds to choose them by."""
        made = self if tuning_rounds is None else replace(self, tuning_rounds=tuning_rounds)
        return replace(made, rows=tuple(replace(r, lr=tuple(lr)) for r in made.rows)) if lr else made

    def quicken(self) -> PaperExperiment:
        """The scaled-down experiment of `--quick`: fewer clients, rounds, examples, learning rates and rows."""
        base = copied(self.base)
        for key, value in self.quick.set.items():
            put(base, key, value)
        made = replace(self, base=base, seeds=self.quick.seeds, tuning_rounds=None, quickened=True)
        return made.retune(self.quick.lr or ())


def _like(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern.strip().lower())


def slug(label: str) -> str:
    """Lower-case letters, digits and single dashes: `pFL-MF r=10 (paper form)` becomes pfl-mf-r10-paper-form."""
    return re.sub(r"[^a-z0-9.]+", "-", label.lower().replace("=", "")).strip("-.")


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested tables."""
    *path, last = key.split(".")
    at = values
    for name in path:
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            raise ConfigError(f"Reproduce: '{name}' is not a section, so '{key[:60]}' cannot be set.")
    at[last] = value


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables that may be changed."""
    return {k: copied(v) if isinstance(v, Mapping) else v for k, v in values.items()}


# ------------------------------------------------------------------------------------------------ finding


def available() -> dict[str, Any]:
    """The experiments that come with fedspan by full name, e.g. pfl-mf/table2-permuted-mnist."""
    root = resources.files("fedspan.studies.papers").joinpath("experiments")
    found: dict[str, Any] = {}
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.is_dir():
            found |= {f"{folder.name}/{f.name[:-5]}": f for f in folder.iterdir() if f.name.endswith(".toml")}
    return dict(sorted(found.items()))


def load_experiment(name: str) -> PaperExperiment:
    """An experiment by full or short name, or from the path of a .toml file.

    Raises:
        ConfigError: for an unknown name (with the nearest), or a file that does not fit.
    """
    from fedspan.studies.papers.published import parse

    known = available()
    if name.endswith(".toml"):
        return parse(read_small(name, "Reproduce"), Path(name).stem)
    matches = [full for full in known if name in (full, full.split("/")[-1])]
    if len(matches) > 1:
        raise ConfigError(f"Reproduce: '{name}' is the name of several; write one of {', '.join(matches)}.")
    if not matches:
        everything = [*known, *(full.split("/")[-1] for full in known)]
        raise ConfigError(f"Reproduce: there is no experiment '{name[:60]}'.{nearest(name[:60], everything)}")
    return parse(known[matches[0]].read_bytes(), matches[0].split("/")[-1])
