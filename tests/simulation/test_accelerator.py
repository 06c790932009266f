"""Devices: what is asked for and is not there, memory that runs out, and every method on a pretended accelerator.

No GPU is needed: `pretended_device` marks tensors as lying on one, and lists operations that mix devices.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_device import PretendedDevice
from test_all_methods import TABLE
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from conftest import assert_close, assert_same, failing, finished, make_data, make_model, make_task, method_of
from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.deploy.experiment import read_config
from fedspan.errors import ConfigError
from fedspan.learn import accelerator, products
from fedspan.learn.batches import Batch
from fedspan.learn.task import Task
from fedspan.method import Sent, Visit
from fedspan.methods import METHODS, make
from fedspan.methods.fedavg import FedAvg
from fedspan.simulation.defence import Defence
from fedspan.simulation.engine import Engine
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation, simulate
from fedspan.simulation.spawned_workers import SpawnedPool
from fedspan.simulation.workers import Job
from fedspan.testing import state_of
from fedspan.tree import Params, Tree

MAPPINGS = ("vmap", "folded", "loop")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PretendedDevice]:
    """One device of every kind, as far as anybody asks; none of them is used outside `active`."""
    monkeypatch.setattr(accelerator, "number_of", lambda kind: 1)
    monkeypatch.setattr(accelerator, "called", lambda device: device.type)
    monkeypatch.setattr(accelerator, "free_memory", lambda device: None)
    return PretendedDevice


def run(name: str, fields: dict[str, Any], device: str, mapping: str, **more: Any) -> Simulation:
    """A short run with evaluation; chunks are the same on every device, so that sums are added up alike."""
    how = {"mapping": mapping, "device": device, "chunk": 3, "epochs": 1, "rounds": 2} | more
    return finished(make(name, **fields), **how)


def faults(on: PretendedDevice) -> list[str]:
    """What would be an error, in words."""
    return [f"{where} {what} ({number} times)" for (where, what), number in sorted(on.faults.items())]


def compared(on: PretendedDevice, name: str, fields: dict[str, Any], mapping: str, **more: Any) -> None:
    """A run on a device mixes nothing, and gives what the CPU gives."""
    expected = state_of(run(name, fields, "cpu", mapping, **more))
    with on.active():
        sim = run(name, fields, on.device.type, mapping, **more)
        assert all(on.has(t) for t in tree.leaves(sim.record.server)) == (on.device.type == "cuda")
    assert not faults(on), f"{name} {mapping}: {faults(on)}"
    assert on.moves["there"] > 0
    # The same sums of the same numbers; only their addresses differ, by which some products are computed.
    assert_close(expected, state_of(sim), 1e-10 if on.device.type == "cuda" else 1e-4)


# ---------------------------------------------------------------------------------------------------- what is asked for


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:01", "", "CPU", 0])
def test_what_is_no_device_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"^Train: device must be ('auto', 'cpu', .*|a string)\. Got "):
        Settings(device=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_gets_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"^Train: device='cuda' needs a device that torch .* can use .* Got none; use"
    ):
        finished(FedAvg(), device="cuda")
    monkeypatch.chdir(tmp_path)
    train = '[method]\nname = "fedavg"\n[train]\ndevice = "cuda:1"\n'
    text = 'rounds = 1\n[data]\nsource = "digits"\n[partition]\nkind = "iid"\nclients = 3\n'
    Path("exp.toml").write_text(text + train, encoding="utf-8")
    assert "device='cuda:1' needs a device" in failing("run", "exp.toml")


def test_a_deployment_has_no_accelerator() -> None:
    text = 'rounds = 1\n[data]\nsource = "digits"\n[partition]\nkind = "iid"\nclients = 3\n[method]\nname = "fedavg"\n'
    assert read_config(text + '[train]\ndevice = "cpu"\n').train.device == "cpu"
    with pytest.raises(ConfigError, match=r"^Deploy: train\.device must be 'auto' or 'cpu', .* Got 'cuda'\.$"):
        read_config(text + '[train]\ndevice = "cuda"\n')


def test_a_number_beyond_the_last_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "number_of", lambda kind: 2)
    with pytest.raises(ConfigError, match=r"Got 2, cuda:0 to cuda:1; use device='auto' or 'cpu'"):
        accelerator.find("cuda:2")
    assert accelerator.find("cuda:1") == [torch.device("cuda", 1)]
    assert accelerator.find("cuda") == accelerator.find("auto") == [torch.device("cuda", k) for k in range(2)]
    with pytest.raises(ConfigError, match="'mps' cannot compute in float64; use precision='float32' or device='cpu'"):
        accelerator.find("mps", "float64")


def test_auto_is_the_cpu_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "number_of", lambda kind: int(kind == "mps"))
    assert accelerator.find("auto") == [accelerator.HOST]
    assert accelerator.find("mps") == [torch.device("mps", 0)]


def test_another_device_on_resume_is_a_warning(tmp_path: Path, there: Callable[..., PretendedDevice]) -> None:
    settings = Settings(workers=1, precision="float64", batch_size=8, chunk=3, device="cpu")
    case: Any = (FedAvg(), make_task(), make_data())
    Simulation(*case, rounds=1, settings=settings, out=tmp_path).run()
    on = there()
    with on.active():
        sim = Simulation(*case, rounds=2, settings=replace(settings, device="cuda"), out=tmp_path)
        result = sim.run()
    assert not faults(on)
    assert any("device cuda instead of cpu" in said for said in result.messages)
    assert [span["versions"]["device"] for span in result.spans] == ["cpu", "cuda"]
    assert result.versions["device"] == "cuda"
    whole = Simulation(*case, rounds=2, settings=settings).run()
    assert result.digest == whole.digest


# ---------------------------------------------------------------------------------------------------- every method


def of_method(name: str) -> tuple[str, dict[str, Any]]:
    """The first row of the common table with this method."""
    return next(row for row in TABLE if row[0] == name)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "cfl"])
def test_nothing_mixes_devices(there: Callable[..., PretendedDevice], name: str, mapping: str) -> None:
    compared(there(), *of_method(name), mapping)


@pytest.mark.long
@pytest.mark.parametrize("row", range(len(TABLE)), ids=lambda k: f"{k}-{TABLE[k][0]}")
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_no_method_mixes_devices(there: Callable[..., PretendedDevice], row: int, mapping: str) -> None:
    compared(there(), *TABLE[row], mapping, rounds=3, epochs=2)


@pytest.mark.long
@pytest.mark.parametrize("row", range(len(TABLE)), ids=lambda k: f"{k}-{TABLE[k][0]}")
def test_no_method_needs_float64_of_an_mps_device(there: Callable[..., PretendedDevice], row: int) -> None:
    single = {"task": Task(make_model("mlp"), dtype=torch.float32), "data": make_data().to(torch.float32)}
    on, (name, fields) = there("mps"), TABLE[row]
    with on.active():
        run(name, fields, "mps", "vmap", precision="float32", **single)
    assert not faults(on)


def test_the_table_has_every_method() -> None:
    assert {name for name, _ in TABLE} == set(METHODS)


@pytest.mark.long
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("kind", ["dropout", "cnn", "batchnorm"])
def test_no_model_mixes_devices(there: Callable[..., PretendedDevice], kind: str, mapping: str) -> None:
    if kind == "batchnorm" and mapping != "loop":
        pytest.skip("batch normalisation is not mapped")
    compared(there(), "ditto", {}, mapping, kind=kind, rounds=1)


def renamed() -> FederatedData:
    """Clients that name the classes otherwise, and whose inputs are changed at random."""
    data = make_data(opposed=False)
    names = torch.stack([torch.arange(3).roll(i) for i in range(data.clients)])
    return replace(data, relabel=names).transformed(lambda x, key: x * 1.5)


@pytest.mark.parametrize("mapping", ["vmap", *(pytest.param(m, marks=pytest.mark.long) for m in MAPPINGS[1:])])
@pytest.mark.parametrize("fields", [{}, {"private_head": True}], ids=["together", "apart"])
def test_labels_metrics_and_a_defence_do_not_mix_devices(
    there: Callable[..., PretendedDevice], mapping: str, fields: dict[str, Any]
) -> None:
    """Renamed classes, transforms, gathered predictions, other judged models, a defence and lost clients."""
    how: dict[str, Any] = {"evaluate": {"metrics": ["roc_auc"], "models": ["received", "trained", "own", "head"]}}
    how |= {"defence": Defence(rule="clip"), "drop_rate": 0.3, "evaluate_after": True, "batch_size": 8, "workers": 1}
    how |= {"mapping": mapping, "chunk": 3, "precision": "float64", "rounds": 2, "evaluate_every": 2}
    expected = simulate(make("fedavg", **fields), make_task(), renamed(), device="cpu", **how)
    on = there()
    with on.active():
        result = simulate(make("fedavg", **fields), make_task(), renamed(), device="cuda", **how)
        assert result.simulation is not None
        task, weights = result.simulation.personal(0)
        assert task.device == accelerator.HOST and not any(on.has(t) for t in weights.values())
    assert not faults(on)
    assert result.digest == expected.digest
    assert result.measures == expected.measures


def test_models_of_several_kinds_do_not_mix_devices(there: Callable[..., PretendedDevice]) -> None:
    def net(width: int) -> Task:
        torch.manual_seed(0)
        return Task(nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, 3)))

    data = make_data().to(torch.float32)
    on = there()
    for name in ("fedproto", "fedkd"):
        family = Task.family({"a": net(9), "b": net(6)}, ("a", "b"))
        with on.active():
            run(name, {}, "cuda", "vmap", precision="float32", task=family, data=data)
        assert not faults(on), (name, faults(on))


class OnTheCpu(FedAvg):
    """A method with a fault: it makes an index, or ones, where the CPU is."""

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        client, sent = super().client_update(task, client, down, visit)
        theta: Params = sent.mean["theta"]
        first = next(iter(theta))
        if self.lr > 0.1:
            theta = theta | {first: theta[first] * torch.ones(5, dtype=theta[first].dtype)}
        else:
            theta = theta | {first: theta[first].index_select(0, torch.arange(7))}
        return client, sent._replace(mean={"theta": theta})


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize(("lr", "operation"), [(0.2, "mul"), (0.05, "index_select")])
def test_a_fault_is_found_with_its_line(
    there: Callable[..., PretendedDevice], mapping: str, lr: float, operation: str
) -> None:
    on = there()
    with on.active():
        finished(method_of(OnTheCpu, lr=lr), mapping=mapping, device="cuda", rounds=1)
    assert on.faults
    assert {what for _, what in on.faults} <= {operation, "index", "gather"}
    assert all(where.startswith("simulation/test_accelerator.py") for where, _ in on.faults)


def test_the_pretended_device_knows_what_a_gpu_refuses(there: Callable[..., PretendedDevice]) -> None:
    on, device = there(), torch.device("cuda", 0)
    with on.active():
        a = torch.ones(3).to(device)
        assert a.device == device and a.new_zeros(2).device == device and torch.zeros(2, device=device).device == device
        assert (a + torch.tensor(1.0)).device == device and torch.ones(3).device.type == "cpu"
        assert a.cpu().device.type == "cpu" and a.to(torch.float64).device == device
        assert not on.faults
        for wrong in (
            lambda: a + torch.ones(3),
            lambda: torch.stack([a.sum(), torch.tensor(1.0)]),
            lambda: torch.ones(3) * a.sum(),
            lambda: a[torch.tensor([0])],
            lambda: a.numpy(),
            lambda: torch.zeros(3).add_(a),
        ):
            on.faults.clear()
            wrong()
            assert on.faults
        on.waits.clear()
        _ = float(a.sum()), a.tolist(), a[a > 0], a.nonzero()
        assert sum(on.waits.values()) == 4


# ---------------------------------------------------------------------------------------------------- waiting

OTHERS = ("fedprox", "ditto", "pfl-mf", "fedrep", "apfl", "fedloru", "fedara", "factorized-fl-alpha")


@pytest.mark.parametrize("name", ["fedavg", *(pytest.param(m, marks=pytest.mark.long) for m in OTHERS)])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_the_host_does_not_wait_in_steps(there: Callable[..., PretendedDevice], name: str, mapping: str) -> None:
    """Twice the steps wait as often: for what is seen once per phase (lengths, the safeguard) or chunk, never per step.

    The learning rate is so small that the safeguard finds the same in both. Not so pFedMe: its phase, which the
    safeguard judges, is the inner solve of every minibatch.
    """
    counts = []
    for epochs in (2, 4):
        on = there()
        with on.active():
            run(name, {"lr": 1e-6}, "cuda", mapping, epochs=epochs, rounds=1)
        counts.append(dict(on.waits))
    assert counts[0] == counts[1]


# ---------------------------------------------------------------------------------------------------- memory


class Small:
    """Memory for so many clients at once: a larger `vmap` meets its end."""

    def __init__(self, patch: pytest.MonkeyPatch, clients: int) -> None:
        self.sizes: list[int] = []
        mapped = Engine._mapped

        def limited(engine: Engine, one: Any, capacity: Any, round: int, ids: list[int], *rest: Any) -> Any:
            self.sizes.append(len(ids))
            if len(ids) > clients:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return mapped(engine, one, capacity, round, ids, *rest)

        patch.setattr(Engine, "_mapped", limited)


@pytest.mark.parametrize("mapping", ["vmap", "folded"])
def test_a_full_memory_halves_the_clients_at_once(mapping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The uploads of all pieces are added up as those of one chunk, whose bounds stay: the sum has one order."""
    how: dict[str, Any] = {"mapping": mapping, "chunk": 7, "participation": 1.0, "rounds": 2}
    expected = finished(FedAvg(), **how)
    small = Small(monkeypatch, 2)
    sim = finished(FedAvg(), **how)
    assert small.sizes[:6] == [7, 4, 2, 2, 2, 1]  # halved until they fit, and never tried larger again
    assert max(small.sizes[2:]) == 2
    assert_close(state_of(expected), state_of(sim))


def test_one_client_that_does_not_fit_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    Small(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"^Train: the memory of device 'cpu' must hold one client .*; use a smaller"):
        finished(FedAvg(), mapping="vmap")


def test_one_client_that_does_not_fit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(FedAvg, "client_update", full)
    with pytest.raises(ConfigError, match="must hold one client with its minibatch, and is full"):
        finished(FedAvg(), mapping="loop")


def test_other_errors_are_not_taken_for_a_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = accelerator.Fitting(accelerator.HOST)

    def wrong(_: slice) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        fitting.pieces(4, wrong)
    assert fitting.most is None
    assert accelerator.is_full(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"))


def test_the_first_guess_is_by_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "free_memory", lambda device: 16_000)
    fitting = accelerator.Fitting(torch.device("cuda", 0))
    fitting.guess(lambda: 100)
    assert fitting.most == 10  # half of it, for eight copies
    assert [s.stop - s.start for s in fitting.pieces(25, lambda some: some)] == [10, 10, 5]
    monkeypatch.setattr(accelerator, "free_memory", lambda device: 1)
    tiny = accelerator.Fitting(torch.device("cuda", 0))
    tiny.guess(lambda: 100)
    assert tiny.most == 1


# ---------------------------------------------------------------------------------------------------- set-up


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_data_weights_and_index_rows_are_on_the_device() -> None:
    """What the engine hands to a method, as tensors of torch's own fake CUDA device."""
    device, data = torch.device("cuda", 0), make_data()
    engine = Engine(FedAvg(), make_task(), data, 0, 8, 1, "loop", device=device)
    with FakeTensorMode(allow_non_fake_inputs=True):
        task, visit = engine.model(None), engine.visit(None, 1, 0, FedAvg().plan(), {})
        assert all(p.device == device for p in [*task.module.parameters(), *task.init().values()])
        assert engine.host_model(None).device == accelerator.HOST
        batches, (x, y, _) = visit["train"], engine.pool
        found = [x, y, batches.x, batches.y, batches.rows, batches.key, visit.examples]
        assert all(t.device == device for t in [*found, engine.ids([0, 1]), engine.ids([0], at_home=True)])
        loss = task.loss(task.init(), Batch(x, y, None, batches.key, 0))
        assert loss.device == device
        assert visit.round.device.type == "cpu"  # which the host reads without waiting
    assert all(t.device.type == "cpu" for t in [data.x, data.y, *engine.task.init().values()])


def test_large_products_on_a_device_are_not_onednns(there: Callable[..., PretendedDevice]) -> None:
    on = there()
    with on.active():
        x, w = torch.ones(256, 512).to(on.device), torch.ones(512, 512).to(on.device)
        out = torch.zeros(256, 512, device=on.device)
        products.affine(x, w, None, out)
        products.linear(x, w, None)
        products.subtract_product(w, x.T[:512], x, 0.1)
    assert not faults(on)
    assert float(out[0, 0]) == 512.0


def test_draws_are_the_same_on_every_device(there: Callable[..., PretendedDevice]) -> None:
    """Other starts of a model are drawn on the host, and then moved."""
    task, on = make_task(), there()
    expected = task.fresh(3, "other")
    with on.active():
        moved = task.on(on.device)
        found = moved.fresh(3, "other")
        assert all(on.has(t) for t in found.values())
        assert moved.on(on.device) is moved and task.on(on.device) is moved
    assert_same(expected, found)
    assert_same(task.init(), moved.init())


# ---------------------------------------------------------------------------------------------------- several devices


@pytest.mark.long
def test_several_devices_have_a_worker_each() -> None:
    """Workers are spawned, each knows its own device, and one that replaces another has the other's."""

    def which(meta: dict[str, Any], data: Tree, shared: Tree) -> tuple[dict[str, Any], Tree]:
        time.sleep(0.3)  # so that nobody does the work of two
        return {"device": str(accelerator.assigned(accelerator.HOST))}, {}

    devices, told = [torch.device("cuda", k) for k in range(2)], list[str]()
    pool = SpawnedPool(which, 2, told.append, devices=devices)
    try:
        found = [meta["device"] for meta, _ in pool.run(Job({}) for _ in range(2))]
        assert sorted(found) == ["cuda:0", "cuda:1"]
        os.kill(pool._processes[0].pid, signal.SIGKILL)
        again = [meta["device"] for meta, _ in pool.run(Job({}) for _ in range(2))]
        assert sorted(again) == ["cuda:0", "cuda:1"]
        assert len(told) == 1
    finally:
        pool.close()


def test_workers_are_devices_on_an_accelerator(there: Callable[..., PretendedDevice]) -> None:
    on = there()
    with on.active():
        sim = finished(FedAvg(), device="cuda", workers=3, rounds=1)
    assert sim.messages.count("Train: workers=3 is more than there are devices, and each has one process: 1.") == 1
    sim.transport.accelerators = [torch.device("cuda", k) for k in range(4)]  # type: ignore[attr-defined]
    executor = sim.transport.executor  # type: ignore[attr-defined]
    assert isinstance(executor, SpawnedPool) and executor.workers == 3
    assert list(executor.devices) == [torch.device("cuda", k) for k in range(3)]
    executor.close()
