"""Every client's values at every evaluation of a run: `clients.npz`, beside the lines that have their means."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedspan.errors import FedspanError
from fedspan.storage.atomic import replacing

NAME = "clients.npz"
ROUND = "round"


class ClientHistory:
    """A table per measure: evaluations × clients, NaN where a client was not looked at or has no value."""

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self._rounds: list[int] = []
        self._rows: list[dict[str, NDArray[np.float64]]] = []
        self._written = 0

    def add(self, round: int, ids: Sequence[int], columns: Mapping[str, Sequence[float | None]]) -> None:
        """Add an evaluation; one of the same round is replaced."""
        row = {}
        for name, values in columns.items():
            row[name] = np.full(self.clients, np.nan)
            row[name][list(ids)] = [np.nan if v is None else v for v in values]
        if round in self._rounds:
            self._rows[self._rounds.index(round)] = row
        else:
            self._rounds.append(round)
            self._rows.append(row)
        self._written = -1

    def forget(self, last: int) -> None:
        """Forget evaluations after round `last`: they will be repeated."""
        kept = [k for k, r in enumerate(self._rounds) if r <= last]
        if len(kept) < len(self._rounds):
            self._rounds, self._rows = [self._rounds[k] for k in kept], [self._rows[k] for k in kept]
            self._written = -1

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """`round` [evaluations], and every measure [evaluations, clients]."""
        names = dict.fromkeys(name for row in self._rows for name in row)
        nothing = np.full(self.clients, np.nan)
        found: dict[str, NDArray[np.generic]] = {ROUND: np.array(self._rounds, np.int64)}
        return found | {name: np.stack([row.get(name, nothing) for row in self._rows]) for name in names}

    def save(self, directory: Path) -> None:
        """Write it whole, if there is something new.

        Raises:
            WriteError: if it cannot be written; what was there remains.
        """
        if self._written == len(self._rounds):
            return
        held = io.BytesIO()
        np.savez(held, **self.arrays())  # type: ignore[arg-type]
        with replacing(directory / NAME) as place:
            place.write_bytes(held.getvalue())
        self._written = len(self._rounds)

    def load(self, directory: Path, last: int) -> None:
        """Read what was written up to round `last`; later evaluations belong to rounds that will be repeated.

        Raises:
            FedspanError: in one sentence, if the file is damaged or of another federation.
        """
        path = directory / NAME
        if not path.exists():
            return
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
                arrays = {name: held[name] for name in held.files}
            rounds = arrays.pop(ROUND)
            kept = np.flatnonzero(rounds <= last)
            if any(a.shape != (len(rounds), self.clients) for a in arrays.values()):
                raise ValueError("shapes differ")
            self._rounds = [int(r) for r in rounds[kept]]
            self._rows = [{name: a[k].astype(np.float64) for name, a in arrays.items()} for k in kept]
            self._written = len(self._rounds) if len(kept) == len(rounds) else -1
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError):
            raise FedspanError(
                f"Metrics: {path} is damaged or of another run; the values of single clients begin anew."
            ) from None
