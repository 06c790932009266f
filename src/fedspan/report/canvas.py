"""Drawing without global state: a fresh figure, a plain look, and files or inline SVG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspan.errors import FedspanError
from fedspan.report.palette import GRID, INK, PAPER, SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.fonttype": "none",  # letters stay letters: small, and readable to a screen reader
    "svg.hashsalt": "fedspan",
    "pdf.fonttype": 42,
    "path.simplify_threshold": 0.5,
}
_KINDS = (".png", ".pdf", ".svg")


@contextmanager
def _styled() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError:
        raise FedspanError("Report: figures need matplotlib; use `pip install 'fedspan[report]'`.") from None
    style: Any = _STYLE
    with matplotlib.rc_context(style):
        yield


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of this size in inches, with one set of axes."""
    figure = _empty(width, height)
    return figure, figure.add_subplot()


def panels(width: float, height: float, titles: Sequence[tuple[str, str]]) -> tuple[Figure, list[Axes]]:
    """A figure with one set of axes per (title, label of x), side by side."""
    figure = _empty(width, height)
    axes = [figure.add_subplot(1, len(titles), k + 1) for k in range(len(titles))]
    for a, (title, x) in zip(axes, titles):
        bare(a, title, x)
    return figure, axes


def _empty(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)  # no pyplot, so nothing lingers
    return figure


def bare(axes: Axes, y: str, x: str, across: bool = False) -> None:
    """Axes with nothing but a light grid along the values."""
    axes.set_facecolor(PAPER)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#b8bec6")
    axes.tick_params(which="both", length=0, colors=SOFT, labelsize=8.5)
    axes.grid(axis="x" if across else "y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(x, color=SOFT, fontsize=8.5)
    if y:
        axes.set_title(y, loc="left", fontsize=9, color=INK, pad=8)


def save(draw: Callable[[], Figure], path: str | Path) -> Path:
    """Draw and write a PNG, PDF or SVG file.

    Raises:
        FedspanError: for another suffix, or if matplotlib is missing.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in _KINDS:
        raise FedspanError(f"Report: a figure must end in .png, .pdf or .svg. Got {path.name!r}.")
    dates: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(kind, {})
    with _styled():
        figure = draw()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=kind[1:], dpi=200, metadata=dates)
    return path


def inline_svg(draw: Callable[[], Figure], label: str, prefix: str) -> str:
    """An `<svg>` element to stand inside a page: nothing fetched, and ids that do not clash with another figure's."""
    out = io.StringIO()
    with _styled():
        none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        draw().savefig(out, format="svg", metadata=none)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    # The style sheet would apply to the whole page; the page sets the same for its figures.
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)

    def tag(match: re.Match[str]) -> str:
        t = re.sub(r' (?:xmlns(?::xlink)?|version)="[^"]*"', "", match.group()).replace("xlink:href=", "href=")
        t = re.sub(r'\bid="', f'id="{prefix}-', t)
        return re.sub(r'(href="|url\()#', rf"\1#{prefix}-", t)

    text = re.sub(r"<[^>]*>", tag, text)  # only inside tags: letters are left as they are
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    start = f'<svg {box.group()} role="img" aria-label="{html.escape(label)}">'
    text = start + text[text.index(">") + 1 :]
    return re.sub(r"\n\s*", "\n", text).strip()
