"""The outcomes of attacks as a table, and whether the defence keeps what is asked of it."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedspan.studies.attacks.attacked_run import AttackOutcome
from fedspan.studies.attacks.catalogue import ATTACKS

LOST = 3.0
"""Points of accuracy that honest clients may lose to an attack that lies about its change or its weight."""
BOOSTED = 5.0
"""Points by which boosting may make a backdoor more successful."""
COST = 0.5
"""Points of accuracy that the defence may cost when nobody attacks."""

COLUMNS = ("method", "attack", "rule", "seed", "accuracy", "success", "diverged")

LIES = ("gaussian", "inflated", "scaling", "reversed")


@dataclass(frozen=True)
class Bar:
    """One thing that is asked of the defence, and what was found."""

    method: str
    asked: str
    points: float
    most: float

    @property
    def met(self) -> bool:
        """Whether it is so."""
        return self.points <= self.most


def bars(outcomes: Sequence[AttackOutcome]) -> list[Bar]:
    """What is asked of the defence, as far as runs for it are there; means over seeds, in points."""
    found = []
    for method in dict.fromkeys(o.method for o in outcomes):
        plain = _mean(outcomes, method, "none", "none", _accuracy)
        calm = _mean(outcomes, method, "none", "clip", _accuracy)
        if plain is not None and calm is not None:
            found.append(Bar(method, "cost without attack", plain - calm, COST))
        for attack in LIES:
            value = _mean(outcomes, method, attack, "clip", _accuracy)
            if calm is not None and value is not None:
                found.append(Bar(method, f"{attack}: accuracy lost", calm - value, LOST))
        one, more = (_mean(outcomes, method, a, "clip", _success) for a in ("backdoor", "boosted-backdoor"))
        if one is not None and more is not None:
            found.append(Bar(method, "boosted backdoor beyond the plain one", more - one, BOOSTED))
    return found


def to_markdown(outcomes: Sequence[AttackOutcome]) -> str:
    """Accuracy of honest clients and success of backdoors, without and with the defence; then the bars."""
    methods = list(dict.fromkeys(o.method for o in outcomes))
    rules = list(dict.fromkeys(o.rule for o in outcomes))
    seeds = sorted({o.seed for o in outcomes})
    heads = [f"{m}, {'no defence' if r == 'none' else r}" for m in methods for r in rules]
    lines = [f"| attack | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, attack in ATTACKS.items():
        some = [o for o in outcomes if o.attack == name]
        if some:
            cells = [_cell(some, m, r, len(seeds), _accuracy) for m in methods for r in rules]
            lines.append(f"| {name}: {attack.sentence} | {' | '.join(cells)} |")
        if some and attack.backdoor:
            cells = [_cell(some, m, r, len(seeds), _success) for m in methods for r in rules]
            lines.append(f"| {name}: success | {' | '.join(cells)} |")
    lines += [
        "",
        f"Accuracy of honest clients in %, mean over seeds {_listed(seeds)}; attackers are a tenth of all.",
        "",
    ]
    judged = bars(outcomes)
    if judged:
        lines += ["| method | asked of the defence | points | at most | met |", "|---|---|---|---|---|"]
        lines += [
            f"| {b.method} | {b.asked} | {b.points:.1f} | {b.most:g} | {'yes' if b.met else '**no**'} |" for b in judged
        ]
    return "\n".join(lines).rstrip() + "\n"


def to_csv(outcomes: Sequence[AttackOutcome]) -> str:
    """One line for each run; what is not there is empty."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    write.writerow(COLUMNS)
    for o in outcomes:
        found = (getattr(o, name) for name in COLUMNS)
        write.writerow(["" if v is None else f"{v:.6g}" if isinstance(v, float) else v for v in found])
    return out.getvalue()


def from_csv(text: str) -> list[AttackOutcome]:
    """The outcomes that `to_csv` wrote."""
    rows = csv.DictReader(io.StringIO(text))
    return [AttackOutcome.model_validate({k: v or None for k, v in row.items()}) for row in rows]


def _listed(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"


def _accuracy(o: AttackOutcome) -> float | None:
    return o.accuracy


def _success(o: AttackOutcome) -> float | None:
    return o.success


def _cell(
    outcomes: Sequence[AttackOutcome],
    method: str,
    rule: str,
    seeds: int,
    of: Callable[[AttackOutcome], float | None],
) -> str:
    """One number, with what limits it: runs that diverged, seeds that were not run."""
    mine = [o for o in outcomes if o.method == method and o.rule == rule]
    lost = sum(o.diverged for o in mine)
    value = _mean(mine, method, None, rule, of)
    limits = [f"{lost} of {len(mine)} diverged"] if lost else []
    limits += [f"{len(mine)} of {seeds} seeds"] if 0 < len(mine) < seeds else []
    shown = "" if value is None else f"{value:.1f}"
    return f"{shown} ({', '.join(limits)})".strip() if limits else shown or "n/a"


def _mean(
    outcomes: Sequence[AttackOutcome],
    method: str,
    attack: str | None,
    rule: str,
    of: Callable[[AttackOutcome], float | None],
) -> float | None:
    """The mean over seeds, in percent; None if there are none, or all have diverged."""
    mine = [o for o in outcomes if o.method == method and o.rule == rule and attack in (None, o.attack)]
    values = [100 * v for v in map(of, mine) if v is not None]
    return statistics.fmean(values) if values else None
