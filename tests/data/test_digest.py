"""Other data are noticed, wherever they differ."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedspan.data import digest
from fedspan.data.digest import data_digest
from fedspan.data.federated import FederatedData


def pool(dtype: torch.dtype = torch.float32) -> FederatedData:
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(5000, 7)), dtype=dtype)
    y = torch.tensor(rng.integers(0, 4, 5000))
    return FederatedData.from_arrays([(x[i::10], y[i::10]) for i in range(10)], classes=4)


@pytest.mark.parametrize("trial", range(100))
def test_one_changed_value_anywhere_is_noticed(trial: int) -> None:
    data, rng = pool(), np.random.default_rng(trial)
    x, row, column = data.x.clone(), int(rng.integers(5000)), int(rng.integers(7))
    x[row, column] = torch.nextafter(x[row, column], torch.tensor(torch.inf))  # the smallest change there is
    before, after = data_digest(data), data_digest(replace(data, x=x))
    assert [k for k in before if before[k] != after[k]] == ["examples"]


def test_labels_and_the_split_are_told_apart() -> None:
    data = pool()
    y = data.y.clone()
    y[17] = (y[17] + 1) % 4
    moved = [data.train[0][:-1], np.append(data.train[1], data.train[0][-1]), *data.train[2:]]
    names = torch.arange(4).repeat(10, 1)
    others = {
        "labels": [replace(data, y=y), replace(data, relabel=names), replace(data, classes=5)],
        "split": [replace(data, train=moved), replace(data, groups=torch.zeros(10)), replace(data, test=data.train)],
    }
    before = data_digest(data)
    for key, changed in others.items():
        for other in changed:
            after = data_digest(other)
            assert [k for k in before if before[k] != after[k]] == [key]


def test_equal_bytes_of_another_shape_or_type_are_other_data() -> None:
    data = pool()
    square = replace(data, x=data.x.reshape(5000, 7, 1))
    as_integers = replace(data, x=data.x.view(torch.int32))
    assert len({data_digest(d)["examples"] for d in (data, square, as_integers)}) == 3


def test_pieces_and_strides_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pool()
    whole = data_digest(data)
    monkeypatch.setattr(digest, "PIECE", 100)
    assert data_digest(data) == whole
    assert data_digest(replace(data, x=data.x.T.contiguous().T)) == whole


@pytest.mark.long
def test_a_large_pool_is_hashed_faster_than_it_is_loaded() -> None:
    x = torch.zeros(2**27)  # half a gigabyte
    data = replace(pool(), x=x, y=torch.zeros(len(x), dtype=torch.uint8), classes=None)
    start = time.process_time()
    data_digest(data)
    assert time.process_time() - start < 3
