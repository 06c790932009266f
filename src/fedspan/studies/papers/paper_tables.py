"""The comparison with the paper as a table: Markdown, CSV, JSON, and cells for the terminal."""

from __future__ import annotations

import csv
import html
import io
import statistics
from collections.abc import Sequence
from typing import Any

from fedspan.config import RunConfig
from fedspan.studies.papers.experiment_file import PaperExperiment
from fedspan.studies.papers.step_sizes import RowOutcome

TITLES = ("row", "paper %", "ours %", "difference", "lr chosen", "MB up", "MB down", "seconds per run")
AFTER = TITLES.index("difference") + 1
"""Where the columns of named groups of clients stand."""
NOT_HERE = "not here yet"


def describe(experiment: PaperExperiment, config: RunConfig, seeds: int, tuned: bool = True) -> list[str]:
    """What was run, in sentences above the table; `tuned` is false if no row had a learning rate to choose."""
    paper = experiment.paper
    where = ", ".join([paper.table, *paper.columns]) if paper.table else ""
    lines = [f"{paper.title}." if paper.title else f"{experiment.name}."]
    if paper.reference:
        lines.append(f"Paper: {paper.reference}{f' ({where})' if where else ''}. {paper.remarks}".strip())
    clients = "natural clients" if config.partition.clients is None else f"{config.partition.clients} clients"
    scale = f"{clients}, {config.rounds} rounds"
    if config.data.limit is not None:
        scale += f", {config.data.limit:,} examples"
    if experiment.quickened:
        lines.append(f"quick: {scale}; not comparable with the paper.")
    else:
        lines.append(f"Here: {scale}.")
    rounds = f" after {experiment.tuning_rounds} rounds" if experiment.tuning_rounds else ""
    steps = "Learning rates: given"
    if tuned:
        steps = (
            f"Learning rates: per {'method' if any(r.tuned_as for r in experiment.rows) else 'row'}, by accuracy on a"
            f" validation part ({100 * experiment.validation:g} % of each client, seed"
            f" {config.seed}){rounds}; * marks one at the edge of its grid"
        )
    lines.append(f"{steps}. Ours: mean over clients at the last round, {_over(seeds, experiment.first_seed)}.")
    if paper.groups:
        lines.append(f"{', '.join(paper.groups)}: ours over the clients of that group, in brackets the paper's.")
    return lines


def _over(seeds: int, first: int | None) -> str:
    """Which seeds a figure is over, in words."""
    if seeds == 1:
        return "one seed" if first is None else f"seed {first}"
    which = f"{seeds} seeds" if first is None else f"seeds {first} to {first + seeds - 1}"
    return f"then mean ± standard deviation over {which}"


def groups_of(outcomes: Sequence[RowOutcome]) -> list[str]:
    """The named groups of clients that any row has figures of."""
    return list(dict.fromkeys(name for o in outcomes for name in o.groups))


def titles(outcomes: Sequence[RowOutcome]) -> tuple[str, ...]:
    """The titles of the columns: `TITLES`, and beside ours one for each named group of clients."""
    return (*TITLES[:AFTER], *(f"{name} %" for name in groups_of(outcomes)), *TITLES[AFTER:])


def right(shown: Sequence[str]) -> tuple[int, ...]:
    """The columns of numbers."""
    return tuple(k for k, title in enumerate(shown) if title not in ("row", "lr chosen"))


def cells(experiment: PaperExperiment, outcomes: Sequence[RowOutcome], everything: bool) -> list[tuple[str, ...]]:
    """The cells of the table in the order of `titles`; `everything` adds what the paper has and fedspan has not."""
    groups = groups_of(outcomes)
    rows: list[tuple[str, ...]] = [
        (
            *(o.row.label, _paper(experiment, o.row.paper), _ours(o), _difference(experiment, o)),
            *(_group(experiment, o, name) for name in groups),
            *(_lr(o), *(_number(v) for v in (o.megabytes_up, o.megabytes_down, o.seconds))),
        )
        for o in outcomes
    ]
    if everything:
        rows += [
            (label, _paper(experiment, label), NOT_HERE, *[""] * (len(TITLES) + len(groups) - 3))
            for label in experiment.missing
        ]
    return rows


def _group(experiment: PaperExperiment, o: RowOutcome, name: str) -> str:
    """Our figure of a group, and in brackets the paper's."""
    values, printed = o.groups.get(name), _printed(experiment, o, name)
    ours = "" if values is None else _percent(statistics.fmean(values), _spread(values))
    return ours if printed is None else f"{ours} ({printed:.2f})".strip()


def _printed(experiment: PaperExperiment, o: RowOutcome, name: str) -> float | None:
    paper = experiment.paper
    figures = paper.group_values.get(o.row.paper or "", [])
    return dict(zip(paper.groups, figures)).get(name)


def _spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _percent(mean: float, spread: float | None) -> str:
    return f"{100 * mean:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")


def _paper(experiment: PaperExperiment, name: str | None) -> str:
    if name is None:
        return ""
    mean, *spread = experiment.paper.values[name]
    return f"{mean:.2f}" + "".join(f" ± {s:g}" for s in spread)


def _ours(o: RowOutcome) -> str:
    if o.chosen is None:
        return "diverged"
    if o.mean is None:
        return f"diverged ({o.diverged} of {len(o.tests)} seeds)"
    return _percent(o.mean, o.std)


def _lr(o: RowOutcome) -> str:
    if o.chosen is None:
        return ""
    return o.chosen.setting.removeprefix("lr ") + (" *" if o.at_edge else "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _gap(experiment: PaperExperiment, o: RowOutcome) -> float | None:
    if o.mean is None or o.row.paper is None or experiment.quickened:  # a scaled-down run has nothing to compare
        return None
    return 100 * o.mean - experiment.paper.values[o.row.paper][0]


def _difference(experiment: PaperExperiment, o: RowOutcome) -> str:
    gap = _gap(experiment, o)
    return "" if gap is None else f"{gap:+.2f}"


def to_markdown(
    experiment: PaperExperiment, said: Sequence[str], outcomes: Sequence[RowOutcome], everything: bool
) -> str:
    """A Markdown page: what was run, and the table; `everything` as for `cells`."""
    shown, rows = titles(outcomes), cells(experiment, outcomes, everything)

    def line(texts: Sequence[str]) -> str:
        clean = [html.escape(t, quote=False).replace("\\", "\\\\").replace("|", "\\|") for t in texts]
        return f"| {' | '.join(clean)} |\n"

    head = line(shown) + line(["--:" if k in right(shown) else ":--" for k in range(len(shown))])
    said = [html.escape(s, quote=False).replace("*", "\\*") for s in said]
    return f"# {experiment.name}\n\n" + "\n\n".join(said) + "\n\n" + head + "".join(line(r) for r in rows)


def to_csv(experiment: PaperExperiment, outcomes: Sequence[RowOutcome]) -> str:
    """CSV in percent with full precision, one line per row that was run; empty where there is no value."""
    out, groups = io.StringIO(), groups_of(outcomes)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["row", "method", "fields", "paper", "paper_spread", "ours", "std_over_seeds", "weighted_by_examples"]
        + ["seeds", "diverged_seeds", "lr", "rule", "mb_up", "mb_down", "seconds_per_run", "difference"]
        + [f"ours: {_safe(name)}" for name in groups]
    )
    for o in outcomes:
        figure = experiment.paper.values[o.row.paper] if o.row.paper else []
        weighted = [r["accuracy"]["weighted"] for _, r in o.tests if r is not None]
        ours = [
            None if v is None else 100 * v for v in (o.mean, o.std, _mean(weighted) if o.mean is not None else None)
        ]
        numbers = [*(figure + [None, None])[:2], *ours, len(o.tests), o.diverged]
        chosen = [None, ""] if o.chosen is None else [o.chosen.lr, _pairs(o.chosen.rule)]
        words = [o.row.label, o.row.method, _pairs(o.row.fields)]
        words = [_safe(w) for w in words]
        last = [o.megabytes_up, o.megabytes_down, o.seconds, _gap(experiment, o)]
        last += [100 * statistics.fmean(o.groups[name]) if name in o.groups else None for name in groups]
        writer.writerow(["" if v is None else v for v in (*words, *numbers, *chosen, *last)])
    return out.getvalue()


def _safe(text: str) -> str:
    """A cell that no spreadsheet runs, as it would one that starts like a formula."""
    return "'" + text if text[:1] in ("=", "+", "-", "@") else text


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _pairs(values: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in values.items())


def to_json(experiment: PaperExperiment, said: Sequence[str], outcomes: Sequence[RowOutcome]) -> dict[str, Any]:
    """Everything in plain values: figures of the paper, what was tried and tested, and in which directories."""

    def entry(o: RowOutcome) -> dict[str, Any]:
        return {
            "label": o.row.label,
            "method": o.row.method,
            "fields": dict(o.row.fields),
            "paper": experiment.paper.values[o.row.paper] if o.row.paper else None,
            "mean": o.mean,
            "std_over_seeds": o.std,
            "diverged": o.chosen is None or o.diverged > 0,
            "lr": None if o.chosen is None else o.chosen.lr,
            "rule": {} if o.chosen is None else dict(o.chosen.rule),
            "lr_at_edge": o.at_edge,
            "megabytes_up": o.megabytes_up,
            "megabytes_down": o.megabytes_down,
            "seconds_per_run": o.seconds,
            "difference": _gap(experiment, o),
            "groups": {
                name: {
                    "mean": statistics.fmean(v),
                    "std_over_seeds": _spread(v),
                    "paper": _printed(experiment, o, name),
                }
                for name, v in o.groups.items()
            },
            "validation": [
                {"lr": j.lr, "rule": dict(j.rule), "accuracy": v, "directory": j.folder.as_posix()} for j, v in o.tried
            ],
            "tests": [
                {
                    "seed": j.config.seed,
                    "accuracy": None if r is None else r["accuracy"],
                    "seconds": None if r is None else r["seconds"],
                    "directory": j.folder.as_posix(),
                }
                for j, r in o.tests
            ],
        }

    return {
        "name": experiment.name,
        "quick": experiment.quickened,
        "said": list(said),
        "reference": experiment.paper.reference,
        "rows": [entry(o) for o in outcomes],
        "not_here_yet": {label: experiment.paper.values[label] for label in experiment.missing},
    }
