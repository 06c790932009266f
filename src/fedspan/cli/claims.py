"""`fedspan claims`: what the papers claim, how each claim is decided, and what came out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspan.cli.cluster_runs import ClusterRuns, cluster_runs, spread
from fedspan.cli.console import child, directory, note, say, show, table, user_path
from fedspan.cli.run import Cluster, Quiet
from fedspan.errors import ConfigError

if TYPE_CHECKING:
    from fedspan.studies.claims import Claim, ClaimOutcome, Decision
    from fedspan.studies.claims.claim_runs import ClaimJob, Result

FAILED = 1
"""Exit code of `verify` where something is wrong."""

Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A claim: paper/claim, or claim alone.", show_default=False)]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Claims: paper/claim, or claim alone.")]
Outcomes = Annotated[
    Path | None, typer.Option("--outcomes", help="Folder of outcomes; default: those that come with fedspan.")
]
RunsOut = Annotated[Path | None, typer.Option("--out", help="Folder of the claims' runs; default runs/claims.")]
Root = Annotated[str | None, typer.Option("--root", help="Where data sets lie; default $FEDSPAN_DATA.")]
Rerun = Annotated[int, typer.Option("--rerun", help="How many claims are computed again.", min=0)]
VerifySeed = Annotated[int, typer.Option("--seed", help="Which ones: another seed draws others.", min=0)]
Longest = Annotated[
    float | None, typer.Option("--max-minutes", help="Compute only those again that took at most so long.", min=0.0)
]

claims = typer.Typer(help="What the papers claim, the test that decides each claim, and what came out.")


@claims.callback(invoke_without_command=True)
def _claims(ctx: typer.Context, outcomes: Outcomes = None, as_json: Json = False) -> None:
    """What the papers claim, the test that decides each claim, and what came out."""
    if ctx.invoked_subcommand is None:
        list_(outcomes, as_json)


@claims.command("list")
def list_(outcomes: Outcomes = None, as_json: Json = False) -> None:
    """Every claim and its state."""
    from fedspan.studies.claims import catalogue, decide, sound_outcomes

    stored = sound_outcomes(catalogue(), _folder(outcomes))
    decided = [(c, stored.outcomes.get(c.name)) for c in catalogue()]
    verdicts = [(c, o, decide(c, None if o is None else o.figures)) for c, o in decided]
    if as_json:
        typer.echo(json.dumps([_summary(c, o, d) for c, o, d in verdicts], indent=1, allow_nan=False))
        return
    rows = [(c.name, c.sentence, d.text, _effect(d), _cost(c, o)) for c, o, d in verdicts]
    show(table(["claim", "what the paper says", "verdict", "effect [90 % interval]", "minutes"], rows, right=[4]))
    counts: dict[str, int] = {}
    for _, _, d in verdicts:
        counts[d.word] = counts.get(d.word, 0) + 1
    say(f"{len(verdicts)} claims: {', '.join(f'{n} {word}' for word, n in counts.items())}.")
    for name, why in stored.damaged.items():
        note(f"{name}: {why}")


@claims.command("show")
def show_(name: Name, outcomes: Outcomes = None, as_json: Json = False) -> None:
    """A claim whole: sentence, place, settings, rows, tests, and the outcome if there is one."""
    from fedspan.studies.claims import decide, find_claim, sound_outcomes
    from fedspan.studies.claims.claim_pages import effort_table, figure_table, test_table

    claim = find_claim(name)
    stored = sound_outcomes((claim,), _folder(outcomes))
    outcome = stored.outcomes.get(claim.name)
    decision = decide(claim, None if outcome is None else outcome.figures)
    if as_json:
        whole = {**_summary(claim, outcome, decision), "tests": [t.to_json() for t in decision.tests]}
        whole |= {"outcome": None if outcome is None else outcome.model_dump()}
        typer.echo(json.dumps(whole, indent=1, allow_nan=False))
        return
    for why in stored.damaged.values():
        note(f"{claim.name}: {why}")
    say(f"{claim.name}: {claim.sentence}", "bold")
    say(f"Place: {claim.place}.")
    for title, text in (("Paper", claim.setting.paper), ("Here", claim.setting.ours)):
        if text:
            say(f"{title}: {text}")
    for difference in claim.setting.differences:
        say(f"Differs: {difference}")
    say(f"Verdict: {decision.text}. {claim.not_testable}".rstrip(), "bold")
    for made in (test_table(claim, decision), figure_table(claim, outcome), effort_table(claim, outcome)):
        if made is not None:
            show(table(made.titles, made.rows, right=range(1, len(made.titles))))
    if outcome is None and not claim.not_testable:
        say(f"Not run; `fedspan claims run {claim.name}` takes about {claim.minutes:g} minutes on one core.")
    elif outcome is not None:
        told = ", ".join(f"{k} {v}" for k, v in outcome.versions.items())
        say(f"Computed in {outcome.seconds:,.0f} s with {told}; code {outcome.code}.")


@claims.command("run")
def run_(
    names: Names,
    out: RunsOut = None,
    outcomes: Outcomes = None,
    root: Root = None,
    quiet: Quiet = False,
    as_json: Json = False,
    cluster: Cluster = None,
) -> None:
    """Carry claims out and decide them; what is finished is not repeated, so a stopped one goes on."""
    from fedspan.cli.checks import perform_check
    from fedspan.studies.claims import decide, find_claim
    from fedspan.studies.claims.claim_runs import perform
    from fedspan.studies.claims.outcome_file import file_of, outcomes_folder

    wanted = [find_claim(name) for name in names]
    where = directory(out, "claims")
    _look_for_data(root)
    told = []
    for claim in wanted:
        with cluster_runs(cluster) as runs:
            begun = runner(child(where, claim.folder), quiet or as_json, runs)
            outcome = perform(claim, begun, perform_check, lambda work, rows, on=runs: spread(work, rows, on))  # type: ignore[misc]
        path = outcome.write(file_of(claim, _folder(outcomes) or outcomes_folder()))
        decision = decide(claim, outcome.figures)
        told.append(_summary(claim, outcome, decision) | {"outcome": str(path)})
        if not as_json:
            for result in decision.tests:
                say(f"{result.says}: {result.interval}, {result.state}")
            say(f"{claim.name}: {decision.text}. Outcome: {path}", "bold")
    if as_json:
        typer.echo(json.dumps(told, indent=1, allow_nan=False))


@claims.command()
def verify(
    rerun: Rerun = 2,
    seed: VerifySeed = 0,
    max_minutes: Longest = None,
    outcomes: Outcomes = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Hash all outcomes again, hold verdicts to their figures and claims, and compute some again, drawn at random.

    Ends with 1 if anything differs.
    """
    from fedspan.cli.checks import perform_check
    from fedspan.studies.claims import catalogue, find_claim, stored_outcomes
    from fedspan.studies.claims.verification import Verified, drawn, recomputed, rehashed

    stored = stored_outcomes(catalogue(), _folder(outcomes))
    _look_for_data(root)
    found = [rehashed(find_claim(name), outcome) for name, outcome in stored.outcomes.items()]
    found += [Verified(claim=name, state="differs", says=why) for name, why in stored.damaged.items()]
    sound = {v.claim: stored.outcomes[v.claim] for v in found if v.good}
    for name in drawn(sound, rerun, seed, max_minutes):
        if not as_json:
            note(f"{name}: computed again ...")
        found.append(recomputed(find_claim(name), sound[name], lambda at: runner(at, quiet=True), perform_check))
    if as_json:
        typer.echo(json.dumps([vars(v) for v in found], indent=1, allow_nan=False))
    else:
        show(table(["claim", "state", "what was found"], [(v.claim, v.state, v.says) for v in found]))
        say(f"{len(stored.outcomes)} outcomes, {sum(not v.good for v in found)} faults.")
    if not all(v.good for v in found):
        raise typer.Exit(FAILED)


# ------------------------------------------------------------------------------------------------ what they share


def runner(where: Path, quiet: bool, runs: ClusterRuns | None = None) -> Callable[[ClaimJob], Result | None]:
    """What carries the runs of a claim out below a folder, one after another, or each on a machine of a cluster."""
    from fedspan.cli.running import result_of

    def run(job: ClaimJob) -> Result | None:
        result, found = result_of(job.config, child(where, job.folder), quiet=True, label=job.label, runs=runs)
        if not quiet:
            end = "diverged" if result is None else _measured(result)
            say(f"{job.label}: {'already ' if found else ''}{end}")
        return result

    return run


def _measured(result: Result) -> str:
    mean = result["accuracy"].get("mean")
    value = f"{100 * mean:.2f} %" if mean is not None else "done"
    return f"{value}, {sum(result['seconds'].values()):.1f} s"


def _folder(given: Path | None) -> Path | None:
    return None if given is None else user_path(given, "--outcomes")


def _look_for_data(root: str | None) -> None:
    """Runs look for data where $FEDSPAN_DATA says; a claim's experiment names no folder of a machine."""
    if root is None:
        return
    import os

    if not Path(root).is_dir():
        raise ConfigError(f"claims: --root must be a folder. Got {root[:200]!r}.")
    os.environ["FEDSPAN_DATA"] = root


def _summary(claim: Claim, outcome: ClaimOutcome | None, decision: Decision) -> dict[str, Any]:
    return {
        "claim": claim.name,
        "sentence": claim.sentence,
        "place": claim.place,
        "verdict": decision.text,
        "effects": [{"test": t.says, "effect": t.effect, "low": t.low, "high": t.high} for t in decision.tests],
        "minutes": claim.minutes,
        "seconds": None if outcome is None else outcome.seconds,
    }


def _effect(decision: Decision) -> str:
    main = next((t for t in decision.tests if not t.only_if), None)
    return "" if main is None else main.interval


def _cost(claim: Claim, outcome: ClaimOutcome | None) -> str:
    if claim.not_testable:
        return ""
    return f"{claim.minutes:g} (estimate)" if outcome is None else f"{outcome.seconds / 60:.1f}"
