"""A node's personal model used where it is: predictions and a file of it, without the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedspan import tree
from fedspan.config.personal_model import as_described, write_personal
from fedspan.data.formats.arrays import read_npz
from fedspan.data.formats.part import FilePart
from fedspan.data.sources.assemble import assemble
from fedspan.data.sources.catalog import KNOWN
from fedspan.data.sources.load import MAX_BYTES
from fedspan.deploy.experiment import DataKind, Experiment, read_config, read_experiment
from fedspan.deploy.node.service import owners_code
from fedspan.errors import ConfigError, DataError
from fedspan.learn.task import Task
from fedspan.method import Abilities
from fedspan.storage.tree_file import read_tree
from fedspan.tree import Tree

FILE = "personal.safetensors"


def predict_npz(folder: Path, path: Path) -> tuple[NDArray[Any], float | None]:
    """Classes (or values) for the x of a file, and the share that is right where it has y."""
    experiment, config, weights, about = _load(folder)
    arrays = read_npz(path, MAX_BYTES)
    if "x" not in arrays:
        raise DataError(f"{path.name}: it must hold x. Got {', '.join(arrays)[:100] or 'nothing'}.")
    n, kind = len(arrays["x"]), DataKind(**about["kind"])
    y = arrays.get("y", np.zeros(n, np.int64))
    known = KNOWN.get(config.data.source)
    part = FilePart(path.name, arrays["x"], np.zeros(n, np.int64))
    made = assemble(
        config.data.source, part, None, known, size=config.data.size, limit=None, seed=0, classes=kind.classes
    )
    x = made.x.to(next(iter(tree.leaves(weights))).dtype)
    if tuple(x.shape[1:]) != tuple(kind.shape):
        raise DataError(f"{path.name}: x must have shape {tuple(kind.shape)}. Got {tuple(x.shape[1:])}.")
    able, task = Abilities(experiment.method), _task(experiment, about)
    with torch.no_grad():
        output = torch.cat([able.adapts.predict(task, weights, x[k : k + 512]) for k in range(0, n, 512)])
    found: NDArray[Any] = (output.argmax(1) if kind.classes is not None else output).numpy()
    return found, float((found == y).mean()) if "y" in arrays and kind.classes is not None else None


def export_model(folder: Path, file: Path) -> dict[str, Any]:
    """Write a node's personal model in the layout of `fedspan export`; what is said about it."""
    experiment, config, weights, about = _load(folder)
    weights, known = as_described(_task(experiment, about), experiment.task, weights)
    write_personal(
        file,
        config,
        weights,
        known,
        client=str(about["client"]),
        name=folder.resolve().name,
        round=about["round"],
        shape=about["kind"]["shape"],
        classes=about["kind"]["classes"],
    )
    return about


def _task(experiment: Experiment, about: dict[str, Any]) -> Task:
    """The task as the node's client trains it."""
    capacity = experiment.capacity(int(about["client"]), int(about.get("level", 0)))
    return Abilities(experiment.method).model(experiment.task, capacity)


def _load(folder: Path) -> tuple[Experiment, Any, Tree, dict[str, Any]]:
    """The newest personal model of a node's folder, with its experiment."""
    found = sorted((folder / "state").glob(f"*/{FILE}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ConfigError(f"deploy: {folder} has no personal model yet. It gets one when a run is evaluated.")
    weights, words = read_tree(found[-1])
    about: dict[str, Any] = json.loads(words["about"])
    text = about.pop("text")
    about["kind"]["shape"] = tuple(about["kind"]["shape"])
    with owners_code(folder):
        return read_experiment(text, DataKind(**about["kind"])), read_config(text), weights, about
