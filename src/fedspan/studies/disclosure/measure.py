"""Run a round of a method, attack what the server received, and say what was found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedspan import tree
from fedspan.learn.task import Task
from fedspan.method import Capacity, Discloses, Federation, Method
from fedspan.method.fields import with_keys
from fedspan.methods import name_of
from fedspan.simulation.engine import Answer, Engine
from fedspan.studies.disclosure import attacks
from fedspan.studies.disclosure.federation import CLASSES, CLIENTS, Crowd, crowd, digits, perceptron
from fedspan.tree import Tree

BATCH = 16
PLAYED = 5
"""Federations that the server plays to learn from."""
REBUILT = 6
"""Clients whose state and model are rebuilt, one after another."""

SET, HINTS = 0.83, 0.6
"""Share of classes read rightly from which the set is known, and from which there are hints; chance is one half."""
RESEMBLING = 0.47
"""Cosine of two models' changes from which one resembles the other."""
PARTNERS = 0.1
"""Share of partners found from which uploads show who resembles whom; chance is 1 in 39."""

FROM_ROUND = {"fedcollab": 11}
"""The first round in which a method sends models, where that is not the first; nobody has to wait for it."""
UNFITTED: dict[str, dict[str, Any]] = {
    "fedavg-ft": {"finetune_epochs": 0},
    "fedbabu": {"finetune_epochs": 0},
    "per-fedavg": {"adapt": 0},
    "pfl-mf": {"refresh": False},
}
"""Keys by which a server leaves out the last fit to a client's examples, which it does not have."""


@dataclass(frozen=True)
class Found:
    """What the attacks on one method found."""

    labels: float
    """Share of classes read rightly, held or not; chance is one half."""
    sets: float
    """Share of clients of whom all ten are right; chance is 1 in 1024."""
    model: float
    """Cosine of a client's model and what was rebuilt of it, both less the common start; the mean over clients."""
    parts: dict[str, float]
    """The same of every part of the model that moved, for the client where it is least."""
    private: dict[str, float]
    """The same of every part that the client keeps."""
    examples: bool
    """Whether every client's number of examples was read off."""
    class_means: float
    """Cosine of the means of a client's features by class and the rows of a part that was sent."""
    partners: float
    """Share of clients whose partner was found; chance is 1 in 39."""

    @property
    def discloses(self) -> Discloses:
        """What is to be declared next to the method."""
        labels: Literal["set", "hints", "nothing"]
        labels = "set" if self.labels >= SET else "hints" if self.labels >= HINTS else "nothing"
        exact = [found >= attacks.SAME for found in self.parts.values()]
        model: Literal["whole", "part", "likeness", "nothing"]
        model = "likeness" if self.model >= RESEMBLING else "nothing"
        if any(exact):
            model = "whole" if all(exact) else "part"
        return Discloses(
            labels=labels,
            model=model,
            private=tuple(name for name, found in self.private.items() if found >= attacks.SAME),
            examples=self.examples,
            class_means=self.class_means >= attacks.SAME,
            resembles=self.partners >= PARTNERS,
        )


@dataclass(frozen=True)
class Received:
    """One round of a federation, as the server and the clients have it; all stacked, a row per client."""

    engine: Engine
    round: int
    capacity: Capacity
    common: Tree
    start: Tree
    shared: Tree
    own: Tree
    answer: Answer

    def uploads(self) -> dict[str, Tensor]:
        """What the server received besides weights."""
        sent = self.answer.sent
        flat = tree.flatten({"mean": sent.mean, "each": sent.each, "weights": sent.weights})
        return {k: a.detach().reshape(len(a), -1).double() for k, a in flat.items() if a.numel()}

    def down(self, client: int) -> Tree:
        """What one client had received."""
        return {**self.shared, **tree.take(self.own, client)}

    def trained(self, client: int) -> Tree:
        """What a client uses in the place of the download right after its round."""
        sent = tree.take(self.answer.sent, client)
        made: Tree = self.engine.able.adapts.trained(self.down(client), sent, self.capacity)
        return made

    def personal(self, row: Tree, down: Tree, client: int) -> Tree:
        """The weights predicted with, from this state; where a method fits them, to the examples of this client."""
        return self.engine.personal(self.capacity, self.round, client, row, down, self.common)


@cache
def stage(played: int = PLAYED, seed: int = 0) -> tuple[Task, Crowd, list[Crowd]]:
    """The model, the clients that are attacked, and the federations that the server plays."""
    theirs, own = digits(seed)
    games = [crowd(*own, f"played {k}", pairs=False, seed=seed) for k in range(played)]
    return perceptron(seed), crowd(*theirs, "clients", pairs=True, seed=seed), games


def measure(method: Method, played: int = PLAYED, seed: int = 0) -> Found:
    """Attack one round of a method on the bundled digits.

    Args:
        played: how many federations of 40 clients the server plays to learn from; more make it stronger.
        seed: who holds which examples, and the common start.
    """
    task, real, games = stage(played, seed)
    seen, answers = one_round(method, task, real), [one_round(method, task, game) for game in games]
    sent, uploads = seen.answer.sent, seen.uploads()
    sizes = torch.from_numpy(real.data.sizes).double()
    labels, sets, partners = 0.5, 0.0, 0.0
    if uploads:
        ours = [a.uploads() for a in answers]
        learnt = {path: torch.cat([u[path] for u in ours]) for path in uploads}
        scores = attacks.read_labels(uploads, learnt, np.concatenate([g.held for g in games]))
        right = (scores > 0).numpy() == real.held
        labels, sets = float(right.mean()), float(right.all(1).mean())
        partners = max(float((found == real.partner).mean()) for found in attacks.read_partners(uploads, scores))
    again = _again(seen)
    model, parts = _rebuilt_models(seen, again, answers[0])
    return Found(
        labels=labels,
        sets=sets,
        model=model,
        parts=parts,
        private=_rebuilt_states(seen, again),
        examples=any(torch.equal(n.double(), sizes) for n in attacks.read_sizes(sent.weight, sent.weights)),
        class_means=_class_means(seen, real),
        partners=partners,
    )


def one_round(method: Method, task: Task, crowd: Crowd) -> Received:
    """A round of all clients from the common start, each with the capacity of the first."""
    data, round = crowd.data, FROM_ROUND.get(name_of(method), 1)
    engine = Engine(method, task, data, 0, BATCH, 1, "vmap")
    capacities = tuple(engine.able.capacity(task, i) for i in range(CLIENTS))
    federation = Federation(CLIENTS, 0, capacities, data.groups)
    first, capacity = engine.model(federation.kinds[0]), capacities[0]
    server, common = method.init_server(first, federation), engine.able.announces.common(first, federation)
    ids = list(range(CLIENTS))
    start = tree.stack([engine.begin(capacity, i) for i in ids])
    down = method.download(server, torch.tensor(ids), capacity, round)
    answer = engine.update(capacity, round, ids, start, down.shared, down.own, common)
    return Received(engine, round, capacity, common, start, down.shared, down.own, answer)


def _again(seen: Received) -> Received:
    """The second visit of the first few clients, with the download they had before.

    Some methods send what belongs to the state they began the round with, which is public in the first one.
    """
    ids, few = list(range(REBUILT)), slice(REBUILT)
    start, own = tree.take(seen.answer.rows, few), tree.take(seen.own, few)
    answer = seen.engine.update(seen.capacity, seen.round + 1, ids, start, seen.shared, own, seen.common)
    return replace(seen, round=seen.round + 1, start=start, own=own, answer=answer)


def _rebuilt_states(first: Received, again: Received) -> dict[str, float]:
    """How well each private part is rebuilt: as it was before a client's second visit, or as it is after it.

    Of a part that is not rebuilt whole, tensors that are stand under the last word of their names.
    """
    found: dict[str, list[float]] = {}
    for i in range(REBUILT):
        start, sent = tree.take(first.start, i), tree.take(again.answer.sent, i)
        guess = attacks.rebuild_private({**sent.mean, **sent.each}, start)
        held = [tree.take(rows, i) for rows in (again.start, again.answer.rows)]
        for path, *parts in _paths(start, guess, *held):
            known = [c for h in parts[2:] for c in (_alike(h, parts[1], parts[0]), _along(h, parts[1], parts[0])) if c]
            found.setdefault(path, []).append(max(known, default=0.0))
    least = {path: min(cosines) for path, cosines in found.items()}
    whole = {path: cosine for path, cosine in least.items() if "/" not in path}
    pieces = {p: c for p, c in least.items() if "/" in p and c >= attacks.SAME > whole[p.partition("/")[0]]}
    return whole | {path.rpartition("/")[2].rpartition(".")[2]: cosine for path, cosine in pieces.items()}


def _paths(*states: Tree) -> list[tuple[Any, ...]]:
    """Parts of states of one form, and the tensors in them, each with its path; parts without tensors are left out."""
    flat = [tree.flatten(state) for state in states]
    parts = [(name, *(state[name] for state in states)) for name, part in states[0].items() if tree.leaves(part)]
    return [*parts, *((path, *(f[path] for f in flat)) for path in flat[0] if "/" in path)]


def _rebuilt_models(first: Received, again: Received, played: Received) -> tuple[float, dict[str, float]]:
    """How well clients' models are rebuilt, before their second visit or after it, as a whole and part by part.

    Where a method fits a model when it is used, the server does so on examples of its own, or not at all.
    """
    method = first.engine.method
    keys = UNFITTED.get(name_of(method))
    ours = replace(played, engine=replace(played.engine, method=with_keys(method, **keys))) if keys else played
    best: tuple[float, dict[str, float]] = (0.0, {})
    for rows, downs in ((again.start, again.down), (again.answer.rows, again.trained)):
        whole: list[float] = []
        parts: dict[str, list[float]] = {}
        for i in range(REBUILT):
            sent, start = tree.take(again.answer.sent, i), tree.take(first.start, i)
            guessed = attacks.rebuild_private({**sent.mean, **sent.each}, start)
            truth = again.personal(tree.take(rows, i), downs(i), i)
            guess, before = ours.personal(guessed, downs(i), i), ours.personal(start, first.down(i), i)
            flat = [dict(tree.items(t)) for t in (truth, guess, before)]
            for name in flat[0]:
                known = _alike(*(t[name] for t in flat))
                if known is not None:
                    parts.setdefault(name, []).append(known)
            whole.append(_alike(truth, guess, before) or 0.0)
        found = float(np.mean(whole)), {name: min(cosines) for name, cosines in parts.items()}
        best = max(best, found, key=lambda one: one[0])
    return best


def _alike(truth: Any, guess: Any, start: Any) -> float | None:
    """The cosine of two trees less the start; None if the true one did not move."""
    leaves = zip(*(tree.leaves(t) for t in (truth, guess, start)), strict=True)
    moved = [
        ((a - c).double().reshape(-1), (b - c).double().reshape(-1)) for a, b, c in leaves if a.is_floating_point()
    ]
    a, b = (torch.cat([m[k].double().reshape(-1) for m in moved] or [torch.zeros(0)]) for k in (0, 1))
    return _cosine(a, b) if bool((a != 0).any()) else None


def _along(truth: Any, guess: Any, start: Any) -> float | None:
    """How far a vector lies along the one that was found, of which length and sign may be unknown."""
    if not isinstance(truth, Tensor) or truth.ndim != 1 or len(truth) < 2 or torch.equal(guess, start):
        return None
    return abs(_cosine(truth.double(), guess.double()))


def _cosine(a: Tensor, b: Tensor) -> float:
    size = float(torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
    return float(a @ b) / size if size > 0 else 0.0


def _class_means(seen: Received, real: Crowd) -> float:
    """The best cosine, over what was sent with a row per class, of rows and a client's mean features of that class.

    What the server had sent under that name is taken off both, as clients may mix their means with it; where it had
    sent nothing, the mean over the classes.
    """
    task, found = seen.engine.model(seen.capacity), dict[str, list[float]]()
    for i in range(REBUILT):
        weights = seen.personal(tree.take(seen.answer.rows, i), seen.trained(i), i)
        held = torch.from_numpy(np.flatnonzero(real.held[i]))
        if not task.whole(weights) or len(held) < 2:
            continue
        rows = torch.from_numpy(real.data.train[i])
        y, features = real.data.y[rows], task.features(weights, real.data.x[rows])
        means = torch.stack([features[y == c].mean(0) for c in held]).double()
        sent, had = tree.take(seen.answer.sent, i), dict(tree.items(seen.down(i)))
        for path, t in tree.items({**sent.mean, **sent.each}):
            if t.shape != (CLASSES, means.shape[1]):
                continue
            told, mine, had_sent = t[held].double(), means, had.get(path)
            if had_sent is not None and had_sent.shape == t.shape and bool(had_sent.any()):
                off = [had_sent[held].double()] * 2
            else:
                off = [told.mean(0), mine.mean(0)]
            found.setdefault(path, []).append(_cosine((told - off[0]).reshape(-1), (mine - off[1]).reshape(-1)))
    return max((min(cosines) for cosines in found.values()), default=0.0)
