"""`fedspan diagnose`: the shares of variance by hand, the number of directions, and the kinds of known partitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import call
from fedspan.data import load, partition
from fedspan.data.federated import FederatedData
from fedspan.learn.task import Task
from fedspan.models import build
from fedspan.studies.diagnosis import Diagnosis, diagnose
from fedspan.studies.diagnosis.advice import SUITED
from fedspan.studies.diagnosis.fits import left_out
from fedspan.studies.diagnosis.score import ScoredCase, case_from, totals
from fedspan.studies.diagnosis.statistics import between, label_distance

DIGITS = load("digits")


def look(data: FederatedData) -> Diagnosis:
    kind = "classification" if data.classes else "regression"
    task = Task(lambda: build("mlp", tuple(data.x.shape[1:]), data.classes or 1, hidden=[16]), kind, seed=0)  # type: ignore[arg-type]
    return diagnose(task, data)


def test_the_share_between_clients_is_that_of_a_random_effect() -> None:
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(300), rng.integers(3, 12, 300))
    effect = rng.normal(size=(300, 4)) * 0.5  # variance 0.25 beside noise of 1: a share of 0.2
    z = effect[client] + rng.normal(size=(len(client), 4))
    one = np.zeros(len(client), np.int64)
    assert between(z, one, client) == pytest.approx(0.2, abs=0.03)
    assert between(z - effect[client], one, client) == pytest.approx(0.0, abs=0.02)
    # Differences that the cells explain are not differences between clients.
    cell = client % 2
    assert between(5.0 * cell[:, None] + rng.normal(size=(len(client), 4)), cell, client) == pytest.approx(0, abs=0.02)
    assert between(z[:1], one[:1], client[:1]) == 0.0


def test_label_distance_beside_chance() -> None:
    client = np.repeat([0, 1], 50)
    found, chance = label_distance(client.copy(), client, 2, 2)  # each client has its own label
    assert found == 0.5 and chance < 0.1
    alike = np.tile([0, 1], 50)
    found, chance = label_distance(alike, client, 2, 2)
    assert found == 0.0 and chance > 0.0


@pytest.mark.parametrize(
    ("kind", "options", "named", "groups", "rank"),
    [
        ("iid", {}, "none", None, 1),
        ("pathological", {"classes_per_client": 2}, "label skew", None, None),
        ("permuted-clients", {}, "permuted labels", None, 9),
        ("permuted-groups", {"groups": 3}, "clusters", 3, 3),
    ],
)
def test_known_partitions_are_named(
    kind: str, options: dict[str, int], named: str, groups: int | None, rank: int | None
) -> None:
    found = look(partition(DIGITS, kind, 18, seed=1, **options))
    assert (found.kind, found.groups) == (named, groups)
    assert rank is None or found.rank == rank
    assert found.methods[0] in SUITED[named] and all(why for _, why in found.advice())
    assert found.sentences()[0].lower().startswith(("the 18 clients", named))


def test_every_example_is_predicted_by_a_fit_without_it() -> None:
    rng = np.random.default_rng(0)
    z, target = rng.normal(size=(12, 3)), rng.normal(size=(12, 2))
    found = left_out(z, target, 0.5)
    for k in range(12):
        rest = np.arange(12) != k
        w = np.linalg.solve(z[rest].T @ z[rest] + 0.5 * np.eye(3), z[rest].T @ target[rest])
        np.testing.assert_allclose(found[k], z[k] @ w, atol=1e-12)


def test_personal_models_are_advised_where_linear_fits_gain_by_them() -> None:
    alike, named = look(partition(DIGITS, "iid", 18, seed=1)), look(partition(DIGITS, "permuted-clients", 18, seed=1))
    assert alike.fits is not None and named.fits is not None
    assert alike.fits.gain < 0.02 and alike.methods[0] == "fedavg"
    assert named.fits.gain > 0.4 and named.methods[0] == "fedavg-head"
    assert named.settings("fedavg-head") == {"finetune_epochs": 10}
    skewed = look(partition(DIGITS, "pathological", 18, seed=1, classes_per_client=2))
    assert skewed.methods[0] == "fedavg-head" and any("Linear fits" in s for s in skewed.sentences())


def test_clients_that_gain_nothing_from_one_another_are_told_so() -> None:
    # Two hospitals that draw opposite conclusions from the same findings: what is common to them predicts nothing.
    rng = torch.Generator().manual_seed(0)
    pairs = [(x := torch.randn(60, 3, generator=rng), (-1) ** i * x[:, 0] + 0.1 * x[:, 1]) for i in range(6)]
    found = look(FederatedData.from_arrays(pairs))
    assert (found.kind, found.methods[0]) == ("own relations", "pfl-mf") and found.settings("pfl-mf")["rank"] >= 1
    alone = look(FederatedData.from_arrays([(x, (y > 0).long()) for x, y in pairs], classes=2))
    assert alone.fits is not None and alone.fits.own > alone.fits.common + 0.3


def test_the_head_is_not_advised_where_it_is_the_whole_model() -> None:
    data = partition(DIGITS, "permuted-clients", 18, seed=1)
    task = Task(lambda: build("linear", tuple(data.x.shape[1:]), 10), seed=0)
    assert "fedavg-head" not in diagnose(task, data).methods


def scored(**changes: Any) -> ScoredCase:
    values = {"name": "a", "kind": "clusters", "rank": 4, "kinds": ["clusters", "none"], "ranks": [4, 3]}
    values |= {"first": ["ifca", "ifca"], "advised": [0.9, 0.8], "rows": {"x": [0.8, 0.84], "y": [0.9, None]}}
    return case_from(values | changes)


def test_the_score_is_the_distance_to_the_best_row_that_came_to_its_end() -> None:
    case = scored()
    assert case.best == ("x", pytest.approx(0.82)) and case.reached == pytest.approx(0.85)
    assert case.behind == pytest.approx(-0.03) and case.near and case.named() == (1, 2) == case.ranked()
    errors = scored(higher=False, kind=None, rank=None, rows={"x": [0.5, 0.5]})
    assert errors.behind == pytest.approx(0.7) and not errors.near and errors.named() is None
    assert totals([case, errors]) == {"kind": (1, 2), "rank": (1, 2), "near": (1, 2)}
    assert scored(advised=[None, 0.9]).behind is None and not scored(advised=[None, 0.9]).near


def test_inputs_that_differ_are_a_domain_shift_and_skew_is_seen_beside_it() -> None:
    data = partition(DIGITS, "iid", 18, seed=1)
    x, top = data.x.clone(), float(data.x.max())
    for i in range(0, 18, 2):
        for rows in (data.train[i], data.test[i]):
            at = torch.from_numpy(rows)
            x[at] = top - x[at]
    shifted = FederatedData(x, data.y, data.train, data.test, classes=10)
    found = look(shifted)
    assert (found.kind, found.groups, found.also) == ("domain shift", 2, ())
    assert "2 groups of clients are alike among themselves." in found.sentences()
    both = look(partition(DIGITS, "permuted-clients", 18, seed=1, base="dirichlet", alpha=0.3))
    assert (both.kind, both.also) == ("permuted labels", ("label skew",))
    assert "There is also label skew." in both.sentences()


def test_real_targets_tell_inputs_only() -> None:
    rng = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(30, 3, generator=rng) + (i % 2) * 3, torch.randn(30, generator=rng)) for i in range(6)]
    found = look(FederatedData.from_arrays(pairs))
    assert found.kind == "domain shift" and found.statistics.labels is None
    assert look(FederatedData.from_arrays([(x[:, :1] * 0, y) for x, y in pairs])).kind == "none"


def test_the_command_says_it_in_words_and_as_json(tmp_path: Path) -> None:
    exp = tmp_path / "exp.toml"
    exp.write_text('[data]\nsource = "digits"\n[partition]\nclients = 12\n[model]\nkind = "linear"\n')
    grouped = ("partition.kind=permuted-groups", "partition.groups=2")
    said = call("diagnose", str(exp), *grouped).output
    assert "Clusters: inputs are alike, but 2 groups" in said and "for the rank of a subspace" in said
    assert "above the noise" in said and "methods.pfl-mf.rank=2" in " ".join(said.split())
    found = json.loads(call("diagnose", str(exp), "partition.kind=iid", "--json").output)
    assert found["kind"] == "none" and found["methods"][0] == "fedavg" and len(found["spectrum"]) == 12
