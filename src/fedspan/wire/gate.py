"""The gate in front of every upload: what is not as its method declares it is refused."""

from __future__ import annotations

import math

import torch

from fedspan import tree
from fedspan.errors import Refused
from fedspan.tree import Tree
from fedspan.wire.payload import Schema, schema


def check_upload(
    payload: Tree,
    weight: float,
    *,
    who: str,
    declared: Schema,
    kind: str,
    examples: int,
    bound: float = 1e12,
    max_norm: float = math.inf,
) -> None:
    """Refuse an upload that is not what its method declares.

    Args:
        kind: `samples` (an integer in 1..examples), `one` (exactly 1) or `own` (finite, 0..bound).
        max_norm: largest Euclidean norm of the whole payload.

    Raises:
        Refused: in one sentence that names the client and the fault.
    """
    got = schema(payload)
    for path in declared.keys() - got.keys():
        raise Refused(f"{who}: '{path}' is missing from the upload.")
    for path in got.keys() - declared.keys():
        raise Refused(f"{who}: '{path[:80]}' is not part of this method's upload.")
    for path, expected in declared.items():
        if got[path] != expected:
            raise Refused(f"{who}: '{path}' must be {_say(expected)}. Got {_say(got[path])}.")
    if not math.isfinite(weight):
        raise Refused(f"{who}: the weight must be a finite number. Got {weight}.")
    if kind == "samples" and not (weight == int(weight) and 1 <= weight <= examples):
        raise Refused(f"{who}: the weight must be an integer in 1..{examples}, its number of examples. Got {weight:g}.")
    if kind == "one" and weight != 1:
        raise Refused(f"{who}: the weight must be 1. Got {weight:g}.")
    if kind == "own" and not 0 <= weight <= bound:
        raise Refused(f"{who}: the weight must lie in 0..{bound:g}. Got {weight:g}.")
    for path, t in tree.flatten(payload).items():
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise Refused(f"{who}: '{path}' holds NaN or infinity.")
    norm = math.sqrt(float(tree.squared_norm(payload))) if payload else 0.0
    if norm > max_norm:
        raise Refused(f"{who}: the upload's norm must be at most {max_norm:g}. Got {norm:g}.")


def check_weights(weights: Tree, *, who: str, bound: float) -> None:
    """Refuse weights of parts (`Sent.weights`) that are not numbers a server may divide by.

    Raises:
        Refused: in one sentence that names the client and the fault.
    """
    for name, w in weights.items():
        if not bool(((w >= 0) & (w <= bound)).all()):  # not so for NaN either
            raise Refused(f"{who}: the weights of '{name}' must lie in 0..{bound:g}. Got {w.tolist()!s:.60}.")


def _say(entry: tuple[torch.dtype, tuple[int, ...]]) -> str:
    return f"{str(entry[0]).removeprefix('torch.')} of shape {list(entry[1])}"
