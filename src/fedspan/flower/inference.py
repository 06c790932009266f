"""A node's personal model used where it is: predictions and a file of it, without the server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedspan import tree
from fedspan.data.catalog import KNOWN
from fedspan.data.files import read_npz
from fedspan.data.parts import Part
from fedspan.data.pool import assemble
from fedspan.data.sources import MAX_BYTES
from fedspan.errors import ConfigError, DataError
from fedspan.flower.experiment import Experiment, Kind, read_config, read_experiment
from fedspan.layers import plain_weights, structured
from fedspan.tree import Tree
from fedspan.treefile import read_tree

FILE = "personal.safetensors"


def predict_npz(folder: Path, path: Path) -> tuple[NDArray[Any], float | None]:
    """Classes (or values) for the x of a file, and the share that is right where it has y."""
    experiment, config, weights, about = _load(folder)
    arrays = read_npz(path, MAX_BYTES)
    if "x" not in arrays:
        raise DataError(f"{path.name}: it must hold x. Got {', '.join(arrays)[:100] or 'nothing'}.")
    n, kind = len(arrays["x"]), Kind(**about["kind"])
    y = arrays.get("y", np.zeros(n, np.int64))
    known = KNOWN.get(config.data.source)
    part = Part(path.name, arrays["x"], np.zeros(n, np.int64))
    made = assemble(
        config.data.source, part, None, known, size=config.data.size, limit=None, seed=0, classes=kind.classes
    )
    x = made.x.to(next(iter(tree.leaves(weights))).dtype)
    if tuple(x.shape[1:]) != tuple(kind.shape):
        raise DataError(f"{path.name}: x must have shape {tuple(kind.shape)}. Got {tuple(x.shape[1:])}.")
    method, task = experiment.method, experiment.method.model(experiment.task, _capacity(experiment, about))
    with torch.no_grad():
        output = torch.cat([method.predict(task, weights, x[k : k + 512]) for k in range(0, n, 512)])
    found: NDArray[Any] = (output.argmax(1) if kind.classes is not None else output).numpy()
    return found, float((found == y).mean()) if "y" in arrays and kind.classes is not None else None


def export_model(folder: Path, file: Path) -> dict[str, Any]:
    """Write a node's personal model in the layout of `fedspan export`; what is said about it."""
    from safetensors.torch import save_file

    experiment, config, weights, about = _load(folder)
    task = experiment.method.model(experiment.task, _capacity(experiment, about))
    known = task.init().keys()
    if task.whole(weights) and structured(task.module):  # as the plain network that [model] describes
        weights, known = plain_weights(task.module, weights), experiment.task.init().keys()
    flat = {k: t.detach().contiguous().clone() for k, t in tree.flatten(weights).items()}
    words = {
        "format": "fedspan personal model",
        "method": config.method["name"],
        "experiment": config.name,
        "client": str(about["client"]),
        "client_name": folder.resolve().name,
        "round": str(about["round"]),
        "seed": str(config.seed),
        "model": json.dumps(config.to_dict()["model"]),
        "input_shape": json.dumps(about["kind"]["shape"]),
        "classes": json.dumps(about["kind"]["classes"]),
        "names": json.dumps(list(flat)),
        "plain": json.dumps(sorted(flat) == sorted(known)),
    }
    temporary = file.with_name(file.name + ".tmp")
    save_file(flat, temporary, metadata=words)
    os.replace(temporary, file)
    return about


def _capacity(experiment: Experiment, about: dict[str, Any]) -> Any:
    return experiment.method.capacity_of(int(about["client"]))


def _load(folder: Path) -> tuple[Experiment, Any, Tree, dict[str, Any]]:
    """The newest personal model of a node's folder, with its experiment."""
    found = sorted((folder / "state").glob(f"*/{FILE}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ConfigError(f"deploy: {folder} has no personal model yet. It gets one when a run is evaluated.")
    weights, words = read_tree(found[-1])
    about: dict[str, Any] = json.loads(words["about"])
    text = about.pop("text")
    about["kind"]["shape"] = tuple(about["kind"]["shape"])
    return read_experiment(text, Kind(**about["kind"])), read_config(text), weights, about
