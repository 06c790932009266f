"""Structured layers: what they compose, how they are put in, and that a task keeps its head and its start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from conftest import SmallCnn, assert_close, assert_same, make_model, make_task
from fedspan.errors import ConfigError
from fedspan.layers import (
    LAYOUTS,
    Factorized,
    Hadamard,
    Structured,
    candidates,
    choose,
    convert,
    in_head,
    matrix_dims,
    part,
    plain_weights,
    structured,
)
from fedspan.task import Task

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
PLAIN = [
    nn.Linear(5, 7, **DOUBLE),
    nn.Linear(5, 7, bias=False, **DOUBLE),
    nn.Conv2d(4, 6, 3, padding=1, **DOUBLE),
    nn.Conv2d(4, 6, (3, 5), stride=2, dilation=(1, 2), padding="valid", **DOUBLE),
    nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False, **DOUBLE),
    nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="circular", **DOUBLE),
]
LAYERS = pytest.mark.parametrize("layer", PLAIN, ids=[str(layer) for layer in PLAIN])


def example(layer: nn.Module, *batch: int) -> torch.Tensor:
    shape = (5,) if isinstance(layer, nn.Linear) else (4, 9, 12)
    return torch.randn(*batch, *shape, generator=torch.Generator().manual_seed(1), **DOUBLE)


def filters(weight: torch.Tensor) -> torch.Tensor:
    """The spatial filters of a kernel, one per row."""
    return weight.detach().reshape(-1, weight.shape[2] * weight.shape[3])


# ------------------------------------------------------------------------------------------------ u v + mu


@LAYERS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mu_can_stand_for_any_plain_layer_exactly(layer: Any, layout: Any) -> None:
    new = Factorized(layer, 1, layout, mu_start="dense")
    assert float(new.product().detach().abs().max()) > 1e-3
    assert_close({"w": new.compose()}, {"w": layer.weight}, 1e-15)
    x = example(layer, 3)
    assert_close({"y": new(x)}, {"y": layer(x)})


@LAYERS
@pytest.mark.parametrize("gamma", [1, 2])
def test_without_mu_the_matrix_has_rank_gamma(layer: Any, gamma: int) -> None:
    new = Factorized(layer, gamma)
    assert not new.mu.count_nonzero()  # type: ignore[union-attr]
    rows, columns = matrix_dims(layer, "space_by_channel")
    weight = new.compose().detach()
    matrix = weight.T if weight.ndim == 2 else weight.permute(2, 3, 1, 0).reshape(rows, columns)
    assert int(torch.linalg.matrix_rank(matrix)) == gamma
    assert_close({"w": matrix}, {"w": new.u @ new.v}, 1e-15)
    assert [k for k, _ in Factorized(layer, gamma, mu=False).named_parameters() if k != "bias"] == ["u", "v"]


def test_filters_are_multiples_of_one_base_filter_and_the_public_view_scrambles_them() -> None:
    layer = nn.Conv2d(8, 16, 3, **DOUBLE)

    def share(new: Factorized) -> float:
        base = new.u.detach()[:, 0] / new.u.detach().norm()
        found = filters(new.compose())
        gap = (found - (found @ base)[:, None] * base).norm(dim=1) / found.norm(dim=1)
        return float((gap < 1e-9).double().mean())

    assert share(Factorized(layer)) == 1.0
    assert share(Factorized(layer, layout="official_view")) == 0.0
    new = Factorized(layer)
    assert_close({"f": new.compose()[5, 2].reshape(-1)}, {"f": new.u[:, 0] * new.v[0, 2 * 16 + 5]}, 1e-15)


@pytest.mark.parametrize(
    ("layout", "u", "v"),
    [("space_by_channel", 9, 32), ("official_view", 9, 32), ("ik_by_ok", 12, 24), ("out_by_rest", 8, 36)],
)
def test_lengths_of_u_and_v_by_layout(layout: Any, u: int, v: int) -> None:
    new = Factorized(nn.Conv2d(4, 8, 3), layout=layout)
    assert (tuple(new.u.shape), tuple(new.v.shape)) == ((u, 1), (1, v))


def test_the_layouts_of_the_ablation_factorise_what_they_say() -> None:
    o, i, k = 8, 4, 3
    new = Factorized(nn.Conv2d(i, o, k, **DOUBLE), layout="ik_by_ok")
    u, v = new.u.detach().reshape(i, k), new.v.detach().reshape(o, k)
    assert_close({"w": new.compose()}, {"w": torch.einsum("iw,oh->oihw", u, v)}, 1e-15)
    new = Factorized(nn.Conv2d(i, o, k, **DOUBLE), layout="out_by_rest")
    expected = torch.outer(new.u.detach()[:, 0], new.v.detach()[0]).reshape(o, i, k, k)
    assert_close({"w": new.compose()}, {"w": expected}, 1e-15)


def test_start_of_mu() -> None:
    linear, conv = nn.Linear(20, 30), nn.Conv2d(3, 4, 3)
    for layer in (linear, conv):
        assert not Factorized(layer).mu.count_nonzero()  # type: ignore[union-attr]
    xavier = Factorized(linear, mu_start="xavier").mu
    assert xavier is not None and 0 < float(xavier.detach().abs().max()) <= (6 / 50) ** 0.5
    assert not Factorized(conv, mu_start="xavier").mu.count_nonzero()  # type: ignore[union-attr]
    new = Factorized(linear, mu_start="dense")
    new.reset_parameters()
    assert float(new.compose().detach().abs().max()) <= 20**-0.5 + 1e-6  # as a plain layer is drawn
    assert float(new.u.detach().abs().max()) <= (6 / 21) ** 0.5


def test_a_rank_beyond_the_matrix_is_cut_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="at most rank 9; gamma = 12 is cut"):
        new = Factorized(nn.Conv2d(4, 8, 3), 12)
    assert new.u.shape == (9, 9)


# ------------------------------------------------------------------------------------------------ Hadamard


def test_hadamard_of_rank_3_has_rank_9() -> None:
    new = Hadamard(nn.Linear(20, 30, **DOUBLE), 3)
    assert int(torch.linalg.matrix_rank(new.compose().detach())) == 9
    assert int(torch.linalg.matrix_rank(new.factor(1).detach())) == 3


def test_hadamard_with_a_second_factor_of_ones_is_plain_low_rank() -> None:
    new = Hadamard(nn.Linear(20, 30, **DOUBLE), 3)
    with torch.no_grad():
        for p in (new.X2, new.Y2):
            p.zero_()
            p[:, 0] = 1.0  # X₂Y₂ᵀ = 11ᵀ
    assert_close({"w": new.compose()}, {"w": new.X1 @ new.Y1.T}, 1e-15)
    plus = Hadamard(nn.Conv2d(4, 6, 3, **DOUBLE), 2, plus_one=True)
    with torch.no_grad():
        plus.X2.zero_()
    assert_close({"w": plus.compose()}, {"w": plus.factor(1)}, 1e-15)


def test_hadamard_of_a_convolution_is_the_tensor_form() -> None:
    new = Hadamard(nn.Conv2d(4, 6, (3, 2), **DOUBLE), 2)
    by_hand = torch.zeros(6, 4, 3, 2, **DOUBLE)
    for x in range(2):
        for y in range(2):
            by_hand += torch.einsum("hw,o,i->oihw", new.T1.detach()[x, y], new.X1.detach()[:, x], new.Y1.detach()[:, y])
    assert_close({"w": new.factor(1)}, {"w": by_hand}, 1e-14)
    assert sum(p.numel() for k, p in new.named_parameters() if k != "bias") == 2 * 2 * (6 + 4) + 2 * 4 * 6


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("layer", [nn.Linear(200, 300), nn.Conv2d(64, 128, 3)], ids=["linear", "conv"])
def test_a_matched_start_has_kaimings_variance(layer: Any, plus_one: bool) -> None:
    torch.manual_seed(0)
    wanted = (2 / layer.weight[0].numel()) ** 0.5
    found = [float(Hadamard(layer, 15, plus_one, start="matched").compose().detach().std()) for _ in range(4)]
    assert sum(found) / 4 == pytest.approx(wanted, rel=0.15)


# ------------------------------------------------------------------------------------------------ all kinds


KINDS = [lambda m: Factorized(m, 2), lambda m: Hadamard(m, 2), lambda m: Hadamard(m, 2, plus_one=True, tanh=True)]


@LAYERS
@pytest.mark.parametrize("make", KINDS)
def test_a_structured_layer_is_the_plain_one_with_its_composed_weight(layer: Any, make: Any) -> None:
    new = make(layer)
    new.reset_parameters()
    x = example(layer, 3)
    state = {"weight": new.compose()} | ({} if new.bias is None else {"bias": new.bias})
    assert_close({"y": new(x)}, {"y": functional_call(layer, state, (x,))})


@LAYERS
@pytest.mark.parametrize("make", KINDS)
def test_many_clients_at_once_and_one_after_another(layer: Any, make: Any) -> None:
    new = make(layer)
    params = {k: torch.randn(3, *p.shape, **DOUBLE) for k, p in new.named_parameters()}
    x = example(layer, 3, 2)
    once = vmap(lambda p, x: functional_call(new, p, (x,)))(params, x)
    for c in range(3):
        assert_close({"y": once[c]}, {"y": functional_call(new, {k: p[c] for k, p in params.items()}, (x[c],))})


# ------------------------------------------------------------------------------------------------ conversion


def factorised(task: Task, which: Any = "all") -> Task:
    names = choose(task, which, "Test")
    return task.converted(lambda module: convert(module, names, Factorized))


@pytest.mark.parametrize("kind", ["mlp", "cnn", "batchnorm", "dropout"])
def test_a_converted_task_keeps_head_features_and_statistics(kind: str) -> None:
    task = make_task(kind)
    new = factorised(task)
    assert structured(new.module) == list(candidates(task.module))
    assert new.head_layer == task.head_layer and new.stats == task.stats
    assert new.head == [part(str(task.head_layer), p) for p in ("bias", "u", "v", "mu")]
    assert in_head(new, str(task.head_layer)) and not in_head(new, structured(new.module)[0])
    params, x = new.init(), torch.randn(4, *((5,) if kind in ("mlp", "dropout") else (1, 6, 6)), **DOUBLE)
    features = new.features(params, x)
    head = {k: params[k] for k in new.head}
    assert_close({"y": new.from_features(head, features)}, {"y": new.predict(params, x)})
    assert all(p.dtype == torch.float64 for p in params.values())
    for k in set(task.names) & set(new.names):  # biases and norms start as they did
        assert_same(params[k], task.init()[k])


def test_the_start_depends_on_the_seed_alone() -> None:
    def begin(seed: int) -> dict[str, torch.Tensor]:
        return factorised(Task(lambda: make_model("mlp"), seed=seed)).init()

    torch.manual_seed(5)
    first = begin(1)
    torch.manual_seed(6)
    assert_same(first, begin(1))
    assert not torch.equal(first["0.u"], begin(2)["0.u"])


@pytest.mark.parametrize("built", [True, False])
def test_fresh_starts_are_independent_and_repeatable(built: bool) -> None:
    new = factorised(Task((lambda: SmallCnn()) if built else SmallCnn(), dtype=torch.float64))
    a, b = new.fresh("a", 0), new.fresh("a", 1)
    assert a.keys() == new.init().keys()
    assert_same(a, new.fresh("a", 0))
    assert not any(torch.equal(a[k], b[k]) for k in a if k.endswith((".u", ".v", "bias")) and not k.startswith("norm"))


def test_choosing_layers() -> None:
    task = make_task("cnn")
    assert list(choose(task, "all", "T")) == ["conv", "hidden", "head"]
    assert list(choose(task, "body", "T")) == ["conv", "hidden"]
    assert list(choose(task, ("h",), "T")) == ["hidden", "head"]
    with pytest.raises(ConfigError, match=r"T: layers must begin the name of a layer. Got 'hiden'. Did you mean"):
        choose(task, ("hiden",), "T")
    with pytest.raises(ConfigError, match="among 'body'"):
        choose(Task(nn.Linear(3, 2)), "body", "T")
    only = factorised(task, ("conv",))
    assert structured(only.module) == ["conv"] and only.head == ["head.weight", "head.bias"]


def test_a_model_that_is_one_layer_can_be_converted() -> None:
    new = factorised(Task(nn.Linear(3, 2), dtype=torch.float64))
    assert isinstance(new.module, Structured) and new.head == ["bias", "u", "v", "mu"]
    assert new.predict(new.init(), torch.zeros(4, 3, **DOUBLE)).shape == (4, 2)


def test_frozen_layers_stay_and_shared_ones_are_replaced_once_or_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    assert list(candidates(model)) == ["1", "2"]
    layer = nn.Linear(4, 4)
    twice = convert(nn.Sequential(layer, nn.ReLU(), layer), ["0"], Factorized)
    assert isinstance(twice, nn.Sequential) and twice[0] is twice[2] and isinstance(twice[0], Factorized)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(ConfigError, match="the weight of '0' also serves another layer"):
        convert(tied, ["0"], Factorized)


def test_plain_weights_are_those_of_the_network_it_stands_for() -> None:
    task = make_task("cnn")
    new = factorised(task)
    params = {k: p + 0.1 for k, p in new.fresh(3).items()}
    plain = plain_weights(new.module, params)
    assert plain.keys() == task.init().keys()
    x = torch.randn(3, 1, 6, 6, **DOUBLE)
    assert_close({"y": task.predict(plain, x)}, {"y": new.predict(params, x)})
