"""Processes that a deployment starts: found again, stopped with what they have started, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from fedspan.deploy.operations import processes, unix_socket

FOLLOWER, STUBBORN = "import sys; sys.stdin.read()", "import time; time.sleep(300)"
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
time.sleep(300)
"""
PARENT = f"""
import os, sys, time
from pathlib import Path
from fedspan.deploy.operations import processes, unix_socket
from fedspan.deploy.operations.watcher import stopped_afterwards

here = Path(sys.argv[1])
with stopped_afterwards([here / "node", here / "server"], remove=here):
    for name in ("node", "server"):
        (here / name).mkdir()
        processes.start(here / name, name, [sys.executable, "-c", {FAMILY!r}, sys.argv[2]], dict(os.environ))
    print("started", flush=True)
    end = sys.stdin.readline().strip()
    if end == "raise":
        raise SystemExit(3)
"""


def members(mark: Path) -> list[psutil.Process]:
    """Processes that were started with a mark in their environment, without zombies."""
    found = []
    for p in psutil.process_iter():
        try:
            if p.environ().get("FEDSPAN_TEST_FAMILY") == str(mark) and p.status() != psutil.STATUS_ZOMBIE:
                found.append(p)
        except psutil.Error:
            continue
    return found


def wait_until_gone(mark: Path, seconds: float) -> list[psutil.Process]:
    end = time.monotonic() + seconds
    while (left := members(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["kill", "raise", "return"])
def test_nothing_is_left_however_the_parent_ends(tmp_path: Path, end: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    command = [sys.executable, "-c", PARENT, str(here), STUBBORN if end == "kill" else FOLLOWER]
    env = {**os.environ, "FEDSPAN_TEST_FAMILY": str(here)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        while len(members(here)) < 6:  # the parent, its watcher, two processes with a child each
            time.sleep(0.05)
        if end == "kill":
            parent.kill()
        else:
            parent.stdin.write(end + "\n")
            parent.stdin.flush()
        assert parent.wait(30) == {"kill": -signal.SIGKILL, "raise": 3, "return": 0}[end]
    assert wait_until_gone(here, 20) == []
    if end == "kill":
        assert not here.exists()
    else:
        assert (here / "node" / "node.log").exists() and not (here / "node" / processes.PIDS).exists()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_killed_deploy_local_leaves_no_process(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "FEDSPAN_TEST_FAMILY": str(tmp_path), "TMPDIR": str(tmp_path / "tmp"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "fedspan.cli.app", "deploy", "local", "--nodes", "2", "rounds=1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        for line in parent.stdout:
            if line.lstrip().startswith("round "):
                break
        assert len(members(tmp_path)) >= 8
        parent.kill()
    assert wait_until_gone(tmp_path, 60) == []
    assert not list((tmp_path / "tmp").glob("fedspan-local-*"))


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.parametrize("proc", ["/proc", "/nowhere"])
def test_processes_are_found_with_and_without_proc(proc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PROC", Path(proc))
    pid = processes.start(tmp_path, "family", [sys.executable, "-c", FAMILY, FOLLOWER], dict(os.environ))
    try:
        end = time.monotonic() + 20
        while not processes._descendants(pid) and time.monotonic() < end:
            time.sleep(0.05)
        (child,) = processes._descendants(pid)
        assert [e["pid"] for e in processes.running(tmp_path)] == [pid]
        assert processes.stop(tmp_path) == ["family"]
    finally:
        with contextlib.suppress(ChildProcessError):  # subprocess may have waited for it when it started another one
            os.waitpid(pid, 0)
    assert processes.running(tmp_path) == []
    assert processes._born(pid) is None and processes._born(child) is None


def started_family(folder: Path) -> tuple[psutil.Process, psutil.Process]:
    """A process of a folder, and the one it has started, which does not end by itself."""
    parent = psutil.Process(
        processes.start(folder, "family", [sys.executable, "-c", FAMILY, STUBBORN], dict(os.environ))
    )
    end = time.monotonic() + 20
    while not parent.children() and time.monotonic() < end:
        time.sleep(0.05)
    return parent, parent.children()[0]


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.parametrize("proc", ["/proc", "/nowhere"])
def test_what_a_killed_process_has_left_is_stopped(proc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PROC", Path(proc))
    here, longer = tmp_path / "a b", tmp_path / "a b c"
    here.mkdir()
    longer.mkdir()
    parent, child = started_family(here)
    other, others_child = started_family(longer)
    try:
        parent.kill()
        parent.wait(10)
        assert processes.running(here) == [] and child.is_running()
        assert processes.stop(here) == []
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert other.is_running() and others_child.is_running()  # of a folder whose name only begins alike
    finally:
        assert processes.stop(longer) == ["family"]


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_child_that_was_killed_is_waited_for(tmp_path: Path) -> None:
    parent, child = started_family(tmp_path)
    parent.kill()
    end = time.monotonic() + 10
    while psutil.pid_exists(parent.pid) and time.monotonic() < end:
        processes.running(tmp_path)
    assert not psutil.pid_exists(parent.pid)  # so that its children can see it
    processes.stop(tmp_path)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_process_ends_with_another_that_is_killed_and_never_waited_for(tmp_path: Path) -> None:
    master, _ = started_family(tmp_path)
    text = f"""
import time
from pathlib import Path
from fedspan.deploy.operations import processes
processes.end_with(Path({str(tmp_path)!r}), "nobody")
processes.end_with(Path({str(tmp_path)!r}), "family")
print("watching", flush=True)
time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None and follower.stdout.readline() == "watching\n"
        try:
            assert follower.poll() is None
            master.kill()
            assert follower.wait(20) == -signal.SIGTERM
        finally:
            follower.kill()
            processes.stop(tmp_path)


def test_the_socket_of_a_killed_worker_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder, note = Path(tempfile.mkdtemp(prefix=unix_socket.PREFIX)), tmp_path / "worker.json"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / unix_socket.NAME))
    note.write_text(json.dumps({"socket": str(folder / unix_socket.NAME), "pid": 1}))
    unix_socket.remove_note(note)
    assert not folder.exists() and not note.exists()
    precious = tmp_path / "fedspan-x" / unix_socket.NAME
    precious.parent.mkdir()
    precious.touch()
    for text in (json.dumps({"socket": str(precious)}), "[]", "{"):
        note.write_text(text)
        unix_socket.remove_note(note)
        assert precious.exists() and not note.exists()
    unix_socket.remove_note(note)


@pytest.mark.parametrize(("length", "there"), [(40, True), (90, False)])
def test_sockets_lie_where_macos_takes_their_paths(length: int, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = "/" + "t" * (length - 1)
    monkeypatch.setattr(unix_socket.tempfile, "gettempdir", lambda: usual)
    parent = unix_socket._parent()
    assert parent == (usual if there else "/tmp")
    assert len(f"{parent}/{unix_socket.PREFIX}xxxxxxxx/{unix_socket.NAME}") <= 103
