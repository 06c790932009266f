"""The natural federations: their files can be read anywhere, and run where their tables are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedspan.cli.app import app
from fedspan.config import assemble_data, load_config

FILES = sorted((Path(__file__).resolve().parents[2] / "experiments" / "natural").glob("*.toml"))
CLIENTS = {"heart": 4, "tcga-brca": 6, "school": 139, "parkinsons": 42, "shakespeare": 99}


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_a_card_and_a_configuration(file: Path) -> None:
    config, card = load_config(file), [line for line in file.read_text().splitlines() if line.startswith("# ")]
    assert config.data.is_table == (file.stem != "shakespeare") and config.partition.kind == "natural"
    assert all(any(word in line for line in card) for word in ("Who:", "What:", "Licence:", "Published"))


def test_what_is_predicted_and_measured() -> None:
    found = {file.stem: load_config(file) for file in FILES}
    assert {stem: config.evaluate.metrics for stem, config in found.items()} == {
        "heart": ("accuracy", "roc_auc"),
        "tcga-brca": ("concordance",),
        "school": ("explained_variance", "rmse"),
        "parkinsons": ("rmse", "r2"),
        "shakespeare": (),
    }
    assert found["tcga-brca"].task.kind == "survival"
    assert all(found[stem].data.table.target_type == "number" for stem in ("school", "parkinsons", "tcga-brca"))
    lines = [line for line in FILES[0].read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert FILES[0].stem == "heart" and len(lines) <= 15


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_the_table_as_it_is(file: Path) -> None:
    config, root = load_config(file), os.environ.get("FEDSPAN_DATA")
    if root is None or not (Path(root) / config.data.source).is_file():
        pytest.skip(f"needs {config.data.source} under $FEDSPAN_DATA")
    assert assemble_data(config).clients == CLIENTS[file.stem]


def test_a_table_is_partitioned_diagnosed_run_and_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    rows = [f"{'ab'[k % 2]},{40 + k % 17},{k % 3},{'ill' if k % 17 > 8 else 'well'}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["who,age,kind,state", *rows]) + "\n")
    (tmp_path / "new.csv").write_text(
        "\n".join(["kind,state,age", *(f"{k % 3},ill,{49 + k}" for k in range(8))]) + "\n"
    )
    text = (
        '[data]\nsource = "t.csv"\nclient = "who"\ntarget = "state"\ncategorical = ["kind"]\n[model]\nkind = "linear"\n'
    )
    (tmp_path / "exp.toml").write_text(f"rounds = 2\n{text}")
    runner = CliRunner()
    for words in (["partition"], ["diagnose"], ["run"]):
        shown = runner.invoke(app, [*words, "exp.toml"])
        assert shown.exit_code == 0, shown.output
    joined = runner.invoke(app, ["onboard", "runs/exp-0", "--data", "new.csv"])
    assert joined.exit_code == 0 and "prepared as the run's: 4 inputs" in joined.output, joined.output
    (tmp_path / "new.csv").write_text("kind,state,age\n7,ill,50\n")
    assert (
        "'7', which no client has in training"
        in runner.invoke(app, ["onboard", "runs/exp-0", "--data", "new.csv"]).output
    )
