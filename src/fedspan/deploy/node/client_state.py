"""A node's personal state on its own disk: whole or not there, with its round, readable by its owner only.

It is kept per experiment and lineage. A **lineage** begins when a server starts an experiment from nothing; a server
that resumes keeps it. So a node that comes back finds its state, and one whose server started over begins anew.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from fedspan.errors import ConfigError, safe_name
from fedspan.storage.checkpoint import RunDirectory
from fedspan.tree import Tree


@dataclass(frozen=True)
class Held:
    """What a node holds: its row, the common state, how many announcements are in it, and the last round it trained."""

    row: Tree
    common: Tree
    heard: int
    round: int
    ahead: bool = False


class Personal:
    """The state of one client of one experiment; use it as a context manager, which locks it."""

    def __init__(self, root: Path, name: str, key: str, lineage: str, client: int) -> None:
        if not lineage.isalnum() or len(lineage) > 64:
            raise ConfigError(f"Node: a lineage must be up to 64 letters and digits. Got {lineage[:80]!r}.")
        self.path = root / f"{safe_name(name[:40], 'Node: the experiment')}-{key}-{lineage[:12]}-{client}"
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.path, 0o700)
        self._directory: RunDirectory | None = None
        self._identity = {"experiment": key, "lineage": lineage, "client": client}

    def __enter__(self) -> Personal:
        self._directory = RunDirectory(self.path, self._identity)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        if self._directory is not None:
            self._directory.close()
        self._directory = None

    @property
    def directory(self) -> RunDirectory:
        """The open directory."""
        assert self._directory is not None, "Personal: enter it first"
        return self._directory

    def load(self, before: int) -> Held | None:
        """The state before round `before`; None if there is none yet.

        A server that was set back asks for a round again: the node then goes back with it, as far as it remembers.
        Beyond that it goes on from what it has, and says that it is `ahead`.
        """
        loaded = self.directory.load()
        ahead = False
        if loaded is not None and loaded.round >= before:
            ahead = not self.directory.forget_from(before)
            loaded = self.directory.load()
        if loaded is None:
            return None
        s = loaded.server
        return Held(s["row"], s["common"], int(loaded.extra["heard"]), loaded.round, ahead)

    def save(self, held: Held) -> None:
        """Keep a state; on any error the one before remains."""
        self.directory.save(held.round, {"row": held.row, "common": held.common}, extra={"heard": held.heard})
