"""A node's personal model used where it is: predictions and a file of it, without the server."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
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
from fedspan.data.tables.arrow_files import read_table
from fedspan.data.tables.table_columns import columns_of
from fedspan.deploy.experiment import DataKind, Experiment, read_config, read_experiment
from fedspan.deploy.node.own_table import WHO, OwnTable, kept_agreement
from fedspan.deploy.node.service import owners_code, read_settings
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


@dataclass(frozen=True)
class Predicted:
    """What a personal model says of rows of a table."""

    columns: list[str]
    rows: list[list[str]]
    right: float | None

    def csv(self) -> str:
        """As the text of a CSV file."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([self.columns, *self.rows])
        return out.getvalue()


def predict_table(folder: Path, path: Path) -> Predicted:
    """The class of every row of a CSV or parquet file with the probability of each, or its values.

    Rows need no target; where they have one, `right` is the share that is predicted as it says.

    Raises:
        DataError: naming column and row, if the table is not like the one the model was trained on.
    """
    experiment, config, weights, about = _load(folder)
    if not config.data.is_table:
        raise ConfigError(
            f"deploy: the node's model was trained on arrays, so its data must be .npz. Got {path.name!r}."
        )
    kept = kept_agreement(folder / "state", experiment.text)
    where = read_settings(folder)
    with owners_code(folder):
        own = OwnTable(Path(where["data"]), config, kept.client).federation(kept.preprocessing).preprocessing
    assert own is not None
    columns = columns_of(read_table(path, MAX_BYTES), path.name)
    x = torch.from_numpy(own.apply(columns, lambda row: f"{path.name}, row {row}", WHO))
    able, task = Abilities(experiment.method), _task(experiment, about)
    x = x.float().to(next(iter(tree.leaves(weights))).dtype)
    with torch.no_grad():
        output = torch.cat([able.adapts.predict(task, weights, x[k : k + 512]) for k in range(0, len(x), 512)])
    target, names = own.encoding.target, own.encoding.class_names
    if names is None:
        return Predicted(target, [[repr(v) for v in row] for row in output.reshape(len(x), -1).tolist()], None)
    found = [names[k] for k in output.argmax(1).tolist()]
    shares = torch.softmax(output.double(), 1).tolist()
    known = columns[target[0]].words() if target[0] in columns else None
    right = None if known is None else sum(a == b for a, b in zip(found, known)) / len(found)
    rows = [[label, *(f"{p:.6f}" for p in of)] for label, of in zip(found, shares)]
    return Predicted([target[0], *(f"P({n})" for n in names)], rows, right)


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
