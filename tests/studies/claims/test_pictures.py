"""Pictures of outcomes: rows that differ in a number, and files that know which figures they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedspan.studies.claims import Claim, ClaimOutcome, parse_claim
from fedspan.studies.claims.claim_pictures import pictures_of

TEXT = """
sentence = "More is better."
place = "Figure 3"
[experiment]
[[rows]]
name = "one, λ = 1"
method = "fedprox"
[[rows]]
name = "one, λ = 2"
method = "fedprox"
[[rows]]
name = "one, λ = 4"
method = "fedprox"
[[rows]]
name = "one, λ = 8"
method = "fedprox"
[[rows]]
name = "two, λ = 8"
method = "fedprox"
[[tests]]
row = "one, λ = 1"
above = 0.0
"""


def made(seconds: float | None = None, lost: str = "", first: float = 0.5) -> tuple[Claim, ClaimOutcome]:
    """The claim, and an outcome in which accuracy is a half, a tenth more in the second seed, and a row may be lost."""
    claim = parse_claim(TEXT.encode(), "paper", "made-up")
    figures: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
    for k, row in enumerate(claim.rows):
        at = first if k == 0 else 0.5
        measures: dict[str, dict[str, float | None]] = {"accuracy": {"200": at, "201": at + 0.1}}
        if row.name == lost:
            measures["accuracy"]["201"] = None
        if seconds is not None:
            measures["seconds_per_round"] = {"200": seconds * k, "201": seconds * k + 2}
        figures[row.name] = {"tuned": measures}
    outcome = ClaimOutcome(
        claim=claim.name,
        claim_digest=claim.digest,
        seeds={"development": [0], "reported": [200, 201]},
        figures=figures,
        code="",
        versions={},
        seconds=1.0,
        verdict={},
    )
    return claim, outcome


def test_rows_that_differ_in_a_number_make_a_line_with_intervals() -> None:
    (picture,) = pictures_of(*made())
    (line,) = picture.those  # the other form has one value only
    assert (line.label, line.name, line.x) == ("one", "λ", (1, 2, 4, 8)) and line.seconds == ()
    assert line.accuracy == pytest.approx([55.0] * 4)
    assert line.spread == pytest.approx([31.569] * 4, abs=1e-3)  # t of 95 % at one degree, 6.314, times 10/√2/√2
    assert "λ" in picture.words and "55.0 %" in picture.words and picture.file.isascii()


def test_times_stand_beside_accuracy_where_they_were_taken(tmp_path: Path) -> None:
    (picture,) = pictures_of(*made(seconds=3.0))
    assert picture.those[0].seconds == pytest.approx([1.0, 4.0, 7.0, 10.0])
    assert "seconds per round" in picture.write(tmp_path / "timed.svg").read_text(encoding="utf-8")
    (plain,) = pictures_of(*made())
    assert "seconds" not in plain.write(tmp_path / "plain.svg").read_text(encoding="utf-8")


def test_a_row_that_diverged_is_no_point_and_two_points_are_no_line() -> None:
    (picture,) = pictures_of(*made(lost="one, λ = 4"))
    assert picture.those[0].x == (1, 2, 8)
    claim, outcome = made(lost="one, λ = 4")
    outcome.figures["one, λ = 2"]["tuned"]["accuracy"]["200"] = None
    assert pictures_of(claim, outcome) == []
    assert pictures_of(claim, None) == []


def test_a_file_knows_which_figures_it_shows(tmp_path: Path) -> None:
    (picture,), (other,) = pictures_of(*made()), pictures_of(*made(first=0.4))
    path = tmp_path / picture.file
    assert not picture.is_current(path)
    picture.write(path)
    assert picture.is_current(path) and not other.is_current(path)
    other.write(path)
    assert other.is_current(path) and path.read_text(encoding="utf-8").count("<!-- drawn from") == 1
