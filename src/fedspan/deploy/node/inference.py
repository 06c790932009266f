"""A node's personal model used where it is: predictions and a file of it, without the server."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedspan import tree
from fedspan.config.personal_model import as_described, write_personal
from fedspan.data.formats.arrays import read_npz
from fedspan.data.formats.part import FilePart, as_images
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
from fedspan.storage.atomic import replacing
from fedspan.storage.tree_file import read_tree
from fedspan.tree import Tree

FILE = "personal.safetensors"


@dataclass(frozen=True)
class Predictions:
    """What a personal model says of examples.

    Attributes:
        labels: the class of each, or its value where there are no classes.
        probabilities: of every class for each, [N, classes]; none where there are no classes.
        right: the share of labels that are those of the file, where it has some.
        classes: what the classes are called, where they have names.
    """

    labels: NDArray[Any]
    probabilities: NDArray[Any] | None
    right: float | None
    classes: tuple[str, ...] = ()


def predict_file(folder: Path, path: Path) -> Predictions:
    """Predict the examples of a file with the newest personal model of a node; labels in it are only compared.

    Raises:
        ConfigError: if the node has no model yet.
        DataError: if the file cannot be read, or its examples are of another kind than the model's.
    """
    experiment, config, weights, about = _load(folder)
    kind, (inputs, y) = DataKind(**about["kind"]), read_inputs(path)
    n, zeros = len(inputs), np.zeros(len(inputs), np.int64)
    part = FilePart(path.name, inputs, zeros)
    known = KNOWN.get(config.data.source)
    made = assemble(
        config.data.source, part, None, known, size=config.data.size, limit=None, seed=0, classes=kind.classes
    )
    x = made.x.to(next(iter(tree.leaves(weights))).dtype) if made.x.is_floating_point() else made.x
    if tuple(x.shape[1:]) != tuple(kind.shape):
        raise DataError(f"{path.name}: x must have shape {tuple(kind.shape)}. Got {tuple(x.shape[1:])}.")
    able, task = Abilities(experiment.method), _task(experiment, about)
    with torch.no_grad():
        output = torch.cat([able.adapts.predict(task, weights, x[k : k + 512]) for k in range(0, n, 512)])
    if kind.classes is None:
        return Predictions(output.numpy(), None, None)
    labels: NDArray[Any] = output.argmax(1).numpy()
    chances = torch.softmax(output.double(), 1).numpy()
    return Predictions(labels, chances, None if y is None else float((labels == y).mean()))


def read_inputs(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """The examples of a file, and their labels if it has them.

    Raises:
        DataError: if there is no reader for such files, or it refuses this one.
    """
    reader = READERS.get(path.suffix)
    if reader is None:
        raise DataError(f"{path.name}: examples must be in a file that ends in {', '.join(READERS)}.")
    x, y = reader(path)
    if not len(x):
        raise DataError(f"{path.name}: x must hold at least one example. Got none.")
    if y is not None and y.shape != (len(x),):
        raise DataError(f"{path.name}: y must hold one label per example, shape ({len(x)},). Got {y.shape}.")
    return x, y


def _read_npz(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    arrays = read_npz(path, MAX_BYTES, labels=False)
    return np.atleast_1d(as_images(arrays["x"])), arrays.get("y")


READERS: dict[str, Callable[[Path], tuple[NDArray[Any], NDArray[Any] | None]]] = {".npz": _read_npz}
"""By the end of a file's name: what reads its examples, and labels if there are any."""


def write_predictions(path: Path, found: Predictions) -> None:
    """Write predictions: as .npz with `labels` and `probabilities`, as .csv with a column for each class, or as .npy
    with the labels alone.

    Raises:
        ConfigError: for any other end of the name.
    """
    check_out(path)
    with replacing(path) as place:
        if path.suffix == ".csv":
            with place.open("w", encoding="utf-8", newline="") as stream:
                _write_csv(csv.writer(stream), found)
            return
        with place.open("wb") as raw:
            if path.suffix == ".npy":
                np.save(raw, found.labels)
            elif found.probabilities is None:
                np.savez(raw, values=found.labels)
            else:
                np.savez(raw, labels=found.labels, probabilities=found.probabilities)


def check_out(path: Path) -> None:
    """Refuse a name that says no format, before anything is computed."""
    if path.suffix not in (".npz", ".csv", ".npy"):
        raise ConfigError(f"deploy predict: --out must end in .npz, .csv or .npy. Got {path.name!r}.")


def _write_csv(writer: Any, found: Predictions) -> None:
    if found.probabilities is None:
        values = found.labels.reshape(len(found.labels), -1)
        writer.writerow(["example", *(f"value_{k}" for k in range(values.shape[1]))])
        writer.writerows([i, *row] for i, row in enumerate(values.tolist()))
        return
    writer.writerow(["example", "label", *(f"p_{k}" for k in found.classes or range(found.probabilities.shape[1]))])
    rows = zip(found.labels.tolist(), found.probabilities.tolist(), strict=True)
    writer.writerows([i, label, *(f"{p:.6g}" for p in chances)] for i, (label, chances) in enumerate(rows))


def predict_table(folder: Path, path: Path) -> Predictions:
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
        return Predictions(output.numpy(), None, None)
    labels = np.array([names[k] for k in output.argmax(1).tolist()])
    chances = torch.softmax(output.double(), 1).numpy()
    known = columns[target[0]].words() if target[0] in columns else None
    right = None if known is None else float(np.mean([a == b for a, b in zip(labels.tolist(), known)]))
    return Predictions(labels, chances, right, tuple(names))


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
