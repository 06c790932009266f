"""What a row of a comparison was given: trials, ranges, the values chosen, and the work of a client."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedspan.report.runs import Group
from fedspan.report.text import clean
from fedspan.storage.atomic import write_atomic

FILE = "given.json"
TITLES = ("row", "trials", "rounds each", "seeds", "searched", "chosen", "on validation", "steps a round", "before use")
NOTE = (
    "Values were chosen on validation parts of development seeds, never of the reported ones. * marks a value that is"
    " the smallest or largest of all tried, so that nothing brackets it. Steps are minibatch steps of a client, mean"
    " over clients."
)


class Given(BaseModel):
    """What one row was given; kept beside each of its runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trials: int = Field(ge=0)
    diverged: int = Field(ge=0)
    rounds: int = Field(ge=0)
    seeds: list[int]
    measure: str
    value: float
    searched: dict[str, str]
    chosen: dict[str, str | int | float]
    edges: dict[str, str]
    steps: float
    steps_before_use: float

    def cells(self) -> list[str]:
        """The cells of its row, without the row's name."""
        chosen = [f"{_short(k)} = {_text(v)}{'*' if k in self.edges else ''}" for k, v in self.chosen.items()]
        spaces = [f"{_short(key)} {space}" for key, space in self.searched.items()]
        return [
            f"{self.trials}{f' ({self.diverged} diverged)' if self.diverged else ''}",
            str(self.rounds),
            ", ".join(map(str, self.seeds)),
            ", ".join(spaces) or "nothing",
            ", ".join(chosen) or "as in the file",
            f"{self.measure} {self.value:.4g}",
            f"{self.steps:.4g}",
            f"{self.steps_before_use:.4g}",
        ]

    def write(self, directory: Path) -> None:
        """Keep it beside a run."""
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / FILE, self.model_dump_json(indent=1) + "\n")


def _short(key: str) -> str:
    return key.removeprefix("method.")


def _text(value: str | float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def given(group: Group) -> Given | None:
    """What a row was given, as its first run has it; None if nothing was chosen for it, or the file is damaged."""
    path = group.runs[0].path
    if path is None:
        return None
    try:
        return Given.model_validate_json((path / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def section(groups: Sequence[Group]) -> str:
    """The section of the page; nothing where no row was tuned."""
    known = [(g.label, given(g)) for g in groups]
    if not any(row for _, row in known):
        return ""
    head = "".join(f'<th scope="col">{escape(t)}</th>' for t in TITLES)
    body = ""
    for label, row in known:
        cells = ["as in the file", *["–"] * (len(TITLES) - 2)] if row is None else row.cells()
        told = "".join(f"<td>{escape(clean(c, 200))}</td>" for c in cells)
        body += f'<tr><th scope="row">{escape(label)}</th>{told}</tr>\n'
    return (
        "<section>\n<h2>What each row was given</h2>\n"
        '<div class="box" role="region" aria-label="What each row was given" tabindex="0"><table>'
        f"<caption><span>{escape(NOTE)}</span></caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>"
        "</table></div>\n</section>\n"
    )
