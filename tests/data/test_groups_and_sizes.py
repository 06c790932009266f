"""Unequal groups, feature shifts by group, soft membership, quantity skew: what they promise and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import call, failing
from fedspan.config import assemble_data, from_dict, to_toml
from fedspan.data import FederatedData, Source, check_partition, load, partition, text_picture
from fedspan.data.digest import data_digest
from fedspan.data.partitions.feature_shifts import apply_shifts, parse_shift
from fedspan.data.partitions.quantity import Law, shares
from fedspan.errors import ConfigError, DataError
from fedspan.storage.toml import parse_toml


def pictures(n: int = 300, side: int = 6, channels: int = 1, test: int = 60, seed: int = 0) -> Source:
    """Random pictures whose first pixel is the row number."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(n, channels, side, side)).astype(np.float32))
    x[:, 0, 0, 0] = torch.arange(n)
    y = torch.from_numpy(np.arange(n) % 5)
    return Source(name="toy", x=x, y=y, classes=5, test_rows=np.arange(n - test, n))


def sizes_of(data: FederatedData) -> list[int]:
    return [len(a) + len(b) + len(c) for a, b, c in zip(data.train, data.validation, data.test)]


# --- quantity skew -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["iid", "permuted-groups", "shifted-groups", "mixed-groups", "label-groups"])
@given(
    clients=st.integers(5, 20),
    seed=st.integers(0, 10**6),
    law=st.sampled_from(["lognormal:0.3", "lognormal:5", "zipf:0.5", "zipf:20", "dirichlet:0.01", "dirichlet:10"]),
    least=st.integers(1, 4),
)
@settings(max_examples=10, deadline=None)
def test_sizes_follow_a_law_and_nobody_is_below_the_least(
    kind: str, clients: int, seed: int, law: str, least: int
) -> None:
    source = pictures()
    data = partition(source, kind, clients, seed, sizes=law, min_samples=least)
    again = partition(source, kind, clients, seed, sizes=law, min_samples=least)
    assert data_digest(data) == data_digest(again)
    found = sizes_of(data)
    assert sum(found) == len(source) and min(found) >= least
    held = np.concatenate([np.concatenate(p) for p in zip(data.train, data.validation, data.test)])
    assert len(np.unique(held)) == len(source), "every example has one holder"


def test_laws_are_what_their_names_say() -> None:
    rng = np.random.default_rng(0)
    zipf = np.sort(shares(Law("zipf", 2.0), 5, rng))[::-1]
    assert np.allclose(zipf / zipf[0], [1, 1 / 4, 1 / 9, 1 / 16, 1 / 25])
    logs = np.log(shares(Law("lognormal", 0.7), 20_000, rng))
    assert abs(logs.std() - 0.7) < 0.02
    even, uneven = (shares(Law("dirichlet", a), 50, rng).max() for a in (100.0, 0.05))
    assert even < 0.05 < 0.2 < uneven


def test_a_law_of_sizes_leaves_the_shuffle_alone() -> None:
    """Only the cuts differ, so that equal and unequal runs see the same order."""
    source = pictures()
    plain = partition(source, "iid", 6, 3, test=0.0)
    skewed = partition(source, "iid", 6, 3, test=0.0, sizes="lognormal:0.5", min_samples=1)
    assert np.array_equal(np.concatenate(plain.train), np.concatenate(skewed.train))
    assert max(sizes_of(skewed)) > 1.5 * max(sizes_of(plain))


# --- unequal groups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["permuted-groups", "shifted-groups", "label-groups"])
@pytest.mark.parametrize("sizes", ["20:8:4:2:2", [20, 8, 4, 2, 2]])
def test_groups_of_unequal_sizes(kind: str, sizes: Any) -> None:
    data = partition(pictures(), kind, 36, 0, group_sizes=sizes)
    assert data.groups is not None and torch.bincount(data.groups).tolist() == [20, 8, 4, 2, 2]
    assert "5 true groups of clients (20:8:4:2:2)" in text_picture(data)
    if kind == "label-groups":
        assert all(set(data.labels(i).tolist()) == {int(data.groups[i])} for i in range(36))


# --- feature shifts ----------------------------------------------------------------------------------------------


def test_shifts_do_what_their_names_say() -> None:
    x = pictures(50, 7, 3).x
    see = lambda text, a=x: apply_shifts(a, parse_shift(text), 1, 2)
    assert torch.equal(see("none"), x) and torch.equal(see("rotate:360"), x) and torch.equal(see("blur:0"), x)
    assert torch.equal(see("rotate:90+rotate:-90"), x) and torch.equal(see("rotate:180"), x.flip(2, 3))
    assert torch.equal(see("contrast:1"), x) or (see("contrast:1") - x).abs().max() < 1e-5
    assert (see("contrast:0") - x.mean((2, 3), keepdim=True)).abs().max() < 1e-5
    assert abs(float((see("noise:0.5") - x).std()) - 0.5) < 0.02 and torch.equal(see("noise:0"), x)
    permuted = see("permute")
    assert not torch.equal(permuted, x) and torch.equal(permuted.flatten(2).sort().values, x.flatten(2).sort().values)
    order = [int((x[0, 0].flatten() == v).nonzero()[0]) for v in permuted[0, 0].flatten()]
    assert torch.equal(permuted, x.flatten(2)[..., order].reshape(x.shape)), "all pictures and channels alike"
    wide = torch.zeros(1, 1, 9, 9)
    wide[0, 0, 4, 8] = 1.0  # a point on the right goes up, against the clock
    assert int(see("rotate:89.9", wide).argmax()) == 4 == int(see("rotate:90", wide).argmax())
    assert float(see("rotate:45", wide)[0, 0, :3, 5:].max()) > 0.1
    dot = torch.zeros(1, 1, 31, 31)
    dot[0, 0, 15, 15] = 1.0
    blurred = see("blur:2", dot)[0, 0]
    at = torch.arange(31.0) - 15
    assert abs(float(blurred.sum()) - 1) < 1e-5 and abs(float((blurred.sum(0) * at.square()).sum()) - 4) < 0.1


@pytest.mark.parametrize("split", ["client", "global", "common"])
def test_every_group_sees_its_examples_in_its_own_way(split: str) -> None:
    source = pictures()
    data = partition(source, "shifted-groups", 8, 0, split=split, validation=0.1)
    assert data.group_names == ["none", "rotate:90", "rotate:180", "rotate:270"] and data.groups is not None
    corners = [(0, 0), (-1, 0), (-1, -1), (0, -1)]  # where a turn against the clock puts the first pixel
    held = []
    for i in range(8):
        row, column = corners[int(data.groups[i])]
        for part in ("train", "validation", "test"):
            x = data.x[torch.from_numpy(getattr(data, part)[i])]
            at = x[:, 0, row, column].long()
            assert torch.equal(torch.rot90(source.x[at], int(data.groups[i]), (2, 3)), x)
            assert torch.equal(source.y[at], data.labels(i, part))
            held += at.tolist() if part != "test" or split == "client" else []
            if part == "test" and split == "global":
                assert at.tolist() == source.test_rows.tolist()
    assert len(set(held)) == len(held) and (split != "client" or len(held) == len(source))


def test_kinds_without_groups_see_shifts_in_turn_and_then_know_groups() -> None:
    config = from_dict(
        {
            "partition": {"kind": "dirichlet", "clients": 6, "shifts": ["none", "rotate:30+noise:0.2"]},
            "method": {"name": "oracle"},
        }
    )
    data = assemble_data(config)
    plain = partition(load("digits"), "dirichlet", 6, 0)
    assert data.groups is not None and data.groups.tolist() == [0, 1, 0, 1, 0, 1]
    assert all(np.array_equal(a, b) for a, b in zip(data.train, plain.train)), "a shift changes no holder"
    for i in range(6):
        rows = torch.from_numpy(data.train[i])
        assert torch.equal(data.x[rows], plain.x[rows]) == (i % 2 == 0)
    written = from_dict(parse_toml(to_toml(config).encode(), "x"))
    assert data_digest(assemble_data(written)) == data_digest(data)


# --- soft membership ---------------------------------------------------------------------------------------------


@given(clients=st.integers(3, 12), groups=st.integers(2, 6), alpha=st.sampled_from([1e-6, 0.3, 100.0]))
@settings(max_examples=15, deadline=None)
def test_clients_that_mix_groups(clients: int, groups: int, alpha: float) -> None:
    source = pictures()
    data = partition(source, "mixed-groups", clients, 7, groups=groups, alpha=alpha, shifts="none", validation=0.1)
    m = data.membership
    assert m is not None and data.groups is not None and data.relabel is None
    assert tuple(m.shape) == (clients, groups) and torch.allclose(m.sum(1), torch.ones(clients, dtype=m.dtype))
    assert torch.equal(m.argmax(1), data.groups) and sum(sizes_of(data)) == len(source)
    # The naming of every example is one of its client's groups', and shares are met as far as chance allows.
    named: dict[int, set[int]] = {}
    for i in range(clients):
        rows = torch.from_numpy(np.concatenate([data.train[i], data.validation[i], data.test[i]]))
        for before, now in zip(source.y[data.x[rows][:, 0, 0, 0].long()].tolist(), data.y[rows].tolist()):
            named.setdefault(before, set()).add(now)
    assert max(len(v) for v in named.values()) <= groups
    assert any(len(v) > 1 for v in named.values()) or len(torch.unique(data.groups)) == 1
    if alpha == 1e-6:
        assert float(m.max(1).values.min()) > 0.999, "the limit is one group for each client"


def test_soft_membership_at_its_limit_is_permuted_groups() -> None:
    """With one group each, a client names all its classes alike, as in permuted-groups."""
    data = partition(pictures(), "mixed-groups", 10, 1, groups=3, alpha=1e-6)
    source, names = pictures(), dict[tuple[int, int], int]()
    for i in range(10):
        rows = torch.from_numpy(data.train[i])
        before, now = source.y[data.x[rows][:, 0, 0, 0].long()], data.y[rows]
        pairs = set(zip(before.tolist(), now.tolist()))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
        for a, b in pairs:
            assert names.setdefault((int(data.groups[i]), a), b) == b  # type: ignore[index]
    assert len({(a, b) for (_, a), b in names.items()}) > 5, "groups differ"


def test_clients_that_mix_two_of_four_groups() -> None:
    data = partition(pictures(), "mixed-groups", 30, 2, groups=4, mixed=2, alpha=1e6)
    m = data.membership
    assert m is not None
    assert ((m > 0).sum(1) == 2).all() and torch.allclose(m.max(1).values, torch.full((30,), 0.5).double(), atol=0.01)
    assert (m > 0).any(0).all() and len(torch.unique(m > 0, dim=0)) > 3
    every = partition(pictures(), "mixed-groups", 30, 2, groups=4).membership
    assert torch.equal(partition(pictures(), "mixed-groups", 30, 2, groups=4, mixed=4).membership, every)  # type: ignore[arg-type]


def test_the_picture_shows_who_mixes_what() -> None:
    text = text_picture(partition(pictures(), "mixed-groups", 6, 0, alpha=0.5, sizes="zipf:1"))
    assert "clients mix 3 groups; share of the main one" in text and "group" in text.splitlines()[0]
    assert text.splitlines()[1].count("│") == 3 and "█" in text
    assert max(map(len, text.splitlines()[:7])) <= 80


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("iid", {"sizes": "pareto:1"}, "sizes must be a law with its number"),
        ("iid", {"sizes": "zipf"}, "needs a number in 0.001..1000"),
        ("iid", {"sizes": 3}, "sizes must be a law"),
        ("iid", {"min_samples": 3}, "min_samples goes with sizes"),
        ("dirichlet", {"sizes": "zipf:1"}, "has no option 'sizes'"),
        ("permuted-groups", {"group_sizes": "5:4"}, "must add up to the number of clients, 10. Got 9"),
        ("permuted-groups", {"group_sizes": "5:x"}, "group_sizes must be numbers of clients"),
        ("permuted-groups", {"group_sizes": [5, 5], "groups": 3}, "must agree"),
        ("shifted-groups", {"shifts": []}, "shifts must be a list of texts"),
        ("shifted-groups", {"shifts": ["rotates:3"]}, "unknown shift 'rotates'. Did you mean 'rotate'"),
        ("shifted-groups", {"shifts": ["rotate"]}, "needs an amount in -360..360"),
        ("shifted-groups", {"shifts": ["permute:3"]}, "takes no amount"),
        ("shifted-groups", {"shifts": "blur:nan"}, "needs an amount"),
        ("shifted-groups", {"shifts": ["none"] * 5, "groups": 4}, "at most as many shifts as groups, 4. Got 5"),
        ("mixed-groups", {"permute": False}, "must differ"),
        ("mixed-groups", {"groups": 3, "mixed": 4}, "mixed must be at most the number of groups, 3. Got 4"),
        ("mixed-groups", {"mixed": 0}, "mixed must be an integer >= 1. Got 0"),
    ],
)
def test_bad_options_are_one_sentence(kind: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_partition(kind, 10, options=options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_shifts_that_data_cannot_take() -> None:
    flat = Source(name="table", x=torch.randn(40, 3), y=torch.arange(40) % 2, classes=2)
    with pytest.raises(DataError, match=r"'rotate' needs pictures .* Got .*\(3,\); use noise or permute"):
        partition(flat, "shifted-groups", 4)
    assert partition(flat, "shifted-groups", 4, shifts="none,permute+noise:1").clients == 4
    tokens = Source(name="text", x=torch.ones(40, 3, dtype=torch.long), y=torch.arange(40) % 2, classes=2)
    with pytest.raises(DataError, match="real numbers"):
        partition(tokens, "shifted-groups", 4, shifts=["noise:1"])
    with pytest.raises(DataError, match="min_samples=10 for each of 9 clients"):
        partition(flat, "iid", 9, sizes="zipf:1")


def test_from_the_command_line() -> None:
    options = ["--source", "digits", "--kind", "permuted-groups", "--clients", "30", "--rows", "1"]
    text = call("partition", *options, "partition.group_sizes=10:12:08", "partition.sizes=lognormal:1").output
    assert "3 true groups of clients (10:12:8)" in text
    assert "must add up" in failing("partition", *options, "partition.group_sizes=[2, 2]")
