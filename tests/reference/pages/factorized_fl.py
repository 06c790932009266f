"""Factorized-FL α and β, and their yardsticks: W = u v + μ, averaged among clients whose v are alike."""

from __future__ import annotations

import torch
from plain import (
    LAYERS,
    Batch,
    Fields,
    Found,
    Problem,
    Weights,
    fit,
    loss,
    mean,
    models,
    only,
    reference,
    weigh,
    within,
)
from torch import Tensor
from torch.nn.functional import cosine_similarity

SECTION = "eq. (1), (2), (4) to (6); matching floor and newcomers from a description of the authors' code"


def _plain(w: Weights) -> Weights:
    """The network that factors stand for; the paper's W is [inputs, outputs], torch's the transpose."""
    made = {f"{a}.weight": (w[f"{a}.u"] @ w[f"{a}.v"]).T for a in LAYERS}
    for a in LAYERS:
        if f"{a}.mu" in w:
            made[f"{a}.weight"] = made[f"{a}.weight"] + w[f"{a}.mu"]
    return made | {f"{a}.bias": w[f"{a}.bias"] for a in LAYERS}


def _train(p: Problem, f: Fields, w: Weights, t: int, i: int) -> Weights:
    """SGD on cross-entropy + λ‖μ‖₁ (eq. 6): by soft thresholding after a step, a subgradient, or none."""

    def objective(w: Weights, b: Batch) -> Tensor:
        l1 = sum(v.abs().sum() for k, v in w.items() if k.endswith(".mu"))
        return loss(_plain(w), b) + (f["lam"] * l1 if f["penalty"] == "subgradient" else 0.0)

    def thresholded(w: Weights) -> Weights:
        edge = f["lr"] * f["lam"] if f["penalty"] == "prox" else 0.0
        return {k: v.sign() * (v.abs() - edge).clamp_min(0) if k.endswith(".mu") else v for k, v in w.items()}

    return fit(f, objective, w, p.batches(t, i), after=thresholded)


def _start(p: Problem, i: int) -> Weights:
    """A client's factors before its first round, from its own state and the server's row or common copy."""
    parts = {k.split("/", 1)[1]: v for k, v in p.clients[i].items()}
    for k, v in p.server.items():
        kind, _, name = k.partition("/")
        if kind in ("u", "b", "v", "mu"):
            parts[name] = v[i] if "seen/n" in p.server else v
    return parts


def _matched(p: Problem, f: Fields, kinds: tuple[str, ...]) -> Found:
    own = [_start(p, i) for i in p.ids]
    shared = [k for k in own[0] if not k.startswith("4.") and k.endswith(kinds)]
    start, known = only(own[0], shared), {}

    def received(k: int) -> Weights:
        if not known:
            return start
        if k not in known:  # as the authors' code: the mean of all that is known, by examples
            return mean([only(w, shared) for w in known.values()], p.n(known))
        ids = sorted(known)
        z = [known[i]["2.v"].flatten() for i in ids]  # v^{L−1}, the last layer below the head
        here = known[k]["2.v"].flatten()
        sigma = torch.stack([cosine_similarity(here, other, dim=0) for other in z])
        sigma[ids.index(k)] = 1.0
        near = sigma >= f["tau"]
        if int(near.sum()) < f["m_min"]:
            near = torch.zeros_like(near)
            near[sigma.argsort(descending=True)[: f["m_min"]]] = True
        omega = torch.softmax(torch.where(near, f["epsilon"] * sigma, -torch.inf), 0)  # eq. (5)
        return {n: sum(o * known[i][n] for o, i in zip(omega, ids)) for n in shared}  # type: ignore[misc]

    for t in p.times:
        trained = {i: _train(p, f, own[i] | received(i), t, i) for i in p.asked[t]}
        known |= trained
        for i, w in trained.items():
            own[i] = w
    return models([_plain(own[i] | received(i)) for i in p.ids])


@reference(
    "factorized-fl-alpha",
    SECTION,
    {"mu_start": "zeros"},
    {"tau": 0.9995, "m_min": 2, "epsilon": 5.0, "lam": 0.02, "mu_start": "dense"},
)
def alpha(p: Problem, f: Fields) -> Found:
    return _matched(p, f, (".u", ".bias"))


@reference(
    "factorized-fl-beta",
    SECTION,
    {},
    {
        "m_min": 2,
        "epsilon": 1.0,
        "tau": 0.9995,
        "lam": 0.01,
        "penalty": "subgradient",
        "momentum": 0.5,
        "weight_decay": 1e-3,
    },
)
def beta(p: Problem, f: Fields) -> Found:
    return _matched(p, f, (".u", ".bias", ".v", ".mu"))


@reference("factorized-fedavg", "eq. (1), (2), (6) and the ablation without matching", {}, {"mu": False})
def factorized_fedavg(p: Problem, f: Fields) -> Found:
    own = [_start(p, i) for i in p.ids]
    common = {k: v for k, v in own[0].items() if not k.startswith("4.")}
    for t in p.times:
        for i in p.asked[t]:
            own[i] = _train(p, f, own[i] | common, t, i)
        common = mean([only(own[i], common) for i in p.asked[t]], weigh(p, f, p.asked[t]))
    return models([_plain(own[i] | common) for i in p.ids])


@reference("factorized-local", "eq. (1), (2) and (6), trained alone", {}, {"penalty": "none"})
def factorized_local(p: Problem, f: Fields) -> Found:
    own = [within(c, "h") for c in p.clients]
    for t in p.times:
        for i in p.asked[t]:
            own[i] = _train(p, f, own[i], t, i)
    return models([_plain(w) for w in own])
