"""Optimisers of the server: their equations by hand, step 1 without momentum = the mean, state that survives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import assert_close, assert_same, finished, make_data, make_task, method_of
from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.server_optimizer import moments, step
from fedspan.method import norm_of_state
from fedspan.methods import Cfl, FedAvg, Oracle, make
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation

# One method of each way a server makes its averages.
AVERAGING: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("pfedme", {"beta": 0.7}),
    ("pfedfda", {}),
    ("flute", {"head_epochs": 1}),
    ("pfedsim", {"warmup_rounds": 2}),
    ("fedhm", {"rho": (1.0, 2.0)}),
    ("fedlmt", {}),
    ("factorized-fedavg", {"mu_start": "dense"}),
    ("oracle", {}),
    ("cfl", {"start_round": 2, "eps_1": 10.0, "eps_2": 0.0}),
    ("fedloru", {"rank": 2, "tau": 2}),
    ("pfl-mf-joint", {"rank": 2, "lr": 0.01}),
]


@pytest.mark.parametrize(("name", "fields"), AVERAGING, ids=[name for name, _ in AVERAGING])
def test_a_step_of_one_without_momentum_is_the_mean(name: str, fields: dict[str, Any]) -> None:
    plain = finished(make(name, **fields))
    same = finished(make(name, server_optimizer="sgd", server_momentum=0.0, **fields))
    for i in range(7):
        assert_close(plain.personal(i)[1], same.personal(i)[1], 1e-9 if name == "fedhm" else 1e-12)
    other = finished(make(name, server_optimizer="sgd", server_lr=0.5, server_momentum=0.0, **fields))
    assert tree.digest(plain.personal(0)[1]) != tree.digest(other.personal(0)[1])


@pytest.mark.parametrize("rule", ["sgd", "adam", "adagrad", "yogi"])
def test_rules_are_those_of_the_papers(rule: Any) -> None:
    rng = np.random.default_rng(0)
    lr, b1, b2, eps = 0.3, 0.8, 0.7, 0.01
    x = rng.normal(size=5)
    have: Any = {"w": torch.tensor(x)}
    state = moments(rule, b1, have)
    m, v = np.zeros(5), np.zeros(5)
    for _ in range(4):
        mean = rng.normal(size=5)
        have, state = step(rule, have, {"w": torch.tensor(mean)}, state, lr, momentum=b1, beta2=b2, epsilon=eps)
        delta = mean - x  # Reddi et al. write the change, not its negative
        if rule == "sgd":
            m = b1 * m + delta
            x = x + lr * m
        else:
            m = b1 * m + (1 - b1) * delta
            v = {
                "adam": b2 * v + (1 - b2) * delta**2,
                "adagrad": v + delta**2,
                "yogi": v - (1 - b2) * delta**2 * np.sign(v - delta**2),
            }[rule]
            x = x + lr * m / (np.sqrt(v) + eps)
        assert_close(have, {"w": torch.tensor(x)})


def test_models_nobody_reported_for_stay_with_their_moments() -> None:
    x = {"w": torch.ones(3, 2)}
    state = moments("adam", 0.9, x, 3)
    live = torch.tensor([True, False, True])
    mean = {"w": torch.zeros(3, 2)}
    x1, s1 = step("adam", x, mean, state, 0.1, corrected=True, live=live)
    assert s1["steps"].tolist() == [1, 0, 1]
    assert_same(x1["w"][1], x["w"][1])
    assert not s1["m"]["w"][1].any() and s1["m"]["w"][0].all()
    # The corrected first step is of size lr, whatever the gradient.
    assert x1["w"][0].tolist() == pytest.approx([0.9, 0.9], abs=1e-3)
    one, _ = step(
        "adam", {"w": x["w"][0]}, {"w": mean["w"][0]}, moments("adam", 0.9, {"w": x["w"][0]}), 0.1, corrected=True
    )
    assert_close(one["w"], x1["w"][0])


def test_a_silent_group_does_not_drift() -> None:
    few = {"participation": 0.15, "rounds": 1}  # one client a round
    sim = finished(method_of(Oracle, server_optimizer="sgd", lr=0.3), **few)
    again = finished(method_of(Oracle, server_optimizer="sgd", lr=0.3), **{**few, "rounds": 6})
    assert (again.record.server["optimizer"]["m"]["theta"]["0.weight"] != 0).flatten(1).any(1).all()
    heard = (sim.record.server["optimizer"]["m"]["theta"]["0.weight"] != 0).flatten(1).any(1)
    assert heard.sum() == 1
    start = make_task().init()["0.weight"]
    assert_same(sim.record.server["theta"]["0.weight"][~heard][0], start)


def test_a_split_inherits_the_moments() -> None:
    fields = {"start_round": 2, "eps_1": 10.0, "eps_2": 0.0, "server_optimizer": "adam", "server_lr": 0.05}
    before = finished(method_of(Cfl, **fields), rounds=1, participation=1.0).record.server  # type: ignore[arg-type]
    after = finished(method_of(Cfl, **fields), rounds=2, participation=1.0).record.server  # type: ignore[arg-type]
    assert len(before["a"]) == 1 and len(after["a"]) == 2
    assert after["optimizer"]["steps"].tolist() == [2, 2]
    assert after["optimizer"]["m"]["theta"]["0.weight"].shape[0] == 2


def test_running_statistics_are_means_whatever_the_rule() -> None:
    plain = finished(FedAvg(), "batchnorm", rounds=1)
    adam = finished(method_of(FedAvg, server_optimizer="adam"), "batchnorm", rounds=1)
    for k, p in tree.without(adam.record.server["theta"], ["conv.bias"]).items():  # which the norm makes idle
        assert torch.equal(p, plain.record.server["theta"][k]) == k.endswith(("running_mean", "running_var"))


def test_state_survives_save_and_load(tmp_path: Path) -> None:
    method = method_of(FedAvg, server_optimizer="yogi", server_lr=0.05, server_corrected=True)
    settings = Settings(evaluate_every=100, participation=0.6, batch_size=8, workers=1, precision="float64")

    def run(rounds: int, out: Path | None) -> Simulation:
        sim = Simulation(method, make_task(), make_data(), rounds=rounds, seed=5, settings=settings, out=out)
        sim.run()
        return sim

    run(2, tmp_path / "run")
    again = run(4, tmp_path / "run")
    assert again.record.resumed
    assert again.record.digest() == run(4, None).record.digest()
    assert float(again.record.server["optimizer"]["steps"]) == 4


def test_the_optimiser_is_neither_sent_nor_counted_as_size() -> None:
    plain, adam = finished(FedAvg(), rounds=1), finished(method_of(FedAvg, server_optimizer="adam"), rounds=1)
    assert plain.record.progress.totals["down"] == adam.record.progress.totals["down"]
    server = adam.record.server
    assert norm_of_state(server) == norm_of_state({"theta": server["theta"]})


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("fedavg", {"server_optimizer": "lamb"}, "server_optimizer must be one of 'none', 'sgd', 'adam', 'adagrad'"),
        ("fedavg", {"server_lr": 0.0}, "server_lr must be a finite number > 0"),
        ("fedavg", {"server_momentum": 1.0}, "server_momentum must be a finite number >= 0 and < 1"),
        ("fedavg", {"server_epsilon": 0.0}, "server_epsilon must be a finite number > 0"),
        ("fedfomo", {"server_optimizer": "sgd"}, "server_optimizer must be 'none', as clients mix the models"),
        ("pfl-mf", {"server_optimizer": "adam"}, "server_optimizer must be 'none', as server_step says"),
        ("factorized-fl-alpha", {"server_optimizer": "adam"}, "server_optimizer must be 'none', as no one average"),
        ("pfedsim", {"server_optimizer": "sgd", "warmup_rounds": 0}, "server_optimizer must be 'none', as only a warm"),
    ],
)
def test_bad_fields_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        make(name, **fields)
    assert message in str(e.value) and "\n" not in str(e.value)
