"""Figures of the Factorized-FL paper (1, 4, 7j, 7k) on a few made pictures: exact cases, files and sentences."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from conftest import method_of
from fedspan.cli.app import app
from fedspan.data import Source
from fedspan.errors import DataError
from fedspan.methods.factorized_fl import FactorizedLocal
from fedspan.randomness import generator
from fedspan.studies.theory import factor_layouts, factor_sparsity, factor_updates, images
from fedspan.studies.theory.images import SIDE, Images, Size, epochs, network

SMALL = Size(train=32, test=20, epochs=2, batch=8)


def pictures(n: int, channels: int = 1, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = generator(seed, "test", "pictures")
    centres = rng.normal(size=(classes, channels, SIDE, SIDE))
    y = np.arange(n) % classes
    x = centres[y] + 0.3 * rng.normal(size=(n, channels, SIDE, SIDE))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def made(channels: int = 1, seed: int = 0, twice: bool = False) -> Images:
    """Easy pictures; `twice`: both halves of the training part are the same."""
    x, y = pictures(SMALL.train + SMALL.test, channels, seed=seed)
    n, half = SMALL.train, SMALL.train // 2
    train = torch.cat([torch.arange(half)] * 2) if twice else torch.arange(n)
    return Images(x[train], y[train], x[n:], y[n:], classes=4)


@pytest.mark.parametrize(
    ("b", "far"), [([3.0, 0.0], 0.0), ([0.0, 5.0], math.sqrt(2)), ([-1.0, 0.0], 2.0), ([0.0, 0.0], math.sqrt(2))]
)
def test_distance_is_that_of_unit_vectors(b: list[float], far: float) -> None:
    assert factor_updates.distance(torch.tensor([[2.0], [0.0]]), torch.tensor(b)) == pytest.approx(far, abs=1e-12)


def test_updates_on_the_same_data_are_the_same_and_permuted_labels_part_them() -> None:
    outcome = factor_updates.compare(made(twice=True), made(seed=1), SMALL)
    n = outcome.numbers
    assert n["layers"] == ["conv1", "conv2", "fc1", "head"]
    assert {k: sorted(v) for k, v in n["distance"].items()} == {k: ["W", "u", "v"] for k in n["distance"]}
    for kinds in n["distance"].values():
        assert all(len(rows) == SMALL.epochs and len(rows[0]) == 4 for rows in kinds.values())
    same, permuted, other = n["distance"].values()
    for kind in ("W", "u", "v"):
        assert np.allclose(same[kind], 0.0, atol=1e-5)
        assert min(permuted[kind][-1]) > 0.05 and min(other[kind][-1]) > 0.05
    body = n["distance_of_the_body"][factor_updates.OTHER]["u"][-1]
    assert body == pytest.approx(np.mean(other["u"][-1][:3]))
    assert len(outcome.rows) == 9 and all(len(row) == len(outcome.titles) for row in outcome.rows)
    assert set(n["accuracy_averaged"]["plain"]) == {"alone", *n["distance"]}
    assert {len(v) for v in n["accuracy_averaged"]["factorised"].values()} == {len(n["averaged_after"])}
    # Up to the first average both clients are alone.
    assert n["distance_averaged"][factor_updates.OTHER]["u"][0] == pytest.approx(other["u"][-1])


def test_what_two_clients_average() -> None:
    plain = network(made())
    factorised = FactorizedLocal().model(plain, None)
    assert factor_updates.shared(plain) == plain.body
    assert factor_updates.shared(factorised) == ["conv1.u", "conv2.u", "fc1.u"]
    assert factor_updates.averages(7) == [3, 6, 7] and factor_updates.averages(6) == [3, 6]
    assert factor_updates.averages(2) == [2]


def test_averaging_with_oneself_changes_nothing_and_with_another_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def remember(task: Any, params: dict[str, Tensor], images: Images) -> float:
        seen.append(params["conv1.u"])
        return 0.5

    monkeypatch.setattr(factor_updates, "accuracy", remember)
    method, a, b = method_of(FactorizedLocal, lr=0.01, momentum=0.9), made(), made(seed=1)
    task = method.model(network(a), None)
    size = replace(SMALL, epochs=4)
    for both, names in (((a, a), ["conv1.u"]), ((a, a), []), ((a, b), ["conv1.u"])):
        found = factor_updates.averaged(method, task, both, size, names)
        assert found.accuracy == [0.5, 0.5] and {k: len(v) for k, v in found.far.items()} == {"u": 2, "v": 2}
        apart = [d for rows in found.far.values() for row in rows for d in row]
        assert max(apart) < 1e-5 if both[0] is both[1] else min(apart) > 0.05
    assert torch.equal(seen[1], seen[3]) and not torch.equal(seen[1], seen[5])


def test_epochs_go_on_where_they_stopped_but_for_the_momentum() -> None:
    a = made()
    task = network(a)
    method = FactorizedLocal(lr=0.01)
    whole = list(epochs(method, task, task.init(), a, SMALL))
    one = replace(SMALL, epochs=1)
    first = list(epochs(method, task, task.init(), a, one))[-1]
    second = list(epochs(method, task, first, a, one, first=2))[-1]
    assert all(torch.equal(second[k], whole[-1][k]) for k in second)
    assert not torch.equal(first["fc1.weight"], second["fc1.weight"])


def test_layouts_count_their_parameters_and_learn() -> None:
    outcome = factor_layouts.compare(made(3), replace(SMALL, epochs=3))
    counts, curves = outcome.numbers["parameters_without_mu"], outcome.numbers["accuracy"]
    linear = 1024 + 512 + 512 + 512 + 4 + 4  # u, v and bias of fc1 and head
    norms = 2 * (32 + 64)
    assert counts["space_by_channel"] == counts["official_view"] == 25 + 3 * 32 + 25 + 32 * 64 + linear + norms
    assert counts["ik_by_ok"] == 5 * (3 + 32) + 5 * (32 + 64) + linear + norms
    assert counts["out_by_rest"] == 32 + 3 * 25 + 64 + 32 * 25 + linear + norms
    assert counts["ik_by_ok"] == counts["ik_by_ok, no μ"] and counts["plain model"] > 500_000
    assert len(curves) == 9 and all(len(c) == 3 for c in curves.values())
    assert curves["plain model"][-1] > 0.5 and curves["space_by_channel"] != curves["ik_by_ok"]
    assert len(outcome.rows) == 5


def test_a_larger_lambda_leaves_less_and_an_endless_one_nothing_of_mu() -> None:
    outcome = factor_sparsity.compare(made(3), SMALL, (0.0, 0.005, 1e6))
    n = outcome.numbers
    held, curves = n["nonzero"], n["accuracy"]
    assert held["λ = 0"] > held["λ = 0.005"] > held["λ = 1e+06"] == held["without μ"]
    assert curves["λ = 1e+06"] == curves["without μ"] and n["share_of_mu"]["λ = 1e+06"] == 0.0
    assert set(n["share_of_mu"]) == {"λ = 0", "λ = 0.005", "λ = 1e+06"}
    assert n["parameters"] > held["λ = 0.005"] and "the best has" in outcome.says


def test_single_epochs_swing_so_the_last_five_count() -> None:
    assert images.settled([0.0, 1.0, 0.5, 0.5, 0.5, 1.0]) == pytest.approx(0.7)
    assert images.settled([0.2, 0.4]) == pytest.approx(0.3)


def source(name: str, root: str | None = None, size: int | None = None) -> Source:
    """What a file of few pictures would give."""
    channels, side = (1, 14) if name == "mnist" else (3, 16)
    assert size == side
    n = 100
    x = torch.from_numpy(generator(0, name).random((n, channels, side, side), dtype=np.float32))
    return Source(
        name=name, x=x, y=torch.arange(n) % 10, classes=10, test_rows=np.arange(50, n),
        mean=(0.2,) * channels, std=(0.5,) * channels,
    )  # fmt: skip


def test_both_data_sets_get_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "load", source)
    digits, grey = images.digits(None, 50, 50), images.grey(None, 50, 50)
    assert digits.x.shape == grey.x.shape == (50, 1, SIDE, SIDE)
    edge = torch.cat([digits.x[:, :, 0].flatten(), digits.x[:, :, :, -1].flatten()])
    assert torch.allclose(edge, torch.tensor(-0.4)) and float(digits.x[:, :, 1:-1, 1:-1].min()) >= 0
    everything = torch.cat([grey.x, grey.x_test])
    assert abs(float(everything.mean())) < 1e-5 and float(everything.std()) == pytest.approx(1.0, abs=1e-5)
    assert images.colour(None, 50, 50).x.shape == (50, 3, SIDE, SIDE)
    with pytest.raises(DataError, match=r"must have 51 training pictures here\. Got 50"):
        images.digits(None, 51, 50)
    names = torch.tensor([3, 4, 5, 6, 7, 8, 9, 0, 1, 2])
    assert torch.equal(digits.renamed(names).y, (digits.y + 3) % 10)


@pytest.mark.parametrize("name", ["factor-updates", "factor-layouts", "factor-sparsity"])
def test_commands_write_figures_and_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "load", source)
    result = CliRunner().invoke(app, ["theory", name, "--quick", "--out", str(tmp_path), "--root", "anywhere"])
    assert result.exit_code == 0, result.output
    assert "--quick: too few pictures" in result.output
    assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / f"{name}.json").read_text())["epochs"] == images.QUICK.epochs


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["factor-updates", "--root", "."], "'mnist' was not found"),
        (["factor-layouts", "--root", "."], "'cifar10' was not found"),
        (["factor-sparsity", "--root", "."], "'cifar10' was not found"),
        (["figure-1", "--quick"], "--quick goes with the checks called factor-*"),
    ],
)
def test_what_is_missing_is_one_sentence(
    given: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["theory", *given])
    assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output
    assert not (tmp_path / "runs").exists()
