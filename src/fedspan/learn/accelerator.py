"""Accelerators: the CUDA or MPS device that a run computes on, and what happens when its memory is full.

Weights, examples and the server's state lie on the device; rows of clients, checkpoints and digests on the host. What
fits at once is found by running: work that meets the end of the memory is repeated in halves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.precision import Precision

R = TypeVar("R")

HOST = torch.device("cpu")

_NAME = re.compile(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]*))?")

_COPIES = 8
"""Of a client's parameters and minibatch that a first guess makes room for: gradients, optimiser, activations."""

_assigned: list[torch.device] = []  # of a worker process, the device that its parent has given it


def check_name(name: object) -> None:
    """Refuse what is not the name of a device.

    Raises:
        ConfigError: otherwise.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"Train: device must be 'auto', 'cpu', 'cuda', 'cuda:N' with the number of one, or 'mps'. Got {name!r}."
        )


def number_of(kind: str) -> int:
    """How many devices of a kind (cuda, mps) torch can use on this machine."""
    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    return int(torch.backends.mps.is_available())


def find(name: str, precision: Precision = "float32") -> list[torch.device]:
    """The devices that a name means, the first one for the server: every CUDA device for `cuda`.

    `auto` is CUDA where there is any, and otherwise the CPU.

    Raises:
        ConfigError: if there is no such device, or it cannot compute in this precision.
    """
    check_name(name)
    kind, _, which = name.partition(":")
    if kind == "auto":
        kind = "cuda" if number_of("cuda") else "cpu"
    if kind == "cpu":
        return [HOST]
    there = number_of(kind)
    if not there or (which and int(which) >= there):
        got = f"{there}, cuda:0 to cuda:{there - 1}" if there > 1 else "cuda:0 alone" if there else "none"
        raise ConfigError(
            f"Train: device='{name}' needs a device that torch {torch.__version__} can use on this machine. Got {got};"
            " use device='auto' or 'cpu'."
        )
    if kind == "mps":
        if precision == "float64":
            raise ConfigError("Train: device='mps' cannot compute in float64; use precision='float32' or device='cpu'.")
        return [torch.device("mps", 0)]
    return [torch.device("cuda", int(which))] if which else [torch.device("cuda", k) for k in range(there)]


def called(device: torch.device) -> str:
    """What results say a run was computed on: `cpu`, or the kind of the device and its maker's name for it."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type


def assign(device: torch.device) -> None:
    """Say which device this process computes on, whatever device an engine that it is sent was made for."""
    _assigned[:] = [device]


def assigned(other: torch.device) -> torch.device:
    """The device that this process was given; `other` if none was."""
    return _assigned[0] if _assigned else other


def to_device(values: Any, device: torch.device) -> Any:
    """A tree on a device; leaves that are there stay as they are. The host does not wait for the copies it sends."""
    if device.type == "cpu":
        return tree.map(lambda t: t.cpu(), values)
    return tree.map(lambda t: t.to(device, non_blocking=t.device.type == "cpu"), values)


def widest(device: torch.device) -> torch.dtype:
    """The type of the most exact numbers that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def free_memory(device: torch.device) -> int | None:
    """Bytes of a device that nobody uses; None where they cannot be asked for."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def is_full(error: BaseException) -> bool:
    """Whether an error says that a device has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("MPS backend out of memory")


def too_small(device: torch.device) -> ConfigError:
    """The error of a device that does not hold what one client needs."""
    return ConfigError(
        f"Train: the memory of device '{device}' must hold one client with its minibatch, and is full; use a smaller"
        " batch_size or model, precision='bf16', or device='cpu'."
    )


class Fitting:
    """How many clients a device has been found to hold at once.

    Attributes:
        most: clients in one piece; None as long as nothing is known.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.most: int | None = None

    def guess(self, per_client: Callable[[], int]) -> None:
        """Begin with what half of the free memory should hold of clients with so many bytes of numbers each."""
        if self.most is None and (free := free_memory(self.device)) is not None:
            self.most = max(1, free // 2 // max(1, _COPIES * per_client()))

    def pieces(self, clients: int, work: Callable[[slice], R]) -> list[R]:
        """`work` of all clients, in their order; of fewer at a time once the memory of the device did not hold them.

        Raises:
            ConfigError: if it does not even hold one client.
        """
        found: list[R] = []
        done = 0
        while done < clients:
            size = min(clients - done, self.most or clients)
            try:
                found.append(work(slice(done, done + size)))
                done += size
                continue
            except RuntimeError as e:
                if not is_full(e):
                    raise
                if size == 1:
                    raise too_small(self.device) from None
            self.most = -(-size // 2)
            _release(self.device)  # after the error is gone, which holds the tensors of its frames
        return found


def _release(device: torch.device) -> None:
    """Give back what the allocator of a device holds for later: pieces of another size do not fit into it."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif device.type == "mps" and torch.backends.mps.is_available():
        torch.mps.empty_cache()
