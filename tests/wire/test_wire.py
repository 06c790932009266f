"""The wire: codecs say what they do, the gate refuses what it should, bytes come back as trees; and the averages."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor
from torch.func import vmap

from conftest import assert_close, assert_same
from fedspan import tree, wire
from fedspan.errors import ConfigError, Refused
from fedspan.learn.aggregate import Mean, cluster_mean, mix, weighted_mean, weighted_sum
from fedspan.tree import Outer, Tree
from fedspan.wire import Codec, Energy, Half, Rows, Sparse

FAST = settings(deadline=None, max_examples=40, database=None)
CODECS: list[Codec] = [Half(), Sparse(), Rows(), Energy(0.9), Energy(0.5), Energy(1.0)]
CODEC = pytest.mark.parametrize("codec", CODECS, ids=str)


def matrix(*shape: int, seed: int = 0, rank: int | None = None, zeros: float = 0.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64, generator=g)
    if rank is not None:
        x = torch.randn(shape[0], rank, dtype=torch.float64, generator=g) @ x.reshape(shape[0], -1)[:rank]
        x = x.reshape(shape)
    return x * (torch.rand(shape, generator=g) >= zeros)


def check_codec(codec: Codec, x: Tensor) -> tuple[Tensor, int]:
    """decode(encode(x)) and its bytes are what `roundtrip` says."""
    parts = codec.encode(x)
    value, size = codec.roundtrip(x)
    assert int(size) == sum(t.numel() * t.element_size() for t in parts.values())
    back = codec.decode(parts, x.dtype, tuple(x.shape))
    assert back.dtype == value.dtype == x.dtype
    assert_close(back, value)
    return value, int(size)


# ------------------------------------------------------------------------------------------------ codecs


@CODEC
@FAST
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=4),
    zeros=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_roundtrip_is_decode_of_encode(
    codec: Codec, shape: list[int], zeros: float, seed: int, dtype: torch.dtype
) -> None:
    x = matrix(*shape, seed=seed, zeros=zeros)
    if dtype == torch.float64:
        check_codec(codec, x)
    else:
        parts, x = codec.encode(x.float()), x.float()
        assert int(codec.roundtrip(x)[1]) == sum(t.numel() * t.element_size() for t in parts.values())
        assert_close(codec.decode(parts, x.dtype, tuple(x.shape)), codec.roundtrip(x)[0], 1e-5)


@CODEC
@pytest.mark.parametrize("shape", [(12, 30), (6, 4, 3, 3), (7,), ()])
def test_roundtrip_under_vmap_is_the_loop(codec: Codec, shape: tuple[int, ...]) -> None:
    # Rows of different ranks and sparsity, so that each keeps a different amount.
    rank = [1, 2, 6] if len(shape) > 1 else [None] * 3
    x = torch.stack([matrix(*shape, seed=k, rank=rank[k], zeros=z) for k, z in enumerate((0.0, 0.6, 0.97))])
    values, sizes = vmap(codec.roundtrip)(x)
    for k in range(3):
        value, size = check_codec(codec, x[k])
        assert_close(values[k], value)
        assert int(sizes[k]) == size


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_energy_passes_on_what_is_not_finite(bad: float) -> None:
    x = matrix(12, 30, rank=1)
    x[3, 4] = bad
    for value in (Energy(0.9).roundtrip(x)[0], Energy(0.9).encode(x)["dense"]):
        assert torch.equal(value.isfinite(), x.isfinite())
    assert int(Energy(0.9).roundtrip(x)[1]) == x.numel() * 8


def test_half_rounds_to_sixteen_bits() -> None:
    value, size = check_codec(Half(), torch.tensor([1.0, 1.0 + 2**-12, 0.1]))
    assert size == 6 and value.tolist() == [1.0, 1.0, float(torch.tensor(0.1).half())]


@pytest.mark.parametrize(("live", "how"), [(0, "positions"), (3, "positions"), (4, "bitmap"), (97, "bitmap")])
def test_sparse_sends_positions_or_a_bitmap_whichever_is_shorter(live: int, how: str) -> None:
    x = torch.zeros(97)  # a bitmap takes 13 bytes, a position 4
    x[torch.randperm(97, generator=torch.Generator().manual_seed(0))[:live]] = 1.5
    assert set(Sparse().encode(x)) == {"values", how}
    value, size = check_codec(Sparse(), x)
    assert torch.equal(value, x) and size == 4 * live + min(4 * live, 13)


def test_rows_sends_the_rows_that_hold_anything() -> None:
    x = torch.zeros(9, 5)
    x[2, 1], x[8, 0] = 3.0, -1.0
    value, size = check_codec(Rows(), x)
    assert torch.equal(value, x) and size == 2 * 5 * 4 + 2


@FAST
@given(st.integers(1, 10), st.integers(1, 12), st.floats(0.01, 1.0), st.integers(0, 99), st.floats(0.0, 3.0))
def test_energy_loses_at_most_what_it_may(m: int, n: int, share: float, seed: int, decay: float) -> None:
    u, s, v = torch.linalg.svd(matrix(m, n, seed=seed), full_matrices=False)
    x = (u * (s * torch.exp(-decay * torch.arange(len(s))))) @ v
    value, size = check_codec(Energy(share), x)
    assert float((x - value).square().sum()) <= (1 - share + 1e-10) * float(x.square().sum())
    assert size <= x.numel() * 8
    spectrum = torch.linalg.svdvals(x).square()
    kept = int(torch.linalg.matrix_rank(value, rtol=1e-9)) if size < x.numel() * 8 else 0
    if kept > 1:  # one triple less would not have been enough
        assert float(spectrum[: kept - 1].sum()) < share * float(spectrum.sum()) * (1 + 1e-10)
        assert size == 8 * kept * (m + n + 1)


@pytest.mark.parametrize(("share", "rank"), [(0.01, 1), (0.21, 5), (0.44, 9), (0.95, 20), (1.0, 20)])
def test_energy_never_zeroes_a_flat_spectrum(share: float, rank: int) -> None:
    q = torch.linalg.qr(matrix(20, 20))[0]
    value, size = check_codec(Energy(share), q)
    assert int(torch.linalg.matrix_rank(value)) == rank  # from rank 10 on the matrix itself is shorter
    assert size == min(8 * rank * 41, 8 * 400)


def test_energy_of_a_zero_matrix_is_zero_and_short() -> None:
    value, size = check_codec(Energy(0.9), torch.zeros(20, 20, dtype=torch.float64))
    assert torch.equal(value, torch.zeros_like(value))
    assert size == 8 * 41  # one triple, the least there is


def test_energy_cuts_a_convolution_as_out_by_rest_and_leaves_vectors() -> None:
    x = matrix(8, 4, 3, 3, rank=2)
    value, size = check_codec(Energy(0.999999), x)
    assert_close(value, x, 1e-2)
    assert size == 8 * 2 * (8 + 36 + 1)
    assert int(Energy(0.1).roundtrip(torch.ones(50))[1]) == 200


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_energy_refuses_a_bad_share(share: float) -> None:
    with pytest.raises(ConfigError, match=r"Energy: share must lie in \(0, 1\]\. Got"):
        Energy(share)


def test_payload_roundtrip_codes_the_named_parts_only() -> None:
    payload: Tree = {
        "x": {"a": matrix(3, 3), "b": matrix(5)},
        "y": {"a": matrix(2)},
        "o": Outer(matrix(4), matrix(2)),
        "e": {},
    }
    out, sizes = wire.roundtrip(payload, {"x": Half(), "o": Half(), "e": Half(), "absent": Half()})
    assert {k: int(v) for k, v in sizes.items()} == {"x": 28, "o": 12, "e": 0}
    assert list(out) == list(payload) and isinstance(out["o"], Outer)
    assert_same(out["y"], payload["y"])
    assert_same(out["x"], tree.map(lambda a: a.half().double(), payload["x"]))
    assert wire.count(payload) == {"x": 14 * 8, "y": 16, "o": 48, "e": 0}
    assert wire.count(payload, sizes) == {"x": 28, "y": 16, "o": 12, "e": 0}


# ------------------------------------------------------------------------------------------------ the gate

GOOD: Tree = {"a": torch.ones(2, 3), "o": Outer(torch.ones(2), torch.ones(1)), "i": torch.arange(3)}
DECLARED = wire.schema(GOOD)


def passes(payload: Tree = GOOD, weight: float = 5.0, kind: str = "samples", **more: Any) -> None:
    wire.check_upload(payload, weight, who="client 7", declared=DECLARED, kind=kind, examples=10, **more)


def test_the_gate_lets_honest_uploads_through() -> None:
    for weight in (1, 5, 10):
        passes(weight=weight)
    passes(weight=1.0, kind="one")
    for weight in (0.0, 0.3, 4.0):
        passes(weight=weight, kind="own", bound=4.0)
    passes(max_norm=math.sqrt(6 + 2 + 1))
    stacked = tree.map(lambda a: a[None].expand(4, *a.shape), GOOD)
    assert wire.schema(stacked, stacked=True) == DECLARED


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"payload": tree.without(GOOD, ["a"])}, "'a' is missing from the upload"),
    "missing factor": ({"payload": {**GOOD, "o": torch.ones(2)}}, "is missing from the upload"),
    "surplus": ({"payload": {**GOOD, "z": torch.ones(1)}}, "'z' is not part of this method's upload"),
    "long name": ({"payload": {**GOOD, "z" * 500: torch.ones(1)}}, f"'{'z' * 80}' is not part"),
    "shape": ({"payload": {**GOOD, "a": torch.ones(3, 2)}}, "'a' must be float32 of shape [2, 3]. Got float32 of"),
    "type": ({"payload": {**GOOD, "a": torch.ones(2, 3).double()}}, "Got float64 of shape [2, 3]"),
    "axis": ({"payload": {**GOOD, "a": torch.ones(1, 2, 3)}}, "Got float32 of shape [1, 2, 3]"),
    "nan": ({"payload": {**GOOD, "a": torch.full((2, 3), math.nan)}}, "'a' holds NaN or infinity"),
    "inf": ({"payload": {**GOOD, "o": Outer(torch.ones(2), torch.tensor([math.inf]))}}, "'o//b' holds NaN or infinity"),
    "nan weight": ({"weight": math.nan}, "the weight must be a finite number. Got nan"),
    "inf weight": ({"weight": math.inf, "kind": "own"}, "the weight must be a finite number. Got inf"),
    "no samples": ({"weight": 0.0}, "the weight must be an integer in 1..10, its number of examples. Got 0"),
    "too many samples": ({"weight": 11.0}, "in 1..10"),
    "half a sample": ({"weight": 2.5}, "in 1..10, its number of examples. Got 2.5"),
    "negative": ({"weight": -3.0}, "in 1..10"),
    "not one": ({"weight": 2.0, "kind": "one"}, "the weight must be 1. Got 2"),
    "own below": ({"weight": -0.1, "kind": "own"}, "the weight must lie in 0.."),
    "own above": ({"weight": 4.1, "kind": "own", "bound": 4.0}, "the weight must lie in 0..4. Got 4.1"),
    "norm": ({"max_norm": 2.9}, "the upload's norm must be at most 2.9. Got 3"),
}


@pytest.mark.parametrize("what", BAD)
def test_the_gate_refuses_in_one_sentence(what: str) -> None:
    arguments, sentence = BAD[what]
    with pytest.raises(Refused) as e:
        passes(**arguments)
    text = str(e.value)
    assert text.startswith("client 7: ") and sentence in text and text.endswith(".") and "\n" not in text
    assert len(text) < 200


# ------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"a": {}},
        {"a": {}, "b": {"c": {}, "d": torch.ones(2)}},
        {"o": Outer(torch.ones(3), torch.zeros(0)), "s": torch.tensor(1.5), "n": torch.empty(0, 3)},
        {"b": torch.ones(3).bool(), "h": torch.ones(3).half(), "f": torch.ones(1).bfloat16(), "i": torch.arange(3)},
        {"view": torch.arange(12.0).reshape(3, 4)[:, 1:3], "t": torch.arange(6).reshape(2, 3).T},
        {"deep": {"er": {"and": {"deeper": torch.ones(1, dtype=torch.float64)}}}, "θ": torch.ones(1)},
    ],
)
def test_pack_and_unpack_are_inverse(payload: Tree) -> None:
    back = wire.unpack(wire.pack(payload))
    assert sorted(tree.empty_paths(back)) == sorted(tree.empty_paths(payload))
    assert wire.schema(back) == wire.schema(payload)
    assert_same(back, payload)
    by_others = {k: t for k, t in load(wire.pack(payload)).items() if not k.endswith("//empty")}
    assert_same(by_others, tree.flatten(payload))  # safetensors reads it, too
    assert_same(wire.unpack(save(by_others)), tree.unflatten(tree.flatten(payload)))  # and the other way round


def test_one_tensor_under_two_names_can_be_packed() -> None:
    t = torch.arange(3.0)
    assert_same(wire.unpack(wire.pack({"kept": t, "sent": t})), {"kept": t, "sent": t.clone()})


def garbage() -> dict[str, bytes]:
    good = wire.pack({"a": torch.ones(3), "o": Outer(torch.ones(2), torch.ones(2))})
    half = save({"x//a": torch.ones(2)})
    return {
        "nothing": b"",
        "text": b"hello, this is not a tree",
        "zeros": bytes(64),
        "ones": b"\xff" * 64,
        "cut": good[:-1],
        "longer": good + b"\0",
        "half": good[: len(good) // 2],
        "header": good[:8] + b"\0" * (len(good) - 8),
        "one factor": bytes(half),
        "leaf and branch": bytes(save({"a": torch.ones(2), "a/b": torch.ones(2)})),
    }


@pytest.mark.parametrize("what", garbage())
def test_garbage_is_refused(what: str) -> None:
    with pytest.raises(Refused, match=r"^Wire: the bytes are not a packed tree \(\w+\)\.$"):
        wire.unpack(garbage()[what])


@FAST
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_a_tree(data: bytes) -> None:
    with contextlib.suppress(Refused):
        assert isinstance(wire.unpack(data), dict)


# ------------------------------------------------------------------------------------------------ averages


@FAST
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_weighted_means_of_factors_are_those_of_matrices(n: int, m: int, r: int, seed: int) -> None:
    a, b, w = matrix(n, m, seed=seed), matrix(n, r, seed=seed + 1), matrix(n, seed=seed + 2).abs() + 0.1
    got = weighted_mean({"g": Outer(a, b), "t": {"a": a}, "e": {}}, w)
    expected = sum(w[k] * torch.outer(a[k], b[k]) for k in range(n)) / w.sum()
    plain = sum(w[k] * a[k] for k in range(n)) / w.sum()
    assert_close(got, {"g": expected, "t": {"a": plain}, "e": {}})


@FAST
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 99))
def test_a_mean_in_groups_is_the_mean_of_all(groups: list[int], seed: int) -> None:
    n = sum(groups)
    stacked = {"a": matrix(n, 3, seed=seed), "g": Outer(matrix(n, 2, seed=seed), matrix(n, 4, seed=seed + 1))}
    w = torch.arange(1.0, n + 1, dtype=torch.float64)
    mean, start = Mean(), 0
    for size in groups:
        part = slice(start, start + size)
        mean.add(weighted_sum(tree.take(stacked, part), w[part]), float(w[part].sum()))
        start += size
    assert_close(mean.result(), weighted_mean(stacked, w))


def test_a_mean_of_nothing_is_empty() -> None:
    assert Mean().result() == {}


def test_mix_gives_each_row_its_own_average() -> None:
    x = matrix(3, 2, 2)
    omega = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.25, 0.5], [0.0, 0.0, 1.0]])
    got = mix({"a": x}, omega)["a"]
    assert_close(got, torch.stack([x[0], 0.25 * x[0] + 0.25 * x[1] + 0.5 * x[2], x[2]]))
    assert_same(mix({"a": x}, torch.eye(3))["a"], x)


def test_cluster_mean_leaves_the_cluster_nobody_reported_for() -> None:
    x, old, w = matrix(4, 3), matrix(3, 3, seed=9), torch.tensor([1.0, 3.0, 2.0, 2.0])
    cluster = torch.tensor([0, 2, 0, 2])
    got = cluster_mean({"a": x, "s": x[:, 0]}, w, cluster, 3, {"a": old, "s": old[:, 0]})
    assert_close(got["a"][0], (x[0] + 2 * x[2]) / 3)
    assert_close(got["a"][2], (3 * x[1] + 2 * x[3]) / 5)
    assert_same(got["a"][1], old[1])
    assert_close(got["s"], got["a"][:, 0])
