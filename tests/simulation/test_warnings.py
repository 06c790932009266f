"""Warnings: each is said of data or settings that deserve it, and of no healthy run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, load_wine
from torch import nn

from conftest import call, make_data, make_task, method_of
from fedspan.config import assemble, load_config
from fedspan.data.federated import FederatedData
from fedspan.errors import DataError
from fedspan.learn.task import Task
from fedspan.method import Method
from fedspan.methods import METHODS, FedAvg, make
from fedspan.simulation import warnings
from fedspan.simulation.simulator import Simulation, simulate

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = sorted([ROOT / "src/fedspan/cli/demo.toml", *(ROOT / "experiments").glob("*.toml")])


def dealt(x: np.ndarray, y: np.ndarray, clients: int = 4) -> FederatedData:
    """A table, dealt out to clients in turn."""
    return FederatedData.from_arrays([(x[i::clients], y[i::clients]) for i in range(clients)])


def standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / x.std(0)


# ------------------------------------------------------------------------------------------------ scales of features


def test_a_table_of_very_different_scales_is_said_and_trains_badly() -> None:
    x, y = load_wine(return_X_y=True)
    raw, scaled = dealt(x, y), dealt(standard(x), y)
    ends = [
        simulate(FedAvg(lr=0.1), lambda: nn.Linear(13, 3), d, rounds=9, workers=1, batch_size=16) for d in (raw, scaled)
    ]
    said = ends[0].messages[0]
    assert said.startswith("Data: deviations of features differ by a factor of 2,") and "(feature 12: 299, " in said
    assert said.endswith("standardise them.") and ends[1].messages == []
    assert ends[0].accuracy["mean"] < 0.75 < 0.9 < ends[1].accuracy["mean"]


@pytest.mark.parametrize(("factor", "told"), [(99.0, False), (101.0, True)])
def test_a_factor_of_a_hundred_decides(factor: float, told: bool) -> None:
    x = standard(np.random.default_rng(0).normal(size=(400, 3))) * np.array([1.0, 3.0, factor])
    data = FederatedData(torch.tensor(x), torch.zeros(400), [np.arange(400)], [np.arange(0)])
    assert (warnings.scales_apart(data) is not None) == told


def test_pictures_rare_categories_constants_and_tokens_have_no_scale_to_tell() -> None:
    digits, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    rare = np.c_[rng.normal(size=(500, 2)), rng.random(500) < 0.00001, rng.random(500) < 0.004, np.full(500, 7.0)]
    rare[0, 2] = 1e-4
    for data in (
        dealt(digits, y),  # flattened: pixels of the border are nearly always 0
        dealt(digits.reshape(-1, 1, 8, 8) * 1000, y),
        dealt(rare, np.arange(500) % 2),
        dealt(rng.integers(0, 30000, (50, 8)), np.arange(50) % 2),
    ):
        assert warnings.scales_apart(data) is None


# ------------------------------------------------------------------------------------------------ labels


def test_a_label_far_outside_asks_for_the_number_of_classes_before_a_model_is_built(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32), np.arange(100) % 10
    y[3] = 999_999
    with pytest.raises(DataError, match=r"of 11 different labels the largest is 999999 and the next 9; correct it, or"):
        dealt(x, y)
    meant = FederatedData.from_arrays([(x, y)], classes=1_000_000)
    assert meant.classes == 1_000_000
    np.savez(tmp_path / "table.npz", x=x, y=y)
    exp = tmp_path / "exp.toml"
    exp.write_text(f'[data]\nsource = "{tmp_path / "table.npz"}"\n[partition]\nclients = 2\n[model]\nkind = "linear"\n')
    refused = call("run", str(exp), "--out", str(tmp_path / "run"), code=2).stderr
    assert "say how many classes there are (data.classes)" in refused and "Traceback" not in refused


def test_many_classes_that_are_filled_and_rows_of_tokens_are_no_outliers() -> None:
    x = np.zeros((3000, 2), np.float32)
    assert FederatedData.from_arrays([(x, np.arange(3000))]).classes == 3000
    tokens = np.array([[1, 31_999], [5, 7]])
    assert FederatedData.from_arrays([(tokens, tokens)], test=[(tokens, tokens)]).classes == 32_000


@pytest.mark.parametrize(("label", "told"), [(255, True), (12, False)])
def test_a_smaller_outlier_is_said(label: int, told: bool) -> None:
    y = np.arange(100) % 10
    y[3] = label
    said = warnings.label_outside(dealt(np.zeros((100, 2), np.float32), y))
    assert (said is not None) == told
    if said is not None:
        assert "label 255 lies far outside the others, which end at 9" in said and "data.classes" in said


# ------------------------------------------------------------------------------------------------ what methods know


@pytest.mark.parametrize("name", ["pfl-mf", "pfl-mf-paper", "pfl-mf-joint", "amht-lrs"])
def test_more_directions_than_clients_are_said(name: str) -> None:
    said = warnings.too_many_directions(make(name, rank=8), 7)
    assert said is not None and "rank = 8 is larger than the number of clients, 7" in said and "to 3 or less" in said
    assert warnings.too_many_directions(make(name, rank=7), 7) is None


def test_a_rank_of_layers_or_one_that_is_searched_needs_no_clients() -> None:
    for method in (make("fedloru", rank=16), make("pfl-mf", rank="auto"), FedAvg()):
        assert warnings.too_many_directions(method, 2) is None


@pytest.mark.parametrize(
    ("name", "keys", "first"),
    [("cfl", {"start_round": 6}, 6), ("pfedsim", {"warmup_rounds": 5}, 6), ("fedara", {"warmup": 5}, 6)],
)
def test_a_method_that_does_not_begin_in_the_rounds_of_the_run_is_said(
    name: str, keys: dict[str, Any], first: int
) -> None:
    method = method_of(METHODS[name], **keys)
    said = warnings.not_begun(method, first - 1)
    assert said is not None and f"before round {first} ({next(iter(keys))} = " in said and "the run has 5" in said
    assert warnings.not_begun(method, first) is None
    assert warnings.not_begun(FedAvg(), 1) is None


def test_what_is_said_not_to_have_begun_is_fedavg_until_then() -> None:
    """The round that a method names is the one in which its state first differs."""
    settings: dict[str, Any] = {"precision": "float64", "workers": 1, "batch_size": 8}

    def losses(method: Method, rounds: int) -> list[float | None]:
        return simulate(method, make_task(), make_data(), rounds=rounds, **settings).per_client["loss"]

    cfl = {"weighting": "samples", "eps_1": float("inf"), "eps_2": 0.0, "start_round": 3}
    for name, keys, first in (("cfl", cfl, 3), ("pfedsim", {"warmup_rounds": 2}, 3)):
        method = method_of(METHODS[name], lr=0.1, **keys)
        begins = method.begins()  # type: ignore[attr-defined]
        assert begins.round == first
        same, other = (np.array(losses(method, r), float) for r in (first - 1, first))
        plain, later = (np.array(losses(FedAvg(lr=0.1), r), float) for r in (first - 1, first))
        assert np.allclose(same, plain, atol=1e-9), name
        assert not np.allclose(other, later, atol=1e-6), name


PROXIMAL: list[tuple[str, dict[str, Any], str]] = [
    ("ditto", {"lr": 0.5, "lam": 4.0}, "lr·lam = 2"),
    ("ditto", {"lr": 0.01, "lr_personal": 1.0, "lam": 3.0}, "lr_personal·lam = 3"),
    ("fedprox", {"lr": 1.0, "mu": 2.0}, "lr·mu = 2"),
    ("pfedme", {"lr": 0.2, "lam": 15.0, "safeguard": False}, "lr·lam = 3"),  # else w_i does not go beyond θ
    ("pfedme", {"lr_inner": 0.2, "lam": 15.0}, "lr_inner·lam = 3"),
]


@pytest.mark.parametrize(("name", "keys", "said"), PROXIMAL)
def test_a_proximal_term_beyond_stability_is_said(name: str, keys: dict[str, Any], said: str) -> None:
    found = warnings.overshooting(method_of(METHODS[name], **keys))
    assert found is not None and f"{said} is beyond stability" in found
    calm = {k: v * 0.6 if k.startswith("lr") else v for k, v in keys.items()}
    assert warnings.overshooting(method_of(METHODS[name], **calm)) is None
    assert warnings.overshooting(method_of(METHODS[name])) is None


def test_momentum_allows_more_and_adamw_does_not_overshoot() -> None:
    ditto = METHODS["ditto"]
    assert warnings.overshooting(method_of(ditto, lr=0.5, lam=4.0, momentum=0.9)) is None
    assert warnings.overshooting(method_of(ditto, lr=1.0, lam=4.0, momentum=0.9)) is not None
    assert warnings.overshooting(method_of(ditto, lr=1.0, lam=4.0, optimizer="adamw")) is None


# ------------------------------------------------------------------------------------------------ exploding losses


def table(scale: float) -> FederatedData:
    """A linear problem whose features are too large for a learning rate of 0.1, or not."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4)) * scale
    return dealt(x, x @ np.ones(4))


def test_a_loss_that_explodes_and_stays_finite_is_said_once_and_kept_on_resume(tmp_path: Path) -> None:
    def run(scale: float, rounds: int, out: Path | None = None) -> list[str]:
        task = Task(nn.Linear(4, 1), "regression", dtype=torch.float64, seed=0)
        settings = {"precision": "float64", "workers": 1, "evaluate_every": 1, "batch_size": "full", "epochs": 1}
        return simulate(make("local", lr=0.1), task, table(scale), rounds=rounds, out=out, **settings).messages

    said = run(6.0, 9, tmp_path / "run")
    assert len(said) == 1 and said[0].startswith("Evaluation after round ") and "training explodes" in said[0]
    again = run(6.0, 10, tmp_path / "run")
    assert again[0] == said[0] and len(again) == 2 and "Resuming" in again[1]
    assert run(0.5, 9) == []


@pytest.mark.parametrize(("kind", "known"), [("classification", np.log(3)), ("regression", 0.25)])
def test_what_explodes_is_measured_by_a_model_that_knows_nothing(kind: Any, known: float) -> None:
    y = np.arange(90) % 3 if kind == "classification" else np.full(90, 0.5)
    data, task = dealt(np.zeros((90, 2), np.float32), y), Task(nn.Linear(2, 3), kind)
    assert warnings.loss_scale(task, data) == pytest.approx(known)
    assert warnings.exploded(task, data, 3, 0.9e4 * known) is None
    said = warnings.exploded(task, data, 3, 1.1e4 * known)
    assert said is not None and said.startswith("Evaluation after round 3: the mean loss is ")


def test_a_trial_of_few_steps_foresees_it() -> None:
    task = Task(nn.Linear(4, 1), "regression", seed=0)
    said = warnings.explodes_alone(task, table(6.0), 0.1, None)
    assert said is not None and "within 50 plain steps at lr = 0.1 the loss of a client grows to" in said
    assert warnings.explodes_alone(task, table(0.5), 0.1, 8) is None


# ------------------------------------------------------------------------------------------------ who says it


def test_run_and_diagnose_say_the_same(tmp_path: Path) -> None:
    x, y = load_wine(return_X_y=True)
    np.savez(tmp_path / "wine.npz", x=x.astype(np.float32), y=y)
    exp = tmp_path / "exp.toml"
    exp.write_text(
        f'rounds = 3\n[data]\nsource = "{tmp_path / "wine.npz"}"\n[partition]\nclients = 3\n[model]\nkind = "linear"\n'
        '[method]\nname = "cfl"\nlr = 0.01\n[train]\nworkers = 1\n'
    )
    ran = call("run", str(exp), "--out", str(tmp_path / "run"), "--quiet").output
    looked = call("diagnose", str(exp)).output
    kept = json.loads((tmp_path / "run" / "result.json").read_text())["messages"]
    listed = json.loads(call("diagnose", str(exp), "--json").stdout)["warnings"]
    assert len(kept) >= 2 and kept[:2] == listed[:2]
    for part in ("deviations of features differ", "it is FedAvg before round 5"):
        assert part in " ".join(ran.split()) and part in " ".join(looked.split())


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_methods_of_the_demo_and_the_experiments_are_silent(path: Path) -> None:
    config = load_config(path)
    for name in {config.method["name"], *config.methods}:
        method = config.only(name)
        said = [warnings.not_begun(method, config.rounds), warnings.overshooting(method)]
        said.append(warnings.too_many_directions(method, config.partition.clients or 10**6))
        assert said == [None] * 3


def test_the_demo_is_silent() -> None:
    config = load_config(ROOT / "src/fedspan/cli/demo.toml")
    _, task, data = assemble(config)
    sim = Simulation(FedAvg(lr=0.7), task, data, rounds=2, settings=config.train)
    assert sim.run().messages == []
    assert warnings.explodes_alone(task, data, 0.7, 16) is None
