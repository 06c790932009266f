"""Sources: every file format, bad data (reliability B1), untrusted files (B7), the cache, and FederatedData itself."""

from __future__ import annotations

import gzip
import io
import json
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.data import SOURCES, FederatedData, load
from fedspan.data.federated import split
from fedspan.data.formats import parquet as tables
from fedspan.data.sources.catalog import KNOWN
from fedspan.errors import ConfigError, DataError, FedspanError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSPAN_DATA", raising=False)


def pixels(n: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def encode(picture: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return out.getvalue()


def write_parquet(path: Path, pictures: np.ndarray, image: str = "image", kind: str = "PNG", **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": encode(p, kind), "path": None} for p in pictures]
    names = columns.pop("names", None)
    table = pa.table({image: cells, **columns})
    if names:
        about = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    pq.write_table(table, path)


def write_idx(path: Path, array: np.ndarray, magic: bytes | None = None) -> None:
    data = (magic or bytes((0, 0, 8, array.ndim))) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def npz(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


# --- good data ---------------------------------------------------------------------------------------------------


def test_digits_are_normalised_and_need_no_files() -> None:
    s = load("digits")
    assert s.x.shape == (1797, 1, 8, 8) and s.x.dtype == torch.float32 and s.y.dtype == torch.int64
    assert abs(float(s.x.mean())) < 1e-3 and abs(float(s.x.std()) - 1) < 1e-3
    assert s.classes == 10 and len(s.test_rows) == 0 and s.class_names[3] == "3"


def test_mnist_parquet_train_and_test(tmp_path: Path) -> None:
    a, b = pixels(12, (28, 28)), pixels(5, (28, 28), 1)
    write_parquet(tmp_path / "mnist/train.parquet", a, label=[i % 10 for i in range(12)])
    write_parquet(tmp_path / "mnist/test.parquet", b, label=[9] * 5)
    s = load("mnist", str(tmp_path))
    assert s.x.shape == (17, 1, 28, 28) and s.test_rows.tolist() == [12, 13, 14, 15, 16]
    torch.testing.assert_close(s.x[12:, 0], (torch.from_numpy(b) / 255.0 - 0.1307) / 0.3081)
    assert s.train_rows.tolist() == list(range(12))


def test_root_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "mnist/train.parquet", pixels(3, (28, 28)), label=[0, 1, 2])
    monkeypatch.setenv("FEDSPAN_DATA", str(tmp_path))
    assert len(load("mnist")) == 3


def test_cifar10_webp_channels_and_constants(tmp_path: Path) -> None:
    a = pixels(4, (32, 32, 3))
    write_parquet(tmp_path / "cifar10/train-00000-of-00002.parquet", a[:3], "img", "WEBP", label=[0, 1, 2])
    write_parquet(tmp_path / "cifar10/train-00001-of-00002.parquet", a[3:], "img", "WEBP", label=[9])
    s = load("cifar10", tmp_path)
    mean, std = torch.tensor(KNOWN["cifar10"].mean), torch.tensor(KNOWN["cifar10"].std)
    torch.testing.assert_close(s.x.permute(0, 2, 3, 1), (torch.from_numpy(a) / 255.0 - mean) / std)
    assert s.class_names[0] == "airplane" and s.y.tolist() == [0, 1, 2, 9]


def test_cifar100_superclasses_and_domains(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "cifar100/train.parquet",
        pixels(4, (32, 32, 3)),
        "img",
        fine_label=[0, 5, 8, 4],
        coarse_label=[4, 6, 18, 0],
    )
    s = load("cifar100", tmp_path)
    assert s.coarse is not None and s.coarse.tolist() == [4, 6, 18, 0]
    assert s.domain is not None and s.domain.tolist() == [1, 0, 3, -1]
    assert s.domain_names == ["Household", "Fruit&Food", "Tree&Flower", "Transport", "Animal"]


@pytest.mark.parametrize("place", ["fashion-mnist", "."])
@pytest.mark.parametrize("end", ["", ".gz"])
def test_idx_files(tmp_path: Path, place: str, end: str) -> None:
    x, t = pixels(6, (28, 28)), pixels(2, (28, 28), 1)
    for part, images, labels in (("train", x, range(6)), ("t10k", t, range(2))):
        write_idx(tmp_path / place / f"{part}-images-idx3-ubyte{end}", images)
        write_idx(tmp_path / place / f"{part}-labels-idx1-ubyte{end}", np.array(labels, np.uint8))
    s = load("fashion-mnist", tmp_path)
    assert s.x.shape == (8, 1, 28, 28) and s.test_rows.tolist() == [6, 7] and s.class_names[-1] == "Ankle boot"
    torch.testing.assert_close(s.x[:6, 0], (torch.from_numpy(x) / 255.0 - 0.2860) / 0.3530)
    assert load(str(tmp_path / place)).x.shape == (8, 1, 28, 28)


def test_npz_with_test_clients_and_domains(tmp_path: Path) -> None:
    path = npz(
        tmp_path / "a.npz",
        x=np.ones((4, 3)),
        y=np.array([0, 1, 2, 1]),
        x_test=np.zeros((2, 3)),
        y_test=np.array([0, 2]),
        client=np.array(["b", "a", "b", "a"]),
        domain=np.array([7, 7, 5, 5]),
    )
    s = load(path)
    assert s.x.dtype == torch.float32 and s.test_rows.tolist() == [4, 5] and s.classes == 3
    assert s.client is not None and s.client.tolist() == [1, 0, 1, 0, -1, -1] and s.client_names == ["a", "b"]
    assert s.domain is not None and s.domain.tolist() == [1, 1, 0, 0, -1, -1]
    assert load("a.npz", tmp_path).x.equal(s.x)


@pytest.mark.parametrize("shape", [(6, 6), (6, 6, 3), (3, 6, 6), (1, 6, 6)])
def test_npz_bytes_are_pictures(tmp_path: Path, shape: tuple[int, ...]) -> None:
    s = load(npz(tmp_path / "a.npz", x=pixels(2, shape), y=np.array([0, 1])))
    assert s.x.shape == (2, 3 if 3 in shape else 1, 6, 6)
    assert float(s.x.min()) >= -1 and float(s.x.max()) <= 1


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, np.int32, bool])
def test_npz_number_types_stay_as_they_are(tmp_path: Path, kind: Any) -> None:
    x = np.array([[0, 1], [1, 1], [1, 0]]).astype(kind)
    assert load(npz(tmp_path / "a.npz", x=x, y=np.array([0, 1, 1], np.uint8))).x.tolist() == x.astype(float).tolist()


def test_folder_per_client(tmp_path: Path) -> None:
    for name, n in (("zoe", 3), ("adam", 2)):
        x, y = np.full((n, 2), n), np.arange(n)
        npz(tmp_path / f"{name}.npz", x=x, y=y, x_test=x[:1], y_test=y[:1])
    s = load(str(tmp_path))
    assert s.client_names == ["adam", "zoe"]
    assert s.client is not None and s.client.tolist() == [0, 0, 1, 1, 1, 0, 1] and s.test_rows.tolist() == [5, 6]


def test_folder_where_one_client_has_no_test_file(tmp_path: Path) -> None:
    npz(tmp_path / "a.npz", x=np.ones((2, 2)), y=np.arange(2), x_test=np.ones((1, 2)), y_test=np.arange(1))
    npz(tmp_path / "b.npz", x=np.ones((2, 2)), y=np.arange(2))
    s = load(str(tmp_path))
    assert s.client is not None and s.client.tolist() == [0, 0, 1, 1, 0]


def test_parquet_by_path_with_class_names_and_own_columns(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "p.parquet", pixels(3, (5, 4)), label=[0, 1, 0], writer=["w2", "w1", "w2"], names=["no", "yes"]
    )
    s = load(str(tmp_path / "p.parquet"), columns={"client": "writer"})
    assert s.x.shape == (3, 1, 5, 4) and s.class_names == ["no", "yes"]
    assert s.client is not None and s.client.tolist() == [1, 0, 1]
    with pytest.raises(DataError, match=r"column 'nobody' is not there"):
        load(str(tmp_path / "p.parquet"), columns={"client": "nobody"})


def test_parquet_of_numbers(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"a": [1.5, 2.5], "b": [1, 2], "note": ["x", "y"], "label": [0, 1]}), tmp_path / "t.parquet"
    )
    assert load(str(tmp_path / "t.parquet")).x.tolist() == [[1.5, 1.0], [2.5, 2.0]]


def test_hub_goes_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"img": [encode(p) for p in pixels(5, (4, 4))], "label": [0, 1, 2, 0, 1]})

    class Fake:
        features = types.SimpleNamespace(arrow_schema=table.schema)

        def __init__(self, rows: Any) -> None:
            self.rows = rows

        def __len__(self) -> int:
            return int(self.rows.num_rows)

        def with_format(self, kind: str) -> Fake:
            assert kind == "arrow"
            return self

        def select_columns(self, names: list[str]) -> Fake:
            return Fake(self.rows.select(names))

        def iter(self, batch_size: int) -> Any:
            return iter([self.rows.slice(0, 2), self.rows.slice(2)])

    module = types.ModuleType("datasets")
    module.load_dataset = lambda name: {"train": Fake(table), "test": Fake(table.slice(0, 2))}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    s = load("someone/pictures")
    assert s.x.shape == (7, 1, 4, 4) and s.test_rows.tolist() == [5, 6]


def test_size_averages_pixels(tmp_path: Path) -> None:
    write_parquet(tmp_path / "mnist/train.parquet", pixels(3, (28, 28)), label=[0, 1, 2])
    full, small = load("mnist", tmp_path), load("mnist", tmp_path, size=14)
    torch.testing.assert_close(small.x, torch.nn.functional.avg_pool2d(full.x, 2), atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"only shrink"):
        load("mnist", tmp_path, size=29)


def test_limit_is_balanced_and_keyed() -> None:
    a, b, c = load("digits", limit=100, seed=1), load("digits", limit=100, seed=1), load("digits", limit=100, seed=2)
    assert torch.bincount(a.y).tolist() == [10] * 10
    assert a.x.equal(b.x) and not a.x.equal(c.x)
    assert len(load("digits", limit=5000)) == 1797


def test_limit_keeps_the_share_of_the_test_file(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((80, 2)), np.arange(80) % 4
    path = npz(tmp_path / "a.npz", x=x[:60], y=y[:60], x_test=x[60:], y_test=y[60:], client=np.arange(60))
    s = load(path, limit=40)
    assert len(s) == 40 and len(s.test_rows) == 10
    for rows in (s.train_rows, s.test_rows):
        each = torch.bincount(s.y[torch.from_numpy(rows)], minlength=4)
        assert int(each.max() - each.min()) <= 1
    assert s.client is not None and (s.client[s.test_rows] == -1).all()


# --- cache -------------------------------------------------------------------------------------------------------


def test_decoded_pictures_are_cached_and_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "mnist/train.parquet"
    write_parquet(path, pixels(3, (28, 28)), label=[0, 1, 2])
    first = load("mnist", tmp_path)
    kept = list((tmp_path / "cache/fedspan").iterdir())
    assert len(kept) == 1 and kept[0].suffix == ".npy"
    with monkeypatch.context() as m:
        m.setattr(Image, "open", lambda *a, **k: pytest.fail("decoded again"))
        assert load("mnist", tmp_path).x.equal(first.x)
    write_parquet(path, pixels(3, (28, 28), 9), label=[0, 1, 2])
    assert not load("mnist", tmp_path).x.equal(first.x)


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_damaged_cache_is_ignored(tmp_path: Path, damage: bytes | None) -> None:
    write_parquet(tmp_path / "mnist/train.parquet", pixels(3, (28, 28)), label=[0, 1, 2])
    first = load("mnist", tmp_path)
    (kept,) = (tmp_path / "cache/fedspan").iterdir()
    kept.write_bytes(kept.read_bytes()[:-10] if damage is None else damage)
    assert load("mnist", tmp_path).x.equal(first.x)


def test_cache_that_cannot_be_written_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_parquet(tmp_path / "mnist/train.parquet", pixels(3, (28, 28)), label=[0, 1, 2])
    assert len(load("mnist", tmp_path)) == 3


# --- bad data: one sentence each ---------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"x": np.ones((4, 2)), "y": np.array([0, 1, 0, 1])}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"x": np.array([[1, 2], [np.nan, 1], [0, 0], [1, 1]])}, "must be finite.*row 1"),
    "inf": ({"x": np.array([[1, 2], [0, 1], [0, -np.inf], [1, 1]])}, "must be finite.*row 2"),
    "beyond float32": ({"x": np.full((4, 2), 1e300)}, "must be finite"),
    "label -1": ({"y": np.array([0, 1, -1, 0])}, "labels must lie in 0..*Got -1 in row 2"),
    "huge label": ({"y": np.array([0, 1, 2**40, 0])}, "labels must lie in"),
    "float labels": ({"y": np.array([0.0, 1.0, 0.5, 0.0])}, "labels must be integers"),
    "text labels": ({"y": np.array(["a", "b", "a", "b"])}, "labels must be integers"),
    "label shape": ({"y": np.zeros((4, 2), int)}, "one label per example"),
    "fewer labels": ({"y": np.zeros(3, int)}, "one label per example"),
    "flat x": ({"x": np.ones(4)}, "at least one feature"),
    "text x": ({"x": np.full((4, 2), "a")}, "x must hold numbers"),
    "complex x": ({"x": np.ones((4, 2), complex)}, "must hold numbers"),
    "empty": ({"x": np.ones((0, 2)), "y": np.zeros(0, int)}, "at least one example"),
    "objects": ({"x": np.array([[1, None]] * 4, object)}, "Python objects"),
    "other test shape": ({"x_test": np.ones((2, 3)), "y_test": np.zeros(2, int)}, "must have shape"),
    "half a test": ({"x_test": np.ones((2, 2))}, "must come together"),
    "bytes and floats": ({"x_test": np.ones((2, 2), np.uint8), "y_test": np.zeros(2, int)}, "must be of type"),
    "clients": ({"client": np.zeros(3, int)}, "client must have shape"),
    "unknown name": ({"x_tset": np.ones((2, 2))}, "Did you mean 'x_test'"),
    "no bytes per item": ({"x": np.zeros((4, 2), "V0")}, "must hold numbers"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_npz(tmp_path: Path, case: str) -> None:
    change, sentence = BAD[case]
    with pytest.raises(DataError, match=sentence):
        load(npz(tmp_path / "a.npz", **{**GOOD, **change}))


@pytest.mark.parametrize("y", [[0, 1, 0, 0], [0, 0, 0, 0]])
def test_duplicate_rows_constant_features_and_one_class_are_fine(tmp_path: Path, y: list[int]) -> None:
    assert load(npz(tmp_path / "a.npz", x=np.ones((4, 2)), y=np.array(y))).classes == max(y) + 1


def test_one_example_is_fine(tmp_path: Path) -> None:
    assert len(load(npz(tmp_path / "a.npz", x=np.ones((1, 2)), y=np.zeros(1, int)))) == 1


def test_classes_given(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", **GOOD)
    assert load(path, classes=5).classes == 5
    with pytest.raises(DataError, match=r"0\.\.0\. Got 1 in row 1"):
        load(path, classes=1)


def test_missing_x(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"needs the arrays x and y. Got y"):
        load(npz(tmp_path / "a.npz", y=np.zeros(2, int)))


def npy_header(shape: tuple[int, ...], descr: str = "<f8") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue()


@pytest.mark.parametrize("shape", [(2**40, 2**22), (2**16, 2**16), (4 * 10**18,)])
def test_npz_that_declares_too_much_is_refused_from_its_header(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("x.npy", npy_header(shape))
    with pytest.raises(DataError, match=r"at most 4 GiB.*max_bytes"):
        load(str(tmp_path / "b.npz"))


def test_npz_bomb_that_is_really_there_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    path = tmp_path / "b.npz"
    np.savez_compressed(path, x=np.zeros((2**20, 4), np.uint8), y=np.zeros(2**20, np.uint8))
    assert path.stat().st_size < 20_000
    with pytest.raises(DataError, match=r"array 'x'.*max_bytes"):
        load(str(path), max_bytes=2**20)
    with pytest.raises(DataError, match=r"array 'y'.*max_bytes"):  # the limit is for all arrays together
        load(str(path), max_bytes=2**22 + 2**19)


def test_npz_header_that_lies_about_the_stored_bytes(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as z:
        z.writestr("x.npy", npy_header((2, 2)) + bytes(1000))
    with pytest.raises(DataError, match=r"damaged"):
        load(str(tmp_path / "b.npz"))


@given(st.binary(max_size=300), st.integers(0, 600))
@settings(max_examples=60, deadline=None)
def test_fuzzed_npz_is_refused_in_one_sentence(tmp_path_factory: Any, junk: bytes, where: int) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.npz"
    np.savez(path, **GOOD)
    data = path.read_bytes()
    path.write_bytes(data[:where] + junk + data[where + len(junk) :])
    said = ""
    try:
        load(str(path))
    except FedspanError as error:
        said = str(error)
    assert "\n" not in said


def test_idx_faults(tmp_path: Path) -> None:
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    write_idx(labels, np.zeros(3, np.uint8))
    write_idx(images, pixels(3, (4, 4)), magic=bytes((0, 0, 0x0D, 3)))
    with pytest.raises(DataError, match=r"magic 0x00000d03"):
        load(str(tmp_path))
    images.write_bytes(bytes((0, 0, 8, 3)) + np.array([2**31, 2**31, 4], ">u4").tobytes())
    with pytest.raises(DataError, match=r"max_bytes"):
        load(str(tmp_path))
    images.write_bytes(bytes((0, 0, 8, 3)) + np.array([3, 4, 4], ">u4").tobytes() + b"short")
    with pytest.raises(DataError, match=r"damaged"):
        load(str(tmp_path))
    images.write_bytes(bytes((0, 0, 8, 3)) + b"\0")
    with pytest.raises(DataError):
        load(str(tmp_path))


def test_wrong_size_and_damaged_pictures(tmp_path: Path) -> None:
    path = tmp_path / "mnist/train.parquet"
    write_parquet(path, pixels(2, (20, 20)), label=[0, 1])
    with pytest.raises(DataError, match=r"row 0.*20x20, not 28x28"):
        load("mnist", tmp_path)
    for cell in (b"no picture", None, encode(pixels(1, (28, 28))[0])[:60]):
        pq.write_table(pa.table({"image": [encode(pixels(1, (28, 28))[0]), cell], "label": [0, 1]}), path)
        with pytest.raises(DataError, match=r"row 1"):
            load("mnist", tmp_path)
    write_parquet(path, pixels(2, (28, 28)), label=[0, 10])
    with pytest.raises(DataError, match=r"0\.\.9\. Got 10 in row 1"):
        load("mnist", tmp_path)
    with pytest.raises(DataError, match=r"max_bytes"):
        load("mnist", tmp_path, max_bytes=1000)
    path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"readable parquet"):
        load("mnist", tmp_path)


def test_parquet_without_labels_or_features(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1.0]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"label column is needed"):
        load(str(tmp_path / "t.parquet"))
    pq.write_table(pa.table({"label": [1]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"picture column or numeric"):
        load(str(tmp_path / "t.parquet"))
    pq.write_table(pa.table({"a": [1.0, None], "label": [1, 0]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"must be finite"):
        load(str(tmp_path / "t.parquet"))
    pq.write_table(pa.table({"a": [1.0, 2.0], "label": [1, None]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"labels must be integers"):
        load(str(tmp_path / "t.parquet"))


def test_folder_faults(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must hold .npz files"):
        load(str(tmp_path))
    npz(tmp_path / "a.npz", **GOOD)
    npz(tmp_path / "b.npz", x=np.ones((2, 5)), y=np.zeros(2, int))
    with pytest.raises(DataError, match=r"b\.npz.*must have shape \(2,\) like those of a\.npz"):
        load(str(tmp_path))
    npz(tmp_path / "b.npz", x=np.ones((0, 2)), y=np.zeros(0, int))
    with pytest.raises(DataError, match=r"client 'b' has no training examples"):
        load(str(tmp_path))


def test_link_out_of_a_client_folder_is_refused(tmp_path: Path) -> None:
    npz(tmp_path / "secret.npz", **GOOD)
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients/a.npz").symlink_to(tmp_path / "secret.npz")
    with pytest.raises(ConfigError, match=r"must stay inside"):
        load(str(tmp_path / "clients"))


def test_names_out_of_files_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    s = load(npz(tmp_path / "a.npz", **GOOD, client=np.array(["\x1b[31mred", "a\nb", "c", "c"])))
    assert all(name.isprintable() for name in s.client_names)


@pytest.mark.parametrize("bad", [{"size": 0}, {"limit": -1}, {"limit": 1.5}, {"classes": True}, {"max_bytes": 0}])
def test_bad_options(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be an integer >= 1. Got"):
        load("digits", **bad)


@pytest.mark.parametrize("source", ["minst", "", "a\0b", "../nowhere.npz", "/nowhere/x.parquet", "./nowhere", "a/b/c"])
def test_unknown_sources(source: str) -> None:
    with pytest.raises(FedspanError):
        load(source)


def test_unknown_source_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'mnist'"):
        load("minst")
    assert {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100"} <= set(SOURCES)


def test_missing_data_names_the_places_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cifar10' was not found. Looked at: .*cifar10.*train.parquet.*FEDSPAN_DATA"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("module", ["pyarrow.parquet", "PIL.Image", "datasets"])
def test_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    write_parquet(tmp_path / "mnist/train.parquet", pixels(2, (28, 28)), label=[0, 1])
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=r"pip install 'fedspan\[data\]'"):
        load("a/b") if module == "datasets" else load("mnist", tmp_path)


# --- FederatedData -----------------------------------------------------------------------------------------------


def pair(n: int = 4, **change: Any) -> tuple[Any, Any]:
    return change.get("x", np.ones((n, 2))), change.get("y", np.arange(n) % 2)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (pair(x=np.full((4, 2), np.nan)), "finite.*client 1"),
        (pair(y=np.array([0, 1, -1, 0])), "Got -1.*client 1"),
        (pair(y=np.array([0, 1, 3, 0])), r"0\.\.1\. Got 3.*client 1"),
        (pair(y=np.array([0.0, 1, 0, 0])), "labels of client 1 must be of the same kind"),
        (pair(x=np.ones((4, 3))), "client 1 must have shape"),
        (pair(x=np.ones((0, 2)), y=np.zeros(0, int)), "client 1 has no training"),
        (pair(y=np.zeros(3, int)), "client 1 must have as many labels"),
        (pair(x=np.array([[None, 1]] * 4, object)), "client 1 must be an array of numbers"),
        (pair(x=np.ones((4, 2), complex)), "client 1 must be an array of real numbers"),
    ],
)
def test_from_arrays_names_the_client(bad: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        FederatedData.from_arrays([pair(), bad], classes=2)


def test_from_arrays_kinds() -> None:
    d = FederatedData.from_arrays([pair(), pair(1), (np.ones((4, 2), np.uint8), np.zeros(4, int))])
    assert d.x.dtype == torch.float32 and d.classes == 2 and d.sizes.tolist() == [3, 1, 3]
    real = FederatedData.from_arrays([(np.ones((4, 2)), np.ones(4))])
    assert real.classes is None
    own = FederatedData.from_arrays([pair(20)], test=[pair(3)], validation_fraction=0.1)
    assert (own.sizes.tolist(), len(own.validation[0]), own.test[0].tolist()) == ([18], 2, [20, 21, 22])


@given(st.integers(0, 60), st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 5))
def test_split_is_a_partition_with_training_examples(n: int, test: float, validation: float, client: int) -> None:
    rows = np.arange(100, 100 + n)
    parts = split(rows, client, 0, test, validation)
    assert sorted(np.concatenate(parts).tolist()) == rows.tolist()
    assert n == 0 or len(parts[0]) >= 1
    assert n < 2 or test == 0 or len(parts[2]) >= 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"validation": [np.array([9])]}, "rows of client 0"),
        ({"validation": [np.array([0])] * 2}, "validation must have one entry"),
        ({"names": ["a", "b"]}, "names must have one entry"),
        ({"groups": torch.tensor([0, 1])}, "groups must have one entry"),
        ({"relabel": torch.zeros(1, 3, dtype=torch.int64)}, "relabel must have shape"),
        ({"classes": 0}, "classes must be at least 1"),
        ({"train": []}, "at least one client"),
        ({"train": [np.empty(0, np.int64)]}, "client 0 has no training"),
    ],
)
def test_federated_data_checks_its_fields(change: dict[str, Any], sentence: str) -> None:
    good: dict[str, Any] = {
        "x": torch.ones(3, 2), "y": torch.tensor([0, 1, 0]), "train": [np.array([0, 1])], "test": [np.array([2])],
        "classes": 2,
    }  # fmt: skip
    FederatedData(**good)
    with pytest.raises(DataError, match=sentence):
        FederatedData(**{**good, **change})


def test_whole_numbers_of_a_column_are_read_by_their_memory() -> None:
    column = pa.array([5, 6, 7, 8], pa.int32())[1:3]
    assert tables._values(column).tolist() == [6, 7] and tables._values(column).dtype == np.int32
    assert tables._values(column[:0]).tolist() == []
    holes = tables._values(pa.array([1, None], pa.int64()))  # as before: pyarrow's own way
    assert holes[0] == 1 and np.isnan(holes[1])
    assert tables._values(pa.array(["a", "b"])).tolist() == ["a", "b"]
