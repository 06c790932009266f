"""`fedspan diagnose`: what kind of heterogeneity an experiment has, before any of it is run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspan.cli.console import note, say, show, table
from fedspan.cli.run import Experiment, Overrides

if TYPE_CHECKING:
    from fedspan.config import RunConfig
    from fedspan.data.federated import FederatedData
    from fedspan.learn.task import Task
    from fedspan.studies.diagnosis import Diagnosis

Json = Annotated[bool, typer.Option("--json", help="Everything as JSON.")]
_SHOWN = 12  # eigenvalues


def diagnose(exp: Experiment, overrides: Overrides = None, as_json: Json = False) -> None:
    """Say how the clients differ, which methods suit that, and what a run would warn of; no run is made."""
    from fedspan.config import assemble, load_config
    from fedspan.studies.diagnosis import diagnose as look

    config = load_config(exp, overrides or [])
    _, task, data = assemble(config)
    found, warned = look(task, data), cautions(config, task, data)
    if as_json:
        typer.echo(json.dumps({**facts(found), "warnings": warned}, indent=1, allow_nan=False))
        return
    for sentence in warned:
        note(sentence)
    for sentence in found.sentences():
        say(sentence)
    top = max(float(found.steps.spectrum[0]), 1e-12)
    bars = [
        (
            k,
            f"{v / top:.2f}",
            "█" * round(30 * max(0.0, v) / top) + (" above the noise" if k == found.steps.rank else ""),
        )
        for k, v in enumerate(found.steps.spectrum[:_SHOWN].tolist(), 1)
    ]
    show(table(["direction", "share of the first", "spectrum of the stacked steps"], bars, right=(0, 1)))
    rows = [(m, ", ".join(f"{k} = {v}" for k, v in found.settings(m).items()), why) for m, why in found.advice()]
    show(table(["try", "with", "because"], rows))
    say(f"Directions in which clients differ, for the rank of a subspace of models: {found.rank}.")
    say(f"Next: fedspan compare {exp} {found.comparison()}")


def cautions(config: RunConfig, task: Task, data: FederatedData) -> list[str]:
    """What a run of the file's methods would warn of, and whether it would explode; each sentence once."""
    from fedspan.method import Training
    from fedspan.simulation import warnings

    methods = [config.only(name) for name in dict.fromkeys([config.method["name"], *config.methods])]
    found = [sentence for method in methods for sentence in warnings.before_run(method, data, config.rounds)]
    rates = [method.lr for method in methods if isinstance(method, Training)]
    size = None if config.train.batch_size == "full" else config.train.batch_size
    exploding = warnings.explodes_alone(task, data.to(config.train.torch_dtype), max(rates), size) if rates else None
    return list(dict.fromkeys([*found, *([exploding] if exploding else [])]))


def facts(found: Diagnosis) -> dict[str, Any]:
    """The diagnosis in plain values."""
    s, g = found.statistics, found.steps
    return {
        "kind": found.kind,
        "also": list(found.also),
        "groups": found.groups,
        "rank": found.rank,
        "methods": list(found.methods),
        "settings": {m: found.settings(m) for m in found.methods},
        "clients": found.sample.clients,
        "labels_beyond_chance": s.labels,
        "classes_held": s.classes_held,
        "inputs_between_clients": s.inputs,
        "meaning_between_clients": s.meaning,
        "meaning_within_groups": s.within,
        "group_of_client": None if s.groups is None else dict(zip(map(str, found.sample.ids), s.groups.tolist())),
        "linear_fits": None if found.fits is None else vars(found.fits),
        "steps_cosine_apart": g.apart,
        "steps_cosine_repeated": g.repeated,
        "spectrum": g.spectrum.tolist(),
        "directions": g.rank,
    }
