"""Stable ranks: estimates against exact Hessians; what accumulated factors add up to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian
from torch.func import functional_call

from conftest import call, failing, make_data, make_task
from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.linalg import lowrank
from fedspan.studies.hessian import (
    hessian_products,
    paper_estimate,
    quadrature,
    spectral_norm,
    squared_norm,
    stable_rank,
    whole,
)
from fedspan.studies.theory.hessian_rank import Plan, by_width
from fedspan.studies.theory.hessian_rank import run as compare

H_FIXED = np.diag([5.0, -7.0, 1.0, 0.5, 0.0, 0.1, 2.0, -0.3])


def fixed(v: np.ndarray) -> np.ndarray:
    return H_FIXED @ v


def test_products_are_those_of_the_exact_hessian() -> None:
    task, data = make_task(), make_data()
    x, y, params = data.x[:20], data.y[:20], task.init()

    def loss(w: torch.Tensor) -> torch.Tensor:
        out = functional_call(task.module, tree.unravel(w, params), (x,))
        return torch.nn.functional.cross_entropy(out, y)

    exact = hessian(loss, tree.ravel(params)).numpy()
    product, size = hessian_products(task, params, x, y)
    assert size == len(exact)
    np.testing.assert_allclose(whole(product, size), exact, atol=1e-12)
    found = stable_rank(product, size)
    values = np.linalg.eigvalsh(exact)
    assert found.exact and found.error == 0.0
    assert found.value == pytest.approx(np.square(values).sum() / np.abs(values).max() ** 2, rel=1e-10)


def test_estimates_agree_with_the_exact_values() -> None:
    task, data = make_task(), make_data()
    product, size = hessian_products(task, task.init(), data.x[:20], data.y[:20])
    exact = stable_rank(product, size, exact=True)
    assert spectral_norm(product, size, 0) == pytest.approx(exact.norm, rel=1e-6)
    drawn = stable_rank(product, size, exact=False, samples=200)
    assert not drawn.exact and 0 < drawn.error < 0.15 * exact.value
    assert abs(drawn.value - exact.value) < 4 * drawn.error
    total = np.square(whole(product, size)).sum()
    means = [squared_norm(product, size, 5, seed)[0] for seed in range(40)]  # unbiased: errors average out
    assert np.mean(means) == pytest.approx(total, abs=4 * np.std(means) / 40**0.5)


def test_the_norm_is_the_largest_size_not_the_largest_value() -> None:
    assert spectral_norm(fixed, 8, 0) == pytest.approx(7.0)
    assert stable_rank(fixed, 8).value == pytest.approx(np.square(H_FIXED).sum() / 49)


def test_quadrature_finds_all_values_with_their_densities() -> None:
    values, densities = quadrature(fixed, 8, 8, 3)
    np.testing.assert_allclose(values, np.sort(np.diag(H_FIXED)), atol=1e-10)
    np.testing.assert_allclose(densities, 1 / 8, atol=1e-10)  # of random signs all directions have equal shares
    assert paper_estimate(values, densities) == pytest.approx(np.square(H_FIXED).sum() / 49)
    values, densities = quadrature(fixed, 8, 3, 3)
    assert len(values) == 3 and densities.sum() == pytest.approx(1.0)
    assert densities @ values**2 == pytest.approx(np.square(H_FIXED).sum() / 8)  # moments below 2 * steps are exact
    # Where the largest value comes many times, the paper's estimate counts it once.
    twice = np.repeat([10.0, 1.0], 10)
    assert stable_rank(lambda v: twice * v, 20).value == pytest.approx(10.1)
    assert paper_estimate(*quadrature(lambda v: twice * v, 20, 20, 0)) == pytest.approx(1.01)
    assert len(quadrature(lambda v: 2 * v, 6, 6, 0)[0]) == 1  # nothing is left after the first direction


def test_a_change_has_the_rank_of_what_was_added() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        W = torch.randn(20, 3, 3, 3, dtype=dtype)
        new = W.clone()
        for k in range(1, 4):
            new = new + lowrank.compose(
                {"A": torch.randn(20, 2, dtype=dtype), "B": torch.randn(2, 27, dtype=dtype)}, W.shape
            )
            P, s, Q = lowrank.changed(new, W)
            assert len(s) == 2 * k
            assert torch.allclose((P * s) @ Q.T, (new.double() - W.double()).flatten(1), atol=1e-5)
        assert len(lowrank.changed(W, W)[1]) == 0


@pytest.mark.long
def test_the_comparison_reports_all_arms(tmp_path: Path) -> None:
    plan = Plan(size=4, hidden=2, few=20, many=60, epochs=3, every=2, seeds=2)
    assert plan.checkpoints == [0, 2, 3] and plan.steps(60, 2) == 4 and plan.steps(20, 2) == 2
    outcome = compare(plan)
    few, control = outcome.numbers["few"]["value"], outcome.numbers["control"]["value"]
    assert outcome.numbers["exact"] and len(outcome.rows) == 3
    assert few[0][0] == control[0][0] and few[0][2] != control[0][2]  # the same start, other numbers of steps
    assert "of 2 pairs" in outcome.says
    same, many = outcome.numbers["same"]["value"], outcome.numbers["many"]["value"]
    assert same[0][0] == few[0][0] and same[0][2] != control[0][2] != many[0][2]  # few samples, weights of many
    wide = by_width(plan, (2, 3))
    assert [row[0] for row in wide.rows] == ["2", "3"]
    assert wide.numbers["widths"]["2"]["same"]["value"][0][-1] == same[0][-1]
    options = "--size 4 --hidden 2 --few 20 --many 60 --epochs 1 --seeds 1 --out"
    told = call("analyse", "hessian-rank", *options.split(), str(tmp_path / "h")).stdout
    assert "stable rank" in told
    assert (tmp_path / "h" / "hessian_rank.png").is_file()
    assert json.loads((tmp_path / "h" / "hessian_rank.json").read_text())["epochs"] == [0, 1]
    told = call("analyse", "hessian-rank", *options.split()[:-1], "--widths", "2,3", "--tanh", "--json").stdout
    assert json.loads(told)["numbers"]["plan"]["activation"] == "tanh"
    assert "integers with commas" in failing("analyse", "hessian-rank", "--widths", "a")
    with pytest.raises(ConfigError, match="many must be more than few, 50"):
        Plan(many=50)
    assert "at least 5000 examples" in failing("analyse", "hessian-rank", "--many", "5000")


def test_the_rank_grows_by_r_with_every_accumulation(tmp_path: Path) -> None:
    exp, out = tmp_path / "x.toml", tmp_path / "run"
    exp.write_text(
        "rounds = 5\n[data]\nlimit = 100\n[partition]\nclients = 3\n[model]\nhidden = [12]\n"
        '[method]\nname = "pfedloru"\nrank = 3\ntau = 2\n[train]\nworkers = 1\nevaluate_every = 5\n'
    )
    call("run", str(exp), "--out", str(out))
    told = call("analyse", "update-rank", str(out)).stdout
    found = json.loads((tmp_path / "run-update-rank" / "update_rank.json").read_text())
    assert found["layers"] == {"body.0": {"full": 12, "ranks": [0, 3, 3, 6, 6, 9]}}
    assert found["bound"] == [0, 3, 3, 6, 6, 9] and "5 of 5 cases" in told
    exp.write_text("rounds = 0\n[data]\nlimit = 100\n[partition]\nclients = 3\n[train]\nworkers = 1\n")
    call("run", str(exp), "--out", str(tmp_path / "other"))
    assert "must be of fedloru" in failing("analyse", "update-rank", str(tmp_path / "other"))
