"""What every protocol of evaluation would report of the same runs: which model, weighted how, at which round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fedspan.report.grid import Cell, Grid, comma_separated, markdown
from fedspan.report.measures import Measure, mean, measures_of
from fedspan.report.runs import Group, Run, group
from fedspan.report.text import clean, number

_ROUNDS = {"last": "last round", "last5": "last five", "best": "best round"}
_OVER = {"mean": "clients", "pooled": "examples"}
_LISTED = 12  # clients that are named


@dataclass(frozen=True)
class ProtocolRow:
    """A method judged in one way: means over seeds of the last evaluation, the last five, and the best."""

    label: str
    model: str  # which of a client's models, by which rule
    over: str  # clients, or examples of all of them together
    values: dict[str, float | None]


def protocol_rows(runs: Sequence[Run], measure: Measure) -> list[ProtocolRow]:
    """Every way in which runs were judged by a measure, method by method; empty where they were asked for none."""
    out = []
    for g in group(runs):
        told = [_told(run, measure) for run in g.runs]
        for model in dict.fromkeys(name for some in told for name in some):
            for of, over in _OVER.items():
                found = [_dict(_dict(some.get(model)).get(of)) for some in told]
                values = {k: mean([number(f.get(k)) for f in found]) for k in _ROUNDS}
                if any(v is not None for v in values.values()):
                    out.append(ProtocolRow(g.label, clean(model), over, values))
    return out


def _told(run: Run, measure: Measure) -> dict[str, Any]:
    return _dict(_dict(_dict(run.result.get("evaluation")).get("protocols")).get(measure.name))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def grid(rows: Sequence[ProtocolRow], measure: Measure) -> Grid:
    """As a table with a column per method and a row per protocol, whose best is marked."""
    labels = list(dict.fromkeys(r.label for r in rows))
    held = {(r.model, r.over, r.label): r.values for r in rows}
    body = []
    for model, over in dict.fromkeys((r.model, r.over) for r in sorted(rows, key=lambda r: _order(r.model))):
        for k, said in _ROUNDS.items():
            values = [held.get((model, over, label), {}).get(k) for label in labels]
            known = [v for v in values if v is not None]
            if not known:
                continue
            top = measure.text((max if measure.higher else min)(known)) if len(known) > 1 else ""
            cells = [Cell(measure.text(v), measure.text(v) == top) for v in values]
            body.append([Cell(model), Cell(over), Cell(said), *cells])
    return Grid(["model", "over", "round", *labels], body, frozenset({0, 1, 2}))


def _order(model: str) -> tuple[int, str]:
    """Models as received first, then in the order of their names; other rules after all of them."""
    return (", by " in model) * 2 + (not model.startswith("as received")), model


def to_markdown(runs: Sequence[Run]) -> str:
    """A table per measure, under its name; empty where runs were asked for nothing."""
    parts = []
    for measure in measures_of(runs):
        if rows := protocol_rows(runs, measure):
            parts.append(f"{measure.title}\n\n{markdown(grid(rows, measure))}")
    return "\n".join(parts)


def to_csv(runs: Sequence[Run]) -> str:
    """With full precision, all measures in one table."""
    lines: list[list[str | int | float | None]] = []
    for measure in measures_of(runs):
        for r in protocol_rows(runs, measure):
            lines.append([measure.name, r.label, r.model, r.over, *r.values.values()])
    return comma_separated(["measure", "label", "model", "over", *_ROUNDS], lines)


def to_html(groups: Sequence[Group]) -> str:
    """As tables of the page, and who was left out of which metric."""
    runs, out = [run for g in groups for run in g.runs], ""
    for measure in measures_of(runs):
        rows = protocol_rows(runs, measure)
        if not rows:
            continue
        made = grid(rows, measure)
        head = "".join(f'<th scope="col">{escape(t)}</th>' for t in made.titles)
        body = ""
        for row in made.rows:
            cells = "".join(f"<td{' class=best' if c.bold else ''}>{escape(c.text)}</td>" for c in row[3:])
            names = "".join(f'<th scope="row">{escape(c.text)}</th>' for c in row[:3])
            body += f"<tr>{names}{cells}</tr>\n"
        caption = (
            f"{escape(measure.title)} of the same runs, as different protocols of evaluation would report it: which of"
            " a client's models is judged; the mean over clients, or one value over all examples together; the last"
            " evaluation, the mean of the last five, or the best. The best method of each row is marked."
        )
        out += f"<h3>Other protocols, {escape(measure.words)}</h3>\n"
        out += (
            f'<div class="box" role="region" aria-label="Protocols, {escape(measure.title)}" tabindex="0"><table>'
            f"<caption><span>{caption}</span></caption><thead><tr>{head}</tr></thead>"
            f"<tbody>\n{body}</tbody></table></div>\n"
        )
    said = "".join(f'<p class="note">{escape(s)}</p>\n' for s in left_out(groups))
    return out + said


def left_out(groups: Sequence[Group]) -> list[str]:
    """Who was left out of which metric, and why: a sentence per metric."""
    found: dict[str, dict[str, str]] = {}
    for g in groups:
        for run in g.runs:
            for name, why in _dict(_dict(run.result.get("evaluation")).get("left_out")).items():
                seed = f" (seed {run.seed})" if len(g.runs) > 1 else ""
                held = found.setdefault(clean(str(name)), {})
                held |= {f"{clean(str(who))}{seed}": clean(str(text), 200) for who, text in _dict(why).items()}
    same: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, some in found.items():
        same.setdefault(tuple(some.items()), []).append(name)
    return [_sentence(", ".join(names), dict(some)) for some, names in same.items() if some]


def _sentence(name: str, some: Mapping[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for who, why in some.items():
        by_reason.setdefault(why, []).append(who)
    parts = []
    for why, those in by_reason.items():
        more = f" and {len(those) - _LISTED} more" if len(those) > _LISTED else ""
        parts.append(f"{', '.join(those[:_LISTED])}{more} ({why})")
    return f"Left out of {name}: client {'; '.join(parts)}."
