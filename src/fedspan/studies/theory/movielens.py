"""Example 3 on real ratings: what a shared subspace adds to the mean and to the bias model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fedspan.report.canvas import panels
from fedspan.studies.theory.collaborative import factorise
from fedspan.studies.theory.item_scores import chosen_method, rmse_by_method
from fedspan.studies.theory.outcome import BLUE, GOLD, GREEN, GREY, RED, Outcome
from fedspan.studies.theory.ratings import Ratings, bias_model, load, mean_only, split, truncated_svd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RIDGE = {"mean": 4.0, "bias": 15.0}
"""λ by what U v is added to: the best of 2, 4, 8 (mean, rank 5) and of 2, 4, 8, 15 (biases, ranks 2 and 10) on a tenth
of the training ratings; the held-out ratings had no part in it."""


def run(root: str | None = None, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Ratings of the file under `root`, a fifth of them held out."""
    return compare(load(root), say=say)


def compare(
    ratings: Ratings,
    ranks: tuple[int, ...] = (1, 2, 5, 10),
    *,
    rounds: int = 40,
    participation: float = 0.5,
    seed: int = 200,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """RMSE on held-out ratings: global mean, bias model, truncated SVD, and pFL-MF on top of the mean or the biases."""
    train, test = split(ratings, 0.2, seed, "movielens")
    bases = {"mean": mean_only(train), "bias": bias_model(train)}
    simple = {name: test.rmse(base.predict(test)) for name, base in bases.items()}
    base = bases["bias"].predict(test)
    svd = {
        k: test.rmse(base + R[test.item, test.user])
        for k, R in truncated_svd(train, bases["bias"], list(ranks)).items()
    }
    federated: dict[str, dict[int, float]] = {name: {} for name in bases}
    for name, b in bases.items():
        for r in ranks:
            say(f"pFL-MF on the {name}, rank {r}: {rounds} rounds ...")
            made = factorise(train, b, r, rounds=rounds, participation=participation, ridge=RIDGE[name], seed=seed)
            federated[name][r] = test.rmse(made.predict(b, test))
    registered: dict[int, float] = {}
    for r in ranks:
        say(f"the registered method on the biases, rank {r}: {rounds} rounds ...")
        settings = {"rounds": rounds, "participation": participation, "seed": seed}
        registered[r] = rmse_by_method(chosen_method(r), train, test, bases["bias"], **settings)  # type: ignore[arg-type]
    rows = [["global mean", "", f"{simple['mean']:.4f}"], ["bias model", "", f"{simple['bias']:.4f}"]]
    rows += [["truncated SVD on the biases (central)", str(r), f"{e:.4f}"] for r, e in svd.items()]
    rows += [["pFL-MF on the mean", str(r), f"{e:.4f}"] for r, e in federated["mean"].items()]
    rows += [["pFL-MF on the biases", str(r), f"{e:.4f}"] for r, e in federated["bias"].items()]
    rows += [["pfl-mf in the simulator, on the biases", str(r), f"{e:.4f}"] for r, e in registered.items()]
    errors, by_method = federated["bias"].values(), registered.values()
    says = (
        f"{ratings.users} users as clients, {ratings.items} items, {len(test.rating)} ratings held out: the mean has"
        f" RMSE {simple['mean']:.3f}, the bias model {simple['bias']:.3f}, pFL-MF on its residuals {max(errors):.3f} to"
        f" {min(errors):.3f} over the ranks where the server knows how many rated each item, and the registered"
        f" method in the simulator, which does not, {max(by_method):.3f} to {min(by_method):.3f}."
    )
    numbers: dict[str, Any] = {
        "users": ratings.users, "items": ratings.items, "train": len(train.rating), "test": len(test.rating),
        "rounds": rounds, "participation": participation, "ridge": RIDGE, "rmse": {
            **simple, "svd": _keys(svd),
            "pfl_mf_on_mean": _keys(federated["mean"]), "pfl_mf_on_bias": _keys(federated["bias"]),
            "registered_on_bias": _keys(registered),
        },
    }  # fmt: skip
    return Outcome(
        ["predictor", "rank", "RMSE"],
        rows,
        says,
        numbers,
        partial(draw, simple, svd, federated | {"registered": registered}),
    )


def _keys(errors: dict[int, float]) -> dict[str, float]:
    return {str(r): e for r, e in errors.items()}


def draw(simple: dict[str, float], svd: dict[int, float], federated: dict[str, dict[int, float]]) -> Figure:
    """Held-out RMSE against the rank."""
    figure, (axes,) = panels(5.2, 3.4, [("RMSE on held-out ratings", "rank r")])
    ranks = list(svd)
    for errors, colour, label in (
        (federated["mean"], RED, "pFL-MF on the mean"),
        (svd, GREEN, "truncated SVD on the biases"),
        (federated["bias"], BLUE, "pFL-MF on the biases"),
        (federated["registered"], GOLD, "the registered method"),
    ):
        axes.plot(range(len(ranks)), [errors[r] for r in ranks], color=colour, marker="o", markersize=4, label=label)
    axes.axhline(simple["bias"], color=GREY, linewidth=1.2, linestyle=(0, (4, 2)), label="bias model")
    axes.set_xticks(range(len(ranks)), [str(r) for r in ranks])
    axes.legend(frameon=False, fontsize=8)
    return figure
