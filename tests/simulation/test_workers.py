"""Worker processes: order, broadcasts, errors, deaths, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from conftest import assert_same
from fedspan import FederatedData, simulate
from fedspan.errors import ConfigError, FedspanError, Refused
from fedspan.methods import Ditto
from fedspan.simulation.workers import (
    JOBS_AHEAD,
    RESULTS_AHEAD,
    Job,
    Meta,
    Pool,
    WorkerDied,
    WorkerError,
    can_fork,
    executor_of,
)
from fedspan.storage import row_table
from fedspan.tree import Outer, Tree

pytestmark = pytest.mark.skipif(not can_fork(), reason="workers are forked on Linux only; others: test_spawned_workers")
HERE = os.getpid()


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


def handle(meta: Meta, data: Tree, broadcast: Tree) -> tuple[Meta, Tree]:
    """What the jobs of these tests ask for."""
    time.sleep(meta.get("sleep", 0.0))
    match meta.get("do"):
        case "crash":
            raise KeyError("no such layer: body.7")
        case "refuse":
            raise Refused("client 3: the weight must be 1. Got 2.")
        case "config":
            raise ConfigError("Train: chunk must be an integer >= 1. Got 0.")
        case "die":
            os._exit(3)
        case "die once":
            marks = Path(meta["marks"])
            if len(list(marks.iterdir())) < meta["deaths"]:
                (marks / str(os.getpid())).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(4)
    out: Tree = {"sum": data["x"].sum() + broadcast.get("bias", torch.zeros(())), "empty": {}}
    return {"k": meta["k"], "pid": os.getpid(), "threads": torch.get_num_threads()}, out


def job(k: int, shared: str = "", **meta: Any) -> Job:
    return Job({"k": k, **meta}, {"x": torch.full((3,), float(k), dtype=torch.float64), "e": {}}, shared)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_the_jobs(workers: int) -> None:
    # The first jobs take longest, so that later ones are done before them.
    with closing(executor_of(handle, workers)) as pool:
        for _ in range(2):
            results = list(pool.run([job(k, sleep=0.05 if k < 2 else 0.0) for k in range(9)]))
            assert [m["k"] for m, _ in results] == list(range(9))
            assert [float(t["sum"]) for _, t in results] == [3.0 * k for k in range(9)]
            assert all(t["empty"] == {} for _, t in results)
        pids = {m["pid"] for m, _ in results}
        assert (pids == {HERE}) == (workers == 1) and len(pids) <= workers
        if workers > 1:
            assert HERE not in pids and {m["threads"] for m, _ in results} == {1}


@pytest.mark.parametrize("workers", [1, 2])
def test_jobs_are_made_when_they_are_about_to_be_done(workers: int) -> None:
    made, ahead, alive = list[weakref.ref[Job]](), [], []

    def jobs() -> Iterator[Job]:
        for k in range(40):
            one = job(k, sleep=0.03 if k == 0 else 0.0)  # the first one holds up the results of all others
            made.append(weakref.ref(one))
            alive.append(sum(r() is not None for r in made))
            yield one
            del one

    with closing(executor_of(handle, workers)) as pool:
        for k, (meta, _) in enumerate(pool.run(jobs())):
            assert meta["k"] == k
            ahead.append(len(made) - k)
    assert len(ahead) == 40 and max(ahead) <= (1 if workers == 1 else RESULTS_AHEAD * workers + 1)
    assert max(alive) <= (2 if workers == 1 else JOBS_AHEAD * workers + 1)  # one that was just given may linger


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_where_jobs_are_made_is_raised_and_the_next_run_is_right(workers: int) -> None:
    def jobs() -> Iterator[Job]:
        yield from (job(k) for k in range(5))
        raise ConfigError("the rows of client 5 cannot be read")

    with closing(executor_of(handle, workers)) as pool:
        with pytest.raises(ConfigError, match="client 5"):
            list(pool.run(jobs()))
        assert [m["k"] for m, _ in pool.run(job(k) for k in (10, 11, 12))] == [10, 11, 12]


def test_one_job_needs_no_worker() -> None:
    with closing(Pool(handle, 2)) as pool:
        assert next(iter(pool.run([job(1)])))[0]["pid"] == os.getpid()
        assert list(pool.run([])) == []
        assert not psutil.Process().children()


@pytest.mark.parametrize("workers", [1, 2])
def test_jobs_see_the_broadcast_they_name_and_its_latest_value(workers: int) -> None:
    with closing(executor_of(handle, workers)) as pool:
        pool.share("a", {"bias": torch.tensor(100.0)})
        pool.share("b", {"bias": torch.tensor(200.0)})
        jobs = [job(k, shared=s) for k in (0, 1) for s in ("a", "b", "")]
        assert [float(t["sum"]) for _, t in pool.run(jobs)] == [100, 200, 0, 103, 203, 3]
        pool.share("a", {"bias": torch.tensor(-1.0)})
        assert [float(t["sum"]) for _, t in pool.run(jobs)] == [-1, 200, 0, 2, 203, 3]


def test_trees_of_all_kinds_travel() -> None:
    tree_in: Tree = {
        "big": torch.arange(300_000, dtype=torch.float64).reshape(3, -1),
        "o": Outer(torch.ones(3), torch.zeros(0)),
        "flag": torch.tensor([True, False, True]),
        "odd": torch.arange(5, dtype=torch.int16)[::2],
        "e": {"f": {}},
    }
    shared: Tree = {"t": torch.eye(3, dtype=torch.float32), "none": {}}
    with closing(Pool(lambda meta, data, common: (meta, {"d": data, "c": common}), 2)) as pool:
        pool.share("s", shared)
        results = list(pool.run([Job({"text": "θ", "n": [1, None]}, tree_in, "s")] * 4))
        for meta, back in results:
            assert meta == {"text": "θ", "n": [1, None]}
            assert_same(back, {"d": tree_in, "c": shared})
            assert back["d"]["e"] == {"f": {}} and back["c"]["none"] == {} and isinstance(back["d"]["o"], Outer)
            back["d"]["big"][0, 0] = 5.0  # what arrives may be written to
        assert float(tree_in["big"][0, 0]) == 0.0


def test_an_error_in_a_worker_brings_its_traceback() -> None:
    with closing(Pool(handle, 2)) as pool, pytest.raises(WorkerError) as e:
        list(pool.run([job(0), job(1, do="crash"), job(2)]))
    text = str(e.value)
    assert "Traceback" in text and "KeyError: 'no such layer: body.7'" in text and "test_workers.py" in text


@pytest.mark.parametrize(
    ("do", "sentence"),
    [
        ("refuse", "client 3: the weight must be 1. Got 2."),
        ("config", "Train: chunk must be an integer >= 1. Got 0."),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_for_people_keeps_its_sentence(do: str, sentence: str, workers: int) -> None:
    with closing(executor_of(handle, workers)) as pool, pytest.raises(FedspanError) as e:
        list(pool.run([job(0), job(1, do=do)]))
    assert str(e.value) == sentence


@pytest.mark.parametrize("place", [0, 1, 5])
def test_a_job_that_ends_every_worker_is_given_up_in_a_clear_sentence(place: int) -> None:
    with closing(Pool(handle, 2)) as pool, pytest.raises(WorkerDied) as e:
        list(pool.run([job(k, **({"do": "die"} if k == place else {})) for k in range(8)]))
    text = str(e.value)
    assert text.startswith("Simulator: 3 workers ended unexpectedly on the same chunk")
    assert text.endswith("Use a smaller train.chunk, or train.workers=1; the run can be resumed.")


@pytest.mark.parametrize("deaths", [1, 2])
@pytest.mark.parametrize("place", [0, 1, 5, 7])
def test_a_worker_that_dies_is_replaced_and_its_job_repeated(place: int, deaths: int, tmp_path: Path) -> None:
    told: list[str] = []
    with closing(Pool(handle, 2, told.append)) as pool:
        pool.share("a", {"bias": torch.tensor(100.0)})
        fatal = {"do": "die once", "marks": str(tmp_path), "deaths": deaths}
        results = list(pool.run([job(k, "a", **(fatal if k == place else {})) for k in range(8)]))
    assert [m["k"] for m, _ in results] == list(range(8))
    assert [float(t["sum"]) for _, t in results] == [100 + 3.0 * k for k in range(8)]
    assert len(told) == len(list(tmp_path.iterdir())) == deaths
    assert all("ended unexpectedly and was replaced" in line for line in told)


def test_a_worker_killed_between_rounds_is_replaced() -> None:
    told: list[str] = []
    with closing(Pool(handle, 2, told.append)) as pool:
        list(pool.run([job(k) for k in range(4)]))
        for child in psutil.Process().children():
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert [m["k"] for m, _ in pool.run([job(k) for k in range(4)])] == [0, 1, 2, 3]
        assert len(psutil.Process().children()) == 2
    assert len(told) == 2


def test_sys_exit_in_a_worker_is_an_error_like_any_other() -> None:
    with closing(Pool(handle, 2)) as pool, pytest.raises(WorkerError, match="SystemExit: 4"):
        list(pool.run([job(0), job(1, do="exit")]))


def test_a_pool_works_again_after_an_error() -> None:
    with closing(Pool(handle, 2)) as pool:
        with pytest.raises(WorkerError):
            list(pool.run([job(0, do="crash"), job(1, sleep=0.05), job(2), job(3)]))
        # Answers of the abandoned jobs must not be taken for those of the next.
        results = list(pool.run([job(k) for k in (10, 11, 12)]))
        assert [m["k"] for m, _ in results] == [10, 11, 12]


def test_a_pool_works_again_after_a_run_was_left_early() -> None:
    with closing(Pool(handle, 2)) as pool:
        for meta, _ in pool.run([job(k, sleep=0.02) for k in range(6)]):
            if meta["k"] == 1:
                break
        results = list(pool.run([job(k) for k in (10, 11, 12)]))
        assert [m["k"] for m, _ in results] == [10, 11, 12]


def test_close_ends_the_workers_even_when_they_are_busy_and_a_closed_pool_starts_anew() -> None:
    pool = Pool(handle, 2)
    running = pool.run([job(0), job(1, sleep=30.0), job(2, sleep=30.0)])
    next(running)
    assert len(psutil.Process().children()) == 2
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5 and not psutil.Process().children()
    pool.close()
    assert [m["k"] for m, _ in pool.run([job(k) for k in range(3)])] == [0, 1, 2]
    pool.close()
    assert not psutil.Process().children()


def leftovers() -> set[str]:
    """Names in the folder of named shared memory."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


@pytest.mark.slow
def test_rows_in_place_and_rows_that_travel_give_the_same_bits_for_any_number_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = leftovers()
    draw = torch.Generator().manual_seed(3)
    clients = [(torch.randn(8 + i, 6, generator=draw), torch.arange(8 + i) % 3) for i in range(7)]

    def digest(workers: int, travels: bool) -> str:
        net = nn.Linear(6, 3)
        for p in net.parameters():
            nn.init.constant_(p, 0.1)
        how: dict[str, Any] = {"batch_size": 8, "chunk": 2, "mapping": "loop", "participation": 0.6, "seed": 0}
        data = FederatedData.from_arrays(clients)
        result = simulate(Ditto(), net, data, rounds=3, workers=workers, **how)
        record = result.simulation.record if result.simulation else None
        assert record is not None and (record.tables == [None]) == travels
        return result.digest

    found = [digest(workers, travels=False) for workers in (1, 2, 3)]
    monkeypatch.setattr(row_table, "_memory_file", lambda size: None)
    found += [digest(workers, travels=True) for workers in (1, 2)]
    assert len(set(found)) == 1
    assert leftovers() <= before


def test_what_a_worker_answers_stays_as_it_is_while_others_answer() -> None:
    with closing(Pool(lambda meta, data, common: ({}, {"x": data["x"] + 1}), 2)) as pool:
        jobs = [Job({}, {"x": torch.full((50_000,), float(k))}) for k in range(40)]
        kept = [t["x"] for _, t in pool.run(jobs)]
        assert [float(x.min()) for x in kept] == [float(x.max()) for x in kept] == [k + 1.0 for k in range(40)]
        again = [t["x"] for _, t in pool.run(jobs)]  # while the first answers are held
        assert [float(x.sum()) for x in kept] == [float(x.sum()) for x in again]


def test_a_worker_that_writes_to_what_it_was_given_changes_nothing_for_others() -> None:
    def spoil(meta: Meta, data: Tree, common: Tree) -> tuple[Meta, Tree]:
        found = {"x": data["x"].clone(), "c": common["c"].clone()}
        data["x"].fill_(-1.0)
        common["c"][meta["k"]] = -1.0
        return {}, found

    with closing(Pool(spoil, 2)) as pool:
        pool.share("c", {"c": torch.zeros(8)})
        x = torch.arange(4.0)
        for _ in range(2):
            results = list(pool.run([Job({"k": k}, {"x": x}, "c") for k in range(4)]))
            assert all(t["x"].tolist() == [0.0, 1.0, 2.0, 3.0] for _, t in results)
            pool.share("c", {"c": torch.zeros(8)})
            assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


ORPHANS = """
import json, os, time
from fedspan.simulation.workers import Job, Pool

def handle(meta, data, common):
    time.sleep(meta["sleep"])
    return {}, {}

pool = Pool(handle, 2)
results = pool.run([Job({"sleep": 0}), Job({"sleep": 60}), Job({"sleep": 60})])
next(results)
print(json.dumps([p.pid for p in pool._processes]), flush=True)
os.kill(os.getpid(), 9)  # while both workers are busy
"""


def test_workers_end_with_a_parent_that_was_killed() -> None:
    # Not captured by a pipe until its end: workers that go on would hold it open.
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        parent.wait(timeout=30)
    assert len(pids) == 2
    until = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
