"""Processes that a deployment starts: found again, stopped with what they have started, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
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
from fedspan.deploy.operations import processes
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


@pytest.mark.parametrize(("length", "there"), [(40, True), (90, False)])
def test_sockets_lie_where_macos_takes_their_paths(
    length: int, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(prefix: str, dir: str) -> str:
        made.append(Path(dir))
        return f"{dir}/{prefix}xxxxxxxx"

    usual = "/" + "t" * (length - 1)
    monkeypatch.setattr(unix_socket.tempfile, "gettempdir", lambda: usual)
    monkeypatch.setattr(unix_socket.tempfile, "mkdtemp", make)
    folder = unix_socket._folder()
    assert made == [Path(usual if there else "/tmp")]
    assert len(str(folder / "node.sock")) <= 103
