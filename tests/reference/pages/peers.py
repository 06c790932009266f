"""Clusters and peers: methods whose clients get different averages, or one another's models."""

from __future__ import annotations

import math

import torch
from plain import (
    BODY,
    HEAD,
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
    weigh,
    within,
)
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_similarity, one_hot


def _vector(w: Weights) -> Tensor:
    return torch.cat([w[k].flatten() for k in NAMES])


def _two_parts(far: Tensor, reach: str) -> list[int]:
    """The smaller part of two, by agglomeration: the clusters whose farthest (or nearest) members are closest join."""
    parts, choose = [[i] for i in range(len(far))], max if reach == "complete" else min
    while len(parts) > 2:
        pairs = [(a, b) for a in range(len(parts)) for b in range(a)]
        a, b = min(pairs, key=lambda ab: choose(float(far[i, j]) for i in parts[ab[0]] for j in parts[ab[1]]))
        parts[b] += parts.pop(a)
    return min(parts, key=len)


@reference(
    "cfl",
    "description: split by cosines where ‖mean Δ‖ < ε₁ and max ‖Δ‖ > ε₂",
    {"start_round": 2, "eps_1": 100.0, "eps_2": 0.0},
    {"start_round": 1, "eps_1": 100.0, "eps_2": 0.0, "linkage": "single", "weighting": "samples"},
    {"start_round": 1, "eps_1": 100.0, "eps_2": 0.32},
    {"start_round": 1, "eps_1": 100.0, "eps_2": 0.0, "gamma_max": 0.7},
    {"start_round": 1},
    seen="the server's step",
)
def cfl(p: Problem, f: Fields) -> Found:
    model, cluster, last, first = [p.start], [0 for _ in p.ids], {}, None
    for t in p.times:
        heard, asked = set(last), p.asked[t]
        trained = {i: fit(f, loss, model[cluster[i]], p.batches(t, i)) for i in asked}
        change = {i: {k: w[k] - model[cluster[i]][k] for k in NAMES} for i, w in trained.items()}
        last |= change

        def alike(i: int, j: int) -> float:
            return float(cosine_similarity(_vector(last[i]), _vector(last[j]), dim=0))

        divided = set()
        for c in sorted({cluster[i] for i in asked}):
            here = [i for i in asked if cluster[i] == c]
            a = float(_vector(mean([change[i] for i in here], weigh(p, f, here))).norm())
            m = max(float(_vector(change[i]).norm()) for i in here)
            first = m if first is None else first
            eps_1, eps_2 = (q * first if f[name] == "auto" else f[name] for name, q in (("eps_1", 0.4), ("eps_2", 0.8)))
            known = [i for i in p.ids if cluster[i] == c and i in last]
            if t >= f["start_round"] and len(known) > f["min_size"] and a < eps_1 and m > eps_2:
                far = torch.tensor([[1 - alike(i, j) for j in known] for i in known])
                part = _two_parts(far, f["linkage"])
                across = min(float(far[k, j]) for k in part for j in range(len(known)) if j not in part)
                if f["gamma_max"] is not None and not math.sqrt(max(0.0, across) / 2) > f["gamma_max"]:
                    continue
                for k in part:
                    cluster[known[k]] = len(model)
                divided |= {c, len(model)}
                model.append(model[c])
        moved = {c: [i for i in asked if cluster[i] == c] for c in range(len(model))}
        before = len(model) - len(divided) // 2
        for i in asked:  # never heard before, and left behind by an earlier split: to the cluster most alike
            if before > 1 and i not in heard and cluster[i] not in divided:
                near = [[alike(i, j) for j in heard if cluster[j] == c] for c in range(len(model))]
                cluster[i] = max(range(len(model)), key=lambda c: sum(near[c]) / max(1, len(near[c])))
        for c, members in moved.items():
            if members:
                way = mean([change[i] for i in members], weigh(p, f, members))
                model[c] = {k: model[c][k] + way[k] for k in NAMES}
    return models([model[c] for c in cluster])


@reference(
    "ifca",
    "description and an older plain script: options I and II, and common bodies",
    {},
    {"clusters": 2, "averaging": "gradient"},
    {"clusters": 2, "clustered": "head"},
)
def ifca(p: Problem, f: Fields) -> Found:
    stacked = within(p.server, "theta")
    rows = {k for k in NAMES if stacked[k].ndim > p.start[k].ndim}  # what forms clusters
    model = [{k: stacked[k][j] if k in rows else stacked[k] for k in NAMES} for j in range(f["clusters"])]

    def choose(i: int) -> int:
        return min(range(len(model)), key=lambda j: float(loss(model[j], p.all(i))))

    for t in p.times:
        sent = {j: [] for j in range(len(model))}
        for i in p.asked[t]:
            j = choose(i)
            if f["averaging"] == "gradient":
                sent[j].append(step(model[j], gradient(lambda w: loss(w, p.all(i)), model[j]), f["lr"]))
            else:
                sent[j].append(fit(f, loss, model[j], p.batches(t, i)))
        body = mean([only(w, BODY) for each in sent.values() for w in each])
        for j, each in sent.items():
            if not each:
                continue
            if f["averaging"] == "gradient":
                model[j] = {k: model[j][k] + sum(w[k] - model[j][k] for w in each) / len(p.asked[t]) for k in NAMES}
            else:
                model[j] = mean(each)
        if f["clustered"] == "head":
            model = [w | body for w in model]
    return models([model[choose(i)] for i in p.ids])


@reference(
    "fedfomo",
    "description and an older plain script: weights by loss on held-out examples, affinities, ε-greedy",
    {},
    {"models": 2, "validation": 0.4, "epsilon": 0.9, "epsilon_decay": 0.2},
    seen="the whole method",
)
def fedfomo(p: Problem, f: Fields) -> Found:
    own, sent, size = [p.start for _ in p.ids], [p.start for _ in p.ids], len(p.train)
    liking, seen, many = torch.eye(size, dtype=p.x.dtype), set(), min(f["models"], size - 1)

    def chosen(t: int, i: int) -> list[int]:
        order = sorted((j for j in p.ids if j != i), key=lambda j: (j not in seen, -float(liking[i, j]) * (j in seen)))
        coins, places = p.drawn["explore"][t, i]
        epsilon = max(0.0, f["epsilon"] - f["epsilon_decay"] * (t - 1))
        curious = int((coins[:many] < epsilon).sum())
        rest = order[many - curious :]
        return order[: many - curious] + [rest[k] for k in places[: len(rest)].argsort()[:curious].tolist()]

    for t in p.times:
        new, gained = {}, {}
        for i in p.asked[t]:
            held = p.at(p.drawn["held"][i])
            here = float(loss(own[i], held))
            w = {
                j: (here - float(loss(sent[j], held))) / (float(square(sent[j], own[i])) ** 0.5 + 1e-5)
                for j in chosen(t, i)
            }
            total = sum(max(0.0, v) for v in w.values())
            mixed = own[i]
            if total > 0:
                mixed = {k: v + sum(max(0.0, w[j]) / total * (sent[j][k] - v) for j in w) for k, v in own[i].items()}
            new[i] = fit(f, loss, mixed, [p.at(rows) for rows in p.drawn["train"][t, i]])
            gained[i] = w
        for i in p.asked[t]:
            own[i] = sent[i] = new[i]
            seen.add(i)
            for j, v in gained[i].items():
                liking[i, j] += v
    return {"server/P": liking} | models(own)


@reference(
    "pfedsim",
    "description and an older plain script: FedAvg, then bodies mixed by −log(1 − cos) of classifiers",
    {"warmup_rounds": 1},
    {"warmup_rounds": 2},
)
def pfedsim(p: Problem, f: Fields) -> Found:
    w = p.start
    for t in p.times[: f["warmup_rounds"]]:
        w = mean([fit(f, loss, w, p.batches(t, i)) for i in p.asked[t]], weigh(p, f, p.asked[t]))
    own, s = [w for _ in p.ids], torch.zeros(len(p.train), len(p.train), dtype=p.x.dtype)

    def mixed(i: int) -> Weights:
        near = s[i].clone()
        near[i] = 0.9999
        a = -torch.log(1 - near.clamp(max=0.9999))
        return mean([only(own[j], BODY) for j in p.ids], a.tolist()) | only(own[i], HEAD)

    for t in p.times[f["warmup_rounds"] :]:
        new = {i: fit(f, loss, mixed(i), p.batches(t, i)) for i in p.asked[t]}
        for i, trained in new.items():
            own[i] = trained
        for i in new:
            for j in new:
                rows = cosine_similarity(own[i]["4.weight"], own[j]["4.weight"], dim=1)
                s[i, j] = rows.mean().clamp_min(0)
    return models([mixed(i) for i in p.ids])


@reference(
    "fedcollab",
    "description: a discriminator per pair, coalitions by a bound, FedAvg inside",
    {"distance_rounds": 2, "distance_hidden": 4, "weight_of_samples": 1.0, "lr_distance": 2.0, "private_head": False},
    seen="the whole method",
)
def fedcollab(p: Problem, f: Fields) -> Found:
    size, big, first = len(p.train), f["distance_rounds"], p.drawn["discriminator"]
    pair = {(i, j): first for i in p.ids for j in range(i + 1, size)}
    d, label = torch.ones(size, size, dtype=p.x.dtype), p.classes / (p.classes - 1) ** 0.5
    d = d - torch.eye(size, dtype=d.dtype)
    met: set[tuple[int, int]] = set()

    def guess(w: Weights, b: Batch) -> Tensor:
        y = one_hot(b[1], p.classes).to(b[0].dtype) * label
        return torch.relu(b[0] @ w["x"] + w["b"] + 2 * y @ w["y"]) @ w["o"] + w["c"]

    for t in p.times[:big]:
        new = dict(pair)
        for i in p.asked[t]:
            for j in (j for j in p.asked[t] if j > i):
                sides, right = [], 0.0
                for who, side in ((i, 0.0), (j, 1.0)):

                    def wrong(w: Weights, b: Batch, side: float = side) -> Tensor:
                        g = guess(w, b)
                        return binary_cross_entropy_with_logits(g, torch.full_like(g, side))

                    right += float(((guess(pair[i, j], p.all(who)) > 0) == (side > 0)).double().mean())
                    plain = {"momentum": 0.0, "weight_decay": 0.0}
                    sides.append(fit(plain, wrong, pair[i, j], p.batches(t, who), f["lr_distance"]))
                new[i, j] = mean(sides)
                if t > 1:  # what was sent down has been trained
                    d[i, j] = d[j, i] = max(right - 1, 0.0, float(d[i, j]) if (i, j) in met else 0.0)
                    met.add((i, j))
        pair = new

    known = sorted({i for t in p.times[:big] for i in p.asked[t]})
    n = torch.tensor([float(len(p.train[i])) if i in known else 0.0 for i in p.ids], dtype=d.dtype)

    def bound(of: list[int]) -> float:
        total = 0.0
        for i in known:
            mates = [j for j in known if of[j] == of[i]]
            m = sum(float(n[j]) for j in mates)
            total += f["weight_of_samples"] / math.sqrt(m) + sum(float(n[j] / m * d[i, j]) for j in mates)
        return total / len(known)

    of, moved, sweep = list(p.ids), True, 0
    while moved:  # from all alone, single moves that lower the bound most, until none does
        moved = False
        for i in p.drawn["order"][sweep]:
            best, least = of[i], bound(of)
            for c in known:
                value = bound([*of[:i], c, *of[i + 1 :]])
                if value < least - 1e-12:
                    best, least, moved = c, value, True
            of[i] = best
        sweep += 1
    w = [p.start for _ in p.ids]
    for t in p.times[big:]:
        for c in set(of):
            members = [i for i in p.asked[t] if of[i] == c]
            if members:
                w[c] = mean([fit(f, loss, w[c], p.batches(t, i)) for i in members], weigh(p, f, members))
    return {"server/d": torch.where(_met(d, met), d, _unknown(d))} | models([w[c] for c in of])


def _met(d: Tensor, met: set[tuple[int, int]]) -> Tensor:
    found = torch.eye(len(d), dtype=torch.bool)
    for i, j in met:
        found[i, j] = found[j, i] = True
    return found


def _unknown(d: Tensor) -> Tensor:
    return -torch.ones_like(d)  # how the server writes down that a pair never met
