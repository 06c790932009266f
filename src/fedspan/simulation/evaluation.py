"""Summaries of per-client results: mean, weighted mean, spread, the worst tenth, last and best rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspan.simulation.protocols import JudgedModel

Floats = NDArray[np.float64]
Line = Mapping[str, Any]


def per_client(sums: Mapping[str, Floats]) -> dict[str, list[float | None]]:
    """Means per client from sums and counts (`n`); None for a client without held-out examples."""
    n = np.asarray(sums["n"], np.float64)
    out: dict[str, list[float | None]] = {"n": [int(c) for c in n]}
    for name, total in sums.items():
        if name in ("n", "tokens", "token_loss"):
            continue
        out[name] = [float(s / c) if c > 0 else None for s, c in zip(np.asarray(total, np.float64), n)]
        if name == "squared_error":
            out["rmse"] = [None if v is None else float(np.sqrt(v)) for v in out[name]]
    if "tokens" in sums:  # per token, not per row: the loss whose exponential is the perplexity
        pairs = zip(np.asarray(sums["token_loss"], np.float64), np.asarray(sums["tokens"], np.float64))
        out["loss"] = [float(s / c) if c > 0 else None for s, c in pairs]
        with np.errstate(over="ignore"):
            out["perplexity"] = [None if v is None else float(np.exp(v)) for v in out["loss"]]
    return out


def summary(values: Sequence[float | None], n: Sequence[float]) -> dict[str, float]:
    """Mean over clients, mean weighted by held-out examples, standard deviation and 10th percentile over clients."""
    kept = [(v, w) for v, w in zip(values, n) if v is not None]
    if not kept:
        return {}
    v, w = np.array([a for a, _ in kept]), np.array([b for _, b in kept], np.float64)
    with np.errstate(all="ignore"):  # huge losses may overflow; who saves them checks that they are finite
        return {
            "mean": float(v.mean()),
            "weighted": float((v * w).sum() / w.sum()),
            "std": float(v.std()),
            "p10": float(np.percentile(v, 10)),
        }


def summarise(clients: Mapping[str, Sequence[float | None]]) -> dict[str, dict[str, float]]:
    """`summary` of every measure."""
    n = [c or 0.0 for c in clients["n"]]
    return {name: summary(values, n) for name, values in clients.items() if name != "n"}


def curve(lines: Sequence[Mapping[str, Any]], measure: str = "accuracy", of: str = "mean") -> list[tuple[int, float]]:
    """(round, value) of every evaluated round."""
    return [(line["round"], line[measure][of]) for line in lines if of in (line.get(measure) or {})]


def last(lines: Sequence[Mapping[str, Any]], k: int = 5, measure: str = "accuracy", of: str = "mean") -> float | None:
    """Mean of the last k evaluations (the protocol `last5`)."""
    values = [v for _, v in curve(lines, measure, of)][-k:]
    return float(np.mean(values)) if values else None


def best(
    lines: Sequence[Mapping[str, Any]], measure: str = "accuracy", of: str = "mean", higher: bool = True
) -> float | None:
    """The best evaluation over rounds (the protocol `best`)."""
    return (max if higher else min)((v for _, v in curve(lines, measure, of)), default=None)


def protocols(found: Mapping[str, Mapping[str, float]], lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The last evaluation's accuracy, with what other protocols would report beside it."""
    accuracy = found.get("accuracy", {})
    others = {"last5": last(lines), "best": best(lines)} if accuracy else {}
    if "accuracy_after" in found:
        others |= {"after": found["accuracy_after"]["mean"], "best_after": best(lines, "accuracy_after")}
    return {**accuracy, **{k: v for k, v in others.items() if v is not None}}


def side_by_side(
    name: str,
    higher: bool,
    ways: Sequence[JudgedModel],
    found: Mapping[str, Mapping[str, float]],
    lines: Sequence[Line],
) -> dict[str, dict[str, dict[str, float]]]:
    """What every protocol would report of one measure: by which model, per client or pooled, at which round.

    Of a model that was judged there are `mean` over clients and `pooled` over examples, each of the `last` evaluation,
    the mean of the last five (`last5`), and the `best`.
    """
    out: dict[str, dict[str, dict[str, float]]] = {}
    for way in ways:
        column = name + way.suffix
        for of in ("mean", "pooled"):
            if of not in found.get(column, {}):
                continue
            told = {"last": found[column][of], "last5": last(lines, measure=column, of=of)}
            told["best"] = best(lines, column, of, higher)
            out.setdefault(way.words, {})[of] = {k: v for k, v in told.items() if v is not None}
    return out


def with_pooled(
    found: dict[str, dict[str, float]], metrics: Mapping[str, bool], pooled: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Summaries with what a run that asks for metrics has beside: values over all examples, and the bad end of errors.

    Args:
        metrics: whether higher is better, by name.
        pooled: of metrics that are no means over examples.
    """
    out = {}
    for name, told in found.items():
        more = {"pooled": pooled[name]} if name in pooled else {}
        stem = next((m for m in (*metrics, "accuracy", "loss", "rmse") if name == m or name.startswith(f"{m}_")), None)
        if stem == "rmse":
            squared = found.get("squared_error" + name.removeprefix("rmse"))
            more = {} if squared is None else {"pooled": float(np.sqrt(squared["weighted"]))}
        elif stem in ("accuracy", "loss") and not more:
            more = {"pooled": told["weighted"]}  # a mean over examples
        out[name] = {**told, **more}
    return out


def to_target(
    lines: Sequence[Mapping[str, Any]], target: float, measure: str = "accuracy", higher: bool = True
) -> dict[str, Any] | None:
    """Round, bytes sent (both ways) and seconds when the mean first reaches a target; None if it never does.

    `higher` says whether a higher value is better; otherwise the mean must fall to the target. `clock` is the time on
    the clients' devices and `flops` the operations of all clients, where a run was given devices.
    """
    up = down = 0
    seconds = flops = 0.0
    for line in lines:
        up += line["bytes"]["up"]
        down += line["bytes"]["down"] + line["bytes"].get("announce", 0)
        seconds += line["seconds"]
        clock = line.get("clock", {})
        flops += clock.get("flops", 0.0)
        mean = line[measure]["mean"] if line.get(measure) else None
        if mean is not None and (mean >= target if higher else mean <= target):
            found = {"round": line["round"], "up": up, "down": down, "seconds": seconds}
            found |= {"clock": clock["total"]} if clock else {}
            return found | ({"flops": flops} if "flops" in clock else {})  # runs of earlier versions did not count them
    return None
