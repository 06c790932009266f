"""Verdicts follow from figures: on either side of the bar, at it, and where a run diverged."""

from __future__ import annotations

from typing import Any

import pytest

from fedspan.errors import ConfigError
from fedspan.studies.claims import Claim, decide, parse_claim
from fedspan.studies.claims.verdict import judge

HEAD = 'sentence = "a beats b"\nplace = "Table 1"\n'
ROWS = '[experiment]\nrounds = 2\n[[rows]]\nname = "a"\nmethod = "fedavg"\n[[rows]]\nname = "b"\nmethod = "local"\n'


def claim(tests: str, head: str = HEAD) -> Claim:
    """A claim of two rows with these tests."""
    return parse_claim((head + ROWS + tests).encode(), "paper", "made-up")


def figures(a: list[float | None], b: list[float | None], **columns: list[float | None]) -> dict[str, Any]:
    """Accuracies of two rows, seed by seed."""

    def of(values: list[float | None]) -> dict[str, dict[str, float | None]]:
        return {"accuracy": {str(200 + k): v for k, v in enumerate(values)}}

    return {"a": {"tuned": of(a)} | {k: of(v) for k, v in columns.items()}, "b": {"tuned": of(b)}}


ABOVE = '[[tests]]\nrow = "a"\nminus = "b"\nabove = 1.0\n'


def test_a_difference_above_the_bar_holds() -> None:
    found = decide(claim(ABOVE), figures([0.82, 0.83, 0.84], [0.80, 0.81, 0.82]))
    assert found.word == "holds"
    (test,) = found.tests
    assert test.effect == pytest.approx(2.0) and test.low == pytest.approx(2.0) and test.seeds == 3


def test_the_interval_is_students() -> None:
    (test,) = decide(claim(ABOVE), figures([0.82, 0.83, 0.85], [0.80, 0.80, 0.80])).tests
    # Differences 2, 3 and 5: mean 10/3, standard deviation 1.5275, t(0.95, 2) = 2.91999.
    assert test.effect == pytest.approx(10 / 3)
    assert test.low == pytest.approx(10 / 3 - 2.919986 * 1.5275252 / 3**0.5, abs=1e-5)
    assert test.size == pytest.approx(10 / 3 / 1.5275252)
    assert test.state == "undecided"  # from 0.76 to 5.9, on both sides of 1


@pytest.mark.parametrize(
    ("b", "word"),
    [
        ([0.85, 0.86, 0.87], "does not hold"),  # behind
        ([0.81, 0.82, 0.83], "does not hold"),  # a whole point ahead: at the bar is not above it
        ([0.70, 0.86, 0.83], "undecided"),
        ([0.70, 0.71, 0.72], "holds"),
    ],
)
def test_sides_of_the_bar(b: list[float | None], word: str) -> None:
    # Binary fractions, so that the differences at the bar are exact.
    exact = [None if v is None else round(v * 1024) / 1024 for v in b]
    a = [(v or 0) + 0.01 for v in exact] if b[0] == 0.81 else [0.82, 0.83, 0.84]
    bar = ABOVE if b[0] != 0.81 else ABOVE.replace("1.0", "1.0000001")
    assert decide(claim(bar), figures(list(a), exact)).word == word


def test_without_figures_nothing_is_said() -> None:
    assert decide(claim(ABOVE), None).text == "not run"
    untried = parse_claim((HEAD + 'not_testable = "needs a cluster"\n').encode(), "paper", "large")
    assert decide(untried, None).text == "not testable here"


def test_a_condition_is_named_where_it_alone_is_met() -> None:
    conditional = ABOVE + ABOVE + 'column = "published"\nonly_if = "at the paper\'s step size"\n'
    level = [0.80, 0.81, 0.82]
    found = decide(claim(conditional), figures(level, level, published=[0.9, 0.91, 0.92]))
    assert found.text == "only if at the paper's step size" and found.tests[0].state == "fails"
    assert decide(claim(conditional), figures(level, level, published=level)).word == "does not hold"
    assert decide(claim(conditional), figures([0.9, 0.91, 0.92], level, published=level)).word == "holds"


def test_within_is_a_test_of_equality() -> None:
    near = claim(ABOVE.replace("above = 1.0", "within = 0.5"))
    assert decide(near, figures([0.8, 0.81, 0.82], [0.801, 0.811, 0.821])).word == "holds"
    assert decide(near, figures([0.8, 0.81, 0.82], [0.7, 0.71, 0.72])).word == "does not hold"


def test_divergence_is_never_a_win() -> None:
    fine = [0.8, 0.81, 0.82]
    assert decide(claim(ABOVE), figures([0.9, None, 0.92], list(fine))).word == "does not hold"
    assert decide(claim(ABOVE), figures(list(fine), [0.7, None, 0.72])).word == "undecided"


def test_one_seed_decides_nothing() -> None:
    assert decide(claim(ABOVE), figures([0.9], [0.5])).word == "undecided"


def test_figures_without_randomness_are_their_own_interval() -> None:
    made = claim('[[tests]]\nrow = "a"\nmeasure = "value"\nabove = 1.0\n')
    for value, word in ((1.5, "holds"), (1.0, "does not hold"), (0.5, "does not hold")):
        assert decide(made, {"a": {"tuned": {"value": {"exact": value}}}}).word == word


def test_a_missing_figure_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="no figure of 'b'"):
        judge(claim(ABOVE).tests[0], {"a": {"tuned": {"accuracy": {"200": 0.5}}}})
