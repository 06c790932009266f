"""FedLoRU and its family: W + α A B, factors averaged one by one, their product accumulated every τ rounds."""

from __future__ import annotations

import math

import torch
from plain import Fields, Found, Problem, Weights, fit, loss, mean, models, only, reference, under, weigh, within

ADAPTED = ("0", "2")


def _plain(w: Weights, big_w: Weights, alpha: float, alpha_own: float = 0.0) -> Weights:
    """W + α A B + α_p L U (eq. 6 and 8); other parameters as they are."""
    made = {k: v for k, v in w.items() if k.split(".")[1] in ("weight", "bias")}
    for a in ADAPTED:
        made[f"{a}.weight"] = big_w[f"{a}.weight"]
        if f"{a}.A" in w:
            made[f"{a}.weight"] = made[f"{a}.weight"] + alpha * w[f"{a}.A"] @ w[f"{a}.B"]
        if f"{a}.L" in w:
            made[f"{a}.weight"] = made[f"{a}.weight"] + alpha_own * w[f"{a}.L"] @ w[f"{a}.U"]
    return made


def _rate(f: Fields, t: int) -> float:
    """The learning rate of a round: a cosine from lr to lr_min, or lr."""
    if f["cycle"] is None:
        return float(f["lr"])
    done = (t - 1) % f["cycle"] / f["cycle"]
    return float(f["lr_min"] + (f["lr"] - f["lr_min"]) * (1 + math.cos(math.pi * done)) / 2)


def _accumulated(
    p: Problem, f: Fields, common: Weights, big_w: Weights, alpha: float, t: int
) -> tuple[Weights, Weights]:
    """Every τ rounds W ← W + α A B for all, then factors start again."""
    if f["tau"] is None or t % f["tau"]:
        return common, big_w
    big_w = {f"{a}.weight": big_w[f"{a}.weight"] + alpha * common[f"{a}.A"] @ common[f"{a}.B"] for a in ADAPTED}
    if f["reinit"] != "momentum":
        common = common | {f"{a}.B": 0 * common[f"{a}.B"] for a in ADAPTED}
    if f["reinit"] == "random":
        common = common | {k: z / math.sqrt(f["rank"]) for k, z in p.drawn["A"][t].items()}  # N(0, 1/r)
    return common, big_w


def _start(p: Problem) -> tuple[Weights, Weights]:
    common = within(p.server, "theta") | within(p.server, "A") | within(p.server, "B")
    return common, within(p.common, "W")


def _loru(p: Problem, f: Fields) -> Found:
    common, big_w = _start(p)
    alpha = f["alpha"] / f["rank"] if f["alpha_over_r"] else f["alpha"]
    for t in p.times:
        sent = [
            fit(f, lambda w, b: loss(_plain(w, big_w, alpha), b), common, p.batches(t, i), _rate(f, t))
            for i in p.asked[t]
        ]
        common = mean(sent, weigh(p, f, p.asked[t]))
        common, big_w = _accumulated(p, f, common, big_w, alpha, t)
    result = {f"server/A/{a}.A": common[f"{a}.A"] for a in ADAPTED} | under("common/W", big_w)
    return result | models([_plain(common, big_w, alpha)] * len(p.train))


@reference(
    "fedloru",
    "Algorithm 1 and eq. (6); reset after an accumulation from the text",
    {"rank": 3, "tau": 2},
    {"rank": 3, "tau": 1, "reinit": "momentum", "momentum": 0.9, "lr": 0.03, "cycle": 3},
    {"rank": 2, "tau": 2, "reinit": "momentum_A", "alpha": 8.0, "alpha_over_r": True},
    seen="the server's and the client's step",
)
def fedloru(p: Problem, f: Fields) -> Found:
    return _loru(p, f)


@reference(
    "fedlora", "Algorithm 1 and eq. (6) without accumulation", {"rank": 3}, {"rank": 3, "alpha": 2.0}, seen="as fedloru"
)
def fedlora(p: Problem, f: Fields) -> Found:
    return _loru(p, f)


@reference(
    "pfedloru",
    "Algorithm 2 and eq. (8)",
    {"rank": 3, "tau": 2, "private_head": False},
    {
        "rank": 3,
        "tau": 1,
        "private_head": False,
        "alpha_own": 0.5,
        "personal_epochs": 2,
        "global_epochs": 1,
        "reinit": "momentum_A",
    },
    seen="as fedloru",
)
def pfedloru(p: Problem, f: Fields) -> Found:
    common, big_w = _start(p)
    own = [within(c, "h") for c in p.clients]
    alpha, alpha_own = f["alpha"], f["alpha_own"]
    for t in p.times:
        sent = []
        for i in p.asked[t]:
            own[i] = fit(
                f,
                lambda w, b: loss(_plain(common | w, big_w, alpha, alpha_own), b),
                own[i],
                p.batches(t, i, f["personal_epochs"]),
            )
            sent.append(
                fit(
                    f,
                    lambda w, b: loss(_plain(w | own[i], big_w, alpha, alpha_own), b),
                    common,
                    p.batches(t, i, f["global_epochs"]),
                )
            )
        common = mean(sent, weigh(p, f, p.asked[t]))
        common, big_w = _accumulated(p, f, common, big_w, alpha, t)
    return under("common/W", big_w) | models([_plain(common | h, big_w, alpha, alpha_own) for h in own])


@reference(
    "mfedloru",
    "Algorithm 3, eq. (9) and (33)",
    {"rank": 4, "tau": 2, "ranks": [1, 2, 4]},
    {"rank": 4, "tau": 1, "ranks": [1, 3], "alpha_inner_by_rank": True, "reinit": "momentum_A"},
    seen="how factors are nested and drawn",
)
def mfedloru(p: Problem, f: Fields) -> Found:
    common, big_w = _start(p)
    for t in p.times:
        sent = []
        for i in p.asked[t]:
            rank = f["ranks"][i % len(f["ranks"])]
            inner = {}
            if rank < f["rank"]:  # who affords r trains A and B themselves; A_u and B_d have deviation 1/√r_k
                inner = {k: z / math.sqrt(rank) for k, z in p.drawn["inner"][t, i].items()}
                inner |= {f"{a}.A_d": torch.zeros(len(common[f"{a}.A"]), rank, dtype=p.x.dtype) for a in ADAPTED}
                inner |= {f"{a}.B_u": torch.zeros(rank, common[f"{a}.B"].shape[1], dtype=p.x.dtype) for a in ADAPTED}
            alpha = f["alpha_inner"] * (rank if f["alpha_inner_by_rank"] else 1)
            fixed = {k: v for k, v in common.items() if inner and k.split(".")[1] in ("A", "B")}

            def made(w: Weights, fixed: Weights = fixed, alpha: float = alpha) -> Weights:
                if not fixed:
                    return w
                nested = {k: v for k, v in w.items() if k in common}
                for a in ADAPTED:
                    nested[f"{a}.A"] = fixed[f"{a}.A"] + alpha * w[f"{a}.A_d"] @ w[f"{a}.A_u"]
                    nested[f"{a}.B"] = fixed[f"{a}.B"] + alpha * w[f"{a}.B_d"] @ w[f"{a}.B_u"]
                return nested

            free = {k: v for k, v in common.items() if k not in fixed} | inner
            w = fit(f, lambda w, b: loss(_plain(made(w), big_w, f["alpha"]), b), free, p.batches(t, i))
            sent.append(made(w))
        common = mean(sent, weigh(p, f, p.asked[t]))
        common, big_w = _accumulated(p, f, common, big_w, f["alpha"], t)
    return under("common/W", big_w) | models([_plain(common, big_w, f["alpha"])] * len(p.train))


def _with_own_pair(w: Weights, alpha: float) -> Weights:
    """W + α_p L U with W trained."""
    return _plain(w, only(w, [f"{a}.weight" for a in ADAPTED]), 0.0, alpha)


@reference(
    "pfedlora1",
    "Algorithm 4 of FedLoRU's paper, variant (1)",
    {"private_head": False},
    {"private_head": False, "rank": 3, "alpha": 0.5, "personal_epochs": 2, "global_epochs": 1},
)
def pfedlora1(p: Problem, f: Fields) -> Found:
    common, own = within(p.server, "theta"), [within(c, "h") for c in p.clients]
    for t in p.times:
        sent = []
        for i in p.asked[t]:
            first, second = p.batches(t, i, f["personal_epochs"]), p.batches(t, i, f["global_epochs"])
            own[i] = fit(f, lambda w, b: loss(_with_own_pair(common | w, f["alpha"]), b), own[i], first)
            sent.append(fit(f, lambda w, b: loss(_with_own_pair(w | own[i], f["alpha"]), b), common, second))
        common = mean(sent, weigh(p, f, p.asked[t]))
    return under("server/theta", common) | models([_with_own_pair(common | h, f["alpha"]) for h in own])


@reference(
    "pfedlora2",
    "Algorithm 4 of FedLoRU's paper, variant (2)",
    {"private_head": False},
    {"private_head": False, "rank": 3, "alpha": 0.5},
)
def pfedlora2(p: Problem, f: Fields) -> Found:
    common, own = within(p.server, "theta"), [within(c, "h") for c in p.clients]
    for t in p.times:
        sent = []
        for i in p.asked[t]:
            w = fit(f, lambda w, b: loss(_with_own_pair(w, f["alpha"]), b), common | own[i], p.batches(t, i))
            own[i] = only(w, own[i])
            sent.append(only(w, common))
        common = mean(sent, weigh(p, f, p.asked[t]))
    return under("server/theta", common) | models([_with_own_pair(common | h, f["alpha"]) for h in own])
