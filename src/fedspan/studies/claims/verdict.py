"""The verdict on a claim, computed from figures: differences seed by seed, their interval, and the bar."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedspan.errors import ConfigError
from fedspan.studies.claims.claim_file import Claim, DecidingTest

LEVEL = 0.90
"""Of intervals: 5 % lie beyond either end, which is where a one-sided test at 5 % decides."""
EXACT = "exact"
"""The seed of a figure without seeds of its own: nothing is drawn, or it counts or averages all draws of a check."""

Figures = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float | None]]]]
"""row → column → measure → seed → value; None where a run diverged."""
State = Literal["passes", "fails", "undecided"]
Word = Literal["holds", "does not hold", "only if", "undecided", "not testable here", "not run"]


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """One test on figures: the mean difference, its interval, and on which side of the bar it lies."""

    __test__ = False  # not a test of pytest's

    says: str
    effect: float | None
    low: float | None
    high: float | None
    size: float | None
    """The mean over the standard deviation of the differences; None without spread."""
    seeds: int
    state: State
    only_if: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
        return dict(vars(self))

    @property
    def interval(self) -> str:
        """Effect and interval in words."""
        if self.effect is None:
            return "no figure"
        if self.low is None or self.high is None:
            return f"{self.effect:.4g} (one seed)"
        if self.low == self.high:
            return f"{self.effect:.4g}"
        return f"{self.effect:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A verdict, and the tests it follows from."""

    word: Word
    condition: str = ""
    tests: tuple[TestResult, ...] = ()

    @property
    def text(self) -> str:
        """The verdict as it is printed."""
        return f"only if {self.condition}" if self.word == "only if" else self.word

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
        return {"verdict": self.text, "tests": [t.to_json() for t in self.tests]}


def decide(claim: Claim, figures: Figures | None) -> Decision:
    """The verdict: the claim holds if all of its tests do; where one does not, the first passed `only_if` says when.

    A test whose interval lies on both sides of its bar decides nothing.
    """
    if claim.not_testable:
        return Decision(word="not testable here", condition=claim.not_testable)
    if figures is None:
        return Decision(word="not run")
    tests = tuple(judge(test, figures) for test in claim.tests)
    main = [t.state for t in tests if not t.only_if]
    if all(state == "passes" for state in main):
        return Decision(word="holds", tests=tests)
    conditions = [t for t in tests if t.only_if]
    met = next((t.only_if for t in conditions if _all_pass(conditions, t.only_if)), "")
    if met:
        return Decision(word="only if", condition=met, tests=tests)
    return Decision(word="does not hold" if "fails" in main else "undecided", tests=tests)


def _all_pass(tests: Sequence[TestResult], condition: str) -> bool:
    return all(t.state == "passes" for t in tests if t.only_if == condition)


def judge(test: DecidingTest, figures: Figures) -> TestResult:
    """One test on figures.

    Raises:
        ConfigError: if there is no such row, column or measure.
    """
    mine = _values(figures, test.row, test)
    theirs = _values(figures, test.minus, test) if isinstance(test.minus, str) else dict.fromkeys(mine, test.minus)
    seeds = [s for s in mine if s in theirs]
    if not seeds:
        raise ConfigError(f"claims: {test.words}: the two have no seed in common.")
    lost = [s for s in seeds if mine[s] is None]
    scale = 100.0 if test.percent else 1.0
    pairs = [(mine[s], theirs[s]) for s in seeds]
    gaps = [scale * (a - b) for a, b in pairs if a is not None and b is not None]
    if len(gaps) < len(pairs):  # a run that diverged is the worst there is
        mine_lost = bool(lost)
        state: State = "undecided" if test.within is not None else _lost(test, mine_lost, len(gaps) == 0)
        return _result(test, None, None, None, None, len(seeds), state)
    effect = statistics.fmean(gaps)
    low, high, size = student_interval(gaps, exact=seeds == [EXACT])
    return _result(test, effect, low, high, size, len(seeds), _state(test, low, high))


def _values(figures: Figures, row: str, test: DecidingTest) -> Mapping[str, float | None]:
    columns = figures.get(row, {})
    measures = columns.get(test.column, columns.get("tuned", {}) if row != test.row else {})
    if test.measure not in measures:
        raise ConfigError(f"claims: {test.words}: there is no figure of '{row}' for it. Run the claim again.")
    return measures[test.measure]


def _lost(test: DecidingTest, mine: bool, all_of_them: bool) -> State:
    """What divergence says of `a − b above bar`: fails where a diverged, nothing where only b did."""
    if not mine:
        return "undecided"
    return "fails" if test.above is not None else "undecided" if not all_of_them else "fails"


def student_interval(gaps: Sequence[float], exact: bool) -> tuple[float | None, float | None, float | None]:
    """Student's interval of the mean, and the effect's size; of a figure without randomness the figure itself."""
    mean = statistics.fmean(gaps)
    if exact:
        return mean, mean, None
    if len(gaps) < 2:
        return None, None, None
    from scipy.stats import t

    spread = statistics.stdev(gaps)
    half = float(t.ppf((1 + LEVEL) / 2, len(gaps) - 1)) * spread / math.sqrt(len(gaps))
    return mean - half, mean + half, mean / spread if spread > 0 else None


def _state(test: DecidingTest, low: float | None, high: float | None) -> State:
    if low is None or high is None:
        return "undecided"
    if test.above is not None:
        return "passes" if low > test.above else "fails" if high <= test.above else "undecided"
    if test.below is not None:
        return "passes" if high < test.below else "fails" if low >= test.below else "undecided"
    assert test.within is not None
    if -test.within <= low and high <= test.within:
        return "passes"
    return "fails" if low > test.within or high < -test.within else "undecided"


def _result(
    test: DecidingTest,
    effect: float | None,
    low: float | None,
    high: float | None,
    size: float | None,
    seeds: int,
    state: State,
) -> TestResult:
    return TestResult(
        says=test.words, effect=effect, low=low, high=high, size=size, seeds=seeds, state=state, only_if=test.only_if
    )
