"""One HTML file a person likes to look at: what was found, the numbers, the figures, and how to repeat it."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fedspan.errors import FedspanError
from fedspan.report import figures
from fedspan.report.assets import SCRIPT, STYLE
from fedspan.report.canvas import inline_svg
from fedspan.report.measures import Client, alone, clients, time_on_devices
from fedspan.report.palette import Look, looks
from fedspan.report.repeat import configuration, facts, notes
from fedspan.report.runs import Group, Run, group
from fedspan.report.tables import Row, columns, summary_rows
from fedspan.report.text import clean, without_paths
from fedspan.report.words import headline, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WORST = 10
_SETTINGS = 4


def write_page(runs: Sequence[Run], out: str | Path, title: str | None = None) -> Path:
    """Write the report of some runs as one self-contained HTML file.

    Args:
        out: the file, or a directory in which `report.html` is written.
        title: the heading; by default the experiment's name.

    Raises:
        FedspanError: if there are no runs, the file cannot be written, or matplotlib is missing.
    """
    if not runs:
        raise FedspanError("Report: at least one run must be given. Got none.")
    out = Path(out)
    out = out / "report.html" if out.is_dir() else out
    text = page(runs, title)
    temporary = out.with_name(out.name + ".tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, out)
    except OSError as e:
        raise FedspanError(f"Report: {out} cannot be written: {e.strerror}.") from None
    return out


def page(runs: Sequence[Run], title: str | None = None) -> str:
    """The page as text."""
    groups, rows = group(runs), summary_rows(runs)
    look = looks(groups)
    named = runs[0].config.get("name")
    title = escape(clean(title or (named if isinstance(named, str) and named else "fedspan report"), 120))
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    cards = "".join(
        f'<div><dt>{what}</dt><dd class="n">{number}</dd><dd class="who">{who}</dd></div>\n'
        for what, number, who in headline(rows)
    )
    says = "".join(f"<li>{s}</li>\n" for s in summary(rows, groups))
    warnings = "".join(f'<p class="note">{escape(n)}</p>\n' for n in notes(groups))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
<ul class="facts">{"".join(f"<li>{escape(f)}</li>" for f in facts(groups))}</ul>
</header>
<section aria-label="Summary">
<dl class="cards">
{cards}</dl>
<div class="says"><ul>
{says}</ul></div>
{warnings}</section>
<section>
<h2>Results</h2>
{_results(rows, look)}
</section>
<section>
<h2>Figures</h2>
<div class="figures">
{_figures(runs, rows)}</div>
</section>
{_coordinates(groups)}{_matching(groups)}<section>
<h2>Worst-served clients</h2>
{_worst_clients(rows, groups)}</section>
<section>
<h2>Configuration</h2>
{configuration(groups)}</section>
<footer>Written by fedspan. This file is complete in itself and loads nothing.</footer>
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _results(rows: Sequence[Row], look: dict[str, Look]) -> str:
    cols = columns(rows)
    best = [c.winners(rows) for c in cols]
    ordered = ' aria-sort="descending"' if rows[0].measure.higher else ' aria-sort="ascending"'
    head = "".join(
        f'<th scope="col"{ordered if k == 1 else ""}><button type="button">{escape(c.title)}</button></th>'
        for k, c in enumerate(cols)
    )
    body = ""
    for r in rows:
        dot = f'<span class="dot" style="background:{look[r.label].colour}" aria-hidden="true"></span>'
        body += f'<tr><th scope="row" data-v="{escape(r.label)}">{dot}{escape(r.label)}</th>'
        for c, winners in zip(cols[1:], best[1:]):
            assert c.sort is not None
            v = c.sort(r)
            mark = ' class="best"' if r.label in winners else ""
            body += f'<td{mark} data-v="{"" if v is None else repr(v)}">{escape(c.text(r))}</td>'
        body += "</tr>\n"
    kind = "over seeds (n − 1)" if any(r.over_seeds is not None for r in rows) else "over the clients of one seed"
    side = "below" if rows[0].measure.higher else "above"
    caption = (
        f"Means over clients, then seeds; ± is the standard deviation {kind}."
        f" Worst tenth: one client in ten lies {side}. 1 MB is a million bytes; downloads for evaluation do not count."
        " Click a heading to sort."
    )
    return (
        '<div class="box" role="region" aria-label="Table of results" tabindex="0"><table>'
        f"<caption><span>{caption}</span></caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )


def _figures(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    measure = rows[0].measure
    name = measure.name if measure.percent else measure.title
    band = " The band is one standard deviation over seeds." if any(r.over_seeds is not None for r in rows) else ""
    order = "; ".join(f"{r.label} {measure.phrase(r.mean)}" for r in rows)
    sent = "; ".join(f"{r.label} {'n/a' if r.total is None else f'{r.total:.3g} MB'}" for r in rows)
    spread = "; ".join(f"{r.label} worst tenth {measure.phrase(r.worst)}" for r in rows)
    those: list[tuple[str, str, str, Callable[[], Figure]]] = [
        (
            f"{name.capitalize() if measure.percent else name} over rounds",
            f"Mean over clients, each with its own model.{band}",
            f"At the end: {order}.",
            lambda: figures.curves_figure(runs, "round"),
        ),
        (
            f"{name.capitalize() if measure.percent else name} over bytes",
            "What a megabyte on the wire buys; further left is cheaper.",
            f"At the end: {order}. Sent: {sent}.",
            lambda: figures.curves_figure(runs, "bytes"),
        ),
        (
            "Every client",
            "One dot per client and seed at the end of the run (evenly spaced ranks if there are very many).",
            f"{spread}.",
            lambda: figures.clients_figure(runs),
        ),
        ("Traffic", "All clients and rounds, mean over seeds.", f"{sent}.", lambda: figures.bytes_figure(runs)),
    ]
    if all(run.lines and time_on_devices(run.lines[-1]) is not None for run in runs):
        those.insert(
            2,
            (
                f"{name.capitalize() if measure.percent else name} over time on devices",
                "A round is as long as its slowest participant computes and sends.",
                f"At the end: {order}.",
                lambda: figures.curves_figure(runs, "clock"),
            ),
        )
    out = ""
    for k, (heading, caption, label, draw) in enumerate(those):
        svg = inline_svg(draw, f"{heading}. {label}", f"f{k}")
        out += f"<figure><figcaption><h3>{escape(heading)}</h3><p>{escape(caption)}</p></figcaption>\n{svg}</figure>\n"
    return out


def _coordinates(groups: Sequence[Group]) -> str:
    """Where the clients of pFL-MF lie in its subspace: one figure per setting, of its first seed."""
    those = [g for g in groups if g.runs[0].method.startswith("pfl-mf")]
    if not those:
        return ""
    from fedspan.report import subspace  # needs torch, which no other part of a page does

    def drawn(k: int, g: Group) -> tuple[str, str]:
        of = subspace.coordinates(g.runs[0])
        found = subspace.structure(of)
        says = subspace.sentence(of, found)
        label = f"Clients of {g.label} on the principal plane of their models. {says}"
        return says, inline_svg(partial(subspace.embedding_figure, of, found), label, f"s{k}")

    out, more = _per_setting(those, drawn, "coordinates")
    return (
        "<section>\n<h2>The clients' coordinates</h2>\n<p>Every client's model in an orthonormal basis of the shared"
        f' subspace; near dots are near models.{more}</p>\n<div class="figures">\n{out}</div>\n</section>\n'
    )


def _per_setting(groups: Sequence[Group], drawn: Callable[[int, Group], tuple[str, str]], what: str) -> tuple[str, str]:
    """One figure per setting, of its first seed, with what it says; and a sentence if some are left out."""
    out = ""
    for k, g in enumerate(groups[:_SETTINGS]):
        try:
            says, svg = drawn(k, g)
        except Exception as e:  # a damaged checkpoint can fail anywhere, and must not cost the rest of the page
            why = clean(without_paths(str(e) or type(e).__name__), 300)
            out += f'<p class="note">No {what} of {escape(g.label)}: {escape(why)}</p>\n'
            continue
        seed = f", seed {g.runs[0].seed}" if len(g.runs) > 1 else ""
        head = f"<h3>{escape(g.label + seed)}</h3><p>{escape(says)}</p>"
        out += f"<figure><figcaption>{head}</figcaption>\n{svg}</figure>\n"
    more = f" The first {_SETTINGS} of {len(groups)} settings are shown." if len(groups) > _SETTINGS else ""
    return out, more


def _matching(groups: Sequence[Group]) -> str:
    """Who was matched with whom in Factorized-FL: one figure per setting, of its first seed."""

    def name(g: Group) -> str:
        method = g.runs[0].config.get("method")  # not the shown name, which may be a label of a table
        return str(method.get("name", "")) if isinstance(method, dict) else g.runs[0].method

    those = [g for g in groups if name(g).startswith("factorized-fl")]
    if not those:
        return ""
    from fedspan.report import matching  # needs torch, which no other part of a page does

    def drawn(k: int, g: Group) -> tuple[str, str]:
        of = matching.matching(g.runs[0])
        says = matching.sentence(of, matching.found_in(of))
        label = f"Likeness and matches of the clients of {g.label}. {says}"
        svg = inline_svg(partial(matching.matching_figure, of), label, f"m{k}")
        kept = matching.history(g.runs[0].lines, len(of.names))
        if kept:
            label = f"Likeness of the clients of {g.label} over the rounds."
            svg += inline_svg(partial(matching.history_figure, of, kept), label, f"h{k}")
        return says, svg

    out, more = _per_setting(those, drawn, "matches")
    return (
        "<section>\n<h2>Who learns from whom</h2>\n<p>How alike the server found the clients, and how often each (row)"
        " received from each (column); darker is more, lines divide the true groups. Where it was kept, likeness over"
        " the rounds stands below."
        f'{more}</p>\n<div class="figures wide">\n{out}</div>\n</section>\n'
    )


def _worst_clients(rows: Sequence[Row], groups: Sequence[Group]) -> str:
    measure = rows[0].measure
    by_label = {g.label: g for g in groups}
    local = by_label.get("local")
    out = ""
    for row in rows:
        g = by_label[row.label]
        lone: dict[tuple[int, int], float] = {}
        if local is not None and g is not local:
            for run in g.runs:
                for other in local.runs:
                    lone |= {(run.seed, i): v for i, v in (alone(run, other, measure) or {}).items()}
        found = [c for run in g.runs for c in clients(run, measure)]
        found.sort(key=lambda c: (c.value if measure.higher else -c.value, c.seed, c.index))
        worst = found[:_WORST]
        extra: list[tuple[str, Callable[[Client], str]]] = [(measure.title, lambda c: measure.text(c.value))]
        if lone:
            extra.append(("alone (local)", lambda c, lone=lone: measure.text(lone.get((c.seed, c.index)))))  # type: ignore[misc]
        extra.append(("test examples", lambda c: "n/a" if c.examples is None else f"{c.examples:.0f}"))
        if any(c.group is not None for c in worst):
            extra.append(("group", lambda c: "n/a" if c.group is None else str(c.group)))
        if len(g.runs) > 1:
            extra.append(("seed", lambda c: str(c.seed)))
        head = "".join(f'<th scope="col">{escape(t)}</th>' for t in ["client", *(t for t, _ in extra)])
        body = "".join(
            f'<tr><th scope="row">{escape(c.name)}</th>{"".join(f"<td>{escape(f(c))}</td>" for _, f in extra)}</tr>\n'
            for c in worst
        )
        low = f"from {measure.phrase(worst[0].value)}" if worst else "no client has a value"
        out += (
            f"<details><summary><strong>{escape(row.label)}</strong> <small>{escape(low)}</small></summary>"
            f'<div class="box" role="region" aria-label="Worst clients of {escape(row.label)}" tabindex="0"><table>'
            f"<caption><span>The {len(worst)} worst-served clients of {escape(row.label)}.</span></caption>"
            f"<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div></details>\n"
        )
    return out
