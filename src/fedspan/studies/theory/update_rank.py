"""The rank of W_t − W_0 over the rounds of a run: what accumulated factors add up to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedspan.errors import ConfigError
from fedspan.layers import part, structured
from fedspan.linalg import lowrank
from fedspan.methods.fedloru import FedLoRU
from fedspan.report.canvas import panels
from fedspan.simulation.simulator import Simulation
from fedspan.studies.theory.outcome import BLUE, GREY, Outcome
from fedspan.tree import Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Layer:
    """One layer: the most its matrix can have, and the rank of its change after every round."""

    name: str
    full: int
    ranks: list[int]


def run(simulation: Simulation) -> Outcome:
    """Replay a run in memory and take the rank of what was added to each factorised weight after every round.

    Rounds are keyed, so that the replay gives the very numbers of the run.

    Raises:
        ConfigError: if the run is not of FedLoRU or one of its kin.
    """
    method = simulation.method
    if not isinstance(method, FedLoRU):
        raise ConfigError(f"update-rank: the run must be of fedloru or its kin. Got {type(method).__name__}.")
    if method.adapter != "lora":
        raise ConfigError(f"update-rank: the adapter must be 'lora', whose rank is bounded. Got '{method.adapter}'.")
    settings = replace(simulation.settings, evaluate_every=2**31 - 1, workers=1, device="cpu")
    again = Simulation(
        method,
        simulation.task,
        simulation.data,
        rounds=simulation.record.progress.round,
        seed=simulation.seed,
        settings=settings,
        defence=simulation.record.defence,
        devices=simulation.devices,
        asynchronous=simulation.asynchronous,
    )
    start = simulation.task.init()
    names = [part(k, "weight") for k in structured(again.engine.model(again.capacity[0]).module)]
    ranks: dict[str, list[int]] = {k: [0] for k in names}

    def look(_: dict[str, Any]) -> None:
        server, common = again.record.server, again.record.common
        factors = {f: server[f] for f in method.factors} | ({"A": common["A"]} if method.freeze_A else {})
        held: Params = lowrank.accumulate(common["W"], factors, method.scale)  # W + α A B
        for k in names:
            ranks[k].append(lowrank.changed(held[k], start[k])[1].numel())

    again.run(look)
    layers = [Layer(k.removesuffix(".weight"), min(start[k].flatten(1).shape), ranks[k]) for k in names]
    return _outcome(method, layers)


def bound(method: FedLoRU, t: int) -> int:
    """r · ⌈t/τ⌉, the most that factors of rank r can have added up to after round t."""
    return method.rank * (-(-t // method.tau) if method.tau else min(t, 1))


def _outcome(method: FedLoRU, layers: list[Layer]) -> Outcome:
    rounds = len(layers[0].ranks) - 1
    shown = sorted({0, rounds, *range(0, rounds + 1, method.tau or max(1, rounds))})
    titles = ["layer", "largest possible", *(f"round {t}" for t in shown)]
    rows = [[x.name, str(x.full), *(str(x.ranks[t]) for t in shown)] for x in layers]
    rows.append(["r ⌈t/τ⌉", "", *(str(bound(method, t)) for t in shown)])
    over = [(x, t) for x in layers for t in range(rounds + 1) if x.ranks[t] > min(bound(method, t), x.full)]
    equal = sum(x.ranks[t] == min(bound(method, t), x.full) for x in layers for t in range(1, rounds + 1))
    says = f"The rank is min(r ⌈t/τ⌉, largest possible) in {equal} of {rounds * len(layers)} cases (layers and rounds)"
    says += f", above it in {len(over)}."
    numbers = {
        "rank": method.rank,
        "tau": method.tau,
        "bound": [bound(method, t) for t in range(rounds + 1)],
        "layers": {x.name: {"full": x.full, "ranks": x.ranks} for x in layers},
    }
    return Outcome(titles, rows, says, numbers, partial(_draw, method, layers))


def _draw(method: FedLoRU, layers: list[Layer]) -> Figure:
    figure, (axes,) = panels(4.6, 3.1, [("rank of what was added to W, each layer a line", "round")])
    rounds = list(range(len(layers[0].ranks)))
    axes.plot(rounds, [bound(method, t) for t in rounds], color=GREY, linestyle="--", linewidth=1.3, label="r ⌈t/τ⌉")
    for k, x in enumerate(layers):
        label = "layers" if k == 0 else None
        axes.plot(rounds, x.ranks, color=BLUE, linewidth=1.4, alpha=0.7, label=label)
    axes.legend(frameon=False, fontsize=8)
    axes.set_ylim(0, 1.15 * max(max(x.full for x in layers), 1) if layers else 1)
    return figure
