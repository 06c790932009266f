"""Workers that are new interpreters: the bits of forks and of one process, deaths, and what cannot be sent."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from torch import nn

from fedspan import FederatedData, simulate
from fedspan.errors import ConfigError, Refused
from fedspan.methods import Ditto, FedAra, FedAvg, PflMf
from fedspan.simulation import spawned_workers
from fedspan.simulation.spawned_workers import HELLO, LARGE, SpawnedPool, _mapped, _Pickler, _welcome
from fedspan.simulation.workers import PATIENCE, InProcess, Job, Meta, Pool, WorkerError, can_fork, executor_of, forks
from fedspan.tree import Tree
from fedspan.wire.job_channel import Broadcasts

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as what a script defines; workers need no tests


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


def handle(meta: Meta, data: Tree, broadcast: Tree) -> tuple[Meta, Tree]:
    """What the jobs of these tests ask for."""
    match meta.get("do"):
        case "crash":
            raise KeyError("no such layer")
        case "refuse":
            raise Refused("client 3: the weight must be 1. Got 2.")
        case "die once":
            with suppress(FileExistsError):  # of two workers that come at once, one leaves the mark and dies
                open(meta["mark"], "x").close()
                os._exit(9)
        case "sleep":
            time.sleep(60)
    facts = {"k": meta["k"], "pid": os.getpid(), "threads": torch.get_num_threads()}
    return facts, {"sum": data["x"].sum() + broadcast.get("bias", torch.zeros(()))}


def job(k: int, shared: str = "", **meta: Any) -> Job:
    return Job({"k": k, **meta}, {"x": torch.full((3,), float(k), dtype=torch.float64)}, shared)


@pytest.mark.slow
def test_spawned_workers_do_what_forked_ones_do(tmp_path: Path) -> None:
    told: list[str] = []
    with closing(SpawnedPool(handle, 2, told.append)) as pool:
        assert next(iter(pool.run([job(1)])))[0]["pid"] == os.getpid() and not psutil.Process().children()
        pool.share("a", {"bias": torch.tensor(100.0)})
        results = list(pool.run([job(k, "a") for k in range(9)]))
        assert [m["k"] for m, _ in results] == list(range(9))
        assert [float(t["sum"]) for _, t in results] == [100 + 3.0 * k for k in range(9)]
        assert os.getpid() not in {m["pid"] for m, _ in results} and {m["threads"] for m, _ in results} == {1}

        pool.share("a", {"bias": torch.tensor(-1.0)})
        mark = str(tmp_path / "died")
        results = list(pool.run([job(k, "a", do="die once", mark=mark) for k in range(5)]))
        assert [float(t["sum"]) for _, t in results] == [3.0 * k - 1 for k in range(5)]
        assert len(told) == 1 and "ended unexpectedly and was replaced" in told[0]

        with pytest.raises(Refused, match="client 3: the weight must be 1"):
            list(pool.run([job(0), job(1, do="refuse")]))
    assert not psutil.Process().children()


@pytest.mark.slow
def test_an_error_in_a_spawned_worker_brings_its_traceback() -> None:
    with closing(SpawnedPool(handle, 2)) as pool, pytest.raises(WorkerError, match="KeyError: 'no such layer'"):
        list(pool.run([job(0), job(1, do="crash"), job(2, do="sleep")]))


def federation() -> FederatedData:
    draw = torch.Generator().manual_seed(3)
    clients = [
        (torch.randn(24 + 4 * i, 6, generator=draw), torch.randint(0, 3, (24 + 4 * i,), generator=draw))
        for i in range(6)
    ]
    return FederatedData.from_arrays(clients)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "method",
    [
        FedAvg(),
        Ditto(),
        PflMf(rank=2),
        FedAra(),
    ],
    ids=lambda method: type(method).__name__,
)
def test_spawned_workers_give_the_bits_of_forks_and_of_one_process_even_when_killed(method: Any) -> None:
    killed: list[int] = []

    def kill(line: dict[str, Any]) -> None:
        workers = [p for p in psutil.Process().children() if "spawned_workers" in " ".join(p.cmdline())]
        victim = workers[0]  # a test before this one may have left other children
        victim.kill()
        killed.append(victim.pid)

    def digest(on_round: Any = None, **how: Any) -> str:
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        for p in net.parameters():
            nn.init.constant_(p, 0.1)
        result = simulate(method, net, federation(), rounds=4, batch_size=8, chunk=2, on_round=on_round, **how)
        if on_round is not None:
            said = result.simulation.messages if result.simulation else []
            assert sum("was replaced" in line for line in said) >= 3
        return result.digest

    one = digest(workers=1)
    assert one == digest(kill, workers=2, start_method="spawn")
    if can_fork():
        assert one == digest(workers=2, start_method="fork")
    assert len(set(killed)) == 4


# ------------------------------------------------------------------------------------------- what is sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_large_tensors_travel_as_files_that_are_written_to_by_nobody(dtype: torch.dtype, tmp_path: Path) -> None:
    large = (torch.arange(LARGE * 2) % 7).to(dtype).reshape(2, -1)
    small, stream = torch.arange(5), io.BytesIO()
    _Pickler(stream, tmp_path).dump({"x": large, "again": large, "small": small, "net": nn.Linear(3, 2)})
    assert len(stream.getvalue()) < 10_000 and len(list(tmp_path.iterdir())) == 1
    back = cloudpickle.loads(stream.getvalue())
    assert torch.equal(back["x"], large) and back["x"].dtype == dtype and back["again"] is back["x"]
    assert torch.equal(back["small"], small)
    back["x"][0, 0] = 1
    assert torch.equal(_mapped(str(tmp_path / "0"), tuple(large.shape), dtype), large)


def test_a_view_of_a_large_tensor_and_its_parameters_keep_their_layout(tmp_path: Path) -> None:
    columns = torch.arange(LARGE, dtype=torch.float32).reshape(-1, 2).T
    weight, stream = nn.Parameter(torch.ones(LARGE)), io.BytesIO()
    _Pickler(stream, tmp_path).dump((columns, weight))
    back, parameter = cloudpickle.loads(stream.getvalue())
    assert torch.equal(back, columns) and back.stride() == columns.stride()
    assert isinstance(parameter, nn.Parameter) and parameter.requires_grad and torch.equal(parameter, weight)


def test_what_cannot_be_sent_runs_in_this_process_and_says_so() -> None:
    lock, told = threading.Lock(), list[str]()

    def guarded(meta: Meta, data: Tree, broadcast: Tree) -> tuple[Meta, Tree]:
        with lock:
            return handle(meta, data, broadcast)

    with closing(SpawnedPool(guarded, 2, told.append)) as pool:
        for _ in range(2):
            results = list(pool.run([job(k) for k in range(4)]))
            assert [m["k"] for m, _ in results] == [0, 1, 2, 3] and {m["pid"] for m, _ in results} == {os.getpid()}
    assert told == [
        "Simulator: method, model or loss cannot be sent to workers (TypeError: cannot pickle '_thread.lock' object);"
        " keep open files, locks and generators out of them. All clients are computed in this process, with the same"
        " numbers."
    ]


def test_workers_that_cannot_start_are_given_up_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(spawned_workers, "_BEGIN", "raise SystemExit(7)")
    with closing(SpawnedPool(handle, 2, told.append)) as pool:
        assert [m["k"] for m, _ in pool.run([job(k) for k in range(4)])] == [0, 1, 2, 3]
    assert len(told) == 1 and told[0].startswith("Simulator: 3 workers ended while they were starting")
    assert "with code 7" in told[0]
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with closing(SpawnedPool(handle, 2, told.append)) as pool:
        assert [m["k"] for m, _ in pool.run([job(k) for k in range(4)])] == [0, 1, 2, 3]
    assert "workers cannot be started here" in told[1] and "/nowhere/python" in told[1]


def test_strangers_are_sent_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        for said in (b"", b"x" * HELLO, b"y" * 5):
            with socket.create_connection(door.getsockname()) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                assert _welcome(door, {b"z" * HELLO: None}, Broadcasts(None)) is None  # type: ignore[dict-item]
                assert stranger.recv(1) == b""
        assert _welcome(door, {}, Broadcasts(None)) is None


# ------------------------------------------------------------------------------------------- which kind


def test_the_start_method_is_chosen_by_system_and_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(executor_of(handle, 1, method="spawn")) is InProcess
    assert type(executor_of(handle, 2, method="spawn")) is SpawnedPool
    assert type(executor_of(handle, 2)) is (Pool if can_fork() else SpawnedPool)
    monkeypatch.setattr(sys, "platform", "darwin")  # it has fork, but not for a process that uses torch
    chosen = executor_of(handle, 2)
    assert isinstance(chosen, SpawnedPool) and chosen.patience == 0.0
    monkeypatch.setattr("fedspan.simulation.workers.available_cores", lambda: 8)
    chosen = executor_of(handle, None)
    assert isinstance(chosen, SpawnedPool) and chosen.patience == PATIENCE and chosen.workers == 8
    with pytest.raises(ConfigError, match="start_method='fork' needs Linux; use 'auto' or 'spawn'"):
        forks("fork")


def test_workers_nobody_asked_for_are_started_when_there_is_enough_to_do() -> None:
    with closing(SpawnedPool(handle, 2, patience=0.05)) as pool:
        list(pool.run([job(k) for k in range(3)]))
        assert not psutil.Process().children() and 0.0 < pool.patience < 0.05
        for _ in pool.run([job(k) for k in range(3)]):
            time.sleep(0.02)
        assert pool.patience <= 0.0  # the next round starts them


def test_a_worker_being_started_must_not_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "forbidden", True)
    with pytest.raises(ConfigError, match=r'runs when it is imported under if __name__ == "__main__"'):
        simulate(FedAvg(), nn.Linear(6, 3), federation(), rounds=1)


# ------------------------------------------------------------------------------------------- scripts

SCRIPT = """
import os, sys
import torch
from torch import nn
from fedspan import simulate
from fedspan.methods import FedAvg
import mine

print("the script runs")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 3), lambda x: torch.tanh(x)
    def forward(self, x):
        return self.act(self.layer(x))

draw = torch.Generator().manual_seed(0)
clients = [(torch.randn(20, 4, generator=draw), torch.randint(0, 3, (20,), generator=draw)) for _ in range(4)]

def digest(model, **how):
    result = simulate(FedAvg(), model, clients, rounds=2, chunk=1, **how)
    for said in result.simulation.messages:
        print(said)
    return result.digest

print(digest(Net) == digest(lambda: Net(), workers=2, start_method="spawn"))
print(digest(mine.Net) == digest(mine.Net, workers=2, start_method="spawn"))
"""
UNGUARDED = """
import torch
from torch import nn
from fedspan import simulate
from fedspan.methods import FedAvg

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

simulate(FedAvg(), Net, [(torch.ones(8, 4), torch.arange(8) % 3)] * 2, rounds=1, workers=1)
"""


@pytest.mark.long
@pytest.mark.timeout(240)
def test_scripts_need_no_guard_and_modules_that_need_one_are_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mine.py").write_text(UNGUARDED)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    first, equal, said, again = done.stdout.splitlines()
    assert (first, equal, again) == ("the script runs", "True", "True")
    assert said.startswith("Simulator: workers cannot use what they were sent (Simulator: a worker must not start")
    assert said.endswith("All clients are computed in this process, with the same numbers.")


ORPHANS = """
import os, time
from fedspan.simulation.spawned_workers import SpawnedPool
from fedspan.simulation.workers import Job

def handle(meta, data, common):
    time.sleep(meta["sleep"])
    return {}, {}

pool = SpawnedPool(handle, 2)
results = pool.run([Job({"sleep": 0}), Job({"sleep": 60}), Job({"sleep": 60})])
next(results)
print(pool._folder.name, *(p.pid for p in pool._processes), flush=True)
os._exit(9)  # while both workers are busy
"""


@pytest.mark.long
def test_spawned_workers_end_with_their_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        folder, *words = parent.stdout.readline().split()
        pids = [int(word) for word in words]
        parent.wait(timeout=60)
    assert len(pids) == 2
    _, left = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=10)
    assert not left and (os.name != "posix" or not os.path.exists(folder))


def test_numbers_of_torch_are_the_parents() -> None:
    assert spawned_workers._numerics() == {"dtype": "float32", "deterministic": False, "matmul": "highest"}
