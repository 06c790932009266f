"""The experiment files of FedARA: every row is a valid experiment, in the paper's settings, on equal terms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import call, failing
from fedspan.models import build
from fedspan.studies.papers import available, load_experiment
from fedspan.studies.papers.step_sizes import config_of

NAMES = [n for n in available() if n.startswith("fedara/")]
KINDS = ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5")
APART = ("fedproto", "fedtgp", "fedkd", "pfedes", "pfedafm", "local")
"""Methods whose clients may have models that differ."""


def test_all_settings_are_there() -> None:
    tables = {f"homogeneous-{d}" for d in ("cifar10", "cifar10-pathological", "cifar100")}
    sources = ("cifar10", "cifar100", "tiny-imagenet")
    tables |= {f"heterogeneous-{d}-{p}" for d in sources for p in ("practical", "pathological")}
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
    assert {row.lr for row in whole.rows} == {(0.005, 0.01, 0.02, 0.05)}
    assert whole.tuning_rounds == 12 and whole.first_seed == 200  # chosen once λ_t has been λ, and reported elsewhere
    for experiment in (whole, whole.quicken().select(whole.quick.rows or [])):
        assert experiment.rows
        for row in experiment.rows:
            config = config_of(experiment, row, row.lr[0], {}, ["data.root=/nowhere"])
            assert config.method["name"] == row.method and row.fields.items() <= config.method.items()
            assert config.partition.clients == 20 and config.train.batch_size == 16
            assert config.train.evaluate_after == ("to-accuracy" not in name) != (config.train.evaluate_every == 1)
            assert (config.rounds, config.train.epochs) == ((2, 1) if experiment.quickened else (40, 5))
            assert config.data.size is None  # the paper's network: at half the side one pixel is left before fc1
            several = "heterogeneous" in name and row.method in APART
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
        ("heterogeneous-tiny-imagenet-practical", "FedARA", 38.70, 20.0),
        ("heterogeneous-tiny-imagenet-pathological", "FedARA", 41.14, 20.0),
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


@pytest.mark.parametrize("name", [n for n in NAMES if "geneous" in n])
def test_methods_with_prototypes_are_judged_by_both_rules(name: str) -> None:
    rows = [row for row in load_experiment(name).rows if row.method in ("fedproto", "fedtgp")]
    assert {(row.method, row.fields["predict_by"]) for row in rows} == {
        (method, rule) for method in ("fedproto", "fedtgp") for rule in ("head", "prototype")
    }
    assert len(rows) == 4 and {row.fields["lam"] for row in rows if row.method == "fedtgp"} == {1.0}


def test_a_network_keeps_more_than_a_pixel_before_its_linear_layers() -> None:
    """At 16x16 without padding 87 thousand parameters of the extractor are left of 873 thousand."""

    def inputs(kind: str, side: int, **options: Any) -> int:
        return int(build(kind, (3, side, side), 10, **options).get_parameter("fc1.weight").shape[1])

    assert (inputs("cnn", 16), inputs("cnn", 16, padding=2), inputs("cnn", 32)) == (64, 64 * 16, 64 * 25)
    assert (inputs("cnn1", 16), inputs("cnn1", 16, padding=2), inputs("cnn1", 32)) == (32, 32 * 16, 32 * 25)


# ------------------------------------------------------------------------------------------------ Tiny-ImageNet


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ROOT with made-up pictures in the layout of the hub's files: `image` with bytes and path, and `label`."""
    image = pytest.importorskip("PIL.Image")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "data" / "tiny-imagenet"
    place.mkdir(parents=True)
    for split, each in (("train", 12), ("valid", 4)):
        rows = []
        for label in range(4):
            for k in range(each):
                shape = (64, 64) if k == 0 else (64, 64, 3)  # some of the published ones are grey
                file = tmp_path / "one.jpeg"
                image.fromarray(np.full(shape, 50 * label + 2 * k, np.uint8)).save(file, "JPEG")
                rows.append({"image": {"bytes": file.read_bytes(), "path": None}, "label": label})
        pq.write_table(pa.Table.from_pylist(rows), place / f"{split}-00000-of-00001-0f1e2d.parquet")
    return tmp_path / "data"


@pytest.mark.long
@pytest.mark.parametrize("split", ["practical", "pathological"])
def test_tiny_imagenet_is_reproduced_from_a_folder(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    monkeypatch.chdir(tmp_path)
    classes = {"practical": ["partition.min_samples=2"], "pathological": ["partition.classes_per_client=2"]}[split]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        call(
            *("reproduce", f"heterogeneous-tiny-imagenet-{split}", "--quick", "--out", "out"),
            *("--root", str(pictures), "data.size=16", "model.padding=2", "partition.clients=4", *classes),
        )
    finally:
        torch.set_num_threads(threads)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [row["label"] for row in result["rows"]] == ["FedARA", "FedProto, by prototypes"]
    for row in result["rows"]:
        assert 0 <= row["mean"] <= 1 and [t["seed"] for t in row["tests"]] == [200]


def test_where_tiny_imagenet_is_to_be_put_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = failing("reproduce", "heterogeneous-tiny-imagenet-practical", "--quick", "--root", str(tmp_path))
    assert "'tiny-imagenet' was not found" in said
    assert "Put train.parquet and test.parquet (or the published archive's files) into ROOT/tiny-imagenet" in said
