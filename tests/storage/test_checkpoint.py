"""Checkpoints: whole or not used, whatever happens to the process, the disk or the files."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspan import tree
from fedspan.errors import CheckpointError, Divergence
from fedspan.storage import checkpoint
from fedspan.storage.checkpoint import RunDirectory
from fedspan.storage.client_store import ClientStore
from fedspan.storage.tree_file import SCHEMA, load_tree, read_tree, render, save_tree
from fedspan.tree import Outer, Tree

ROUNDS = 5
IDENTITY = {"seed": 0, "method.name": "pfl-mf", "train.lr": 0.1}
TREE: Tree = {
    "U": torch.arange(6.0).reshape(2, 3),
    "none": {},
    "deep": {"flag": torch.tensor([True]), "n": torch.tensor(7), "e": {}, "b": torch.ones(3, dtype=torch.bfloat16)},
    "o": Outer(torch.ones(2), torch.zeros(0)),
}


def stores() -> list[ClientStore]:
    """Two capacity groups, the second on disk."""
    return [
        ClientStore(lambda i: {"v": torch.full((3,), float(i)), "h": {}}, range(4)),
        ClientStore(lambda i: {"v": torch.full((5,), float(i))}, range(4, 8), budget_bytes=0),
    ]


def step(t: int, server: Tree, groups: list[ClientStore]) -> Tree:
    """A round that depends on all that went before, so that a lost or doubled round shows."""
    for k, group in enumerate(groups):
        ids = [4 * k + t % 4, 4 * k + (t + 1) % 4]
        group.put(ids, tree.map(lambda a: a * 1.5 + server["w"].sum(), group.take(ids)))
    return {"w": server["w"] * 0.9 + t + groups[0].take([0, 1, 2, 3])["v"].mean(), "none": {}}


def play(path: Path, rounds: int = ROUNDS, seen: list[str] | None = None) -> str:
    """Run or resume to the end, saving every round; the digest of everything."""
    with RunDirectory(path, IDENTITY) as run:
        loaded = run.load()
        groups, server, done = stores(), {"w": torch.ones(2), "none": {}}, 0
        if loaded:
            server, done = loaded.server, loaded.round
            assert loaded.extra["total"] == done and loaded.metrics_length == 10 * done
            for group, rows in zip(groups, loaded.rows):
                group.restore(rows)
        if seen is not None:
            seen += [*run.warnings, f"from {done}"]
        for t in range(done + 1, rounds + 1):
            server = step(t, server, groups)
            run.save(t, server, groups, {"total": t}, metrics_length=10 * t)
        return tree.digest({"server": server, "rows": {str(k): g.take(g.clients) for k, g in enumerate(groups)}})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the disk."""
    monkeypatch.setattr(checkpoint.os, "fsync", lambda fd: None)


@pytest.fixture(params=["bases", "changes"])
def chains(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, quick: None) -> bool:
    """Every save a base, or changed rows only where the rule for large stores says so."""
    if request.param == "changes":
        monkeypatch.setattr(checkpoint, "SMALL_BYTES", 0)
    return bool(request.param == "changes")


def copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


# --- round trip -------------------------------------------------------------------------------------------------


def test_tree_files_keep_structure_types_and_metadata(tmp_path: Path) -> None:
    save_tree(tmp_path / "x.safetensors", TREE, {"made": "here"})
    back, metadata = read_tree(tmp_path / "x.safetensors")
    assert tree.digest(back) == tree.digest(TREE) and metadata == {"made": "here"}
    assert back["none"] == {} and back["deep"]["e"] == {} and isinstance(back["o"], Outer)
    assert list(back) == list(TREE) and back["deep"]["b"].dtype == torch.bfloat16
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "x.safetensors")["deep/n"], torch.tensor(7))
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_tree_files_refuse_what_they_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="different tensor names"):
        save_tree(tmp_path / "x", {"": {"a": torch.ones(1)}, "a": torch.ones(1)})
    with pytest.raises(ValueError, match=r"Got z of torch\.complex64"):
        save_tree(tmp_path / "x", {"z": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(CheckpointError, match="No such file or directory"):
        save_tree(tmp_path / "none" / "x", TREE)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        load_tree(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_every_damage_to_a_tree_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tree(path, TREE, {"made": "here"})
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), 5):  # 5 is prime to 8: every byte, every bit of a byte
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load_tree(path)
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    for other in (b"", b"\xff" * 50, len(deep).to_bytes(8, "little") + deep.encode(), *(data[:n] for n in (7, 8, 99))):
        path.write_bytes(other)
        with pytest.raises(CheckpointError):
            load_tree(path)


def test_resume_after_any_round_equals_the_uninterrupted_run(tmp_path: Path, chains: bool) -> None:
    whole = play(tmp_path / "whole", 9)
    for t in range(1, 9):
        play(tmp_path / str(t), t)
        seen: list[str] = []
        assert play(tmp_path / str(t), 9, seen) == whole and seen == [f"from {t}"]


def test_first_load_is_none_and_extra_comes_back_as_json(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "a" / "b", {"x": (1, 2), "y": float("inf")}) as run:
        assert run.load() is None
        assert run.save(3, TREE, extra={"t": (1, {2: None, 10: "é"})}) == 1
        loaded = run.load()
    assert loaded is not None and tree.digest(loaded.server) == tree.digest(TREE) and loaded.server["none"] == {}
    assert loaded.extra == {"t": [1, {"2": None, "10": "é"}]} and loaded.identity == {"x": [1, 2], "y": float("inf")}
    body = json.loads((tmp_path / "a" / "b" / "manifest-1.json").read_text())
    assert {"sha256", "schema", "run", "identity_sha256", "versions"} <= set(body)


# --- generations ------------------------------------------------------------------------------------------------


def names(path: Path) -> set[str]:
    return {p.name for p in path.iterdir()} - {"lock"}


def test_three_generations_are_kept_and_strays_removed(tmp_path: Path, quick: None) -> None:
    strays = ["server-1.safetensors.tmp", "manifest-9.json.tmp", "scratch-x.tmp", "rows-2-0.safetensors", "mine.tmp"]
    for stray in strays:
        (tmp_path / stray).touch()
    play(tmp_path, 6)
    kept = {f"{n.format(g)}" for g in (6, 7, 8) for n in ("server-{}.safetensors", "manifest-{}.json")}
    kept |= {f"rows-{g}-{k}.safetensors" for g in (6, 7, 8) for k in (0, 1)}
    assert names(tmp_path) == kept | {"mine.tmp"}  # generation 3 came first: the stray rows-2-0 counts as seen


def big_run(path: Path, rounds: int) -> RunDirectory:
    """20 clients, one changes per round after a first base of all."""
    run = RunDirectory(path, IDENTITY)
    assert run.load() is None
    store = ClientStore(lambda i: {"v": torch.zeros(4)}, range(20))
    store.put(range(20), {"v": torch.ones(20, 4)})
    for t in range(rounds):
        if t:
            store.put([t % 20], {"v": torch.full((1, 4), float(t))})
        run.save(t, {"w": torch.ones(1)}, [store])
    return run


def test_a_damaged_base_falls_back_to_the_previous_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr(checkpoint, "SMALL_BYTES", 0)
    with big_run(tmp_path, 35) as run:
        # Generation 1 is a base; 20 changes are as many bytes, so 22 is the next, and 21 the last that needs 1.
        assert {n for n in names(tmp_path) if n[0] == "m"} == {f"manifest-{g}.json" for g in (35, 34, 33, 21)}
        assert {n for n in names(tmp_path) if n[0] == "r"} == {f"rows-{g}-0.safetensors" for g in range(1, 36)}
        (tmp_path / "rows-22-0.safetensors").write_bytes(b"x")
        loaded = run.load()
        assert loaded is not None and loaded.generation == 21
        assert len(run.warnings) == 3 and "rows-22-0.safetensors has 1 bytes" in run.warnings[0]
        assert "Falling back to generation 34." in run.warnings[0]
        store = ClientStore(lambda i: {"v": torch.zeros(4)}, range(20), budget_bytes=0)
        store.restore(loaded.rows[0])
        assert store.take([19, 0])["v"][:, 0].tolist() == [19.0, 20.0]
        store.put([3], {"v": torch.zeros(1, 4)})
        assert run.save(21, {}, [store]) == 36
        assert not (tmp_path / "manifest-35.json").exists()  # what could not be used is gone after the next save
        again = run.load()
        assert again is not None and again.generation == 36 and run.warnings == []


def test_chains_end_when_their_manifest_grows_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr(checkpoint, "SMALL_BYTES", 0)
    monkeypatch.setattr(checkpoint, "MAX_SEGMENTS", 4)
    with big_run(tmp_path, 9):
        assert json.loads((tmp_path / "manifest-9.json").read_text())["base"] == 9


def test_a_store_that_was_not_restored_is_saved_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr(checkpoint, "SMALL_BYTES", 0)
    with big_run(tmp_path, 3) as run:
        store = ClientStore(lambda i: {"v": torch.zeros(4)}, range(20))
        store.put([0, 1], {"v": torch.ones(2, 4)})
        run.save(4, {}, [store])
        loaded = run.load()
    assert loaded is not None and [s.ids.tolist() for s in loaded.rows[0]] == [[0, 1]]


# --- damage (F4) ------------------------------------------------------------------------------------------------


def newest_files(path: Path, g: int) -> list[Path]:
    files = json.loads((path / f"manifest-{g}.json").read_text())["files"]
    return sorted([path / f"manifest-{g}.json", *(path / n for n in files if f"-{g}" in n)])


def damages(files: list[Path], flips: int, cuts: int) -> Iterator[tuple[Path, bytes]]:
    draw = random.Random(0)
    originals = {f: f.read_bytes() for f in files}
    for f in draw.choices(files, k=flips):
        data = bytearray(originals[f])
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        yield f, bytes(data)
    for f in draw.choices(files, k=cuts):
        yield f, originals[f][: draw.randrange(len(originals[f]))]
    for f in files:
        yield f, originals[f] + b" "
        yield f, b""


def test_every_damage_is_detected_and_falls_back(tmp_path: Path, chains: bool) -> None:
    whole = play(tmp_path / "run")
    path = tmp_path / "run"
    files = newest_files(path, ROUNDS)
    assert len(files) == 4
    originals = {f: f.read_bytes() for f in files}
    with RunDirectory(path, IDENTITY) as run:
        count = 0
        flips, cuts = (300, 50) if chains else (1000, 100)
        for f, data in damages(files, flips, cuts):
            f.write_bytes(data)
            loaded = run.load()
            assert loaded is not None and loaded.round == ROUNDS - 1, f.name
            assert len(run.warnings) == 1 and f.name in run.warnings[0], f.name
            assert run.warnings[0].startswith(f"Checkpoint: generation {ROUNDS} of {path} cannot be used: {f.name} ")
            assert run.warnings[0].endswith(f". Falling back to generation {ROUNDS - 1}.")
            f.write_bytes(originals[f])
            count += 1
        assert count == flips + cuts + 2 * len(files)
    for f in files:
        part = copy(path, tmp_path / "part")
        (part / f.name).unlink()
        seen: list[str] = []
        assert play(part, seen=seen) == whole and seen[-1] == f"from {ROUNDS - 1}"
        # Without its manifest a generation was never finished: there is nothing to warn of.
        assert len(seen) == (1 if f.name.startswith("manifest") else 2)


def test_files_of_another_run_are_detected(tmp_path: Path, chains: bool) -> None:
    play(tmp_path / "a")
    with RunDirectory(tmp_path / "b", {**IDENTITY, "seed": 1}) as other:
        groups = stores()
        for t in range(1, ROUNDS + 1):
            server = step(t, {"w": torch.zeros(2)}, groups)
            other.save(t, server, groups, {"total": t}, 10 * t)
    for f in newest_files(tmp_path / "a", ROUNDS):
        part = copy(tmp_path / "a", tmp_path / "part")
        shutil.copy(tmp_path / "b" / f.name, part / f.name)
        with RunDirectory(part, IDENTITY) as run:
            loaded = run.load()
            assert loaded is not None and loaded.round == ROUNDS - 1 and len(run.warnings) == 1
            assert ("seed is 1 there and 0 here" in run.warnings[0]) == f.name.startswith("manifest")


def rewrite(path: Path, g: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and sign it again, as other software might."""
    manifest = path / f"manifest-{g}.json"
    body = json.loads(manifest.read_text())
    del body["sha256"]
    change(body)
    manifest.write_bytes(render(body))


def test_schema_versions(tmp_path: Path, quick: None) -> None:
    play(tmp_path)
    for version in ("1", 2.5, [2], True):
        rewrite(tmp_path, ROUNDS, lambda body, v=version: body.update(schema=v))
        with RunDirectory(tmp_path, IDENTITY) as run:
            loaded = run.load()
            assert loaded is not None and loaded.round == ROUNDS - 1
            assert "unknown schema version" in run.warnings[0]
    rewrite(tmp_path, ROUNDS, lambda body: body.update(schema=SCHEMA + 1))
    with RunDirectory(tmp_path, IDENTITY) as run, pytest.raises(CheckpointError, match="newer fedspan") as caught:
        run.load()
    assert "Update fedspan, or start over with --fresh." in str(caught.value)


@pytest.mark.parametrize("older", [lambda body: body.update(schema=1), lambda body: body.pop("schema")])
def test_a_directory_of_an_older_layout_is_refused_and_left_as_it_is(
    older: Callable[[dict[str, Any]], object], tmp_path: Path, quick: None
) -> None:
    play(tmp_path)
    for manifest in tmp_path.glob("manifest-*.json"):
        rewrite(tmp_path, int(manifest.stem.split("-")[1]), older)
    before = names(tmp_path)
    for read_only in (False, True):
        run = RunDirectory(tmp_path, IDENTITY, read_only=read_only)
        with run, pytest.raises(CheckpointError) as caught:
            run.load()
        said = str(caught.value)
        assert said.startswith(f"Run directory {tmp_path} has the layout of an older fedspan (")
        assert said.endswith("Start anew with --fresh, or choose another directory with --out.")
    assert names(tmp_path) == before
    with RunDirectory(tmp_path, IDENTITY) as run:
        assert run.load(fresh=True) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(generation=4),
        lambda body: body.update(round="7"),
        lambda body: body.update(files=[]),
        lambda body: body.update(stores=[3]),
        lambda body: body.update(stores=[[3]]),
        lambda body: body.update(stores=[["../x/rows-1-0.safetensors"]]),
        lambda body: body["files"].update({"server-5.safetensors": 3}),
        lambda body: body["files"].update({"server-5.safetensors": {}}),
        lambda body: body.pop("identity"),
        lambda body: body.update(stores=[["server-5.safetensors"]]),
    ],
)
def test_well_signed_nonsense_falls_back(
    change: Callable[[dict[str, Any]], object], tmp_path: Path, quick: None
) -> None:
    play(tmp_path)
    rewrite(tmp_path, ROUNDS, change)
    with RunDirectory(tmp_path, IDENTITY) as run:
        loaded = run.load()
        assert loaded is not None and loaded.round == ROUNDS - 1 and len(run.warnings) == 1


def test_nothing_usable_is_one_error_and_fresh_starts_over(tmp_path: Path, quick: None) -> None:
    play(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    for f in tmp_path.glob("server-*"):
        f.write_bytes(b"")
    with RunDirectory(tmp_path, IDENTITY) as run:
        with pytest.raises(CheckpointError, match=r"none of its 3 checkpoints.*server-5.* has 0 bytes.*--fresh"):
            run.load()
        assert len(run.warnings) == 3 and run.warnings[-1].endswith("There is no older one.")
        assert run.load(fresh=True) is None
        assert names(tmp_path) == {"notes.txt"}
    play(tmp_path)


def test_another_configuration_is_refused_by_name(tmp_path: Path, quick: None) -> None:
    play(tmp_path)
    other = {"seed": 0, "method.name": "fedavg", "method.rank": 4}
    with RunDirectory(tmp_path, other) as run, pytest.raises(CheckpointError) as caught:
        run.load()
    assert str(caught.value) == (
        f'Run directory {tmp_path} was made with another configuration: method.name is "pfl-mf" there and "fedavg" '
        "here; method.rank is nothing there and 4 here; train.lr is 0.1 there and nothing here. "
        "Use the same values, choose another directory, or start over with --fresh."
    )
    reader = RunDirectory(tmp_path, None, read_only=True)
    loaded = reader.load()
    assert loaded is not None and loaded.identity == IDENTITY


def test_save_before_load_or_read_only_is_refused(tmp_path: Path, quick: None) -> None:
    play(tmp_path)
    with RunDirectory(tmp_path, IDENTITY) as run, pytest.raises(CheckpointError, match=r"load\(\) it"):
        run.save(1, {})
    with pytest.raises(CheckpointError, match="not read-only"):
        RunDirectory(tmp_path, IDENTITY, read_only=True).save(1, {})
    with pytest.raises(ValueError, match="needs an identity"):
        RunDirectory(tmp_path, None)


def test_non_finite_server_is_never_saved(tmp_path: Path, quick: None) -> None:
    with RunDirectory(tmp_path, IDENTITY) as run:
        for bad in (float("nan"), float("inf")):
            with pytest.raises(Divergence, match=r"server's state holds NaN or infinity.*Lower the learning rate"):
                run.save(1, {"w": torch.tensor([1.0, bad])})
        assert names(tmp_path) == set()
        run.save(1, {"w": torch.ones(1)}, extra={"accuracy": float("nan")})


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be used"):
        RunDirectory(tmp_path / "file" / "run", IDENTITY)


def test_a_small_checkpoint_is_quick(tmp_path: Path, quick: None) -> None:
    server = {"U": torch.randn(250_000)}
    with RunDirectory(tmp_path, IDENTITY) as run:
        took = []
        for t in range(7):
            start = time.process_time()  # not the clock on the wall: the machine may be busy
            run.save(t, server)
            took.append(time.process_time() - start)
    assert min(took) < 0.02  # measured: 4 ms


# --- death and full disks (F2, F3): one process that forks a child per case ---------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("outcomes")
    done = subprocess.run([sys.executable, __file__, str(path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


POINTS = ["after-tmp-write", "before-rename", "between-rename-and-manifest", "before-dir-fsync"]
FILES = ["server-4.safetensors", "rows-4-0.safetensors", "rows-4-1.safetensors", "manifest-4.json"]
CASES = [f"{p}@{f}" for p, f in itertools.product(POINTS[:2], FILES)] + [f"{p}@manifest-4.json" for p in POINTS[2:]]


@pytest.mark.parametrize("case", [*POINTS, *CASES])
def test_killed_inside_a_save(case: str, outcomes: dict[str, Any]) -> None:
    result = outcomes[case]
    assert result["signal"] == signal.SIGKILL
    first = "@" not in case  # killed in the first save: nothing to resume from, unless the manifest was there
    renamed = case.startswith("before-dir-fsync")
    assert result["seen"] == [f"from {(0 if first else 3) + renamed}"]
    assert result["digest"] == outcomes["whole"] and result["strays"] == []


@pytest.mark.parametrize("limit", [0, 100, 300, 600])
def test_a_full_disk(limit: int, outcomes: dict[str, Any]) -> None:
    result = outcomes[f"full {limit}"]
    assert (
        "generation 4 of" in result["error"] and "File too large. Generation 3 remains. Free space" in result["error"]
    )
    assert result["left"] == [] and result["again"] == 4  # the same process can save once there is space
    assert result["seen"] == ["from 3"] and result["digest"] == outcomes["whole"]


def test_a_full_disk_for_the_scratch_file(outcomes: dict[str, Any]) -> None:
    assert outcomes["scratch"] == [
        "Client store: the rows of 4 clients could not be written to disk: File too large. "
        "Free space, or raise the memory budget.",
        True,
    ]


def test_one_process_per_directory(outcomes: dict[str, Any]) -> None:
    result = outcomes["lock"]
    assert f"is in use by process {result['holder']}." in result["second"]
    assert result["reader"] and result["after death, beside its orphan"]


def child(work: Callable[[], object], wait: bool = True) -> int:
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException as e:
            print(repr(e), file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if wait else pid


def killed(path: Path, point: str) -> dict[str, Any]:
    def work() -> None:
        os.environ["FEDSPAN_FAULT"] = point
        play(path)

    code, seen = child(work), []
    return {
        "signal": -code, "digest": play(path, seen=seen), "seen": seen, "strays": [p.name for p in path.glob("*.tmp")]
    }  # fmt: skip


def full(path: Path, limit: int) -> dict[str, Any]:
    report = path.with_suffix(".json")

    def work() -> None:
        play(path, 3)
        with RunDirectory(path, IDENTITY) as run:
            loaded = run.load()
            assert loaded is not None
            groups = stores()
            for group, rows in zip(groups, loaded.rows):
                group.restore(rows)
            server = step(4, loaded.server, groups)
            before = names(path)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            error = ""
            try:
                run.save(4, server, groups)
            except CheckpointError as e:
                error = str(e)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            left = sorted(names(path) - before)
            after = run.load()
            assert after is not None and after.round == 3
            copy(path, path.with_suffix(".copy"))
            report.write_text(json.dumps({"error": error, "left": left, "again": run.save(4, server, groups)}))

    assert child(work) == 0
    seen: list[str] = []
    return {**json.loads(report.read_text()), "digest": play(path.with_suffix(".copy"), seen=seen), "seen": seen}


def scratch() -> list[Any]:
    store = stores()[1]
    store.put([5], {"v": torch.ones(1, 5)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
    try:
        store.put([4, 6, 7, 5], {"v": torch.zeros(4, 5)})
    except CheckpointError as e:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return [str(e), store.take([5, 6])["v"][:, 0].tolist() == [1.0, 6.0]]
    return []


def lock(path: Path) -> dict[str, Any]:
    ready, orphan = os.pipe(), os.pipe()

    def hold() -> None:
        run = RunDirectory(path, IDENTITY)
        run.save(1, {})
        grandchild = child(lambda: time.sleep(30), wait=False)  # a forked worker
        os.write(orphan[1], str(grandchild).encode())
        os.write(ready[1], b"x")
        time.sleep(30)
        run.close()

    holder = child(hold, wait=False)
    os.read(ready[0], 1)
    grandchild = int(os.read(orphan[0], 20))
    second = ""
    try:
        RunDirectory(path, IDENTITY)
    except CheckpointError as e:
        second = str(e)
    reader = RunDirectory(path, IDENTITY, read_only=True).load() is not None
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    time.sleep(0.05)
    os.kill(grandchild, 0)  # still there
    with RunDirectory(path, IDENTITY) as run:
        after = run.load() is not None
    os.kill(grandchild, signal.SIGKILL)
    return {"holder": holder, "second": second, "reader": reader, "after death, beside its orphan": after}


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    results: dict[str, Any] = {"whole": play(root / "whole")}
    results |= {case: killed(root / case, case) for case in [*POINTS, *CASES]}
    results |= {f"full {n}": full(root / f"full{n}", n) for n in (0, 100, 300, 600)}
    results |= {"scratch": scratch(), "lock": lock(root / "lock")}
    print(json.dumps(results))
