"""A run that is killed, interrupted or continued ends as one nobody disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedspan import tree
from fedspan.errors import CheckpointError
from fedspan.simulation.local_transport import LocalTransport
from fedspan.simulation.simulator import Simulation

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

from runs import Child, outcome, play, rounds_done, warm_up  # noqa: E402

ALONE = {"settings": {"workers": 1}}
DISK = {"method": "local", "hidden": 2048, "rounds": 7}  # 8 clients of 160 KB: more than the smallest budget


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def spec(**settings: Any) -> dict[str, Any]:
    return {"settings": {"workers": 1, **settings}}


# --- death: one process that forks a child per case ----------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_killed_at_random_times() -> None:
    command = [sys.executable, str(TOOLS / "kill_trials.py"), "--trials", "2", "--rounds", "12", "--no-sync"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.endswith("2/2 equal\n") and done.returncode == 0, done.stdout + done.stderr


def test_workers_die_with_a_killed_run(outcomes: dict[str, Any]) -> None:
    assert outcomes["workers"] == {"seen": 2, "left": []}


def test_a_kill_loses_at_most_the_round_it_hit(outcomes: dict[str, Any]) -> None:
    before, resumed_at = outcomes["lost"]
    assert resumed_at >= before


def test_interrupted_by_ctrl_c(outcomes: dict[str, Any]) -> None:
    for found in outcomes["ctrl-c"]:
        assert found["codes"] == [130, 130] and found["left"] == [] and found["equal"], found


def test_rows_on_disk_survive_kills(outcomes: dict[str, Any]) -> None:
    found = outcomes["disk"]
    assert found["on disk"] and found["killed"] and found["equal to memory"], found


def test_a_fresh_process_gives_the_same_whatever_its_hash_seed(tmp_path: Path) -> None:
    """Against this process, whose own hash seed is another one each time."""
    methods = ("local", "fedper", "pfl-mf", "ditto")
    arguments = [a for m in methods for a in (str(tmp_path / m), json.dumps(short(m)))]
    command = [sys.executable, str(TOOLS / "runs.py"), *arguments]
    subprocess.run(command, check=True, timeout=100, env={**os.environ, "PYTHONHASHSEED": "1234"})
    for m in methods:
        play(tmp_path / f"{m}-here", short(m))
        assert outcome(tmp_path / m) == outcome(tmp_path / f"{m}-here")


def short(method: str) -> dict[str, Any]:
    return {"method": method, "rounds": 2, **spec(checkpoint_every=2)}


def test_workers_killed_twenty_times_in_a_run_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    alone = play(tmp_path / "alone", {"rounds": 12, **spec()})
    handle, here = LocalTransport._handle, os.getpid()
    marks = tmp_path / "marks"
    marks.mkdir()

    def killed_first(self: LocalTransport, meta: Any, data: Any, broadcast: Any) -> Any:
        """Do the chunk, and be killed before it is answered, if it is the first time."""
        answer = handle(self, meta, data, broadcast)
        mark = marks / f"{meta['do']}-{meta['round']}-{meta['ids'][0]}"
        if os.getpid() != here and not mark.exists() and len(list(marks.iterdir())) < 20:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    monkeypatch.setattr(LocalTransport, "_handle", killed_first)
    killed = play(tmp_path / "killed", {"rounds": 12, **spec(workers=2)})
    assert sum("was replaced" in line for line in killed.messages) == len(list(marks.iterdir())) >= 20
    assert killed.digest == alone.digest and killed.per_client == alone.per_client
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "alone")
    assert not psutil.Process().children()


# --- the same in this process ---------------------------------------------------------------------------------------


class Stop(Exception):
    """Thrown into a run from its own callback."""


def stopped_after(out: Path, t: int, what: dict[str, Any], error: BaseException) -> None:
    """Run until round t is done, then fail as if from outside."""

    def on_round(line: dict[str, Any]) -> None:
        if line["round"] == t:
            raise error

    with pytest.raises(type(error)):
        play(out, what, on_round)


@pytest.mark.parametrize("method", ["local", "fedper", "pfl-mf", "ditto"])
def test_checkpoints_every_round_or_every_tenth(method: str, tmp_path: Path, quick: None) -> None:
    one, ten = ({"method": method, **spec(checkpoint_every=k)} for k in (1, 10))
    play(tmp_path / "one", one)
    stopped_after(tmp_path / "ten", 11, ten, Stop())
    assert rounds_done(tmp_path / "ten") == 10
    play(tmp_path / "ten", ten)
    assert outcome(tmp_path / "one") == outcome(tmp_path / "ten")


def test_metrics_hold_every_round_once(tmp_path: Path, quick: None) -> None:
    what = spec(checkpoint_every=5)
    stopped_after(tmp_path, 9, what, Stop())
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) in (8, 9)  # more rounds than the checkpoint has
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"round": 10, "half a li')
    result = play(tmp_path, what)
    lines = [json.loads(line)["round"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [line["round"] for line in result.curve] == list(range(1, 13))
    assert result.messages == [f"Resuming {tmp_path} after round 5; 7 of 12 are left."]


@pytest.mark.parametrize("during", ["_watch", "_evaluate", "on_round"])
def test_an_interrupt_anywhere_in_a_round_is_resumed(
    during: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    play(tmp_path / "whole", spec())
    if during == "on_round":
        stopped_after(tmp_path / "run", 8, spec(), KeyboardInterrupt())
    else:
        plain = getattr(Simulation, during)
        with monkeypatch.context() as patch:
            patch.setattr(Simulation, during, lambda self, t, *more: interrupt_at(t, plain(self, t, *more)))
            with pytest.raises(KeyboardInterrupt):
                play(tmp_path / "run", spec())
    result = play(tmp_path / "run", spec())
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert [line["round"] for line in result.curve] == list(range(1, 13))
    assert len(result.messages) == 1, result.messages  # that it was resumed, and nothing lost


def interrupt_at(t: int, value: Any) -> Any:
    if t == 8:
        raise KeyboardInterrupt
    return value


@pytest.mark.parametrize(("step", "times"), [("stage", 8), ("stage_slots", 8), ("accept", 3)])
def test_an_interrupt_while_rows_are_kept_is_resumed(
    step: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """Rows are staged chunk by chunk, then replaced: an interrupt must not leave half a round in the checkpoint."""
    from fedspan.storage import row_table
    from fedspan.storage.client_store import ClientStore

    if step == "stage":  # rows that travel
        monkeypatch.setattr(row_table, "_memory_file", lambda size: None)
    elif step == "stage_slots" and not hasattr(os, "memfd_create"):
        pytest.skip("there are tables that workers share on Linux only")
    what = {"method": "ditto", **spec(chunk=2)}
    play(tmp_path / "whole", what)
    real, count = getattr(ClientStore, step), [0]

    def counted(self: ClientStore, *args: Any) -> None:
        count[0] += 1
        real(self, *args)
        if count[0] == times:
            raise KeyboardInterrupt

    monkeypatch.setattr(ClientStore, step, counted)
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path / "run", what)
    monkeypatch.setattr(ClientStore, step, real)
    play(tmp_path / "run", what)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_another_configuration_is_refused_by_name(tmp_path: Path, quick: None) -> None:
    play(tmp_path, spec() | {"rounds": 2})
    before = outcome(tmp_path)
    other = {"fields": {"lr": 0.1}, "seed": 2, **spec(batch_size=16), "rounds": 2}
    refused(tmp_path, other, "method.lr is 0.05 there and 0.1 here", "seed is 1 there", "train.batch_size is 8 there")
    refused(tmp_path, spec() | {"method": "local", "rounds": 2}, 'method.name is "fedper" there and "local" here')
    play(tmp_path, spec() | {"rounds": 2})
    assert outcome(tmp_path) == before


def refused(out: Path, what: dict[str, Any], *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        play(out, what)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "in use" not in str(caught.value)


def test_a_refused_directory_is_let_go_at_once(tmp_path: Path, quick: None) -> None:
    """Also while the error is being handled: the natural place to start over."""
    play(tmp_path, spec() | {"rounds": 1})
    try:
        play(tmp_path, spec() | {"rounds": 1, "seed": 2})
    except CheckpointError:
        assert play(tmp_path, spec() | {"rounds": 1}).rounds == 1
    else:
        pytest.fail("it was not refused")


@pytest.mark.parametrize("method", ["fedper", "fedavg"])
@pytest.mark.parametrize("change", [{"hidden": 16}, {"clients": 5}], ids=["model", "data"])
def test_another_model_or_other_data_in_the_same_directory(
    change: dict[str, Any], method: str, tmp_path: Path, quick: None
) -> None:
    """What is not in the settings of `simulate` (the model, the data) must not be mixed up either."""
    what = {"method": method, "rounds": 2, **spec()}
    play(tmp_path, what)
    refused(tmp_path, {**what, "rounds": 3, **change})


def test_what_does_not_change_the_numbers_may_change(tmp_path: Path, quick: None) -> None:
    play(tmp_path / "whole", spec())
    play(tmp_path / "run", spec() | {"rounds": 4})
    play(tmp_path / "run", spec(workers=2, checkpoint_every=3, memory_mb=1, checkpoint_seconds=1.0))
    assert outcome(tmp_path / "run")["digest"] == outcome(tmp_path / "whole")["digest"]


def test_a_finished_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    first = play(tmp_path, spec())
    before = outcome(tmp_path)

    def never(self: Simulation, t: int) -> None:
        raise AssertionError("it trained again")

    monkeypatch.setattr(Simulation, "_round", never)
    again = play(tmp_path, spec())
    assert outcome(tmp_path) == before
    assert (again.digest, again.seconds["train"]) == (first.digest, first.seconds["train"])
    assert again.messages == [f"Resuming {tmp_path} after round 12; 0 of 12 are left."]


def test_more_rounds_continue_and_fewer_keep_what_is_there(tmp_path: Path, quick: None) -> None:
    whole = play(None, spec() | {"rounds": 9})
    play(tmp_path, spec() | {"rounds": 4})
    longer = play(tmp_path, spec() | {"rounds": 9})
    assert longer.digest == whole.digest and longer.rounds == 9 and longer.per_client == whole.per_client
    assert [line["round"] for line in longer.curve] == list(range(1, 10))
    fewer = play(tmp_path, spec() | {"rounds": 3})
    assert fewer.rounds == 9 and fewer.digest == whole.digest


def test_rows_on_disk_equal_rows_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    from fedspan.storage import checkpoint

    memory = play(None, {**DISK, **spec()})
    monkeypatch.setattr(checkpoint, "SMALL_BYTES", 0)
    disk = {**DISK, **spec(memory_mb=1)}
    for t in (2, 5):
        stopped_after(tmp_path, t, disk, Stop())
    found = play(tmp_path, disk)
    assert found.simulation is not None and memory.simulation is not None
    assert all(s.on_disk for s in found.simulation.record.stores.values())
    assert not any(s.on_disk for s in memory.simulation.record.stores.values())
    assert found.digest == memory.digest
    assert tree.digest(found.simulation.record.row(3)) == tree.digest(memory.simulation.record.row(3))


# --- the process that forks -------------------------------------------------------------------------------------------


def until(child: Child, done: int) -> None:
    """Wait until round `done` is in a checkpoint."""
    end = time.monotonic() + 30
    while rounds_done(child.out) < done and child.poll() is None and time.monotonic() < end:
        time.sleep(0.002)


def case_workers(root: Path) -> dict[str, Any]:
    child = Child(root, {"rounds": 1000})
    until(child, 1)
    workers = child.family()
    return {"seen": len(workers), "left": child.kill()}


def case_lost(root: Path) -> list[int]:
    child = Child(root, {"rounds": 1000})
    until(child, 3)
    before = rounds_done(root)
    child.kill()
    result = play(root, {"rounds": before + 1, **ALONE})
    return [before, int(result.messages[0].split("after round ")[1].split(";")[0])]


def case_interrupts(root: Path) -> list[dict[str, Any]]:
    found = []
    for method in ("fedper", "ditto"):
        what = {"method": method, "rounds": 16}
        whole = play(root / f"{method}-whole", what)
        run = root / method
        codes, left = [], []
        for done in (3, 9):
            child = Child(run, what)
            until(child, done)
            left += child.kill(signal.SIGINT)
            codes.append(child.code)
        last = Child(run, what)
        last.wait(60)
        equal = last.code == 0 and outcome(run) == outcome(root / f"{method}-whole")
        found.append({"codes": codes, "left": left, "equal": equal, "digest": whole.digest, "last": last.code})
    return found


def case_disk(root: Path) -> dict[str, Any]:
    memory = play(None, {**DISK, **ALONE})
    what = {**DISK, "chains": True, "settings": {"memory_mb": 1}}
    killed = []
    for done in (1, 3, 5):
        child = Child(root, what)
        until(child, done)
        child.kill()
        killed.append(child.code == -signal.SIGKILL)
    last = play(root, what)
    assert last.simulation is not None
    return {
        "on disk": all(s.on_disk for s in last.simulation.record.stores.values()),
        "killed": all(killed),
        "equal to memory": last.digest == memory.digest,
    }


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # a killed process needs no sync
    warm_up()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        cases = {
            "workers": case_workers(root / "workers"),
            "lost": case_lost(root / "lost"),
            "ctrl-c": case_interrupts(root / "ctrl-c"),
            "disk": case_disk(root / "disk"),
        }
    assert not psutil.Process().children(recursive=True)
    print(json.dumps(cases))
