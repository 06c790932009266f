"""pFL-MF: Algorithm 1 of Dadras, Stich and Yurtsever, its Setup 4 and 6, the published code's form, the default."""

from __future__ import annotations

import math

import torch
from plain import (
    HEAD,
    NAMES,
    Batch,
    Fields,
    Found,
    Problem,
    Weights,
    features,
    fit,
    loss,
    mean,
    models,
    reference,
    slope,
    under,
    weigh,
    within,
)
from torch import Tensor
from torch.nn.functional import cross_entropy


def _unravel(p: Problem, theta: Tensor, names: tuple[str, ...]) -> Weights:
    """A vector as parameters, in the order of their names."""
    sizes = [math.prod(p.start[k].shape) for k in names]
    return {k: part.reshape(p.start[k].shape) for k, part in zip(names, theta.split(sizes))}


AS_PRINTED = {"u_update": "gradient", "start": "random", "v_scale": "1/n", "lr": 0.1, "safeguard": False}

UNGUARDED = {"lr": 0.1, "safeguard": False, "v_safeguard": False}


@reference(
    "pfl-mf-paper",
    "Algorithm 1, eq. (7) to (9), Theorem 1's step; Setups 4 (epochs on v) and 6 (K_U steps on U)",
    {**AS_PRINTED, "rank": 3},
    {**AS_PRINTED, "rank": 3, "v_steps": 4, "v_scale": "1", "start": "common"},
    {**AS_PRINTED, "rank": 2, "v_steps": 2, "p": 0.6},
    {**AS_PRINTED, "rank": 3, "v_steps": 2, "v_unit": "epoch", "v_scale": "1", "lr_v": 0.05, "g_at": "new"},
    {**AS_PRINTED, "rank": 3, "v_steps": 2, "u_update": "train", "u_steps": 5, "server_step": "literal"},
)
def pfl_mf_paper(p: Problem, f: Fields) -> Found:
    big_u, v, n = p.server["U"], [c["v"] for c in p.clients], len(p.train)

    def at(theta: Tensor, b: Batch) -> Tensor:
        return loss(_unravel(p, theta, NAMES), b)

    rate = f["lr"] if f["lr_v"] is None else f["lr_v"]
    if f["p"] is not None:  # Theorem 1: η_v = p η / K, and ψ carries 1/n
        rate = f["p"] * f["lr"] / f["v_steps"]
    rate = rate / n if f["v_scale"] == "1/n" else rate
    for t in p.times:
        uploads = []
        for i in p.asked[t]:
            old = v[i]
            steps = p.batches(t, i, f["v_steps"] if f["v_unit"] == "epoch" else 10)
            for b in steps[: None if f["v_unit"] == "epoch" else f["v_steps"]]:
                v[i] = v[i] - rate * big_u.T @ slope(lambda theta: at(theta, b), big_u @ v[i])
            coefficients = old if f["g_at"] == "old" else v[i]
            if f["u_update"] == "gradient":  # η G_i = η ∇f_i(U v_i) v_iᵀ over all examples
                g = slope(lambda theta: at(theta, p.all(i)), big_u @ coefficients)
                uploads.append(f["lr"] * torch.outer(g, coefficients))
            else:  # K_U steps on a copy of U with v fixed
                copy = big_u
                for b in p.batches(t, i, 10)[: f["u_steps"]]:
                    copy = copy - f["lr"] * torch.outer(slope(lambda q: at(q, b), copy @ coefficients), coefficients)
                uploads.append(big_u - copy)
        big_u = big_u - sum(uploads) / len(uploads)
    result = {"server/U": big_u, **{f"client {i}/v": v[i] for i in p.ids}}
    return result | models([_unravel(p, big_u @ v[i], NAMES) for i in p.ids])


@reference(
    "pfl-mf-joint",
    "description of the published code: FedPer's loop on (U, v), v averaged with U",
    {"rank": 3, "start": "published", "lr": 0.1},
    {"rank": 2, "start": "published", "lr": 0.02},
    {"rank": 3},
)
def pfl_mf_joint(p: Problem, f: Fields) -> Found:
    big_u, centre, own = p.server["U"], p.server["v"], {}
    for t in p.times:
        sent = []
        for i in p.asked[t]:
            w = {"U": big_u, "v": own.get(i, centre)}
            w = fit(f, lambda a, b: loss(_unravel(p, a["U"] @ a["v"], NAMES), b), w, p.batches(t, i))
            own[i] = w["v"]
            sent.append(w)
        met = mean(sent, weigh(p, f, p.asked[t]))
        big_u, centre = met["U"], met["v"]
    result = {"server/U": big_u, "server/v": centre}
    return result | models([_unravel(p, big_u @ own.get(i, centre), NAMES) for i in p.ids])


@reference(
    "pfl-mf",
    "this library's own form, from its specification and an older plain script",
    {**UNGUARDED, "rank": 3},
    {**UNGUARDED, "rank": 3, "max_step": 0.02},
    {**UNGUARDED, "rank": 3, "v_method": "solve", "max_step": None, "lr": 0.3},
    {
        **UNGUARDED,
        "rank": 2,
        "server_step": "plain",
        "v_prior": 0.0,
        "v_steps": 10,
        "refresh": False,
        "start": "random",
    },
)
def pfl_mf(p: Problem, f: Fields) -> Found:
    big_u, theta, v = p.server["U"], within(p.server, "theta"), [c["v"] for c in p.clients]
    prior, r = f["v_prior"], p.server["U"].shape[1]

    def logits(head: Tensor, h: Tensor) -> Tensor:
        w = _unravel(p, head, HEAD)
        return h @ w["4.weight"].T + w["4.bias"]

    def fitted(i: int) -> Tensor:
        """v after steps with U fixed, on features that are computed once; the prior is prior/n_i · ½‖θ‖²."""
        x, y = p.all(i)
        h, n = features(theta, x), len(y)
        q, triangle = torch.linalg.qr(big_u)
        w = triangle @ v[i]  # θ = Q w

        def cost(w: Tensor, held: float) -> Tensor:
            return cross_entropy(logits(q @ w, h), y) + held * prior / n / 2 * (w**2).sum()

        if f["v_method"] == "solve":  # Böhning's bound on the curvature of the softmax: ½ ZᵀZ
            z = torch.stack([logits(q[:, j], h) for j in range(r)])
            bound = 0.5 * torch.einsum("anc,bnc->ab", z, z) / n + prior / n * torch.eye(r, dtype=z.dtype)
            bound = bound + f["v_ridge"] * bound.trace() / r * torch.eye(r, dtype=z.dtype)
            if cost(0 * w, 0.0) < cost(w, 0.0):
                w = 0 * w
        rate = 1.0 if f["lr_v"] is None else f["lr_v"]
        for _ in range(f["v_steps"]):
            g = slope(lambda a: cost(a, 1.0), w)
            w = w - rate * (torch.linalg.solve(bound, g) if f["v_method"] == "solve" else g)
        return torch.linalg.solve(triangle, w)

    for t in p.times:
        change, bodies = [], []
        for i in p.asked[t]:
            v[i] = fitted(i)
            start, n = big_u @ v[i], len(p.train[i])

            def objective(w: Weights, b: Batch, n: int = n) -> Tensor:
                return loss({**w, **_unravel(p, w["t"], HEAD)}, b) + prior / n / 2 * (w["t"] ** 2).sum()

            w = fit(f, objective, {**theta, "t": start}, p.batches(t, i))
            change.append(w.pop("t") - start)
            bodies.append(w)
        share = torch.tensor(weigh(p, f, p.asked[t]), dtype=big_u.dtype)
        share, met = share / share.sum(), torch.stack([v[i] for i in p.asked[t]])
        m = torch.stack(change).T @ (share[:, None] * met)  # M = Σ w Δθ vᵀ
        c = met.T @ (share[:, None] * met)  # C = Σ w v vᵀ
        if f["server_step"] == "plain":
            move = m
        else:
            gram = big_u.T @ big_u
            move = m @ torch.linalg.inv(c + f["ridge"] * (gram @ c).trace() / r * torch.linalg.inv(gram))
            if f["max_step"] is not None:
                far, size = (move.T @ move @ c).trace().sqrt(), (gram @ c).trace().sqrt()
                move = move * min(1.0, float(f["max_step"] * size / far))
        big_u, theta = big_u + move, mean(bodies, weigh(p, f, p.asked[t]))
    result = {"server/U": big_u, **under("server/theta", theta), **{f"client {i}/v": v[i] for i in p.ids}}
    used = [fitted(i) if f["refresh"] else v[i] for i in p.ids]
    return result | models([{**theta, **_unravel(p, big_u @ w, HEAD)} for w in used])
