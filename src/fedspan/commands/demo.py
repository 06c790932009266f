"""`fedspan demo`: what personalised federated learning is about, in half a minute."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fedspan.commands.console import directory, say
from fedspan.commands.run import Fresh, Quiet

Out = Annotated[Path | None, typer.Option("--out", help="Directory to write to; default runs/demo.")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Fewer or more rounds.", min=1, show_default=False)]


def demo(out: Out = None, rounds: Rounds = None, fresh: Fresh = False, quiet: Quiet = False) -> None:
    """Compare seven methods on real digits: 40 clients in 4 groups that name the digits differently."""
    from fedspan.commands.compare import plan
    from fedspan.commands.running import run_all
    from fedspan.config import from_dict
    from fedspan.toml_text import parse_toml

    text = resources.files("fedspan").joinpath("demo.toml").read_text()
    config = from_dict(parse_toml(text, "demo.toml"), [] if rounds is None else [f"rounds={rounds}"])
    where = directory(out, "demo")
    say("40 clients hold 45 handwritten digits each. In 4 groups of 10 the digits go by different names.")
    jobs = plan(config, list(config.methods), 1, where)
    run_all(jobs, "fedspan demo", where / "report.html", fresh=fresh, quiet=quiet)
    say(
        "What to see: one model for all (fedavg) cannot please groups that disagree, and training alone (local) has too"
        " few examples. A shared body with private heads (fedper, fedrep) does better than both; a shared subspace"
        " (pfl-mf) finds the groups by itself and comes near the oracle, which was told them."
    )
