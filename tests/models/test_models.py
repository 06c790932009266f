"""Models: parameter counts of the papers, shapes, vmap = loop, and sentences for what does not fit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedspan.errors import ConfigError
from fedspan.method.named_code import only_allowing
from fedspan.models import MODELS, build
from fedspan.models.resnet import groups

COLOUR, GREY, TINY = (3, 32, 32), (1, 28, 28), (1, 8, 8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on_meta(kind: str, shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return build(kind, shape, classes, **options)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "shape", "classes", "options", "count"),
    [
        ("linear", (5,), 1, {}, 6),
        ("linear", (5,), 1, {"bias": False}, 5),
        ("logistic", GREY, 10, {}, 7_850),
        ("mlp", (784,), 10, {}, 199_210),
        ("mlp", GREY, 62, {}, 209_662),
        ("mlp", (4,), 3, {"hidden": [5]}, 43),
        ("mlp", (4,), 3, {"hidden": []}, 15),
        ("cnn", COLOUR, 10, {}, 878_538),
        ("cnn", GREY, 10, {}, 582_026),
        ("cnn", GREY, 10, {"padding": 2}, 1_663_370),  # McMahan et al. 2017, section 3
        ("cnn", COLOUR, 10, {"norm": "group"}, 878_538 + 32 + 64),  # scales and shifts instead of biases
        ("cnn3x3", COLOUR, 10, {}, 674_656 + 32 + 64 + 10),
        ("cnn3x3", COLOUR, 100, {}, 6_572_896 + 32 + 64 + 100),
        ("lenet5", GREY, 10, {}, 61_706),
        ("lenet5", COLOUR, 10, {}, 62_006),
        ("cnn1", COLOUR, 10, {}, 2_621_558),
        ("cnn2", COLOUR, 10, {}, 1_815_142),
        ("cnn3", COLOUR, 10, {}, 1_320_558),
        ("cnn4", COLOUR, 10, {}, 1_060_358),
        ("cnn5", COLOUR, 10, {}, 670_058),
        ("resnet8", COLOUR, 10, {}, 78_042),
        ("resnet9", COLOUR, 10, {}, 2_574_290 - 2_952),
        ("resnet10", GREY, 10, {"norm": "batch"}, 4_902_090),
        ("resnet18", COLOUR, 10, {"norm": "batch"}, 11_173_962),
        ("resnet18", COLOUR, 100, {"norm": "batch"}, 11_220_132),
        ("resnet18", COLOUR, 10, {}, 11_173_962),
    ],
)
def test_parameter_counts(kind: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], count: int) -> None:
    assert parameters(on_meta(kind, shape, classes, **options)) == count


def test_cnn_has_1600_features() -> None:
    assert on_meta("cnn", COLOUR, 10).get_submodule("fc1").in_features == 1600


def test_resnet9_state_has_the_published_size() -> None:
    model = on_meta("resnet9", COLOUR, 10, norm="batch")
    assert sum(v.numel() for v in model.state_dict().values()) == 2_574_290


def test_fedloru_layers_carry_the_names_of_the_specification() -> None:
    model = on_meta("resnet18", COLOUR, 100, norm="batch")
    convs = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and n.startswith("layer")}
    dense = parameters(model) - sum(m.weight.numel() for m in convs.values())
    factors = sum(128 * (m.out_channels + m.weight[0].numel()) for m in convs.values())
    assert {n.split(".")[0] for n in convs} == {"layer1", "layer2", "layer3", "layer4"}
    assert dense + factors == 4_633_764  # FedLoRU, Table 2: "4.63M"


@pytest.mark.parametrize("kind", sorted(k for k, entry in MODELS.items() if not entry.language))
@pytest.mark.parametrize("shape", [COLOUR, GREY, (3, 33, 40)])
def test_shapes_and_head(kind: str, shape: tuple[int, ...]) -> None:
    model = on_meta(kind, shape, 7)
    assert model(torch.empty(2, *shape, device="meta")).shape == (2, 7)
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    assert last is model.head and last.out_features == 7
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize("kind", ["linear", "mlp", "lenet5", "cnn3x3", "resnet8", "resnet10", "resnet18"])
def test_tiny_images(kind: str) -> None:
    assert on_meta(kind, TINY, 10)(torch.empty(3, *TINY, device="meta")).shape == (3, 10)


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("kind", ["resnet8", "resnet9", "resnet10"])
def test_norms(kind: str, norm: str) -> None:
    model = build(kind, (3, 16, 16), 4, norm=norm, width=4)
    kinds = {type(m) for m in model.modules()}
    assert (nn.GroupNorm in kinds, nn.BatchNorm2d in kinds) == (norm == "group", norm == "batch")
    assert all((m.bias is not None) == (norm == "none") for m in model.modules() if isinstance(m, nn.Conv2d))
    assert model(torch.randn(2, 3, 16, 16)).isfinite().all()


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
def test_norms_of_the_cnn(norm: str) -> None:
    model = build("cnn", (3, 16, 16), 4, norm=norm)
    kinds = {type(m) for m in model.modules()}
    assert (nn.GroupNorm in kinds, nn.BatchNorm2d in kinds) == (norm == "group", norm == "batch")
    assert all((m.bias is not None) == (norm == "none") for m in model.modules() if isinstance(m, nn.Conv2d))
    with pytest.raises(ConfigError, match="cnn: norm must be"):
        build("cnn", COLOUR, 10, norm="layer")


def test_trying_a_model_leaves_its_statistics_alone() -> None:
    model = build("resnet8", (1, 8, 8), 3, norm="batch", width=4)
    assert all(int(b) == 0 for n, b in model.named_buffers() if n.endswith("num_batches_tracked"))


def test_groups_divide_the_channels() -> None:
    assert [groups(c) for c in (1, 4, 6, 16, 20, 64, 128, 512)] == [1, 1, 1, 4, 5, 16, 32, 32]
    assert all(c % groups(c) == 0 for c in range(1, 200))


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("linear", (3, 2), {}),
        ("mlp", (6,), {"hidden": [8, 8]}),
        ("cnn", TINY, {"padding": 2}),
        ("cnn3x3", (1, 4, 4), {}),
        ("lenet5", TINY, {}),
        ("resnet8", (2, 8, 8), {"width": 4}),
        ("resnet9", (1, 12, 12), {"width": 4}),
    ],
)
def test_vmap_over_clients_is_the_loop(kind: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    models = [build(kind, shape, 3, **options).double() for _ in range(3)]
    params, buffers = stack_module_state(models)
    assert not buffers
    x = torch.randn(3, 4, *shape, dtype=torch.float64)

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(models[0], p, (x,)).logsumexp(-1).sum()

    mapped = vmap(grad(loss))(params, x)
    outputs = vmap(lambda p, x: functional_call(models[0], p, (x,)))(params, x)
    for i, model in enumerate(models):
        model.zero_grad()
        y = model(x[i])
        y.logsumexp(-1).sum().backward()
        assert torch.allclose(outputs[i], y, rtol=0, atol=1e-12)
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert (mapped[name][i] - p.grad).abs().max() <= 1e-12 * max(1.0, float(p.grad.abs().max())), name


@pytest.mark.parametrize("kind", ["mlp", "resnet8"])
def test_the_seed_decides_the_weights(kind: str) -> None:
    def weights(seed: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.utils.parameters_to_vector(build(kind, TINY, 3).parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    ("kind", "shape", "classes", "options", "words"),
    [
        ("mpl", GREY, 10, {}, "Got 'mpl'. Did you mean 'mlp'?"),
        ("zzzzzz", GREY, 10, {}, "Allowed: causal-lm, characters, cnn, cnn1"),
        ("mlp", GREY, 10, {"hiden": [3]}, "unknown option 'hiden'. Did you mean 'hidden'?"),
        ("cnn1", COLOUR, 10, {"level": 2}, "unknown option 'level'"),
        ("lenet5", GREY, 10, {"width": 2}, "unknown option 'width'. It has no options."),
        ("mlp", GREY, 10, {"hidden": [0]}, "mlp: hidden must be a list of integers >= 1. Got [0]."),
        ("mlp", GREY, 10, {"hidden": "55"}, "must be a list of integers >= 1. Got '55'."),
        ("mlp", GREY, 10, {"hidden": 5}, "must be a list of integers >= 1. Got 5."),
        ("mlp", GREY, 0, {}, "classes must be an integer >= 1. Got 0."),
        ("mlp", (), 10, {}, "input_shape must not be empty"),
        ("mlp", (3, 0), 10, {}, "input_shape must be a list of integers >= 1. Got (3, 0)."),
        ("linear", (3,), 1, {"bias": 1}, "bias must be true or false. Got 1."),
        ("resnet8", COLOUR, 10, {"width": True}, "resnet8: width must be an integer >= 1. Got True."),
        ("resnet18", COLOUR, 10, {"norm": "layer"}, "resnet18: norm must be one of group, batch, none. Got 'layer'."),
        ("resnet10", (784,), 10, {}, "resnet10: inputs must be images (channels, height, width). Got shape (784,)"),
        ("cnn", (32, 32, 3), 10, {}, "move them to the front: (3, 32, 32)."),
        ("cnn", TINY, 10, {}, "cnn: images must be at least 16x16. Got shape (1, 8, 8); set padding = 2"),
        ("cnn5", (1, 3, 9), 10, {"padding": 2}, "cnn5: images must be at least 4x4. Got shape (1, 3, 9)"),
        ("cnn", GREY, 10, {"padding": 3}, "cnn: padding must be an integer from 0 to 2. Got 3."),
        ("resnet9", TINY, 10, {}, "resnet9: images must be at least 11x11."),
        ("resnet8", (1, 1, 1), 10, {"width": 1}, "model 'resnet8': does not accept inputs of shape (1, 1, 1) ("),
    ],
)
def test_what_does_not_fit_is_said(
    kind: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build(kind, shape, classes, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "side", "options"),
    [("cnn", 16, {}), ("cnn", 10, {"padding": 1}), ("cnn", 4, {"padding": 2}), ("cnn1", 16, {}), ("resnet9", 11, {})],
)
def test_smallest_image(kind: str, side: int, options: dict[str, Any]) -> None:
    on_meta(kind, (1, side, side), 10, **options)
    with pytest.raises(ConfigError, match=f"at least {side}x{side}"):
        on_meta(kind, (1, side, side - 1), 10, **options)


def test_numpy_integers_are_integers() -> None:
    shape = tuple(np.array([1, 8, 8]))
    assert build("mlp", shape, np.int64(3), hidden=[4]).get_submodule("head").out_features == 3


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, classes, width=4):
        super().__init__()
        first, last = nn.Linear(input_shape[0], width), nn.Linear(width, classes)
        self.layers = nn.Sequential(nn.Flatten(), first, nn.Dropout(), last)
        self.layers[2].eval()

    def forward(self, x):
        return self.layers(x)

class Fixed(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

class Words(nn.Sequential):
    def __init__(self, classes):
        super().__init__(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, classes))

class Other:
    def __init__(self, classes, **rest):
        pass

def function(classes):
    return nn.Linear(3, classes)

class Broken(nn.Module):
    def __init__(self, classes):
        raise RuntimeError("no weights here.\\nsecond line")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "fedspan_own_model.py").write_text(OWN)
    (tmp_path / "fedspan_bad_model.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with only_allowing(["fedspan_own_model", "fedspan_bad_model", "fedspan_no_such", "torch"], "add {package}"):
        yield "fedspan_own_model"
    sys.modules.pop("fedspan_own_model", None)


def test_own_module(own: str) -> None:
    model = build(f"{own}:Net", (3,), 2, width=5)
    assert parameters(model) == 3 * 5 + 5 + 5 * 2 + 2
    assert [m.training for m in model.get_submodule("layers").children()] == [True, True, False, True]
    assert isinstance(build(f"{own}:Fixed", (3,), 2), nn.Linear)
    assert build(f"{own}:Words", (5,), 2)(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 2)
    assert isinstance(build("torch.nn:Linear", (3,), 2, in_features=3, out_features=2), nn.Linear)


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (":Net", {}, "must be given as 'package.module:Class'. Got ':Net'."),
        ("fedspan_no_such:Net", {}, "cannot be imported (ModuleNotFoundError: No module named 'fedspan_no_such')"),
        ("fedspan_bad_model:Net", {}, "cannot be imported (ZeroDivisionError: division by zero)"),
        ("fedspan_own_model:Nett", {}, "has no class 'Nett'"),
        ("fedspan_own_model:Net", {"widht": 3}, "unknown option 'widht'. Did you mean 'width'?"),
        ("fedspan_own_model:Fixed", {"a": 3}, "unknown option 'a'. It has no options."),
        (
            "fedspan_own_model:Other",
            {},
            "must be a subclass of torch.nn.Module. Got the class fedspan_own_model.Other.",
        ),
        ("fedspan_own_model:function", {}, "must be a subclass of torch.nn.Module. Got the function function."),
        ("os:system", {"command": "true"}, "code of package 'os' must be allowed before it runs."),
        ("fedspan_own_model:Broken", {}, "could not be built with {'classes': 5} (RuntimeError: no weights here)."),
        ("fedspan_own_model:Fixed", {}, "must turn one input of shape (3,) into (1, 5). Got (1, 2); change the class"),
        ("torch.nn:Conv2d", {"in_channels": 1, "out_channels": 5, "kernel_size": 1}, "does not accept inputs of shape"),
        ("torch.nn:GRU", {"input_size": 3, "hidden_size": 5}, "into (1, 5). Got tuple; change the class"),
    ],
)
@pytest.mark.usefixtures("own")
def test_own_module_faults_are_said(spec: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(spec, (3,), 5, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_registry_lists_options_with_defaults() -> None:
    assert MODELS["mlp"].options == {"hidden": (200, 200)}
    assert MODELS["cnn3"].options == {"padding": 0}
    assert MODELS["resnet8"].options == {"width": 16, "norm": "group"}
    assert MODELS["resnet18"].options == {"width": 64, "norm": "group"}
    assert all(entry.about and "\n" not in entry.about for entry in MODELS.values())


def test_pooling_before_relu_gives_the_numbers_and_gradients_of_the_papers_order() -> None:
    torch.manual_seed(0)
    net, x = build("cnn", (1, 12, 12), 3, padding=2), torch.randn(4, 1, 12, 12)

    def written(x: torch.Tensor) -> torch.Tensor:
        for layer in (net.conv1, net.conv2):
            x = torch.nn.functional.max_pool2d(layer(x).relu(), 2)
        return net.head(net.fc1(x.flatten(1)).relu())

    ends = [net(x), written(x)]
    slopes = [torch.autograd.grad(y.square().sum(), list(net.parameters())) for y in ends]
    assert torch.equal(*ends) and all(torch.equal(a, b) for a, b in zip(*slopes))
