"""Attacks of a curious server on what it received from clients.

The server follows the method and is honest otherwise. It knows the method, the seed and what it sent, and has examples
of the same kind as the clients', but none of theirs: on those it plays federations of its own and learns from them how
uploads go with what it wants to know. What these attacks do not find, better ones may.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspan import tree
from fedspan.data.federated import Index
from fedspan.linalg.similarity import cosine
from fedspan.tree import Outer, Tree

Uploads = Mapping[str, Tensor]
"""What was received, by path: one row of numbers per client."""

RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0)
SAME = 0.99999
"""A cosine from which what was recovered is the thing itself; the rest is rounding."""


def read_labels(seen: Uploads, played: Uploads, held: NDArray[np.bool_]) -> Tensor:
    """Scores for the classes each client holds, above 0 where it is taken to; played clients hold `held`.

    Ridge regression on every part of the upload, and on all of them together; for each class the one that is right most
    often on played clients that it was not fitted to.
    """
    wanted = torch.from_numpy(held).double() * 2 - 1
    best = torch.full((held.shape[1],), -1.0, dtype=torch.float64)
    scores = torch.zeros(len(next(iter(seen.values()))), held.shape[1], dtype=torch.float64)
    for x, z in _views(seen, played):
        for right, outputs in _ridges(x, z, wanted):
            scores = torch.where(right > best, outputs, scores)
            best = torch.maximum(right, best)
    return scores


def _views(seen: Uploads, played: Uploads) -> list[tuple[Tensor, Tensor]]:
    """Pairs of matrices, ours and theirs: every part centred and of one scale, and all of them side by side."""
    parts = []
    for path, own in played.items():
        x, z = own.double(), seen[path].double()
        middle = x.mean(0)
        scale = torch.linalg.matrix_norm(x - middle)
        if scale > 0:
            parts.append(((x - middle) / scale, (z - middle) / scale))
    whole = [(torch.cat([x for x, _ in parts], 1), torch.cat([z for _, z in parts], 1))] if len(parts) > 1 else []
    return parts + whole


def _ridges(x: Tensor, z: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For several penalties: how often signs are right without the row in question, and the outputs for `z`."""
    middle = y.mean(0)
    values, vectors = torch.linalg.eigh(x @ x.T)
    values = values.clamp_min(0)
    across, turned = z @ x.T @ vectors, vectors.T @ (y - middle)
    found = []
    for ridge in RIDGES:
        shrunk = 1 / (values + ridge * values.mean() + 1e-300)
        fitted = vectors @ ((values * shrunk)[:, None] * turned)
        leverage = (vectors.square() @ (values * shrunk))[:, None].clamp_max(1 - 1e-9)
        left_out = (fitted - leverage * (y - middle)) / (1 - leverage) + middle
        score = ((left_out > 0) == (y > 0)).double().mean(0)
        found.append((score, across @ (shrunk[:, None] * turned) + middle))
    return found


def read_partners(seen: Uploads, scores: Tensor) -> list[Index]:
    """For each client the one most like it: by uploads less their mean, and by the classes that were read from them."""
    likeness = [cosine(_views(seen, seen)[-1][1]), cosine(scores)]
    return [sigma.fill_diagonal_(-2).argmax(1).numpy() for sigma in likeness]


def read_sizes(weight: Tensor, weights: Tree) -> list[Tensor]:
    """What might be a client's number of examples: its weight, and the sums of weights that parts have of their own."""
    return [weight, *(w.reshape(len(w), -1).sum(1) for w in tree.leaves(weights))]


def rebuild_private(sent: Tree, start: Tree) -> Tree:
    """A client's private state as far as its upload shows it, and otherwise as it was at the start.

    A part of the same path; else, for a vector, a factor of an uploaded matrix of rank one; else a part that is called
    alike below another name, as a client's own model is often near to the one it trains for all; else a single tensor
    of the same shape, whatever it is called.
    """
    uploads, factors = dict(tree.items(sent)), _factors(sent)
    found = {path: _found(path, t, uploads, factors) for path, t in tree.flatten(start).items()}
    return tree.unflatten(found, tree.empty_paths(start))


def _found(path: str, start: Tensor, uploads: Mapping[str, Tensor], factors: list[Tensor]) -> Tensor:
    inner = path.partition("/")[2]
    alike = [t for other, t in uploads.items() if inner and other.partition("/")[2] == inner]
    vectors = factors if start.ndim == 1 else []
    single = [t for other, t in uploads.items() if "/" not in other]
    candidates = [*([uploads[path]] if path in uploads else []), *vectors, *alike, *single]
    return next((t for t in candidates if t.shape == start.shape), start)


def _factors(part: Tree) -> list[Tensor]:
    """Right factors of what is of rank one: sent as two vectors, or found by singular values."""
    found: list[Tensor] = []
    for inner in part.values():
        if isinstance(inner, dict):
            found += _factors(inner)
        elif isinstance(inner, Outer):
            found.append(inner.b)
        elif inner.ndim == 2 and min(inner.shape) > 1:
            _, s, v = torch.linalg.svd(inner.double(), full_matrices=False)
            if s[1] < 1e-4 * s[0]:
                found.append(v[0].to(inner.dtype))
    return found
