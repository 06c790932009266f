"""Runs a method of fedspan and its page on one small ragged federation, and compares what they end with.

This is the one module here that may import fedspan; pages import torch and numpy alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from plain import PAGES, Problem, forward
from torch import Tensor

from conftest import make_data, make_task
from fedspan import tree
from fedspan.layers import plain_weights
from fedspan.learn.batches import All, Amount, Epochs, Portion, Validation, draw
from fedspan.method.fields import build, flat
from fedspan.methods import METHODS
from fedspan.randomness import fold, generator, key, normal, uniform
from fedspan.simulation.settings import Settings, sample
from fedspan.simulation.simulator import Simulation

SEED, ROUNDS, SIZE, EPOCHS, CLIENTS, PASSES = 11, 3, 8, 2, 5, 10
TOLERANCE = 1e-10
"""The largest difference allowed between a page's numbers and fedspan's, relative to max(1, largest number)."""

PLACE = Path(__file__).resolve().parent
for _page in sorted((PLACE / "pages").glob("*.py")):
    importlib.import_module(f"pages.{_page.stem}")


def simulation(name: str, fields: dict[str, Any]) -> Simulation:
    """The run of fedspan, before its first round."""
    settings = Settings(
        participation=0.6, batch_size=SIZE, epochs=EPOCHS, workers=1, precision="float64", evaluate_every=100
    )
    method = build(METHODS[name], fields, name)
    return Simulation(method, *world(), rounds=ROUNDS, seed=SEED, settings=settings)


@cache
def world() -> tuple[Any, Any]:
    """A perceptron of 5-7-6-3 and five clients of very different sizes, in two groups that name classes differently."""
    return make_task(), make_data(clients=CLIENTS, seed=3)


def drawn_streams(sim: Simulation, client: int, t: int, plan: dict[str, Amount]) -> dict[str, list[Tensor]]:
    """Minibatches of a client in round t, as fedspan draws them."""
    own, held = sim.data.train[client], sim.data.validation[client]
    streams = draw(own, held, plan, seed=SEED, round=t, client=client, batch_size=SIZE, epochs=EPOCHS)
    return {s: [torch.from_numpy(row[row >= 0]) for row in rows] for s, rows in streams.items()}


def passes(sim: Simulation, client: int, t: int) -> list[list[Tensor]]:
    """PASSES shuffled passes over a client's examples in round t."""
    n, cut = len(sim.data.train[client]), drawn_streams(sim, client, t, {"s": Epochs(PASSES)})["s"]
    one = -(-n // min(SIZE, n))
    return [cut[k : k + one] for k in range(0, len(cut), one)]


def problem(name: str, sim: Simulation) -> Problem:
    """The run as plain tensors."""
    data, record, task = sim.data, sim.record, world()[0]
    ids, times = range(data.clients), range(1, ROUNDS + 1)
    return Problem(
        x=data.x.clone(),
        y=data.y.clone(),
        classes=3,
        train=[torch.from_numpy(rows) for rows in data.train],
        groups=data.groups.clone(),
        start={k: v.clone() for k, v in task.init().items()},
        rounds=ROUNDS,
        epochs=EPOCHS,
        asked={t: sample(data.clients, Settings(participation=0.6), SEED, t) for t in times},
        passes={(t, i): passes(sim, i, t) for t in times for i in ids},
        server=copied(record.server),
        clients=[copied(record.row(i)) for i in ids],
        common=copied(record.common),
        drawn=DRAWS.get(name, lambda sim: {})(sim),
    )


def copied(part: Any) -> dict[str, Tensor]:
    """A state by path, in memory of its own."""
    return {path: v.detach().clone() for path, v in tree.flatten(part).items()}


def found(sim: Simulation) -> dict[str, Tensor]:
    """What a run ended with: the server's state, the clients' states and models, by path."""
    result = {f"server/{k}": v for k, v in copied(sim.record.server).items()}
    result |= {f"common/{k}": v for k, v in copied(sim.record.common).items()}
    for i in range(sim.data.clients):
        result |= {f"client {i}/{k}": v for k, v in copied(sim.record.row(i)).items()}
        task, weights = sim.personal(i)
        if set(tree.flatten(weights)) >= set(task.init()):
            result |= {f"model {i}/{k}": v for k, v in copied(plain_weights(task.module, weights)).items()}
        result[f"outputs {i}"] = sim.engine.able.adapts.predict(task, weights, sim.data.x).detach()
    return result


def differences(name: str, fields: dict[str, Any], other: dict[str, Any] | None = None) -> dict[str, float]:
    """How far page and method are apart, by path; the page gets the `other` fields in their place.

    What the page returns and fedspan does not have, or a client without a model, is a failure.
    """
    sim = simulation(name, fields)
    given = problem(name, sim)
    sim.run()
    ours, theirs = found(sim), PAGES[name].run(given, {**flat(sim.engine.method), **(other or {})})
    missing = [path for path in theirs if path not in ours]
    assert not missing, f"{name}: fedspan has no {', '.join(missing)}; it has {', '.join(ours)}"
    for i in range(CLIENTS):
        assert any(path.startswith((f"model {i}/", f"outputs {i}")) for path in theirs), f"{name}: no model {i}"
    assert moved(given, theirs), f"{name}: nothing was trained"
    return {path: gap(ours[path], theirs[path]) for path in theirs}


def moved(given: Problem, theirs: dict[str, Tensor]) -> bool:
    """Whether training changed anything by more than rounding."""
    start = forward(given.start, given.x)
    if "outputs 0" in theirs:
        return any(float((theirs[f"outputs {i}"] - start).abs().max()) > 1e-3 for i in range(CLIENTS))
    return any(
        float((v - given.start[path.split("/", 1)[1]]).abs().max()) > 1e-3
        for path, v in theirs.items()
        if path.startswith("model ")
    )


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest number if that is above 1; infinite where a number is none."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} against {tuple(theirs.shape)}"
    if not ours.numel():
        return 0.0
    far = (ours.double() - theirs.double()).abs().max() / max(1.0, float(theirs.double().abs().max()))
    return float(far) if bool(far.isfinite()) else float("inf")


def portions(sim: Simulation) -> dict[str, Any]:
    """FedALA's share of a client's examples in every round, cut into minibatches."""
    share, parts = sim.engine.method.share, {}
    for t in range(1, ROUNDS + 1):
        for i in range(sim.data.clients):
            parts[t, i] = drawn_streams(sim, i, t, {"s": Portion(share)})["s"]
    return {"part": parts}


def coins(sim: Simulation) -> dict[str, Any]:
    """L2GD's coins: one per step of a round, the same for all clients."""
    k, p = sim.record.common["key"], sim.engine.method.p
    return {"coin": {t: (uniform(fold(k, t), (99,), torch.float64) < p).tolist() for t in range(1, ROUNDS + 1)}}


def factors(sim: Simulation) -> dict[str, Any]:
    """Standard normal numbers of FedLoRU's A after each round, and of mFedLoRU's A_u and B_d of each visit."""
    method, server, result = sim.engine.method, sim.record.server, {"A": {}, "inner": {}}
    names = [name.split(".")[0] for name in server["A"]]
    for t in range(1, ROUNDS + 1):
        if method.tau is not None:
            k = fold(fold(server["last"]["key"], t), 0)
            shapes = [v.shape for v in server["A"].values()]
            result["A"][t] = {f"{n}.A": normal(fold(k, j), shapes[j], torch.float64) for j, n in enumerate(names)}
        for i in (i for i in range(sim.data.clients) if isinstance(sim.capacity[i], int)):
            k, r = key(SEED, "visit", t, i), sim.capacity[i]
            both = {
                f"{n}.A_u": normal(fold(fold(k, 1), j), (r, method.rank), torch.float64) for j, n in enumerate(names)
            }
            both |= {
                f"{n}.B_d": normal(fold(fold(k, 2), j), (method.rank, r), torch.float64) for j, n in enumerate(names)
            }
            result["inner"][t, i] = both
    return result


def gumbel(sim: Simulation) -> dict[str, Any]:
    """PriSM's noise on the triples of every layer, for each visit."""
    k, result = sim.record.server["key"], {}
    for t in range(1, ROUNDS + 1):
        for i in range(sim.data.clients):
            noise = {}
            for j, (name, sigma) in enumerate(sim.record.server["sigma"].items()):
                u = uniform(fold(fold(fold(k, t), i), j), sigma.shape, torch.float64)
                noise[name.rstrip(".")] = -(-u.log()).log()
            result[t, i] = noise
    return {"gumbel": result}


def held_out(sim: Simulation) -> dict[str, Any]:
    """FedFOMO's held-out rows, its minibatches of the others, and the numbers by which it explores."""
    times, ids = range(1, ROUNDS + 1), range(sim.data.clients)
    share, start, result = (
        sim.engine.method.validation,
        sim.record.server["key"],
        {"explore": {}, "train": {}, "held": {}},
    )
    for t in times:
        for i in ids:
            both = drawn_streams(sim, i, t, {"train": Epochs(), "held": Validation(share)})
            result["train"][t, i], result["held"][i] = both["train"], torch.cat(both["held"])
            k = fold(fold(start, t), i)
            result["explore"][t, i] = uniform(fold(k, 0), (len(ids),)), uniform(fold(k, 1), (len(ids),))
    return result


def discriminator(sim: Simulation) -> dict[str, Any]:
    """FedCollab's common first discriminator, and in which order clients may change their coalition."""
    k, hidden, wide = sim.record.common["key"], sim.engine.method.distance_hidden, sim.data.x.shape[1]
    shapes = {"x": (wide, hidden), "y": (3, hidden), "o": (hidden, 1)}
    start = {n: normal(fold(k, j), s, torch.float64) / s[0] ** 0.5 for j, (n, s) in enumerate(shapes.items())}
    start |= {"o": start["o"][:, 0], "b": torch.zeros(hidden).double(), "c": torch.zeros(()).double()}
    first = range(1, sim.engine.method.distance_rounds + 1)
    known = sorted({i for t in first for i in sample(sim.data.clients, Settings(participation=0.6), SEED, t)})
    order = [generator(0, "coalitions", sweep).permutation(known).tolist() for sweep in range(20)]
    return {"discriminator": start, "order": order}


def mask_noise(sim: Simulation) -> dict[str, Any]:
    """LR-BPFL's normal numbers: a vector for every draw of every minibatch, and those of the models in use."""
    members, size = (
        sim.engine.method.members,
        sum(v.numel() for k, v in sim.record.row(0)["q"].items() if k.endswith("_mu")),
    )

    def drawn(k: Tensor, first: int) -> list[Tensor]:
        return [normal(fold(k, first + s), (size,), torch.float64) for s in range(members)]

    visits = {(t, i): key(SEED, "visit", t, i) for t in range(1, ROUNDS + 1) for i in range(sim.data.clients)}
    noise = {at: [drawn(fold(k, step), 1) for step in range(3 * EPOCHS)] for at, k in visits.items()}
    return {"noise": noise, "use": [drawn(visits[ROUNDS, i], 0) for i in range(sim.data.clients)]}


def factor_noise(sim: Simulation) -> dict[str, Any]:
    """WAFFLe's uniform numbers for z and v of every layer and minibatch."""
    sizes = {k.split(".")[0]: v.shape for k, v in sim.record.row(0)["q"].items() if k.endswith("logit")}

    def drawn(k: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        of = {a: fold(k, 2 * j + 1) for j, a in enumerate(sizes)}
        z = {a: uniform(of[a], shape, torch.float64) for a, shape in sizes.items()}
        return z, {a: uniform(fold(of[a], 1), shape, torch.float64) for a, shape in sizes.items()}

    visits = {(t, i): key(SEED, "visit", t, i) for t in range(1, ROUNDS + 1) for i in range(sim.data.clients)}
    return {"noise": {at: [drawn(fold(k, step)) for step in range(3 * EPOCHS)] for at, k in visits.items()}}


def parts_of_examples(sim: Simulation) -> dict[str, Any]:
    """Adaptive pFL-MF's parts of a client's examples: held out, kept, the halves of every round, and minibatches."""
    method, found = sim.engine.method, {}
    held: dict[str, Amount] = {"held": Validation(method.held_out, 4)} if method.chooses else {}
    for whole in (False, True):
        plan = {"train": Epochs(whole=whole), "half": All(method.cross_fit, whole), "kept": All()} | held
        for t in range(1, ROUNDS + 1):
            for i in range(sim.data.clients):
                drawn, name = drawn_streams(sim, i, t, plan), "whole " if whole else ""
                found.setdefault(f"{name}train", {})[t, i] = drawn["train"]
                found.setdefault(f"{name}half", {})[t, i] = torch.cat(drawn["half"])
                found.setdefault("kept", {})[i] = torch.cat(drawn["kept"])
                found.setdefault("held", {})[i] = torch.cat(drawn.get("held") or [torch.empty(0, dtype=torch.int64)])
    return found


DRAWS: dict[str, Callable[[Simulation], dict[str, Any]]] = {
    "fedala": portions,
    "fedas": lambda sim: {"size": SIZE},
    "fedcollab": discriminator,
    "fedfomo": held_out,
    "l2gd": coins,
    "lr-bpfl": mask_noise,
    "waffle": factor_noise,
    "pfl-mf-adaptive": parts_of_examples,
    "prism": gumbel,
    **dict.fromkeys(("fedloru", "fedlora", "pfedloru", "mfedloru"), factors),
}
