"""Three methods of which only abstracts, and public code in part, were read: what is not settled there is fedspan's."""

from __future__ import annotations

import math

import torch
from plain import (
    BODY,
    LAYERS,
    Batch,
    Fields,
    Found,
    Problem,
    Weights,
    fit,
    forward,
    loss,
    mean,
    models,
    reference,
    under,
    weigh,
    within,
)
from plain import features as body_features
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid, nll_loss, one_hot, softmax, softplus


@reference(
    "amht-lrs",
    "description from the abstract and public code",
    {"rank": 2, "sparsity": 4},
    {"rank": 3, "sparsity": 20, "u_update": "gradient", "lr_u": 0.2, "threshold": 0.3, "shrink": 0.8, "w_steps": 3},
    seen="the whole method",
)
def amht_lrs(p: Problem, f: Fields) -> Found:
    body, big_u, r = {k: p.start[k] for k in BODY}, p.server["U"], f["rank"]
    w, b = [c["w"] for c in p.clients], [c["b"] for c in p.clients]
    tall = 1 + p.start["4.weight"].shape[1]  # features and a constant

    def inverse(h: Tensor) -> Tensor:
        return torch.linalg.inv(h + f["ridge"] * h.trace() / len(h) * torch.eye(len(h), dtype=h.dtype))

    def head(v: Tensor) -> Weights:
        return {"4.weight": v.reshape(-1, tall)[:, :-1], "4.bias": v.reshape(-1, tall)[:, -1]}

    def seen(i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features, labels, and ½ XᵀX/n, Böhning's bound on the curvature for one output."""
        x, y = p.all(i)
        z = body_features(body, x)
        z = torch.cat([z, torch.ones_like(z[:, :1])], 1)
        return z, one_hot(y, p.classes).to(z.dtype), 0.5 * z.T @ z / len(z)

    def slope(v: Tensor, z: Tensor, y: Tensor) -> Tensor:
        return ((softmax(z @ v.reshape(-1, tall).T, 1) - y).T @ z / len(z)).flatten()

    def solved(i: int) -> Tensor:
        z, y, gram = seen(i)
        columns, found = big_u.T.reshape(r, -1, tall), w[i]
        back = inverse(torch.einsum("acd,de,bce->ab", columns, gram, columns))
        for _ in range(f["w_steps"]):
            found = found - f["lr_w"] * back @ big_u.T @ slope(big_u @ found + b[i], z, y)
        return found

    for t in p.times:
        bodies, slopes, grams = [], [], []
        for i in p.asked[t]:
            z, y, gram = seen(i)
            for j in range(f["b_steps"]):  # a gradient step, then the largest entries above a falling threshold
                c = b[i] - f["lr_b"] * slope(big_u @ w[i] + b[i], z, y) / torch.linalg.eigvalsh(gram)[-1]
                keep = torch.zeros_like(c)
                keep[c.abs().topk(f["sparsity"]).indices] = 1.0
                b[i] = c * keep * (c.abs() > f["threshold"] * f["shrink"] ** j)
            w[i] = solved(i)
            fixed = head(big_u @ w[i] + b[i])
            bodies.append(fit(f, lambda q, batch: loss(q | fixed, batch), body, p.batches(t, i)))
            slopes.append(torch.outer(slope(big_u @ w[i] + b[i], z, y), w[i]))
            grams.append(torch.kron(torch.outer(w[i], w[i]), gram))
        shares = weigh(p, f, p.asked[t])
        g = mean([{"": s} for s in slopes], shares)[""]
        if f["u_update"] == "solve":
            back = inverse(mean([{"": k} for k in grams], shares)[""])
            rows = g.reshape(-1, tall, r).transpose(1, 2).reshape(p.classes, -1) @ back
            g = rows.reshape(-1, r, tall).transpose(1, 2).reshape(g.shape)
        q, triangle = torch.linalg.qr(big_u - f["lr_u"] * g)
        big_u, body = q * triangle.diagonal().sign(), mean(bodies, shares)
    result = {"server/U": big_u, **{f"client {i}/b": b[i] for i in p.ids}}
    return result | models([body | head(big_u @ solved(i) + b[i]) for i in p.ids])


@reference(
    "lr-bpfl",
    "description from the abstract and public code",
    {"private_head": False, "rank": 2},
    {"private_head": False, "rank": 2, "members": 0, "temperature": 0.3},
    {"private_head": False, "rank": 3, "members": 2, "adaptive_rank": True, "lr_personal": 0.05},
    seen="the whole method",
)
def lr_bpfl(p: Problem, f: Fields) -> Found:
    theta, own = p.start, [within(c, "q") for c in p.clients]

    def masked(theta: Weights, q: Weights, noise: Tensor | None) -> Weights:
        made = dict(theta)
        for a in LAYERS:
            factor = {}
            for s in ("alpha", "gamma"):
                at = q[f"{a}.{s}_mu"]
                if f["adaptive_rank"]:
                    gate = (1.2 * torch.sigmoid(q[f"{a}.gate"]) - 0.1).clamp(0, 1)
                    at = torch.cat([torch.ones_like(gate[:1]), gate])[:, None] * at
                if noise is not None:
                    drawn, noise = noise[: at.numel()], noise[at.numel() :]
                    at = at + softplus(q[f"{a}.{s}_rho"]) * drawn.reshape(at.shape)
                factor[s] = at
            made[f"{a}.weight"] = theta[f"{a}.weight"] * (factor["gamma"].T @ factor["alpha"])
        return made

    def averaged(theta: Weights, q: Weights, x: Tensor, draws: list[Tensor]) -> Tensor:
        if not draws:
            return forward(masked(theta, q, None), x)
        return torch.stack([softmax(forward(masked(theta, q, d), x), 1) for d in draws]).mean(0).log()

    def divergence(q: Weights) -> Tensor:
        total = torch.zeros((), dtype=p.x.dtype)
        for k in q:
            if k.endswith("_mu"):
                s, prior = softplus(q[k[:-2] + "rho"]), f["prior_scale"]
                far = (q[k] - f["rank"] ** -0.5) ** 2
                total = total + (torch.log(prior / s) + (s**2 + far) / (2 * prior**2) - 0.5).sum()
        return total

    for t in p.times:
        sent = []
        for i in p.asked[t]:
            noise, n = p.drawn["noise"][t, i], len(p.train[i])
            start = theta

            def nll(theta: Weights, q: Weights, b: Batch, draws: list[Tensor]) -> Tensor:
                return nll_loss(log_softmax(averaged(theta, q, b[0], draws), 1), b[1])

            for k, b in enumerate(p.batches(t, i, f["personal_epochs"])):
                own[i] = fit(
                    f,
                    lambda q, b: nll(start, q, b, noise[k]) + f["temperature"] * divergence(q) / n,
                    own[i],
                    [b],
                    f["lr_personal"],
                )
            for k, b in enumerate(p.batches(t, i, f["global_epochs"])):
                start = fit(f, lambda w, b: nll(w, own[i], b, noise[k]), start, [b])
            sent.append(start)
        theta = mean(sent, weigh(p, f, p.asked[t]))
    outputs = {f"outputs {i}": averaged(theta, own[i], p.x, p.drawn["use"][i]) for i in p.ids}
    return under("server/theta", theta) | outputs


@reference(
    "waffle",
    "description from the abstract; divergence of Kumaraswamy from Beta as known",
    {"private_head": False},
    {"private_head": False, "factors": 4, "alpha": 3.0, "tau": 0.8, "temperature": 0.5},
    seen="the whole method",
)
def waffle(p: Problem, f: Fields) -> Found:
    theta, own, low = within(p.server, "theta"), [within(c, "q") for c in p.clients], ("0", "2")

    def made(theta: Weights, z: dict[str, Tensor]) -> Weights:
        out = {k: v for k, v in theta.items() if k.endswith("bias") or k == "4.weight"}
        return out | {
            f"{a}.weight": theta[f"{a}.Wa"] @ torch.diag(theta[f"{a}.r"] * z[a]) @ theta[f"{a}.Wb"] for a in low
        }

    def divergence(q: Weights, a: str, u: Tensor) -> Tensor:
        logit, c, d = q[f"{a}.logit"], q[f"{a}.log_c"].exp(), q[f"{a}.log_d"].exp()
        alpha = float(len(logit)) if f["alpha"] is None else f["alpha"]
        v = (1 - (1 - u) ** (1 / d)) ** (1 / c)  # the inverse of Kumaraswamy's distribution function
        to_beta = (c - alpha) / c * (-0.5772156649015329 - torch.digamma(d) - 1 / d)
        to_beta = to_beta + torch.log(c * d) - math.log(alpha) - (d - 1) / d  # log B(α, 1) = −log α
        pi, use = torch.cumprod(v, 0), torch.sigmoid(logit)
        to_pi = use * (logsigmoid(logit) - pi.log()) + (1 - use) * (logsigmoid(-logit) - torch.log1p(-pi))
        return to_beta.sum() + to_pi.sum()

    for t in p.times:
        sent = []
        for i in p.asked[t]:
            w = under("theta", theta) | under("q", own[i])
            for k, b in enumerate(p.batches(t, i)):
                uz, uv = p.drawn["noise"][t, i][k]

                def objective(w: Weights, b: Batch, uz: Weights = uz, uv: Weights = uv, i: int = i) -> Tensor:
                    q = within(w, "q")
                    z = {a: torch.sigmoid((q[f"{a}.logit"] + torch.logit(uz[a])) / f["tau"]) for a in low}
                    pull = sum(divergence(q, a, uv[a]) for a in low) / len(p.train[i])
                    return loss(made(within(w, "theta"), z), b) + f["temperature"] * pull

                w = fit(f, objective, w, [b])
            own[i] = within(w, "q")
            sent.append(within(w, "theta"))
        theta = mean(sent, weigh(p, f, p.asked[t]))
    used = [made(theta, {a: torch.sigmoid(q[f"{a}.logit"]) for a in low}) for q in own]
    return under("server/theta", theta) | models(used)
