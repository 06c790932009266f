"""Keyed random numbers: every draw is a function of (seed, purpose, round, client), so there is no generator to carry.

`generator` and `key` work on the host. `uniform`, `normal` and `fold` are pure tensor operations on an integer key and
give the same numbers under `vmap`, in chunks, in a loop and on a node.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def number(*parts: int | str) -> int:
    """A 63-bit integer that depends on all parts and their order."""
    text = "\x1f".join(f"{type(p).__name__[0]}{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: int | str) -> np.random.Generator:
    """A fresh NumPy generator keyed by the parts, e.g. `generator(seed, "batches", round, client)`."""
    return np.random.Generator(np.random.Philox(key=number(*parts)))


def key(*parts: int | str) -> Tensor:
    """A scalar int64 tensor to give to `uniform`, `normal` or `fold`."""
    return torch.tensor(number(*parts), dtype=torch.int64)


def _scramble(x: Tensor) -> Tensor:
    # A 32-bit mixing function with low bias, on int64 so that products wrap the same way everywhere.
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _bits(k: Tensor, shape: Sequence[int]) -> Tensor:
    k = k.to(torch.int64)
    low, high = k & _MASK, (k >> 32) & _MASK
    position = torch.arange(math.prod(shape), dtype=torch.int64, device=k.device).reshape(tuple(shape))
    return _scramble(_scramble(_scramble(position ^ low) + high & _MASK) ^ _scramble(low + 0x9E3779B9 & _MASK))


def fold(k: Tensor, n: int | Tensor) -> Tensor:
    """A new key from a key and a number (a step, a layer, a purpose)."""
    n = torch.as_tensor(n, dtype=torch.int64, device=k.device)
    low = _scramble(((k & _MASK) ^ _scramble(n & _MASK)) & _MASK)
    high = _scramble((((k >> 32) & _MASK) + low + (n >> 32)) & _MASK)
    return ((high & 0x7FFFFFFF) << 32) | low


def uniform(k: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in (0, 1), one per position, from a key alone."""
    return _uniform(k, shape).to(dtype).to(k.device).clamp_max(1 - torch.finfo(dtype).eps / 2)


def _uniform(k: Tensor, shape: Sequence[int]) -> Tensor:
    """Uniform numbers in float64; of a key on an MPS device, which has none, on the host."""
    bits = _bits(k, shape)
    return ((bits.cpu() if bits.device.type == "mps" else bits).to(torch.float64) + 0.5).div(2.0**32)


def normal(k: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers by the Box–Muller transform of two keyed uniforms."""
    u, v = (_uniform(fold(k, n), shape).clamp_max(1 - torch.finfo(torch.float64).eps / 2) for n in (1, 2))
    return ((-2.0 * u.log()).sqrt() * (2.0 * math.pi * v).cos()).to(dtype).to(k.device)


@contextmanager
def torch_seed(*parts: int | str) -> Iterator[None]:
    """Run a block with torch's global generator keyed by the parts, and put it back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number(*parts))
        yield
