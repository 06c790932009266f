"""The experiment files of FedLoRU: valid rows, the paper's figures, equal parameters; its rule of bytes; targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import call, failing
from fedspan.cli.bytes import count, find_rule
from fedspan.config import from_dict
from fedspan.simulation.evaluation import to_target
from fedspan.studies.papers import available, load_experiment
from fedspan.studies.papers.step_sizes import config_of

NAMES = [n.removeprefix("fedloru/") for n in available() if n.startswith("fedloru/")]


def test_all_tables_are_there() -> None:
    table1 = {f"table1-{d}-{p}" for d in ("fmnist", "cifar10", "cifar100") for p in ("iid20", "iid100", "noniid20")}
    small = {f"small-{d}-{p}" for d in ("fmnist", "cifar10") for p in ("iid", "dir05")}
    others = {"table2-cifar100", "table3-cifar10", "table3-cifar100", "table-a5-clients"}
    assert set(NAMES) == table1 | small | others | {"small-clients", "small-personal", "small-mixed-ranks"}


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_a_valid_experiment(name: str) -> None:
    whole = load_experiment(name)
    assert whole.name == name and whole.paper.title and whole.paper.reference and not whole.missing
    assert len({row.lr for row in whole.rows}) == 1  # all choose from the same learning rates
    quick = whole.quicken().select(whole.quick.rows or [row.label for row in whole.rows])
    assert quick.rows
    for row in quick.rows:
        config = config_of(quick, row, row.lr[-1], row.rules[-1], ["data.root=/nowhere"])
        assert {**row.fields, **row.rules[-1], "lr": row.lr[-1]}.items() <= config.method.items()
        assert config.train.participation == 0.5 and config.rounds == 4
    assert whole.base["train"]["epochs"] == (1 if name.startswith("small") else 5)
    assert whole.base["train"]["batch_size"] == 32


@pytest.mark.parametrize(
    ("name", "label", "figure"),
    [
        ("table1-fmnist-iid20", "FedHM rho=4.46", 90.94),
        ("table1-cifar10-iid100", "FedLoRU r=64", 86.10),
        ("table1-cifar10-noniid20", "FedAvg", 79.65),
        ("table1-cifar100-noniid20", "FedLoRA r=96", 10.58),
        ("table2-cifar100", "pFedLoRU psi=0.1", 49.65),
        ("table3-cifar10", "FedHM setting 2", 88.68),
        ("table-a5-clients", "FedLoRU K=400", 35.86),
        ("small-cifar10-dir05", "FedLoRU 22 %", 67.88),
    ],
)
def test_figures_are_the_papers(name: str, label: str, figure: float) -> None:
    assert load_experiment(name).paper.values[label] == [figure]


def uploaded(name: str, label: str, rule: str = "fedloru") -> int:
    """Parameters that a client uploads."""
    e = load_experiment(name)
    row = next(r for r in e.rows if r.label == label)
    config = config_of(e, row, 0.1, row.rules[0], ["data.root=/nowhere"])
    found = count(config, find_rule(rule, row.method))[1]
    return sum(v or 0 for v in found.per_capacity[None]["up"].values()) // 4


def test_methods_of_a_column_train_as_many_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSPAN_DATA", raising=False)
    name = "small-cifar10-iid"
    full = uploaded(name, "FedAvg")
    for percent in (42, 22):
        for m, gap in (("FedLoRU", 0.005), ("FedHM", 0.012)):
            assert uploaded(name, f"{m} {percent} %") / full == pytest.approx(percent / 100, abs=gap)


def test_bytes_as_the_paper_counts_them() -> None:
    values: dict[str, Any] = {
        "rounds": 7,
        "partition": {"clients": 9},
        "model": {"kind": "mlp", "hidden": [12]},
        "method": {"name": "fedloru", "rank": 2, "tau": 3},
        "train": {"participation": 0.5},
    }
    config = from_dict(values).resolve()
    trained = 2 * (12 + 64) + 12 + 12 * 10 + 10
    found = count(config, find_rule("published", "fedloru"))[1].run
    assert found == {"up": 9 * trained * 4 * 7 // 2, "down": 9 * trained * 4 * 7 // 2}  # 4.5 clients on average
    own = count(config)[1].run
    assert own["up"] == 4 * trained * 4 * 7  # round(4.5) = 4 are really asked


# ------------------------------------------------------------------------------------------------ targets

LINES = [
    {"round": t, "bytes": {"up": 10, "down": 20, "announce": 5 * (t == 2)}, "seconds": 0.5, "loss": {"mean": 5.0 - t}}
    for t in (1, 2, 3)
]


def test_a_loss_must_fall_to_its_target() -> None:
    assert to_target(LINES, 3.0, "loss", higher=False) == {"round": 2, "up": 20, "down": 45, "seconds": 1.0}
    assert to_target(LINES, 1.9, "loss", higher=False) is None


def test_rounds_and_bytes_to_a_target(tmp_path: Path) -> None:
    exp, out = tmp_path / "x.toml", tmp_path / "runs"
    exp.write_text(
        "rounds = 3\n[data]\nlimit = 200\n[partition]\nclients = 4\n[model]\nhidden = [16]\n[method]\nlr = 0.3\n"
        "[methods.fedlora]\nrank = 2\n[train]\nworkers = 1\nbatch_size = 16\n"
    )
    for name, seed in (("fedavg", 0), ("fedlora", 0), ("fedlora", 1)):
        call("run", str(exp), f"method.name={name}", f"seed={seed}", "--out", str(out / f"{name}-{seed}"), "-q")
    table, figure = tmp_path / "t.csv", tmp_path / "t.svg"
    told = call(
        "targets", str(out), "--accuracy", "0.15", "--accuracy", "0.999", "--csv", str(table), "--figure", str(figure)
    )
    assert "not reached" in told.stdout and "fedlora" in told.stdout
    rows = [line.split(",") for line in table.read_text().splitlines()]
    assert rows[0][:4] == ["accuracy", "method", "seeds", "reached"] and len(rows) == 5
    reached = {r[1]: r for r in rows[1:] if r[0] == "0.15"}
    for name, seeds, numbers in (("fedavg", "1", 64 * 16 + 16), ("fedlora", "2", 2 * (64 + 16) + 16)):
        r, sent = reached[name], numbers + 16 * 10 + 10
        assert r[2:4] == [seeds, seeds] and float(r[8]) == pytest.approx(float(r[4]) * 2 * 4 * 4 * sent)
    assert [r[4] for r in rows[1:] if r[0] == "0.999"] == ["", ""]
    assert "15 %" in figure.read_text()
    assert "fraction in (0, 1]" in failing("targets", str(out), "--accuracy", "80")
    assert "need --accuracy" in failing("targets", str(out), "--loss", "2")
