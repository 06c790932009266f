"""Trees: flattening and stacking lose nothing, digests see everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import assert_close, assert_same
from fedspan import tree
from fedspan.tree import Outer, Tree

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    return torch.randint(0, 2 if dtype == torch.bool else 50, shape, generator=g).to(dtype)


OUTERS = st.builds(Outer, tensors(), tensors())
TREES = st.dictionaries(
    st.text("abU.θ_ ", min_size=1, max_size=4),
    st.recursive(
        st.one_of(tensors(), OUTERS, st.just({})),
        lambda sub: st.dictionaries(st.text("abc.0", min_size=1, max_size=3), sub, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


def shape_of(t: Any) -> Any:
    """The tree without its values: keys, empty sub-trees, kinds of leaves."""
    if isinstance(t, dict):
        return {k: shape_of(v) for k, v in t.items()}
    return type(t)


@settings(deadline=None, max_examples=60, database=None)
@given(TREES)
def test_flatten_and_unflatten_are_inverse(t: Tree) -> None:
    back = tree.unflatten(tree.flatten(t), tree.empty_paths(t))
    assert shape_of(back) == shape_of(t)
    assert_same(back, t)
    assert all(x is y for x, y in zip(tree.leaves(t), (dict(tree.items(back))[p] for p, _ in tree.items(t))))


def test_an_outer_is_not_mistaken_for_a_dict() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    flat = tree.flatten({"x": Outer(a, b), "y": {"a": a, "b": b}})
    assert list(flat) == ["x//a", "x//b", "y/a", "y/b"]
    back = tree.unflatten(flat)
    assert isinstance(back["x"], Outer) and isinstance(back["y"], dict)
    assert isinstance(tree.map(lambda z: z + 1, back)["x"], Outer)


def test_keys_with_a_slash_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must not contain '/'\. Got 'a/b'"):
        tree.flatten({"a/b": torch.ones(1)})


def test_empty_paths() -> None:
    assert tree.empty_paths({}) == [""]
    assert tree.empty_paths({"a": {}, "b": {"c": {}, "d": torch.ones(1)}}) == ["a", "b/c"]
    assert tree.unflatten({}, [""]) == {}


@settings(deadline=None, max_examples=40, database=None)
@given(TREES, st.integers(1, 4), st.data())
def test_stack_take_put(t: Tree, n: int, data: st.DataObject) -> None:
    rows = [tree.map(lambda a, k=k: (a.to(torch.int64) * (k + 1)).to(a.dtype), t) for k in range(n)]
    stacked = tree.stack(rows)
    assert shape_of(stacked) == shape_of(t)
    for k in range(n):
        assert_same(tree.take(stacked, k), rows[k])
    order = data.draw(st.permutations(range(n)))
    picked = tree.take(stacked, torch.tensor(order))
    assert_same(picked, tree.stack([rows[k] for k in order]))
    before = tree.digest(stacked)
    # Putting the picked rows back where they came from restores the whole; the original is never touched.
    assert_same(tree.put(tree.map(torch.zeros_like, stacked), torch.tensor(order), picked), stacked)
    ids = torch.tensor(order[: max(1, n // 2)])
    changed = tree.put(stacked, ids, tree.take(picked, torch.arange(len(ids)).flip(0)))
    for k in range(n):
        expected = rows[order[len(ids) - 1 - order.index(k)]] if k in ids.tolist() else rows[k]
        assert_same(tree.take(changed, k), expected)
    assert tree.digest(stacked) == before


@settings(deadline=None, max_examples=40, database=None)
@given(st.lists(SHAPES, min_size=1, max_size=5))
def test_ravel_and_unravel_are_inverse(shapes: list[tuple[int, ...]]) -> None:
    params = {f"p{i}": torch.randn(s, dtype=torch.float64) for i, s in enumerate(shapes)}
    theta = tree.ravel(params)
    assert theta.shape == (sum(p.numel() for p in params.values()),)
    back = tree.unravel(theta, params)
    assert list(back) == list(params)
    assert_same(back, params)


def test_select_and_without_keep_the_order_and_split_the_whole() -> None:
    params = {k: torch.ones(1) for k in "dacb"}
    assert list(tree.select(params, ["b", "d", "x"])) == ["d", "b"]
    assert list(tree.without(params, ["b", "d", "x"])) == ["a", "c"]


def test_arithmetic() -> None:
    x = {"a": torch.tensor([1.0, 2.0]), "o": {"b": torch.tensor(3.0)}}
    y = {"a": torch.ones(2), "o": {"b": torch.ones(())}}
    assert_close(tree.add(x, y, 2.0), {"a": torch.tensor([3.0, 4.0]), "o": {"b": torch.tensor(5.0)}})
    assert_close(tree.sub(x, y), tree.add(x, y, -1.0))
    assert_close(tree.where(torch.tensor(True), x, y), x)
    assert_close(tree.where(torch.tensor(False), x, y), y)
    assert float(tree.squared_norm(x)) == 14.0
    assert float(tree.squared_norm({"i": torch.arange(4)})) == 0.0
    assert not tree.detach({"a": torch.ones(1, requires_grad=True) * 2})["a"].requires_grad
    assert tree.nbytes({"a": torch.ones(3), "b": Outer(torch.ones(2).double(), torch.ones(1).bool())}) == 12 + 16 + 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_all_finite(bad: float) -> None:
    assert tree.all_finite({"a": torch.ones(2), "i": torch.arange(2), "e": {}})
    assert not tree.all_finite({"a": torch.ones(2), "o": Outer(torch.ones(1), torch.tensor([1.0, bad]))})


BASE: Tree = {"a": torch.arange(6.0).reshape(2, 3), "b": {"c": torch.tensor([0, 1])}}
CHANGES: dict[str, Tree] = {
    "one value": {**BASE, "a": torch.arange(6.0).reshape(2, 3) + torch.eye(2, 3) * 1e-6},
    "sign of zero": {**BASE, "a": torch.tensor([[-0.0, 1, 2], [3, 4, 5]])},
    "shape": {**BASE, "a": torch.arange(6.0).reshape(3, 2)},
    "type": {**BASE, "a": BASE["a"].double()},
    "integer type": {**BASE, "b": {"c": torch.tensor([0, 1], dtype=torch.int32)}},
    "name": {"A": BASE["a"], "b": BASE["b"]},
    "depth": {"a": BASE["a"], "b/c": BASE["b"]["c"].clone()[None]},
    "one leaf less": {"a": BASE["a"]},
    "one empty leaf more": {**BASE, "z": torch.empty(0)},
    "values exchanged": {**BASE, "b": {"c": torch.tensor([1, 0])}},
}


@pytest.mark.parametrize("what", CHANGES)
def test_digest_sees_a_change(what: str) -> None:
    assert tree.digest(CHANGES[what]) != tree.digest(BASE)


def test_digest_tells_types_apart_that_have_the_same_bytes() -> None:
    assert tree.digest({"a": torch.zeros(3)}) != tree.digest({"a": torch.zeros(3, dtype=torch.int32)})


def test_digest_sees_only_what_matters() -> None:
    turned = {"b": {"c": torch.tensor([0, 1])}, "a": torch.arange(6.0).reshape(3, 2).T.contiguous().T.reshape(2, 3)}
    assert tree.digest(turned) == tree.digest(BASE)
    wide = torch.arange(12.0).reshape(2, 6)
    assert tree.digest({"a": wide[:, ::2]}) == tree.digest({"a": wide[:, ::2].clone()})
    assert tree.digest({}) == tree.digest({"a": {}})
