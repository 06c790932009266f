"""Nodes with tables of their own: they agree on columns and sums, and train to the bits of the simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import FIRST_NODE

from fedspan import tree
from fedspan.config import RunConfig, assemble, from_dict, to_toml
from fedspan.data.tables.preprocessing import Preprocessing
from fedspan.deploy.experiment import read_experiment
from fedspan.deploy.local_grid import AT_ONCE, LocalGrid, Nodes
from fedspan.deploy.node.inference import predict_table
from fedspan.deploy.node.own_table import agreement_file
from fedspan.deploy.node.service import Service
from fedspan.deploy.server.exchange import Roster
from fedspan.deploy.server.server import Server
from fedspan.deploy.server.table_agreement import agree_on_table, kind_of_table
from fedspan.errors import FedspanError
from fedspan.simulation.simulator import Simulation

pa = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")
TOWNS = ("bern", "oslo", "rome")


@pytest.fixture(autouse=True)
def quick_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes for real, so nothing has to reach the disk."""
    monkeypatch.setattr("fedspan.storage.tree_file.os.fsync", lambda _: None)


def table() -> Any:
    """Three hospitals; pain differs in its categories, and one age of each is missing."""
    rng, columns = np.random.default_rng(0), {k: [] for k in ("town", "age", "rate", "pain", "ill")}  # type: ignore[var-annotated]
    for k, (town, n) in enumerate(zip(TOWNS, (24, 36, 18))):
        age = rng.normal(50, 10, n).round(1).tolist()
        columns["town"] += [town] * n
        columns["age"] += [None, *age[1:]]
        columns["rate"] += rng.integers(60, 180, n).tolist()
        columns["pain"] += [("none", "some", "typical")[j] for j in rng.integers(0, 2 + (k == 1), n)]
        columns["ill"] += [("no", "yes")[int(a > 50)] for a in age]
    return pa.table(columns)


def experiment(source: Path, **data: Any) -> RunConfig:
    return from_dict(
        {
            "name": "towns",
            "rounds": 3,
            "data": {"source": str(source), "client": "town", "target": "ill", "missing": "indicator", **data},
            "partition": {"kind": "natural", "clients": 3, "min_samples": 1, "validation": 0.1},
            "model": {"kind": "mlp", "hidden": [4]},
            "method": {"name": "ditto", "lr": 0.1},
            "train": {"batch_size": 8, "mapping": "loop", "evaluate_every": 1},
        }
    ).resolve()


class Answers:
    """A node's service, as a node of the local grid."""

    def __init__(self, folder: Path, text: str) -> None:
        self.service, self.text = Service(folder), text

    def handle(self, facts: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        return self.service.handle(self.text, facts, payload)


def nodes(tmp_path: Path, config: RunConfig, change: Any = lambda town, t: t) -> tuple[LocalGrid, Roster, str]:
    """A node for every town, each with its own file in another order of columns."""
    whole, text = table(), to_toml(replace(config, data=replace(config.data, source="elsewhere.csv")))
    made = {}
    for i, town in enumerate(TOWNS):
        folder = tmp_path / town
        folder.mkdir()
        own = whole.filter(pa.compute.equal(whole["town"], town))
        order = ["age", "ill", "rate", "pain"] if i == 0 else ["pain", "rate", "ill", "age"]
        csv.write_csv(change(town, own.select(order)), folder / "own.csv")
        (folder / "node.json").write_text(json.dumps({"data": str(folder / "own.csv")}))
        made[i] = Answers(folder, text)
    roster = Roster(tuple(FIRST_NODE + i for i in range(3)), TOWNS)
    return LocalGrid(Nodes(made), 3), roster, text  # type: ignore[arg-type]


@pytest.mark.parametrize("standardise", ["federated", "client"])
def test_nodes_with_own_tables_train_as_the_simulation_does(tmp_path: Path, standardise: str) -> None:
    csv.write_csv(table(), tmp_path / "whole.csv")
    config = experiment(tmp_path / "whole.csv", standardise=standardise)
    method, task, data = assemble(config)
    simulated = Simulation(method, task, data, rounds=3, seed=config.seed, settings=config.train)
    expected = simulated.run()

    grid, roster, text = nodes(tmp_path, config)
    out, said = tmp_path / "run", list[str]()
    out.mkdir()
    agreed = agree_on_table(config, grid, roster, AT_ONCE, out, fresh=False, log=said.append)
    assert data.preprocessing is not None
    assert agreed == data.preprocessing.model_copy(update={"clients": {}})
    kind = kind_of_table(agreed)
    server = Server(
        read_experiment(text, kind), kind, grid, roster, policy=AT_ONCE, out=out, agreed=agreed, log=said.append
    )
    result = server.run()
    assert tree.digest(server.record.server) == tree.digest(simulated.record.server), said
    assert result.per_client == expected.per_client
    # The run keeps what was agreed on, and so does every node.
    assert (
        Preprocessing.read(out) == agreed == agree_on_table(config, grid, roster, AT_ONCE, out, fresh=False, log=print)
    )
    assert all(agreement_file(tmp_path / town / "state", text).is_file() for town in TOWNS)
    # Its personal model predicts unlabelled rows, with probabilities.
    held = table().filter(pa.compute.equal(table()["town"], "oslo"))
    csv.write_csv(held.select(["rate", "age", "pain"]), tmp_path / "new.csv")
    csv.write_csv(held, tmp_path / "known.csv")
    found, known = (predict_table(tmp_path / "oslo", tmp_path / name) for name in ("new.csv", "known.csv"))
    assert found.classes == ("no", "yes") and found.right is None and found.probabilities is not None
    assert np.array_equal(found.probabilities, known.probabilities) and np.allclose(found.probabilities.sum(1), 1)
    rows = data.test[1] - data.train[0].size - data.validation[0].size - data.test[0].size
    told = [found.labels[k] == held["ill"][int(k)].as_py() for k in rows]
    assert sum(told) / len(told) == pytest.approx(expected.per_client["accuracy"][1]) and known.right is not None
    # A worker that starts anew finds it again.
    again = Service(tmp_path / "oslo").node(text)
    rows = torch.from_numpy(np.sort(data.train[1]))
    assert torch.equal(again.data.x[torch.from_numpy(np.sort(again.data.train[0]))], data.x[rows])


def missing(town: str, t: Any) -> Any:
    return t.drop_columns(["rate"]) if town == "oslo" else t


def of_text(town: str, t: Any) -> Any:
    at = t.column_names.index("rate")
    return t.set_column(at, "rate", pa.array(["high"] * t.num_rows)) if town == "oslo" else t


def further(town: str, t: Any) -> Any:
    return t.append_column("weight", pa.array([1.0] * t.num_rows)) if town == "oslo" else t


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (missing, "Client oslo is left out: column 'rate' is missing, which 2 of 3 clients have"),
        (of_text, "Client oslo is left out: column 'rate' must hold numbers, as 2 of 3 clients have. Got text"),
        (further, "Client oslo is left out: column 'weight' is one that most clients do not have"),
    ],
)
def test_a_node_whose_table_differs_is_left_out_and_the_others_go_on(
    tmp_path: Path, change: Any, sentence: str
) -> None:
    config, said = experiment(tmp_path / "none.csv"), list[str]()
    grid, roster, text = nodes(tmp_path, config, change)
    out = tmp_path / "run"
    out.mkdir()
    agreed = agree_on_table(config, grid, roster, AT_ONCE, out, fresh=True, log=said.append)
    assert any(line.startswith(sentence) for line in said), said
    kind = kind_of_table(agreed)
    server = Server(read_experiment(text, kind), kind, grid, roster, policy=AT_ONCE, agreed=agreed, log=said.append)
    if change is not further:  # a column too many can be left alone once the others have agreed
        result = server.run()
        assert result.curve[-1]["answered"] == 2, said
        assert any("client oslo: its node reports: Node, row 0: column" in line for line in said), "\n".join(said)


def test_lying_and_silent_nodes_cost_nobody_else(tmp_path: Path) -> None:
    from fedspan.deploy.envelope import seal, unseal

    config, said = experiment(tmp_path / "none.csv"), list[str]()
    grid, roster, _ = nodes(tmp_path, config)
    out = tmp_path / "run"
    out.mkdir()

    def spoil(i: int, reply: Any) -> Any:
        facts, _ = unseal(reply.content)
        if i == 1 and facts["do"] == "sums":
            facts["answer"]["total"][0] = "many"
            reply.content = seal(facts)
        return reply

    grid.spoil = spoil
    agreed = agree_on_table(config, grid, roster, AT_ONCE, out, fresh=True, log=said.append)
    assert any(line.startswith("Client oslo is left out: 'answer.total.0' of its facts must") for line in said), said
    assert len(agreed.names) > 3
    grid.spoil = lambda i, reply: None
    with pytest.raises(FedspanError, match="2 nodes with tables that fit together are needed"):
        agree_on_table(config, grid, roster, replace(AT_ONCE, deadline=0.1), out, fresh=True, log=said.append)
    assert said[-1] == "Client rome is left out: no answer before the deadline."
