"""A client that was never trained joins a run: how well it does, what it costs, and that the run stays as it was."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from conftest import assert_close, assert_same, call, failing, make_data, make_model
from conftest import finished as run_of
from fedspan import FederatedData, Result, make, simulate, tree
from fedspan.config import assemble, from_dict
from fedspan.data import load
from fedspan.errors import ConfigError, DataError
from fedspan.learn.batches import Steps
from fedspan.method import ClientInfo, Newcomer, Onboards
from fedspan.methods import METHODS, FedPer
from fedspan.randomness import key
from fedspan.simulation.onboarding import Client, hold_out, onboard, train_alone

EXPERIMENT: dict[str, Any] = {
    "rounds": 10,
    "data": {"source": "digits"},
    "partition": {"kind": "permuted-groups", "clients": 20, "groups": 4},
    "model": {"hidden": [32]},
    "method": {"name": "pfl-mf", "rank": 4, "lr": 0.5, "safeguard": False},  # whole steps, which rank 4 bears here
    "train": {"evaluate_every": 5, "workers": 1},
}
Held = tuple[FederatedData, list[Client], Any]
HELD = [16, 17, 18, 19]  # one of each group


def hashes(folder: Path) -> dict[str, str]:
    """Every file below a folder by its contents."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def federation() -> Held:
    """Sixteen clients of four groups, the four that are kept out, and the task."""
    _, task, data = assemble(from_dict(EXPERIMENT))
    rest, held = hold_out(data, HELD)
    return rest, held, task


def trained(name: str, federation: Held, rounds: int = 10, **fields: Any) -> Result:
    data, _, task = federation
    return simulate(make(name, **fields), task, data, rounds=rounds, workers=1, evaluate_every=100)


@pytest.fixture(scope="module")
def finished(federation: Held) -> Result:
    return trained("pfl-mf", federation, rounds=30, rank=4, lr=0.5, safeguard=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `compare` writes for pfl-mf, fedavg and oracle."""
    where = tmp_path_factory.mktemp("runs")
    text = [f"rounds = {EXPERIMENT['rounds']}"]
    for section in ("data", "partition", "model", "train"):
        text += [f"[{section}]", *(f"{k} = {json.dumps(v)}" for k, v in EXPERIMENT[section].items())]
    text += ["[methods.pfl-mf]", "rank = 4", "lr = 0.5", "safeguard = false", "[methods.fedavg]", "[methods.oracle]"]
    (where / "exp.toml").write_text("\n".join(text))
    call("compare", str(where / "exp.toml"), "--out", str(where / "all"), "-q")
    return where / "all"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """A client of the first group in the layout of the source, before normalisation."""
    from sklearn.datasets import load_digits

    _, _, data = assemble(from_dict(EXPERIMENT))
    assert data.relabel is not None
    digits = load_digits()
    at = np.random.default_rng(0).permutation(len(digits.target))[:80]
    x = (digits.images[at, None] / 16.0).astype(np.float32)
    np.savez(tmp_path / "new.npz", x=x, y=data.relabel[0].numpy()[digits.target[at]])
    return tmp_path / "new.npz"


# ------------------------------------------------------------------------------------------------ Python


def test_hold_out_keeps_everything_else(federation: Held) -> None:
    _, _, data = assemble(from_dict(EXPERIMENT))
    rest, held, _ = federation
    assert rest.clients == 16 and rest.names == data.names[:16] and rest.classes == data.classes
    assert torch.equal(rest.x, data.x) and torch.equal(rest.y, data.y)
    for i in range(16):
        for part in ("train", "test", "validation"):
            assert np.array_equal(getattr(rest, part)[i], getattr(data, part)[i])
        assert torch.equal(rest.labels(i), data.labels(i))
    assert data.groups is not None and rest.groups is not None and torch.equal(rest.groups, data.groups[:16])
    for i, (x, y, x_test, y_test) in zip(HELD, held):
        assert torch.equal(x, data.x[torch.from_numpy(data.train[i])]) and torch.equal(y, data.labels(i))
        assert torch.equal(x_test, data.x[torch.from_numpy(data.test[i])])
        assert torch.equal(y_test, data.labels(i, "test"))
        assert not torch.equal(y, data.y[torch.from_numpy(data.train[i])])  # renamed as the client has it
    for wrong in ([20], [-1], [1, 1], list(range(20))):
        with pytest.raises(ConfigError, match="different numbers"):
            hold_out(data, wrong)


def test_newcomers_do_as_well_as_trained_clients_and_better_than_alone(finished: Result, federation: Held) -> None:
    simulation = finished.simulation
    assert simulation is not None
    before = simulation.record.digest()
    joined = [onboard(finished, *client) for client in federation[1]]
    alone = [train_alone(finished, new) for new in joined]
    mean = float(np.mean([new.accuracy for new in joined]))
    assert mean > finished.accuracy["mean"] - 0.1
    assert mean > float(np.mean([a.measures["accuracy"] for a in alone])) + 0.1
    for new, a, (x, y, x_test, y_test) in zip(joined, alone, federation[1]):
        server = simulation.record.server
        assert new.bytes_up == 0 and new.bytes_down == tree.nbytes({k: server[k] for k in ("U", "theta")})
        assert new.v is not None and new.v.shape == (4,) and new.visits == 0 and a.epochs == 30
        assert [len(p) for p in new.examples] == [len(x), len(y), len(x_test), len(y_test)]
        right = (new.model()(x_test).argmax(1) == y_test).float().mean()
        assert float(right) == pytest.approx(new.accuracy)
        head = tree.ravel(tree.select(new.weights, new.task.head))
        assert torch.allclose(server["U"] @ new.v, head, atol=1e-4)  # θ = U v
    assert simulation.record.digest() == before


def test_a_trained_client_that_joins_again_finds_its_own_model(finished: Result) -> None:
    simulation = finished.simulation
    assert simulation is not None
    data = simulation.data
    at = torch.from_numpy(data.train[3])
    new = onboard(finished, data.x[at], data.labels(3), data.x[at], data.labels(3))
    _, weights = simulation.personal(3)
    own = (simulation.task.predict(weights, data.x[at]).argmax(1) == data.labels(3)).float().mean()
    assert new.accuracy is not None and new.accuracy >= float(own) - 0.05


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedbabu", "ditto"])
def test_other_methods_join_with_what_they_keep(name: str, federation: Held) -> None:
    result = trained(name, federation, rounds=2)
    new = onboard(result, *federation[1][0])
    assert new.accuracy is not None and new.bytes_up == 0 and new.bytes_down > 0 and new.v is None
    assert new.visits == (0 if name == "fedavg" else 2)


@pytest.mark.parametrize("name", ["pfl-mf-paper", "pfl-mf-joint"])
def test_whole_models_in_the_subspace_are_solved_for_too(name: str, federation: Held) -> None:
    result = trained(name, federation, rounds=2, rank=3)
    x, y, *_ = federation[1][0]
    new = onboard(result, x, y, x, y)
    simulation: Any = result.simulation
    method, task = simulation.method, simulation.task
    row = method.init_client(task, ClientInfo(16, None, key(0, "client", 16), 0))
    server = simulation.record.server
    v = method.coefficients(row, server, {})
    start = tree.unravel(server["U"] @ v, tree.select(task.init(), method.factorised(task)))
    before = task.example_loss(task.predict(start, x), y).mean()
    assert new.v is not None and new.v.shape == (3,) and new.measures["loss"] < float(before)


ONBOARDING = [name for name, kind in METHODS.items() if issubclass(kind, Onboards)]


@pytest.mark.parametrize("name", ONBOARDING)
def test_a_way_of_its_own_to_onboard_is_pure_and_keeps_the_method_as_it_is(name: str) -> None:
    sim = run_of(make(name, rank=2), rounds=1, mapping="loop")
    method, task = sim.method, sim.task
    assert isinstance(method, Onboards)
    row = sim.engine.begin(None, 7)
    down = method.download(sim.record.server, torch.tensor([0]), None, 1).shared
    before = tree.digest({"row": row, "down": down})
    first, second = (
        method.onboard(task, row, down, sim.engine.visit(None, 1, 0, method.onboard_plan(task), {})) for _ in range(2)
    )
    assert tree.digest({"row": row, "down": down}) == before
    assert_same(first, second)
    if "U" not in down:  # heads around a mean, of which the coordinates are told
        apart = tree.ravel(tree.select(first.weights, task.head)) - down["mu"]
        assert_close(first.solved, apart @ down["Q"])
        return
    U = down["U"]
    inside = tree.ravel(tree.select(first.weights, method.factorised(task)))  # type: ignore[attr-defined]
    assert_close(U @ first.solved, inside)


def test_a_method_of_ones_own_onboards_in_its_own_way(federation: Held) -> None:
    """Where a method has the capability, nothing is trained in visits, whatever its clients keep."""

    class HalfHead(FedPer, Onboards):
        def onboard_plan(self, task: Any) -> Any:
            return {"some": Steps(3)}

        def onboard(self, task: Any, client: Any, down: Any, visit: Any) -> Newcomer:
            assert len(visit["some"]) == 3
            half = {k: p / 2 for k, p in client["h"].items()}
            return Newcomer(down["theta"] | half, torch.tensor([0.5]))

    rest, held, task = federation
    new = onboard(simulate(HalfHead(lr=0.1), task, rest, rounds=2, workers=1), *held[0])
    assert new.visits == 0 and new.v is not None and new.v.tolist() == [0.5]
    head = tree.select(new.task.init(), new.task.head)
    assert_close(tree.select(new.weights, new.task.head), tree.map(lambda a: a / 2, head), 1e-6)


@pytest.mark.parametrize(("name", "says"), [("local", "shares nothing"), ("oracle", "group")])
def test_methods_without_a_place_for_newcomers_say_so(name: str, says: str, federation: Held) -> None:
    with pytest.raises(ConfigError, match=says):
        onboard(trained(name, federation, rounds=1), *federation[1][0])


def test_moved_gauges_batch_norm_and_regression() -> None:
    data = make_data("cnn")
    for fields in ({"gauge_every": 1}, {}):
        kind = "cnn" if fields else "batchnorm"
        rest, held = hold_out(data, [6])
        method = make("pfl-mf", rank=2, **fields)
        result = simulate(method, make_model(kind), rest, rounds=3, workers=1, precision="float64")
        new = onboard(result, *held[0])
        assert new.accuracy is not None and all(torch.isfinite(t).all() for t in new.weights.values())
        if fields:
            assert new.bytes_down > tree.nbytes(new.task.init())  # the maps of the gauge are downloaded, too
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(20, 5)), rng.normal(size=(20, 3))) for _ in range(3)]
    result = simulate(make("pfl-mf", rank=2), make_model("mlp"), pairs, rounds=2, workers=1)
    new = onboard(result, *pairs[0])
    assert new.accuracy is None and new.measures["squared_error"] > 0.0
    assert len(new.data.train[0]) == 15 and len(new.data.test[0]) == 5


def test_wrong_examples_are_one_sentence(finished: Result, federation: Held) -> None:
    x, y, x_test, y_test = federation[1][0]
    with pytest.raises(DataError, match=r"shape \(1, 8, 8\) like those of the run. Got \(64,\)"):
        onboard(finished, x.flatten(1), y)
    with pytest.raises(DataError, match=r"test examples must have shape"):
        onboard(finished, x, y, x_test.flatten(1), y_test)
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.9"):
        onboard(finished, x, y + 9)
    with pytest.raises(DataError, match="must be integers"):
        onboard(finished, x, y.double())
    with pytest.raises(DataError, match="come together"):
        onboard(finished, x, y, x_test)
    with pytest.raises(DataError, match="as many labels"):
        onboard(finished, x, y[:-1])
    finished_elsewhere = Result(**{**vars(finished), "simulation": None})
    with pytest.raises(ConfigError, match="fedspan onboard RUN"):
        onboard(finished_elsewhere, x, y)


# ------------------------------------------------------------------------------------------------ command


def test_command_joins_compares_exports_and_changes_nothing(runs: Path, new: Path, tmp_path: Path) -> None:
    before = hashes(runs)
    out = tmp_path / "m.safetensors"
    said = call("onboard", str(runs / "pfl-mf-0"), "--data", str(new), "--client-name", "ward 7", "--out", str(out))
    assert hashes(runs) == before
    for words in ("ward 7 joins pfl-mf-0 after round 10", "0 bytes up", "normalised with the run's constants",
                  "trained alone", "fedavg (joined)", "The run's own clients reach"):  # fmt: skip
        assert words in said.stdout, said.stdout
    found = json.loads(call("onboard", str(runs / "pfl-mf-0"), "--data", str(new), "--json").stdout)
    assert found["bytes"]["up"] == 0 and len(found["v"]) == 4 and found["train"] == 60 and found["test"] == 20
    assert found["accuracy"] > max(found["beside"][k]["accuracy"] for k in ("alone", "fedavg"))
    # The file is the model whose accuracy was printed.
    _, task, _ = assemble(from_dict(EXPERIMENT))
    raw = np.load(new)
    x = (torch.from_numpy(raw["x"]) - 0.3053) / 0.3760
    assert torch.allclose(load("digits").x.min(), x.min())
    weights = load_file(out)
    right = (task.predict(weights, x).argmax(1) == torch.from_numpy(raw["y"])).float().mean()
    assert float(right) > 0.8
    with safe_open(out, "pt") as f:
        about = f.metadata()
    assert about["client_name"] == "ward 7" and json.loads(about["plain"]) is True and about["round"] == "10"
    other = call("onboard", str(runs / "pfl-mf-0"), "--data", str(new), "--beside", str(runs / "fedavg-0"), "--json")
    assert json.loads(other.stdout)["beside"]["fedavg"]["accuracy"] == found["beside"]["fedavg"]["accuracy"]


def test_command_uses_a_test_part_that_is_given(runs: Path, new: Path, tmp_path: Path) -> None:
    raw = np.load(new)
    path = tmp_path / "both.npz"
    np.savez(path, x=raw["x"][:50], y=raw["y"][:50], x_test=raw["x"][50:], y_test=raw["y"][50:])
    found = json.loads(call("onboard", str(runs / "pfl-mf-0"), "--data", str(path), "--json").stdout)
    assert found["train"] == 50 and found["test"] == 30


def test_bytes_and_numbers_are_told_apart_as_in_the_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(120) % 3
    x = (60 * y[:, None, None] + rng.integers(0, 60, (120, 4, 4))).astype(np.uint8)
    np.savez(tmp_path / "own.npz", x=x, y=y)
    (tmp_path / "exp.toml").write_text(
        f'rounds = 2\n[data]\nsource = "{tmp_path / "own.npz"}"\n[partition]\nclients = 3\n'
        '[model]\nhidden = [4]\n[method]\nname = "pfl-mf"\nrank = 2\n[train]\nworkers = 1\n'
    )
    run = str(tmp_path / "run")
    call("run", str(tmp_path / "exp.toml"), "--out", run, "-q")
    np.savez(tmp_path / "a.npz", x=x[:30], y=y[:30])
    said = call("onboard", run, "--data", str(tmp_path / "a.npz")).stdout
    assert "bytes, divided by 255" in said and "mean 0.5, deviation 0.5" in said
    np.savez(tmp_path / "b.npz", x=x[:30, None].astype(np.float32), y=y[:30])
    said = failing("onboard", run, "--data", str(tmp_path / "b.npz"))
    assert "x must hold bytes (uint8), like the run's source" in said


def test_command_errors_are_one_sentence(runs: Path, new: Path, tmp_path: Path) -> None:
    raw, run = dict(np.load(new)), str(runs / "pfl-mf-0")

    def given(**arrays: Any) -> str:
        np.savez(tmp_path / "bad.npz", **arrays)
        return failing("onboard", run, "--data", str(tmp_path / "bad.npz"))

    assert "must be a run directory" in failing("onboard", str(tmp_path), "--data", str(new))
    assert "needs the arrays x and y" in given(y=raw["y"])
    assert "shape (1, 8, 8)" in given(x=raw["x"][:, :, :4], y=raw["y"])
    assert "labels must lie in 0..9" in given(x=raw["x"], y=raw["y"] + 5)
    assert "group" in failing("onboard", str(runs / "oracle-0"), "--data", str(new))
    assert ".npz" in failing("onboard", run, "--data", str(runs / "pfl-mf-0" / "config.toml"))
    assert "no such file" in failing("onboard", run, "--data", str(tmp_path / "none.npz"))
    assert ".safetensors" in failing("onboard", run, "--data", str(new), "--out", str(tmp_path / "m.bin"))
    assert "group" in failing("onboard", run, "--data", str(new), "--beside", str(runs / "oracle-0"))


def test_command_compares_with_a_run_beside_only_if_it_has_one_model_for_all(
    runs: Path, new: Path, tmp_path: Path
) -> None:
    """Of the runs beside it, the oracle has no place for newcomers, and pfl-mf keeps something at its clients."""
    found = json.loads(call("onboard", str(runs / "fedavg-0"), "--data", str(new), "--json").stdout)
    assert found["method"] == "fedavg" and found["v"] is None and set(found["beside"]) == {"alone"}
    other = json.loads(
        call("onboard", str(runs / "fedavg-0"), "--data", str(new), "--beside", str(runs / "pfl-mf-0"), "--json").stdout
    )
    assert set(other["beside"]) == {"alone", "pfl-mf"}
