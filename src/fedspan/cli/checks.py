"""Checks that claims are decided by: those of `theory` and `analyse`, bytes and parameters, each as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fedspan.cli.console import note
from fedspan.cli.theory import TheoryCheck
from fedspan.cli.theory import perform as perform_theory
from fedspan.errors import ConfigError, nearest

if TYPE_CHECKING:
    from fedspan.studies.claims import Claim

Numbers = Mapping[str, Any]


def perform_check(claim: Claim) -> Numbers:
    """The numbers of a claim's check.

    Raises:
        ConfigError: for a check that there is not.
    """
    assert claim.check is not None
    name = claim.check.name
    if name in OTHERS:
        return OTHERS[name](claim)
    if name not in known_checks():
        raise ConfigError(f"claims: {claim.name}: there is no check '{name[:60]}'.{nearest(name[:60], known_checks())}")
    if claim.check.options:
        raise ConfigError(f"claims: {claim.name}: the check '{name}' has no options.")
    return perform_theory(TheoryCheck(name)).numbers


def known_checks() -> list[str]:
    """The names of all checks."""
    return [*TheoryCheck, *OTHERS]


def _hessian_rank(claim: Claim) -> Numbers:
    from fedspan.method.fields import build
    from fedspan.studies.theory.hessian_rank import Plan, by_width, run

    assert claim.check is not None
    options = dict(claim.check.options)
    widths = options.pop("widths", None)
    seeds = {"seeds": len(claim.seeds), "first_seed": claim.seeds[0]}
    plan = build(Plan, {**options, **seeds}, f"claims: {claim.name}: [check.options]")
    return (run(plan, say=note) if widths is None else by_width(plan, widths, say=note)).numbers


def _bytes(claim: Claim) -> Numbers:
    """Bytes of whole runs, up, down and together, by row, as the paper counts (`rule`) or as they travel."""
    from fedspan.cli.bytes import count, find_rule
    from fedspan.studies.claims.fair_play import config_of

    assert claim.check is not None
    rule = str(claim.check.options.get("rule", "own"))
    out: dict[str, Any] = {}
    for row in claim.rows:
        config = config_of(claim, row, {}, claim.seeds[0])
        traffic = count(config, find_rule(rule, row.method))[1].run
        if None not in traffic.values():
            sent = {k: v for k, v in traffic.items() if v is not None}
            out[row.name] = {**sent, "together": sum(sent.values()), "gigabytes": sum(sent.values()) / 1e9}
    return out


def _parameters(claim: Claim) -> Numbers:
    """What each row's client trains and sends: numbers, and their share of the plain model's."""
    from fedspan.cli.bytes import assembled
    from fedspan.cli.probe import probe
    from fedspan.studies.claims.fair_play import config_of
    from fedspan.tree import leaves

    out: dict[str, Any] = {}
    for row in claim.rows:
        method, task, data, _ = assembled(config_of(claim, row, {}, claim.seeds[0]))
        payload = probe(method, task, data, 0, batch=2)
        sent = sum(t.numel() for t in leaves(payload.mean | payload.each))
        plain = sum(p.numel() for p in task.module.parameters())
        out[row.name] = {"sent": sent, "plain": plain, "share": sent / plain}
    return out


OTHERS: dict[str, Callable[[Claim], Numbers]] = {
    "hessian-rank": _hessian_rank,
    "bytes": _bytes,
    "parameters": _parameters,
}
"""Checks besides those of `theory`."""
