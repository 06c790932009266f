"""The experiment files of FedARA: every row is a valid experiment, in the paper's settings, on equal terms."""

from __future__ import annotations

import pytest

from fedspan.studies.papers import available, load_experiment
from fedspan.studies.papers.step_sizes import config_of

NAMES = [n for n in available() if n.startswith("fedara/")]
KINDS = ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5")


def test_all_settings_are_there() -> None:
    tables = {f"homogeneous-{d}" for d in ("cifar10", "cifar10-pathological", "cifar100")}
    tables |= {f"heterogeneous-{d}-{p}" for d in ("cifar10", "cifar100") for p in ("practical", "pathological")}
    assert {n.removeprefix("fedara/") for n in NAMES} == tables | {
        "ablation-lambda",
        "adaptive-rank",
        "cost-to-accuracy",
        "time-to-accuracy",
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_a_valid_experiment(name: str) -> None:
    whole = load_experiment(name)
    assert whole.name == name.split("/")[-1] and whole.paper.title and not whole.missing
    assert len({row.lr for row in whole.rows}) == 1
    for experiment in (whole, whole.quicken().select(whole.quick.rows or [])):
        assert experiment.rows
        for row in experiment.rows:
            config = config_of(experiment, row, row.lr[0], {}, ["data.root=/nowhere"])
            assert config.method["name"] == row.method and row.fields.items() <= config.method.items()
            assert config.partition.clients == 20 and config.train.batch_size == 16
            assert config.train.evaluate_after == ("to-accuracy" not in name) != (config.train.evaluate_every == 1)
            assert (config.rounds, config.train.epochs) == ((2, 1) if experiment.quickened else (20, 5))
            several = "heterogeneous" in name and row.method in ("fedproto", "fedtgp", "fedkd", "local")
            assert config.model.kinds == (KINDS if several else ())
            if "heterogeneous" in name and row.method == "fedara":
                assert config.method["ratio"] == "fedara_cnn1" and config.model.kind == "cnn1"


@pytest.mark.parametrize(
    ("name", "label", "figure", "lam"),
    [
        ("homogeneous-cifar10", "FedARA", 88.21, 10.0),
        ("homogeneous-cifar100", "FedARA", 60.49, 10.0),
        ("heterogeneous-cifar10-practical", "FedARA", 90.84, 2.0),
        ("heterogeneous-cifar10-pathological", "FedARA", 91.23, 2.0),
        ("heterogeneous-cifar100-practical", "FedARA", 54.54, 5.0),
        ("heterogeneous-cifar100-pathological", "FedARA", 70.25, 5.0),
    ],
)
def test_figures_are_the_papers(name: str, label: str, figure: float, lam: float) -> None:
    e = load_experiment(name)
    assert e.paper.values[label] == [figure]
    assert {row.fields["lam"] for row in e.rows if row.method == "fedara"} == {0.0, lam}


def test_adaptive_and_fixed_ranks_differ_in_nothing_else() -> None:
    rows = load_experiment("adaptive-rank").rows
    told = [{k: v for k, v in row.fields.items() if k not in ("ratio", "aggregate")} for row in rows]
    assert [fields.pop("adapt_energy", 1.0) for fields in told].count(1.0) < len(rows)
    assert all(fields == told[0] for fields in told)
    adaptive = [row for row in rows if "adapt_energy" in row.fields]
    assert {row.fields["ratio"] for row in adaptive} == {"fedara_cnn1"}


def test_lambda_is_the_papers_grid() -> None:
    e = load_experiment("ablation-lambda")
    assert [row.fields["lam"] for row in e.rows] == [0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0]
    devices = config_of(load_experiment("time-to-accuracy"), e.rows[0], 0.02, {}, []).devices
    assert max(devices.gflops) / min(devices.gflops) == 10 and devices.limited
