"""A pretended accelerator: tensors are marked as lying on it while their numbers stay on the CPU.

Tensors get there as they would get to a GPU: by `.to(device)`, `device=` of a constructor, or as the result of an
operation on others there. `.device` answers accordingly, so that code which asks where a tensor lies does what it would
do on a GPU. Every operation is looked at: one on tensors here and there is a fault, as it would raise an error; one
whose result the host has to wait for is counted. What is computed are the CPU's bits.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedspan.learn.folded import _packed_clients

_SCALARS = {
    "add",
    "sub",
    "rsub",
    "mul",
    "div",
    "pow",
    "remainder",
    "fmod",
    "floor_divide",
    "where",
    "maximum",
    "minimum",
}
_SCALARS |= {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "atan2"}
_SCALARS |= {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"}
_SCALARS |= {"__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "_foreach_mul", "_foreach_add", "_foreach_div"}
"""Operations in which a GPU takes a number without axes from the host."""

_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
_WAITS |= {"_linalg_check_errors", "is_nonzero", "item", "bincount"}
"""Operations whose shape or value the host must know before it goes on."""


_INSIDE = ("utils/_stats.py", "_python_dispatch.py", "_dynamo/eval_frame.py", "torch/_compile.py")
"""Files of torch that stand between an operation and who asked for it."""


class PretendedDevice:
    """Marks tensors and lists faults while it is active.

    Attributes:
        faults: place and operation of what would be an error on a device of this kind.
        waits: places at which the host waits for the device.
        moves: tensors with axes that were brought to the device, and back.
    """

    def __init__(self, kind: str = "cuda") -> None:
        self.device = torch.device(kind, 0)
        self.faults: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[str] = Counter()
        self.moves: Counter[str] = Counter()
        # References that are weak, but keep an address from being given to another storage.
        self._there: dict[int, StorageWeakRef] = {}
        self._result: bool | None = None  # where results go, whatever they are computed from
        self._backward = False  # whether derivatives are computed there
        self._counted = True  # whether the host would wait where it does on a CPU

    @contextmanager
    def active(self) -> Iterator[PretendedDevice]:
        """Watch what a block does."""
        _packed_clients.cache_clear()  # what it holds lies on another pretended device
        with ExitStack() as stack:
            stack.enter_context(_Operations(self))
            stack.enter_context(_Questions(self))
            yield self

    def has(self, t: Tensor) -> bool:
        """Whether a tensor lies there."""
        while functorch.is_functorch_wrapped_tensor(t):
            t = functorch.get_unwrapped(t)
        return t.device.type != "meta" and t.untyped_storage()._cdata in self._there

    def mark(self, t: Tensor) -> None:
        """Let a tensor lie there."""
        storage = t.untyped_storage()
        if storage._cdata not in self._there:
            self._there[storage._cdata] = StorageWeakRef(storage)

    def wait(self) -> None:
        """Note that the host waits for the device at the present place."""
        if self._counted:
            self.waits[place()] += 1

    def fault(self, what: str) -> None:
        """Note an error at the present place."""
        self.faults[place(), what] += 1

    @contextmanager
    def results(self, there: bool, counted: bool = True) -> Iterator[None]:
        """Let results of a block lie there, or here."""
        before = self._result, self._counted
        self._result, self._counted = there, counted
        try:
            yield
        finally:
            self._result, self._counted = before

    def moved(self, t: Tensor, there: bool) -> Tensor:
        """A tensor brought there, or here; itself if that is where it lies."""
        if self.has(t) == there or t.device.type == "meta":
            return t
        if t.ndim:
            self.moves["there" if there else "back"] += 1
        with self.results(there):
            return t.clone()


class _Questions(TorchFunctionMode):
    """Answers where tensors lie, and carries out moves."""

    def __init__(self, on: PretendedDevice) -> None:
        super().__init__()
        self.on = on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, on, owner = dict(kwargs or {}), self.on, getattr(func, "__self__", None)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and owner is Tensor.device:
            return on.device if on.has(first) else func(*args, **kwargs)
        if first is not None and owner is Tensor.is_cpu:
            return not on.has(first)
        if first is not None and owner is Tensor.is_cuda:
            return on.has(first) and on.device.type == "cuda"
        name = getattr(func, "__name__", "")
        if first is not None and on.has(first) and name == "numpy":
            on.fault("numpy")
        if first is not None and on.has(first) and name == "tolist":
            on.wait()
        if name in ("to", "cpu", "cuda") and first is not None:
            return self._moved(first, name, args[1:], kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "meta":
            there = self._named(kwargs["device"])
            with on.results(there):
                return on.moved(func(*args, **(kwargs | {"device": "cpu"})), there)
        given = [on.has(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name in ("grad", "backward"):
            before, on._backward = on._backward, any(given)
            try:
                return func(*args, **kwargs)
            finally:
                on._backward = before
        if given and all(given):
            with on.results(True, counted=name != "one_hot"):  # whose check of the values a GPU leaves out
                return func(*args, **kwargs)  # what it makes for itself lies where its arguments do
        return func(*args, **kwargs)

    def _named(self, device: Any) -> bool:
        kind = torch.device(device).type
        assert kind in ("cpu", self.on.device.type), kind
        return kind != "cpu"

    def _moved(self, t: Tensor, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """`t.to(...)`: the type is changed where the tensor lies, then it is moved."""
        where = {"cpu": "cpu", "cuda": "cuda"}.get(name, kwargs.pop("device", None))
        rest: dict[str, Any] = {k: v for k, v in kwargs.items() if k != "non_blocking"}
        for a in args:
            if isinstance(a, str | torch.device):
                where = a
            elif isinstance(a, torch.dtype):
                rest["dtype"] = a
            elif isinstance(a, Tensor):
                where, rest["dtype"] = self.on.device if self.on.has(a) else "cpu", a.dtype
        if where is not None and torch.device(where).type == "meta":
            return torch.Tensor.to(t, "meta", **rest)
        if where is not None and not self._named(where) and self.on.has(t) and not kwargs.get("non_blocking"):
            self.on.wait()
        found = torch.Tensor.to(t, **rest) if rest else t
        return found if where is None else self.on.moved(found, self._named(where))


class _Operations(TorchDispatchMode):
    """Looks at every operation."""

    def __init__(self, on: PretendedDevice) -> None:
        super().__init__()
        self.on = on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, on = kwargs or {}, self.on
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = [on.has(t) for t in given]
        name, _, _ = func._schema.name.partition("::")[2].partition(".")
        if any(there):
            self._look(func, name, given, there, args)
        out = func(*args, **kwargs)
        made = on._result is None and not given and on._backward and _in_backward()
        if name in ("copy_", "set_") or (on._result is None and not any(there) and not made):
            return out
        if on._result is not False:
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    on.mark(t)
                    if on.device.type == "mps" and t.dtype in (torch.float64, torch.complex128):
                        on.fault(f"{name} in float64")
        return out

    def _look(self, func: Any, name: str, given: list[Tensor], there: list[bool], args: Any) -> None:
        on = self.on
        if func._schema.name.startswith("mkldnn::"):
            on.fault(name)
        waits = name in _WAITS or (name == "repeat_interleave" and "output_size" not in str(args))
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_")
        if waits or (masks and any(t.dtype == torch.bool for t in tree_leaves(args[1]) if isinstance(t, Tensor))):
            on.wait()
        if all(there):
            return
        if name == "copy_":
            on.moves["there" if there[0] else "back"] += 1
            if not there[0]:
                on.wait()
            return
        here = [t for t, gone in zip(given, there) if not gone]
        plain = name.rstrip("_") if not name.startswith("__") else name
        written = name.endswith("_") and not name.endswith("__") and not there[0]
        if written or any(t.ndim for t in here) or plain not in _SCALARS:
            on.fault(name)


def _in_backward() -> bool:
    """Whether torch's own derivatives are being computed: what they make lies where their inputs did."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_INSIDE):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith("torch/autograd/graph.py")


def place() -> str:
    """The line of the package, or of a test, that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        for root in ("/fedspan/", "/tests/"):
            if root in file and not file.endswith("pretended_device.py"):
                return f"{file.rpartition(root)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
