"""Figures 1 and 4 of Factorized-FL: how far the updates of models part when data, labels or domains differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedspan.layers import in_head, part, structured
from fedspan.learn.task import Task
from fedspan.methods.factorized_fl import FactorizedLocal
from fedspan.randomness import generator
from fedspan.report.canvas import panels
from fedspan.studies.theory.images import QUICK, Images, Size, accuracy, digits, epochs, grey, network, written
from fedspan.studies.theory.outcome import BLUE, GREY, RED, Outcome
from fedspan.tree import Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL = Size(train=1000, test=1000, epochs=12)
EVERY = 3  # epochs between two averages, as in Figure 1(c)

SAME, PERMUTED, OTHER = "MNIST, other half", "the same, labels permuted", "CIFAR-10"
Curves = dict[str, dict[str, list[float]]]
_COLOURS = {SAME: GREY, PERMUTED: RED, OTHER: BLUE}


def run(root: str | None = None, quick: bool = False, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """MNIST and CIFAR-10 of the files under `root`."""
    size = QUICK if quick else FULL
    return compare(digits(root, size.train, size.test), grey(root, size.train // 2, size.test), size, say=say)


def distance(a: Tensor, b: Tensor) -> float:
    """‖a/‖a‖ − b/‖b‖‖: 0 for one direction, √2 at right angles, 2 for opposite ones; √2 if one of them is zero."""
    x, y = (v.flatten().double() for v in (a, b))
    sizes = torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y)
    cosine = float(x @ y / sizes) if float(sizes) > 0 else 0.0
    return math.sqrt(max(0.0, 2.0 - 2.0 * cosine))


@dataclass(frozen=True)
class Parts:
    """Which parameters are compared: of every layer, by what they are. Layers in order, the head last."""

    layers: list[str]
    kinds: dict[str, list[str]]  # W of the plain model; u and v of the factorised one

    @staticmethod
    def of(task: Task) -> Parts:
        """W of every layer of a plain model, u and v of every layer of a factorised one."""
        layers = structured(task.module)
        if layers:
            return Parts(layers, {kind: [part(k, kind) for k in layers] for kind in ("u", "v")})
        weights = [k for k in task.names if k.endswith(".weight") and dict(task.module.named_parameters())[k].ndim > 1]
        return Parts([k.removesuffix(".weight") for k in weights], {"W": weights})

    def distances(self, start: Params, a: Params, b: Params) -> dict[str, list[float]]:
        """Distance of the updates from a common start, by kind and layer."""
        return self.between((start, start), (a, b))

    def between(self, before: tuple[Params, Params], after: tuple[Params, Params]) -> dict[str, list[float]]:
        """Distance of the updates of two models, each from where it stood itself."""
        return {
            kind: [distance(*(b[k] - a[k] for a, b in zip(before, after))) for k in names]
            for kind, names in self.kinds.items()
        }


@dataclass(frozen=True)
class Together:
    """Two clients that average some parameters every few epochs, seen at each average."""

    accuracy: list[float]  # of the first, right after it
    far: dict[str, list[list[float]]]  # distance of the updates since the one before, by kind: [average][layer]


def compare(
    mnist: Images, cifar: Images, size: Size, *, seed: int = 0, say: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Models of one common start, plain and factorised, trained on one half of MNIST and on three other things.

    First all alone: distances of the updates since the start, Figures 1(b) and 4. Then with the other one, averaged
    every third epoch: accuracy of the first, Figure 1(c), and distances of the updates since the last average, Figure 4
    "as FL goes on"; the plain model shares its body, the factorised one its u.
    """
    first, second = mnist.halves()
    names = torch.from_numpy(generator(seed, "names").permutation(mnist.classes))
    others = {SAME: second, PERMUTED: second.renamed(names), OTHER: cifar}
    method = written()
    plain = network(first, seed)
    tasks = {"plain": plain, "factorised": method.model(plain, None)}
    far: dict[str, dict[str, list[list[float]]]] = {name: {} for name in others}  # [epoch][layer] by kind
    joined: dict[str, dict[str, list[list[float]]]] = {name: {} for name in others}  # [average][layer] by kind
    reached: dict[str, dict[str, float]] = {model: {} for model in tasks}
    together: Curves = {model: {} for model in tasks}
    layers: list[str] = []
    for model, task in tasks.items():
        say(f"{model} model: {size.epochs} epochs on each of four ...")
        start, parts = task.init(), Parts.of(task)
        layers = parts.layers
        alone = list(epochs(method, task, start, first, size, seed=seed))
        reached[model]["alone"] = accuracy(task, alone[-1], first)
        together[model]["alone"] = [accuracy(task, alone[t - 1], first) for t in averages(size.epochs)]
        for name, images in others.items():
            path = list(epochs(method, task, start, images, size, seed=seed))
            reached[model][name] = accuracy(task, path[-1], images)
            for kind in parts.kinds:
                far[name][kind] = [parts.distances(start, a, b)[kind] for a, b in zip(alone, path)]
            say(f"{model} model: averaged with {name} every {EVERY} epochs ...")
            pair = averaged(method, task, (first, images), size, shared(task), seed)
            together[model][name] = pair.accuracy
            joined[name] |= pair.far
    body = [k for k, layer in enumerate(layers) if not in_head(plain, layer)]
    means, rounds = (
        {name: {kind: [_mean(row, body) for row in rows] for kind, rows in kinds.items()} for name, kinds in d.items()}
        for d in (far, joined)
    )
    rows = [
        [
            *(name, kind, *(f"{d:.3f}" for d in by_layer[-1])),
            *(f"{d:.3f}" for d in (means[name][kind][0], means[name][kind][-1])),
            *(f"{d:.3f}" for d in (rounds[name][kind][0], rounds[name][kind][-1])),
        ]
        for name, kinds in far.items()
        for kind, by_layer in kinds.items()
    ]
    at = averages(size.epochs)
    titles = ["compared with", "of", *layers, "body, epoch 1", f"body, epoch {size.epochs}"]
    titles += [f"averaged, epoch {at[0]}", f"averaged, epoch {at[-1]}"]
    numbers: dict[str, Any] = {
        "seed": seed, "images": len(first.y), "epochs": size.epochs, "batch": size.batch, "lr": method.lr,
        "momentum": method.optimizer.momentum, "lambda": method.penalty.lam, "layers": layers, "distance": far,
        "distance_of_the_body": means, "accuracy_alone": reached,
        "averaged_after": at, "accuracy_averaged": together,
        "distance_averaged": joined, "distance_averaged_of_the_body": rounds,
    }  # fmt: skip
    made = partial(draw, means, rounds, together, size.epochs)
    return Outcome(titles, rows, _says(means, rounds, together), numbers, made)


def averages(count: int) -> list[int]:
    """After which epochs there is an average; always after the last."""
    return [*range(EVERY, count, EVERY), count]


def shared(task: Task) -> list[str]:
    """What two clients average: u of the body if the model is factorised, all of the body if not."""
    factors = {part(k, "u") for k in structured(task.module)}
    return [k for k in task.body if k in factors or not factors]


def averaged(
    method: FactorizedLocal, task: Task, both: tuple[Images, Images], size: Size, names: Sequence[str], seed: int = 0
) -> Together:
    """Two clients from one start that average the named parameters; their momentum begins anew after each average."""
    clients, parts = (task.init(), task.init()), Parts.of(task)
    found = Together([], {kind: [] for kind in parts.kinds})
    before = 0
    for t in averages(size.epochs):
        here = replace(size, epochs=t - before)
        a, b = (
            list(epochs(method, task, p, images, here, first=before + 1, seed=seed))[-1]
            for p, images in zip(clients, both)
        )
        before = t
        for kind, by_layer in parts.between(clients, (a, b)).items():
            found.far[kind].append(by_layer)
        mean = {k: (a[k] + b[k]) / 2 for k in names}
        clients = (a | mean, b | mean)
        found.accuracy.append(accuracy(task, clients[0], both[0]))
    return found


def _mean(row: Sequence[float], where: Sequence[int]) -> float:
    return sum(row[k] for k in where) / len(where)


def _says(means: Curves, rounds: Curves, together: Curves) -> str:
    def three(kind: str, of: Curves = means) -> str:
        return ", ".join(f"{kinds[kind][-1]:.2f}" for kinds in of.values())

    after = {model: ", ".join(f"{x[-1]:.1%}" for x in some.values()) for model, some in together.items()}
    return (
        f"Distance of the updates from those of one half of MNIST, mean over the layers below the head, for {SAME};"
        f" {PERMUTED}; {OTHER}: plain weights {three('W')}; u {three('u')}; v {three('v')}; last updates while u is"
        f" averaged: u {three('u', rounds)}, v {three('v', rounds)}. Accuracy of that half alone and when averaged with"
        f" each of them: {after['plain']} (plain body), {after['factorised']} (u alone)."
    )


def draw(means: Curves, rounds: Curves, together: Curves, count: int) -> Figure:
    """Distances over the epochs for W, u and v, and what averaging does to the accuracy."""
    titles = [
        ("plain W: distance of updates", "epoch"),
        ("u: distance of updates", "epoch"),
        ("v: distance of updates", "epoch"),
        (f"accuracy, body averaged every {EVERY}", "epoch"),
        (f"accuracy, u averaged every {EVERY}", "epoch"),
    ]
    figure, axes = panels(13.0, 3.2, titles)
    for a in axes:
        a.set_xticks(range(0, count + 1, EVERY))
    at = averages(count)
    for a, kind in zip(axes, ("W", "u", "v")):
        for name, kinds in means.items():
            a.plot(range(1, count + 1), kinds[kind], color=_COLOURS[name], linewidth=1.7, label=name)
            a.plot(at, rounds[name][kind], color=_COLOURS[name], linewidth=1.0, linestyle=(0, (4, 2)), marker=".")
        a.axhline(math.sqrt(2), color=GREY, linewidth=0.8, linestyle=(0, (1, 2)))  # at right angles
        a.set_ylim(0.0, 2.0)
    axes[1].plot([], [], color="#000000", linewidth=1.0, linestyle=(0, (4, 2)), label="averaged: since the last one")
    for a, some in zip(axes[3:], together.values()):
        for name, reached in some.items():
            colour = _COLOURS.get(name, "#000000")
            a.plot(at, reached, color=colour, linewidth=1.7, marker="o", markersize=3, label=name)
        a.set_ylim(0.0, 1.0)
    for a in (axes[0], axes[3]):
        a.legend(frameon=False, fontsize=7, loc="lower right")
    axes[1].legend(
        *([x[-1]] for x in axes[1].get_legend_handles_labels()), frameon=False, fontsize=7, loc="lower right"
    )
    return figure
