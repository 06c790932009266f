"""`fedspan export`: one client's model as a file, or as a folder of Hugging Face's."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli.console import say, size, user_path
from fedspan.errors import ConfigError, nearest

if TYPE_CHECKING:
    from fedspan.config import RunConfig
    from fedspan.simulation.simulator import Simulation


class ExportFormat(StrEnum):
    """What a model can be written as."""

    safetensors = "safetensors"
    peft = "peft"
    huggingface = "huggingface"


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]
File = Annotated[
    Path, typer.Argument(metavar="OUT", help="The file (.safetensors) or folder to write.", show_default=False)
]
Client = Annotated[str, typer.Option("--client", help="The client's number, or its name.", show_default=False)]
Kind = Annotated[
    ExportFormat,
    typer.Option("--format", help="A file; or of language models a LoRA adapter for PEFT, or the whole model."),
]


def export(run: Run, file: File, client: Client, kind: Kind = ExportFormat.safetensors) -> None:
    """Write the weights one client predicts with, read from a run's newest checkpoint."""
    from fedspan.cli.running import open_run
    from fedspan.config.personal_model import as_described, write_personal

    user_path(file, "export: the file")
    if kind is not ExportFormat.safetensors:
        config, simulation = open_run(run, "export")
        return _folder(config, simulation, file, _number(client, simulation.data.names), kind)
    if file.suffix != ".safetensors":
        raise ConfigError(f"export: the file must end in .safetensors. Got {file.name!r}.")
    if not file.resolve().parent.is_dir():
        raise ConfigError(f"export: the folder {file.parent} must exist. Make it first.")
    config, simulation = open_run(run, "export")
    data = simulation.data
    number = _number(client, data.names)
    trained, weights = simulation.personal(number)
    weights, known = as_described(trained, simulation.task, weights)
    done = simulation.record.progress.round
    total = write_personal(
        file,
        config,
        weights,
        known,
        client=str(number),
        name=data.names[number],
        round=done,
        shape=data.x.shape[1:],
        classes=data.classes,
    )
    say(f"{file}: client {data.names[number]} after round {done}, {total:,} numbers, {size(file.stat().st_size)}.")


def _folder(config: RunConfig, simulation: Simulation, folder: Path, client: int, kind: ExportFormat) -> None:
    """A language model as an adapter beside its base, or with everything added up."""
    from fedspan.language import language_model, load_tokenizer, save_adapter, save_merged
    from fedspan.language.places import find

    language_model(simulation.task.module)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"export: the folder {folder} must be new or empty.")
    path = config.model.options["path"]
    place, where = find(path)
    task, weights = simulation.personal(client)
    done, name = simulation.record.progress.round, simulation.data.names[client]
    if kind is ExportFormat.huggingface:
        save_merged(task, weights, folder, load_tokenizer(path))
        say(f"{folder}: model and tokenizer of client {name} after round {done}, for AutoModelForCausalLM.")
        return
    base = str(where)
    if place in ("built", "llama2c"):  # no folder that PEFT could load the base from
        base = str(folder / "base")
        save_merged(simulation.task, simulation.task.init(), base, load_tokenizer(path))
        say(f"{base}: the base model and its tokenizer.")
    rank = save_adapter(task, weights, folder, base)
    size_ = size((folder / "adapter_model.safetensors").stat().st_size)
    say(
        f"{folder}: adapter of rank {rank} of client {name} after round {done}, {size_}, for PeftModel.from_pretrained."
    )


def _number(client: str, names: list[str]) -> int:
    if client in names:
        return names.index(client)
    if client.isascii() and client.isdigit() and len(client) < 10 and int(client) < len(names):
        return int(client)
    hint = nearest(client[:60], names) if len(names) <= 50 else ""
    raise ConfigError(
        f"export: client must be a number in 0..{len(names) - 1} or a client's name. Got {client[:60]!r}.{hint}"
    )
