"""Client stores: the one on disk against the one in memory, laziness, structure, memory."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan import tree
from fedspan.errors import CheckpointError, Divergence
from fedspan.randomness import key, normal
from fedspan.storage import checkpoint
from fedspan.storage.checkpoint import RunDirectory
from fedspan.storage.client_store import ClientStore
from fedspan.storage.tree_file import Segment
from fedspan.tree import Outer, Tree

IDS = [3, 1, 4, 15, 9, 2, 6]


def init(i: int) -> Tree:
    """An odd state on purpose: types of different widths, a scalar, empty parts, an `Outer`."""
    return {
        "flag": torch.tensor([i % 2 == 0, True, False]),
        "w": normal(key(0, "w", i), (2, 3), torch.float64),
        "h": {},
        "deep": {"n": torch.tensor(i), "none": {}, "b": torch.full((3,), i, dtype=torch.bfloat16)},
        "o": Outer(torch.ones(2) * i, torch.zeros(1, 0)),
    }


def rows(ids: list[int], seed: int) -> Tree:
    return tree.stack([tree.map(lambda a: (a + seed).to(a.dtype), init(i)) for i in ids])


def same(x: Tree, y: Tree) -> bool:
    return tree.digest(x) == tree.digest(y) and str(x.keys()) == str(y.keys())


@pytest.mark.parametrize("budget", [0, 1 << 30], ids=["disk", "memory"])
class TestStore:
    def test_initial_rows_are_computed_and_nothing_is_touched(self, budget: int) -> None:
        store = ClientStore(init, IDS, budget)
        assert store.on_disk == (budget == 0)
        assert same(store.take([4, 3, 4]), tree.stack([init(4), init(3), init(4)]))
        assert same(store.row(15), init(15))
        assert store.touched_ids() == store.changed_ids() == []

    def test_put_then_take_in_any_order_and_key_order(self, budget: int) -> None:
        store = ClientStore(init, IDS, budget)
        new = rows([9, 1], 5)
        store.put(torch.tensor([9, 1]), dict(reversed(new.items())))
        assert same(store.take(torch.tensor([1, 3, 9])), tree.stack([tree.take(new, 1), init(3), tree.take(new, 0)]))
        assert store.touched_ids() == store.changed_ids() == [1, 9]
        assert store.row(1)["h"] == {} and store.row(1)["deep"]["none"] == {}
        assert store.take([])["w"].shape == (0, 2, 3)

    def test_staged_rows_are_not_in_force_before_they_are_accepted(self, budget: int) -> None:
        store = ClientStore(init, IDS, budget)
        store.put([9], rows([9], 1))
        store.stage([9, 1], rows([9, 1], 2))
        store.stage([3], rows([3], 2))
        assert same(store.take([9, 1]), tree.stack([tree.take(rows([9], 1), 0), init(1)]))
        assert store.touched_ids() == [9]
        store.accept()
        assert same(store.take([9, 1, 3]), rows([9, 1, 3], 2)) and store.touched_ids() == [3, 1, 9]
        store.undo()
        assert same(store.take([9, 1, 3]), tree.stack([tree.take(rows([9], 1), 0), init(1), init(3)]))
        assert store.touched_ids() == store.changed_ids() == [9]

    def test_what_was_accepted_stays_when_a_later_round_is_undone(self, budget: int) -> None:
        store = ClientStore(init, IDS, budget)
        for seed in range(1, 6):
            store.settle()
            store.stage([9, 1], rows([9, 1], seed))
            store.accept()
        store.settle()
        store.stage([9, 4], rows([9, 4], 7))  # diverges before it is accepted
        store.undo()
        assert same(store.take([9, 1, 4]), tree.stack([*(tree.take(rows([9, 1], 5), k) for k in (0, 1)), init(4)]))

    def test_taken_rows_are_copies(self, budget: int) -> None:
        store = ClientStore(init, IDS, budget)
        store.take([3])["w"].zero_()
        store.put([4], rows([4], 1))
        store.take([4])["w"].zero_()
        assert same(store.row(3), init(3)) and same(store.take([4]), rows([4], 1))

    def test_wrong_use_is_one_sentence(self, budget: int) -> None:
        store = ClientStore(init, IDS, budget)
        with pytest.raises(ValueError, match="client 7 is not one of the 7"):
            store.take([7])
        with pytest.raises(ValueError, match="occurs twice"):
            store.put([3, 3], rows([3, 3], 1))
        with pytest.raises(ValueError, match="rows must be"):
            store.put([3], {**rows([3], 1), "more": torch.zeros(1)})
        with pytest.raises(ValueError, match="2 ids need 2 rows"):
            store.put([3, 1], rows([3], 1))
        with pytest.raises(ValueError, match="ids must differ"):
            ClientStore(init, [1, 1], budget)

    @pytest.mark.parametrize("empty", [{}, {"h": {}}, {"h": {"x": torch.zeros(0)}}])
    def test_empty_state_costs_nothing(self, budget: int, empty: Tree, tmp_path: Path) -> None:
        store = ClientStore(lambda i: empty, range(100_000), budget)
        store.put([5, 7], tree.stack([empty, empty]))
        assert store.row_bytes == 0 and not store.on_disk and store.touched_ids() == []
        assert str(store.row(5)) == str(empty)
        with RunDirectory(tmp_path, {}) as run:
            run.save(1, {}, [store])
            assert sorted(p.name for p in tmp_path.glob("rows*")) == []
            assert run.load().rows == [[]]

    def test_no_clients(self, budget: int) -> None:
        assert ClientStore(init, [], budget).take([]) == {}

    def test_restore_without_segments_starts_over(self, budget: int) -> None:
        store = ClientStore(init, IDS, budget)
        store.put([4], rows([4], 1))
        store.restore([])
        assert same(store.row(4), init(4)) and store.touched_ids() == []

    def test_rows_of_another_model_are_refused(self, budget: int, tmp_path: Path) -> None:
        store = ClientStore(init, IDS, budget)
        store.put([4], rows([4], 1))
        with RunDirectory(tmp_path, {}) as run:
            run.save(1, {}, [store])
            loaded = run.load()
        with pytest.raises(CheckpointError, match="other names or shapes"):
            ClientStore(lambda i: {"w": torch.zeros(3)}, IDS, budget).restore(loaded.rows[0])
        with pytest.raises(CheckpointError, match="client 4 is not in this group"):
            ClientStore(init, [1, 2], budget).restore(loaded.rows[0])


def test_a_segment_lost_or_cut_while_in_use_is_one_sentence(tmp_path: Path) -> None:
    store = ClientStore(init, IDS, 0)
    store.put([4], rows([4], 1))
    with RunDirectory(tmp_path, {}) as run:
        run.save(1, {}, [store])
    path = tmp_path / "rows-1-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="ended early"):
        store.row(4)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory"):
        store.row(4)


def test_initial_rows_are_computed_once_in_memory() -> None:
    asked: list[int] = []

    def counting(i: int) -> Tree:
        asked.append(i)
        return {"w": torch.full((2,), float(i))}

    store = ClientStore(counting, range(10))
    for _ in range(3):
        store.take([4, 5, 4])
    assert asked.count(5) == 1


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.sampled_from(IDS), unique=True), st.integers(1, 99)),
        st.tuples(st.just("take"), st.lists(st.sampled_from(IDS), max_size=9), st.just(0)),
        st.tuples(st.sampled_from(["save", "resume", "rollback"]), st.just([]), st.just(0)),
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS)
def test_disk_equals_memory_equals_a_dict(actions: list[tuple[str, list[int], int]], tmp_path_factory) -> None:
    """The same puts, takes, saves (mostly of changed rows only), resumes and rollbacks give the same rows."""
    path = tmp_path_factory.mktemp("run")
    budgets = [0, 1 << 30]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SMALL_BYTES", 0)
        patch.setattr(checkpoint.os, "fsync", lambda fd: None)
        run = RunDirectory(path, {"a": 1})
        stores = [ClientStore(init, IDS, b, path) for b in budgets]
        plain: dict[int, Tree] = {}
        saved: dict[int, Tree] = {}
        for what, ids, seed in actions:
            if what == "put" and ids:
                for k, store in enumerate(stores):
                    store.put(ids, rows(ids, seed))
                    assert set(ids) <= set(store.changed_ids()), k
                plain |= {i: tree.take(rows([i], seed), 0) for i in ids}
            elif what == "take" and ids:
                expected = tree.stack([plain.get(i, init(i)) for i in ids])
                assert all(same(store.take(ids), expected) for store in stores)
            elif what == "save":
                run.save(0, {}, stores)
                saved = dict(plain)
                assert all(store.changed_ids() == [] for store in stores)
            elif what in ("resume", "rollback"):
                if what == "resume":
                    run.close()
                    run = RunDirectory(path, {"a": 1})
                    stores = [ClientStore(init, IDS, b, path) for b in budgets]
                loaded = run.load()
                assert run.warnings == []
                for k, store in enumerate(stores):
                    store.restore(loaded.rows[k] if loaded else [])
                plain = dict(saved)
            assert all(set(store.touched_ids()) == set(plain) for store in stores)
        for store in stores:
            assert same(store.take(IDS), tree.stack([plain.get(i, init(i)) for i in IDS]))
        run.close()


def test_a_row_that_is_not_finite_is_named_and_not_saved(tmp_path: Path) -> None:
    store = ClientStore(init, IDS)
    with RunDirectory(tmp_path, {}) as run:
        store.put([4], rows([4], 1))
        run.save(1, {}, [store])
        bad = rows([9, 1], 1)
        bad["w"][1, 0, 0] = float("inf")
        store.put([9, 1], bad)
        with pytest.raises(Divergence, match=r"private state of client 1 holds NaN or infinity\. Generation 1 remains"):
            run.save(2, {}, [store])
        assert run.load().round == 1 and not list(tmp_path.glob("*-2*"))


def resident() -> int:
    """Memory in use, without what the allocator holds back from the tests before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("saves", [True, False])
def test_memory_stays_flat_on_disk(saves: bool, tmp_path: Path) -> None:
    """80 MB of rows more, all written and read, need no more memory than the first 40 MB did (buffers, allocator)."""
    width, n, warm = 25_000, 1200, 400
    store = ClientStore(lambda i: {"v": torch.zeros(width)}, range(n), budget_bytes=1 << 20, directory=tmp_path)
    rss: list[int] = []
    with RunDirectory(tmp_path, {}) as run:
        for first in range(0, n, 50):
            if first == warm:
                rss.append(resident())
            ids = list(range(first, first + 50))
            store.put(ids, {"v": torch.arange(50.0)[:, None].expand(50, width) + first})
            if saves and first % 200 == 0:
                run.save(first, {}, [store])
            taken = store.take(range(first, first + 50))["v"]
        for first in range(0, n, 50):
            taken = store.take(range(first, first + 50))["v"]
            assert torch.equal(taken[:, -1], torch.arange(50.0) + first)
        del taken
        assert resident() - rss[0] < 30 << 20


def test_untouched_rows_in_memory_are_not_resident() -> None:
    start = psutil.Process().memory_info().rss
    store = ClientStore(lambda i: {"v": torch.zeros(25_000)}, range(5000), budget_bytes=1 << 30)
    store.put([7], {"v": torch.ones(1, 25_000)})
    assert not store.on_disk and psutil.Process().memory_info().rss - start < 30 << 20


def test_a_segment_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    store = ClientStore(init, IDS)
    store.put([9, 4], rows([9, 4], 2))
    with RunDirectory(tmp_path, {}) as run:
        run.save(1, {}, [store])
    data = load_file(tmp_path / "rows-1-0.safetensors")
    assert data["ids"].tolist() == [4, 9] and data["rows"].shape == (2, store.row_bytes)


@pytest.mark.parametrize(
    "head",
    [
        {"rows": {"shape": [10**18, 10**18]}, "__metadata__": {"structure": "{}"}},
        {"rows": {"shape": [-1, 3]}, "__metadata__": {"structure": "{}"}},
        {"rows": {"shape": "x"}},
        [],
    ],
)
def test_a_malformed_segment_is_refused(head: object, tmp_path: Path) -> None:
    path = tmp_path / "rows-1-0.safetensors"
    text = json.dumps(head).encode()
    for data in (b"", b"\xff" * 8, len(text).to_bytes(8, "little") + text + np.arange(9).tobytes()):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"rows-1-0\.safetensors is not a file of client rows"):
            Segment.open(path)


def test_the_scratch_file_does_not_grow_with_the_rounds() -> None:
    store = ClientStore(init, IDS, 0)
    for seed in range(1, 9):
        store.settle()
        store.stage([9, 1], rows([9, 1], seed))
        if seed % 3 == 0:
            store.undo()
        else:
            store.accept()
    back: Any = store._rows
    assert back._used == 4  # two in force, two before them or staged
