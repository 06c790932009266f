"""Processes that a deployment starts: found again and stopped by their number, and only if they are still the same."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
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
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
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
    """Stop what runs, the last started first, with everything it has started; the names of what was stopped."""
    entries = running(folder)
    family = {pid: _born(pid) for e in entries for pid in (e["pid"], *_descendants(e["pid"]))}
    for e in reversed(entries):
        _signal(e["pid"], e["born"], signal.SIGTERM)
    end = time.monotonic() + patience
    for number in (None, signal.SIGKILL):
        while any(_alive(pid, born) for pid, born in family.items()) and time.monotonic() < end:
            time.sleep(0.1)
        for pid, born in family.items():
            if number is None:
                _signal(pid, born, signal.SIGKILL)
        end = time.monotonic() + 5.0
    (folder / PIDS).unlink(missing_ok=True)
    return [e["name"] for e in entries]


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
    command = ["ps", *which, "-o", "pid=,ppid=,stat=,lstart="]
    listed = subprocess.run(
        command, env={**os.environ, "LC_ALL": "C"}, capture_output=True, encoding="utf-8", errors="replace"
    )
    rows = [line.split(None, 3) for line in listed.stdout.splitlines()]
    return [_Process(int(pid), int(parent), born, state.startswith("Z")) for pid, parent, state, born in rows]


def _born(pid: int) -> str | None:
    """When a process started; None if it has ended. Numbers are used again, births are not."""
    found = _look_up(pid)
    return None if found is None or found.zombie else found.born


def _alive(pid: int, born: str | None) -> bool:
    return born is not None and _born(pid) == born


def _signal(pid: int, born: str | None, number: int) -> None:
    if _alive(pid, born):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


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
