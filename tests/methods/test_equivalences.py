"""Every method that turns into another one at the edge of its parameters, and the test that shows it.

The list is `fedspan.methods.equivalences.LINES`: what is equal, and where that is tested (float64, 1e-12, mapped and
one client after another unless the test says otherwise). Lines without a place of their own are tested here. Equalities
need the same weighting on both sides. What holds only under further conditions is in docs/reference/equivalences.md,
what does not hold in docs/explanation/equivalences.md.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import assert_close, finished, make_task, method_of
from fedspan import tree
from fedspan.learn.task import Task
from fedspan.method import ClientInfo, Federation
from fedspan.methods import METHODS, FedAvg, FedLMT, FedSim, PFedPara, make
from fedspan.methods.equivalences import LINES, Line, of
from fedspan.methods.pfl_mf import PflMfAlgorithm1, algorithm_1
from fedspan.tree import Tree

STEPS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


@cache
def names_in(file: str) -> set[str]:
    (path,) = Path(__file__).parents[1].rglob(f"{file}.py")
    source = path.read_text(encoding="utf-8")
    return {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("line", LINES, ids=[line.words for line in LINES])
def test_every_line_has_its_test(line: Line) -> None:
    file, name = line.test.split("::")
    if set(line.methods) <= METHODS.keys():
        assert name in names_in(file), f"{file}.py has no {name}"


def test_every_method_has_a_line() -> None:
    assert not [name for name in METHODS if not of(name)]


def test_the_page_tells_of_every_line() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "equivalences.md").read_text(encoding="utf-8")
    for line in LINES:
        if set(line.methods) <= METHODS.keys():
            assert f"| {line.words} |" in page, line.words


# ------------------------------------------------------------------------------------------------ tested here


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_pfedpara_without_its_second_matrix_is_fedlmt(mapping: str) -> None:
    """Linear layers of one rank and one start; FedLMT's decay of the product is switched off."""

    class Zero(PFedPara):
        def init_client(self, task: Task, who: ClientInfo) -> Tree:
            return tree.map(torch.zeros_like, super().init_client(task, who))

        def client_update(self, task: Task, client: Tree, down: Tree, visit: Any) -> Any:
            h = client["h"]
            theta = self.fit(lambda p, b: task.loss(p | h, b), down["theta"], visit["train"])
            from fedspan.method import Sent

            return client, Sent(self.weigh(visit), mean={"theta": theta})

    first = method_of(Zero, rank=2, private_head=False, **STEPS).model(make_task(), None).init()

    class Same(FedLMT):
        def rank_of(self, shape: torch.Size, rho: float) -> int:
            return 2

        def init_server(self, task: Task, federation: Federation) -> Tree:
            parts = super().init_server(task, federation)
            for f, old in (("U", "X1"), ("V", "Y1")):
                parts[f] = {k: first[k[:-1] + old] for k in parts[f]}
            return {**parts, "theta": {k: first[k] for k in parts["theta"]}}

    a = finished(method_of(Zero, rank=2, private_head=False, **STEPS), mapping=mapping)
    b = finished(method_of(Same, layers="all", frobenius=False, **STEPS), mapping=mapping)
    mine, other = a.record.server["theta"], b.record.server
    for k, U in other["U"].items():
        assert_close(mine[k[:-1] + "X1"], U)
        assert_close(mine[k[:-1] + "Y1"], other["V"][k[:-1] + "V"])
    assert_close({k: mine[k] for k in other["theta"]}, other["theta"])
    assert float((mine["0.X1"] - first["0.X1"]).abs().max()) > 1e-3


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_one_literal_step_on_u_is_the_gradient_step(mapping: str) -> None:
    """One full-batch step of training θ_i on its way to the server is η G_i, as a step on θ_i or on a copy of U."""
    fields: dict[str, Any] = {"rank": 3, "v_steps": 2, "lr": 0.1}
    options = {"mapping": mapping, "batch_size": "full", "rounds": 2}
    paper = finished(PflMfAlgorithm1(**fields), **options)
    for step in ("literal", "plain"):
        one = finished(algorithm_1(u_update="train", u_steps=1, server_step=step, **fields), **options)
        assert_close(one.record.server["U"], paper.record.server["U"])
    start = finished(PflMfAlgorithm1(**fields), rounds=0).record.server["U"]
    assert float((start - paper.record.server["U"]).abs().max()) > 1e-4


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
@pytest.mark.parametrize(("name", "fields"), [("pfedes", {"mu": 0.0}), ("pfedafm", {"lr_alpha": 0.0})])
def test_models_that_do_not_look_at_the_common_part_are_local(name: str, fields: dict[str, Any], mapping: str) -> None:
    a, b = (finished(method, mapping=mapping) for method in (make(name, **fields, **STEPS), make("local", **STEPS)))
    for i in range(3):
        assert_close(a.record.row(i)["theta"], b.record.row(i)["theta"])


def test_fedara_star_is_fedara_at_half_the_rank() -> None:
    a, b = (finished(m) for m in (make("fedara-star", **STEPS), make("fedara", ratio=0.5, **STEPS)))
    assert_close(a.record.server, b.record.server)


def test_a_line_that_does_not_hold_without_its_condition() -> None:
    """FedSim equals FedPer only while the server's step is 1; FedAvg's mean needs the same weights on both sides."""
    assert not _alike(finished(method_of(FedSim, server_lr=0.5, **STEPS)), finished(make("fedper", **STEPS)))
    assert not _alike(finished(method_of(FedAvg, weighting="uniform", **STEPS)), finished(method_of(FedAvg, **STEPS)))


def _alike(a: Any, b: Any) -> bool:
    return bool(torch.allclose(tree.ravel(a.personal(0)[1]), tree.ravel(b.personal(0)[1]), atol=1e-6))
