"""Checkpoints of a run directory: immutable hashed files, written atomically, without pickle.

A checkpoint (**generation** G) is `server-G.safetensors` (the server's tree), `rows-G-k.safetensors` (private states of
capacity group k: all touched clients, a **base**, or only those changed since the last save) and, written last,
`manifest-G.json`, which names every file it needs with size and SHA-256 and must itself be byte for byte what we would
write. So a generation is either whole or not used, and whatever is wrong with it, the one before is tried.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedspan
from fedspan import tree
from fedspan.errors import CheckpointError, Divergence
from fedspan.storage import tree_file
from fedspan.storage.atomic import fsync_directory, make_directory
from fedspan.storage.client_store import ClientStore
from fedspan.storage.lock import Lock
from fedspan.storage.tree_file import Segment, TooNew, TooOld, load_tree, read_manifest, render, text
from fedspan.tree import Tree

KEEP = 3
SMALL_BYTES = 32 << 20  # up to here every save writes all rows: simpler files, and it costs little
MAX_SEGMENTS = 512  # of one chain, so that manifests stay short

_FILE = re.compile(r"(?:(server)-(\d{1,18})|(rows)-(\d{1,18})-\d{1,6})\.safetensors|(manifest)-(\d{1,18})\.json")


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds. Give `rows[k]` to `ClientStore.restore` of capacity group k."""

    generation: int
    round: int
    server: Tree
    rows: list[list[Segment]]
    extra: dict[str, Any]
    metrics_length: int
    identity: dict[str, Any]


class RunDirectory:
    """The checkpoints of one run.

    Args:
        path: the directory; made if missing.
        identity: the flattened configuration, key → JSON value. A checkpoint of another identity is refused. None (only
            with `read_only`) accepts any.
        read_only: look at a run, also one in progress: takes no lock, changes nothing, cannot save.

    Attributes:
        warnings: one sentence for every fault the last `load` met.
    """

    def __init__(self, path: Path, identity: dict[str, Any] | None, read_only: bool = False) -> None:
        if identity is None and not read_only:
            raise ValueError("RunDirectory: a run that saves needs an identity. Got None.")
        self.path = path
        self.read_only = read_only
        self.identity: dict[str, Any] | None = json.loads(json.dumps(identity))
        self.warnings: list[str] = []
        self._run = uuid.uuid4().hex
        self._manifests: dict[int, dict[str, Any]] = {}  # generations worth keeping
        self._loaded = False
        self._lock: Lock | None = None
        if read_only:
            return
        try:
            make_directory(path)
            self._lock = Lock(path)
            for stale in [*path.glob("scratch-*.tmp"), *path.glob("*-*.safetensors.tmp"), *path.glob("manifest-*.tmp")]:
                stale.unlink()
        except OSError as e:
            self.close()
            raise CheckpointError(f"Run directory {path} cannot be used: {e.strerror}. Choose another.") from e

    def close(self) -> None:
        """Release the directory."""
        if self._lock is not None:
            self._lock.close()
        self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, fresh: bool = False) -> Loaded | None:
        """The newest generation that is whole, or None if there is none yet; `fresh` first removes all generations.

        Raises:
            CheckpointError: if there are checkpoints but none can be used, or they are of another configuration, or of
                a newer or an older fedspan.
        """
        self.warnings, self._manifests, self._loaded = [], {}, True
        if fresh and not self.read_only:
            self._remove(self._files())
        numbers = sorted((g for kind, g in self._files().values() if kind == "manifest"), reverse=True)
        loaded: Loaded | None = None
        foreign: list[str] = []
        for g, older in zip(numbers, [*numbers[1:], None]):
            try:
                body = read_manifest(self.path, g)
                differ = self._differing(body["identity"])
                if differ:
                    foreign = foreign or differ
                    raise CheckpointError(f"it is of another configuration ({_few(differ)})")
                if loaded is None:
                    loaded = self._open(body)
                    self._run = str(body["run"])
                self._manifests[g] = body
            except (TooNew, TooOld):
                raise
            except CheckpointError as e:
                if loaded is None:
                    then = f"Falling back to generation {older}." if older is not None else "There is no older one."
                    why = str(e).rstrip(".")
                    self.warnings.append(f"Checkpoint: generation {g} of {self.path} cannot be used: {why}. {then}")
        if numbers and loaded is None:
            if foreign:
                raise CheckpointError(
                    f"Run directory {self.path} was made with another configuration: {_few(foreign)}. "
                    "Use the same values, choose another directory, or start over with --fresh."
                )
            raise CheckpointError(
                f"Run directory {self.path}: none of its {len(numbers)} checkpoints can be used "
                f"({self.warnings[0].split('cannot be used: ')[1].split('. ')[0]}). Start over with --fresh."
            )
        return loaded

    def forget_from(self, round: int) -> bool:
        """Drop the generations of this round and later, so that `load` finds the state before it.

        False, and nothing changed, where no whole manifest of an earlier round is left.
        """
        rounds: dict[int, int] = {}
        for kind, g in self._files().values():
            with suppress(CheckpointError):
                if kind == "manifest":
                    rounds[g] = read_manifest(self.path, g)["round"]
        if self.read_only or not any(r < round for r in rounds.values()):
            return False
        self._remove(f"manifest-{g}.json" for g, r in rounds.items() if r >= round)
        self._loaded = False
        return True

    def save(
        self,
        round: int,
        server: Tree,
        stores: Sequence[ClientStore] = (),
        extra: dict[str, Any] | None = None,
        metrics_length: int = 0,
    ) -> int:
        """Write a new generation and return its number; on any error the ones before remain.

        Args:
            round: rounds done.
            server: the server's state.
            stores: one per capacity group, always in the same order.
            extra: anything JSON holds (totals, ...), given back by `load` as JSON gives it back.
            metrics_length: bytes of the metrics file that belong to these rounds.

        Raises:
            Divergence: if a state holds NaN or infinity.
            CheckpointError: if the files cannot be written.
        """
        files = self._files()
        if self.read_only or (not self._loaded and any(kind == "manifest" for kind, _ in files.values())):
            raise CheckpointError(f"Run directory {self.path}: load() it, not read-only, before saving to it.")
        g = 1 + max((number for _, number in files.values()), default=0)
        newest = max(self._manifests, default=None)
        remains = f"Generation {newest} remains." if newest is not None else "There is no older generation."
        written: list[str] = []
        try:
            if not tree.all_finite(server):
                raise Divergence("the server's state holds NaN or infinity")
            before = self._manifests.get(newest or 0, {"files": {}, "stores": [], "base": g})
            base = self._needs_base(stores, before)
            entries: dict[str, Any] = {}
            name = f"server-{g}.safetensors"
            written.append(name)
            entries[name] = tree_file.write(self.path / name, tree_file.tree_chunks(server, {}))
            new: list[Segment | None] = []
            for k, store in enumerate(stores):
                entries |= {} if base else {s.path.name: before["files"][s.path.name] for s in store.segments}
                ids = store.touched_ids() if base else store.changed_ids()
                name = f"rows-{g}-{k}.safetensors"
                if ids:
                    written.append(name)
                    entries[name] = tree_file.write(self.path / name, store.segment_chunks(ids))
                new.append(Segment.open(self.path / name) if ids else None)
            fsync_directory(self.path)
            tree_file.fault("between-rename-and-manifest", f"manifest-{g}.json")
            lists = [[*([] if base else store.segments), last] for store, last in zip(stores, new)]
            body = {
                "schema": tree_file.SCHEMA, "generation": g, "base": g if base else before["base"],
                "round": round, "run": self._run, "identity": self.identity,
                "identity_sha256": hashlib.sha256(text(self.identity).encode()).hexdigest(),
                "versions": {"fedspan": fedspan.__version__, "python": platform.python_version(),
                             "torch": torch.__version__, "numpy": np.__version__},
                "stores": [[s.path.name for s in names if s] for names in lists], "files": entries,
                "extra": extra or {}, "metrics_length": metrics_length,
            }  # fmt: skip
            body = json.loads(json.dumps(body))  # as it will be read: text keys, lists
            written.append(f"manifest-{g}.json")
            tree_file.write(self.path / written[-1], [render(body)])
            tree_file.fault("before-dir-fsync", written[-1])
            fsync_directory(self.path)
        except BaseException as e:
            self._remove(reversed(written))
            what = f"Checkpoint: generation {g} of {self.path} was not written:"
            if isinstance(e, Divergence):
                raise Divergence(f"{what} {e}. {remains} Lower the learning rate.") from None
            if isinstance(e, OSError):
                raise CheckpointError(f"{what} {e.strerror}. {remains} Free space and run again.") from e
            raise
        self._manifests[g], self._loaded = body, True
        for store, segment in zip(stores, new):
            if segment is not None:
                store.saved(segment, base)
        self._prune()
        return g

    @staticmethod
    def _needs_base(stores: Sequence[ClientStore], before: dict[str, Any]) -> bool:
        """Whether to write all touched rows: no chain to extend, or writing them all is cheap or due."""
        total = sum(len(s.touched_ids()) * s.row_bytes for s in stores)
        changed = sum(len(s.changed_ids()) * s.row_bytes for s in stores)
        old = [segment for s in stores for segment in s.segments]
        # A store that was not restored from the newest generation cannot be saved as changes to it.
        restored = [s.path.name for s in old] == list(chain.from_iterable(before["stores"]))
        if total <= SMALL_BYTES or changed == total or not restored:
            return True
        bases = sum(s.nbytes for s in old if s.path.name.startswith(f"rows-{before['base']}-"))
        return sum(s.nbytes for s in old) - bases + changed > bases or len(old) + len(stores) > MAX_SEGMENTS

    def _files(self) -> dict[str, tuple[str, int]]:
        """Our files in the directory: name → (kind, generation)."""
        found: dict[str, tuple[str, int]] = {}
        for path in self.path.iterdir() if self.path.is_dir() else ():
            match = _FILE.fullmatch(path.name)
            if match:
                kind, number = (x for x in match.groups() if x is not None)
                found[path.name] = kind, int(number)
        return found

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files, manifests first, so that no manifest is left without its files."""
        for name in sorted(names, key=lambda n: not n.startswith("manifest")):
            with suppress(OSError):  # one that stays only costs space, and is tried again
                (self.path / name).unlink(missing_ok=True)

    def _prune(self) -> None:
        """Keep the newest generations and, as a base serves a whole chain, the last one that needs another base."""
        newest = sorted(self._manifests, reverse=True)
        base = self._manifests[newest[0]]["base"]
        keep = {*newest[:KEEP], *[g for g in newest if self._manifests[g]["base"] != base][:1]}
        self._manifests = {g: m for g, m in self._manifests.items() if g in keep}
        named = {f"manifest-{g}.json" for g in keep}.union(*(m["files"] for m in self._manifests.values()))
        self._remove(name for name in self._files() if name not in named)

    def _differing(self, identity: dict[str, Any]) -> list[str]:
        """`key: there, here` for every key whose value is not ours."""
        if self.identity is None:
            return []
        keys = sorted({*identity, *self.identity})
        shown = [(k, *(text(d[k]) if k in d else "nothing" for d in (identity, self.identity))) for k in keys]
        return [f"{k} is {there} there and {here} here" for k, there, here in shown if there != here]

    def _open(self, body: dict[str, Any]) -> Loaded:
        """Check every file a manifest names, then read them."""
        g = body["generation"]
        server = f"server-{g}.safetensors"
        for name in [server, *chain.from_iterable(body["stores"])]:
            entry = body["files"].get(name) if isinstance(name, str) and _FILE.fullmatch(name) else None
            if not isinstance(entry, dict):
                raise CheckpointError(f"manifest-{g}.json does not list {name!r} properly")
            try:
                with (self.path / name).open("rb") as f:
                    size = os.fstat(f.fileno()).st_size
                    if size != entry.get("bytes"):
                        raise CheckpointError(f"{name} has {size} bytes instead of {entry.get('bytes')}")
                    if hashlib.file_digest(f, "sha256").hexdigest() != entry.get("sha256"):
                        raise CheckpointError(f"{name} does not match its SHA-256")
            except OSError as e:
                raise CheckpointError(f"{name} cannot be read: {e.strerror}") from e
        rows = [[Segment.open(self.path / name) for name in names] for names in body["stores"]]
        facts = {k: body[k] for k in ("generation", "round", "extra", "metrics_length", "identity")}
        return Loaded(server=load_tree(self.path / server), rows=rows, **facts)


def _few(items: Sequence[str]) -> str:
    return "; ".join(items[:5]) + (f"; and {len(items) - 5} more" if len(items) > 5 else "")


def recorded_identity(path: Path) -> dict[str, Any]:
    """What the newest readable generation says its run belongs to; empty if there is none."""
    numbers = (_FILE.fullmatch(p.name) for p in path.glob("manifest-*.json"))
    for g in sorted((int(m[6]) for m in numbers if m is not None and m[6]), reverse=True):
        with suppress(CheckpointError):
            found: dict[str, Any] = read_manifest(path, g)["identity"]
            return found
    return {}
