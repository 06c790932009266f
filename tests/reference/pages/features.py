"""Methods that work on features: prototypes, alignment, discriminants, distillation, common extractors."""

from __future__ import annotations

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
    features,
    fit,
    forward,
    gradient,
    loss,
    mean,
    models,
    only,
    reference,
    shortened,
    step,
    under,
    weigh,
    within,
)
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, one_hot, softmax

PLAIN = {"momentum": 0.0, "weight_decay": 0.0}


def _class_means(w: Weights, b: Batch, classes: int) -> tuple[Tensor, Tensor]:
    """Mean feature of every class, and how many examples it has."""
    z, members = features(w, b[0]), one_hot(b[1], classes).to(b[0].dtype)
    n = members.sum(0)
    return members.T @ z / n.clamp_min(1)[:, None], n


def _near(p: Problem, f: Fields, w: Weights, known: Tensor, at: Tensor, t: int, i: int) -> Weights:
    """Training on cross-entropy + λ·MSE(features, prototype of their class), where there is one."""

    def objective(w: Weights, b: Batch) -> Tensor:
        far = ((features(w, b[0]) - at[b[1]]) ** 2).mean(1) * known[b[1]]
        return loss(w, b) + f["lam"] * far.mean()

    return fit(f, objective, w, p.batches(t, i))


@reference(
    "fedproto",
    "description and an older plain script: cross-entropy + λ·MSE to the prototypes, weighted by class counts",
    {},
    {"lam": 0.3, "weighting": "uniform"},
)
def fedproto(p: Problem, f: Fields) -> Found:
    own, at = [p.start for _ in p.ids], torch.zeros_like(p.server["p"])
    known = torch.zeros(p.classes, dtype=p.x.dtype)
    for t in p.times:
        total, count = torch.zeros_like(at), torch.zeros_like(known)
        for i in p.asked[t]:
            own[i] = _near(p, f, own[i], known, at, t, i)
            c, n = _class_means(own[i], p.all(i), p.classes)
            n = n if f["weighting"] == "samples" else (n > 0).to(n.dtype)
            total, count = total + n[:, None] * c, count + n
        at = torch.where(count[:, None] > 0, total / count.clamp_min(1)[:, None], at)
        known = ((known > 0) | (count > 0)).to(known.dtype)
    return {"server/p": at} | models(own)


@reference(
    "fedtgp",
    "description: a generator trained with an adaptive margin",
    {"server_epochs": 20},
    {"server_epochs": 10, "lam": 0.3, "tau": 0.5, "lr_server": 0.05},
)
def fedtgp(p: Problem, f: Fields) -> Found:
    own, at, g = [p.start for _ in p.ids], torch.zeros_like(p.server["p"]), within(p.server, "g")
    known = torch.zeros(p.classes, dtype=p.x.dtype)

    def made(g: Weights) -> Tensor:
        return torch.relu(g["e.weight"] @ g["1.weight"].T + g["1.bias"]) @ g["2.weight"].T + g["2.bias"]

    for t in p.times:
        sent, of = [], []
        for i in p.asked[t]:
            own[i] = _near(p, f, own[i], known, at, t, i)
            c, n = _class_means(own[i], p.all(i), p.classes)
            of += [k for k in range(p.classes) if n[k] > 0]
            sent += [c[k] for k in range(p.classes) if n[k] > 0]
        up, y = torch.stack(sent), torch.tensor(of)
        centre = torch.stack([up[y == k].mean(0) for k in range(p.classes)])
        apart = torch.cdist(centre, centre, compute_mode="donot_use_mm_for_euclid_dist") + torch.diag(
            torch.full((p.classes,), torch.inf, dtype=up.dtype)
        )
        margin = min(float(apart.min(1).values.max()), f["tau"])

        def objective(g: Weights, b: Batch, margin: float = margin) -> Tensor:
            far = (b[0][:, None] - made(g)[None]).norm(dim=2)
            return cross_entropy(-(far + margin * one_hot(b[1], p.classes)), b[1])

        rate = f["lr"] if f["lr_server"] is None else f["lr_server"]
        assert len(y) <= f["server_batch"]  # one minibatch: its order does not matter
        g = fit(PLAIN, objective, g, [(up, y)] * f["server_epochs"], rate)
        at, known = made(g).detach(), torch.ones_like(known)
    return {"server/p": at} | models(own)


@reference(
    "flute",
    "description and an older plain script: the form for networks, with the NC regulariser",
    {},
    {"head_epochs": 2, "rep_epochs": 1, "lam_1": 0.5, "lam_3": 0.01, "lr_server": 0.1},
)
def flute(p: Problem, f: Fields) -> Found:
    body, heads, size = only(p.start, BODY), [only(p.start, HEAD) for _ in p.ids], p.classes

    def nc(w: Tensor, present: Tensor) -> Tensor:
        gram = w @ w.T
        ideal = (torch.eye(size, dtype=w.dtype) - 1 / size) / (size - 1) ** 0.5 * torch.outer(present, present)
        return (gram / gram.norm() - ideal).norm()

    for t in p.times:
        sent, held = [], {i: torch.bincount(p.all(i)[1], minlength=size).gt(0).to(p.x.dtype) for i in p.ids}
        for i in p.asked[t]:

            def objective(w: Weights, b: Batch, i: int = i) -> Tensor:
                m = w["4.weight"]
                return loss(w, b) + f["lam_1"] * nc(m, held[i]) + f["lam_2"] * (m**2).sum()

            h = fit(f, lambda h, b: objective(body | h, b), heads[i], p.batches(t, i, f["head_epochs"]))
            w = fit(
                f,
                lambda w, b: objective(w, b) + f["lam_3"] * (features(w, b[0]) ** 2).sum(),
                body | h,
                p.batches(t, i, f["rep_epochs"]),
            )
            heads[i] = only(w, HEAD)
            sent.append(only(w, BODY))
        body = mean(sent, weigh(p, f, p.asked[t]))
        for i in p.asked[t]:  # one server step on the mean of NC over the heads received
            g = gradient(lambda h: nc(h["4.weight"], held[i]) / len(p.asked[t]), heads[i])
            heads[i] = step(heads[i], g, f["lr_server"])
    return under("server/theta", body) | models([body | h for h in heads])


@reference(
    "fedas",
    "description: alignment, joint training, Fisher weights",
    {},
    {"fisher": False, "align_epochs": 2, "lr_align": 0.1},
)
def fedas(p: Problem, f: Fields) -> Found:
    body, last, heads = only(p.start, BODY), {}, [only(p.start, HEAD) for _ in p.ids]

    def aligned(i: int, t: int) -> Weights:
        if i not in last:
            return body
        at, _ = _class_means(last[i], p.all(i), p.classes)

        def objective(w: Weights, b: Batch) -> Tensor:
            c, n = _class_means(w, b, p.classes)
            return (((c - at) ** 2).mean(1) * (n > 0)).sum()

        return fit(PLAIN, objective, body, p.batches(t, i, f["align_epochs"]), f["lr_align"])

    def trace(w: Weights, i: int) -> float:
        rows = p.train[i].split(p.drawn["size"])
        return sum(float(sum((g**2).sum() for g in gradient(lambda q: loss(q, p.at(r)), w).values())) for r in rows)

    for t in p.times:
        sent, weights = [], []
        for i in p.asked[t]:
            w = fit(f, loss, aligned(i, t) | heads[i], p.batches(t, i))
            last[i], heads[i] = only(w, BODY), only(w, HEAD)
            sent.append(last[i])
            weights.append(trace(w, i) if f["fisher"] else float(len(p.train[i])))
        body = mean(sent, weights)
    return under("server/theta", body) | models([aligned(i, p.rounds) | heads[i] for i in p.ids])


@reference(
    "pfedfda",
    "description: LDA head, local and global statistics interpolated by β",
    {},
    {"single_beta": True, "lr": 0.03},
    {"beta": 0.8, "ridge": 0.05, "epsilon": 0.01},
    seen="how β is searched for",
)
def pfedfda(p: Problem, f: Fields) -> Found:
    body, mu, dim = only(p.start, BODY), p.server["mu"], p.server["mu"].shape[1]
    upper = torch.triu_indices(dim, dim)
    big_s = torch.zeros(dim, dim, dtype=mu.dtype)
    big_s[upper[0], upper[1]] = p.server["S"]
    big_s, eye = big_s + big_s.T - big_s.diag().diag(), torch.eye(dim, dtype=mu.dtype)

    def discriminant(mu: Tensor, big_s: Tensor, i: int) -> Weights:
        n = torch.bincount(p.all(i)[1], minlength=p.classes).to(mu.dtype)
        prior = n / n.sum() + 1e-4
        shrunk = (1 - f["epsilon"]) * big_s + f["epsilon"] * big_s.trace() / dim * eye
        coefficients = torch.linalg.solve(shrunk, mu.T).T
        return {"4.weight": coefficients, "4.bias": -(mu * coefficients).sum(1) / 2 + (prior / prior.sum()).log()}

    def estimated(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        members = one_hot(y, p.classes).to(z.dtype)
        n = members.sum(0)[:, None]
        own = torch.where(n > 2, members.T @ z / n.clamp_min(1), mu)
        far = z - own[y]
        return own, far.T @ far / max(len(y) - 1, 1) + f["ridge"] * eye

    def between(own: tuple[Tensor, Tensor], beta: Tensor) -> tuple[Tensor, Tensor]:
        return beta[0] * own[0] + (1 - beta[0]) * mu, beta[1] * own[1] + (1 - beta[1]) * big_s

    def blended(w: Weights, i: int) -> tuple[Tensor, Tensor]:
        x, y = p.all(i)
        z = features(w, x)
        if f["beta"] is not None:
            return between(estimated(z, y), torch.tensor([f["beta"]] * 2, dtype=z.dtype))
        turn = torch.stack([(y[: k + 1] == c).sum() % 2 for k, c in enumerate(y)]) == 1  # every other one of a class
        halves = [(estimated(z[part], y[part]), z[~part], y[~part]) for part in (turn, ~turn)]

        def badness(beta: Tensor) -> float:
            heads = [(discriminant(*between(own, beta), i), held, of) for own, held, of in halves]
            return sum(float(cross_entropy(a @ h["4.weight"].T + h["4.bias"], c, reduction="sum")) for h, a, c in heads)

        ticks = torch.linspace(0, 1, 5, dtype=z.dtype)
        grid = torch.stack([ticks, ticks], 1) if f["single_beta"] else torch.cartesian_prod(ticks, ticks)
        best = min(grid, key=badness)  # a grid, then a finer one, for the paper's L-BFGS
        return between(estimated(z, y), min([best, *(best + (grid - 0.5) / 4).clamp(0, 1)], key=badness))

    for t in p.times:
        sent = []
        for i in p.asked[t]:
            head = discriminant(mu, big_s, i)
            w = fit(f, lambda w, b: loss(w | head, b), body, p.batches(t, i))
            own_mu, own_s = blended(w, i)
            sent.append(w | {"mu": own_mu, "S": own_s})
        met = mean(sent, weigh(p, f, p.asked[t]))
        body, mu, big_s = only(met, BODY), met["mu"], met["S"]
    result = under("server/theta", body) | {"server/mu": mu, "server/S": big_s[upper[0], upper[1]]}
    return result | models([body | discriminant(*blended(body, i), i) for i in p.ids])


@reference(
    "fedkd",
    "description and an older plain script: mutual distillation, messages cut by singular values",
    {},
    {"clip": 0.5, "distill": 0.4, "energy_start": 0.95, "energy_end": 0.6, "energy_rounds": 2},
    seen="how the share of energy rises",
)
def fedkd(p: Problem, f: Fields) -> Found:
    mentee, mentor = p.start, [p.start for _ in p.ids]
    bridge = [c["W"] for c in p.clients]

    def objective(w: dict[str, Tensor], b: Batch) -> Tensor:
        big, small = within(w, "v"), within(w, "theta")
        one, other = forward(big, b[0]), forward(small, b[0])
        a, c = cross_entropy(one, b[1]), cross_entropy(other, b[1])
        apart = ((features(big, b[0]) - features(small, b[0]) @ w["W"].T) ** 2).mean()
        to_small = kl_div(log_softmax(one, 1), softmax(other, 1), reduction="batchmean")
        to_big = kl_div(log_softmax(other, 1), softmax(one, 1), reduction="batchmean")
        return a + c + f["distill"] * (to_small + to_big + 2 * apart) / (a + c)

    for t in p.times:
        energy = f["energy_start"] + (f["energy_end"] - f["energy_start"]) * min(1.0, (t - 1) / f["energy_rounds"])
        sent, got = [], {k: shortened(v, energy) for k, v in mentee.items()}
        for i in p.asked[t]:
            w = under("v", mentor[i]) | under("theta", got) | {"W": bridge[i]}
            for b in p.batches(t, i):
                g = gradient(lambda q: objective(q, b), w)
                for part in ("v/", "theta/", "W"):  # each clipped by its own norm
                    names = [k for k in g if k.startswith(part)]
                    norm = sum((g[k] ** 2).sum() for k in names) ** 0.5
                    g |= {k: g[k] * min(1.0, float(f["clip"] / (norm + 1e-6))) for k in names}
                w = step(w, g, f["lr"])
            mentor[i], bridge[i] = within(w, "v"), w["W"]
            sent.append({k: shortened(v, energy) for k, v in within(w, "theta").items()})
        mentee = mean(sent, weigh(p, f, p.asked[t]))
    return under("server/theta", mentee) | models(mentor)


@reference(
    "pfedes",
    "description: model on (1−μ)·ℓ(x) + μ·ℓ(g(x)), then g on ℓ(g(x))",
    {},
    {"mu": 0.2, "lr_extractor": 0.02},
    seen="the extractor's activation",
)
def pfedes(p: Problem, f: Fields) -> Found:
    own, g = [p.start for _ in p.ids], within(p.server, "g")

    def turned(g: Weights, x: Tensor) -> Tensor:
        return torch.relu(x @ g["0.weight"].T + g["0.bias"]) @ g["1.weight"].T + g["1.bias"]

    for t in p.times:
        sent = []
        for i in p.asked[t]:
            own[i] = fit(
                f,
                lambda w, b: (1 - f["mu"]) * loss(w, b) + f["mu"] * loss(w, (turned(g, b[0]), b[1])),
                own[i],
                p.batches(t, i),
            )
            sent.append(
                fit(f, lambda q, b: loss(own[i], (turned(q, b[0]), b[1])), g, p.batches(t, i), f["lr_extractor"])
            )
        g = mean(sent, weigh(p, f, p.asked[t]))
    return under("server/g", g) | models(own)


@reference(
    "pfedafm",
    "description: α∘R(own) + (1−α)∘R(common), then the common one alone",
    {},
    {"lr_alpha": 0.7, "lr_common": 0.03},
)
def pfedafm(p: Problem, f: Fields) -> Found:
    own, common = [p.start for _ in p.ids], only(p.start, BODY)
    alpha = [torch.ones_like(p.start["4.weight"][0]) for _ in p.ids]

    def mixed(w: Weights, a: Tensor, common: Weights, x: Tensor) -> Tensor:
        return (a * features(w, x) + (1 - a) * features(common, x)) @ w["4.weight"].T + w["4.bias"]

    for t in p.times:
        sent = []
        for i in p.asked[t]:
            for b in p.batches(t, i):
                at = own[i] | {"alpha": alpha[i]}
                g = gradient(lambda q: cross_entropy(mixed(q, q["alpha"], common, b[0]), b[1]), at)
                alpha[i] = (alpha[i] - f["lr_alpha"] * g["alpha"]).clamp(0, 1)
                own[i] = step(own[i], only(g, NAMES), f["lr"])
            head = only(own[i], HEAD)
            sent.append(fit(f, lambda q, b: loss(q | head, b), common, p.batches(t, i), f["lr_common"]))
        common = mean(sent, weigh(p, f, p.asked[t]))
    result = under("server/w", common) | {f"client {i}/alpha": alpha[i] for i in p.ids}
    return result | {f"outputs {i}": mixed(own[i], alpha[i], common, p.x) for i in p.ids}
