"""Processes that a deployment starts: found again and stopped by their number, and only if they are still the same."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.errors import FedspanError
from fedspan.storage.atomic import write_atomic

OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
}
"""No outside contact and no self-installation, always."""

QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
"""Flower looks for tasks every second otherwise."""

MARK = "FEDSPAN_STARTED_IN"
"""The variable that names the folder to everything started for it, and to what that starts in turn."""

PIDS = "pids.json"
PROC = Path("/proc")


def environment(home: Path, **more: str) -> dict[str, str]:
    """What our processes run with: offline, a Flower home of their own, and the programs of this environment."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return kept | OFFLINE | QUICK | {"FLWR_HOME": str(home), "PATH": programs, "OMP_NUM_THREADS": "1"} | more


def start(folder: Path, name: str, command: Sequence[str], env: dict[str, str]) -> int:
    """Start a process of its own session; its output goes to NAME.log, its number to pids.json."""
    with open(folder / f"{name}.log", "ab") as log:
        process = subprocess.Popen(
            command,
            env=env | {MARK: _mark(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _write(folder, [*running(folder), {"name": name, "pid": process.pid, "born": _born(process.pid)}])
    return process.pid


def running(folder: Path) -> list[dict[str, Any]]:
    """Our processes of a folder that still run."""
    try:
        entries: list[dict[str, Any]] = json.loads((folder / PIDS).read_text(encoding="utf-8"))
        return [e for e in entries if e["born"] is not None and _born(e["pid"]) == e["born"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def stop(folder: Path, patience: float = 15.0) -> list[str]:
    """Stop what runs, the last started first, with everything it has started; the names of what was stopped.

    That includes what a killed process has left behind. Flower's processes end with their parent only once somebody has
    waited for it, and after pauses of up to 20 s.
    """
    entries = running(folder)
    family = {pid: _born(pid) for e in reversed(entries) for pid in (e["pid"], *_descendants(e["pid"]))}
    family |= {pid: _born(pid) for pid in _marked(folder) if pid not in family}
    for pid, born in family.items():
        _signal(pid, born, signal.SIGTERM)
    end = time.monotonic() + patience
    for number in (None, signal.SIGKILL):
        while any(_alive(pid, born) for pid, born in family.items()) and time.monotonic() < end:
            time.sleep(0.1)
        if number is None:
            family |= {pid: _born(pid) for pid in _marked(folder)}  # with what was started in the meantime
            for pid, born in family.items():
                _signal(pid, born, signal.SIGKILL)
        end = time.monotonic() + 5.0
    (folder / PIDS).unlink(missing_ok=True)
    return [e["name"] for e in entries]


def end_with(folder: Path, name: str) -> None:
    """End this process soon after the named process of a folder, also if that one is killed and never waited for.

    Nothing is done where no such process is known.
    """
    masters = [(e["pid"], e["born"]) for e in running(folder) if e["name"] == name]

    def watch() -> None:
        while all(_alive(pid, born) for pid, born in masters):
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)  # not raise_signal, which would not wake the main thread

    if masters:
        threading.Thread(target=watch, daemon=True).start()


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for(what: str, done: Any, seconds: float, folder: Path, name: str) -> None:
    """Wait until `done()`; refuses to wait for a process that has ended.

    Raises:
        FedspanError: if it has, or the time is over.
    """
    end = time.monotonic() + seconds
    while not done():
        if name not in {e["name"] for e in running(folder)}:
            raise FedspanError(f"Deploy: {what} has ended. See {folder / (name + '.log')}.")
        if time.monotonic() > end:
            raise FedspanError(f"Deploy: {what} is not ready after {seconds:g} s. See {folder / (name + '.log')}.")
        time.sleep(0.2)


def _write(folder: Path, entries: list[dict[str, Any]]) -> None:
    write_atomic(folder / PIDS, json.dumps(entries))


@dataclass(frozen=True)
class _Process:
    """What the system says of a process."""

    pid: int
    parent: int
    born: str  # by the kernel's clock, or by the time of day where only ps tells
    zombie: bool


def _look_up(pid: int) -> _Process | None:
    if not PROC.is_dir():
        return next(iter(_ps("-p", str(pid))), None)
    try:
        fields = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return _Process(pid, int(fields[1]), fields[19], fields[0] == "Z")


def _all() -> list[_Process]:
    if not PROC.is_dir():
        return _ps("-A")
    numbers = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    return [found for n in numbers if (found := _look_up(n)) is not None]


def _ps(*which: str) -> list[_Process]:
    """Processes as `ps` lists them, on systems without /proc such as macOS."""
    rows = [line.split(None, 3) for line in _run_ps(*which, "-o", "pid=,ppid=,stat=,lstart=")]
    return [_Process(int(pid), int(parent), born, state.startswith("Z")) for pid, parent, state, born in rows]


def _run_ps(*words: str) -> list[str]:
    listed = subprocess.run(
        ["ps", *words], env={**os.environ, "LC_ALL": "C"}, capture_output=True, encoding="utf-8", errors="replace"
    )
    return listed.stdout.splitlines()


def _born(pid: int) -> str | None:
    """When a process started; None if it has ended. Numbers are used again, births are not.

    A child of this process that has ended is waited for: until then its own children believe that it lives.
    """
    found = _look_up(pid)
    if found is not None and found.zombie and found.parent == os.getpid():
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return None if found is None or found.zombie else found.born


def _alive(pid: int, born: str | None) -> bool:
    return born is not None and _born(pid) == born


def _signal(pid: int, born: str | None, number: int) -> None:
    if _alive(pid, born):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _marked(folder: Path) -> list[int]:
    """Processes that were started for a folder, whoever is their parent now; never this one."""
    mark = f"{MARK}={_mark(folder)}"
    if PROC.is_dir():
        found = [process.pid for process in _all() if mark in _environment_of(process.pid)]
    else:
        show = ("-E", "-ww") if sys.platform == "darwin" else ("e", "ww")  # the environment, behind the command
        listed = _run_ps("-A", *show, "-o", "pid=,args=")
        found = [int(line.split(None, 1)[0]) for line in listed if mark in line]
    return [pid for pid in found if pid != os.getpid()]


def _mark(folder: Path) -> str:
    """The folder as its processes' environment names it: in quotes, so that no longer path begins with it."""
    return json.dumps(str(folder.resolve()))


def _environment_of(pid: int) -> list[str]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []  # it has ended, or is another user's


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for process in _all():
        parents.setdefault(process.parent, []).append(process.pid)
    found: list[int] = []
    todo = [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found
