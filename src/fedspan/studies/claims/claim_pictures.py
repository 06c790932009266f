"""Pictures of stored outcomes: where rows of a claim differ in a number, accuracy and time over that number.

A picture is a file that says at its end what it was drawn from, so that a page can tell whether it is current without
comparing drawings, which differ from one version of matplotlib to the next.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedspan.studies.claims.claim_file import PUBLISHED, SECONDS, TUNED, Claim
from fedspan.studies.claims.outcome_file import ClaimOutcome
from fedspan.studies.claims.verdict import student_interval
from fedspan.studies.papers.curves import LabelledPoint, Series, draw, lines

COLUMN_WORDS = {TUNED: "", PUBLISHED: ", as published"}


@dataclass(frozen=True)
class ClaimPicture:
    """Rows of a claim over a number in which they differ."""

    claim: Claim
    number: str
    those: tuple[Series, ...]

    @property
    def file(self) -> str:
        """The name of its file, in letters that any file system and server takes."""
        number = "".join(c if c.isascii() else f"u{ord(c):x}" for c in self.number)
        return f"{self.claim.paper}-{self.claim.stem}-{number}.svg"

    @property
    def words(self) -> str:
        """What it shows, for those who cannot see it."""
        shown = "; ".join(
            f"{s.label or 'all rows'}: " + ", ".join(f"{x:g}: {y:.1f} %" for x, y in zip(s.x, s.accuracy))
            for s in self.those
        )
        return f"accuracy over {self.number}. {shown}"

    @property
    def source(self) -> str:
        """A hash of what is drawn."""
        return hashlib.sha256(repr((self.number, self.those)).encode()).hexdigest()[:16]

    def is_current(self, path: Path) -> bool:
        """Whether the file holds a picture of these figures."""
        return path.is_file() and path.read_text(encoding="utf-8").rstrip().endswith(self._mark)

    def write(self, path: Path) -> Path:
        """Draw it.

        Raises:
            FedspanError: if matplotlib is missing.
        """
        draw(self.number, self.those, path, "seconds per round")
        text = path.read_text(encoding="utf-8").rstrip()
        path.write_text(f"{text}\n{self._mark}\n", encoding="utf-8")
        return path

    @property
    def _mark(self) -> str:
        return f"<!-- drawn from {self.source} -->"


def pictures_of(claim: Claim, outcome: ClaimOutcome | None) -> list[ClaimPicture]:
    """The pictures of a claim: one for every number of which at least three values stand in its rows' names."""
    if outcome is None or not claim.trains:
        return []
    found = lines(_points(claim, outcome))
    return [
        ClaimPicture(claim, number, tuple(s for s in found if s.name == number))
        for number in dict.fromkeys(s.name for s in found)
    ]


def _points(claim: Claim, outcome: ClaimOutcome) -> list[LabelledPoint]:
    """Rows with their mean accuracy, half of Student's interval and seconds; those that diverged are left out."""
    out = []
    for column, words in COLUMN_WORDS.items():
        for row in (r.name for r in claim.rows):
            measures = outcome.figures.get(row, {}).get(column, {})
            values = _all(measures.get("accuracy", {}))
            if values:
                low, high, _ = student_interval(values, exact=False)
                half = 0.0 if low is None or high is None else (high - low) / 2
                times = _all(measures.get(SECONDS, {}))
                seconds = statistics.fmean(times) if times else None
                out.append(LabelledPoint(row + words, statistics.fmean(values), half, seconds))
    return out


def _all(values: Mapping[str, float | None]) -> list[float]:
    """The values of all seeds, or none where a run diverged."""
    known = [v for v in values.values() if v is not None]
    return known if len(known) == len(values) else []
