"""Small simulations described by a dict, in processes that can be killed; shared by the fault tests and commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from fedspan.data.federated import FederatedData
from fedspan.methods import make
from fedspan.simulation.result import Result
from fedspan.simulation.simulator import simulate
from fedspan.storage import checkpoint

Spec = dict[str, Any]
SPEC: Spec = {"method": "fedper", "fields": {"lr": 0.05}, "rounds": 12, "seed": 1, "hidden": 32, "clients": 8}
SETTINGS = {
    "participation": 0.6, "batch_size": 8, "epochs": 2, "evaluate_every": 4, "workers": 2, "checkpoint_seconds": 0.0,
}  # fmt: skip


def federation(clients: int, seed: int = 0) -> FederatedData:
    """Ragged clients with three classes in sixteen dimensions."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(3, 16))
    pairs = []
    for _ in range(clients):
        y = rng.integers(0, 3, int(rng.integers(10, 40)))
        x = centres[y] + rng.normal(size=(len(y), 16))
        pairs.append((torch.tensor(x), torch.tensor(y)))
    return FederatedData.from_arrays(pairs, seed=seed)


def model(hidden: int) -> nn.Module:
    """An MLP of a given width."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def play(out: Path | None, spec: Spec, on_round: Callable[[dict[str, Any]], None] | None = None) -> Result:
    """Run or resume a described simulation. `chains` saves changed rows only, as large stores do."""
    s = {**SPEC, **spec}
    if s.get("chains"):
        checkpoint.SMALL_BYTES = 0
    return simulate(
        make(s["method"], **s["fields"]), model(s["hidden"]), federation(s["clients"]), rounds=s["rounds"],
        seed=s["seed"], out=out, on_round=on_round, **{**SETTINGS, **s.get("settings", {})},
    )  # fmt: skip


def warm_up() -> None:
    """What a process does only once (imports, tables), so that its forks start at the first round at once."""
    for method in ("local", "pfl-mf"):
        play(None, {"method": method, "rounds": 1, "settings": {"workers": 1}})


class Child:
    """A process of its own that plays a run: a fork, or (with `fresh`) a new interpreter."""

    def __init__(self, out: Path, spec: Spec, fresh: bool = False) -> None:
        self.out, self.code = out, None
        out.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        try:
            with open(out / "stderr", "ab", buffering=0) as log:
                os.dup2(log.fileno(), 2)
                if fresh:
                    os.execv(sys.executable, [sys.executable, __file__, str(out), json.dumps(spec)])
                play(out, spec)
            os._exit(0)
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException as e:
            with contextlib.suppress(BaseException):
                (out / "error").write_text(f"{type(e).__name__}: {e}")
        finally:
            os._exit(1)

    code: int | None

    def family(self) -> list[psutil.Process]:
        """The process's own children: its workers."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def poll(self) -> int | None:
        """The exit code (negative: a signal), or None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, seconds: float) -> int | None:
        """Wait at most that long for its end."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        return self.code

    def kill(self, number: int = signal.SIGKILL, seconds: float = 30.0) -> list[int]:
        """Send a signal, wait for the end, and return the workers that outlived it by more than five seconds."""
        workers = self.family()
        if self.poll() is None:
            os.kill(self.pid, number)
            if self.wait(seconds) is None:
                os.kill(self.pid, signal.SIGKILL)
                self.wait(seconds)
        end = time.monotonic() + 5.0
        while (left := [w.pid for w in workers if alive(w)]) and time.monotonic() < end:
            time.sleep(0.01)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


def alive(process: psutil.Process) -> bool:
    """Whether it still runs (one that only waits to be noticed does not)."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def rounds_done(out: Path) -> int:
    """The round of the newest checkpoint."""
    numbers = [int(p.stem.split("-")[1]) for p in (out / "checkpoints").glob("manifest-*.json")]
    if not numbers:
        return 0
    try:
        return int(json.loads((out / "checkpoints" / f"manifest-{max(numbers)}.json").read_text())["round"])
    except (OSError, ValueError):  # it was replaced while we looked
        return 0


def outcome(out: Path) -> dict[str, Any]:
    """What must not depend on interruptions: the digest, what was measured and sent, and the rounds in the metrics."""
    result = json.loads((out / "result.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    keys = ("digest", "rounds", "measures", "per_client", "bytes")
    return {k: result[k] for k in keys} | {"lines": lines}


if __name__ == "__main__":
    for arguments in zip(sys.argv[1::2], sys.argv[2::2]):
        play(Path(arguments[0]), json.loads(arguments[1]))
