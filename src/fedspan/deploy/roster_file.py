"""The places of a federation, `roster.json`: who sits where, with which key, until when. Runs read it anew.

The number of clients is the number of places. A place that nobody has taken is a client that never answers; a place
whose node was revoked stays so, as a method's state may hold that client's share.
"""

from __future__ import annotations

import datetime
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import torch
from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import AwareDatetime, Field, ValidationError, model_validator

from fedspan.deploy.server.answers import CheckedFacts, describe_fault
from fedspan.deploy.server.exchange import Roster
from fedspan.errors import ConfigError
from fedspan.storage.atomic import write_atomic
from fedspan.storage.lock import exclusive
from fedspan.storage.toml import read_small

FILE = "roster.json"
MOST_PLACES = 1000
NOBODY = 0
"""Where no node is: Flower gives this number to none."""

NodeName: TypeAlias = Annotated[str, Field(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\z")]
PublicKey: TypeAlias = Annotated[str, Field(pattern=r"\Aecdsa-sha2-nistp384 [A-Za-z0-9+/=]{100,400}\z")]
Number: TypeAlias = Annotated[int, Ge(1), Le(2**64 - 1)]


class Place(CheckedFacts):
    """One client's place."""

    id: Annotated[str, Field(pattern=r"\A[0-9a-f]{1,32}\z")]
    """By which a run knows the place again, whoever sits there."""
    state: Literal["empty", "admitted", "revoked"] = "empty"
    name: NodeName | None = None
    public_key: PublicKey | None = None
    node: Number | None = None
    """Its number with Flower; none before its key is registered."""
    expires: AwareDatetime | None = None

    @model_validator(mode="after")
    def _whole(self) -> Place:
        known = [self.name is not None, self.public_key is not None, self.expires is not None]
        if any(known) != all(known) or (self.state == "empty") == all(known):
            raise ValueError("a place must be empty, or have a name, a key and a date")
        return self


class Places(CheckedFacts):
    """All places, in the order of the clients' numbers."""

    format: Literal[1] = 1
    federation: Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
    places: Annotated[list[Place], MinLen(1), MaxLen(MOST_PLACES)]
    past_keys: Annotated[list[PublicKey], MaxLen(100_000)] = []
    """Keys that were revoked or replaced, and never come back."""
    unregister: Annotated[list[Number], MaxLen(100_000)] = []
    """Numbers that Flower has still to be told to forget."""

    @model_validator(mode="after")
    def _distinct(self) -> Places:
        for kind in ("id", "name", "public_key", "node"):
            held = [value for p in self.places if (value := getattr(p, kind)) is not None]
            if len(set(held)) != len(held):
                raise ValueError(f"no two places may have the same {kind}")
        return self

    def find(self, name: str) -> int | None:
        """The number of the place with this name, revoked or not."""
        return next((i for i, p in enumerate(self.places) if p.name == name), None)

    def free(self) -> int | None:
        """The first place that nobody has taken."""
        return next((i for i, p in enumerate(self.places) if p.state == "empty"), None)

    def replaced(self, i: int, place: Place, **changes: object) -> Places:
        """The same with another place i, and other changes."""
        places = [*self.places[:i], place, *self.places[i + 1 :]]
        return Places.model_validate({**dict(self), "places": places, **changes})

    def roster(self, groups: Sequence[int] | None = None, now: datetime.datetime | None = None) -> Roster:
        """Which node is which client, as far as there is one now."""
        now = now or datetime.datetime.now(datetime.UTC)
        absent = {i: why for i, p in enumerate(self.places) if (why := _absent(p, now))}
        return Roster(
            tuple(NOBODY if i in absent else p.node or NOBODY for i, p in enumerate(self.places)),
            tuple(p.name or f"place-{i}" for i, p in enumerate(self.places)),
            None if groups is None else torch.tensor(list(groups), dtype=torch.int64),
            tuple(p.id for p in self.places),
            absent,
        )


def _absent(place: Place, now: datetime.datetime) -> str | None:
    """Why nobody answers from a place, if so."""
    if place.state == "empty":
        return "its place is empty"
    if place.state == "revoked":
        return "its node is revoked"
    if place.expires is not None and place.expires <= now:
        return f"its key has expired on {place.expires:%Y-%m-%d}"
    return "its key is not registered yet" if place.node is None else None


def empty_places(count: int) -> Places:
    """A federation that nobody has joined yet."""
    return Places(federation=uuid.uuid4().hex, places=[Place(id=uuid.uuid4().hex) for _ in range(count)])


def read_places(server: Path) -> Places:
    """The places in a server's folder.

    Raises:
        ConfigError: if the file cannot be read, or is none that was written here.
    """
    raw = read_small(server / FILE, "Deploy")
    try:
        return Places.model_validate_json(raw)
    except ValidationError as e:
        raise ConfigError(f"Deploy: {server / FILE} is damaged: {describe_fault(e)} Restore it from a copy.") from None


def write_places(server: Path, places: Places) -> None:
    """Write the places, whole or not at all."""
    write_atomic(server / FILE, places.model_dump_json(indent=1) + "\n")
    os.chmod(server / FILE, 0o600)


@contextmanager
def changing_places(server: Path) -> Iterator[Places]:
    """The places for a change that no other command may interrupt."""
    with exclusive(server / "roster.lock", "Deploy"):
        yield read_places(server)


class LiveRoster:
    """The roster as it is now: the file is read again when it has changed, so that a running server learns of it."""

    def __init__(self, server: Path, groups: Sequence[int] | None = None) -> None:
        self.server, self.groups = server, groups
        self._seen: tuple[int, int, int] | None = None
        self._places: Places | None = None

    def __call__(self) -> Roster:
        try:
            found = os.stat(self.server / FILE)
        except OSError as e:
            raise ConfigError(f"Deploy: {self.server / FILE} cannot be read: {e.strerror}.") from None
        seen = found.st_mtime_ns, found.st_size, found.st_ino
        if self._places is None or seen != self._seen:
            self._places, self._seen = read_places(self.server), seen
        return self._places.roster(self.groups)
