"""Who is like whom: cosines of uploads, neighbours, and the weights of a personal average."""

from __future__ import annotations

import torch
from torch import Tensor


def cosine(z: Tensor) -> Tensor:
    """σ[k, i] = cos(z_k, z_i) for rows z; 1 with oneself, and 0 with others where a vector is zero.

    >>> cosine(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 0.0]]))
    tensor([[1., 1., 0.],
            [1., 1., 0.],
            [0., 0., 1.]])
    """
    norm = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    unit = torch.where(norm > 0, z / norm.clamp_min(torch.finfo(z.dtype).tiny), torch.zeros_like(z))
    return (unit @ unit.T).clamp(-1.0, 1.0).fill_diagonal_(1.0)


def neighbours(sigma: Tensor, allowed: Tensor, tau: float, at_least: int) -> Tensor:
    """Who is averaged with whom, [n, n]: all allowed with σ ≥ τ and oneself; the most alike if those are too few."""
    n = len(sigma)
    own = torch.eye(n, dtype=torch.bool, device=sigma.device)
    member = ((sigma >= tau) & allowed[None, :]) | own
    # The most similar first, oneself before all, strangers last; equal scores in order of the clients' numbers.
    score = sigma.masked_fill(~allowed[None, :], -torch.inf).masked_fill(own, torch.inf)
    top = leading(score, at_least) & (allowed[None, :] | own)
    return torch.where((member.sum(1) < at_least)[:, None], top, member)


def leading(score: Tensor, count: int) -> Tensor:
    """A mask of the `count` largest entries of each row; of equal ones the first."""
    if not 0 < count < score.shape[1]:
        return torch.full_like(score, count > 0, dtype=torch.bool)
    least = score.topk(count, dim=1).values[:, -1:]
    above, level = score > least, score == least
    return above | (level & (level.cumsum(1) <= count - above.sum(1, keepdim=True)))


def softmax_weights(sigma: Tensor, member: Tensor, epsilon: float) -> Tensor:
    """ω[k, i] ∝ exp(ε σ[k, i]) over the members of row k, 0 elsewhere; rows add up to 1."""
    return (epsilon * sigma).masked_fill(~member, -torch.inf).softmax(1)
