"""The gate in front of every upload: a client that does not keep to its method's declaration is refused, not the round.

What a method's uploads look like is learnt by running `client_update` on stand-in data, so that nothing has to be
declared twice and nothing a node says is believed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fedspan import tree, wire
from fedspan.errors import Refused
from fedspan.learn.aggregate import times_own
from fedspan.method import Abilities, Capacity, Sent
from fedspan.simulation.engine import Engine
from fedspan.tree import Tree
from fedspan.wire import Codec, Schema

PARTS = ("mean", "each", "weights")
"""What an upload holds, as `Sent` has it."""

FEW = 3
"""From so many uploads on, their median says what an ordinary norm is."""


@dataclass(frozen=True)
class Declared:
    """What an upload must be: its structure, types and shapes, without numbers."""

    mean: Tree
    each: Tree
    weights: Tree = field(default_factory=dict)

    @property
    def schema(self) -> Schema:
        """Names, types and shapes."""
        return wire.schema({k: getattr(self, k) for k in PARTS})

    @property
    def most_bytes(self) -> int:
        """More than the longest writing of it: codecs add at most an eighth, and every tensor has a header."""
        everything = self.mean, self.each, self.weights
        return 2 * tree.nbytes(everything) + 2048 * (len(tree.leaves(everything)) + 2)


def declare(engine: Engine, capacity: Capacity, t: int, client: int, down: Tree, common: Tree) -> Declared:
    """What uploads of one capacity look like in round t, from one visit on stand-in data."""
    row = tree.stack([engine.begin(capacity, client)])
    sent = tree.take(engine.update(capacity, t, [client], row, down, {}, common, raw=True).sent, 0)
    like: Sent = tree.map(lambda a: torch.empty(a.shape, dtype=a.dtype, device="meta"), sent)
    return Declared(like.mean, like.each, like.weights)


def admit(
    weight: float,
    payload: bytes,
    *,
    who: str,
    able: Abilities,
    declared: Declared,
    codecs: Mapping[str, Codec],
    examples: int,
    dtype: torch.dtype,
) -> Sent:
    """An upload, if it is what the method declares.

    Nothing is made of the bytes before their number is known to be small enough.

    Raises:
        Refused: in one sentence that names the client and the fault.
    """
    if len(payload) > declared.most_bytes:
        raise Refused(f"{who}: the upload must have at most {declared.most_bytes:,} bytes. Got {len(payload):,}.")
    try:
        brought = wire.unpack(payload)
        if not brought.keys() <= set(PARTS):
            raise Refused("Wire: an upload holds 'mean', 'each' and 'weights' and nothing else.")
        parts = {k: brought.get(k, {}) for k in PARTS}
        if not all(isinstance(p, dict) for p in parts.values()):
            raise Refused("Wire: 'mean', 'each' and 'weights' must hold tensors by name.")
        decoded = {k: wire.decode(p, {} if k == "weights" else codecs, getattr(declared, k)) for k, p in parts.items()}
        wire.check_upload(
            decoded,
            weight,
            who=who,
            declared=declared.schema,
            kind=able.weight,
            examples=examples,
            bound=able.weight_bound,
        )
        wire.check_weights(decoded["weights"], who=who, bound=able.weight_bound)
    except Refused as e:
        raise Refused(str(e) if str(e).startswith(who) else f"{who}: {e}") from None
    except Exception as e:  # whatever is wrong with it is its sender's fault
        raise Refused(f"{who}: the upload cannot be read ({type(e).__name__}).") from None
    # Structure comes from the declaration: empty parts are not sent, and an order of names must not matter.
    ordered = (_ordered(getattr(declared, k), decoded[k]) for k in PARTS)
    return Sent(torch.tensor(weight, dtype=dtype), *ordered)


def _ordered(like: Tree, given: Tree) -> Tree:
    flat = tree.flatten(given)
    return tree.unflatten({path: flat[path] for path in tree.flatten(like)}, tree.empty_paths(like))


def norm_of(sent: Sent) -> float:
    """The Euclidean norm of an upload's change; parts with weights of their own count as often as they are added."""
    return math.sqrt(float(tree.squared_norm((times_own(sent.mean, sent.weights), sent.each, sent.weights))))


def too_large(norms: Mapping[int, float], history: Sequence[float], factor: float) -> dict[int, float]:
    """Clients whose norm exceeds `factor` times the median of all, with the bound; none while all are few."""
    known = [*history, *norms.values()]
    if len(known) < FEW:
        return {}
    bound = factor * statistics.median(known)
    return {i: bound for i, norm in norms.items() if norm > bound > 0}
