"""Runs one contestant in a process of its own, watches its memory, and reads what it prints."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

POLL = 0.5
"""Seconds between two looks at the memory."""


def run(command: list[str], root: Path, longest: float) -> dict[str, Any]:
    """The last line that a process prints, with its wall seconds and memory; or the reason why there is none.

    Memory is the most that the process and its descendants held together at one of the looks, pages they share counted
    once (PSS; where the system has none, RSS).
    """
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    env["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "src")])
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=root, env=env, stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            peak, late = _watch(process, start + longest)
        finally:
            if process.returncode is None:
                _end(process)
        wall = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        said, complaint = out.read().splitlines(), err.read().strip().splitlines()
    if late:
        return {"error": f"not done after {longest:.0f} s"}
    if process.returncode or not said:
        told = [line for line in complaint if line.strip()]
        return {"error": (told[-1] if told else f"ended with code {process.returncode}")[:300]}
    try:
        found = json.loads(said[-1])
    except json.JSONDecodeError:
        return {"error": f"printed no measurement but: {said[-1][:200]}"}
    return {**found, "wall_seconds": wall, "peak_mb": peak >> 20}


def _watch(process: subprocess.Popen[bytes], until: float) -> tuple[int, bool]:
    """Wait for a process; returns the most memory it was seen with, and whether it was not done in time."""
    peak = 0
    while True:
        try:
            process.wait(POLL)
            return peak, False
        except subprocess.TimeoutExpired:
            peak = max(peak, _memory(process.pid))
            if time.perf_counter() > until:
                return peak, True


def _memory(pid: int) -> int:
    """Bytes that a process and its descendants hold together."""
    total = 0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0
    for member in family:
        try:
            held = member.memory_full_info()
            total += getattr(held, "pss", held.rss)
        except psutil.Error:
            continue
    return total


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all its descendants."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    process.wait()
