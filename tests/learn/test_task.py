"""A task: which parameters it has, which are its head, and that it is a pure function, mapped or not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from conftest import assert_close, assert_same, make_data, make_task
from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import Batch
from fedspan.learn.sgd import sgd
from fedspan.learn.task import Task
from fedspan.methods import FedAvg
from fedspan.randomness import key
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation


def batch(x: Tensor, y: Tensor, w: Tensor | None = None, k: int | Tensor = 0) -> Batch:
    """A batch of real examples, or with `w` a mapped one whose slots are empty where w is 0."""
    slots = None if w is None else torch.where(w > 0, torch.arange(len(x)), -1)
    return Batch(x, y, slots, k if isinstance(k, Tensor) else key(k), 0)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Odd(nn.Module):
    """A Linear that is defined last but used first, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x) * self.scale)


# ------------------------------------------------------------------------------------------------ the head


def test_the_head_is_the_last_linear_in_definition_order() -> None:
    task = make_task()
    assert task.head == ["4.weight", "4.bias"] and task.body == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert Task(Odd()).head == ["inner.weight", "inner.bias"]
    assert make_task("cnn").head == ["head.weight", "head.bias"]


def test_the_head_can_be_named() -> None:
    task = Task(Odd(), head="out")
    assert task.head == ["out.weight", "out.bias"] and task.body == ["scale", "inner.weight", "inner.bias"]
    assert Task(Odd(), head="scale").head == ["scale"]
    nested = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert Task(nested, head="1").head == ["1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"]
    with pytest.raises(ConfigError, match=r"no trainable parameter is called 'ou' or starts with 'ou\.'"):
        Task(Odd(), head="ou")


def test_a_model_without_linear_layers_has_no_head_until_one_is_asked_for() -> None:
    task = Task(nn.Sequential(nn.Conv1d(1, 2, 1), nn.Flatten(), nn.LazyLinear(1))[:2])
    assert task.head == [] and task.body == task.names
    for ask in (task.need_head, lambda: task.features(task.init(), torch.ones(1, 1, 3))):
        with pytest.raises(ConfigError, match=r"this method needs a head, the last nn.Linear of the model, and the"):
            ask()


def test_features_and_head_make_the_output() -> None:
    x = numbers(4, 5)
    for task in (make_task(), Task(Odd(), head="out", dtype=torch.float64)):
        params = tree.map(lambda a: a + 0.1, task.init())
        z = task.features(params, x)
        assert z.shape == (4, len(params[task.head[0]][0]))
        assert_close(task.from_features(tree.select(params, task.head), z), task.predict(params, x))
        assert_close(task.features(params, x, train=True), z)


def test_a_single_linear_layer_is_all_head() -> None:
    task = Task(nn.Linear(5, 3), dtype=torch.float64)
    assert task.head == ["weight", "bias"] and task.body == []
    x, params = numbers(4, 5), tree.map(lambda a: a + 1.0, task.init())
    assert_same(task.features(params, x), x)
    assert_close(task.from_features(params, x).detach(), task.predict(params, x).detach())


def test_a_frozen_last_linear_is_not_the_head() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].requires_grad_(False)
    assert Task(model).head == ["1.weight", "1.bias"]


# ------------------------------------------------------------------------------------------------ parameters


def test_frozen_parameters_are_constants() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    task = Task(model)
    assert task.names == ["2.weight", "2.bias"] and list(task.init()) == task.names
    settings = Settings(precision="float64", batch_size=8, workers=1)
    sim = Simulation(FedAvg(), task, make_data(), rounds=1, settings=settings)
    sim.run()
    assert list(sim.record.server["theta"]) == task.names
    assert torch.equal(task.module[0].weight, frozen) and torch.equal(task._eval[0].weight, frozen)
    assert sim.record.progress.totals["up"] == 7 * 15 * 8
    x, theta = numbers(2, 5), sim.personal(0)[1]
    expected = (x @ frozen.T + model[0].bias).relu() @ theta["2.weight"].T + theta["2.bias"]
    assert_close(task.predict(theta, x).detach(), expected.detach())
    assert torch.equal(task.module_with(theta)[0].weight, frozen)


def test_a_model_that_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Task: the model has no trainable parameters\."):
        Task(nn.Sequential(nn.ReLU()))
    with pytest.raises(ConfigError, match=r"kind must be classification, .* or language. Got 'ranking'"):
        Task(nn.Linear(1, 1), "ranking")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"the model must be an nn.Module or build one. Got int"):
        Task(lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"BatchNorm1d at '1' must have a momentum"):
        Task(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)))


def test_the_module_given_is_left_alone_and_init_gives_copies() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    task = Task(model, dtype=torch.float64, seed=3)
    assert isinstance(model[1], nn.Dropout) and model[0].weight.dtype == torch.float32
    a, b = task.init(), task.init()
    a["0.weight"].zero_()
    assert float(b["0.weight"].abs().sum()) > 0 and float(task.init()["0.weight"].abs().sum()) > 0


def builders() -> dict[str, Callable[[], nn.Module] | nn.Module]:
    return {
        "module": make_task("cnn").module,
        "function": lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
    }


@pytest.mark.parametrize("what", ["module", "function"])
def test_fresh_starts_are_keyed_and_independent(what: str) -> None:
    torch.manual_seed(0)
    task = Task(builders()[what], dtype=torch.float64, seed=1)
    before, state = tree.digest(task.init()), torch.get_rng_state()
    a, again, b, c = task.fresh(1, "U", 0), task.fresh(1, "U", 0), task.fresh(1, "U", 1), task.fresh(2, "U", 0)
    assert_same(a, again)
    weights = next(k for k in task.names if k.endswith("weight"))
    for p, q in ((a, b), (a, c), (b, c), (a, task.init())):
        assert float((p[weights] - q[weights]).abs().max()) > 0.05
    assert tree.digest(task.init()) == before and torch.equal(torch.get_rng_state(), state)
    assert list(a) == list(task.init()) and all(p.dtype == torch.float64 for p in a.values())


@pytest.mark.parametrize("what", ["module", "function"])
def test_a_head_can_start_from_zero_and_the_rest_as_ever(what: str) -> None:
    plain = Task(builders()[what], dtype=torch.float64, seed=1)
    task = Task(builders()[what], dtype=torch.float64, seed=1, zero_head=True)
    for a, b in ((task.init(), plain.init()), (task.fresh(3, "U"), plain.fresh(3, "U"))):
        assert not any(a[k].any() for k in task.head) and any(b[k].any() for k in task.head)
        assert_same(tree.select(a, task.body), tree.select(b, task.body))
    assert_same(task.converted(lambda module: module).init(), task.init())
    x = torch.randn(2, *((1, 6, 6) if what == "module" else (5,)), dtype=torch.float64)
    assert not task.predict(task.init(), x).any()


def test_the_seed_decides_the_start() -> None:
    for what in ("module", "function"):
        a, b, c = (Task(builders()[what], seed=s).init() for s in (1, 1, 2))
        assert_same(a, b)
        assert tree.digest(a) != tree.digest(c)
    odd = Odd()
    assert_same(Task(odd).init(), dict(odd.named_parameters()))  # without a seed: as it came


def test_a_layer_that_cannot_be_drawn_again_is_named() -> None:
    sentence = (
        "Task: Odd at 'the model' has no reset_parameters to draw another initialisation."
        " Pass a function that builds the model instead of the model."
    )
    with pytest.raises(ConfigError) as e:
        Task(Odd()).fresh(1)
    assert str(e.value) == sentence
    with pytest.raises(ConfigError, match="MultiheadAttention at '0' has no reset_parameters"):
        Task(nn.Sequential(nn.MultiheadAttention(4, 2))).fresh(1)
    task = Task(Odd, seed=1)
    assert tree.digest(task.fresh(1)) != tree.digest(task.fresh(2))


def test_what_cannot_be_mapped_is_said_layer_by_layer() -> None:
    model = nn.ModuleDict(
        {
            "a": nn.BatchNorm1d(3),
            "b": nn.ModuleList([nn.LSTM(2, 2), nn.Linear(2, 2)]),
            "c": nn.MultiheadAttention(4, 2),
            "d": nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        }
    )
    tail = "or run with train.mapping='loop'."
    assert Task(model).unmappable() == [
        f"Task: BatchNorm1d at 'a' cannot be trained for many clients at once; use GroupNorm, {tail}",
        f"Task: LSTM at 'b.0' cannot be trained for many clients at once; write the cell out explicitly, {tail}",
        f"Task: MultiheadAttention at 'c' cannot be trained for many clients at once; use explicit attention, {tail}",
        f"Task: InstanceNorm2d at 'd' cannot be trained for many clients at once; use GroupNorm, {tail}",
    ]
    assert make_task("cnn").unmappable() == [] and make_task("cnn").has(nn.Conv2d) and not make_task().has(nn.Conv2d)


# ------------------------------------------------------------------------------------------------ dropout


def test_dropout_is_keyed_and_the_same_mapped_or_not() -> None:
    task = make_task("dropout")
    params, x, y = task.init(), numbers(6, 5), torch.arange(6) % 3
    keys = torch.stack([key(i) for i in range(3)])
    mapped = vmap(lambda k: task.loss(params, batch(x, y, torch.ones(6), k)))(keys)
    looped = torch.stack([task.loss(params, batch(x, y, k=i)) for i in range(3)])
    assert_close(mapped.detach(), looped.detach())
    assert len(set(looped.tolist())) == 3  # another key, another mask
    torch.manual_seed(99)
    assert_close(task.loss(params, batch(x, y)).detach(), looped[0].detach(), 0.0)
    assert torch.equal(task.predict(params, x), task.predict(params, x))


def test_dropout_does_not_see_the_empty_slots_behind_the_examples() -> None:
    task = make_task("dropout")
    params, x, y = task.init(), numbers(6, 5), torch.arange(6) % 3
    w = torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.float64)
    assert_close(task.loss(params, batch(x, y, w)).detach(), task.loss(params, batch(x[:4], y[:4])).detach())


@pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.Dropout2d(0.4)])
def test_dropout_keeps_the_right_share_and_scale(layer: nn.Module) -> None:
    task = Task(nn.Sequential(layer, nn.Conv2d(50, 1, 1)))
    drop = task.module[0]
    drop.key = key(1)
    out = drop(torch.ones(40, 50, 4, 4))
    kept = out != 0
    assert abs(float(kept.double().mean()) - 0.6) < 0.03
    assert torch.allclose(out[kept], torch.tensor(1 / 0.6))
    assert (kept.flatten(2).float().std(2) == 0).all() == isinstance(layer, nn.Dropout2d)
    assert torch.equal(drop.eval()(torch.ones(3, 50, 1, 1)), torch.ones(3, 50, 1, 1))


def test_two_dropout_layers_have_masks_of_their_own() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8, bias=False), nn.Dropout(0.5), nn.Linear(8, 8, bias=False))
    task = Task(model, dtype=torch.float64)
    seen: list[Tensor] = []
    for i in (0, 2):
        task.module[i].register_forward_hook(lambda _, args, out: seen.append((out != 0) & (args[0] != 0)))
    params = tree.map(torch.ones_like, task.init())
    task.loss(params, batch(torch.ones(4, 8, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)))
    assert not torch.equal(seen[0], seen[1])


def test_one_dropout_module_in_two_places_is_keyed_in_both() -> None:
    drop = nn.Dropout(0.5)
    task = Task(nn.Sequential(nn.Linear(5, 9), drop, nn.Linear(9, 9), drop, nn.Linear(9, 3)), dtype=torch.float64)
    x, y = numbers(6, 5), torch.arange(6) % 3
    one = task.loss(task.init(), batch(x, y))
    assert torch.equal(task.loss(task.init(), batch(x, y)), one)  # the same key, the same masks


# ------------------------------------------------------------------------------------------------ losses and measures


def test_classification() -> None:
    task = make_task()
    x, y = numbers(6, 5), torch.arange(6) % 3
    out = task.predict(task.init(), x)
    losses = torch.stack([-out[i].log_softmax(0)[y[i]] for i in range(6)])
    assert_close(task.example_loss(out, y).detach(), losses.detach())
    measures = task.measures(out, y)
    assert measures["accuracy"].tolist() == [float(out[i].argmax() == y[i]) for i in range(6)]
    w = torch.tensor([1, 0, 1, 1, 0, 0], dtype=torch.float64)
    assert_close(task.loss(task.init(), batch(x, y, w)).detach(), losses[[0, 2, 3]].mean().detach())
    assert float(task.loss(task.init(), batch(x, y, w * 0))) == 0.0


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 2)])
def test_regression_does_not_broadcast(shape: tuple[int, ...]) -> None:
    task = Task(nn.Linear(5, shape[1] if len(shape) > 1 else 1), "regression", dtype=torch.float64)
    x, y = numbers(6, 5), numbers(*shape, seed=1)
    out = task.predict(task.init(), x)
    expected = (out.reshape(6, -1) - y.reshape(6, -1)).square().mean(1)
    assert_close(task.measures(out, y)["squared_error"].detach(), expected.detach())
    assert_close(task.loss(task.init(), batch(x, y)).detach(), expected.mean().detach())
    assert "accuracy" not in task.measures(out, y)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x))


def test_language_leaves_out_what_is_not_predicted() -> None:
    task = Task(Tokens(), "language", dtype=torch.float64)
    x = torch.tensor([[1, 2, 3], [4, 5, 6], [1, 1, 1]])
    y = torch.tensor([[2, 3, -100], [5, -100, -100], [-100, -100, -100]])
    p = task.predict(task.init(), x).log_softmax(2)
    expected = torch.stack([-(p[0, 0, 2] + p[0, 1, 3]) / 2, -p[1, 0, 5], torch.zeros((), dtype=torch.float64)])
    assert_close(task.example_loss(task.predict(task.init(), x), y).detach(), expected.detach())
    assert_close(task.loss(task.init(), batch(x, y)).detach(), expected.mean().detach())
    found = task.measures(task.predict(task.init(), x), y)
    assert list(found) == ["loss", "token_loss", "tokens"] and found["tokens"].tolist() == [2, 1, 0]
    assert_close((found["token_loss"] / found["tokens"].clamp_min(1)).detach(), expected.detach())
    start = task.init()
    ys, w = torch.stack([y, y.flip(0)]), torch.ones(2, 3, dtype=torch.float64)
    mapped = vmap(lambda yy, ww: sgd(task.loss, start, [batch(x, yy, ww)], 0.5))(ys, w)
    for k, yy in enumerate(ys):
        assert_close(tree.take(mapped, k), sgd(task.loss, start, [batch(x, yy)], 0.5))


def test_own_loss() -> None:
    task = Task(nn.Linear(5, 3), dtype=torch.float64, loss=lambda out, y: out.square().sum(1) + y)
    x, y = numbers(4, 5), torch.arange(4)
    out = task.predict(task.init(), x)
    assert_close(task.loss(task.init(), batch(x, y)).detach(), (out.square().sum(1) + y).mean().detach())
    assert torch.equal(task.measures(out, y)["loss"], task.example_loss(out, y))


@pytest.mark.parametrize("kind", ["classification", "regression", "language", "own"])
def test_output_gradient_is_that_of_the_losses(kind: str) -> None:
    own = (lambda out, y: (out[:, 0] - y).pow(4)) if kind == "own" else None
    task = Task(nn.Linear(2, 2), "classification" if kind == "own" else kind, loss=own)  # type: ignore[arg-type]
    shape, y = {
        "classification": ((6, 3), torch.arange(6) % 3),
        "regression": ((6, 2), numbers(6, 2, seed=2)),
        "language": ((2, 3, 7), torch.tensor([[1, -100, 3], [-100, -100, 6]])),
        "own": ((6, 3), torch.arange(6)),
    }[kind]
    out = numbers(*shape).requires_grad_()
    (expected,) = torch.autograd.grad(task.example_loss(out, y).sum(), out)
    assert_close(task.output_gradient(out.detach(), y), expected)


def test_output_gradient_of_one_number_per_example() -> None:
    task = Task(nn.Linear(2, 1), "regression")
    for shape in ((6,), (6, 1)):
        out = numbers(6, 1).requires_grad_()
        y = numbers(*shape, seed=2)
        (expected,) = torch.autograd.grad(task.example_loss(out, y).sum(), out)
        assert_close(task.output_gradient(out.detach(), y), expected)


def test_module_with_holds_the_weights_and_predicts_alike() -> None:
    task = make_task("dropout")
    params = tree.map(lambda a: a + 0.5, task.init())
    module = task.module_with(params)
    x = numbers(3, 5)
    assert not module.training
    assert torch.equal(module(x), task.predict(params, x))
    assert not torch.equal(task.predict(task.init(), x), module(x))


# ------------------------------------------------------------------------------------------------ losses of one's own


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_torch_that_reduces_is_refused_at_the_door(reduction: str) -> None:
    said = rf"CrossEntropyLoss with reduction='{reduction}'; use reduction='none', or say loss_of='batch'"
    with pytest.raises(ConfigError, match=said):
        Task(nn.Linear(5, 3), loss=nn.CrossEntropyLoss(reduction=reduction))
    assert Task(nn.Linear(5, 3), loss=nn.CrossEntropyLoss(reduction="none")).unmappable() == []


@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_a_function_that_gives_one_value_for_two_examples_is_refused_before_the_first_round(mapping: str) -> None:
    task = Task(make_task().module, dtype=torch.float64, loss=nn.functional.cross_entropy)
    with pytest.raises(ConfigError, match=r"shape \(2,\) for 2 examples. Got \(\); use reduction='none'"):
        Simulation(FedAvg(), task, make_data(), rounds=1, settings=Settings(mapping=mapping, precision="float64"))  # type: ignore[arg-type]


def test_an_own_loss_per_example_gives_the_same_mapped_and_in_the_loop() -> None:
    ends = []
    for mapping in ("vmap", "loop"):
        task = Task(make_task().module, dtype=torch.float64, loss=nn.CrossEntropyLoss(reduction="none"))
        settings = Settings(mapping=mapping, precision="float64", batch_size=4, workers=1)  # type: ignore[arg-type]
        sim = Simulation(FedAvg(lr=0.1), task, make_data(), rounds=2, settings=settings)
        sim.run()
        ends.append(sim.record.server)
    assert_close(*ends)


def test_a_loss_of_batches_runs_in_the_loop_and_is_the_loss_it_is() -> None:
    own, batches = make_task().module, nn.CrossEntropyLoss()
    task = Task(own, dtype=torch.float64, loss=batches, loss_of="batch")
    each = Task(own, dtype=torch.float64)
    settings = Settings(precision="float64", batch_size=4, workers=1)
    sims = [Simulation(FedAvg(lr=0.1), t, make_data(), rounds=2, settings=settings) for t in (task, each)]
    for sim in sims:
        sim.run()
    assert [sim.mapping for sim in sims] == ["loop", "folded"]
    assert_close(*(sim.record.server for sim in sims))  # a mean over examples is the one loss both kinds can say
    assert task.converted(lambda m: m).unmappable() == task.unmappable() != []
    with pytest.raises(ConfigError, match=r"loss_of='batch'\) cannot be computed for many clients at once"):
        Simulation(FedAvg(), task, make_data(), rounds=1, settings=Settings(mapping="vmap", precision="float64"))


def test_a_loss_of_another_kind_than_declared_is_refused() -> None:
    x, y = numbers(4, 5), torch.arange(4) % 3
    task = Task(nn.Linear(5, 3), dtype=torch.float64, loss=nn.CrossEntropyLoss(reduction="none"), loss_of="batch")
    with pytest.raises(ConfigError, match=r"one value for the whole batch. Got shape \(4,\)"):
        task.loss(task.init(), batch(x, y))
    wide = Task(nn.Linear(5, 2), "regression", dtype=torch.float64, loss=nn.MSELoss(reduction="none"))
    with pytest.raises(ConfigError, match=r"Got \(4, 2\); take the mean over the other axes"):
        wide.loss(wide.init(), batch(x, numbers(4, 2)))
    narrow = Task(nn.Linear(5, 1), "regression", dtype=torch.float64, loss=nn.MSELoss(reduction="none"))
    assert narrow.example_loss(numbers(4, 1), numbers(4, 1, seed=1)).shape == (4,)
    with pytest.raises(ConfigError, match="loss_of='batch' needs a loss of one's own"):
        Task(nn.Linear(5, 3), loss_of="batch")
    with pytest.raises(ConfigError, match=r"loss_of must be example or batch. Got 'rows'"):
        Task(nn.Linear(5, 3), loss_of="rows")  # type: ignore[arg-type]


class Outputs(nn.Module):
    """Returns an output object, as models of language libraries do, or a tuple."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(5, 3, dtype=torch.float64), kind

    def forward(self, x: Tensor) -> object:
        out = self.inner(x)
        return SimpleNamespace(logits=out, loss=None) if self.kind == "object" else (out, None)


def test_a_model_may_return_an_object_with_logits() -> None:
    task, plain = Task(Outputs("object")), Task(nn.Linear(5, 3, dtype=torch.float64))
    start = {k.removeprefix("inner."): v for k, v in task.init().items()}
    x = numbers(4, 5)
    assert torch.equal(task.predict(task.init(), x), plain.predict(start, x))
    sim = Simulation(FedAvg(), task, make_data(), rounds=1, settings=Settings(precision="float64", workers=1))
    assert sim.mapping == "folded" and sim.run().rounds == 1
    with pytest.raises(ConfigError, match=r"must return a tensor, or an object whose 'logits' is one. Got tuple"):
        Simulation(FedAvg(), Task(Outputs("tuple")), make_data(), rounds=1, settings=Settings(precision="float64"))
