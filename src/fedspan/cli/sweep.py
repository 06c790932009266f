"""`fedspan sweep`: every combination of some values."""

from __future__ import annotations

import hashlib
import itertools
import re
from typing import Annotated

import typer

from fedspan.cli.console import child, directory
from fedspan.cli.run import Cluster, Experiment, Fresh, Out, Quiet
from fedspan.errors import ConfigError

MOST = 1000
Values = Annotated[
    list[str], typer.Argument(metavar="section.key=a,b,c...", help="Values with commas.", show_default=False)
]


def sweep(
    exp: Experiment,
    values: Values,
    out: Out = None,
    fresh: Fresh = False,
    quiet: Quiet = False,
    cluster: Cluster = None,
) -> None:
    """Run every combination of the values given, e.g. method.rank=1,5,10 seed=0,1; finished ones are not repeated."""
    from fedspan.cli.running import run_all
    from fedspan.config import load_config

    axes = [split(text) for text in values]
    count = 1
    for _, choices in axes:
        count *= len(choices)
    if count > MOST:
        raise ConfigError(f"sweep: there must be at most {MOST} combinations. Got {count}.")
    where = directory(out, load_config(exp).name, "sweep")
    varied = [key for key, choices in axes if len(choices) > 1]
    jobs = []
    for point in itertools.product(*([f"{key}={v}" for v in choices] for key, choices in axes)):
        config = load_config(exp, point).resolve()
        label = ",".join(p for p in point if p.partition("=")[0] in varied) or f"seed={config.seed}"
        jobs.append((label, config, child(where, folder(label))))
    title = f"{where.name}: {', '.join(varied)}"
    run_all(jobs, title, where / "report.html", fresh=fresh, quiet=quiet, cluster=cluster)


def split(text: str) -> tuple[str, list[str]]:
    """A key and its values; commas inside quotes or brackets do not divide."""
    key, equals, rest = text.partition("=")
    choices = [v.strip() for v in re.findall(r"(?:\[[^\]]*\]|\"[^\"]*\"|'[^']*'|[^,])+", rest)]
    if not equals or not choices or not all(choices):
        raise ConfigError(f"sweep: values must look like section.key=a,b,c. Got {text[:60]!r}.")
    return key.strip(), list(dict.fromkeys(choices))


def folder(label: str) -> str:
    """A directory name from settings; what a file system may not take is replaced, and then told apart by a hash."""
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", label)
    if name == label and len(name) <= 80 and ".." not in name:
        return name
    digest = hashlib.blake2b(label.encode(), digest_size=4).hexdigest()
    return f"{name.replace('..', '_')[:70].rstrip('.')}-{digest}"
