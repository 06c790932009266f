"""One HTML file a person likes to look at: what was found, the numbers, the figures, and how to repeat it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspan.errors import FedspanError
from fedspan.report import paired, side_by_side
from fedspan.report.assets import asset, digest, packed_plotly, plotly
from fedspan.report.canvas import inline_svg
from fedspan.report.given import section
from fedspan.report.measures import ClientValue, clients, measures_of
from fedspan.report.narrative import headline, summary
from fedspan.report.palette import Look, looks, themes
from fedspan.report.plots import Plot, monitor_plots, plots
from fedspan.report.provenance import configuration, facts, notes
from fedspan.report.registered import panels_of, seen_of
from fedspan.report.runs import Group, Run, group
from fedspan.report.tables import Row, columns, summary_rows
from fedspan.report.text import clean, without_paths
from fedspan.storage.atomic import write_atomic

if TYPE_CHECKING:
    from fedspan.method import Panel

_CLIENTS = 1000  # rows of the table of clients
_SETTINGS = 4


def write_page(runs: Sequence[Run], out: str | Path, title: str | None = None) -> Path:
    """Write the report of some runs as one self-contained HTML file.

    Args:
        out: the file, or a directory in which `report.html` is written.
        title: the heading; by default the experiment's name.

    Raises:
        FedspanError: if there are no runs, the file cannot be written, or plotly or matplotlib is missing.
    """
    if not runs:
        raise FedspanError("Report: at least one run must be given. Got none.")
    out = Path(out)
    out = out / "report.html" if out.is_dir() else out
    text = page(runs, title)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, text)
    except OSError as e:
        raise FedspanError(f"Report: {out} cannot be written: {e.strerror}.") from None
    return out


@dataclass(frozen=True)
class Live:
    """What makes a page follow a run that is still going."""

    version: str  # what the page shows; it changes with every round
    state: str  # how far the run is, in words


def page(runs: Sequence[Run], title: str | None = None, live: Live | None = None) -> str:
    """The page as text. A live one fetches the library and the news from where it came from; others fetch nothing."""
    groups, rows = group(runs), summary_rows(runs)
    look = looks(groups)
    named = runs[0].config.get("name")
    title = escape(clean(title or (named if isinstance(named, str) and named else "fedspan report"), 120))
    drawn, inside = plots(groups, rows), monitor_plots(groups)
    parts, script = texts(groups, rows), asset("page.js")
    sources = "'self'" if live else digest(plotly())
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:"
    policy += f"; script-src {digest(script)} {sources}"
    library = '<script type="text/plain" id="plotly" data-from="plotly.js"></script>'
    if live is None:
        library = f'<script type="text/plain" id="plotly">{packed_plotly()}</script>'
    else:
        policy += "; connect-src 'self'"
    kept = "".join(map(_frame, inside))
    more = f'<section>\n<h2>Inside the methods</h2>\n<div class="figures">\n{kept}</div>\n</section>\n' if kept else ""
    icon = '<link rel="icon" href="data:,">\n' if live else ""  # a server would be asked for one
    ending = "This page follows the run." if live else "This file is complete in itself and loads nothing."
    return f"""<!DOCTYPE html>
<html lang="en"{f' data-live="{escape(live.version)}"' if live else ""}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
{icon}<style>{asset("page.css")}</style>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
<ul class="facts">{"".join(f"<li>{escape(f)}</li>" for f in facts(groups))}</ul>
{f'<p id="state" role="status">{escape(live.state)}</p>' if live else ""}</header>
<section aria-label="Summary" id="summary">
{parts["summary"]}</section>
<section>
<h2>Results</h2>
<div id="results">{parts["results"]}</div>
</section>
{section(groups)}<section>
<h2>Figures</h2>
<noscript><p class="note">Figures need JavaScript; all numbers are in the tables.</p></noscript>
<p class="note" id="no-figures" hidden>The figures could not be drawn; all numbers are in the tables.</p>
{_legend(rows, groups, look)}<div class="figures">
{"".join(map(_frame, drawn))}</div>
</section>
<section>
<h2>Clients</h2>
<div id="clients-table">{parts["clients-table"]}</div>
</section>
{panels(groups)}{more}<section>
<h2>Configuration</h2>
{configuration(groups)}</section>
<footer>Written by fedspan. {ending}</footer>
</main>
<script type="application/json" id="data">{_json(drawings(groups, [*drawn, *inside]))}</script>
{library}
<script>{script}</script>
</body>
</html>
"""


def texts(groups: Sequence[Group], rows: Sequence[Row]) -> dict[str, str]:
    """What is written of the results, as HTML by the id of its place."""
    cards = "".join(
        f'<div><dt>{what}</dt><dd class="n">{number}</dd><dd class="who">{who}</dd></div>\n'
        for what, number, who in headline(rows)
    )
    says = "".join(f"<li>{s}</li>\n" for s in summary(rows, groups))
    warnings = "".join(f'<p class="note">{escape(n)}</p>\n' for n in notes(groups))
    return {
        "summary": f'<dl class="cards">\n{cards}</dl>\n<div class="says"><ul>\n{says}</ul></div>\n{warnings}',
        "results": _results(rows, looks(groups)) + side_by_side.to_html(groups),
        "clients-table": client_table(rows, groups) + _paired(groups),
    }


def drawings(groups: Sequence[Group], those: Sequence[Plot]) -> dict[str, Any]:
    """What the script draws: figures and colours."""
    look = looks(groups)
    return {"figures": [p.spec() for p in those], "themes": themes([look[g.label] for g in groups])}


def _json(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _frame(plot: Plot) -> str:
    """The place of a figure, with what it says for those who cannot see it."""
    label = escape(clean(f"{plot.title}. {plot.label}", 2000))
    return (
        f"<figure><figcaption><h3>{escape(plot.title)}</h3><p>{escape(plot.caption)}</p></figcaption>\n"
        f'<div class="plot" id="{plot.id}" role="img" aria-label="{label}" style="min-height:{plot.height}px"></div>'
        "</figure>\n"
    )


def _legend(rows: Sequence[Row], groups: Sequence[Group], look: dict[str, Look]) -> str:
    """One legend for all figures, the best first; a click switches a method off everywhere."""
    at = {g.label: k for k, g in enumerate(groups)}
    out = ""
    for r in rows:
        each = look[r.label]
        line = (
            f'<svg viewBox="0 0 26 8" width="26" height="8" aria-hidden="true" style="{_colours(each)}">'
            f'<line x1="1" y1="4" x2="25" y2="4" stroke-dasharray="{each.pattern or "none"}"/></svg>'
        )
        out += f'<button type="button" data-k="{at[r.label]}" aria-pressed="true">{line}{escape(r.label)}</button>\n'
    return f'<div class="legend" role="group" aria-label="Methods shown in the figures">\n{out}</div>\n'


def _colours(look: Look) -> str:
    return f"--l:{look.colour};--d:{look.dark}"


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
        dot = f'<span class="dot" style="{_colours(look[r.label])}" aria-hidden="true"></span>'
        body += f'<tr><th scope="row" data-v="{escape(r.label)}">{dot}{escape(r.label)}</th>'
        for c, winners in zip(cols[1:], best[1:]):
            assert c.sort is not None
            body += _cell(c.sort(r), c.text(r), r.label in winners)
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


def panels(groups: Sequence[Group]) -> str:
    """The sections that methods bring: per panel one figure per setting, of its first seed."""
    brought: dict[tuple[str, str], list[tuple[Group, Panel]]] = {}
    missing = ""
    for g in groups:
        try:
            for panel in panels_of(g.runs[0]):
                brought.setdefault((panel.name, panel.title), []).append((g, panel))
        except Exception as e:  # a method that is not here, or one of someone's own that fails
            missing += _missing("panels", g, e)
    out = "".join(_panel(n, those) for n, those in enumerate(brought.values()))
    return out + (f"<section>\n<h2>What methods show</h2>\n{missing}</section>\n" if missing else "")


def _panel(n: int, those: Sequence[tuple[Group, Panel]]) -> str:
    """One panel of all settings whose method brings it."""
    from fedspan.report.charts import figure_of  # imports torch, which tables of this package need not

    first, out = those[0][1], ""
    for k, (g, panel) in enumerate(those[:_SETTINGS]):
        try:
            found = panel.look(seen_of(g.runs[0], g.label))
            svg = "".join(
                inline_svg(partial(figure_of, drawing), drawing.label, f"p{n}-{k}-{m}")
                for m, drawing in enumerate(found.drawings)
                if drawing.on_page
            )
        except Exception as e:  # a damaged checkpoint can fail anywhere, and must not cost the rest of the page
            out += _missing(panel.noun, g, e)
            continue
        seed = f", seed {g.runs[0].seed}" if len(g.runs) > 1 else ""
        head = f"<h3>{escape(g.label + seed)}</h3><p>{escape(found.says)}</p>"
        out += f'<figure class="paper"><figcaption>{head}</figcaption>\n{svg}</figure>\n'
    more = f" The first {_SETTINGS} of {len(those)} settings are shown." if len(those) > _SETTINGS else ""
    return (
        f"<section>\n<h2>{escape(first.title, quote=False)}</h2>\n<p>{escape(first.about, quote=False)}{more}</p>\n"
        f'<div class="figures{" wide" if first.wide else ""}">\n{out}</div>\n</section>\n'
    )


def _missing(what: str, g: Group, error: Exception) -> str:
    """One line on what a setting cannot show, and why."""
    why = clean(without_paths(str(error) or type(error).__name__), 300)
    return f'<p class="note">No {escape(what)} of {escape(g.label)}: {escape(why)}</p>\n'


def client_table(rows: Sequence[Row], groups: Sequence[Group]) -> str:
    """Every client with its value under every method, those worst served by the best method first."""
    measure = rows[0].measure
    by_label = {g.label: g for g in groups}
    known: dict[tuple[int, int, str, float | None], tuple[ClientValue, dict[str, float]]] = {}
    for row in rows:
        for run in by_label[row.label].runs:
            for c in clients(run, measure):
                # The same client is the same name and test part under the same seed.
                known.setdefault((c.seed, c.index, c.name, c.examples), (c, {}))[1][row.label] = c.value
    if not known:
        return "<p>No client has a value yet.</p>"
    sign = 1.0 if measure.higher else -1.0

    def badness(of: tuple[ClientValue, dict[str, float]]) -> list[tuple[bool, float]]:
        return [(r.label not in of[1], sign * of[1].get(r.label, 0.0)) for r in rows]

    everybody = sorted(known.values(), key=badness)
    shown = everybody[:_CLIENTS]
    seeds = len({c.seed for c, _ in everybody}) > 1
    in_groups = any(c.group is not None for c, _ in everybody)
    first = "ascending" if measure.higher else "descending"
    names = [r.label for r in rows]
    head = '<th scope="col"><button type="button">client</button></th>'
    for k, name in enumerate(names):
        now = f' aria-sort="{first}"' if k == 0 else ""
        head += f'<th scope="col" data-first="{first}"{now}><button type="button">{escape(name)}</button></th>'
    extra = ["test examples", *(["group"] if in_groups else []), *(["seed"] if seeds else [])]
    head += "".join(f'<th scope="col"><button type="button">{t}</button></th>' for t in extra)
    body = ""
    for c, values in shown:
        top = measure.text((max if measure.higher else min)(values.values()))
        best = {name for name in values if len(values) > 1 and measure.text(values[name]) == top}
        cells = [_cell(values.get(name), measure.text(values.get(name)), name in best) for name in names]
        cells.append(_cell(c.examples, "n/a" if c.examples is None else f"{c.examples:.0f}"))
        if in_groups:
            cells.append(_cell(c.group, "n/a" if c.group is None else str(c.group)))
        if seeds:
            cells.append(_cell(c.seed, str(c.seed)))
        name = escape(c.name)
        body += f'<tr><th scope="row" data-v="{name}">{name}</th>{"".join(cells)}</tr>\n'
    some = f" The {len(shown):,} worst of {len(everybody):,} are listed." if len(shown) < len(everybody) else ""
    caption = (
        f"{escape(measure.title)} of every client{' and seed' if seeds else ''}, the worst served by"
        f" {escape(names[0])} first; the best method for a client is marked.{some} Click a heading to see another"
        " method's worst clients first."
    )
    return (
        '<div class="box tall" role="region" aria-label="Table of clients" tabindex="0"><table>'
        f"<caption><span>{caption}</span></caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )


def _paired(groups: Sequence[Group]) -> str:
    """Every method against the best, client by client."""
    runs = [run for g in groups for run in g.runs]
    out, measures = "", measures_of(runs)
    for measure in measures:
        if found := paired.pairs(runs, measure=measure):
            by = f", {escape(measure.words)}" if len(measures) > 1 else ""
            out += f"<h3>Client by client{by}</h3>\n{paired.to_html(found)}"
    return out


def _cell(value: float | None, text: str, best: bool = False) -> str:
    return f'<td{" class=best" if best else ""} data-v="{"" if value is None else f"{value:.6g}"}">{escape(text)}</td>'
