"""The files of a checkpoint: trees, client rows and manifests, each written whole or not at all, without pickle.

For tests, the environment variable FEDSPAN_FAULT kills this process (SIGKILL) at a point of a save: `after-tmp-write`,
`before-rename`, `between-rename-and-manifest` or `before-dir-fsync`. `POINT@NAME` waits for that file: the one being
written, and for the last two the manifest.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspan import tree
from fedspan.errors import CheckpointError
from fedspan.storage.atomic import fsync_directory
from fedspan.storage.format_number import FORMAT
from fedspan.tree import Outer, Tree

Block: TypeAlias = NDArray[np.uint8]
"""Records [n, width]."""
Places: TypeAlias = NDArray[np.int64]
RawFile: TypeAlias = io.FileIO

BLOCK_BYTES = 8 << 20  # rows are copied in pieces of this size, so that memory stays flat
SCHEMA = FORMAT  # of manifests and of what the checkpoints of a run hold
_MAX_HEADER = 16 << 20
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


def fault(point: str, name: str) -> None:
    if os.environ.get("FEDSPAN_FAULT") in (point, f"{point}@{name}"):
        os.kill(os.getpid(), signal.SIGKILL)


def write(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file that is either whole or not there, hashing on the way; the caller syncs the directory."""
    tmp = path.with_name(path.name + ".tmp")
    sha, size = hashlib.sha256(), 0
    try:
        tmp.unlink(missing_ok=True)
        with tmp.open("xb") as f:
            for chunk in chunks:
                f.write(chunk)
                sha.update(chunk)
                size += len(chunk)
            fault("after-tmp-write", path.name)
            f.flush()
            os.fsync(f.fileno())
        fault("before-rename", path.name)
        tmp.replace(path)
    except BaseException:
        with suppress(OSError):
            tmp.unlink(missing_ok=True)
        raise
    return {"bytes": size, "sha256": sha.hexdigest()}


def describe(t: Any, lead: int = 0) -> Any:
    """Keys, types and shapes of a tree as JSON: dict for dict, [a, b] for `Outer`, text for a tensor.

    `lead` leading axes are left out, so that a stacked tree can be compared with one row.
    """
    if isinstance(t, Outer):
        return [describe(t.a, lead), describe(t.b, lead)]
    if isinstance(t, dict):
        return {k: describe(v, lead) for k, v in t.items()}
    if not isinstance(t, Tensor):
        raise ValueError(f"tree: leaves must be tensors. Got {type(t).__name__}.")
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape[lead:])}"


def as_bytes(t: Tensor) -> Block:
    """The bytes of a tensor, without a copy where it is contiguous on the CPU."""
    t = t.detach().cpu().contiguous().reshape(-1)
    return np.asarray(t.view(torch.uint8).numpy()) if t.numel() else np.empty(0, np.uint8)


def safetensors_header(tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: dict[str, str]) -> bytes:
    """The head of a safetensors file whose data follow in the order of `tensors` (name, type, shape, bytes)."""
    head: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, dtype, shape, size in tensors:
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for data aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text


def _seal(structure: str, metadata: dict[str, str], digest: str) -> str:
    return hashlib.sha256(json.dumps([structure, sorted(metadata.items()), digest]).encode()).hexdigest()


def tree_chunks(t: Tree, metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    structure = json.dumps(describe(t))
    flat = tree.flatten(t)
    if len(flat) != len(tree.leaves(t)) or "__metadata__" in flat:
        raise ValueError("save_tree: the keys of the tree do not give different tensor names; rename them.")
    unfit = [f"{p} of {a.dtype}" for p, a in flat.items() if a.dtype not in _DTYPES]
    if unfit:
        raise ValueError(f"save_tree: tensors must be real numbers, integers or booleans. Got {unfit[0]}.")
    # Widest types first, as safetensors does, so that every tensor is aligned in the file.
    order = sorted(flat, key=lambda path: (-flat[path].element_size(), path))
    table = [(p, _DTYPES[flat[p].dtype], flat[p].shape, flat[p].nbytes) for p in order]
    seal = _seal(structure, metadata, tree.digest(t))
    yield safetensors_header(table, {**metadata, "structure": structure, "sha256": seal})
    for path in order:
        yield as_bytes(flat[path]).data


def save_tree(path: Path, t: Tree, metadata: dict[str, str] | None = None) -> None:
    """Write a tree as one safetensors file, atomically; its tensors are named by their paths (`outer/inner`).

    The structure (empty dicts, `Outer`) and a SHA-256 of everything go into the file's metadata.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    try:
        write(path, tree_chunks(t, metadata or {}))
        fsync_directory(path.parent)
    except OSError as e:
        raise CheckpointError(f"{path} could not be written: {e.strerror}. Free space or choose another place.") from e


def read_tree(path: Path) -> tuple[Tree, dict[str, str]]:
    """The tree and the metadata of a file that `save_tree` wrote; the file is not trusted.

    Raises:
        CheckpointError: if the file is missing, damaged or was not written by `save_tree`.
    """
    try:
        data = path.read_bytes()
        flat: dict[str, Tensor] = safetensors.torch.load(data)  # checks the header against the data
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        structure, seal = metadata.pop("structure"), metadata.pop("sha256")

        def build(part: Any, at: str) -> Any:
            if isinstance(part, dict):
                return {k: build(v, f"{at}/{k}" if at else k) for k, v in part.items()}
            return flat[at] if isinstance(part, str) else Outer(flat[f"{at}//a"], flat[f"{at}//b"])

        t: Tree = build(json.loads(structure), "")
        if describe(t) != json.loads(structure) or len(tree.leaves(t)) != len(flat):
            raise ValueError("its tensors are not those of its structure")
        if seal != _seal(structure, metadata, tree.digest(t)):
            raise ValueError("its contents do not match their SHA-256")
    except Exception as e:  # an untrusted file: whatever goes wrong, it is this file's fault
        why = e.strerror if isinstance(e, OSError) else str(e) or type(e).__name__
        raise CheckpointError(f"{path.name} cannot be read as a tree of tensors: {why}.") from e
    return t, metadata


def load_tree(path: Path) -> Tree:
    """The tree of a file that `save_tree` wrote (see `read_tree`)."""
    return read_tree(path)[0]


def segment_header(n: int, width: int, structure: str) -> bytes:
    tensors = [("ids", "I64", [n], 8 * n), ("rows", "U8", [n, width], n * width)]
    return safetensors_header(tensors, {"structure": structure})


def read_at(file: RawFile, out: Block, offset: int, name: str) -> None:
    """Fill `out` with what an unbuffered file has at an offset (`os.preadv` is Linux's alone)."""
    file.seek(offset)
    if file.readinto(out.data) != out.nbytes:
        raise CheckpointError(f"Client store: {name} ended early; it was truncated while in use. Resume the run.")


@contextmanager
def _reading(path: Path) -> Iterator[RawFile]:
    try:
        with path.open("rb", buffering=0) as f:
            yield f
    except OSError as e:
        raise CheckpointError(f"Client store: {path.name} cannot be read: {e.strerror}. Resume the run.") from e


@dataclass(frozen=True, eq=False)
class Segment:
    """An immutable file of records: row k of `path` is the state of client `ids[k]`."""

    path: Path
    ids: Places
    offset: int
    width: int
    structure: str

    @classmethod
    def open(cls, path: Path) -> Segment:
        """Read the head of a segment file.

        Raises:
            CheckpointError: if it is not exactly such a file.
        """
        try:
            with path.open("rb") as f:
                size = int.from_bytes(f.read(8), "little")
                if size > _MAX_HEADER:
                    raise ValueError("its header is too long")
                head = json.loads(f.read(size))
                (n, width), structure = head["rows"]["shape"], head["__metadata__"]["structure"]
                expected = segment_header(n, width, structure)
                f.seek(0)
                # Comparing with what we would have written checks every field of the header at once.
                if f.read(len(expected)) != expected or path.stat().st_size != len(expected) + n * (8 + width):
                    raise ValueError("its header does not describe its contents")
                ids = np.frombuffer(f.read(8 * n), "<i8").astype(np.int64)
            if len(np.unique(ids)) != n:
                raise ValueError("it names a client twice")
        except Exception as e:  # an untrusted file: whatever goes wrong, it is this file's fault
            raise CheckpointError(f"Client store: {path.name} is not a file of client rows: {e}.") from e
        return cls(path, ids, len(expected) + 8 * n, width, structure)

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return len(self.ids) * self.width

    def read(self, places: Places, out: Block, to: Places) -> None:
        """Copy rows `places` of the file to rows `to` of `out`."""
        with _reading(self.path) as file:
            for place, k in zip(places.tolist(), to.tolist()):
                read_at(file, out[k], self.offset + place * self.width, self.path.name)

    def blocks(self) -> Iterator[tuple[slice, Block]]:
        """All rows in order, a few MiB at a time."""
        step = max(1, BLOCK_BYTES // max(1, self.width))
        with _reading(self.path) as file:
            for start in range(0, len(self.ids), step):
                part = slice(start, min(start + step, len(self.ids)))
                block = np.empty((part.stop - start, self.width), np.uint8)
                read_at(file, block, self.offset + start * self.width, self.path.name)
                yield part, block


def text(body: Any) -> str:
    """Canonical JSON."""
    return json.dumps(body, sort_keys=True, indent=1)


def render(body: dict[str, Any]) -> bytes:
    """The exact bytes of a manifest: canonical JSON with the SHA-256 of the rest of it."""
    return text({**body, "sha256": hashlib.sha256(text(body).encode()).hexdigest()}).encode() + b"\n"


class TooNew(CheckpointError):
    """Nothing is wrong with the files, so falling back would only lose rounds."""


class TooOld(CheckpointError):
    """Nothing is wrong with the files, but they are of a layout that is not read any more."""


def read_manifest(directory: Path, g: int) -> dict[str, Any]:
    """Generation g's manifest, if every byte of it is right.

    Raises:
        CheckpointError: if it is not; `TooNew` or `TooOld` if only this fedspan is too old or too new for it.
    """
    name = f"manifest-{g}.json"
    try:
        raw = (directory / name).read_bytes()
        body: dict[str, Any] = json.loads(raw)
        del body["sha256"]
        if render(body) != raw:
            raise ValueError
    except Exception as e:  # an untrusted file: whatever goes wrong, it is this file's fault
        raise CheckpointError(f"{name} is damaged or does not match its SHA-256") from e
    schema = body.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise TooNew(
            f"Checkpoint: generation {g} of {directory} was written by a newer fedspan (schema {schema}, this one "
            f"reads {SCHEMA}). Update fedspan, or start over with --fresh."
        )
    if schema is None or (type(schema) is int and schema < SCHEMA):
        raise TooOld(
            f"Run directory {directory} has the layout of an older fedspan (schema {schema or 'without a number'}, this"
            f" one reads {SCHEMA}). Start anew with --fresh, or choose another directory with --out."
        )
    if schema != SCHEMA:
        raise CheckpointError(f"{name} has the unknown schema version {schema!r} (this fedspan reads {SCHEMA})")
    kinds = {"generation": int, "base": int, "round": int, "metrics_length": int, "run": str, "identity": dict,
             "extra": dict, "files": dict, "stores": list}  # fmt: skip
    wrong = [k for k, kind in kinds.items() if type(body.get(k)) is not kind]
    if wrong or body["generation"] != g or not all(isinstance(names, list) for names in body["stores"]):
        raise CheckpointError(f"{name} is not the manifest of generation {g}")
    return body
