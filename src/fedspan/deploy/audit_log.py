"""The audit log of a federation: one JSON line per event, each with the hash of the line before, only ever appended to.

A line that was edited, moved or taken out breaks the chain, and `verify` says where. Whoever can write the file can
write a new chain too, or cut its end: against that the last hash, the **head**, is kept elsewhere and compared.
"""

from __future__ import annotations

import datetime
import getpass
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Le
from pydantic import AwareDatetime, Field, ValidationError

from fedspan.deploy.envelope import printable
from fedspan.deploy.server.answers import MOST, CheckedFacts, Word, describe_fault
from fedspan.errors import FedspanError
from fedspan.storage.atomic import fsync_directory, writing
from fedspan.storage.lock import exclusive

FILE = "audit.jsonl"
FIRST = "0" * 64
"""What the first line has for the hash of the line before."""

MOST_LINE = 1 << 18
"""Bytes of a line that are read at all."""

Event: TypeAlias = Literal["made", "admitted", "renewed", "revoked", "joined", "refused", "round", "mended"]
Hash: TypeAlias = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


class AuditError(FedspanError):
    """An audit log does not hold what was written to it."""


class AuditEntry(CheckedFacts):
    """One line."""

    number: Annotated[int, Ge(1), Le(MOST)]
    time: AwareDatetime
    by: Word
    """The user of the command, or the server."""
    event: Event
    facts: dict[str, Any]
    previous: Hash
    hash: Hash


class AuditLog:
    """The log in a server's folder; several processes may append to it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def append(self, event: Event, facts: Mapping[str, Any], by: str | None = None) -> str:
        """Add an event, durably; its hash. Text is cleaned, since some of it comes from nodes.

        Raises:
            AuditError: if the last line is none that was written here.
            WriteError: if it cannot be written.
        """
        with exclusive(self.path.with_suffix(".lock"), "Audit"), writing(self.path):
            last, torn = self._tail()
            if torn:  # a crash while a line was written, of which nobody was told that it was
                os.truncate(self.path, self.path.stat().st_size - torn)
                last = self._write(last, "mended", "audit", {"cut": torn})
            return self._write(last, event, by or _user(), facts).hash

    def entries(self) -> Iterator[AuditEntry]:
        """All lines, each checked against the one before.

        Raises:
            AuditError: at the first that is not what was written.
        """
        number, previous = 0, FIRST
        try:
            stream = self.path.open("rb")
        except OSError as e:
            raise AuditError(f"Audit: {self.path} cannot be read: {e.strerror}.") from None
        with stream:
            while raw := stream.readline(MOST_LINE + 1):
                number += 1
                entry = self._parsed(raw, number)
                if entry.previous != previous or entry.number != number:
                    raise AuditError(
                        f"Audit: line {number} of {self.path} does not follow the line before it: one was taken out,"
                        " moved or edited."
                    )
                previous = entry.hash
                yield entry

    def verify(self, head: str | None = None) -> tuple[int, str]:
        """How many lines there are, and the last hash; all of them are as they were written.

        Args:
            head: a hash that was noted earlier, which must be among them; otherwise the log was cut or begun anew.

        Raises:
            AuditError: if not.
        """
        count, last, seen = 0, FIRST, head in (None, FIRST)
        for entry in self.entries():
            count, last = entry.number, entry.hash
            seen |= last == head
        if not seen:
            raise AuditError(
                f"Audit: {self.path} does not hold the hash {printable(str(head), 64)}: it was cut or begun anew."
            )
        return count, last

    def _parsed(self, raw: bytes, number: int) -> AuditEntry:
        where = f"line {number} of {self.path}"
        if len(raw) > MOST_LINE or not raw.endswith(b"\n"):
            why = "is too long" if len(raw) > MOST_LINE else "is not complete; the next event that is written mends it"
            raise AuditError(f"Audit: {where} {why}.")
        try:
            entry = AuditEntry.model_validate_json(raw)
        except ValidationError as e:
            raise AuditError(f"Audit: {where} is damaged: {describe_fault(e)}") from None
        except RecursionError:
            raise AuditError(f"Audit: {where} is damaged: it is nested too deeply.") from None
        body = json.loads(raw)
        body.pop("hash")
        if entry.hash != _hash(body) or raw != _line({**body, "hash": entry.hash}):
            raise AuditError(f"Audit: {where} was edited: its hash is another one.")
        return entry

    def _tail(self) -> tuple[AuditEntry | None, int]:
        """The last whole line, and how many bytes of a broken one follow it."""
        if not self.path.exists():
            return None, 0
        with self.path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - 2 * MOST_LINE))
            end = stream.read()
        whole, torn = end[: end.rfind(b"\n") + 1], len(end) - end.rfind(b"\n") - 1
        if not whole:
            return None, torn
        raw = whole[whole.rfind(b"\n", 0, -1) + 1 :]
        try:
            number = int(json.loads(raw)["number"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise AuditError(f"Audit: the last line of {self.path} is damaged. Put the file aside.") from None
        return self._parsed(raw, number), torn

    def _write(self, last: AuditEntry | None, event: Event, by: str, facts: Mapping[str, Any]) -> AuditEntry:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        body = {"number": 1 if last is None else last.number + 1, "time": now, "by": printable(by, 100)}
        body |= {"event": event, "facts": _clean(facts), "previous": FIRST if last is None else last.hash}
        whole = {**body, "hash": _hash(body)}
        line = _line(whole)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(fd, "wb") as stream:
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        if last is None:
            fsync_directory(self.path.parent)
        return AuditEntry.model_validate_json(line)


def _clean(value: Any) -> Any:
    """The value with texts as printable lines; what is no plain value becomes text."""
    if isinstance(value, Mapping):
        return {printable(str(k), 100): _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(v) for v in value]
    return value if value is None or isinstance(value, (bool, int)) else printable(str(value))


def _line(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_line(body)).hexdigest()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
