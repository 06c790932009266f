"""LEAF's JSON files and FEMNIST: natural clients, and one sentence naming the user for what does not fit."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import call
from fedspan.data import load, partition
from fedspan.data.formats import leaf
from fedspan.data.sources.catalog import KNOWN
from fedspan.errors import ConfigError, DataError

PIXELS = 28 * 28


def made(users: dict[str, int], seed: int = 0) -> dict[str, Any]:
    """A file's content with so many characters per user; pixels are multiples of 1/255, as LEAF's are."""
    rng = np.random.default_rng(seed)
    data = {}
    for user, n in users.items():
        x = rng.integers(0, 256, (n, PIXELS)) / 255
        data[user] = {"x": x.tolist(), "y": rng.integers(0, 62, n).tolist()}
    return {"users": list(users), "num_samples": list(users.values()), "user_data": data}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_femnist_from_all_data(tmp_path: Path) -> None:
    first, second = made({"f0001_41": 12, "f0002_00": 4}), made({"f0003_10": 14}, 1)
    write(tmp_path / "femnist/all_data_0.json", first)
    write(tmp_path / "femnist/all_data_1.json", second)
    source = load("femnist", tmp_path)
    assert source.classes == 62 and source.x.shape == (30, 1, 28, 28) and source.class_names[10] == "A"
    assert source.client_names == ["f0001_41", "f0002_00", "f0003_10"]
    assert source.client is not None and source.client.tolist() == [0] * 12 + [1] * 4 + [2] * 14
    assert source.y.tolist()[-14:] == second["user_data"]["f0003_10"]["y"]
    pixels = np.array(first["user_data"]["f0002_00"]["x"]).reshape(4, 1, 28, 28)
    known = KNOWN["femnist"]
    np.testing.assert_allclose(source.x[12:16].numpy(), (pixels - known.mean[0]) / known.std[0], atol=1e-5)
    data = partition(source, "natural", min_samples=10)  # Setup 4 drops small writers
    assert data.names == ["f0001_41", "f0003_10"] and [len(t) for t in data.test] == [3, 4]
    assert partition(source, "natural", min_samples=1, fraction=0.3).clients == 1


def test_the_command_recognises_them(tmp_path: Path) -> None:
    line = lambda: next(r for r in call("data", "--root", str(tmp_path)).stdout.splitlines() if " femnist " in r)
    (tmp_path / "femnist").mkdir()
    assert " no " in line()
    write(tmp_path / "femnist/train/a.json", made({"u": 1}))
    assert " yes " in line()


def test_train_and_test_folders_share_their_users(tmp_path: Path) -> None:
    write(tmp_path / "femnist/train/a.json", made({"u": 3, "w": 2}))
    write(tmp_path / "femnist/test/a.json", made({"w": 1, "u": 2}, 1))
    source = load("femnist", tmp_path)
    assert source.test_rows.tolist() == [5, 6, 7]
    assert source.client is not None and source.client.tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    own = partition(source, "natural", split="global", min_samples=1)
    assert [t.tolist() for t in own.test] == [[6, 7], [5]]


def test_any_folder_of_numbers(tmp_path: Path) -> None:
    content = {
        "users": ["a", "b", "empty"],
        "num_samples": [2, 1, 0],
        "user_data": {"a": {"x": [[1, 2.5], [3, 4]], "y": [0, 1]}, "b": {"x": [[-7, 8]], "y": [1]}},
    }
    content["user_data"]["empty"] = {"x": [], "y": []}  # type: ignore[index]
    write(tmp_path / "synthetic/all_data/all_data.json", content)
    source = load(str(tmp_path / "synthetic"))
    assert source.x.tolist() == [[1, 2.5], [3, 4], [-7, 8]] and source.classes == 2
    assert source.client_names == ["a", "b"]


def test_femnist_from_parquet_as_the_hub_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cells = []
    for k in range(6):
        out = io.BytesIO()
        image.fromarray(np.full((28, 28), 40 * k, np.uint8)).save(out, "PNG")
        cells.append({"bytes": out.getvalue(), "path": None})
    table = pa.table(
        {
            "image": cells,
            "writer_id": ["f0000_14"] * 4 + ["f0001_41"] * 2,
            "hsf_id": [0] * 6,
            "character": [0, 53, 28, 61, 10, 3],
        }
    )
    (tmp_path / "femnist").mkdir()
    pq.write_table(table, tmp_path / "femnist/train-00000-of-00001.parquet")
    source = load("femnist", tmp_path)
    assert source.y.tolist() == [0, 53, 28, 61, 10, 3] and source.client_names == ["f0000_14", "f0001_41"]
    assert KNOWN["femnist"].hub == "flwrlabs/femnist"


def test_missing_femnist_says_where_it_looked(tmp_path: Path) -> None:
    write(tmp_path / "something-else.json", "[]")  # of another data set: not touched
    with pytest.raises(DataError, match=r"'femnist' was not found.*LEAF's .json"):
        load("femnist", tmp_path)


def broken(**changes: Any) -> dict[str, Any]:
    return {**made({"u1": 2, "u2": 1}), **changes}


def user(**changes: Any) -> dict[str, Any]:
    content = made({"u1": 2, "u2": 1})
    content["user_data"]["u2"].update(changes)
    return content


def without(key: str) -> dict[str, Any]:
    content = made({"u1": 2, "u2": 1})
    del content["user_data"]["u2"][key]
    return content


ROW = [0.5] * PIXELS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ('{"users": [NaN]}', "must be JSON.*NaN"),
        ("[1]", "must be an object with users"),
        ({"users": [], "num_samples": []}, "'user_data' must be an object. Got no such key"),
        (broken(users="u1"), "'users' must be a list. Got str"),
        (broken(num_samples=[2]), "one entry per user, 2. Got 1"),
        (broken(num_samples=[2, "1"]), "user 'u2' must have a whole number"),
        (broken(num_samples=[2, 3]), "user 'u2' must have 3 entries in x, as num_samples says. Got 1"),
        (broken(users=["u1", "u1"]), "user 'u1' must appear once"),
        (broken(users=["u1", 7]), "a user must be a string"),
        (broken(users=["u1", "x" * 101]), "a user must be a string of 1 to 100"),
        (broken(users=["u1", "u3"]), "user 'u3' is in users, but not in user_data"),
        (broken(users=["u1"], num_samples=[2]), "user 'u2' is in user_data, but not in users"),
        (broken(users=[], num_samples=[], user_data={}), "at least one example"),
        (without("x"), "user 'u2' must have the lists x and y in user_data. Got y"),
        (without("y"), "user 'u2' must have the lists x and y in user_data. Got x"),
        (user(y=[1, 2]), "user 'u2' must have 1 entries in y"),
        (user(y=["7"]), "user 'u2' must have whole numbers as labels"),
        (user(y=[0.5]), "user 'u2' must have whole numbers as labels"),
        (user(y=[10**30]), "user 'u2' must have whole numbers as labels"),
        (user(x=[ROW[1:]]), "user 'u2' must have 784 numbers for every example"),
        (user(x=[["0.5"] * PIXELS]), "user 'u2' must have 784 numbers"),
        (user(x=[[None] * PIXELS]), "user 'u2' must have 784 numbers"),
        (user(x=[[*ROW[1:], [1, 2]]]), "user 'u2' must have 784 numbers"),
        (user(x=[[*ROW[1:], 1.5]]), r"user 'u2' must have pixels in 0..1. Got 0.5..1.5"),
        (user(x=["hello"]), "user 'u2' must have 784 numbers"),
    ],
)
def test_bad_files_in_one_sentence(tmp_path: Path, content: Any, message: str) -> None:
    write(tmp_path / "femnist/all_data_0.json", content)
    with pytest.raises(DataError, match=message) as caught:
        load("femnist", tmp_path)
    assert str(caught.value).startswith("all_data_0.json: ") and "\n" not in str(caught.value)


def test_labels_outside_the_62(tmp_path: Path) -> None:
    write(tmp_path / "femnist/all_data_0.json", user(y=[62]))
    with pytest.raises(DataError, match=r"labels must lie in 0..61. Got 62"):
        load("femnist", tmp_path)


def test_names_are_safe_to_print(tmp_path: Path) -> None:
    write(tmp_path / "femnist/a.json", broken(users=["u1", "\x1b[31mred"]))
    with pytest.raises(DataError, match=r"user '\?\[31mred'"):
        load("femnist", tmp_path)


def test_sizes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "femnist/a.json", made({"u": 4}))
    with pytest.raises(DataError, match="at most"):
        load("femnist", tmp_path, max_bytes=path.stat().st_size - 1)
    content = {"users": ["u"], "num_samples": [99], "user_data": {"u": {"x": [[1] * 9] * 99, "y": [0] * 99}}}
    small = write(tmp_path / "small.json", content)
    with pytest.raises(DataError, match="at most"):  # short text, more bytes once it is an array
        leaf.read(small, small.stat().st_size)
    monkeypatch.setattr(leaf, "MAX_JSON", 100)
    with pytest.raises(DataError, match="at most"):
        load("femnist", tmp_path)


def test_links_must_not_lead_out(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside.json", made({"u": 1}))
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist/a.json").symlink_to(outside)
    with pytest.raises(ConfigError, match="must stay inside"):
        load("femnist", tmp_path)
