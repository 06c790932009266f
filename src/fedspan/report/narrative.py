"""What the numbers say, in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from fedspan.report.measures import alone, clients
from fedspan.report.registered import role, yardstick
from fedspan.report.runs import Group
from fedspan.report.tables import Row, short


def headline(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """The cards at the top: what, the number, and whose it is. All text is escaped."""
    known = _contenders(rows)
    if not known:
        return []
    measure, best = known[0].measure, known[0]
    unit = " %" if measure.percent else ""
    name = measure.words
    cards = [(f"{'Best mean' if len(known) > 1 else 'Mean'} {name}", measure.text(best.mean) + unit, best.label)]
    worst = _best_for_worst(known)
    if worst is not None:
        cards.append(("Worst tenth of clients", measure.text(worst.worst) + unit, worst.label))
    near = [r for r in known if r.total is not None and _close(r, best)]
    if near:
        cheap = min(near, key=lambda r: r.total or 0.0)
        what = (
            "Least traffic within one " + ("point" if measure.percent else "per cent") + " of it"
            if len(known) > 1
            else "Traffic"
        )
        cards.append((what, f"{short(cheap.total)} MB", cheap.label))
    return [(escape(a), escape(b), escape(c)) for a, b, c in cards]


def summary(rows: Sequence[Row], groups: Sequence[Group]) -> list[str]:
    """Sentences on which method is best, for whom, at what cost, and whether the seeds bear it out; escaped HTML."""
    known = _contenders(rows)
    if not known:
        return ["No run reports a measure, so there is nothing to compare."]
    best, rest = known[0], known[1:]
    by_label = {g.label: g for g in groups}
    out = [_first(known)]
    if rest:
        out.append(_worst(known))
    mine = yardstick(best.method)
    for what in ("alone", "common"):
        base = next((r for r in rest if role(r.method) == what), None)
        by = None if base is None else yardstick(base.method)
        if base is not None and by is not None and role(best.method) != what:
            out.append(_over(best, base, by.phrase, by_label if what == "alone" else None))
    if mine is not None and mine.role == "alone" and any(role(r.method) != "alone" for r in rest):
        out.append(f"No method here beats {mine.phrase}.")
    told = next((r for r in rows if r.mean is not None and r not in known), None)
    ideal = None if told is None else yardstick(told.method)
    if told is not None and ideal is not None:
        would = f"{ideal.phrase[0].upper()}{ideal.phrase[1:]} would give"
        out.append(f"{would} {best.measure.phrase(told.mean)} ({_b(told)}, a yardstick).")
    out.append(_cost(known))
    out.append(_certainty(known))
    return [s for s in out if s]


def _contenders(rows: Sequence[Row]) -> list[Row]:
    """Rows with a result, without those that are told what a method must find out, unless there are no others."""
    known = [r for r in rows if r.mean is not None]
    return [r for r in known if role(r.method) != "told"] or known


def _b(row: Row) -> str:
    return f"<strong>{escape(row.label)}</strong>"


def _first(known: Sequence[Row]) -> str:
    best = known[0]
    seeds = f"mean of {len(best.seeds)} seeds" if len(best.seeds) > 1 else "one seed"
    value, after = best.measure.phrase(best.mean), f"after {best.rounds} rounds ({seeds})"
    if len(known) == 1:
        tail = "" if best.worst is None else f", and {best.measure.phrase(best.worst)} for the worst tenth of clients"
        return f"{_b(best)} reaches {value} on average {after}{tail}."
    ties = [r for r in known if best.measure.text(r.mean) == best.measure.text(best.mean)]
    if len(ties) > 1:
        names = ", ".join(_b(r) for r in ties[:4]) + (" and others" if len(ties) > 4 else "")
        return f"{names} share the best average, {value} {after}; what follows is about the first."
    return f"{_b(best)} is best on average: {value} {after}."


def _best_for_worst(known: Sequence[Row]) -> Row | None:
    those = [(r, r.worst) for r in known if r.worst is not None]
    if not those:
        return None
    choose = max if known[0].measure.higher else min
    return choose(those, key=lambda pair: pair[1])[0]


def _worst(known: Sequence[Row]) -> str:
    top, best = _best_for_worst(known), known[0]
    if top is None or top.worst is None:
        return ""
    value = best.measure.phrase(top.worst)
    if top is best or best.worst is None or best.measure.text(best.worst) == best.measure.text(top.worst):
        return f"It also serves the worst tenth of clients best ({value})."
    return (
        f"The worst tenth of clients fares best with {_b(top)}: {value}, against"
        f" {best.measure.phrase(best.worst)} with {escape(best.label)}."
    )


def _over(best: Row, base: Row, phrase: str, by_label: Mapping[str, Group] | None) -> str:
    assert best.mean is not None and base.mean is not None
    gain = best.measure.gain(best.mean, base.mean)
    text = f"Over {phrase} ({best.measure.phrase(base.mean)}) it gains {best.measure.gap(gain)}"
    if best.worst is not None and base.worst is not None:
        tenth = best.measure.gain(best.worst, base.worst)
        verb = "and" if tenth >= 0.0 else "but loses"
        text += f" on average {verb} {best.measure.gap(abs(tenth))} for the worst tenth"
    better, of = _gainers(best, by_label[best.label], by_label[base.label]) if by_label else (0, 0)
    seeds = " (over all seeds)" if len(best.seeds) > 1 else ""
    return text + (f"; {better} of {of} clients{seeds} do better than alone." if of else ".")


def _gainers(best: Row, mine: Group, local: Group) -> tuple[int, int]:
    """How many clients gain over training alone, over all seeds both have."""
    better = of = 0
    for run in mine.runs:
        for other in local.runs:
            values = alone(run, other, best.measure)
            if values:
                of += len(values)
                better += sum(best.measure.gain(c.value, values[c.index]) > 0.0 for c in clients(run, best.measure))
    return better, of


def _cost(known: Sequence[Row]) -> str:
    best = known[0]
    if best.total is None:
        return ""
    if best.total == 0.0:
        return "It sends nothing."
    text = f"It sends {short(best.total)} MB in total"
    others = [r for r in known[1:] if r.total]
    base = next((r for r in others if role(r.method) == "common"), others[0] if others else None)
    if base is None or base.total is None:
        return text + "."
    ratio = best.total / base.total
    if ratio < 1 / 1.05:
        says = f"{1 / ratio:.1f} times less than {escape(base.label)} ({short(base.total)} MB)"
    elif ratio > 1.05:
        says = f"{ratio:.1f} times more than {escape(base.label)} ({short(base.total)} MB)"
    else:
        says = f"about as much as {escape(base.label)}"
    return f"{text}, {says}."


def _close(row: Row, best: Row) -> bool:
    """Whether a row is within one point (one per cent of another measure) of the best."""
    assert row.mean is not None and best.mean is not None
    return best.measure.gain(best.mean, row.mean) <= (0.01 if best.measure.percent else 0.01 * abs(best.mean))


def _certainty(known: Sequence[Row]) -> str:
    best, measure = known[0], known[0].measure
    if len(known) == 1:
        return "" if len(best.seeds) > 1 else "One seed cannot tell how far this would vary."
    second = known[1]
    assert best.mean is not None and second.mean is not None
    gap = measure.gain(best.mean, second.mean)
    lead = f"the lead over the next best, {escape(second.label)}, is {measure.gap(gap)}"
    if best.over_seeds is None or second.over_seeds is None:
        return (
            f"One seed cannot tell luck from merit: {lead}, and only more seeds (<code>--seeds 3</code>) can say more."
        )
    spread = math.hypot(best.over_seeds, second.over_seeds)
    if gap > spread:
        return f"{lead[0].upper()}{lead[1:]}, more than the spread over seeds ({measure.gap(spread)})."
    return (
        f"{lead[0].upper()}{lead[1:]}, within the spread over seeds ({measure.gap(spread)}): they cannot be told apart."
    )
