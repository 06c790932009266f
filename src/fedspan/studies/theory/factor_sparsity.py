"""Figure 7(j) of Factorized-FL: one client, its sparse factorised model against the plain one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fedspan import tree
from fedspan.method.fields import with_keys
from fedspan.methods.factorized_fl.factorization import corrections
from fedspan.report.canvas import panels
from fedspan.studies.theory.images import (
    QUICK,
    Images,
    Size,
    accuracy,
    colour,
    epochs,
    network,
    nonzero,
    settled,
    written,
)
from fedspan.studies.theory.outcome import BLUE, GREY, RED, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL = Size(train=1200, test=2000, epochs=20)
LAMBDAS = (0.0, 1e-4, 5e-4, 1.5e-3, 5e-3)


def run(root: str | None = None, quick: bool = False, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """CIFAR-10 of the files under `root`."""
    size = QUICK if quick else FULL
    return compare(colour(root, size.train, size.test), size, say=say)


def compare(
    images: Images,
    size: Size,
    lambdas: tuple[float, ...] = LAMBDAS,
    *,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Entries that are not zero, and accuracy on the test pictures: the plain model, each λ, and a model without μ."""
    method = written()
    plain = network(images, seed)
    cases = {"plain": (method, plain)}
    for lam in lambdas:
        chosen = with_keys(method, lam=lam)
        cases[f"λ = {lam:g}"] = (chosen, chosen.model(plain, None))
    cases["without μ"] = (method, with_keys(method, mu=False).model(plain, None))
    held: dict[str, int] = {}
    share: dict[str, float] = {}
    curves: dict[str, list[float]] = {}
    for name, (chosen, task) in cases.items():
        say(f"{name}: {size.epochs} epochs on {len(images.y)} pictures ...")
        path = list(epochs(chosen, task, task.init(), images, size, seed=seed))
        curves[name] = [accuracy(task, p, images) for p in path]
        params = path[-1]
        held[name] = nonzero(params)
        mus = {k: params[k] for k in corrections(task)}
        if mus:
            share[name] = tree.nonzero_share(mus)
    full = sum(p.numel() for p in plain.init().values())
    mean = {name: settled(curve) for name, curve in curves.items()}
    rows = [
        [
            *(name, f"{held[name]:,}", f"{held[name] / full:.1%}", f"{share[name]:.1%}" if name in share else ""),
            *(f"{curve[-1]:.1%}", f"{mean[name]:.1%}"),
        ]
        for name, curve in curves.items()
    ]
    best = max((k for k in share if held[k] < full), key=lambda k: mean[k], default=None)
    found = (
        "no λ leaves fewer non-zeros than that"
        if best is None
        else f"of the factorised models with fewer, the best has {mean[best]:.1%} with {held[best]:,} ({best})"
    )
    says = f"Mean of the last five epochs: the plain model has {mean['plain']:.1%} with {full:,} parameters; {found}."
    numbers: dict[str, Any] = {
        "seed": seed, "images": len(images.y), "tested_on": len(images.y_test), "epochs": size.epochs,
        "batch": size.batch, "lr": method.lr, "momentum": method.optimizer.momentum, "lambdas": list(lambdas),
        "parameters": full, "nonzero": held, "share_of_mu": share, "accuracy": curves,
    }  # fmt: skip
    titles = ["model", "non-zeros", "of the plain one's", "of μ", "accuracy", "last five"]
    return Outcome(titles, rows, says, numbers, partial(draw, mean, held, full))


def draw(mean: dict[str, float], held: dict[str, int], full: int) -> Figure:
    """Accuracy, mean of the last five epochs, against what is not zero."""
    figure, (axes,) = panels(5.4, 3.5, [("accuracy, mean of the last five epochs", "non-zero parameters")])
    for name, reached in mean.items():
        shade = RED if name == "plain" else GREY if name == "without μ" else BLUE
        axes.scatter([held[name]], [reached], color=shade, s=34, zorder=3)
        axes.annotate(name, (held[name], reached), textcoords="offset points", xytext=(5, 5), fontsize=7.5)
    axes.axvline(full, color=RED, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_xlim(0, 1.25 * max(full, *held.values()))
    return figure
