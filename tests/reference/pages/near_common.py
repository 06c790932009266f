"""Methods with a personal model near a common one."""

from __future__ import annotations

import torch
from plain import (
    NAMES,
    Batch,
    Fields,
    Found,
    Problem,
    Weights,
    fit,
    gradient,
    loss,
    mean,
    models,
    only,
    reference,
    square,
    step,
    under,
    weigh,
)
from torch import Tensor


@reference("ditto", "description: F_k(v) + λ/2 ‖v − w^t‖² beside FedAvg", {}, {"lam": 0.4, "personal_epochs": 3})
def ditto(p: Problem, f: Fields) -> Found:
    w, v = p.start, [p.start for _ in p.ids]
    for t in p.times:
        near, sent = w, []
        for i in p.asked[t]:
            sent.append(fit(f, loss, w, p.batches(t, i)))
            v[i] = fit(
                f,
                lambda a, b: loss(a, b) + f["lam"] / 2 * square(a, near),
                v[i],
                p.batches(t, i, f["personal_epochs"]),
                f["lr_personal"],
            )
        w = mean(sent, weigh(p, f, p.asked[t]))
    return under("server/theta", w) | models(v)


@reference(
    "apfl",
    "description and an older plain script: v at v̄ = αv + (1−α)w, α by ⟨v − w, ∇f(v̄)⟩",
    {},
    {"alpha_every": "step", "alpha_decay": 0.02, "alpha": 0.3},
    {"adaptive": False},
)
def apfl(p: Problem, f: Fields) -> Found:
    w, v = p.start, [p.start for _ in p.ids]
    alpha = [torch.tensor(f["alpha"], dtype=p.x.dtype) for _ in p.ids]

    def mixed(v: Weights, w: Weights, a: Tensor) -> Weights:
        return {k: a * v[k] + (1 - a) * w[k] for k in w}

    def turned(v: Weights, w: Weights, a: Tensor, b: Batch) -> Tensor:
        g = gradient(lambda m: loss(m, b), mixed(v, w, a))
        along = sum(((v[k] - w[k]) * g[k]).sum() for k in w) + f["alpha_decay"] * a
        return (a - (f["lr"] if f["lr_alpha"] is None else f["lr_alpha"]) * along).clamp(0, 1)

    for t in p.times:
        sent = []
        for i in p.asked[t]:
            own, mine, a = w, v[i], alpha[i]
            for k, b in enumerate(p.batches(t, i)):
                if f["adaptive"] and f["alpha_every"] == "round" and k == 0:
                    a = turned(mine, own, a, b)
                following = turned(mine, own, a, b) if f["adaptive"] and f["alpha_every"] == "step" else a
                at_mix = gradient(lambda m: loss(m, b), mixed(mine, own, a))
                own = step(own, gradient(lambda m: loss(m, b), own), f["lr"])
                mine, a = step(mine, {k: a * g for k, g in at_mix.items()}, f["lr"]), following
            v[i], alpha[i] = mine, a
            sent.append(own)
        w = mean(sent, weigh(p, f, p.asked[t]))
    result = under("server/theta", w) | models([mixed(v[i], w, alpha[i]) for i in p.ids])
    return result | {f"client {i}/alpha": alpha[i] for i in p.ids}


@reference(
    "pfedme",
    "description: K inner steps per minibatch, w_i ← w_i − ηλ(w_i − θ), server's β",
    {},
    {"lam": 3.0, "lr": 0.05, "beta": 0.6, "inner_steps": 2},
    seen="where θ starts in a round",
)
def pfedme(p: Problem, f: Fields) -> Found:
    w, theta = p.start, [p.start for _ in p.ids]
    for t in p.times:
        sent = []
        for i in p.asked[t]:
            own = theta[i] = w  # the paper leaves open where θ starts; public code starts it from w
            for b in p.batches(t, i):
                near = own
                theta[i] = fit(
                    f,
                    lambda a, b: loss(a, b) + f["lam"] / 2 * square(a, near),
                    theta[i],
                    [b] * f["inner_steps"],
                    f["lr_inner"],
                )
                own = {k: own[k] - f["lr"] * f["lam"] * (own[k] - theta[i][k]) for k in own}
            sent.append(own)
        met = mean(sent, weigh(p, f, p.asked[t]))
        w = {k: (1 - f["beta"]) * w[k] + f["beta"] * met[k] for k in w}
    return under("server/theta", w) | models(theta)


@reference(
    "l2gd",
    "description: a coin per local step, pull to the mean of the round's start",
    {"p": 0.4},
    seen="the client's steps",
)
def l2gd(p: Problem, f: Fields) -> Found:
    centre, own = p.start, [p.start for _ in p.ids]
    pull = min(1.0, f["lr"] * f["lam"] / f["p"])
    for t in p.times:
        for i in p.asked[t]:
            for k, b in enumerate(p.batches(t, i)):
                if p.drawn["coin"][t][k]:
                    own[i] = {n: own[i][n] - pull * (own[i][n] - centre[n]) for n in NAMES}
                else:
                    own[i] = step(own[i], gradient(lambda a: loss(a, b), own[i]), f["lr"] / (1 - f["p"]))
        centre = mean([own[i] for i in p.asked[t]], weigh(p, f, p.asked[t]))
    return under("server/theta", centre) | models(own)


@reference(
    "per-fedavg",
    "description and an older plain script: first-order, Hessian-free and exact meta-gradients on D, D', D''",
    {},
    {"variant": "hessian-free", "lr_inner": 0.03, "delta": 1e-3, "adapt": 1, "adapt_unit": "step"},
    {"variant": "exact", "lr_inner": 0.03, "adapt": 2, "adapt_unit": "epoch"},
)
def per_fedavg(p: Problem, f: Fields) -> Found:
    w, inner = p.start, f["lr"] if f["lr_inner"] is None else f["lr_inner"]

    def meta(at: Weights, first: Batch, second: Batch, third: Batch) -> Weights:
        g = gradient(lambda a: loss(a, second), step(at, gradient(lambda a: loss(a, first), at), inner))
        if f["variant"] == "hessian-free":
            up, down = step(at, g, -f["delta"]), step(at, g, f["delta"])
            more, less = (gradient(lambda a: loss(a, third), x) for x in (up, down))
            g = {k: g[k] - inner * (more[k] - less[k]) / (2 * f["delta"]) for k in g}
        elif f["variant"] == "exact":
            leaf = [v.detach().clone().requires_grad_() for v in at.values()]
            slopes = torch.autograd.grad(loss(dict(zip(at, leaf)), third), leaf, create_graph=True)
            turned = torch.autograd.grad(sum((s * g[k]).sum() for k, s in zip(at, slopes)), leaf)
            g = {k: g[k] - inner * h for k, h in zip(at, turned)}
        return g

    for t in p.times:
        sent = []
        for i in p.asked[t]:
            own, b = w, p.batches(t, i)
            for k in range(len(b)):
                own = step(own, meta(own, b[(k + 1) % len(b)], b[k], b[(k + 2) % len(b)]), f["lr"])
            sent.append(own)
        w = mean(sent, weigh(p, f, p.asked[t]))
    used = []
    for i in p.ids:
        epochs = f["adapt"] if f["adapt_unit"] == "epoch" else 10
        some = p.batches(p.rounds, i, epochs)[: None if f["adapt_unit"] == "epoch" else f["adapt"]]
        used.append(fit({"momentum": 0.0, "weight_decay": 0.0}, loss, w, some, inner))
    return under("server/theta", w) | models(used)


@reference(
    "fedala",
    "description: element-wise blend A of local and global model, learnt before training",
    {"lr_a": 1.0},
    {"top": 4, "lr_a": 0.3, "threshold": 1e-3},
)
def fedala(p: Problem, f: Fields) -> Found:
    w, own, top = p.start, [p.start for _ in p.ids], NAMES[len(NAMES) - f["top"] :]
    blend = [{k: torch.ones_like(p.start[k]) for k in top} for _ in p.ids]
    settled = [False for _ in p.ids]

    def mixed(i: int, a: Weights) -> Weights:
        return w | {k: own[i][k] + (w[k] - own[i][k]) * a[k] for k in top}

    def learnt(i: int, t: int) -> tuple[Weights, bool]:
        a, losses = blend[i], []
        if all(torch.equal(w[k], own[i][k]) for k in NAMES):
            return a, settled[i]
        while True:
            for rows in p.drawn["part"][t, i]:
                b, at = p.at(rows), mixed(i, a)
                value, g = loss(at, b), gradient(lambda q: loss(at | q, b), only(at, top))
                a = {k: (a[k] - f["lr_a"] * g[k] * (w[k] - own[i][k])).clamp(0, 1) for k in top}
            losses.append(float(value))
            enough = len(losses) > 10 and float(torch.tensor(losses[-10:]).std(correction=0)) < f["threshold"]
            if settled[i] or enough or len(losses) == f["start_passes"]:
                return a, True

    for t in p.times:
        sent = []
        for i in p.asked[t]:
            blend[i], settled[i] = learnt(i, t)
            sent.append(fit(f, loss, mixed(i, blend[i]), p.batches(t, i)))
        for i, trained in zip(p.asked[t], sent):
            own[i] = trained
        w = mean(sent, weigh(p, f, p.asked[t]))
    result = under("server/theta", w) | models([mixed(i, learnt(i, p.rounds)[0]) for i in p.ids])
    return result | {f"client {i}/A/{k}": blend[i][k] for i in p.ids for k in top}
