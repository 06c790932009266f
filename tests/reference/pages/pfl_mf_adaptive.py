"""Adaptive pFL-MF: θ_i = μ + √κ Bᵀz_i + √τ u δ_i, with κ and τ chosen from pooled held-out losses."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from plain import HEAD, Batch, Fields, Found, Problem, Weights, features, loss, mean, models, reference, under, within
from torch import Tensor
from torch.nn.functional import cross_entropy

OFTEN = {"score_every": 1, "rank": 2, "lr": 0.3, "safeguard": False}


def _matrix(p: Problem, head: Tensor) -> Tensor:
    """A head as one row per class, the bias last."""
    w = _split(p, head)
    return torch.cat([w[HEAD[0]], w[HEAD[1]][:, None]], 1)


def _split(p: Problem, head: Tensor) -> Weights:
    wide = p.start[HEAD[0]].numel()
    return {HEAD[0]: head[:wide].reshape(p.start[HEAD[0]].shape), HEAD[1]: head[wide:]}


def _seen(phi: Weights, x: Tensor) -> Tensor:
    """Features, a 1 appended."""
    h = features(phi, x)
    return torch.cat([h, torch.ones(len(h), 1, dtype=h.dtype)], 1)


def _largest(h: Tensor) -> Tensor:
    """A bound of λ_max(hᵀh) from above: the 16th root of the Frobenius norm of the 16th power."""
    values = torch.linalg.svdvals(h) ** 2
    return (values**32).sum() ** (1 / 32)


def _fista(cost: Callable[[Tensor], Tensor], size: int, bound: Tensor, steps: int) -> Tensor:
    """FISTA with restart from zero, step 1/L."""
    at = ahead = torch.zeros(size, dtype=bound.dtype)
    speed = 1.0
    for _ in range(steps):
        leaf = ahead.clone().requires_grad_()
        g = torch.autograd.grad(cost(leaf), leaf)[0]
        new = ahead - g / bound
        following = (1 + math.sqrt(1 + 4 * speed**2)) / 2
        if g @ (new - at) > 0:
            speed, ahead = 1.0, new
        else:
            speed, ahead = following, new + (speed - 1) / following * (new - at)
        at = new
    return at


def _clipped_sgd(f: Fields, w: Weights, batches: list[Batch]) -> Weights:
    """SGD whose gradients, of body and head together, are clipped."""
    for b in batches:
        leaf = {k: v.clone().requires_grad_() for k, v in w.items()}
        g = torch.autograd.grad(loss(leaf, b), list(leaf.values()))
        size = torch.cat([a.reshape(-1) for a in g]).norm()
        w = {k: v - f["lr"] * min(1.0, float(f["clip_norm"] / size)) * a for (k, v), a in zip(w.items(), g)}
    return w


def _directions(root: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Deviations s of the heads, and B: what is above the noise floor, with the root of its values."""
    v, found, _ = torch.linalg.svd(root, full_matrices=True)
    s = torch.zeros(r + 1, dtype=root.dtype)
    s[: len(found)] = found
    p = (s[:r] ** 2 - s[r] ** 2).sqrt()
    c = ((p**2).sum() / p.sum()).sqrt() if p.sum() > 0 else torch.zeros(()).double()
    return s, c * p.sqrt()[:, None] * v[:, :r].T


def _nystrom(target: Tensor, q: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """A root of C Q (QᵀC Q)⁺ QᵀC, and the next Q: its directions, filled up from the columns of the last one."""
    small, turn = torch.linalg.eigh(q.T @ target @ q)
    alive = small > 1e-6 * small.max()
    root = target @ q @ turn[:, alive] / small[alive].sqrt()
    basis = list(torch.linalg.svd(root, full_matrices=False)[0].T)
    for column in q.T:
        rest = column - sum(((b @ column) * b for b in basis), torch.zeros_like(column))
        if len(basis) <= r and rest.norm() > 1e-3:
            basis.append(rest / rest.norm())
    return root, torch.stack(basis, 1)


@reference(
    "pfl-mf-adaptive",
    "this library's own form, from its specification",
    OFTEN,
    {**OFTEN, "score_every": 2, "freeze": 2, "rank": 5, "wire": "full"},
    {**OFTEN, "kappa": (1.0,), "tau": (0.0, 10.0), "memory": 0.5, "cross_fit": 1.0, "weighting": "uniform"},
    {**OFTEN, "kappa": (0.0,), "tau": (0.0,), "clip_norm": 0.1},
    {**OFTEN, "gain": 0.9, "kappa": (0.0, 1.0), "tau": (0.0, 10.0)},
)
def pfl_mf_adaptive(p: Problem, f: Fields) -> Found:
    phi, mu = within(p.server, "phi"), torch.cat([p.start[k].reshape(-1) for k in HEAD])
    q, r, d = p.server["Q"], f["rank"], len(mu)
    root = torch.zeros(d, 1, dtype=mu.dtype)
    grid = [(k, t) for k in f["kappa"] for t in f["tau"]]
    logs = [(-2.0 if k == 0 else math.log10(k), -1.0 if t == 0 else math.log10(t)) for k, t in grid]
    pen = torch.tensor([((k - 0.5) ** 2 + (t - 0.5) ** 2) / 2 for k, t in logs]).double()
    last, frozen = [torch.zeros(len(grid)).double() for _ in p.ids], False

    def fitted(pair: tuple[float, float], part: Batch, i: int, steps: int) -> Tensor:
        """MAP(κ, τ, part)."""
        (kappa, tau), (x, y), big_b = pair, part, _directions(root, r)[1]
        h, u2 = _seen(phi, x), 1 / (_seen(phi, p.all(i)[0]) ** 2).sum(1).mean()
        most = torch.linalg.matrix_norm(big_b, 2) ** 2
        bound = 0.5 * _largest(h) * (kappa * most + tau * u2) + 1

        def head(a: Tensor) -> Tensor:
            return mu + kappa**0.5 * big_b.T @ a[:r] + (tau * u2) ** 0.5 * a[r:]

        def cost(a: Tensor) -> Tensor:
            return cross_entropy(h @ _matrix(p, head(a)).T, y, reduction="sum") + (a**2).sum() / 2

        return head(_fista(cost, r + d, bound, steps)).detach()

    for t in p.times:
        at = int((sum(last) / 4 + pen).argmin())
        plain = grid.index((0.0, 0.0)) if (0.0, 0.0) in grid else at
        little = sum(last)[at] > (1 - f["gain"]) * sum(last)[plain]
        k_best = grid[plain if little else at]
        e, bodies, losses = [], [], list(last)
        for i in p.asked[t]:
            if len(grid) > 1 and not frozen and t % f["score_every"] == 0 and len(p.drawn["held"][i]):
                x, y = p.at(p.drawn["held"][i])
                heads = [fitted(pair, p.at(p.drawn["kept"][i]), i, f["score_steps"]) for pair in grid]
                outputs = [_seen(phi, x) @ _matrix(p, head).T for head in heads]
                losses[i] = torch.stack([cross_entropy(out, y, reduction="sum") for out in outputs])
            which = "whole " if frozen else ""
            start = fitted(k_best, p.at(p.drawn[f"{which}half"][t, i]), i, f["fit_steps"])
            rows = p.drawn[f"{which}train"][t, i]
            w = _clipped_sgd(f, {**phi, **_split(p, start)}, [p.at(b) for b in rows])
            e.append(torch.cat([w.pop(k).reshape(-1) for k in HEAD]) - mu)
            bodies.append(w)
        weights = p.n(p.asked[t]) if f["weighting"] == "samples" else [1.0] * len(e)
        share, stack = torch.tensor(weights, dtype=mu.dtype) / sum(weights), torch.stack(e)
        m, beta = share @ stack, f["memory"] if t > 1 else 0.0
        spread = stack.T @ (share[:, None] * stack) - torch.outer(m, m)
        root, q = _nystrom(beta * root @ root.T + (1 - beta) * spread, q, r)
        mu, phi, last = mu + m, mean(bodies, weights), losses
        frozen = frozen or (f["freeze"] is not None and t >= f["freeze"])
    result = {"server/mu": mu, "server/S": sum(last), "server/s": _directions(root, r)[0], **under("server/phi", phi)}
    pi = (-sum(last) / 4 - pen).softmax(0)
    used = [sum(w * fitted(k, p.all(i), i, f["fit_steps"]) for w, k in zip(pi, grid)) for i in p.ids]
    return result | models([{**phi, **_split(p, head)} for head in used])  # type: ignore[arg-type]
