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
    Adapter,
    Factorized,
    Hadamard,
    LowRank,
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
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.models import build

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


# ------------------------------------------------------------------------------------------------ adapters


def filled(layer: Adapter) -> Adapter:
    """The same layer with no factor at zero."""
    for p in layer.parameters():
        torch.nn.init.normal_(p, 0.0, 0.5)
    return layer


@LAYERS
@pytest.mark.parametrize("kind", ["lora", "loha", "lokr"])
@pytest.mark.parametrize("start", ["gaussian", "identity"])
def test_an_adapter_starts_as_the_plain_layer_with_a_constant_weight(layer: Any, kind: Any, start: Any) -> None:
    new, x = Adapter(layer, 2, kind, own_rank=3, start=start), example(layer, 3)
    assert_close({"y": new(x)}, {"y": layer(x)}, 1e-14)
    trained = {k for k, p in new.named_parameters() if p.requires_grad} - {"bias"}
    assert trained == {*lowrank.FACTORS[kind], "L", "U"}
    assert all(p.count_nonzero() for k, p in new.named_parameters() if k not in ("U", lowrank.FACTORS[kind][-1]))
    assert {k for k, p in Adapter(layer, 0, own_rank=1, train_base=True).named_parameters() if p.requires_grad} >= {
        "weight"
    }


@LAYERS
def test_an_adapter_applies_pairs_beside_its_weight_where_that_is_cheaper(layer: Any) -> None:
    thin, thick, based = Adapter(layer, 1), Adapter(layer, 9, own_rank=1), Adapter(layer, 1, train_base=True)
    m, n = layer.weight.shape[0], layer.weight[0].numel()
    assert thin.beside == {"A": 3 * (m + n) < m * n, "L": False}
    assert thick.beside == {"A": False, "L": 3 * (m + n) < m * n}
    assert based.beside == {"A": False, "L": False}
    new, x = filled(Adapter(layer, 2)), example(layer, 3)
    weight = (new.A @ new.B).reshape(layer.weight.shape)  # A B as outputs × all the rest
    bias = {} if layer.bias is None else {"bias": torch.zeros_like(layer.bias)}
    assert_close({"y": new.through(x, new.A, new.B)}, {"y": functional_call(layer, {"weight": weight, **bias}, (x,))})


def test_hadamard_and_kronecker_adapters_reach_higher_ranks_with_the_numbers_they_promise() -> None:
    layer = nn.Linear(30, 24, **DOUBLE)

    def change(kind: Any) -> tuple[int, int]:
        new = filled(Adapter(layer, 2, kind))
        count = sum(getattr(new, f).numel() for f in lowrank.FACTORS[kind])
        return int(torch.linalg.matrix_rank((new.compose() - new.weight).detach())), count

    assert change("lora") == (2, 2 * (24 + 30))
    assert change("loha") == (4, 2 * 2 * (24 + 30))  # r²
    assert change("lokr") == (2 * 4, 4 * 5 + 2 * (6 + 6))  # rank of C times r; 24 = 4 · 6, 30 = 5 · 6
    conv = filled(Adapter(nn.Conv2d(6, 8, 3, **DOUBLE), 2, "lokr"))
    by_hand = torch.einsum("ab,cr,rdhw->acbdhw", conv.C, conv.A, conv.B.reshape(2, 3, 3, 3)).reshape(8, 6, 3, 3)
    assert_close({"w": conv.compose() - conv.weight}, {"w": by_hand})


# ------------------------------------------------------------------------------------------------ U V'


@LAYERS
def test_two_convolutions_are_the_folded_one(layer: Any) -> None:
    new, x = LowRank(layer, 2), example(layer, 3)
    assert int(torch.linalg.matrix_rank(lowrank.unfold(new.compose().detach()))) == 2
    state = {"weight": new.compose()} | ({} if layer.bias is None else {"bias": layer.bias})
    assert_close({"y": new.through(x)}, {"y": functional_call(layer, state, (x,))})


@LAYERS
def test_factors_of_full_rank_are_the_layer_and_of_less_the_nearest(layer: Any) -> None:
    full = lowrank.full_rank(layer.weight.shape)
    assert_close({"w": LowRank(layer, full + 5).compose()}, {"w": layer.weight}, 1e-13)
    s = torch.linalg.svdvals(lowrank.unfold(layer.weight.detach()))
    for r in range(1, full):
        new = LowRank(layer, r)
        lost = (layer.weight - new.compose()).detach().square().sum()
        assert float(lost) == pytest.approx(float(s[r:].square().sum()), rel=1e-9)  # Eckart–Young
        U, V = new.U.detach().flatten(0, -2), new.V.detach().flatten(0, -2)
        assert_close({"g": U.T @ U}, {"g": V.T @ V}, 1e-13)  # balanced


def test_a_convolution_is_read_as_ok_by_ik() -> None:
    new = LowRank(nn.Conv2d(4, 8, 3, **DOUBLE), 5)
    assert new.U.numel() + new.V.numel() == 5 * 3 * (4 + 8)
    matrix = new.U.detach().reshape(24, 5) @ new.V.detach().reshape(12, 5).T
    assert_close({"w": new.compose()}, {"w": matrix.reshape(8, 3, 4, 3).permute(0, 2, 1, 3)}, 1e-14)


@pytest.mark.parametrize("weight", [torch.zeros(6, 5, **DOUBLE), torch.ones(4, 3, 3, 3, **DOUBLE)], ids=["0", "1"])
def test_factors_of_a_poor_weight_are_exact_and_yet_not_dead(weight: torch.Tensor) -> None:
    U, V = lowrank.leading(weight, 3)
    assert_close({"w": lowrank.fold(U, V)}, {"w": weight}, 1e-12)
    assert bool((U.flatten(0, -2).norm(dim=0) > 1e-3).all())
    again = lowrank.leading(lowrank.fold(U, V) + 0.0, 3)
    assert_close({"u": again[0][..., :1], "v": again[1][..., :1]}, {"u": U[..., :1], "v": V[..., :1]}, 1e-12)


@pytest.mark.parametrize(
    ("model", "channels", "rank", "percent"),
    [("resnet18", 3, 128, 41.1), ("resnet18", 3, 96, 30.8), ("resnet18", 3, 64, 20.6), ("resnet10", 1, 128, 43.3)],
)
def test_published_shares_of_trained_parameters(model: str, channels: int, rank: int, percent: float) -> None:
    with torch.device("meta"):
        net = build(model, (channels, 32, 32), 10, norm="batch")
        names = [k for k in candidates(net) if k.startswith("layer")]
        whole = sum(p.numel() for p in net.parameters())
        convert(net, names, lambda layer: Adapter(layer, rank))
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert round(100 * trained / whole, 1) == percent


def test_published_number_of_trained_parameters() -> None:
    with torch.device("meta"):
        net = build("resnet18", (3, 32, 32), 100, norm="batch")
        assert sum(p.numel() for p in net.parameters()) == 11_220_132
        convert(net, [k for k in candidates(net) if k.startswith("layer")], lambda layer: Adapter(layer, 128))
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == 4_633_764


# ------------------------------------------------------------------------------------------------ all kinds


KINDS = [
    lambda m: Factorized(m, 2),
    lambda m: Hadamard(m, 2),
    lambda m: Hadamard(m, 2, plus_one=True, tanh=True),
    lambda m: filled(Adapter(m, 1, own_rank=1, alpha=0.5, own_alpha=2.0)),
    lambda m: filled(Adapter(m, 9, own_rank=3)),
    lambda m: filled(Adapter(m, 2, "loha")),
    lambda m: filled(Adapter(m, 2, "lokr", own_rank=1)),
    lambda m: filled(Adapter(m, 0, own_rank=1, train_base=True)),
    lambda m: LowRank(m, 1),
    lambda m: LowRank(m, 100),
]


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


@pytest.mark.parametrize("make", [lambda m, r: filled(Adapter(m, r)), LowRank], ids=["adapter", "lowrank"])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_factored_convolutions_go_into_a_norm_when_mapped(make: Any, rank: int, shared: bool) -> None:
    net = nn.Sequential(make(nn.Conv2d(4, 8, 3, padding=1, **DOUBLE), rank), nn.GroupNorm(2, 8, **DOUBLE))
    assert getattr(net[0], "apart", None) or net[0].beside["A"]
    params = {k: p.detach() if shared else torch.randn(3, *p.shape, **DOUBLE) for k, p in net.named_parameters()}
    x = example(nn.Conv2d(4, 8, 3), 3, 2)
    run = vmap(lambda p, x: functional_call(net, p, (x,)), in_dims=(None if shared else 0, 0))
    mine = [params if shared else {k: p[c] for k, p in params.items()} for c in range(3)]
    assert_close({"y": run(params, x)}, {"y": torch.stack([functional_call(net, mine[c], (x[c],)) for c in range(3)])})


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
    assert list(choose(task, "large", "T", lambda layer: 40)) == ["hidden"]
    with pytest.raises(ConfigError, match="T: layers must be 'body', 'all' or names where no layer becomes smaller"):
        choose(task, "large", "T", lambda layer: 1000)
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
