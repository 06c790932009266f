"""Yardsticks, and methods of which some layers are shared and others private."""

from __future__ import annotations

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
    loss,
    mean,
    models,
    only,
    reference,
    square,
    under,
    weigh,
)
from torch import Tensor

MOMENTUM = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.02}


@reference("local", "SGD on a client's own examples in the rounds that ask it", {}, MOMENTUM)
def local(p: Problem, f: Fields) -> Found:
    own = [p.start for _ in p.ids]
    for t in p.times:
        for i in p.asked[t]:
            own[i] = fit(f, loss, own[i], p.batches(t, i))
    return models(own)


@reference("fedavg", "description: local epochs from w, then the weighted mean", {}, MOMENTUM, {"weighting": "uniform"})
def fedavg(p: Problem, f: Fields) -> Found:
    w = p.start
    for t in p.times:
        sent = [fit(f, loss, w, p.batches(t, i)) for i in p.asked[t]]
        w = mean(sent, weigh(p, f, p.asked[t]))
    return under("server/theta", w) | models([w] * len(p.train))


@reference("fedprox", "description: F_k(w) + μ/2 ‖w − w^t‖²", {}, {"mu": 0.7})
def fedprox(p: Problem, f: Fields) -> Found:
    w = p.start
    for t in p.times:
        near, sent = w, []
        for i in p.asked[t]:
            sent.append(fit(f, lambda a, b: loss(a, b) + f["mu"] / 2 * square(a, near), w, p.batches(t, i)))
        w = mean(sent, weigh(p, f, p.asked[t]))
    return under("server/theta", w) | models([w] * len(p.train))


@reference("oracle", "FedAvg inside each true group", {})
def oracle(p: Problem, f: Fields) -> Found:
    of = p.groups.tolist()
    w = [p.start for _ in range(max(of) + 1)]
    for t in p.times:
        for g in range(len(w)):
            members = [i for i in p.asked[t] if of[i] == g]
            if members:
                w[g] = mean([fit(f, loss, w[g], p.batches(t, i)) for i in members], weigh(p, f, members))
    return models([w[g] for g in of])


def _shared(p: Problem, f: Fields, names: tuple[str, ...]) -> Found:
    """Joint training; `names` are averaged, the rest stays."""
    common, own = only(p.start, names), [{k: v for k, v in p.start.items() if k not in names} for _ in p.ids]
    for t in p.times:
        sent = []
        for i in p.asked[t]:
            w = fit(f, loss, common | own[i], p.batches(t, i))
            own[i] = only(w, own[i])
            sent.append(only(w, names))
        common = mean(sent, weigh(p, f, p.asked[t]))
    return under("server/theta", common) | models([common | h for h in own])


@reference(
    "fedper", "description: joint training, base layers averaged", {}, MOMENTUM, {"personal_layers": ["2.", "4."]}
)
def fedper(p: Problem, f: Fields) -> Found:
    personal = tuple(f["personal_layers"]) or HEAD
    return _shared(p, f, tuple(k for k in NAMES if not k.startswith(personal)))


@reference(
    "lg-fedavg", "description: joint training, head averaged, from the common start", {}, {"personal_layers": ["0."]}
)
def lg_fedavg(p: Problem, f: Fields) -> Found:
    personal = tuple(f["personal_layers"]) or BODY
    return _shared(p, f, tuple(k for k in NAMES if not k.startswith(personal)))


def _two_phases(p: Problem, f: Fields, head_epochs: int, body_epochs: int | None, l2: float = 0.0) -> Found:
    """Head first with the body fixed, then the body with the head fixed."""
    body, heads = only(p.start, BODY), [only(p.start, HEAD) for _ in p.ids]

    def on_head(h: Weights, b: Batch) -> Tensor:
        return loss(body | h, b) + l2 / 2 * square(h)

    for t in p.times:
        sent = []
        for i in p.asked[t]:
            heads[i] = fit(f, on_head, heads[i], p.batches(t, i, head_epochs))
            sent.append(fit(f, lambda a, b: loss(a | heads[i], b), body, p.batches(t, i, body_epochs)))
        body = mean(sent, weigh(p, f, p.asked[t]))
    return under("server/theta", body) | models([body | h for h in heads])


@reference("fedrep", "description: head, then body, each with the other fixed", {}, {"head_epochs": 3, **MOMENTUM})
def fedrep(p: Problem, f: Fields) -> Found:
    return _two_phases(p, f, f["head_epochs"], f["body_epochs"])


@reference("fedalt", "description: v, then u; server SGD of step 1", {}, {"v_epochs": 2, "u_epochs": 1, "l2": 0.3})
def fedalt(p: Problem, f: Fields) -> Found:
    return _two_phases(p, f, f["v_epochs"], f["u_epochs"], f["l2"])


@reference(
    "fedsim",
    "description: u and v together; u^t − mean u_i is the server's gradient",
    {},
    {"server_lr": 0.7, "server_momentum": 0.5},
    {"l2": 0.3},
)
def fedsim(p: Problem, f: Fields) -> Found:
    body, heads = only(p.start, BODY), [only(p.start, HEAD) for _ in p.ids]
    speed = {k: 0 * v for k, v in body.items()}
    lr, momentum = f["server_lr"] or 1.0, f["server_momentum"] or 0.0
    for t in p.times:
        sent = []
        for i in p.asked[t]:
            w = fit(f, lambda a, b: loss(a, b) + f["l2"] / 2 * square(only(a, HEAD)), body | heads[i], p.batches(t, i))
            heads[i] = only(w, HEAD)
            sent.append(only(w, BODY))
        met = mean(sent, weigh(p, f, p.asked[t]))
        for k in body:  # u^t − mean of u_i is the gradient of the server's SGD
            speed[k] = momentum * speed[k] + (body[k] - met[k])
        body = {k: v - lr * speed[k] for k, v in body.items()}
    return under("server/theta", body) | models([body | h for h in heads])


@reference(
    "fedbabu",
    "description: body under a fixed head, fine-tuning before use",
    {},
    {"finetune": "head", "finetune_epochs": 2},
)
def fedbabu(p: Problem, f: Fields) -> Found:
    body, head = only(p.start, BODY), only(p.start, HEAD)
    for t in p.times:
        sent = [fit(f, lambda a, b: loss(a | head, b), body, p.batches(t, i)) for i in p.asked[t]]
        body = mean(sent, weigh(p, f, p.asked[t]))
    tuned, used = {"all": NAMES, "head": HEAD, "body": BODY}[f["finetune"]], []
    for i in p.ids:
        w = body | head
        more = fit(f, lambda a, b: loss(w | a, b), only(w, tuned), p.batches(p.rounds, i, f["finetune_epochs"]))
        used.append(w | more)
    return under("server/theta", body) | models(used)


def _tuned(p: Problem, f: Fields, names: tuple[str, ...]) -> Found:
    """FedAvg, then a fit of these parameters before use, held near the received ones by l2/2 ‖w − w^T‖²."""
    w, used = p.start, []
    for t in p.times:
        w = mean([fit(f, loss, w, p.batches(t, i)) for i in p.asked[t]], weigh(p, f, p.asked[t]))
    near = only(w, names)
    for i in p.ids:
        some = p.batches(p.rounds, i, f["finetune_epochs"])
        used.append(
            w | fit(f, lambda a, b: loss(w | a, b) + f["l2"] / 2 * square(a, near), near, some, f["lr_finetune"])
        )
    return under("server/theta", w) | models(used)


TUNED = {"finetune_epochs": 3, "lr_finetune": 0.03, "l2": 0.5}


@reference("fedavg-ft", "description: FedAvg, then local training before use", {}, TUNED)
def fedavg_ft(p: Problem, f: Fields) -> Found:
    return _tuned(p, f, NAMES)


@reference("fedavg-head", "description: FedAvg, then the head alone before use", {}, TUNED)
def fedavg_head(p: Problem, f: Fields) -> Found:
    return _tuned(p, f, HEAD)
