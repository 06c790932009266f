"""Figure 7(k) of Factorized-FL: does it matter how a kernel is read as a matrix? One client, four layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fedspan.layers import Layout
from fedspan.method.fields import with_keys
from fedspan.report.canvas import panels
from fedspan.studies.theory.images import QUICK, Images, Size, accuracy, colour, epochs, network, settled, written
from fedspan.studies.theory.outcome import BLUE, GOLD, GREEN, GREY, RED, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL = Size(train=1200, test=2000, epochs=15)

MEANING: dict[Layout, str] = {
    "space_by_channel": "u: k·k, v: I·O (the paper's)",
    "official_view": "the same, axes as in the public code",
    "ik_by_ok": "u: I·k, v: O·k (ambiguous)",
    "out_by_rest": "u: O, v: I·k·k (ambiguous)",
}


def run(root: str | None = None, quick: bool = False, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """CIFAR-10 of the files under `root`."""
    size = QUICK if quick else FULL
    return compare(colour(root, size.train, size.test), size, say=say)


def compare(images: Images, size: Size, *, seed: int = 0, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Accuracy on the test pictures over the epochs: every layout with μ and without it, and the plain model."""
    method = written()
    plain = network(images, seed)
    cases = {"plain model": plain}
    for layout in MEANING:
        for mu in (True, False):
            name = f"{layout}{'' if mu else ', no μ'}"
            cases[name] = with_keys(method, layout=layout, mu=mu).model(plain, None)
    curves: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for name, task in cases.items():
        say(f"{name}: {size.epochs} epochs on {len(images.y)} pictures ...")
        start = task.init()
        counts[name] = sum(p.numel() for k, p in start.items() if not k.endswith(".mu"))
        path = epochs(method, task, start, images, size, seed=seed)
        curves[name] = [accuracy(task, params, images) for params in path]
    mean = {name: settled(curve) for name, curve in curves.items()}

    def shown(name: str) -> list[str]:
        return [f"{curves[name][-1]:.1%}", f"{mean[name]:.1%}"]

    rows = [["plain model", "", f"{counts['plain model']:,}", *shown("plain model"), "", ""]]
    rows += [
        [layout, meaning, f"{counts[layout]:,}", *shown(layout), *shown(f"{layout}, no μ")]
        for layout, meaning in MEANING.items()
    ]
    parts = []
    for with_it, end in (("with μ", ""), ("without it", ", no μ")):
        reached = {mean[layout + end]: layout for layout in MEANING}
        best = reached[max(reached)]
        parts.append(f"{with_it} {min(reached):.1%} to {max(reached):.1%}, the best is {best}")
    says = f"Mean of the last five epochs: {'; '.join(parts)}. The plain model has {mean['plain model']:.1%}."
    numbers: dict[str, Any] = {
        "seed": seed, "images": len(images.y), "tested_on": len(images.y_test), "epochs": size.epochs,
        "batch": size.batch, "lr": method.lr, "momentum": method.optimizer.momentum, "lambda": method.penalty.lam,
        "parameters_without_mu": counts, "accuracy": curves,
    }  # fmt: skip
    titles = ["layout", "meaning", "parameters without μ", "accuracy", "last five", "without μ", "last five"]
    return Outcome(titles, rows, says, numbers, partial(draw, curves, size.epochs))


def draw(curves: dict[str, list[float]], count: int) -> Figure:
    """Accuracy over the epochs, left with μ, right without."""
    figure, axes = panels(8.4, 3.4, [("accuracy, with μ", "epoch"), ("accuracy, without μ", "epoch")])
    for a, end in zip(axes, ("", ", no μ")):
        a.plot(range(1, count + 1), curves["plain model"], color=GREY, linewidth=1.5, label="plain model")
        for layout, shade in zip(MEANING, (BLUE, GREEN, RED, GOLD)):
            a.plot(range(1, count + 1), curves[layout + end], color=shade, linewidth=1.7, label=layout)
        a.set_ylim(bottom=0.0)
        a.set_xticks(range(0, count + 1, max(1, count // 5)))
    axes[1].legend(frameon=False, fontsize=7.5)
    return figure
