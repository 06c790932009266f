"""What of a factorised model leaves a client, and in which form it travels."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from fedspan import tree
from fedspan.learn.batches import All, Amount
from fedspan.learn.task import Task
from fedspan.linalg.similarity import leading
from fedspan.method import Adapts, Capacity, Sent
from fedspan.method.fields import NonNegative, Share
from fedspan.methods.factorized_fl.factorization import aligned, tags
from fedspan.tree import Params, Tree

Parts: TypeAlias = Literal["nothing", "u", "uv", "um", "uvm"]

TAGS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "u": ("u", "b"),
    "uv": ("u", "b", "v"),
    "um": ("u", "b", "mu"),
    "uvm": ("u", "b", "v", "mu"),
}
"""What is shared: biases and the affine parts of norms go with u."""


@dataclass(frozen=True, kw_only=True)
class SharedParts:
    """Which parts are shared, in which gauge u and v travel, and how much of an average μ is sent down."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "shared": "parts",
        "gauge": "gauge",
        "down_threshold": "down_threshold",
        "down_share": "down_share",
    }

    parts: Parts = "u"
    """What clients share: u with biases and the affine parts of norms, and v (`v`) and μ (`m`) if named; or nothing."""
    gauge: bool = False
    """Whether u and v are brought to a common scale and sign before they are sent; u v is the same in every one."""
    down_threshold: NonNegative = 0.0
    """The least size of an entry of μ that is sent down; smaller ones become zero on the client."""
    down_share: Share = 1.0
    """The share of the entries of each μ that is sent down, the largest ones; the others become zero on the client."""

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of the parameters that are shared."""
        return TAGS[self.parts]

    def apart(self, task: Task, params: Params, private: Collection[str]) -> tuple[Tree, Params]:
        """What is shared, by tag, and what stays at home."""
        parts: Tree = {tag: {} for tag in self.tags}
        own: Params = {}
        tag_of = tags(task)
        for k, p in params.items():
            tag = tag_of.get(k)
            (parts[tag] if tag in parts and k not in private else own)[k] = p
        return {tag: some for tag, some in parts.items() if some}, own

    def aligned(self, task: Task, params: Params) -> Params:
        """The parameters in the gauge of the uploads."""
        return aligned(task, params) if self.gauge else params

    def thinned(self, parts: Tree, stacked: bool) -> Tree:
        """The download with small entries of μ left out, if that is wanted: an average of sparse μ is not sparse."""
        if "mu" not in parts or (self.down_threshold == 0 and self.down_share == 1):
            return parts

        def thin(mu: Tensor) -> Tensor:
            flat = mu.flatten(1) if stacked else mu.reshape(1, -1)
            kept = flat.abs() >= self.down_threshold
            if self.down_share < 1:
                kept &= leading(flat.abs(), math.ceil(self.down_share * flat.shape[1]))
            return torch.where(kept, flat, torch.zeros_like(flat)).reshape(mu.shape)

        return {**parts, "mu": tree.map(thin, parts["mu"])}


class AdaptedParts(Adapts):
    """What a model of shared and private parts needs when it is used."""

    def personal_plan(self, task: Task) -> Mapping[str, Amount]:
        """One pass over the training data where running statistics, which stay on the client, are re-estimated."""
        return {"all": All()} if task.stats else {}

    def trained(self, down: Tree, sent: Sent, capacity: Capacity) -> Tree:
        """The client's own upload, as far as it is of the download's form."""
        own = {**sent.mean, **sent.each}
        return {k: own.get(k, v) for k, v in down.items()}
