"""A table as words in rows and columns, and how Markdown, LaTeX and CSV write it."""

from __future__ import annotations

import csv
import html
import io
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """What stands in a cell, and whether it is the best of its column."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Grid:
    """Headings and rows; columns in `words` hold words and are set to the left."""

    titles: list[str]
    rows: list[list[Cell]]
    words: frozenset[int] = frozenset({0})


def markdown(grid: Grid) -> str:
    """A Markdown table; the best values are bold."""

    def cell(text: str, bold: bool = False) -> str:
        text = html.escape(text, quote=False).replace("\\", "\\\\").replace("|", "\\|")
        return f"**{text}**" if bold else text

    lines = [[cell(t) for t in grid.titles]]
    lines.append([":--" if k in grid.words else "--:" for k in range(len(grid.titles))])
    lines += [[cell(c.text, c.bold) for c in row] for row in grid.rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


_LATEX = {c: "\\" + c for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": "$-$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "…": r"\ldots{}",
    "–": "--",
    "\u00a0": "~",
}


def latex_text(text: str) -> str:
    """The text as LaTeX sets it with no package but the usual UTF-8 input; what it could not set becomes `?`."""
    return "".join(map(_letter, text))


def _letter(c: str) -> str:
    if c in _LATEX:
        return _LATEX[c]
    if c.isascii():
        return c
    name = unicodedata.name(c, "")
    if name.startswith("GREEK SMALL LETTER ") and len(name.split()) == 4 and c not in "οςϐ":
        return f"$\\{name.split()[-1].lower().replace('lamda', 'lambda')}$"
    return c if name.startswith("LATIN ") and c.isalpha() and ord(c) < 0x180 else "?"


def latex(grid: Grid) -> str:
    """A LaTeX table for the booktabs package; the best values are bold."""

    def cell(c: Cell) -> str:
        text = latex_text(c.text)
        return rf"\textbf{{{text}}}" if c.bold else text

    places = "".join("l" if k in grid.words else "r" for k in range(len(grid.titles)))
    lines = [rf"\begin{{tabular}}{{{places}}}", r"\toprule"]
    lines += [" & ".join(map(latex_text, grid.titles)) + r" \\", r"\midrule"]
    lines += [" & ".join(map(cell, row)) + r" \\" for row in grid.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def comma_separated(titles: Sequence[str], rows: Sequence[Sequence[str | int | float | None]]) -> str:
    """CSV with full precision; `n/a` where a value is missing."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(titles)
    for row in rows:
        writer.writerow([_plain(v) for v in row])
    return out.getvalue()


def _plain(value: str | int | float | None) -> str:
    if isinstance(value, str):
        # A spreadsheet would run a cell that starts like a formula.
        return "'" + value if value[:1] in ("=", "+", "-", "@") else value
    return "n/a" if value is None else repr(value)
