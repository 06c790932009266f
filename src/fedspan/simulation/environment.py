"""What a run's numbers depend on besides its configuration and data: versions and the processor, per span of rounds.

The rule for going on with a run in another environment: another patch version of fedspan is noted; another fedspan,
torch, NumPy, processor or accelerator is a warning, since sums may round otherwise; both are recorded. Other data and
another configuration are refused (`identity`), and so are files of another format (`storage.format_number`).
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from fedspan import __version__
from fedspan.learn import accelerator

Span: TypeAlias = dict[str, Any]
"""`first` and `last` round, and the `versions` they were computed with."""

_DECIDE = ("fedspan", "torch", "numpy", "machine", "cpu", "device")


def versions(device: torch.device = accelerator.HOST) -> dict[str, str]:
    """What the numbers depend on besides the configuration, where they are computed on this device."""
    return {
        "fedspan": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cpu": cpu(),
        "device": accelerator.called(device),
    }


@cache
def cpu() -> str:
    """The processor's name and the vector instructions torch uses on it, which decide how sums round."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:  # not Linux: what Python knows must do
        pass
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def credit(spans: Sequence[Span], done: int, now: dict[str, str]) -> list[Span]:
    """The spans up to round `done`, with the rounds nobody has been credited with given to `now`."""
    last = spans[-1]["last"] if spans else 0
    if done <= last:
        return list(spans)
    if spans and spans[-1]["versions"] == now:
        return [*spans[:-1], {**spans[-1], "last": done}]
    return [*spans, {"first": last + 1, "last": done, "versions": now}]


def differences_on_resume(spans: Sequence[Span], now: dict[str, str]) -> tuple[list[str], list[str]]:
    """Notes and warnings, one sentence each at most, for a run that goes on with other versions than its last span."""
    if not spans:
        return [], []
    # Runs from before there was a choice were computed on the CPU.
    done, before = spans[-1]["last"], {"device": "cpu", **spans[-1]["versions"]}
    unlike = [k for k in now if before.get(k) != now[k]]
    grave = [k for k in unlike if k in _DECIDE and not (k == "fedspan" and _patch(before.get(k), now[k]))]
    slight = [k for k in unlike if k not in grave]
    notes = [f"Resuming with {_list(slight, before, now)}; the numbers are meant to stay the same."] if slight else []
    warnings = [
        f"Rounds to {done} were computed with another environment than those after it: {_list(grave, before, now)};"
        " the numbers may differ in their last digits from those of a run in one environment."
    ]
    return notes, warnings if grave else []


def _patch(before: str | None, now: str) -> bool:
    """Whether two versions differ in nothing but the last of three numbers."""
    return before is not None and before.split(".")[:2] == now.split(".")[:2]


def _list(keys: Sequence[str], before: dict[str, str], now: dict[str, str]) -> str:
    return ", ".join(f"{k} {now[k]} instead of {before.get(k, 'nothing known')}" for k in keys)
