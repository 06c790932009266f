"""`[evaluate]`: metrics, which model is judged by which rule, pooled or not, and what is kept of every client."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from conftest import assert_same, make_data, make_task
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError, DataError
from fedspan.learn.batches import Epochs
from fedspan.learn.metrics import Metric
from fedspan.learn.sgd import sgd
from fedspan.method import Method
from fedspan.methods import make
from fedspan.simulation.onboarding import onboard, train_alone
from fedspan.simulation.protocols import EvaluationSettings, JudgedModel, evaluation_settings
from fedspan.simulation.settings import Settings, sample
from fedspan.simulation.simulator import Simulation
from fedspan.storage.client_history import ClientHistory

ALL = EvaluationSettings(metrics=("roc_auc", "ece"), models=("received", "own", "trained", "head"))


def two_classes(clients: int = 6) -> FederatedData:
    """Ragged clients with two classes, of which the last one has only one in its test part."""
    data = make_data(clients=clients, opposed=False)
    y = (data.y > 0).long()
    y[torch.from_numpy(data.test[clients - 1])] = 1
    return replace(data, y=y, classes=2)


def run(method: Method, rounds: int = 3, evaluate: Any = ALL, out: Path | None = None, **more: Any) -> Any:
    chosen: dict[str, Any] = {"participation": 0.5, "batch_size": 8, "epochs": 2, "precision": "float64", "workers": 1}
    settings = Settings(**chosen | {"evaluate_every": 2, "checkpoint_seconds": 0.0} | more)
    data, task = two_classes(), make_task()
    sim = Simulation(method, task, data, rounds=rounds, seed=5, settings=settings, evaluate=evaluate, out=out)
    result = sim.run()
    assert result.simulation is sim
    return result


def probabilities(sim: Simulation, client: int, weights: Any) -> tuple[Any, Any]:
    rows = torch.from_numpy(sim.data.test[client])
    return sim.data.labels(client, "test").numpy(), make_task().predict(weights, sim.data.x[rows]).softmax(1).numpy()


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_metrics_are_those_of_a_clients_own_predictions_and_pooled(mapping: str) -> None:
    result = run(make("fedavg", lr=0.2), mapping=mapping, evaluate={"metrics": ["ece", "balanced_accuracy"]})
    sim = result.simulation
    everybody = [probabilities(sim, i, sim.record.server["theta"]) for i in range(6)]
    metrics = {m.name: m for m in sim.engine.metrics}
    for name in ("ece", "balanced_accuracy"):
        assert result.per_client[name] == pytest.approx([metrics[name](*pair) for pair in everybody], abs=1e-12)
        y, p = (np.concatenate([pair[k] for pair in everybody]) for k in (0, 1))
        assert result.measures[name]["pooled"] == pytest.approx(metrics[name](y, p), abs=1e-12)
    assert result.measures["accuracy"]["pooled"] == result.measures["accuracy"]["weighted"]
    assert not result.evaluation["metrics"]["ece"]["higher"]


def test_nothing_changes_for_who_asks_for_nothing(tmp_path: Path) -> None:
    plain = run(make("ditto", lr=0.1), evaluate=None, out=tmp_path / "plain")
    asked = run(make("ditto", lr=0.1), out=tmp_path / "asked")
    assert plain.digest == asked.digest and plain.bytes == asked.bytes
    assert plain.per_client.items() <= asked.per_client.items() and plain.accuracy.items() <= asked.accuracy.items()
    written = json.loads((tmp_path / "plain/result.json").read_text())
    assert "evaluation" not in written and set(written["measures"]["accuracy"]) == {"mean", "weighted", "std", "p10"}
    assert not (tmp_path / "plain/clients.npz").exists() and (tmp_path / "asked/clients.npz").exists()
    assert all('"own"' not in p.read_text() for p in (tmp_path / "plain/checkpoints").glob("manifest*"))


def test_a_client_with_one_class_is_left_out_and_named() -> None:
    result = run(make("fedavg", lr=0.2), evaluate={"metrics": ["roc_auc"]})
    assert result.per_client["roc_auc"][5] is None and result.per_client["accuracy"][5] is not None
    assert result.evaluation["left_out"]["roc_auc"]["5"] == "it needs examples of two classes"
    assert None not in result.per_client["roc_auc"][:2]
    kept = [v for v in result.per_client["roc_auc"] if v is not None]
    assert result.measures["roc_auc"]["mean"] == pytest.approx(np.mean(kept))
    assert 0.0 < result.measures["roc_auc"]["pooled"] <= 1.0  # all clients together have both classes


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_the_own_model_is_the_one_after_a_clients_last_training(mapping: str) -> None:
    """FedAvg's clients keep nothing: their own models are what they sent in the last round they took part in."""
    method = make("fedavg", lr=0.2)
    result = run(method, rounds=4, mapping=mapping)
    sim = result.simulation
    trained: dict[int, Any] = {}
    replay = Simulation(method, make_task(), two_classes(), rounds=0, seed=5, settings=sim.settings)
    server = replay.record.server
    for t in range(1, 5):
        for i in sample(6, sim.settings, 5, t):
            visit, _, _ = replay.engine._visit(i, t, method.plan(), {})
            trained[i] = sgd(make_task().loss, server["theta"], visit["train"], 0.2)
        step = Simulation(method, make_task(), two_classes(), rounds=t, seed=5, settings=sim.settings)
        step.run()
        server = step.record.server
    for i in range(6):
        got = result.per_client["loss_own"][i]
        if i not in trained:
            assert got is None
            continue
        y, p = probabilities(sim, i, trained[i])
        assert got == pytest.approx(float(-np.log(p[np.arange(len(y)), y]).mean()), abs=1e-10)
        if result.per_client["roc_auc_own"][i] is not None:
            assert result.per_client["roc_auc_own"][i] == pytest.approx(roc_auc_score(y, p[:, 1]), abs=1e-12)
    assert len(trained) >= 4


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedkd", "fedas", "pfl-mf", "fedpara", "fedalt"])
def test_every_model_is_judged_without_a_trace(name: str) -> None:
    method = make(name, lr=0.1, **({"rank": 2} if name == "pfl-mf" else {}))
    plain, judged = run(method, evaluate=None), run(method)
    assert plain.digest == judged.digest and plain.bytes == judged.bytes
    assert plain.per_client.items() <= judged.per_client.items()
    for end in ("_own", "_after", "_head"):
        assert f"loss{end}" in judged.measures and f"roc_auc{end}" in judged.measures, end
    told = judged.evaluation["protocols"]["roc_auc"]
    assert list(told) == ["as received", "own last", "trained once more", "head fitted"]
    assert set(told["as received"]) == {"mean", "pooled"} and set(told["own last"]) == {"mean"}
    assert set(told["as received"]["pooled"]) == {"last", "last5", "best"}
    means = [line["roc_auc_head"]["mean"] for line in judged.curve if "roc_auc_head" in line]
    assert told["head fitted"]["mean"]["best"] == max(means) and len(means) == 2
    lowest = [line["ece"]["pooled"] for line in judged.curve if "ece" in line]
    assert judged.evaluation["protocols"]["ece"]["as received"]["pooled"]["best"] == min(lowest)


def test_the_head_is_fitted_with_the_body_as_it_was() -> None:
    settings = EvaluationSettings(models=("received", "head"), head_epochs=3, head_lr=0.3)
    result = run(make("fedavg", lr=0.2), evaluate=settings, mapping="loop")
    sim, task = result.simulation, make_task()
    visit, _, _ = sim.engine._visit(2, 3, {"head fit": Epochs(3)}, {})
    theta = sim.record.server["theta"]
    body = {k: v for k, v in theta.items() if k not in task.head}
    head = sgd(lambda h, b: task.loss(body | h, b), {k: theta[k] for k in task.head}, visit["head fit"], 0.3)
    y, p = probabilities(sim, 2, body | head)
    assert result.per_client["accuracy_head"][2] == pytest.approx((p.argmax(1) == y).mean())
    assert result.per_client["loss_head"][2] == pytest.approx(-np.log(p[np.arange(len(y)), y]).mean(), abs=1e-10)


@pytest.mark.parametrize("own", ["head", "prototype"])
def test_both_rules_of_prediction_from_one_run(own: str) -> None:
    other = {"head": "prototype", "prototype": "head"}[own]
    asked = EvaluationSettings(predict_by=("head", "prototype"), models=("received", "trained"))
    for name in ("fedproto", "fedtgp"):
        both = run(make(name, lr=0.1, predict_by=own), evaluate=asked)
        alone = run(make(name, lr=0.1, predict_by=other), evaluate=None, evaluate_after=True)
        for column in ("accuracy", "loss", "accuracy_after"):
            assert both.per_client[f"{column}_by_{other}"] == pytest.approx(alone.per_client[column], abs=1e-12)
        assert f"accuracy_by_{own}" not in both.per_client and both.digest == alone.digest
        assert f"as received, by {other}" in both.evaluation["protocols"]["accuracy"]
    assert not [k for k in run(make("fedavg"), evaluate=asked).per_client if "_by_" in k]  # it has one rule only


def test_a_method_without_one_model_goes_on_without_a_fitted_head() -> None:
    result = run(make("lr-bpfl", lr=0.05), evaluate=EvaluationSettings(models=("received", "head")))
    assert "accuracy" in result.measures and "accuracy_head" not in result.measures
    said = [m for m in result.messages if m.startswith("Evaluate: no model 'head fitted'")]
    assert len(said) == 1 and "LrBpfl" in said[0]


def test_resumed_runs_keep_the_values_of_every_evaluation(tmp_path: Path) -> None:
    method = make("fedavg", lr=0.2)
    whole = run(method, rounds=6, out=tmp_path / "whole")
    run(method, rounds=4, out=tmp_path / "parts")
    again = run(method, rounds=6, out=tmp_path / "parts")
    a, b = (dict(np.load(tmp_path / name / "clients.npz")) for name in ("whole", "parts"))
    assert a.keys() == b.keys() and a["round"].tolist() == [2, 4, 6] and a["roc_auc_own"].shape == (3, 6)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
    assert whole.per_client == again.per_client and whole.evaluation == again.evaluation
    assert [None if math.isnan(v) else v for v in a["roc_auc"][-1]] == whole.per_client["roc_auc"]


def test_metrics_may_be_asked_for_later_and_a_damaged_history_costs_only_itself(tmp_path: Path) -> None:
    run(make("fedavg", lr=0.2), evaluate=None, out=tmp_path)
    (tmp_path / "clients.npz").write_bytes(b"PK\x03\x04 not a zip")
    later = run(make("fedavg", lr=0.2), evaluate={"metrics": ["roc_auc"]}, out=tmp_path)
    assert later.rounds == 3 and "roc_auc" in later.measures
    assert any("clients.npz is damaged" in m for m in later.messages)
    assert np.load(tmp_path / "clients.npz")["round"].tolist() == [3]


def test_a_history_fills_what_was_not_looked_at() -> None:
    history = ClientHistory(3)
    history.add(1, [0, 2], {"loss": [1.0, None]})
    history.add(2, [1], {"loss": [2.0], "mae": [3.0]})
    history.add(2, [1], {"loss": [4.0]})
    found = history.arrays()
    np.testing.assert_array_equal(found["loss"], [[1.0, np.nan, np.nan], [np.nan, 4.0, np.nan]])
    assert found["round"].tolist() == [1, 2] and "mae" not in found


def test_workers_give_the_same_metrics() -> None:
    one, two = (run(make("ditto", lr=0.1), workers=w, chunk=2) for w in (1, 2))
    assert one.per_client == two.per_client and one.evaluation == two.evaluation
    assert_same(one.simulation.record.server, two.simulation.record.server)


def test_bad_settings_are_refused() -> None:
    for keys, said in (
        ({"metrics": ["roc"]}, r"metrics must be names.*Got 'roc'"),
        ({"metrics": ["mae", "mae"]}, r"a name of its own. Got 'mae' twice"),
        ({"metrics": ["missing.module:f"]}, r"code of package 'missing' must be allowed"),
        ({"metrics": [Metric("loss_after", lambda y, p: 0.0)]}, r"must not end in '_after'"),
        ({"models": ["last"]}, r"models must be a list of .*'received', 'own', 'trained', 'head'. Got \['last'\]"),
        ({"models": ["own"]}, r"models must begin with 'received'. Got \['own'\]"),
        ({"models": []}, r"models must be"),
        ({"predict_by": ["nearest"]}, r"predict_by must be"),
        ({"head_epochs": 0}, r"head_epochs must be an integer >= 1. Got 0"),
        ({"metric": ["mae"]}, r"unknown key 'metric'. Did you mean 'metrics'"),
    ):
        with pytest.raises(ConfigError, match=said):
            evaluation_settings(keys)
    with pytest.raises(ConfigError, match=r"must be EvaluationSettings or a dict with metrics.*Got list"):
        evaluation_settings(["roc_auc"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'f1' needs exactly two classes. Got 3"):
        Simulation(
            make("fedavg"),
            make_task(),
            make_data(),
            rounds=1,
            evaluate={"metrics": ["f1"]},
            settings=Settings(precision="float64"),
        )
    assert JudgedModel("trained", "prototype").suffix == "_after_by_prototype"


def test_a_metric_that_fails_is_told_with_its_client() -> None:
    def broken(y: Any, p: Any) -> float:
        return {}["x"]  # type: ignore[no-any-return]

    with pytest.raises(
        ConfigError, match=r"metric 'broken' failed \(KeyError: 'x'\). Client \d, \d+ examples. Return NaN"
    ):
        run(make("fedavg"), evaluate={"metrics": [broken]}, chunk=1)


def test_a_newcomer_has_the_metrics_of_the_run() -> None:
    sim = run(make("fedavg", lr=0.2), evaluate={"metrics": ["roc_auc", "ece"]}).simulation
    rows = torch.from_numpy(np.concatenate([sim.data.train[0], sim.data.train[1]]))
    new = onboard(sim, sim.data.x[rows], sim.data.y[rows], sim.data.x[rows], sim.data.y[rows])
    p = make_task().predict(sim.record.server["theta"], sim.data.x[rows]).softmax(1).numpy()
    assert new.measures["roc_auc"] == pytest.approx(roc_auc_score(sim.data.y[rows], p[:, 1]), abs=1e-12)
    one = rows[sim.data.y[rows] == 1]
    lone = onboard(sim, sim.data.x[rows], sim.data.y[rows], sim.data.x[one], sim.data.y[one])
    assert "roc_auc" not in lone.measures and "ece" in lone.measures
    assert {"roc_auc", "ece", "accuracy"} <= train_alone(sim, new).measures.keys()
    with pytest.raises(DataError, match=r"labels of an example must have shape \(\) as in the run. Got \(1,\)"):
        onboard(sim, sim.data.x[rows], sim.data.y[rows][:, None])
