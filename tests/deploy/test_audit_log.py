"""The audit log: what was written is found again, and whatever was done to it is noticed."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")
from fedspan.deploy.audit_log import FILE, FIRST, AuditError, AuditLog


def written(folder: Path, count: int = 5) -> AuditLog:
    log = AuditLog(folder)
    for i in range(count):
        log.append("round", {"round": i, "used": ["berlin", "paris"]}, "server")
    return log


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    log = written(tmp_path)
    entries = list(log.entries())
    assert [e.number for e in entries] == [1, 2, 3, 4, 5] and [e.facts["round"] for e in entries] == [0, 1, 2, 3, 4]
    assert entries[0].previous == FIRST and entries[1].previous == entries[0].hash
    assert log.verify() == (5, entries[-1].hash) == log.verify(entries[2].hash)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert log.append("revoked", {"node": "paris"}) == log.verify()[1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_one_changed_byte_anywhere_is_noticed(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / FILE
    if not path.exists():
        written(tmp_path)
        (tmp_path / "good").write_bytes(path.read_bytes())
    good = (tmp_path / "good").read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != good[at]))
    path.write_bytes(good[:at] + bytes([byte]) + good[at + 1 :])
    with pytest.raises(AuditError, match="Audit: line"):
        AuditLog(tmp_path).verify()


@pytest.mark.parametrize(
    ("name", "order"), [("cut", [0, 1, 3, 4]), ("begun late", [1, 2, 3]), ("moved", [0, 2, 1, 3]), ("twice", [0, 0, 1])]
)
def test_lines_taken_out_or_moved_are_noticed(tmp_path: Path, name: str, order: list[int]) -> None:
    log = written(tmp_path)
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[i] for i in order))
    with pytest.raises(AuditError, match="does not follow the line before it"):
        log.verify()


def test_a_cut_end_is_noticed_by_the_head_alone(tmp_path: Path) -> None:
    log = written(tmp_path)
    head = log.verify()[1]
    log.path.write_bytes(b"".join(log.path.read_bytes().splitlines(keepends=True)[:3]))
    assert log.verify()[0] == 3
    with pytest.raises(AuditError, match="was cut or begun anew"):
        log.verify(head)


def test_a_line_that_a_crash_broke_off_is_mended_and_said(tmp_path: Path) -> None:
    log = written(tmp_path, 2)
    with log.path.open("ab") as stream:
        stream.write(b'{"number": 3, "ti')
    with pytest.raises(AuditError, match=r"line 3 of .* is not complete; the next event"):
        log.verify()
    log.append("joined", {"node": "rome"})
    assert [e.event for e in log.entries()] == ["round", "round", "mended", "joined"]
    assert list(log.entries())[2].facts == {"cut": 17}


def test_a_damaged_last_line_is_not_written_after(tmp_path: Path) -> None:
    log = written(tmp_path, 2)
    good = log.path.read_bytes()
    for bad in (good + b"nonsense\n", good.replace(b'"round":1', b'"round":7'), good + b"[" * 100_000 + b"\n"):
        log.path.write_bytes(bad)
        with pytest.raises(AuditError, match="Audit: "):
            log.append("joined", {})
        assert log.path.read_bytes() == bad
    with pytest.raises(AuditError, match="cannot be read"):
        AuditLog(tmp_path / "none").verify()


def test_text_is_one_printable_line(tmp_path: Path) -> None:
    evil = "fine\nforged\x1b[2J\u202e" * 100
    log = AuditLog(tmp_path)
    log.append("refused", {"why": evil, evil: [evil, {"deep": evil}], "odd": 1.5})
    (entry,) = log.entries()
    assert all(s.isprintable() and len(s) <= 500 for s in (*entry.facts, entry.facts["why"]))
    assert len(log.path.read_bytes().splitlines()) == 1 and json.loads(log.path.read_bytes())["facts"]["odd"] == "1.5"


def _append_many(folder: Path) -> None:
    written(folder, 20)


def test_processes_take_turns(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    some = [context.Process(target=_append_many, args=(tmp_path,)) for _ in range(3)]
    for process in some:
        process.start()
    for process in some:
        process.join(60)
    assert AuditLog(tmp_path).verify()[0] == 60
