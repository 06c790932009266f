"""Tables as they come: columns with roles, categories, gaps, scales, and a sentence for what does not fit."""

from __future__ import annotations

import gzip
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspan.config import assemble_data, from_dict, to_toml
from fedspan.config import load_config as read_config
from fedspan.data.tables.preprocessing import Preprocessing
from fedspan.data.tables.schema_agreement import centre, conclude, first_sums, second_sums
from fedspan.data.tables.table_columns import columns_of
from fedspan.data.tables.table_federation import read_tables, table_data
from fedspan.data.tables.table_layout import TableLayout
from fedspan.errors import ConfigError, DataError, FedspanError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

HEADER = "town,age,pressure,pain,note,ill,split"


def rows(town: str, n: int = 12, start: int = 0) -> list[str]:
    kinds = ["typical", "none", "other"]
    lines = []
    for k in range(start, start + n):
        part = "test" if k % 4 == 3 else "train"
        lines.append(
            f"{town},{30 + 7 * k % 50},{100 + 11 * k % 60}.5,{kinds[k % 3]},x{k},{'yes' if k % 2 else 'no'},{part}"
        )
    return lines


def write(path: Path, lines: list[str], header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    return write(tmp_path / "hospitals.csv", rows("rome") + rows("oslo", 16, 3) + rows("bern", 20, 5))


LAYOUT = TableLayout(client="town", target="ill", split="split", drop=("note",))


def test_a_csv_becomes_a_federation(hospitals: Path) -> None:
    data = table_data(str(hospitals), LAYOUT)
    assert (
        data.names == ["bern", "oslo", "rome"] and data.class_names == ["no", "yes"] and data.task == "classification"
    )
    made = data.preprocessing
    assert made is not None and made.names == ["age", "pain=none", "pain=other", "pain=typical", "pressure"]
    assert data.x.shape == (48, 5) and data.x.dtype == torch.float32
    assert [len(t) for t in data.train] == [15, 12, 9] and [len(t) for t in data.test] == [5, 4, 3]
    train = data.x[torch.from_numpy(np.concatenate(data.train))].double()
    assert made.standardise == "federated"  # ages are far from 0
    assert (
        train[:, [0, 4]].mean(0).abs().max() < 1e-6 and (train[:, [0, 4]].std(0, correction=0) - 1).abs().max() < 1e-6
    )
    assert set(train[:, 1:4].unique().tolist()) == {0.0, 1.0}


def test_gz_tsv_parquet_and_a_folder_give_the_same_numbers(hospitals: Path, tmp_path: Path) -> None:
    text = hospitals.read_text()
    (tmp_path / "h.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "h.tsv").write_text(text.replace(",", "\t"))
    (tmp_path / "h.csv").write_text(text.replace(",", ";"))
    table = read_tables(hospitals, 1 << 20)[""]
    pq.write_table(table, tmp_path / "h.parquet")
    whole = table_data(str(hospitals), LAYOUT)
    for name in ("h.csv.gz", "h.tsv", "h.csv", "h.parquet"):
        other = table_data(str(tmp_path / name), LAYOUT)
        assert torch.equal(whole.x, other.x) and torch.equal(whole.y, other.y), name
    folder = tmp_path / "towns"
    folder.mkdir()
    shuffled = ["pressure", "split", "ill", "pain", "age", "note"]
    for town in ("bern", "oslo", "rome"):
        own = table.filter(pa.compute.equal(table["town"], town)).select(shuffled)
        pq.write_table(own, folder / f"{town}.parquet")
    apart = table_data(str(folder), TableLayout(target="ill", split="split", drop=("note",)))
    assert apart.names == whole.names and apart.preprocessing == whole.preprocessing
    for i in range(3):
        for part in ("train", "test"):
            a, b = (torch.from_numpy(getattr(d, part)[i]) for d in (whole, apart))
            assert torch.equal(whole.x[a], apart.x[b]) and torch.equal(whole.y[a], apart.y[b])


def test_folds_targets_and_categories(tmp_path: Path) -> None:
    lines = [f"{k % 2},{k % 5},{k / 8},{k % 3}.0,{k % 2}" for k in range(40)]
    path = write(tmp_path / "t.csv", lines, "who,fold,score,grade,sex")
    layout = TableLayout(
        client="who", target="score", split="fold", fold=2, categorical=("grade",), encode="drop-first"
    )
    data = table_data(str(path), layout)
    assert data.classes is None and data.task == "regression" and data.y.dtype == torch.float32
    assert [len(t) for t in data.test] == [4, 4] and data.preprocessing is not None
    assert data.preprocessing.names == ["grade=1", "grade=2", "sex"]
    both = table_data(str(path), TableLayout(client="who", target=("score", "grade"), categories={"sex": [1, 0, 2]}))
    assert both.y.shape == (40, 2) and both.preprocessing is not None
    assert both.preprocessing.names == ["fold", "sex=1", "sex=0", "sex=2"]
    classes = table_data(str(path), TableLayout(client="who", target="grade", categories={"grade": [0, 1, 2, 3]}))
    assert classes.classes == 4 and classes.class_names == ["0", "1", "2", "3"]
    whole = table_data(str(path), TableLayout(client="who", target="grade", target_type="number"))
    assert whole.classes is None
    with pytest.raises(DataError, match=r"data.fold must be one of the folds of column 'fold', 0, 1, 2, 3, 4"):
        table_data(str(path), TableLayout(client="who", target="score", split="fold", fold=9))


def test_other_partitions_divide_a_table_without_clients(hospitals: Path) -> None:
    layout = TableLayout(target="ill", drop=("note", "town", "split"))
    data = table_data(str(hospitals), layout, kind="dirichlet", clients=3, min_samples=4, test=0.25, validation=0.2)
    assert data.clients == 3 and sum(len(v) for v in data.validation) > 0
    assert sum(map(len, [*data.train, *data.validation, *data.test])) == 48
    few = table_data(str(hospitals), layout, kind="iid", clients=2, limit=20)
    assert len(few.y) == 20
    with pytest.raises(DataError, match="must say whose a row is"):
        table_data(str(hospitals), layout)


def test_gaps(tmp_path: Path) -> None:
    lines = [
        f"{'ab'[k % 2]},{'' if k in (3, 8) else k},{'?' if k == 4 else 'uv'[k % 2]},{k % 2 / 2}" for k in range(20)
    ]
    path = str(write(tmp_path / "gaps.csv", lines, "who,size,kind,y"))
    layout = {"client": "who", "target": "y", "standardise": "none"}
    with pytest.raises(
        DataError, match=r"client a: column '\w+' has 1 missing value\(s\), first in row \d; set data.missing"
    ):
        table_data(path, TableLayout(**layout))  # type: ignore[arg-type]
    dropped = table_data(path, TableLayout(**layout, missing="drop"))  # type: ignore[arg-type]
    assert len(dropped.y) == 17
    filled = table_data(path, TableLayout(**layout, missing="mean"))  # type: ignore[arg-type]
    train = np.concatenate(filled.train)
    known = [k for k in train if k not in (3, 8)]
    assert filled.x[3, 2] == pytest.approx(np.mean(known)) and filled.x[4, :2].sum() == pytest.approx(1.0)
    said = table_data(path, TableLayout(**layout, missing="indicator"))  # type: ignore[arg-type]
    assert said.preprocessing is not None
    held = [c for c, rows_ in (("kind", {4}), ("size", {3, 8})) if rows_ & set(train.tolist())]
    assert said.preprocessing.names == ["kind=u", "kind=v", "size", *(f"{c} missing" for c in held)]
    if "size" in held:
        assert said.x[3, -1] == 1 and said.x[5, -1] == 0


def test_each_client_by_itself(hospitals: Path) -> None:
    data = table_data(str(hospitals), TableLayout(client="town", target="ill", split="split", drop=("note",),
                                                  standardise="client", standardised="all"))  # fmt: skip
    for i in range(3):
        train = data.x[torch.from_numpy(data.train[i])].double()
        assert train.mean(0).abs().max() < 1e-6 and (train.std(0, correction=0) - 1).abs().max() < 1e-6
    assert data.preprocessing is not None and set(data.preprocessing.clients) == {"bern", "oslo", "rome"}
    with pytest.raises(DataError, match="a client must be one of"):
        data.preprocessing.scaling_of("paris")
    layout = TableLayout(target="ill", drop=("note", "town", "split"), standardise="client")
    with pytest.raises(ConfigError, match="needs rows of which each is one client's"):
        table_data(str(hospitals), layout, kind="iid", clients=2, split="common")


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), min_size=1, max_size=5),
    st.sampled_from([0.0, 1e6, -1e8]),
    st.sampled_from([1.0, 1e-3, 1e5]),
)
def test_federated_statistics_are_those_of_the_pooled_rows(clients: list[list[float]], shift: float, by: float) -> None:
    parts = [np.array(c)[:, None] * by + shift for c in clients]
    encoding = columns_encoding()
    sums = [first_sums(x) for x in parts]
    layout = TableLayout(target="y", standardise="federated")
    made = conclude(encoding, layout, sums, [second_sums(x, centre(sums, encoding)) for x in parts])
    exact = [Fraction(float(v)) for x in parts for v in x[:, 0]]
    mean = sum(exact) / len(exact)
    variance = sum((v - mean) ** 2 for v in exact) / len(exact)
    assert made.scaling is not None
    assert made.scaling.mean[0] == pytest.approx(float(mean), rel=1e-12, abs=1e-300 + 1e-12 * math.sqrt(variance))
    if variance > 0 and math.sqrt(variance) > 1e-6 * abs(float(mean)):
        assert made.scaling.scale[0] == pytest.approx(math.sqrt(variance), rel=1e-12)


def columns_encoding() -> Any:
    from fedspan.data.tables.preprocessing import Encoding, InputColumn

    return Encoding(columns=[InputColumn(name="v")], target=["y"])


def test_the_preprocessing_is_kept_and_prepares_new_rows(hospitals: Path, tmp_path: Path) -> None:
    data = table_data(str(hospitals), LAYOUT)
    assert data.preprocessing is not None
    data.preprocessing.write(tmp_path)
    read = Preprocessing.read(tmp_path)
    assert read == data.preprocessing and Preprocessing.read(tmp_path / "nowhere") is None
    # Unlabelled rows in another column order.
    table = read_tables(hospitals, 1 << 20)[""].select(["pain", "pressure", "age"])
    x = read.apply(columns_of(table, "new"), lambda row: f"row {row}")
    assert torch.equal(torch.from_numpy(x).float(), data.x)
    (tmp_path / "preprocessing.json").write_text('{"format": 7}')
    with pytest.raises(DataError, match="must be a preprocessing that fedspan wrote"):
        Preprocessing.read(tmp_path)


BAD = {
    "missing column": ({"oslo": "age=35"}, {}, r"client oslo: column 'age' is missing, which 2 of 3 clients have"),
    "text among numbers": ({"oslo": "abc"}, {}, r"client oslo: column 'age' must hold numbers.* such as 'abc'"),
    "a new category": ({"oslo": "unseen"}, {}, r"client oslo, row 3: column 'pain' has the category 'strange'"),
    "text for regression": ({}, {"target_type": "number"}, r"client \w+: target 'ill' must hold numbers"),
    "no such target": ({}, {"target": "illl"}, r"column 'illl' is missing. Did you mean 'ill'"),
    "no such split": ({}, {"split": "pain"}, r"column 'pain' must say train, validation or test.*'typical' in row"),
    "too few classes": ({}, {"categories": {"ill": ["no"]}}, r"target 'ill' must be one of no. Got 'yes'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_tables_get_one_sentence_with_client_and_column(tmp_path: Path, case: str) -> None:
    change, keys, sentence = BAD[case]
    for town in ("bern", "oslo", "rome"):
        lines, header = [line.partition(",")[2] for line in rows(town)], HEADER.partition(",")[2]
        if town in change:
            what = change[town]
            if what == "age=35":
                lines, header = [line.partition(",")[2] for line in lines], header.partition(",")[2]
            elif what == "abc":
                lines[2] = "abc," + lines[2].partition(",")[2]
            else:
                lines[3] = lines[3].replace("typical", "strange")
        write(tmp_path / f"{town}.csv", lines, header)
    layout: dict[str, Any] = {"target": "ill", "split": "split", "drop": ("note",), **keys}
    with pytest.raises(FedspanError, match=sentence):
        table_data(str(tmp_path), TableLayout(**layout))


def test_the_client_with_a_wrong_cell_is_named_in_one_file(hospitals: Path) -> None:
    whole = hospitals.read_text().splitlines()
    at = next(k for k, line in enumerate(whole) if line.startswith("oslo") and line.endswith("train"))
    whole[at] = ",".join(["oslo", "n.a.", *whole[at].split(",")[2:]])
    hospitals.write_text("\n".join(whole))
    with pytest.raises(
        DataError, match=r"client oslo: column 'age' must hold numbers, as 2 of 3 clients have.*'n\.a\.'"
    ):
        table_data(str(hospitals), LAYOUT)


def test_unseen_categories_may_count_as_none(hospitals: Path) -> None:
    hospitals.write_text(hospitals.read_text().replace("typical,x3,", "strange,x3,"))
    data = table_data(
        str(hospitals), TableLayout(client="town", target="ill", split="split", drop=("note",), unseen="zero")
    )
    assert (data.x[:, 1:4].sum(1) == 0).sum() >= 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "must be a CSV file with a header"),
        ("a,b\n", "at least one row"),
        ("a,a\n1,2\n", "'a' twice"),
        ("a,b\n1,2\n3\n", "must be a CSV file"),
        ("a,b,who,y\ninf,1,p,1\n", "must hold finite numbers of usual size. Got infinity in row 0"),
        ("a,b,who,y\n1,1,,1\n", "must hold a client's name or number in every row. Got none in row 0"),
    ],
)
def test_bad_csv_files(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(DataError, match=sentence):
        table_data(str(tmp_path / "bad.csv"), TableLayout(client="who", target="y"))


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
def test_damaged_tables_end_in_a_sentence(tmp_path: Path, name: str, hospitals: Path) -> None:
    rng, whole = np.random.default_rng(0), hospitals.read_bytes()
    if name.endswith(".gz"):
        whole = gzip.compress(whole)
    elif name.endswith(".parquet"):
        pq.write_table(read_tables(hospitals, 1 << 20)[""], tmp_path / name)
        whole = (tmp_path / name).read_bytes()
    fine = 0
    for k in range(60):
        raw = bytearray(whole)
        if k % 3 == 0:
            raw = raw[: int(rng.integers(0, len(raw)))]
        for _ in range(int(rng.integers(1, 8)) if k % 3 else 0):
            raw[int(rng.integers(0, len(raw)))] = int(rng.integers(0, 256))
        (tmp_path / name).write_bytes(bytes(raw))
        try:
            table_data(str(tmp_path / name), LAYOUT)
            fine += 1
        except FedspanError:
            pass
    assert fine < 60


@given(st.text(max_size=300))
def test_any_text_is_a_table_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(FedspanError):  # no text of hypothesis names these columns
        table_data(str(path), TableLayout(client="who is it", target="what is it"))


def test_the_layout_is_checked_before_anything_is_read() -> None:
    for keys, sentence in (
        ({"client": "a"}, "a table needs its target"),
        ({"target": "a", "client": "a"}, "Got 'a' twice"),
        ({"target": "a", "features": ("a",)}, "must not name the target"),
        ({"target": "a", "drop": ("a",)}, "used elsewhere"),
        ({"target": "a", "missing": "guess"}, "missing must be one of"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            TableLayout(**keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a table needs its target"):
        assemble_data(from_dict({"data": {"source": "x.csv"}}))
    with pytest.raises(ConfigError, match="size is not for tables"):
        from_dict({"data": {"source": "x.csv", "target": "y", "size": 3}})


def test_a_short_experiment_file_is_enough(hospitals: Path, tmp_path: Path) -> None:
    file = tmp_path / "exp.toml"
    file.write_text(
        f'[data]\nsource = "{hospitals}"\nclient = "town"\ntarget = "ill"\ndrop = ["note"]\nsplit = "split"\n'
    )
    config = read_config(file)
    assert config.partition.kind == "natural" and assemble_data(config).clients == 3
    # Also where the section says something else, as `deploy run` does with the number of nodes.
    again = from_dict(config.to_dict() | {"partition": {"clients": 3}})
    assert again.partition.kind == "natural" and assemble_data(again).clients == 3
    again = from_dict(__import__("tomllib").loads(to_toml(config)))
    assert again == config
    assert "standardise" not in to_toml(config) and "transforms" not in to_toml(config)
