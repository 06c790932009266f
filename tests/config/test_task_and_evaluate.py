"""`[task]` and `[evaluate]` in an experiment file: written back, part of an identity or not, refused when wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import failing
from fedspan.config import assemble, from_dict, to_toml
from fedspan.data.federated import FederatedData
from fedspan.deploy.experiment import DataKind, deployable, stand_in
from fedspan.errors import ConfigError
from fedspan.method.named_code import only_allowing

OWN = """
import torch

def tenth(y, p):
    return 0.1
tenth.higher_is_better = False

def worst(output, y, mask):
    return torch.where(mask, torch.nn.functional.cross_entropy(output, y, reduction="none"), 0).amax()

not_a_function = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of somebody's own on Python's path."""
    (tmp_path / "own_for_evaluate.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def config(**sections: Any) -> Any:
    return from_dict({"rounds": 1, "model": {"kind": "linear"}, **sections})


def test_what_is_not_said_is_not_written() -> None:
    plain = config()
    assert "task" not in plain.to_dict() and "evaluate" not in plain.to_dict()
    said = config(task={"kind": "survival", "ties": "breslow"}, evaluate={"metrics": ["concordance"]})
    assert said.to_dict()["task"] == {"kind": "survival", "ties": "breslow"}
    again = from_dict(tomllib.loads(to_toml(said)))
    assert again == said and again.evaluate.metrics == ("concordance",)


def test_the_task_decides_the_numbers_and_evaluation_does_not() -> None:
    plain = config()
    assert config(evaluate={"metrics": ["ece"], "models": ["received", "own"]}).identity() == plain.identity()
    assert config(task={"kind": "classification"}).identity() != plain.identity()


def test_kinds_are_assembled() -> None:
    x = torch.randn(12, 3)
    pairs = {
        "multi-label": (torch.tensor([[0, 1, 1, 0]] * 12), 4, {}),
        "regression": (torch.randn(12, 5), 5, {}),
        "survival": (torch.rand(12, 2).round(), 1, {"kind": "survival"}),
        "classification": (torch.arange(12) % 3, 3, {}),
    }
    for kind, (y, outputs, section) in pairs.items():
        data = FederatedData.from_arrays([(x, y)] * 2)
        _, task, _ = assemble(config(task=section), data)
        assert task.kind == kind and task.predict(task.init(), x).shape == (12, outputs)


def test_code_is_imported_only_where_it_is_allowed(own: Path) -> None:
    named = {"metrics": ["ece", "own_for_evaluate:tenth"]}
    loss = {"loss": "own_for_evaluate:worst", "loss_of": "batch"}
    with pytest.raises(ConfigError, match=r"Evaluate: metrics: code of package 'own_for_evaluate' must be allowed"):
        config(evaluate=named)
    with only_allowing(["own_for_evaluate"], "never"):
        made = config(evaluate=named, task=loss)
        assert [m.name for m in made.evaluate.found()] == ["ece", "tenth"] and not made.evaluate.found()[1].higher
        _, task, _ = assemble(made)
        assert task.loss_of == "batch" and not task.unmappable()
        with pytest.raises(ConfigError, match=r"must be a function. Got a value of type int"):
            config(evaluate={"metrics": ["own_for_evaluate:not_a_function"]})
    with pytest.raises(ConfigError, match=r"Task: loss: code of package 'own_for_evaluate' must be allowed"):
        assemble(made)
    exp = own / "exp.toml"
    exp.write_text('rounds = 1\n[evaluate]\nmetrics = ["own_for_evaluate:tenth"]\n')
    assert "allow it with --allow-code own_for_evaluate" in failing("run", str(exp))


def test_bad_sections_are_refused() -> None:
    for section, keys, said in (
        ("task", {"kind": "ranking"}, r"Task: kind must be one of 'auto', 'classification'.*Got 'ranking'"),
        ("task", {"loss_of": "batch"}, r"loss_of = 'batch' needs a loss of one's own"),
        ("task", {"loss": "mse"}, r"loss must be given as 'package.module:function'. Got 'mse'"),
        ("task", {"tie": "efron"}, r"Task: unknown key 'tie'. Did you mean 'ties'"),
        ("evaluate", {"metrics": "roc_auc"}, r"Evaluate: metrics must be a list"),
        ("evaluate", {"metrics": [3]}, r"Evaluate: metrics must be a list"),
        ("evaluate", {"metrics": ["accurcy"]}, r"Got 'accurcy'. Did you mean 'accuracy'"),
    ):
        with pytest.raises(ConfigError, match=said):
            config(**{section: keys})


def test_a_deployment_takes_metrics_and_no_other_models() -> None:
    deployable(config(evaluate={"metrics": ["roc_auc"]}))
    with pytest.raises(ConfigError, match=r"evaluate.models is for simulations. Got \['received', 'own'\]"):
        deployable(config(evaluate={"models": ["received", "own"]}))
    with pytest.raises(ConfigError, match=r"evaluate.predict_by is for simulations"):
        deployable(config(evaluate={"predict_by": ["prototype"]}))


def test_a_server_stands_in_for_labels_of_any_shape() -> None:
    y = torch.from_numpy(np.arange(24).reshape(6, 4) % 3)
    data = FederatedData.from_arrays([(torch.randn(6, 4, 2), y)])
    kind = DataKind.of(data)
    assert kind.label == (4,) and DataKind(**{**vars(kind), "label": [4], "shape": [4, 2]}) == kind
    assert stand_in(kind, 2, 0).y.shape[1:] == (4,) and int(stand_in(kind, 2, 0).y.max()) == 2
    assert "label" not in DataKind((3,), 2).facts() and kind.facts()["label"] == [4]


@pytest.mark.parametrize(("kind", "meant"), [("regression", "number"), ("survival", "number"), ("auto", "auto")])
def test_a_task_of_numbers_says_what_a_tables_target_is(kind: str, meant: str) -> None:
    data = {"source": "t.csv", "client": "who", "target": "score"}
    config = from_dict({"data": data, "task": {"kind": kind}})
    assert config.data.table.target_type == meant
    assert from_dict(config.to_dict()) == config
    said = from_dict({"data": {**data, "target_type": "class"}, "task": {"kind": kind}})
    assert said.data.table.target_type == "class", "what the file says stays"
