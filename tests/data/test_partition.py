"""Partitions: every kind is disjoint, covers what it says, repeats by its seed, keeps its promises, and ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.data import (
    PARTITIONS,
    FederatedData,
    Source,
    check_partition,
    describe,
    figure,
    heterogeneity,
    label_counts,
    load,
    partition,
    text_picture,
)
from fedspan.errors import ConfigError, DataError


def make(n: int = 400, classes: int = 10, test: int = 100, seed: int = 0, skew: float = 0.0) -> Source:
    """A source whose single feature is the row number, with clients, superclasses (pairs) and two domains."""
    rng = np.random.default_rng(seed)
    p = np.exp(-skew * np.arange(classes))
    y = np.concatenate([np.arange(min(n, classes)), rng.choice(classes, max(0, n - classes), p=p / p.sum())])
    y = rng.permutation(y)
    return Source(
        name="toy",
        x=torch.arange(float(n))[:, None],
        y=torch.from_numpy(y),
        classes=classes,
        test_rows=np.arange(n - test, n),
        coarse=y // 2,
        client=rng.integers(0, 15, n),
        client_names=[f"c{i}" for i in range(15)],
        domain=np.where(y < classes // 2, 0, 1),
        domain_names=["low", "high"],
    )


def rows_of(data: FederatedData) -> list[np.ndarray]:
    return [np.concatenate(parts) for parts in zip(data.train, data.validation, data.test)]


ALL: dict[str, dict[str, Any]] = {kind: {} for kind in PARTITIONS}
ALL["natural"] = {"min_samples": 1}
ALL["dirichlet"] = {"alpha": 0.1, "min_samples": 3}
ALL["permuted-clients"] = {"base": "dirichlet", "min_samples": 2}
ALL["shifted-groups"] = {"shifts": ["none", "permute"]}  # of one feature, so that x stays the row number
ALL["mixed-groups"] = {"permute": False, "shifts": ["none", "permute", "none"], "sizes": "lognormal:1"}
COVERS = {
    "iid",
    "dirichlet",
    "pathological",
    "shards",
    "natural",
    "permuted-groups",
    "shifted-groups",
    "mixed-groups",
    "permuted-clients",
    "label-groups",
}


@pytest.mark.parametrize("kind", PARTITIONS)
@given(
    clients=st.integers(10, 14),
    seed=st.integers(0, 10**6),
    n=st.integers(300, 500),
    validation=st.sampled_from([0.0, 0.05]),
)
@settings(max_examples=12, deadline=None)
def test_client_split(kind: str, clients: int, seed: int, n: int, validation: float) -> None:
    source = make(n, seed=seed % 7)
    started = time.perf_counter()
    data = partition(source, kind, clients, seed, validation=validation, **ALL[kind])
    assert time.perf_counter() - started < 10
    again = partition(source, kind, clients, seed, validation=validation, **ALL[kind])
    held = rows_of(data)
    every = np.concatenate(held)
    assert data.clients == clients
    assert len(np.unique(every)) == len(every), "an example is held twice"
    if kind in COVERS and kind != "natural":
        assert len(every) == n
    for i in range(clients):
        n_i = len(held[i])
        assert abs(len(data.test[i]) - 0.25 * n_i) <= 1 and abs(len(data.validation[i]) - validation * n_i) <= 1
        for part in ("train", "validation", "test"):
            assert np.array_equal(getattr(data, part)[i], getattr(again, part)[i])
    assert data.relabel is None or torch.equal(data.relabel, again.relabel)
    # x is the row number in the source, so examples and labels still belong together.
    if kind != "domains":
        assert torch.equal(source.y[data.x[:, 0].long()], data.y)


@pytest.mark.parametrize("kind", PARTITIONS)
def test_global_split(kind: str) -> None:
    source = make()
    data = partition(source, kind, 10, 3, split="global", validation=0.1, **ALL[kind])
    tests = set(source.test_rows.tolist())
    for i in range(10):
        train = data.x[torch.from_numpy(np.concatenate([data.train[i], data.validation[i]]))].flatten().tolist()
        test = data.x[torch.from_numpy(data.test[i])].flatten().tolist()
        assert not tests & set(train) and set(test) <= tests
        if kind not in ("domains", "natural"):
            assert set(test) == tests
        if data.relabel is not None:
            assert torch.equal(data.labels(i, "test"), data.relabel[i][data.y[torch.from_numpy(data.test[i])]])


@pytest.mark.parametrize("kind", PARTITIONS)
def test_seed_changes_the_split_and_nothing_else_does(kind: str) -> None:
    source = make()
    torch.manual_seed(1)
    a = partition(source, kind, 10, 1, **ALL[kind])
    torch.manual_seed(2)
    np.random.seed(5)
    b = partition(source, kind, 10, 1, **ALL[kind])
    c = partition(source, kind, 10, 2, **ALL[kind])
    assert all(np.array_equal(p, q) for p, q in zip(a.train, b.train))
    assert not all(np.array_equal(p, q) for p, q in zip(a.train, c.train))


def test_split_is_pinned() -> None:
    """Published results depend on these numbers; a change here changes results."""
    data = partition(load("digits"), "dirichlet", 5, 0, alpha=0.5)
    assert data.sizes.tolist() == [315, 215, 150, 324, 344]
    assert data.train[0][:5].tolist() == [602, 395, 173, 1033, 524]


# --- kinds -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.sampled_from([1e-6, 1e-3, 0.05, 0.5, 100.0, 1e6]), st.integers(1, 12), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_dirichlet_reaches_min_samples_or_says_why(clients: int, alpha: float, least: int, seed: int) -> None:
    source = make(300, test=0, skew=0.5)
    if clients * least > 300:
        with pytest.raises(DataError, match="needs at least"):
            partition(source, "dirichlet", clients, seed, alpha=alpha, min_samples=least)
        return
    data = partition(source, "dirichlet", clients, seed, alpha=alpha, min_samples=least)
    sizes = [len(r) for r in rows_of(data)]
    assert min(sizes) >= least and sum(sizes) == 300


def test_dirichlet_alpha_orders_heterogeneity() -> None:
    source = load("digits")
    apart = [heterogeneity(partition(source, "dirichlet", 20, 0, alpha=a)) for a in (0.05, 0.5, 100.0)]
    assert apart[0] > 0.6 > apart[1] > 0.3 > apart[2]


def test_dirichlet_does_not_favour_the_last_client() -> None:
    source = make(2000, classes=100, test=0)
    sizes = np.mean([partition(source, "dirichlet", 20, s, alpha=1.0, min_samples=1).sizes for s in range(20)], axis=0)
    assert abs(sizes[-1] / sizes.mean() - 1) < 0.15


@given(st.integers(1, 50), st.sampled_from([1e-6, 0.1, 1.0, 1e6]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_dirichlet_clients_have_equal_sizes(clients: int, alpha: float, seed: int) -> None:
    data = partition(make(300, test=0, skew=0.5), "dirichlet-clients", clients, seed, alpha=alpha)
    assert {len(r) for r in rows_of(data)} == {300 // clients}
    fixed = partition(make(300, test=0), "dirichlet-clients", clients, seed, alpha=alpha, samples_per_client=5)
    assert {len(r) for r in rows_of(fixed)} == {5}


@given(st.integers(1, 30), st.integers(1, 10), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_pathological_classes(clients: int, c: int, seed: int) -> None:
    source = make(600, test=0)
    data = partition(source, "pathological", clients, seed, classes_per_client=c)
    held = [set(source.y[torch.from_numpy(r)].tolist()) for r in rows_of(data)]
    assert all(len(h) == c for h in held)
    holders = np.bincount([k for h in held for k in h], minlength=10)
    assert holders.max() - holders.min() <= 1
    assert clients * c < 10 or holders.min() >= 1


def test_pathological_refuses_more_classes_or_holders_than_there_are() -> None:
    with pytest.raises(DataError, match=r"at most the 10 classes.*Got 11"):
        partition(make(), "pathological", 3, classes_per_client=11)
    with pytest.raises(DataError, match=r"class \d+, which 20 clients hold"):
        partition(make(30, test=0), "pathological", 20, classes_per_client=10)


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_shards(clients: int, s: int, seed: int) -> None:
    source = make(300, test=0)
    data = partition(source, "shards", clients, seed, shards_per_client=s)
    sizes = [len(r) for r in rows_of(data)]
    assert sum(sizes) == 300 and max(sizes) - min(sizes) <= s
    if clients * s >= 30:  # shards no longer than the shortest class touch at most two classes
        assert all(len(set(source.y[torch.from_numpy(r)].tolist())) <= 2 * s for r in rows_of(data))


def test_natural_keeps_owners_apart() -> None:
    source = make()
    assert source.client is not None
    data = partition(source, "natural", seed=1, min_samples=1)
    assert data.clients == 15 and data.names == [f"c{i}" for i in range(15)]
    for i, rows in enumerate(rows_of(data)):
        assert set(source.client[rows].tolist()) == {i} and len(rows) == (source.client == i).sum()
    some = partition(source, "natural", seed=1, min_samples=1, fraction=0.4)
    assert some.clients == 6 and set(some.names) < set(data.names)
    assert partition(source, "natural", 4, min_samples=1).clients == 4
    big = partition(source, "natural", min_samples=27)
    assert 0 < big.clients < 15 and min(len(r) for r in rows_of(big)) >= 27
    with pytest.raises(DataError, match="lower min_samples"):
        partition(source, "natural", min_samples=1000)


def test_natural_with_a_test_file_per_client(tmp_path: Path) -> None:
    for k in range(3):
        x = np.full((12, 2), k)
        np.savez(tmp_path / f"n{k}.npz", x=x, y=np.arange(12) % 2, x_test=x[:4], y_test=np.arange(4) % 2)
    data = partition(load(str(tmp_path)), "natural", split="global")
    assert data.names == ["n0", "n1", "n2"] and data.sizes.tolist() == [12] * 3
    for k in range(3):
        assert len(data.test[k]) == 4 and bool((data.x[torch.from_numpy(data.test[k])] == k).all())
    assert [len(r) for r in rows_of(partition(load(str(tmp_path)), "natural"))] == [16] * 3


def test_permuted_groups() -> None:
    data = partition(make(), "permuted-groups", 11, 5, groups=4)
    assert data.groups is not None and data.groups.tolist() == [i % 4 for i in range(11)]
    assert data.relabel is not None and data.relabel.shape == (11, 10)
    assert torch.equal(data.relabel.sort(1).values, torch.arange(10).expand(11, 10))
    for i in range(11):
        for j in range(11):
            assert torch.equal(data.relabel[i], data.relabel[j]) == (i % 4 == j % 4)
    rows = torch.from_numpy(data.train[3])
    assert torch.equal(data.labels(3), data.relabel[3][data.y[rows]])


def test_permuted_clients_all_differ_while_there_are_enough_namings() -> None:
    data = partition(make(classes=3), "permuted-clients", 6, 0)
    assert data.relabel is not None and len(torch.unique(data.relabel, dim=0)) == 6
    assert partition(make(classes=2), "permuted-clients", 6, 0).clients == 6


def test_label_groups() -> None:
    source = make()
    data = partition(source, "label-groups", 10, 0)  # five pairs of classes, from the coarse labels
    assert data.groups is not None and data.groups.tolist() == [i % 5 for i in range(10)]
    for i in range(10):
        assert set(data.labels(i).tolist()) <= {2 * (i % 5), 2 * (i % 5) + 1}
    plain = load("digits")
    data = partition(plain, "label-groups", 6, 0, groups=3)
    assert [sorted(set(data.labels(i).tolist())) for i in range(3)] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    with pytest.raises(ConfigError, match=r"clients must be at least 5. Got 3"):
        partition(plain, "label-groups", 3, 0)
    with pytest.raises(ConfigError, match=r"at most the number of classes, 10. Got 11"):
        partition(plain, "label-groups", 20, 0, groups=11)


def test_domains_renumber_labels_inside_each_domain() -> None:
    source = make()
    data = partition(source, "domains", seed=0)
    assert data.clients == 8 and data.classes == 5 and data.names[:3] == ["low-0", "high-0", "low-1"]
    assert data.groups is not None and data.relabel is not None and len(torch.unique(data.relabel, dim=0)) == 8
    for i in range(8):
        original = source.y[data.x[torch.from_numpy(data.train[i]), 0].long()]
        assert bool(((original < 5) == (int(data.groups[i]) == 0)).all())
        assert torch.equal(data.labels(i), data.relabel[i][original % 5])
    assert partition(source, "domains", permute=False).relabel is None
    with pytest.raises(ConfigError, match="every domain needs a client"):
        partition(source, "domains", 1)


# --- small and odd data ------------------------------------------------------------------------------------------


def test_one_example_per_client_and_one_class() -> None:
    source = Source(name="one", x=torch.ones(3, 2), y=torch.zeros(3, dtype=torch.int64), classes=1)
    for kind, options in (("iid", {}), ("dirichlet", {"min_samples": 1}), ("shards", {"shards_per_client": 1})):
        data = partition(source, kind, 3, 0, **options)
        assert data.sizes.tolist() == [1, 1, 1] and [len(t) for t in data.test] == [0, 0, 0]
    with pytest.raises(DataError, match=r"needs at least 4 examples. Got 3"):
        partition(source, "iid", 4)


def test_many_clients_are_dealt_quickly() -> None:
    source = make(20_000, test=0)
    started = time.perf_counter()
    data = partition(source, "dirichlet", 2000, 0, alpha=0.01, min_samples=10)
    assert time.perf_counter() - started < 10 and data.clients == 2000


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kind": "dirichelt"}, "Did you mean 'dirichlet'"),
        ({"clients": 0}, r"^Partition: clients must be an integer >= 1\. Got 0\.$"),
        ({"clients": None}, "clients must be an integer >= 1. Got None"),
        ({"clients": 2.0}, "clients must be"),
        ({"clients": True}, "clients must be"),
        ({"split": "locl"}, "split must be 'client', 'global' or 'common'"),
        ({"test": 1.0}, r"test must be a fraction in \[0, 1\)"),
        ({"validation": float("nan")}, "validation must be a fraction"),
        ({"test": 0.6, "validation": 0.5}, "leave room for training"),
        ({"options": {"alhpa": 1.0}}, "no option 'alhpa'. Did you mean 'alpha'"),
        ({"options": {"alpha": 0}}, "alpha must be a number"),
        ({"options": {"alpha": float("inf")}}, "alpha must be a number"),
        ({"options": {"alpha": "0.5"}}, "alpha must be a number"),
        ({"options": {"min_samples": -1}}, "min_samples must be an integer"),
        ({"kind": "iid", "options": {"alpha": 1.0}}, "has no option 'alpha'. Allowed: min_samples, shifts, sizes"),
        ({"kind": "natural", "options": {"fraction": 0.0}}, "fraction must be"),
        ({"kind": "permuted-groups", "options": {"groups": 9}}, "at most the number of clients, 5. Got 9"),
        ({"kind": "permuted-groups", "options": {"groups": None}}, "groups must be an integer"),
        ({"kind": "permuted-clients", "options": {"base": "shards"}}, "base must be"),
        ({"kind": "domains", "options": {"permute": 1}}, "permute must be"),
    ],
)
def test_settings_are_checked_before_data(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_partition(**{"kind": "dirichlet", "clients": 5, **arguments})


def test_every_kind_is_listed_with_defaults_that_pass() -> None:
    for kind, (description, options) in PARTITIONS.items():
        filled = check_partition(kind, 10)
        assert description and filled.keys() == options.keys()
        if kind != "shifted-groups":  # as many rotations as there are groups
            assert filled == options


def test_what_the_source_lacks_is_said() -> None:
    digits = load("digits")
    for kind, sentence in (("natural", "client ids"), ("domains", "knows domains")):
        with pytest.raises(DataError, match=sentence):
            partition(digits, kind, 4)
    with pytest.raises(DataError, match=r"needs a source with its own test file.*split='client'"):
        partition(digits, "iid", 4, split="global")


# --- looking at a split ------------------------------------------------------------------------------------------


def test_describe_and_heterogeneity() -> None:
    source = make()
    data = partition(source, "label-groups", 5, 0, validation=0.05)
    table = describe(data)
    assert [list(r) for r in table] == [["name", "group", "n_train", "n_val", "n_test", "classes", "entropy"]] * 5
    assert table[2]["group"] == 2 and table[2]["classes"] == 2 and 0.8 < table[2]["entropy"] <= 1.0
    counts = label_counts(data)
    assert counts.sum() == data.sizes.sum() and counts.shape == (5, 10)
    share, overall = counts / counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()
    expected = np.mean([0.5 * np.abs(s - overall).sum() for s in share])
    assert heterogeneity(data) == pytest.approx(expected)


@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize(("kind", "clients"), [("dirichlet", 30), ("permuted-groups", 100), ("iid", 1)])
def test_text_picture_fits(width: int, kind: str, clients: int) -> None:
    source = make(2000, classes=60)
    text = text_picture(partition(source, kind, clients, 0), width, 20)
    picture = [line for line in text.splitlines() if "│" in line]
    assert len(picture) == min(20, clients) and max(map(len, picture)) <= width
    assert any(shade in text for shade in "░▒▓█") and "heterogeneity" in text
    with pytest.raises(ConfigError, match="width must be"):
        text_picture(partition(source, kind, clients, 0), 5)


def test_pictures_of_real_valued_targets() -> None:
    data = FederatedData.from_arrays([(np.ones((8, 2)), np.ones(8))])
    assert "1 client" in text_picture(data) and describe(data)[0]["classes"] is None
    with pytest.raises(DataError, match="class labels"):
        figure(data, "x.png")


def test_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    data = partition(make(), "label-groups", 10, 0)
    assert figure(data, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"must end in .png"):
        figure(data, tmp_path / "a.exe")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(DataError, match=r"pip install 'fedspan\[report\]'"):
        figure(data, tmp_path / "b.png")
