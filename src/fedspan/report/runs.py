"""Finished runs as they lie on disk, and which of them belong together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.errors import FedspanError
from fedspan.report.text import clean, flatten, shown
from fedspan.storage.format_number import check_format

_NEEDED: dict[str, type] = {
    "method": str,
    "seed": int,
    "rounds": int,
    "measures": dict,
    "per_client": dict,
    "bytes": dict,
    "seconds": dict,
    "config": dict,
}
# These change neither the experiment nor its numbers, so they never tell two settings apart.
_SILENT = {"name", "data.root", "method.name", "out", "workers", "train.workers", "train.memory_mb"}
_SILENT |= {"train.evaluate_after"}
_DEPTH = 3
TRIALS = "tuning"
"""A folder beside runs whose runs only served to choose values."""


@dataclass(frozen=True)
class Run:
    """One finished run: its directory (None if it comes from memory), `result.json`, the lines of `metrics.jsonl`."""

    path: Path | None
    result: dict[str, Any]
    lines: list[dict[str, Any]]

    @property
    def method(self) -> str:
        """The method's name, fit to be shown."""
        return clean(str(self.result["method"]))

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.result["seed"])

    @property
    def rounds(self) -> int:
        """How many rounds it did."""
        return int(self.result["rounds"])

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration."""
        config: dict[str, Any] = self.result["config"]
        return config


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, ascending."""
        return tuple(sorted(run.seed for run in self.runs))


def load_run(path: str | Path) -> Run:
    """Read one run directory.

    Raises:
        FedspanError: if it is not a finished run, or a file of it is damaged.
    """
    path = Path(path)
    if path.name == "result.json" and path.is_file():
        path = path.parent
    if not path.is_dir():
        got = "a file" if path.exists() else "nothing there"
        raise FedspanError(f"Report: {path} must be a run directory. Got {got}.")
    where, metrics = path / "result.json", path / "metrics.jsonl"
    if not where.is_file():
        remedy = "the run has not finished; continue it with `fedspan run`" if metrics.is_file() else "no run is there"
        raise FedspanError(f"Report: {path} must hold a result.json; {remedy}.")
    result = _checked(_parse(_read(where), where), str(where))
    lines = []
    for k, text in enumerate(_read(metrics).splitlines(), 1):
        line = _parse(text, metrics, k)
        if not (isinstance(line, dict) and type(line.get("round")) is int and isinstance(line.get("bytes"), dict)):
            raise FedspanError(
                f"Report: line {k} of {metrics} must be an object with 'round' and 'bytes'; run it again."
            )
        check_format(line, f"Report: line {k} of {metrics}")
        lines.append(line)
    return Run(path, result, lines)


def load_runs(paths: str | Path | Iterable[str | Path], unfinished: list[Path] | None = None) -> list[Run]:
    """Read run directories, or directories that hold run directories (as `compare` writes), each run once.

    Of a directory of `reproduce` only the test runs count: those for the choice of a learning rate had other data.

    Args:
        unfinished: if given, runs without a result found inside such directories are added to it; they are left out.

    Raises:
        FedspanError: if a path holds no finished run, or a file is damaged.
    """
    found: dict[Path, Run] = {}
    for path in [Path(paths)] if isinstance(paths, str | Path) else [Path(p) for p in paths]:
        path = _tests(path)
        inside, waiting = [path], list[Path]()
        if path.is_dir() and not (path / "result.json").exists() and not (path / "metrics.jsonl").exists():
            inside, waiting = find_runs(path)
            if not inside:
                raise FedspanError(
                    f"Report: {path} must be or hold finished run directories. Got {len(waiting)} unfinished."
                )
        if unfinished is not None:
            unfinished += waiting
        for each in inside:
            place = (each.parent if each.name == "result.json" else each).resolve()
            if place not in found:
                found[place] = load_run(each)
    if not found:
        raise FedspanError("Report: at least one run directory must be given. Got none.")
    return list(found.values())


def _tests(path: Path) -> Path:
    """Where the test runs lie, for a directory of `reproduce`; any other path as it is."""
    reproduced = (path / "table.md").is_file() and (path / "test").is_dir()
    return path / "test" if reproduced else path


def find_runs(path: Path) -> tuple[list[Path], list[Path]]:
    """The finished and the unfinished run directories that a path is or holds."""
    if (path / "result.json").is_file():
        return [path], []
    if (path / "metrics.jsonl").is_file():
        return [], [path]
    inside: list[Path] = []
    waiting: list[Path] = []
    if path.is_dir():
        _search(path, _DEPTH, inside, waiting)
    return inside, waiting


def as_run(item: Run | Mapping[str, Any]) -> Run:
    """A run from memory: what `result.json` holds, plus the lines of `metrics.jsonl` as `curve`."""
    if isinstance(item, Run):
        return item
    rest = {k: v for k, v in item.items() if k != "curve"}
    return Run(None, _checked(rest, "the result"), list(item.get("curve") or []))


def group(runs: Sequence[Run]) -> list[Group]:
    """Collect the seeds of equal settings, in order of appearance.

    The label is the method, followed by the keys in which runs of this method differ: `pfl-mf rank=5`.
    A run that is given twice counts once; two different runs of one seed stay apart, under their directories' names.
    """
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    sets: dict[tuple[str, ...], list[Run]] = {}
    labels: dict[tuple[str, ...], str] = {}
    flats = {id(run): settings(run) for run in runs}
    differing = {m: differences([flats[id(r)] for r in members]) for m, members in methods.items()}
    for run in runs:
        keys, flat = differing[run.method], flats[id(run)]
        short = [k.rsplit(".", 1)[-1] for k in keys]
        names = [k if short.count(s) > 1 else s for k, s in zip(keys, short)]
        key = (run.method, *(repr(flat.get(k)) for k in keys))
        label = " ".join([run.method, *(f"{n}={shown(flat.get(k))}" for n, k in zip(names, keys))])
        same = [r for r in sets.get(key, []) if r.seed == run.seed]
        if any(r.result.get("digest") == run.result.get("digest") and r.result == run.result for r in same):
            continue
        if same:
            place = clean(run.path.name) if run.path else str(len(sets) + 1)
            key, label = (*key, str(run.path), str(len(sets))), f"{label} ({place})"
        sets.setdefault(key, []).append(run)
        labels.setdefault(key, clean(label))
    taken: set[str] = set()
    out = []
    for key, members in sets.items():
        label, k = labels[key], 2
        while label in taken:
            label, k = f"{labels[key]} ({k})", k + 1
        taken.add(label)
        out.append(Group(label, tuple(sorted(members, key=lambda r: r.seed))))
    return out


def settings(run: Run) -> dict[str, Any]:
    """The configuration with dotted keys, without what cannot change the numbers, and without seeds."""
    flat = flatten(run.config) | {"rounds": run.rounds}
    return {
        k: v
        for k, v in flat.items()
        if k not in _SILENT and k.rsplit(".", 1)[-1] != "seed" and not k.startswith(("train.checkpoint_", "evaluate."))
    }


def differences(flats: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same everywhere."""
    keys = dict.fromkeys(k for flat in flats for k in flat)
    return [k for k in keys if len({repr(flat.get(k)) for flat in flats}) > 1]


def _natural(path: Path) -> list[tuple[int, str]]:
    """So that rank 5 comes before rank 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", path.name)]


def _search(path: Path, depth: int, inside: list[Path], waiting: list[Path]) -> None:
    inner = (p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name != TRIALS)
    for child in sorted(inner, key=_natural):
        if (child / "result.json").is_file():
            inside.append(child)
        elif (child / "metrics.jsonl").is_file():
            waiting.append(child)
        elif depth > 1:
            _search(child, depth - 1, inside, waiting)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FedspanError(f"Report: {path.parent} must hold a {path.name}. Got none; run it again.") from None
    except (OSError, UnicodeDecodeError) as e:
        raise FedspanError(f"Report: {path} cannot be read: {e}.") from None


def _parse(text: str, path: Path, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        where = path if line is None else f"line {line} of {path}"
        raise FedspanError(f"Report: {where} must be JSON, but is damaged; run it again.") from None


def _checked(result: Any, where: str) -> dict[str, Any]:
    if not isinstance(result, dict):
        raise FedspanError(f"Report: {where} must be a JSON object. Got {type(result).__name__}.")
    wrong = [k for k, kind in _NEEDED.items() if not isinstance(result.get(k), kind) or isinstance(result.get(k), bool)]
    if wrong:
        raise FedspanError(f"Report: {where} is not the result of a run; missing or damaged: {', '.join(wrong)}.")
    check_format(result, f"Report: {where}")
    return result
