"""MNIST as a script of one's own would load it: parquet files, pictures decoded, a Dirichlet split over clients."""

from __future__ import annotations

import io
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CLIENTS, ALPHA, LEAST = 100, 0.5, 10
ROUNDS, EVERY, BATCH = 100, 10, 256
CACHE = Path(tempfile.gettempdir()) / "fedspan-bench-mnist.npz"
"""Decoded pictures, for runs that are not the first."""


@dataclass(frozen=True)
class Pictures:
    """All pictures, their labels, and the rows of each client."""

    x: Tensor
    y: Tensor
    train: list[Tensor]
    test: list[Tensor]


def load(first: bool) -> Pictures:
    """Pictures from $FEDSPAN_DATA/mnist over 100 clients; decoded if `first` is set or nobody has done so before."""
    if first or not CACHE.is_file():
        images, labels = _decoded(Path(os.environ["FEDSPAN_DATA"]) / "mnist")
        beside = CACHE.with_name(f"{os.getpid()}-{CACHE.name}")
        np.savez(beside, images=images, labels=labels)
        beside.replace(CACHE)
    else:
        with np.load(CACHE, allow_pickle=False) as kept:
            images, labels = kept["images"], kept["labels"]
    x = torch.from_numpy(images).float().div_(255).sub_(0.1307).div_(0.3081).unsqueeze(1)
    train, test = _split(labels)
    return Pictures(x, torch.from_numpy(labels), train, test)


def _decoded(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow.parquet as pq
    from PIL import Image

    images, labels = [], []
    for part in ("train", "test"):
        table = pq.read_table(folder / f"{part}.parquet")
        images += [np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in table["image"].to_pylist()]
        labels += table["label"].to_pylist()
    return np.stack(images), np.array(labels, np.int64)


def _split(labels: np.ndarray) -> tuple[list[Tensor], list[Tensor]]:
    """Each label's rows by proportions from Dir(0.5), again until nobody has fewer than ten; a quarter is held out."""
    rng = np.random.default_rng(0)
    while True:
        rows: list[list[int]] = [[] for _ in range(CLIENTS)]
        for label in np.unique(labels):
            mine = rng.permutation(np.flatnonzero(labels == label))
            cuts = (np.cumsum(rng.dirichlet(np.full(CLIENTS, ALPHA)))[:-1] * len(mine)).astype(int)
            for own, part in zip(rows, np.split(mine, cuts)):
                own += part.tolist()
        if min(map(len, rows)) >= LEAST:
            break
    mixed = [torch.from_numpy(rng.permutation(r)) for r in rows]
    return [r[len(r) // 4 :] for r in mixed], [r[: len(r) // 4] for r in mixed]


def perceptron() -> torch.nn.Module:
    """784-200-200-10."""
    from bench.models import build
    from bench.workloads import WORKLOADS

    return build(WORKLOADS["mlp-100-b256"])
