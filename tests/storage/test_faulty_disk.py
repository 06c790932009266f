"""A disk that fails at any moment: one sentence, nothing lost, and the same bits afterwards."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from fedspan.errors import FedspanError, WriteError
from fedspan.storage import atomic
from fedspan.storage.atomic import replacing, write_atomic

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from faulty_disk import FaultyDisk, PowerCut
from runs import play, rounds_done

SPEC: dict[str, Any] = {"rounds": 3, "clients": 4, "hidden": 4, "settings": {"workers": 1, "epochs": 1}}
KINDS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "power": None, "power, names lost": None}


@pytest.fixture(scope="module")
def whole() -> str:
    return play(None, SPEC).digest


def changes(root: Path) -> int:
    """How many changes of the disk an undisturbed run makes."""
    root.mkdir()
    with FaultyDisk(root).attached() as disk:
        play(root / "run", SPEC)
    return disk.changes


def disturbed(root: Path, kind: str, at: int, whole: str) -> None:
    """Fail at one change, then go on with a disk that works."""
    root.mkdir()
    told: list[int] = []
    disk = FaultyDisk(root, at, KINDS[kind])
    expected: type[BaseException] = PowerCut if KINDS[kind] is None else FedspanError
    try:
        with disk.attached():
            play(root / "run", SPEC, lambda line: told.append(line["round"]))
    except expected as e:
        said = str(e)
    else:  # only what cleans up may fail without a word
        assert kind in ("EIO", "ENOSPC")
        said = "."
    assert kind.startswith("power") or ("\n" not in said and said.endswith(".")), said
    if disk.dead:
        disk.lose(names="names" in kind)
    for path in (root / "run").glob("result.json"):
        json.loads(path.read_text())
    kept = rounds_done(root / "run") if (root / "run" / "checkpoints").is_dir() else 0
    assert kept >= max(told, default=0), "a round that was reported is gone"
    again = play(root / "run", SPEC)
    assert again.digest == whole
    assert [line["round"] for line in again.curve] == [1, 2, 3]
    assert not list((root / "run").rglob("*.tmp"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_disk_that_fails_now_and_then(kind: str, whole: str, tmp_path: Path) -> None:
    total = changes(tmp_path / "count")
    for at in sorted({1, 2, 3, *range(5, total + 1, 9), total - 2, total - 1, total}):
        disturbed(tmp_path / str(at), kind, at, whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_a_disk_that_fails_at_any_change(kind: str, whole: str, tmp_path: Path) -> None:
    for at in range(1, changes(tmp_path / "count") + 1):
        disturbed(tmp_path / str(at), kind, at, whole)


@pytest.mark.parametrize("names", [False, True])
def test_a_small_file_is_old_or_new_wherever_the_power_goes(names: bool, tmp_path: Path) -> None:
    seen = set()
    for at in range(1, 10):
        root = tmp_path / str(at)
        root.mkdir()
        file = root / "status.json"
        file.write_text("old")
        disk = FaultyDisk(root, at)
        try:
            with disk.attached():
                write_atomic(file, "new")
        except PowerCut:
            disk.lose(names)
        else:
            disk.lose(names)  # the power goes right after: what was reported as written is there
            assert file.read_text() == "new"
        seen.add(file.read_text())
    assert seen == {"old", "new"}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_small_file_that_cannot_be_written_is_named_and_stays(code: int, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    for at in range(1, 6):
        file.write_text("old")
        with (
            FaultyDisk(tmp_path, at, code).attached(),
            pytest.raises(WriteError, match=r"result\.json could not be") as e,
        ):
            write_atomic(file, "new")
        assert file.read_text() in ("old", "new") and "free space or check the disk" in str(e.value)
        assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_the_first_write_of_the_metrics_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()  # the simplest thing that cannot be written
    with pytest.raises(WriteError, match=r"metrics\.jsonl could not be written: Is a directory\. What was saved"):
        play(tmp_path, SPEC)


def test_an_error_of_the_writer_itself_is_passed_on_and_leaves_nothing(tmp_path: Path) -> None:
    def half() -> None:
        with replacing(tmp_path / "x") as place:
            place.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refusals", [0, 2, 99])
def test_windows_is_asked_again_while_somebody_reads_the_file(
    refusals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Windows:
        """As much of `os` as a rename needs, where files that are read cannot be replaced."""

        name, asked = "nt", 0

        def replace(self, a: Path, b: Path) -> None:
            self.asked += 1
            if self.asked <= refusals:
                raise PermissionError(13, "Access is denied")
            os.replace(a, b)

        def fsync(self, fd: int) -> None:
            os.fsync(fd)

    monkeypatch.setattr(atomic, "os", Windows())
    monkeypatch.setattr(atomic, "PAUSES", (0.0, 0.0, 0.0))
    path = tmp_path / "result.json"
    path.write_text("before", encoding="utf-8")
    if refusals > 3:
        with pytest.raises(WriteError, match="Access is denied"):
            write_atomic(path, "after")
        assert path.read_text(encoding="utf-8") == "before" and list(tmp_path.iterdir()) == [path]
    else:
        write_atomic(path, "after\n")
        assert path.read_bytes() == b"after\n"
