"""FedARA, FedHM and other methods whose weights, or messages, are products of small matrices."""

from __future__ import annotations

import math

import torch
from plain import (
    BODY,
    HEAD,
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
    only,
    reference,
    shortened,
    under,
    weigh,
    within,
)
from torch import Tensor
from torch.nn.functional import cross_entropy

LOW = ("0", "2")
REST = ("0.bias", "2.bias", *HEAD)


def _factors(w: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U = P √Σ and V = Q √Σ of the best approximation of that rank."""
    left, s, right = torch.linalg.svd(w, full_matrices=False)
    return left[:, :rank] * s[:rank].sqrt(), right[:rank].T * s[:rank].sqrt()


def _cut(w: Weights, ranks: dict[str, int]) -> Weights:
    """Factors in the place of the weights that have a rank."""
    out = {k: v for k, v in w.items() if k.split(".")[0] not in ranks or not k.endswith(".weight")}
    for a, r in ranks.items():
        out[f"{a}.U"], out[f"{a}.V"] = _factors(w[f"{a}.weight"], r)
    return out


def _whole(w: Weights) -> Weights:
    """Products in the place of factors."""
    out = {k: v for k, v in w.items() if not k.endswith((".U", ".V"))}
    return out | {k[:-1] + "weight": v @ w[k[:-1] + "V"].T for k, v in w.items() if k.endswith(".U")}


def _decay(w: Weights, on_products: float, on_rest: float) -> Tensor:
    """Frobenius decay: ½λ‖U Vᵀ‖² of factors, ½λ‖p‖² of the rest."""
    made = _whole(w)
    factored = [k for k in made if k not in w]
    total = sum(on_products / 2 * (made[k] ** 2).sum() for k in factored)
    return total + sum(on_rest / 2 * (made[k] ** 2).sum() for k in made if k not in factored)  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------ FedARA


def _ara(p: Problem, f: Fields) -> Found:
    omega, heads = only(p.start, BODY), [only(p.start, HEAD) for _ in p.ids]
    ratios = f["ratio"] if isinstance(f["ratio"], list | tuple) else [f["ratio"]]

    def ranks(i: int) -> dict[str, int]:
        ratio = ratios[i % len(ratios)]
        if ratio == 1:  # a full rank is trained as the weight itself
            return {}
        sizes = {a: min(p.start[f"{a}.weight"].shape) for a in LOW}
        return {a: min(max(round(ratio * m), 1), m) for a, m in sizes.items()}

    for t in p.times:
        sent = []
        lam = f["lam"] * min(1.0, (t - 1) / f["warmup"])  # λ_t: 0 in round 1
        for i in p.asked[t]:
            got = _cut(omega, ranks(i))
            x, y = p.all(i)
            frozen = features(_whole(got), x)
            anchors = torch.stack([frozen[y == c].mean(0) if (y == c).any() else frozen[0] for c in range(p.classes)])

            def objective(w: Weights, b: Batch, anchors: Tensor = anchors, lam: float = lam) -> Tensor:
                made = _whole(w)
                r = features(made, b[0])
                far = (r - anchors[b[1]]) ** 2
                near = far.mean(1) if f["fac_reduction"] == "mse" else far.sum(1)
                held = f["rho"] * (1 if f["rho_rule"] == "half" else 2)
                logits = r @ made["4.weight"].T + made["4.bias"]
                return cross_entropy(logits, b[1]) + lam * near.mean() + _decay(w, held, 0.0)

            w = fit(f, objective, got | heads[i], p.batches(t, i))
            heads[i] = only(w, HEAD)
            sent.append(only(_whole(w), BODY))
        omega = mean(sent, weigh(p, f, p.asked[t]))
    return models([_whole(_cut(omega, ranks(i))) | heads[i] for i in p.ids])


STEPS = "a summary without its displays; aggregation, anchors and L_FAC as derived in the specification"


@reference(
    "fedara",
    STEPS,
    {},
    {"ratio": [1.0, 0.5, 0.4], "warmup": 2, "lam": 3.0},
    {"ratio": [0.5, 0.4], "warmup": 1, "lam": 0.2, "fac_reduction": "sum", "rho_rule": "whole", "rho": 0.02},
    seen="the whole method",
)
def fedara(p: Problem, f: Fields) -> Found:
    return _ara(p, f)


@reference("fedara-star", STEPS, {}, {"warmup": 1}, seen="the whole method")
def fedara_star(p: Problem, f: Fields) -> Found:
    return _ara(p, f)


# ------------------------------------------------------------------------------------------------ FedHM and relatives


@reference(
    "fedhm",
    "description of paper and public code: truncated SVD down, products averaged, Frobenius decay",
    {},
    {"rho": [1.0, 2.0, 3.0], "weight_decay": 0.03, "momentum": 0.5},
    {"rho": [2.0, 3.0], "keep_full_rank_history": True},
    {"rho": [1.0, 2.0, 3.0], "temperature": 2.0},
    seen="weights by `temperature`",
)
def fedhm(p: Problem, f: Fields) -> Found:
    rhos = f["rho"] if isinstance(f["rho"], list | tuple) else [f["rho"]]
    w = p.start

    def ranks(i: int) -> dict[str, int]:
        rho = rhos[i % len(rhos)]
        return {} if rho == 1 else {a: max(1, round(len(p.start[f"{a}.weight"]) / rho)) for a in LOW}

    plain = {**f, "weight_decay": 0.0}
    for t in p.times:
        sent, decay = [], f["weight_decay"]
        for i in p.asked[t]:
            got = _cut(w, ranks(i))
            new = fit(plain, lambda q, b: loss(_whole(q), b) + _decay(q, decay, decay), got, p.batches(t, i))
            sent.append(_whole(new))
        weights = weigh(p, f, p.asked[t])
        if f["temperature"] is not None:
            weights = [math.exp(-rhos[i % len(rhos)] / f["temperature"]) for i in p.asked[t]]
        if f["keep_full_rank_history"] and all(rhos[i % len(rhos)] > 1 for i in p.asked[t]):
            sent, weights = [*sent, w], [*weights, sum(weights) / len(weights)]
        w = mean(sent, weights)
    return models([_whole(_cut(w, ranks(i))) for i in p.ids])


@reference(
    "fedlmt", "description: layers U Vᵀ from the start, factors averaged", {}, {"rho": 3.0, "weight_decay": 0.03}
)
def fedlmt(p: Problem, f: Fields) -> Found:
    w = _cut(p.start, {a: max(1, round(len(p.start[f"{a}.weight"]) / f["rho"])) for a in LOW})
    plain, decay = {**f, "weight_decay": 0.0}, f["weight_decay"]
    for t in p.times:
        sent = [
            fit(plain, lambda q, b: loss(_whole(q), b) + _decay(q, decay, decay), w, p.batches(t, i))
            for i in p.asked[t]
        ]
        w = mean(sent, weigh(p, f, p.asked[t]))
    return models([_whole(w)] * len(p.train))


@reference(
    "feddlr", "description: triples by energy both ways, full training between", {"energy": 0.6}, {"energy": 0.8}
)
def feddlr(p: Problem, f: Fields) -> Found:
    def sent_as(w: Weights) -> Weights:
        return w | {f"{a}.weight": shortened(w[f"{a}.weight"], f["energy"]) for a in LOW}

    w = p.start
    for t in p.times:
        sent = [sent_as(fit(f, loss, sent_as(w), p.batches(t, i))) for i in p.asked[t]]
        w = mean(sent, weigh(p, f, p.asked[t]))
    return models([sent_as(w)] * len(p.train))


@reference(
    "prism",
    "description of paper and public code: triples by σ^κ, averaged where held, decomposed anew",
    {},
    {"keep": [0.4, 0.8], "kappa": 1.0, "weight_decay": 0.03},
    seen="the whole method",
)
def prism(p: Problem, f: Fields) -> Found:
    keep = f["keep"] if isinstance(f["keep"], list | tuple) else [f["keep"]]
    w, plain, decay = p.start, {**f, "weight_decay": 0.0}, f["weight_decay"]
    for t in p.times:
        whole = _cut(w, {a: min(w[f"{a}.weight"].shape) for a in LOW})
        sums = {k: torch.zeros_like(v) for k, v in whole.items()}
        had = {a: torch.zeros(whole[f"{a}.U"].shape[1], dtype=p.x.dtype) for a in LOW}
        weights = weigh(p, f, p.asked[t])
        for share, i in zip(weights, p.asked[t]):
            got, at = dict(whole), {}
            for a in LOW:
                sigma = torch.linalg.svdvals(w[f"{a}.weight"])
                many = max(1, math.ceil(keep[i % len(keep)] * len(sigma) - 1e-9))
                # The largest of log p + Gumbel noise are drawn without replacement with probability ∝ p = σ^κ.
                at[a] = (f["kappa"] * sigma.log() + p.drawn["gumbel"][t, i][a]).topk(many).indices
                got[f"{a}.U"], got[f"{a}.V"] = whole[f"{a}.U"][:, at[a]], whole[f"{a}.V"][:, at[a]]
            new = fit(plain, lambda q, b: loss(_whole(q), b) + _decay(q, decay, decay), got, p.batches(t, i))
            for a in LOW:
                had[a][at[a]] += share
                for k in (f"{a}.U", f"{a}.V"):
                    sums[k][:, at[a]] += share * new[k]
            for k in REST:
                sums[k] += share * new[k]
        met = {k: sums[k] / sum(weights) for k in REST}
        for a in LOW:
            for k in (f"{a}.U", f"{a}.V"):
                met[k] = torch.where(had[a] > 0, sums[k] / had[a].clamp_min(1e-300), whole[k])
        w = _whole(met)
    return models([w] * len(p.train))


# ------------------------------------------------------------------------------------------------ FedPara


def _hadamard(w: Weights, shift: float) -> Weights:
    """W = (X₁Y₁ᵀ) ∘ (X₂Y₂ᵀ + shift)."""
    made = {k: v for k, v in w.items() if k.endswith("bias")}
    for a in ("0", "2", "4"):
        second = w[f"{a}.X2"] @ w[f"{a}.Y2"].T + shift
        made[f"{a}.weight"] = (w[f"{a}.X1"] @ w[f"{a}.Y1"].T) * second
    return made


@reference("fedpara", "description: W = (X₁Y₁ᵀ)∘(X₂Y₂ᵀ), factors averaged", {}, {"rank": 2, "momentum": 0.5})
def fedpara(p: Problem, f: Fields) -> Found:
    w = within(p.server, "theta")
    for t in p.times:
        sent = [fit(f, lambda q, b: loss(_hadamard(q, 0.0), b), w, p.batches(t, i)) for i in p.asked[t]]
        w = mean(sent, weigh(p, f, p.asked[t]))
    return under("server/theta", w) | models([_hadamard(w, 0.0)] * len(p.train))


@reference(
    "pfedpara",
    "description: W = W₁∘(W₂ + 1), W₂ personal",
    {"lr": 0.03, "private_head": False},
    {"rank": 2, "lr": 0.03, "private_head": False},
)
def pfedpara(p: Problem, f: Fields) -> Found:
    w, own = within(p.server, "theta"), [within(c, "h") for c in p.clients]
    for t in p.times:
        sent = []
        for i in p.asked[t]:
            new = fit(f, lambda q, b: loss(_hadamard(q, 1.0), b), w | own[i], p.batches(t, i))
            own[i] = only(new, own[i])
            sent.append(only(new, w))
        w = mean(sent, weigh(p, f, p.asked[t]))
    return under("server/theta", w) | models([_hadamard(w | h, 1.0) for h in own])
