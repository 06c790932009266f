"""What decides a run's numbers: named settings are free, all others are not, and every asker derives from one list."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from conftest import make_data, make_task
from fedspan.config import from_dict
from fedspan.deploy.experiment import Experiment
from fedspan.errors import CheckpointError
from fedspan.methods import FedAvg
from fedspan.simulation import identity
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.storage.tree_file import render

OTHER: dict[str, Any] = {
    "device": "cpu",
    "participation": 0.5,
    "sampling": "bernoulli",
    "batch_size": "full",
    "epochs": 2,
    "evaluate_every": 3,
    "evaluate_clients": 2,
    "evaluate_part": "validation",
    "evaluate_after": True,
    "drop_rate": 0.1,
    "drop": "before",
    "on_divergence": "halve",
    "precision": "float64",
    "mapping": "loop",
    "chunk": 2,
    "workers": 1,
    "start_method": "spawn",
    "checkpoint_every": 2,
    "checkpoint_seconds": 0.5,
    "memory_mb": 64,
}
CONFIG = {"name": "a", "rounds": 2, "seed": 1, "data": {"name": "synthetic"}, "method": {"name": "fedavg"}}


@pytest.mark.parametrize("name", [f.name for f in fields(Settings)])
def test_every_setting_decides_unless_it_is_named_as_free(name: str) -> None:
    changed = replace(Settings(), **{name: OTHER[name]})
    free = name in identity.FREE_SETTINGS
    same = identity.of_settings(changed) == identity.of_settings(Settings())
    assert same == free
    assert (key(CONFIG, changed) == key(CONFIG, Settings())) == free
    assert (run(CONFIG, changed) == run(CONFIG, Settings())) == free
    held = {"partition": {"clients": 4, "validation": 0.2}}  # a validation part, for the setting that asks for one
    plain = from_dict(held, name="x").identity()
    assert (from_dict(held | {"train": {name: OTHER[name]}}, name="x").identity() == plain) == free


def key(config: dict[str, Any], settings: Settings) -> str:
    return Experiment(FedAvg(), make_task(), 1, settings, 2, "a", config).key


def run(config: dict[str, Any], settings: Settings) -> dict[str, Any]:
    return identity.of_run(config, settings, method={"name": "fedavg", "lr": 0.1}, seed=1, mapping="vmap")


def test_the_name_and_the_number_of_rounds_are_free_and_data_are_a_node_s_own() -> None:
    later = CONFIG | {"name": "b", "rounds": 9}
    elsewhere = CONFIG | {"data": {"name": "mnist"}}
    assert key(later, Settings()) == key(CONFIG, Settings()) == key(elsewhere, Settings())
    assert run(later, Settings()) == run(CONFIG, Settings()) != run(elsewhere, Settings())
    assert key(CONFIG | {"model": {"kind": "cnn"}}, Settings()) != key(CONFIG, Settings())


def test_a_run_is_told_apart_by_dotted_keys() -> None:
    found = run(CONFIG, Settings(chunk=3))
    assert found["method.lr"] == 0.1 and found["train.chunk"] == 3 and found["config.data.name"] == "synthetic"
    assert found["seed"] == 1 and not any(k.startswith(("config.method", "config.rounds")) for k in found)


def test_a_run_of_an_older_layout_is_refused_and_can_be_started_anew(tmp_path: Path) -> None:
    def simulation(**more: Any) -> Simulation:
        settings = Settings(precision="float64", workers=1)
        return Simulation(FedAvg(), make_task(), make_data(), rounds=1, settings=settings, out=tmp_path, **more)

    simulation().run()
    for path in (tmp_path / "checkpoints").glob("manifest-*.json"):
        body = json.loads(path.read_text())
        del body["sha256"]
        body["schema"] = 1
        extra = body["extra"]
        extra |= {"totals": {"up": 1}, "names": {"up/theta": 1}}
        del extra["bytes"]
        path.write_bytes(render(body))
    with pytest.raises(CheckpointError, match=r"layout of an older fedspan .* --fresh, or choose another .* --out\.$"):
        simulation()
    assert not simulation(fresh=True).record.resumed
