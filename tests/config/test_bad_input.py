"""Bad data and settings, for every method: one sentence before training, or handled with finite state (B1, B3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError, DataError, FedspanError
from fedspan.learn.task import Task
from fedspan.methods import METHODS, make
from fedspan.simulation.result import Result
from fedspan.simulation.simulator import simulate

Pair = tuple[Any, Any]
EVERY = pytest.mark.parametrize("name", sorted(METHODS))
SOME = pytest.mark.parametrize("name", ["fedavg", "local", "pfl-mf"])  # where no method's own code is reached


def mlp(*, norm: str = "", outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(6) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(4, 6), middle, nn.ReLU(), nn.Linear(6, outputs))


def pairs(sizes: tuple[int, ...] = (9, 12, 7)) -> list[Pair]:
    rng = np.random.default_rng(0)
    labels = [rng.permutation(np.arange(n) % 3) for n in sizes]
    return [(torch.tensor(rng.normal(size=(len(y), 4)), dtype=torch.float32), torch.tensor(y)) for y in labels]


def run(name: str, clients: Any, model: Any = None, **settings: Any) -> Result:
    """Two rounds of a method with everyone, in this process."""
    if isinstance(clients, list):
        groups = [i % 2 for i in range(len(clients))]
        clients = FederatedData.from_arrays(clients, groups=groups, classes=settings.pop("classes", None))
    # Products of factors are steep in a squared loss, which has no bound: short steps.
    fields = {"rank": 2, "lr": 0.01} if name.startswith("pfl-mf") else {"lr": 0.01} if "fedpara" in name else {}
    settings = {"batch_size": 4, "workers": 1, "rounds": 2, **settings}
    return simulate(make(name, **fields), mlp() if model is None else model, clients, **settings)


def assert_finite(result: Result) -> None:
    sim = result.simulation
    assert sim is not None
    assert tree.all_finite(sim.record.server) and tree.all_finite(sim.record.common)
    for i in range(sim.data.clients):
        assert tree.all_finite(sim.record.row(i)), i
        assert tree.all_finite(sim.personal(i)[1]), i
    assert all(np.isfinite(v) for m in result.measures.values() for v in m.values())


def assert_sentence(error: BaseException, *parts: str) -> None:
    text = str(error)
    assert "\n" not in text and len(text) < 400, text
    assert all(p in text for p in parts), text


# --- data that is refused -------------------------------------------------------------------------------------------


def with_value(value: float) -> Callable[[], list[Pair]]:
    def build() -> list[Pair]:
        data = pairs()
        data[1][0][3, 2] = value
        return data

    return build


def with_label(value: int) -> Callable[[], list[Pair]]:
    def build() -> list[Pair]:
        data = pairs()
        data[1][1][3] = value
        return data

    return build


def with_client(x: Tensor, y: Tensor) -> Callable[[], list[Pair]]:
    return lambda: [*pairs(), (x, y)]


REFUSED: dict[str, tuple[Callable[[], list[Pair]], tuple[str, ...]]] = {
    "nan": (with_value(float("nan")), ("features must be finite", "client 1")),
    "inf": (with_value(float("inf")), ("features must be finite", "client 1")),
    "minus inf": (with_value(-float("inf")), ("features must be finite", "client 1")),
    "empty client": (with_client(torch.zeros(0, 4), torch.zeros(0).long()), ("client 3 has no training examples",)),
    "label -1": (with_label(-1), ("labels must lie in 0..2", "Got -1", "client 1")),
    "label too large": (with_label(3), ("labels must lie in 0..2", "Got 3", "client 1")),
    "wrong shape": (
        with_client(torch.zeros(5, 3), torch.zeros(5).long()), ("client 3 must have shape (4,)", "Got (3,)")
    ),
    "wrong channels": (
        with_client(torch.zeros(5, 2, 4), torch.zeros(5).long()), ("client 3 must have shape (4,)", "Got (2, 4)")
    ),
    "mixed labels": (with_client(torch.zeros(5, 4), torch.zeros(5)), ("labels of client 3", "Got torch.float32")),
    "too few labels": (with_client(torch.zeros(5, 4), torch.zeros(4).long()), ("client 3", "Got 5 and 4")),
    "not numbers": (lambda: [*pairs(), (np.array(["a"]), np.array([0]))], ("client 3 must be an array of numbers",)),
}  # fmt: skip


@SOME
@pytest.mark.parametrize("case", REFUSED)
def test_unusable_data_are_refused_naming_the_client(case: str, name: str) -> None:
    build, parts = REFUSED[case]
    with pytest.raises(DataError) as caught:
        run(name, build(), classes=3)
    assert_sentence(caught.value, *parts)


@SOME
def test_float_labels_for_a_classifier_are_refused(name: str) -> None:
    data = [(x, y.float()) for x, y in pairs()]
    with pytest.raises(FedspanError) as caught:
        run(name, data, Task(mlp(), "classification"))
    assert_sentence(caught.value, "label")
    with pytest.raises(FedspanError) as caught:  # read as targets of a regression, which needs one output
        run(name, data)
    assert_sentence(caught.value, "output")


@pytest.mark.parametrize("name", sorted(METHODS)[::2])
def test_integer_labels_for_a_regression_are_numbers(name: str) -> None:
    if METHODS[name].about.needs_classes:
        with pytest.raises(ConfigError) as caught:
            run(name, pairs(), Task(mlp(outputs=1), "regression"))
        assert_sentence(caught.value, "must be a classifier", "regression")
    else:
        assert_finite(run(name, pairs(), Task(mlp(outputs=1), "regression")))


@pytest.mark.parametrize("name", sorted(METHODS)[1::2])
def test_targets_of_a_regression(name: str) -> None:
    data = [(x, y.double()) for x, y in pairs()]
    if not METHODS[name].about.needs_classes:
        assert_finite(run(name, data, mlp(outputs=1), precision="float64"))
    data[2][1][0] = float("nan")
    with pytest.raises(DataError) as caught:
        run(name, data, mlp(outputs=1))
    assert_sentence(caught.value, "targets must be finite", "client 2")


@EVERY
def test_integer_features_for_a_linear_model(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(name, [(x.long(), y) for x, y in pairs()])
    assert_sentence(caught.value, "(4,)")


# --- data that is handled -------------------------------------------------------------------------------------------


def changed(f: Callable[[Tensor, Tensor], Pair]) -> Callable[[], list[Pair]]:
    return lambda: [f(x, y) for x, y in pairs()]


ONES = (torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.ones(6).long())
HANDLED: dict[str, Callable[[], list[Pair]]] = {
    "one example": lambda: pairs((9, 1, 2)),
    "one example everywhere": lambda: pairs((1, 1, 1)),
    "one class": with_client(*ONES),
    "bytes": changed(lambda x, y: ((x.abs() * 50).byte(), y)),
    "double": changed(lambda x, y: (x.double(), y)),
    "constant features": changed(lambda x, y: (x * 0 + 3, y)),
    "duplicate rows": changed(lambda x, y: (x[:1].repeat(len(x), 1), y)),
    "one client": lambda: pairs((9,)),
}
SAME_FOR_ALL: dict[str, Callable[[], list[Pair]]] = {
    "one class everywhere": changed(lambda x, y: (x, y * 0)),
    "booleans": changed(lambda x, y: (x > 0, y)),
    "numpy": changed(lambda x, y: (x.numpy(), y.numpy())),
    "int32 labels": changed(lambda x, y: (x, y.int())),
    "byte labels": changed(lambda x, y: (x, y.byte())),
    "zero features": changed(lambda x, y: (x * 0, y)),
    "large features": changed(lambda x, y: (x * 30, y)),
}


def in_turn(cases: Iterable[Any], each: int) -> list[tuple[Any, str]]:
    """Cases with methods: every method meets every `each`-th case, and every case as large a part of the methods."""
    return [
        (case, name) for i, name in enumerate(sorted(METHODS)) for k, case in enumerate(cases) if (i + k) % each == 0
    ]


@pytest.mark.parametrize(("case", "name"), in_turn(HANDLED, 3))
def test_odd_data_are_trained_on_with_finite_state(case: str, name: str) -> None:
    model = nn.Sequential(Scale(0.01), *mlp()) if case == "bytes" else None
    assert_finite(run(name, HANDLED[case](), model, classes=3))


@pytest.mark.parametrize("case", SAME_FOR_ALL)
def test_odd_data_of_kinds_no_method_sees(case: str) -> None:
    assert_finite(run("fedavg", SAME_FOR_ALL[case](), classes=3))


class Scale(nn.Module):
    """Bytes to about [0, 1]."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize(("case", "name"), in_turn([(1, "loop"), (1000, "vmap"), ("full", "loop")], 3))
def test_batches_of_any_size(case: tuple[Any, str], name: str) -> None:
    size, mapping = case
    assert_finite(run(name, pairs(), batch_size=size, mapping=mapping))


@pytest.mark.parametrize(("sizes", "name"), in_turn([(9, 1, 7), (1, 1, 1), (17, 7, 12)], 3))
def test_batch_normalisation_and_clients_too_small_for_it(sizes: tuple[int, ...], name: str) -> None:
    """One example has no variance: a client of one (or one left over in a batch) is refused by name or left out."""
    try:
        result = run(name, pairs(sizes), mlp(norm="batch"))
    except FedspanError as e:
        assert min(sizes) <= 2  # of two examples one is for training
        assert_sentence(e, "client")
    else:
        assert_finite(result)


@SOME
def test_batch_normalisation_with_batches_of_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(name, pairs(), mlp(norm="batch"), batch_size=1)
    assert_sentence(caught.value, "batch_size must be at least 2", "GroupNorm")


# --- federation and settings (B3, B4) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg"])
@pytest.mark.parametrize("participation", [0, 0.0, -0.5, 1.01, 2, float("nan"), float("inf"), "half", None, True])
def test_participation_outside_its_range_is_refused(participation: Any, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(name, pairs(), participation=participation)
    assert_sentence(caught.value, "participation", f"{participation!r}")


@SOME
def test_at_least_one_client_takes_part(name: str) -> None:
    result = run(name, pairs(), participation=0.01)
    assert [line["sampled"] for line in result.curve] == [1, 1]
    assert_finite(result)


@EVERY
def test_an_empty_round_is_recorded_as_skipped(name: str) -> None:
    result = run(name, pairs(), participation=1e-9, sampling="bernoulli")
    assert [(line["sampled"], line["skipped"]) for line in result.curve] == [(0, True), (0, True)]
    assert_finite(result)


@pytest.mark.parametrize("name", ["fedavg"])
@pytest.mark.parametrize("rounds", [-1, 1.5, "3", True, None, float("nan")])
def test_rounds_that_are_no_count_are_refused(rounds: Any, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(name, pairs(), rounds=rounds)
    assert_sentence(caught.value, "rounds must be an integer >= 0", f"Got {rounds!r}")


@SOME
def test_no_rounds_only_evaluate(name: str) -> None:
    result = run(name, pairs(), rounds=0)
    assert result.curve == [] and result.bytes["up"] == 0
    assert_finite(result)


@SOME
def test_models_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(name, pairs(), mlp(outputs=2))
    assert_sentence(caught.value, "at least 3 outputs", "Got 2")
    with pytest.raises(ConfigError) as caught:
        run(name, pairs(), nn.Linear(5, 3))
    assert_sentence(caught.value, "examples of shape (4,)")
    with pytest.raises(ConfigError) as caught:
        run(name, pairs(), nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(3, 3)))
    assert_sentence(caught.value, "examples of shape (4,)")
    with pytest.raises(ConfigError) as caught:
        run(name, pairs(), nn.ReLU())
    assert_sentence(caught.value, "no trainable parameters")


@pytest.mark.parametrize("name", ["fedavg"])
@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"participaton": 0.5}, ("unknown", "'participaton'", "Did you mean 'participation'?")),
        ({"batchsize": 8}, ("Did you mean 'batch_size'?",)),
        ({"batch_size": 0}, ("batch_size", "Got 0")),
        ({"batch_size": "all"}, ("batch_size", "'all'")),
        ({"epochs": -1}, ("epochs", "Got -1")),
        ({"epochs": 1.5}, ("epochs", "1.5")),
        ({"drop_rate": 1.5}, ("drop_rate", "Got 1.5")),
        ({"drop_rate": float("nan")}, ("drop_rate", "nan")),
        ({"chunk": 0}, ("chunk", "Got 0")),
        ({"workers": 0}, ("workers", "Got 0")),
        ({"memory_mb": 0}, ("memory_mb", "Got 0")),
        ({"dtype": "float16"}, ("dtype", "float16")),
        ({"mapping": "jit"}, ("mapping", "jit")),
        ({"on_divergence": "hope"}, ("on_divergence", "hope")),
        ({"drop": "never"}, ("drop", "never")),
        ({"evaluate_part": "train"}, ("evaluate_part", "train")),
        ({"evaluate_part": "validation"}, ("validation",)),
        ({"checkpoint_seconds": float("nan")}, ("checkpoint_seconds", "nan")),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], parts: tuple[str, ...], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(name, pairs(), **settings)
    assert_sentence(caught.value, *parts)


def test_no_clients_at_all() -> None:
    with pytest.raises(DataError, match="at least one client"):
        simulate(make("fedavg"), mlp(), [], rounds=1)
