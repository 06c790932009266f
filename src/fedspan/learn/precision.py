"""bf16: matrix products and convolutions of training passes in 16 bits, everything else in 32.

Weights, gradients as the optimiser sees them, the optimiser's state, losses and what is sent stay float32. Passes in
evaluation mode stay float32 too: what is judged, exported and used are the float32 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Precision: TypeAlias = Literal["float32", "bf16", "float64"]
"""What a model is trained in."""

_BF16: ContextVar[bool] = ContextVar("bf16", default=False)


@contextmanager
def training_in(precision: Precision) -> Iterator[None]:
    """Run training passes of tasks in this precision inside the block."""
    token = _BF16.set(precision == "bf16")
    try:
        yield
    finally:
        _BF16.reset(token)


def is_bf16() -> bool:
    """Whether training passes run in bf16 now."""
    return _BF16.get()


_IN_32 = (F.layer_norm, F.rms_norm)  # as on CUDA; the derivative in 16 bits cannot be mapped
_IN_16 = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)  # vmap forgets them


class _MappedTypes(TorchFunctionMode):
    """What autocast does on a CPU, for those functions too that it leaves out there or under `vmap`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _IN_32 or func in _IN_16:
            dtype = torch.float32 if func in _IN_32 else torch.bfloat16
            args, given = tuple(_cast(a, dtype) for a in args), {k: _cast(a, dtype) for k, a in given.items()}
        return func(*args, **given)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def autocast(device: torch.device) -> Iterator[None]:
    """Compute products of this block in bf16."""
    with torch.autocast(device.type, dtype=torch.bfloat16), _MappedTypes():
        yield


def is_autocast(t: Tensor) -> bool:
    """Whether products with this tensor are computed in bf16 now."""
    return torch.is_autocast_enabled(t.device.type)
