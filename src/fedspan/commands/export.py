"""`fedspan export`: one client's model as a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from fedspan.commands.console import say, size, user_path
from fedspan.errors import ConfigError, nearest

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]
File = Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.", show_default=False)]
Client = Annotated[str, typer.Option("--client", help="The client's number, or its name.", show_default=False)]


def export(run: Run, file: File, client: Client) -> None:
    """Write the weights one client predicts with, read from a run's newest checkpoint."""
    from safetensors.torch import save_file

    from fedspan import tree
    from fedspan.commands.running import open_run
    from fedspan.layers import plain_weights, structured

    user_path(file, "export: the file")
    if file.suffix != ".safetensors":
        raise ConfigError(f"export: the file must end in .safetensors. Got {file.name!r}.")
    if not file.resolve().parent.is_dir():
        raise ConfigError(f"export: the folder {file.parent} must exist. Make it first.")
    config, simulation = open_run(run, "export")
    data = simulation.data
    number = _number(client, data.names)
    trained, weights = simulation.personal(number)
    known = trained.init().keys()
    if trained.whole(weights) and structured(trained.module):  # as the plain network that [model] describes
        weights, known = plain_weights(trained.module, weights), simulation.task.init().keys()
    flat = {k: t.detach().contiguous().clone() for k, t in tree.flatten(weights).items()}
    done = simulation.record.progress.round
    about = {
        "format": "fedspan personal model",
        "method": config.method["name"],
        "experiment": config.name,
        "client": str(number),
        "client_name": data.names[number],
        "round": str(done),
        "seed": str(config.seed),
        "model": json.dumps(config.to_dict()["model"]),
        "input_shape": json.dumps(list(data.x.shape[1:])),
        "classes": json.dumps(data.classes),
        "names": json.dumps(list(flat)),
        "plain": json.dumps(sorted(flat) == sorted(known)),
    }
    temporary = file.with_name(file.name + ".tmp")
    save_file(flat, temporary, metadata=about)
    os.replace(temporary, file)
    total = sum(t.numel() for t in flat.values())
    say(f"{file}: client {data.names[number]} after round {done}, {total:,} numbers, {size(file.stat().st_size)}.")


def _number(client: str, names: list[str]) -> int:
    if client in names:
        return names.index(client)
    if client.isascii() and client.isdigit() and len(client) < 10 and int(client) < len(names):
        return int(client)
    hint = nearest(client[:60], names) if len(names) <= 50 else ""
    raise ConfigError(
        f"export: client must be a number in 0..{len(names) - 1} or a client's name. Got {client[:60]!r}.{hint}"
    )
