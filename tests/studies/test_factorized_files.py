"""The experiment files of Factorized-FL: every row is a valid experiment, in the paper's settings, on equal terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspan.config import assemble_data
from fedspan.methods import METHODS
from fedspan.studies.papers import available, candidates, load_experiment
from fedspan.studies.papers.step_sizes import config_of

NAMES = [n for n in available() if n.startswith("factorized-fl/table1")]
PERMUTED = [n for n in NAMES if "permuted" in n or "domains" in n]
# What the rows are made of; those that are registered are checked field by field.
USED = {
    "local", "fedavg", "fedprox", "oracle", "cfl", "per-fedavg", "fedfomo", "pfedpara", "factorized-fl-alpha",
    "factorized-fl-beta", "factorized-fedavg", "factorized-local",
}  # fmt: skip
ALONE = {"local", "factorized-local"}


def test_all_settings_are_there() -> None:
    label = {f"table1-{d}-{p}iid" for d in ("cifar10", "svhn") for p in ("", "permuted-", "non", "permuted-non")}
    assert {n.removeprefix("factorized-fl/") for n in NAMES} == label | {"table1-cifar100-domains"}


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_a_valid_experiment(name: str) -> None:
    whole = load_experiment(name)
    assert whole.name == name.split("/")[-1] and whole.paper.title and whole.paper.reference and not whole.missing
    assert {row.method for row in whole.rows} <= USED
    for experiment in (whole, whole.quicken().select(whole.quick.rows or [])):
        assert experiment.rows
        for row in experiment.rows:
            for rule in row.rules if row.method in METHODS else ():
                config = config_of(experiment, row, row.lr[-1], rule, ["data.root=/nowhere"])
                assert config.method["name"] == row.method and config.method["momentum"] == 0.9
                assert {**row.fields, **rule, "lr": row.lr[-1]}.items() <= config.method.items()
                assert (config.partition.split, config.partition.clients) == ("common", 20)
                long = (config.rounds, config.train.epochs)
                asked = (20, 2) if "domains" in name else (50, 2)
                assert config.train.participation == 1.0 and long == ((8, 1) if experiment.quickened else asked)


def test_lambda_is_all_that_differs_in_the_ablation() -> None:
    e, table = load_experiment("factorized-fl/ablation-sparsity"), load_experiment("table1-cifar10-permuted-iid")
    assert {**e.base, "name": ""} == {**table.base, "name": ""} and not e.missing
    five, thinned = e.rows[:5], e.rows[5:]
    assert [row.fields["lam"] for row in five] == [0.0, 1e-4, 5e-4, 1.5e-3, 5e-3]
    assert [row.fields["down_share"] for row in thinned] == [0.5, 0.2]
    assert (
        len({str(config_of(e, row, 0.01, {}, []).method | row.fields | {"lam": 0, "down_share": 0}) for row in five})
        == 1
    )
    assert len({job.folder for row in e.rows for job in candidates(e, row)}) == 2  # one choice for all


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_on_equal_terms(name: str) -> None:
    e = load_experiment(name)
    assert len({row.lr for row in e.rows}) == 1 and not any(row.set for row in e.rows)
    for row in e.rows:
        if row.method not in ALONE:
            assert row.fields["private_head"] is (name in PERMUTED), row.label
    by = {row.slug: row for row in e.rows}
    beta = dict(by["factorized-fl-beta"].fields)
    assert by["control-beta-at-lambda0"].fields == {**beta, "lam": 0.0}
    assert by["control-beta-without-mu"].fields == {**beta, "mu": False}
    assert by["factorized-fl-alpha"].fields == beta
    for slug, row in by.items():
        if slug.endswith("dense-start"):  # fedspan's own
            same = by[slug.removesuffix("-dense-start")]
            compared = {"likeness_of": "change", "likeness_layer": "conv2"}
            more = compared if "domains" in name and row.method != "factorized-local" else {}
            assert row.fields == {**same.fields, "mu_start": "dense", **more}
            assert (row.method, row.paper) == (same.method, same.paper) and row.fields["mu_start"] == "dense"
        elif row.method.startswith("factorized") and row.fields.get("mu", True) and "matching" not in row.fields:
            assert [rule["mu_start"] for rule in row.rules] == ["zeros", "xavier"], slug  # the paper's and its code's
    decay = by["control-fedavg-with-weight-decay"]
    assert decay.method == "fedavg" and all(rule["weight_decay"] > 0 for rule in decay.rules)
    assert by["control-factorised-local"].method == "factorized-local"
    match = (0.95, 20.0, 4) if "domains" in name else (0.0, 1.0, 10 if name in PERMUTED else 20)
    assert (beta["tau"], beta["epsilon"], beta["m_min"]) == match


@pytest.mark.parametrize(
    ("name", "label", "figure"),
    [
        ("table1-cifar10-iid", "FedAvg", [70.28]),
        ("table1-cifar10-permuted-iid", "Factorized-FL beta", [70.59, 2.07]),
        ("table1-cifar10-noniid", "pFedPara", [55.88, 1.28]),
        ("table1-cifar10-permuted-noniid", "Factorized-FL alpha", [50.24, 1.03]),
        ("table1-svhn-iid", "FedProx", [89.04, 0.33]),
        ("table1-svhn-permuted-iid", "Stand-Alone", [84.32, 0.31]),
        ("table1-svhn-noniid", "Factorized-FL beta", [81.07, 0.53]),
        ("table1-svhn-permuted-noniid", "Clustered-FL", [68.84, 0.84]),
        ("table1-cifar100-domains", "FedFOMO", [62.07, 1.80]),
    ],
)
def test_figures_are_the_papers(name: str, label: str, figure: list[float]) -> None:
    assert load_experiment(name).paper.values[label] == figure


def test_settings_are_the_papers() -> None:
    def of(name: str) -> Any:
        e = load_experiment(name)
        return config_of(e, e.rows[0], 0.01, {}, [])

    assert of("table1-svhn-permuted-noniid").partition.options == {"base": "dirichlet", "alpha": 0.5, "min_samples": 10}
    assert of("table1-cifar10-permuted-iid").partition.options["base"] == "iid"
    domains = of("table1-cifar100-domains")
    assert (domains.partition.kind, domains.partition.options) == ("domains", {"permute": True})
    assert domains.model.options["norm"] == "group" and domains.model.kind == "cnn"


def test_eighty_ten_ten(tmp_path: Path) -> None:
    """Of the merged files 80 % train, 10 % choose, 10 % test; choosing and testing train on the same examples."""
    e = load_experiment("table1-cifar10-permuted-iid")
    y = np.arange(6000) % 10
    np.savez(tmp_path / "made.npz", x=np.ones((6000, 3)), y=y)
    more = [f"data.source={tmp_path / 'made.npz'}", "model.kind=linear"]
    without = {**e.base, "model": {"kind": "linear"}, "data": {"source": "cifar10"}}
    e = type(e)(**{**e.__dict__, "base": without})
    tuning = assemble_data(candidates(e, e.rows[0], more)[0].config)
    final = assemble_data(config_of(e, e.rows[0], 0.01, {}, more))
    assert len(final.test[0]) == 600 and final.sizes.tolist() == [240] * 20
    assert all(np.array_equal(a, b) for a, b in zip(tuning.train, final.train))
    assert {len(v) for v in final.validation} == {30}
