"""Is the advice any good: what the first recommendation reached beside the best of a common set of methods."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NEAR = 0.02
"""An advice is good if it is at most this far behind the best row; of errors, this share of the best."""


@dataclass(frozen=True, kw_only=True)
class ScoredCase:
    """One federation: what is true of it, what was said of it at each seed, and what methods reached.

    `rows` are the common set, `advised` the first recommendations as they were run, both with one value per seed.
    """

    name: str
    measure: str = "accuracy"
    higher: bool = True
    kind: str | None = None  # the true kind of heterogeneity, where it is known
    rank: int | None = None  # the true number of directions, where there is one
    kinds: tuple[str, ...]  # as named, one per seed
    ranks: tuple[int, ...]
    first: tuple[str, ...]  # the first recommendation, one per seed
    advised: tuple[float | None, ...]  # None: it diverged
    rows: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)

    def means(self) -> dict[str, float]:
        """The common rows that came to their end at every seed, the best first."""
        whole = {k: [v for v in row if v is not None] for k, row in self.rows.items()}
        found = {k: statistics.fmean(v) for k, v in whole.items() if v and len(v) == len(self.rows[k])}
        return dict(sorted(found.items(), key=lambda pair: pair[1], reverse=self.higher))

    @property
    def best(self) -> tuple[str, float]:
        """The best common row and its value."""
        return next(iter(self.means().items()))

    @property
    def reached(self) -> float | None:
        """What the advice reached, mean over seeds; None if it diverged at one."""
        known = [v for v in self.advised if v is not None]
        return statistics.fmean(known) if known and len(known) == len(self.advised) else None

    @property
    def behind(self) -> float | None:
        """How far the advice is behind the best common row; below 0 it is ahead. A share of the best for errors."""
        if self.reached is None:
            return None
        best = self.best[1]
        return best - self.reached if self.higher else (self.reached - best) / max(best, 1e-12)

    @property
    def near(self) -> bool:
        """Whether the advice is as good as the best row."""
        return self.behind is not None and self.behind <= NEAR

    def named(self) -> tuple[int, int] | None:
        """How often the kind was named rightly, of how many; None where it is not known."""
        return None if self.kind is None else (sum(k == self.kind for k in self.kinds), len(self.kinds))

    def ranked(self) -> tuple[int, int] | None:
        """How often the rank was that of the federation, of how many; None where it has none."""
        return None if self.rank is None else (sum(r == self.rank for r in self.ranks), len(self.ranks))


def case_from(values: Mapping[str, Any]) -> ScoredCase:
    """A case from plain values, as they are stored."""
    known = dict(values)
    for key in ("kinds", "ranks", "first", "advised"):
        known[key] = tuple(known[key])
    known["rows"] = {k: tuple(v) for k, v in known["rows"].items()}
    return ScoredCase(**known)


def totals(cases: Sequence[ScoredCase]) -> dict[str, tuple[int, int]]:
    """(how often, of how many): kinds named, ranks right, advice as good as the best row."""

    def summed(pairs: Sequence[tuple[int, int] | None]) -> tuple[int, int]:
        known = [p for p in pairs if p is not None]
        return sum(p[0] for p in known), sum(p[1] for p in known)

    return {
        "kind": summed([c.named() for c in cases]),
        "rank": summed([c.ranked() for c in cases]),
        "near": (sum(c.near for c in cases), len(cases)),
    }
