"""Joining a Ray cluster, in one sentence where that fails, and sending objects to it once for every node.

Ray waits for minutes at an address where nobody answers, so its door is tried first. Objects are pickled as Ray pickles
them (cloudpickle): they go to processes that belong to the cluster's owner, never to a file or to strangers.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.tree import Tree
from fedspan.wire.payload import TYPES, code_of

Bytes: TypeAlias = NDArray[np.uint8]
TreeBytes: TypeAlias = tuple[list[tuple[str, str, tuple[int, ...], Bytes]], list[str]]
"""A tree for Ray's object store: path, type, shape and bytes of every leaf; empty sub-trees."""

LARGE = 1 << 20
"""Bytes from which a tensor is read where it lies in a node's object store, by all processes there."""

DOOR_SECONDS = 5.0
"""For whoever is at an address to say what it is."""

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # HTTP/2's, with settings that say nothing
_SETTINGS = 4  # the type of the frame that such a server answers with


class ClusterError(ConfigError):
    """A cluster that cannot be joined, or has nobody left to compute."""


def the_ray() -> Any:
    """The package `ray`.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it imports
            import ray
    except ImportError:
        raise ConfigError("Cluster: Ray is not installed; pip install 'fedspan[ray]', on every machine.") from None
    return ray


@contextlib.contextmanager
def joined(address: str | None) -> Iterator[None]:
    """Be a driver of the cluster at an address as long as the block lasts; of none if there is no address.

    A process that is one already stays what it is.

    Args:
        address: HOST:PORT of the head, or `auto` for the cluster this machine belongs to.

    Raises:
        ClusterError: if it cannot be joined.
    """
    if address is None or the_ray().is_initialized():
        yield
        return
    _join(address)
    try:
        yield
    finally:
        the_ray().shutdown()


def _join(address: str) -> None:
    ray = the_ray()
    where = _found(address)
    _try_door(where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about defaults of versions to come
            ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as e:
        raise ClusterError(
            f"Cluster: {where} answers but cannot be joined ({type(e).__name__}: {' '.join(str(e).split())[:300]}); it"
            " needs this machine's version of Ray and, if it has a token, RAY_AUTH_MODE=token and the same token here."
        ) from None


def _found(address: str) -> str:
    """HOST:PORT that an address means.

    Raises:
        ClusterError: if it is none, or there is no cluster on this machine.
    """
    if address == "auto":
        with contextlib.suppress(ImportError, AttributeError, TypeError):  # where other versions of Ray have it
            from ray._private.services import canonicalize_bootstrap_address

            given = os.environ.get("RAY_ADDRESS") or canonicalize_bootstrap_address("auto")
            if not given:
                raise ClusterError(
                    "Cluster: this machine belongs to no Ray cluster; start one with `ray start --head`, join one with"
                    " `ray start --address=HOST:PORT`, or give its address: --cluster HOST:PORT."
                )
            return _checked(str(given))
    return _checked(address)


def _checked(address: str) -> str:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[\w.-]+):(\d{1,5})", address)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ClusterError(
            f"Cluster: the address must be auto or HOST:PORT, of the head of a cluster this machine belongs to. Got"
            f" {address[:100]!r}."
        )
    return address


def _try_door(address: str) -> None:
    """See within seconds whether something like Ray answers.

    Raises:
        ClusterError: if not.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), DOOR_SECONDS) as door:
            door.settimeout(DOOR_SECONDS)
            door.sendall(_HELLO)
            head = door.recv(9)
    except OSError as e:
        why = e.strerror or str(e) or type(e).__name__
        raise ClusterError(
            f"Cluster: nobody answers at {address} ({why}); start Ray there with `ray start --head --port={port}`."
        ) from None
    if len(head) < 4 or head[3] != _SETTINGS:
        raise ClusterError(f"Cluster: what answers at {address} is not Ray; give the address that `ray start` printed.")


# ------------------------------------------------------------------------------------------- what is sent


def to_bytes(data: Tree) -> TreeBytes:
    """A tree as arrays of bytes, which Ray does not copy."""
    leaves = []
    for path, t in tree.flatten(data).items():
        plain = t.detach().contiguous().reshape(-1)
        leaves.append((path, code_of(path, t), tuple(t.shape), plain.view(torch.uint8).numpy()))
    return leaves, tree.empty_paths(data)


def from_bytes(told: TreeBytes) -> Tree:
    """The tree, in memory of its own, where torch would have put it."""
    flat: dict[str, Tensor] = {}
    for path, code, shape, found in told[0]:
        t = torch.empty(shape, dtype=TYPES[code])
        if t.numel():
            t.view(-1).view(torch.uint8).numpy()[:] = found
        flat[path] = t
    return tree.unflatten(flat, told[1])


def count_bytes(told: TreeBytes) -> int:
    """How many bytes the leaves have."""
    return sum(found.nbytes for _, _, _, found in told[0])


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes an object apart; large tensors are put aside, and their numbers into the stream."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.aside: list[Bytes] = []
        self._numbers: dict[int, int] = {}
        self._held: list[Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        """How to rebuild a large tensor: it is the one of this number."""
        if type(obj) is not Tensor or not _worth_it(obj):
            return super().reducer_override(obj)
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.aside)
            self._held.append(obj)
            self.aside.append(obj.reshape(-1).view(torch.uint8).numpy())
        return _tensor, (self._numbers[id(obj)], tuple(obj.shape), obj.dtype)


def _worth_it(t: Tensor) -> bool:
    plain = t.layout is torch.strided and t.device.type == "cpu" and t.is_contiguous() and not t.requires_grad
    return plain and t.nbytes >= LARGE and not (t.is_conj() or t.is_neg() or t.__dict__)


_beside: list[Sequence[Bytes]] = []  # the arrays of the object that is being rebuilt


def _tensor(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor that is read where it lies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it must not be written to
        return torch.from_numpy(_beside[-1][number]).view(dtype).view(shape)


def placed(obj: Any) -> Any:
    """Put an object into the cluster's store, where every node fetches it once; a reference.

    Raises:
        ClusterError: if something of it belongs to this process.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(obj)
    except Exception as e:  # whatever an object of somebody's own raises when it is taken apart
        raise ClusterError(
            f"Cluster: method, model or loss cannot be sent to other machines ({type(e).__name__}: {e}); keep open"
            " files, locks and generators out of them."
        ) from None
    return the_ray().put((stream.getvalue(), pickler.aside))


def opened(reference: Any) -> Any:
    """The object again; its large tensors are those of the node's store, and must not be written to."""
    body, aside = the_ray().get(reference)
    _beside.append(aside)
    try:
        return cloudpickle.loads(body)
    finally:
        _beside.pop()
