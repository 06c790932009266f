"""`fedspan demo`: what personalised federated learning is about, in half a minute."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.console import directory, say
from fedspan.cli.run import Fresh, Quiet

Out = Annotated[Path | None, typer.Option("--out", help="Directory to write to; default runs/demo.")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Fewer or more rounds.", min=1, show_default=False)]


def demo(out: Out = None, rounds: Rounds = None, fresh: Fresh = False, quiet: Quiet = False) -> None:
    """Compare nine methods on real digits: 40 clients in 4 groups that name the digits differently."""
    from fedspan.cli.compare import plan
    from fedspan.cli.running import run_all
    from fedspan.config import from_dict
    from fedspan.storage.toml import parse_toml

    text = resources.files("fedspan.cli").joinpath("demo.toml").read_text(encoding="utf-8")
    config = from_dict(parse_toml(text, "demo.toml"), [] if rounds is None else [f"rounds={rounds}"])
    where = directory(out, "demo")
    say("40 clients hold 45 handwritten digits each, 30 to train on. Each of 4 groups names the digits in its own way.")
    jobs = plan(config, list(config.methods), 1, where)
    run_all(jobs, "fedspan demo", where / "report.html", fresh=fresh, quiet=quiet)
    results = [json.loads((d / "result.json").read_text(encoding="utf-8")) for _, _, d in jobs]
    say(lesson({r["method"]: r["accuracy"]["mean"] for r in results}))


def lesson(accuracy: dict[str, float]) -> str:
    """What the numbers show; claims nothing that they do not."""
    from fedspan.report.registered import role

    alone, common, told = (next(k for k in accuracy if role(k) == what) for what in ("alone", "common", "told"))
    shown = {k: f"{k} {100 * v:.1f} %" for k, v in accuracy.items()}
    bar = max(accuracy[alone], accuracy[common])
    others = sorted(accuracy.keys() - {alone, common, told}, key=lambda k: -accuracy[k])
    above, below = [[shown[k] for k in others if (accuracy[k] > bar) is side] for side in (True, False)]
    said = (
        f"What to see: one model for all ({shown[common]}) cannot please groups that disagree, and clients that train"
        f" alone ({shown[alone]}) have few examples."
    )
    if above:
        said += f" Personal models that learn together are better than both: {', '.join(above)}."
    if below:
        said += f" Not better than both after these rounds: {', '.join(below)}."
    return f"{said} What knowing the groups would give: {shown[told]}."
