"""Scenarios of label and domain heterogeneity, from files and TOML to what a client is judged by; SVHN's files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import call
from fedspan.config import assemble, assemble_data, from_dict, to_toml
from fedspan.data import FederatedData, Source, describe, load, partition, text_picture
from fedspan.data.describe import judged_by
from fedspan.data.sources.catalog import DOMAINS, KNOWN
from fedspan.errors import ConfigError, DataError
from fedspan.simulation.simulator import simulate
from fedspan.storage.toml import parse_toml


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSPAN_DATA", raising=False)
    monkeypatch.delenv("FEDSPAN_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(path: Path, classes: int = 6, train: int = 240, test: int = 60) -> str:
    """An npz whose classes are easy to tell apart."""
    rng = np.random.default_rng(0)
    centres = 3 * rng.normal(size=(classes, 5))
    y = np.arange(train + test) % classes
    x = (centres[y] + rng.normal(size=(len(y), 5))).astype(np.float32)
    np.savez(path, x=x[:train], y=y[:train], x_test=x[train:], y_test=y[train:])
    return str(path)


def config(here: Path, **section: Any) -> Any:
    values = {
        "rounds": 3,
        "data": {"source": made(here / "made.npz")},
        "partition": {"kind": "iid", "clients": 6, **section},
        "model": {"hidden": [8]},
        "method": {"name": "fedavg", "private_head": True},
        "train": {"batch_size": 8, "workers": 1},
    }
    return from_dict(values)


def rows(part: list[np.ndarray]) -> list[list[int]]:
    return [sorted(p.tolist()) for p in part]


# ------------------------------------------------------------------------------------------------ labels


@pytest.mark.parametrize("split", ["client", "global", "common"])
@pytest.mark.parametrize("base", ["iid", "dirichlet"])
def test_permuting_labels_leaves_everybody_the_same_examples(here: Path, base: str, split: str) -> None:
    options = {"alpha": 0.5, "min_samples": 5} if base == "dirichlet" else {}
    standard = assemble_data(config(here, kind=base, split=split, **options))
    permuted = assemble_data(config(here, kind="permuted-clients", base=base, split=split, **options))
    for part in ("train", "validation", "test"):
        assert rows(getattr(standard, part)) == rows(getattr(permuted, part))
    assert standard.relabel is None and permuted.relabel is not None
    assert len(torch.unique(permuted.relabel, dim=0)) == 6
    for i in range(6):
        assert torch.equal(permuted.labels(i, "test"), permuted.relabel[i][standard.labels(i, "test")])


def test_a_common_test_set_is_judged_in_own_labels(here: Path) -> None:
    chosen = config(here, kind="permuted-clients", base="iid", split="global")
    method, task, data = assemble(chosen)
    result = simulate(method, task, data, rounds=3, batch_size=8, evaluate_every=3, workers=1)
    assert rows(data.test) == [list(range(240, 300))] * 6
    assert data.relabel is not None
    for i in range(6):
        with torch.no_grad():
            found = result.personal_model(i)(data.x[240:]).argmax(1)
        right = (found == data.relabel[i][data.y[240:]]).double().mean()
        assert result.per_client["accuracy"][i] == pytest.approx(float(right))
    assert result.accuracy["mean"] > 0.5  # judged in the labels of the file it would be chance, 1/6


def test_common_test_set_is_drawn_from_all_examples_and_balanced(here: Path) -> None:
    data = assemble_data(config(here, split="common", test=0.2, validation=0.1))
    assert rows(data.test) == [rows(data.test)[0]] * 6 and len(data.test[0]) == 60
    assert torch.bincount(data.labels(0, "test")).tolist() == [10] * 6
    held = np.concatenate([*data.train, *data.validation, data.test[0]])
    assert sorted(held.tolist()) == list(range(300)) and min(data.test[0]) < 240
    other = assemble_data(from_dict({**config(here, split="common", test=0.2).to_dict(), "seed": 1}))
    assert rows(other.test) != rows(data.test)
    # digits come without a test file of their own
    digits = partition(load("digits"), "permuted-clients", 20, split="common", test=0.1, base="dirichlet")
    assert 170 <= len(digits.test[0]) <= 190 and digits.clients == 20
    rare = Source(name="rare", x=torch.ones(5, 1), y=torch.tensor([0, 0, 0, 0, 1]), classes=2)
    assert len(partition(rare, "iid", 2, split="common", test=0.01).test[0]) == 1


def test_different_numbers_of_classes_per_client(here: Path) -> None:
    chosen = config(here, kind="pathological", classes_per_client=[1, 2, 6])
    assert from_dict(parse_toml(to_toml(chosen))) == chosen
    data = assemble_data(chosen)
    assert [r["classes"] for r in describe(data)] == [1, 2, 6, 1, 2, 6]
    alike = assemble_data(config(here, kind="pathological", classes_per_client=2))
    one = assemble_data(config(here, kind="pathological", classes_per_client=[2]))
    assert rows(alike.train) == rows(one.train)


# ------------------------------------------------------------------------------------------------ domains


def test_domains_of_listed_classes_with_different_numbers_of_them(here: Path) -> None:
    chosen = config(here, kind="domains", clients=6, split="global", domains=["0-2", "3 + 5"])
    assert from_dict(parse_toml(to_toml(chosen))) == chosen
    data = assemble_data(chosen)
    assert data.classes == 3 and data.names[:3] == ["0-2-0", "3 + 5-0", "0-2-1"] and data.groups is not None
    assert data.groups.tolist() == [0, 1, 0, 1, 0, 1]
    assert len(data.x) == 250  # class 4 belongs to nobody
    for i in range(6):
        count = 3 - i % 2
        for part in ("train", "test"):
            assert set(data.labels(i, part).tolist()) == set(range(count))  # C_k of its own, numbered from 0
        assert len(data.test[i]) == 10 * count
    method, task, _ = assemble(chosen)
    assert task.init()[task.need_head()[-1]].shape[0] == 3
    assert simulate(method, task, data, rounds=5, workers=1, batch_size=8).accuracy["mean"] > 0.6


def test_equal_domains_are_permuted_as_before() -> None:
    """Renaming inside C_k classes draws the same permutations where all C_k are alike."""
    from fedspan.data.partitions import assign

    a = assign.permutations(4, 5, np.random.default_rng(0))
    assert np.array_equal(a, assign.permutations(4, 5, np.random.default_rng(0), [5] * 4))
    b = assign.permutations(4, 5, np.random.default_rng(0), [2, 3, 4, 5])
    assert all(b[k, 2 + k :].tolist() == list(range(2 + k, 5)) for k in range(4))


def cifar100(root: Path, train: int = 4, test: int = 2) -> None:
    """All classes, a few pictures each; five consecutive classes are a superclass."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.fromarray(np.full((32, 32, 3), 9, np.uint8)).save(out, "PNG")
    (root / "cifar100").mkdir()
    for name, count in (("train", train), ("test", test)):
        fine = np.repeat(np.arange(100), count)
        cells = [{"bytes": out.getvalue(), "path": None}] * len(fine)
        pq.write_table(
            pa.table({"img": cells, "fine_label": fine, "coarse_label": fine // 5}), root / f"cifar100/{name}.parquet"
        )


def test_five_domains_of_cifar100(here: Path) -> None:
    cifar100(here)
    values = {"data": {"source": "cifar100", "root": str(here)}, "partition": {"kind": "domains", "split": "global"}}
    data = assemble_data(from_dict(values))
    names = list(KNOWN["cifar100"].coarse_names)
    source = load("cifar100", here)
    assert data.clients == 20 and data.classes == 10 and data.groups is not None and data.relabel is not None
    assert torch.bincount(data.groups).tolist() == [4] * 5 and len(torch.unique(data.relabel, dim=0)) == 20
    assert len(data.test[0]) == 20 and data.sizes.tolist() == [10] * 20
    assert rows(data.test)[0] == rows(data.test)[5] != rows(data.test)[1]
    assert "one test set for each group, in each client's own labels" in judged_by(data)
    lists = [" + ".join(members) for members in DOMAINS.values()]
    listed = partition(source, "domains", None, split="global", domains=lists)
    assert rows(listed.train) == rows(data.train) and torch.equal(listed.y, data.y)
    assert all(m in names for members in DOMAINS.values() for m in members)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"kind": "domains", "domains": ["0-2", "2-3"]}, r"must belong to one domain. Got 2 in '0-2' and in '2-3'"),
        ({"kind": "domains", "domains": ["0-9", "1"]}, r"lie in 0..5, the smaller first. Got '0-9'"),
        ({"kind": "domains", "domains": ["3-1", "0"]}, r"the smaller first. Got '3-1'"),
        ({"kind": "domains", "domains": ["cats", "0"]}, r"has no class or superclass 'cats'. Allowed: 0, 1"),
        ({"kind": "domains", "domains": ["0", "1", "2", "3", "4", "5"], "clients": 5}, "at least 6. Got 5"),
        ({"kind": "domains", "domains": "0-2"}, "domains must be a list of texts"),
        ({"kind": "domains", "domains": []}, "domains must be a list of texts"),
        ({"kind": "domains", "domains": [1, 2]}, "domains must be a list of texts"),
        ({"kind": "domains"}, "or lists of classes in the option domains"),
        ({"kind": "pathological", "classes_per_client": []}, r"list of 1 to 6 of them .* Got 0 values"),
        ({"kind": "pathological", "classes_per_client": [1] * 7}, "Got 7 values"),
        ({"kind": "pathological", "classes_per_client": [1, 0]}, "classes_per_client must be an integer >= 1. Got 0"),
        ({"kind": "pathological", "classes_per_client": [1, 7]}, "at most the 6 classes in the data. Got 7"),
        ({"split": "common", "test": 0.0}, "needs test above 0"),
        ({"split": "comon"}, "split must be 'client', 'global' or 'common'"),
    ],
)
def test_errors_are_one_sentence(here: Path, section: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, DataError), match=sentence):
        assemble_data(config(here, **section))


def test_a_domain_without_test_examples_is_refused(here: Path) -> None:
    x, y = np.ones((8, 2)), np.arange(8) % 2
    np.savez(here / "d.npz", x=x, y=y, x_test=x[:2], y_test=y[:2], domain=y)
    with pytest.raises(DataError, match=r"must have test examples. Got none of '0'.*split='common'"):
        partition(load("d.npz", here), "domains", 2, split="global")
    both = partition(load("d.npz", here), "domains", 2, split="common", permute=False)
    assert [len(t) for t in both.test] == [1, 1]


def test_commands_reach_the_scenarios(here: Path) -> None:
    source = made(here / "made.npz")
    args = ["--source", source, "--kind", "permuted-clients", "--clients", "6"]
    said = call("partition", *args, "partition.base=dirichlet", "partition.split=global").stdout
    assert "named in 6 different ways" in said and "global_test_local_labels" in said.replace("\n", " ")
    said = call("partition", "--source", source, "--kind", "domains", 'partition.domains=["0-2","3-4"]').stdout
    assert "2 true groups" in said and "each client's own held-out examples" in said
    (here / "exp.toml").write_text(
        f'[data]\nsource = "{source}"\n[partition]\nkind = "pathological"\nclients = 6\nclasses_per_client = [2, 4]\n'
    )
    assert "held by a client: 2 min" in call("partition", "exp.toml").stdout
    lines = call("partition", "exp.toml", "partition.classes_per_client=[9]", code=2).stderr.strip().splitlines()
    assert len(lines) == 1 and "at most the 6 classes" in lines[0]


def test_what_clients_are_tested_on_in_words() -> None:
    pair = (torch.ones(8, 2), torch.arange(8) % 2)
    own = FederatedData.from_arrays([pair, pair])
    assert judged_by(own) == "each client's own held-out examples" and "tested on: each" in text_picture(own)
    assert judged_by(partition(load("digits"), "iid", 3, split="common")) == "one test set for all"


# ------------------------------------------------------------------------------------------------ SVHN


def svhn(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pictures [32, 32, 3, n] and labels [n, 1] as published: 1 to 10, ten for the digit 0."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (32, 32, 3, n), dtype=np.uint8), (np.arange(n) % 10 + 1).astype(np.uint8)[:, None]


@pytest.mark.parametrize("compressed", [False, True])
def test_svhn_matlab_files(here: Path, compressed: bool) -> None:
    from scipy.io import savemat

    (here / "svhn").mkdir()
    x, y = svhn(20)
    t, s = svhn(10, 1)
    savemat(here / "svhn/train_32x32.mat", {"X": x, "y": y}, do_compression=compressed)
    savemat(here / "svhn/test_32x32.mat", {"X": t, "y": s.astype(np.float64)}, do_compression=compressed)
    source = load("svhn", here)
    assert source.x.shape == (30, 3, 32, 32) and source.test_rows.tolist() == list(range(20, 30))
    assert source.y.tolist() == [*range(1, 10), 0] * 3 and source.classes == 10
    mean, std = torch.tensor(KNOWN["svhn"].mean), torch.tensor(KNOWN["svhn"].std)
    torch.testing.assert_close(source.x[3].permute(1, 2, 0), (torch.from_numpy(x[..., 3]) / 255.0 - mean) / std)
    assert "svhn" in call("data", "--root", str(here)).stdout
    said = call("partition", "--source", "svhn", "--kind", "iid", "--clients", "2", f"data.root={here}").stdout
    assert "svhn: 2 client(s)" in said
    (here / "svhn/test_32x32.mat").unlink()
    assert len(load("svhn", here).test_rows) == 0


def test_svhn_npz(here: Path) -> None:
    (here / "svhn").mkdir()
    x, y = svhn(12)
    pictures = x.transpose(3, 0, 1, 2)  # channels last, as most tools save them
    np.savez(here / "svhn/svhn.npz", x=pictures, y=y[:, 0], x_test=pictures[:2], y_test=y[8:10, 0] % 10)
    source = load("svhn", here)
    assert source.x.shape == (14, 3, 32, 32) and source.y.tolist() == [*range(1, 10), 0, 1, 2, 9, 0]
    assert source.class_names[0] == "0"


def test_svhn_bad_files_are_told_in_one_sentence(here: Path) -> None:
    from scipy.io import savemat

    folder, (x, y) = here / "svhn", svhn(4)
    folder.mkdir()
    path = folder / "train_32x32.mat"
    for held, sentence in (
        ({"X": x}, r"must hold the variables X and y. Got X"),
        ({"X": x.astype(float), "y": y}, r"X must be bytes of shape \(32, 32, 3, n\). Got float64"),
        ({"X": x, "y": "one"}, "y is not an array of real numbers"),
        ({"X": x[..., 0], "y": y}, r"X must be bytes of shape \(32, 32, 3, n\)"),
        ({"X": x, "y": y[:3]}, "y must hold 4 whole numbers"),
        ({"X": x, "y": y + 0.5}, "y must hold 4 whole numbers"),
        ({"X": x, "y": y + 100}, r"labels must lie in 0..9. Got 101"),
        ({"X": x[:16], "y": y}, r"pictures of svhn must be \(3, 32, 32\)"),
    ):
        savemat(path, held)
        with pytest.raises(DataError, match=sentence):
            load("svhn", here)
    savemat(path, {"X": x, "y": y})
    with pytest.raises(DataError, match="at most"):
        load("svhn", here, max_bytes=1000)
    whole = path.read_bytes()
    for damaged in (whole[:-9], b"", b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM", b"nonsense" * 40):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"must be a MATLAB file of version 5 to 7\.2"):
            load("svhn", here)
    path.unlink()
    with pytest.raises(DataError, match=r"'svhn' was not found.*train_32x32.mat and test_32x32.mat"):
        load("svhn", here)
