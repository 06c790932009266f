"""The clients' coordinates: read from a checkpoint, judged against the true groups, drawn, and shown on the page."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import call
from fedspan import tree
from fedspan.cli.analyse import refitted
from fedspan.cli.running import open_run
from fedspan.errors import FedspanError
from fedspan.method import Seen
from fedspan.methods.panels_subspace import Coordinates, coordinates, norms, sentence, solved_again, structure
from fedspan.report.measures import monitored
from fedspan.report.page import panels, write_page
from fedspan.report.registered import method_of, panels_of, seen_of
from fedspan.report.runs import group, load_run

EXPERIMENT = """
rounds = 8
[data]
source = "digits"
[partition]
kind = "permuted-groups"
clients = 20
groups = 4
[model]
hidden = [32]
[method]
name = "pfl-mf"
[methods.pfl-mf]
rank = 4
[train]
evaluate_every = 4
workers = 1
"""


def execute(where: Path, name: str, *overrides: str) -> Path:
    (where / "exp.toml").write_text(EXPERIMENT)
    call("run", str(where / "exp.toml"), *overrides, "--out", str(where / name), "-q")
    return where / name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run of four groups."""
    return execute(tmp_path_factory.mktemp("runs"), "groups")


def held(run: Path) -> Coordinates:
    """The coordinates of the v that clients hold."""
    loaded = load_run(run)
    method: Any = method_of(loaded)
    return coordinates(seen_of(loaded, "it"), method, method.coefficients)


def hashes(folder: Path) -> dict[str, str]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def well_formed(text: str) -> str:
    """The words of a page of which every element is closed in order and every id is used once."""
    opened: list[str] = []
    ids: list[str] = []
    words: list[str] = []

    class Check(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            ids.extend(v for k, v in attrs if k == "id" and v)
            if tag != "meta":
                opened.append(tag)

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            ids.extend(v for k, v in attrs if k == "id" and v)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

        def handle_data(self, data: str) -> None:
            words.append(data)

    check = Check()
    check.feed(text)
    check.close()
    assert not opened and len(ids) == len(set(ids))
    return " ".join(" ".join(words).split())


# ------------------------------------------------------------------------------------------------ coordinates


def as_held(simulation: Any) -> None:
    """Let personal models have the v that the clients hold, which is what coordinates show."""
    simulation.engine = replace(simulation.engine, method=replace(simulation.method, refresh=False))


def test_coordinates_are_the_models_in_an_orthonormal_basis(run: Path) -> None:
    of = held(run)
    _, simulation = open_run(run, "test")
    as_held(simulation)
    names = simulation.task.need_head()
    heads = [tree.ravel(tree.select(simulation.personal(i)[1], names)) for i in range(20)]
    theta = torch.stack(heads).double().numpy()  # [clients, d]
    apart = np.linalg.norm(theta[:, None] - theta, axis=-1)
    assert np.allclose(np.linalg.norm(of.points[:, None] - of.points, axis=-1), apart, atol=1e-4 * apart.max())
    found = structure(of)
    assert np.allclose(found.singular_values, np.linalg.svd(theta, compute_uv=False)[:4], rtol=1e-4)
    assert 1.0 <= found.effective_rank <= 4.0 and of.round == 8 and of.untrained == 0


def test_the_true_groups_are_found(run: Path) -> None:
    before = hashes(run)
    of = held(run)
    found = structure(of)
    assert found.k == 4 and found.rand_index is not None and found.rand_index >= 0.9
    assert found.silhouette is not None and found.silhouette > 0.4
    assert "the true groups are found" in sentence(of, found)
    loaded, simulation = load_run(run), open_run(run, "test")[1]
    method: Any = simulation.method
    models = refitted(simulation, panels_of(loaded)[0])
    again = solved_again(seen_of(loaded, "it", models), method.factorised)
    assert again.refreshed and (structure(again).rand_index or 0.0) >= 0.9
    assert hashes(run) == before


@pytest.mark.parametrize("form", ["gauge", "auto", "joint"])
def test_every_form_is_read_in_its_present_gauge(form: str, tmp_path: Path) -> None:
    more = {
        "gauge": ["method.gauge_every=1", "train.participation=0.3"],
        "auto": ["method.rank=auto", "method.rank_start=6", "method.rank_round=2", "method.rank_gap=1.0001"],
        "joint": ["method.name=pfl-mf-joint", "method.rank=3", "train.participation=0.2"],
    }[form]
    where = execute(tmp_path, "run", "rounds=3", "data.limit=300", "model.hidden=[8]", *more)
    of = held(where)
    _, simulation = open_run(where, "test")
    as_held(simulation)
    method: Any = simulation.method
    names = method.factorised(simulation.task)
    Q = torch.linalg.qr(simulation.record.server["U"].double()).Q
    for i in range(20):
        theta = tree.ravel(tree.select(simulation.personal(i)[1], names)).double()
        assert torch.allclose(Q.T @ theta, torch.from_numpy(of.points[i]), atol=1e-4 * float(theta.norm()))
    assert (of.untrained > 0) == (form != "auto")


def test_structure_bears_any_points() -> None:
    rng = np.random.default_rng(0)
    same = structure(Coordinates(np.ones((5, 3)), None, 1))
    assert same.silhouette is None and same.effective_rank == pytest.approx(1.0)
    line = structure(Coordinates(rng.normal(size=(6, 1)), None, 1))
    assert line.plane.shape == (6, 2) and np.all(line.plane[:, 1] == 0.0) and line.shares[0] == pytest.approx(1.0)
    two = structure(Coordinates(rng.normal(size=(2, 4)), np.array([0, 1]), 1))
    assert two.rand_index == pytest.approx(1.0) and two.silhouette is None
    blobs = np.repeat(np.eye(3) * 9, 5, 0) + 0.1 * rng.normal(size=(15, 3))
    assert structure(Coordinates(blobs, None, 1)).k == 3  # chosen by the silhouette
    assert structure(Coordinates(blobs, None, 1), 2).k == 2
    with pytest.raises(FedspanError, match="at most the number of clients"):
        structure(Coordinates(blobs, None, 1), 16)
    wrong = structure(Coordinates(blobs, np.arange(15) % 3, 1))
    assert "not found" in sentence(Coordinates(blobs, np.arange(15) % 3, 1, 2), wrong)
    lines: list[dict[str, Any]] = [{"round": 1}, {"round": 2, "monitor": {"U_norm": 3.0, "U_condition": None}}]
    assert norms(Seen("it", 2, 0, ("a",), None, lines, monitored(lines), {}, {}, tuple))["round"] == []


# ------------------------------------------------------------------------------------------------ command


def test_command_prints_writes_and_leaves_the_run_alone(run: Path, tmp_path: Path) -> None:
    before = hashes(run)
    out = tmp_path / "look"
    said = call("analyse", "subspace", str(run), "--out", str(out))
    assert hashes(run) == before
    assert "adjusted Rand index" in said.stdout and "effective rank" in said.stdout and "as the clients" in said.stdout
    kinds = {f"{name}.png" for name in ("embedding", "singular_values", "norms")}
    assert {p.name for p in out.iterdir()} == kinds | {"subspace.json"}
    assert all((out / k).read_bytes()[:4] == b"\x89PNG" for k in kinds)
    facts = json.loads((out / "subspace.json").read_text())
    assert facts["adjusted_rand_index"] >= 0.9 and facts["k"] == 4 and not facts["refreshed"]
    assert len(facts["clients"]["coordinates"]) == 20 and facts["monitor"]["round"] == [4.0, 8.0]
    said = call("analyse", "subspace", str(run), "--refresh", "--clusters", "2", "--format", "svg")
    assert "solved again for every client" in said.stdout
    beside = run.with_name(run.name + "-subspace")
    assert json.loads((beside / "subspace.json").read_text())["k"] == 2 and (beside / "norms.svg").is_file()
    assert hashes(run) == before


def test_command_errors_are_one_sentence(run: Path, tmp_path: Path) -> None:
    other = execute(tmp_path, "other", "rounds=1", "data.limit=300", "method.name=fedavg")
    for arguments, says in (
        ([str(other)], "with this panel: pfl-mf, pfl-mf-paper, pfl-mf-joint. Got one of fedavg"),
        ([str(tmp_path / "none")], "must be a run directory"),
        ([str(run), "--clusters", "21", "--out", str(tmp_path / "x")], "at most the number of clients, 20"),
    ):
        lines = call("analyse", "subspace", *arguments, code=2).stderr.strip().splitlines()
        assert len(lines) == 1 and says in lines[0], lines
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------------------------------------ page


def test_page_shows_the_coordinates(run: Path, tmp_path: Path) -> None:
    loaded = load_run(run)
    text = write_page([loaded], tmp_path / "page.html").read_text()
    words = well_formed(text)
    assert "The clients' coordinates" in words and "adjusted Rand index of" in words
    assert "true group" in words and text.count("<svg") == 3  # one of the legend
    assert not re.search(r"https?://|<img|src=", text)


def test_page_bears_a_missing_or_damaged_checkpoint(run: Path, tmp_path: Path) -> None:
    loaded = load_run(run)
    copy = tmp_path / "copy"
    (copy / "checkpoints").mkdir(parents=True)
    for name in ("result.json", "metrics.jsonl"):
        (copy / name).write_bytes((run / name).read_bytes())

    def section() -> str:
        words = well_formed(panels(group([load_run(copy)])))
        assert str(tmp_path) not in words
        return words

    said = section()
    assert "The clients' coordinates" in said and "must have a checkpoint. Got none" in said
    for path in (run / "checkpoints").glob("*-*"):
        (copy / "checkpoints" / path.name).write_bytes(path.read_bytes()[:-7])
    assert "No coordinates of pfl-mf" in section()
    spoilt = {**loaded.result, "config": {**loaded.config, "method": {"name": "pfl-mf", "rank": "<b>"}}, "names": 3}
    (copy / "result.json").write_text(json.dumps(spoilt))
    assert "No panels of pfl-mf" in well_formed(write_page([load_run(copy)], tmp_path / "page.html").read_text())
    assert "rank must be" in section()


def test_page_of_other_methods_has_no_such_section(run: Path) -> None:
    loaded = load_run(run)
    other = {**loaded.result, "method": "fedavg", "config": {"method": {"name": "fedavg"}}}
    assert panels(group([type(loaded)(None, other, loaded.lines)])) == ""
