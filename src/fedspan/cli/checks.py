"""Checks that claims are decided by: those of `theory` and `analyse`, bytes and parameters, each as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fedspan.cli.console import note
from fedspan.cli.theory import TheoryCheck
from fedspan.cli.theory import perform as perform_theory
from fedspan.errors import ConfigError, nearest

if TYPE_CHECKING:
    from fedspan.config import RunConfig
    from fedspan.methods.byte_rules import ByteRule
    from fedspan.studies.claims import Claim
    from fedspan.studies.theory.outcome import Outcome

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
    if name in SEEDED:
        return {"runs": [SEEDED[name](seed).numbers for seed in claim.seeds]}
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
    """Bytes of whole runs, up, down and together, by row, as the paper counts (`rule`) or as they travel.

    Options: `rule`, and `rules` for rows that are counted otherwise; `printed`, the paper's gigabytes of rows that send
    something sparse, from which `implied_zeros` follow.
    """
    from fedspan.cli.bytes import count, find_rule
    from fedspan.studies.claims.fair_play import config_of

    assert claim.check is not None
    options = claim.check.options
    out: dict[str, Any] = {}
    for row in claim.rows:
        config = config_of(claim, row, {}, claim.seeds[0])
        rule = find_rule(str(options.get("rules", {}).get(row.name, options.get("rule", "own"))), row.method)
        traffic = count(config, rule)[1].run
        if None not in traffic.values():
            out[row.name] = _totals(traffic)
        elif "printed" in options:
            out[row.name] = implied_zeros(config, rule, float(options["printed"]))
    return out


def _totals(traffic: Mapping[str, int | None]) -> dict[str, float]:
    sent = {k: v for k, v in traffic.items() if v is not None}
    return {**sent, "together": sum(sent.values()), "gigabytes": sum(sent.values()) / 1e9}


def implied_zeros(config: RunConfig, rule: ByteRule | None, printed: float) -> Numbers:
    """What printed gigabytes say of how many entries are not zero in what a method sends sparse.

    `none` and `all` are the bytes if no entry or every entry is sent; `share` is that of both ways alike, `share_up`
    that of uploads if averages hold every entry, and `millions_up` the numbers of such an upload.
    """
    from fedspan.cli.bytes import count

    def total(up: float, down: float) -> dict[str, float]:
        return _totals(count(config, rule, {"up": up, "down": down})[1].run)

    least, full, half = total(0, 0), total(1, 1), total(0, 1)
    share = (printed - least["gigabytes"]) / (full["gigabytes"] - least["gigabytes"])
    up = (printed - half["gigabytes"]) / (full["gigabytes"] - half["gigabytes"])
    if not (0 <= share <= 1 and 0 <= up <= 1):
        raise ConfigError(
            f"claims: printed must lie between {half['gigabytes']:.3g} and {full['gigabytes']:.3g} GB, the bytes with"
            f" none and with all of what is sent sparse in an upload. Got {printed:g}."
        )
    found = total(up, 1)
    uploads = config.rounds * config.train.participation * (config.partition.clients or 1)
    return {
        "none": least,
        "all": full,
        "share": share,
        "share_up": up,
        "millions_up": found["up"] / uploads / 4e6,
        "travels": _totals(count(config, None, {"up": up, "down": 1})[1].run),
    }


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


def _update_rank(claim: Claim) -> Numbers:
    """The rank of what FedLoRU has added to each weight, round by round: in how many cases it is the bound's."""
    from fedspan.config import assemble
    from fedspan.simulation.simulator import Simulation
    from fedspan.studies.claims.fair_play import config_of
    from fedspan.studies.theory import update_rank

    config = config_of(claim, claim.rows[0], {}, claim.seeds[0])
    simulation = Simulation(*assemble(config), rounds=config.rounds, seed=config.seed, settings=config.train)
    simulation.run()
    numbers = update_rank.run(simulation).numbers
    cases = [
        (rank, min(bound, layer["full"]))
        for layer in numbers["layers"].values()
        for rank, bound in zip(layer["ranks"][1:], numbers["bound"][1:])
    ]
    counted = {"cases": len(cases), "equal": sum(a == b for a, b in cases), "above": sum(a > b for a, b in cases)}
    return {**numbers, **counted, "other": len(cases) - counted["equal"]}


def _start_scale(claim: Claim) -> Numbers:
    """How the second row's factorised model starts beside the first row's plain one, and what that does to training.

    Options: `lr`, the step sizes at which all are trained; `width`, of the wide network in which only starts are seen.
    """
    from fedspan.studies.claims.fair_play import config_of
    from fedspan.studies.theory import start_scale

    assert claim.check is not None
    lrs, width = claim.check.options["lr"], claim.check.options["width"]
    runs = []
    for seed in claim.seeds:
        note(f"seed {seed} ...")
        plain, factorised = (config_of(claim, row, {"lr": lrs[0]}, seed) for row in claim.rows)
        runs.append(start_scale.compare(plain, factorised, lrs, width))
    return {"runs": runs}


def _example_2(seed: int) -> Outcome:
    from fedspan.studies.theory import example_2

    return example_2.run(seed=seed)


def _movielens(seed: int) -> Outcome:
    from fedspan.studies.theory import movielens
    from fedspan.studies.theory.ratings import load

    return movielens.compare(load(None), seed=seed, say=note)


def _factor_updates(seed: int) -> Outcome:
    from fedspan.studies.theory import factor_updates
    from fedspan.studies.theory.images import digits, grey

    size = factor_updates.FULL
    pictures = digits(None, size.train, size.test, seed), grey(None, size.train // 2, size.test, seed)
    return factor_updates.compare(*pictures, size, seed=seed, say=note)


SEEDED: dict[str, Callable[[int], Outcome]] = {
    "example-2": _example_2,
    "movielens": _movielens,
    "factor-updates": _factor_updates,
}
"""Checks of `theory` with one draw of the data: a claim takes one run for each of its seeds, `runs/*`."""

OTHERS: dict[str, Callable[[Claim], Numbers]] = {
    "hessian-rank": _hessian_rank,
    "bytes": _bytes,
    "parameters": _parameters,
    "update-rank": _update_rank,
    "start-scale": _start_scale,
}
"""Checks besides those of `theory`."""
