"""The form of a weight, u v + μ: which layers have it, how large its factors are, and how they start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspan.errors import ConfigError
from fedspan.layers import Factorized, Layout, MuStart, Plain, Which, choose, convert, matrix_dims, part, structured
from fedspan.learn.task import Task
from fedspan.method.fields import AtLeast1
from fedspan.tree import Params


@dataclass(frozen=True, kw_only=True)
class Factorization:
    """Which layers are u v + μ, and in which shape."""

    KEYS: ClassVar[Mapping[str, str]] = {k: k for k in ("gamma", "mu", "mu_start", "layers", "layout", "min_u_dim")}

    gamma: AtLeast1 = 1
    """γ, the rank of u v; 1 in the paper, and no more than a layer's matrix can have."""
    mu: bool = True
    """Whether the correction μ is a part of the model."""
    mu_start: MuStart = "dense"
    """How μ starts: zeros as the paper says, `xavier` in dense layers as the public code, `dense` at W − u v, with
    which the model starts as the plain network."""
    layers: Which = "all"
    """The layers that are factorised: all, those below the head, or those whose names begin with one of these."""
    layout: Layout = "space_by_channel"
    """How a convolution's kernel is read as a matrix: positions by channels in the paper; `official_view` is what the
    public code does, which scrambles the axes."""
    min_u_dim: AtLeast1 = 1
    """The shortest u of a layer that is factorised; 2 leaves out convolutions of 1×1, whose u is one number."""

    def convert(self, task: Task, who: str) -> Task:
        """The task with factorised layers.

        Raises:
            ConfigError: if no layer is left to factorise.
        """
        found = choose(task, self.layers, who).items()
        names = [k for k, layer in found if matrix_dims(layer, self.layout)[0] >= self.min_u_dim]
        if not names:
            raise ConfigError(
                f"{who}: min_u_dim leaves no layer to factorise. Got {self.min_u_dim}; use a smaller one."
            )

        def factorise(layer: Plain) -> Factorized:
            return Factorized(layer, self.gamma, self.layout, self.mu, self.mu_start)  # eq. (2), eq. (3)

        return task.converted(lambda module: convert(module, names, factorise))


def tags(task: Task) -> dict[str, str]:
    """For every parameter what it is: u, v, mu or b. Biases and norms' affine parts are b, plain weights go with v."""
    own = {part(k, p): p for k in structured(task.module) for p in ("u", "v", "mu")}
    axes = {k: p.ndim for k, p in task.module.named_parameters()}
    return {k: own.get(k, "b" if axes[k] < 2 else "v") for k in task.names}


def corrections(task: Task) -> list[str]:
    """Names of all μ; none in a plain model, or in one without them."""
    return [k for k, tag in tags(task).items() if tag == "mu"]


def aligned(task: Task, params: Params) -> Params:
    """(u, v) in a common gauge: Σu ≥ 0 and ‖u‖² = its length; W does not change."""
    new = dict(params)
    for k in structured(task.module):
        u, v = part(k, "u"), part(k, "v")
        size = torch.linalg.vector_norm(params[u], dim=0) / math.sqrt(len(params[u]))
        size = torch.where(size > 0, size, torch.ones_like(size))
        s = torch.where(params[u].sum(0) < 0, -size, size)  # [γ]
        new[u], new[v] = params[u] / s, params[v] * s[:, None]
    return new
