"""`fedspan attack`: what dishonest clients reach in a simulation, with the defence and without."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from fedspan.cli.console import directory, listed, note, say
from fedspan.cli.run import Experiment, Out, Overrides, Quiet
from fedspan.errors import ConfigError
from fedspan.storage.atomic import write_atomic

Methods = Annotated[str, typer.Option("--methods", help="With commas; default: the file's.", show_default=False)]
Attacks = Annotated[str, typer.Option("--attacks", help="With commas; default: all.", show_default=False)]
Rules = Annotated[str, typer.Option("--rules", help="Rules of the defence, with commas.")]
Seeds = Annotated[
    str, typer.Option("--seeds", help="With commas, e.g. 200,201; default: the file's.", show_default=False)
]


def attack(
    exp: Experiment,
    overrides: Overrides = None,
    methods: Methods = "",
    attacks: Attacks = "",
    rules: Rules = "none,clip",
    seeds: Seeds = "",
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Let a tenth of the clients attack, and show what the honest ones have left; runs that are done are not repeated.

    Writes table.md and table.csv. The other keys of [defence] come from the file.
    """
    from fedspan.config import load_config
    from fedspan.simulation.defence import Defence
    from fedspan.studies.attacks import ATTACKS, attack_jobs, bars, carry_out, to_csv, to_markdown

    config = load_config(exp, overrides or [])
    guard = config.defence or Defence()
    chosen = [replace(guard, rule=rule) for rule in listed(rules)]  # type: ignore[arg-type]
    named = listed(methods) or [config.method["name"]]
    jobs = attack_jobs(config, named, listed(attacks) or list(ATTACKS), chosen, _numbers(seeds) or [config.seed])
    where = directory(out, config.name)
    outcomes = []
    for k, job in enumerate(jobs, 1):
        outcome, known = carry_out(job, where)
        outcomes.append(outcome)
        if not quiet:
            shown = "diverged" if outcome.accuracy is None else f"{100 * outcome.accuracy:.2f} %"
            what = f"{outcome.method}, {outcome.attack}, {outcome.rule}, seed {outcome.seed}"
            say(f"[{k}/{len(jobs)}] {what}: {'already ' if known else ''}{shown}")
    text = to_markdown(outcomes)
    write_atomic(where / "table.md", text)
    write_atomic(where / "table.csv", to_csv(outcomes))
    typer.echo(text, nl=False)
    say(f"Table: {where / 'table.md'}, {where / 'table.csv'}; single runs beside them.")
    missed = sum(not bar.met for bar in bars(outcomes))
    if missed:
        note(f"{missed} of what is asked of the defence is not met.")


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in listed(text)]
    except ValueError:
        found = [-1]
    if any(n < 0 for n in found):
        raise ConfigError(f"attack: --seeds must be integers >= 0 with commas. Got {text[:60]!r}.")
    return found
