"""Clients folded into the batch axis train as they do one after another, whatever model, loss and optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_fused import Idle, Tied, Twice
from torch import Tensor, nn
from torch.func import vmap

from conftest import assert_close, make_data, make_task
from fedspan import tree
from fedspan.learn import folded
from fedspan.learn.batches import Batch, Batches
from fedspan.learn.folded import folding, stacked
from fedspan.learn.sgd import Loss, Near, adamw, gradient_and_value, mean_gradient, sgd
from fedspan.learn.task import Task
from fedspan.randomness import key
from fedspan.tree import Params, Tree

CLIENTS = 4


class Normed(nn.Module):
    """Layer normalisation over two axes, and a head that sees several positions of an example."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(1, 4), nn.LayerNorm((5, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.up(x[..., None])).tanh()).mean(1)


class Scaled(nn.Module):
    """Parameters of its own beside its layers, and an embedding: units that are mapped by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.names, self.head = Block(), nn.Embedding(3, 6), nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x) + self.names((x[:, 0] > 0).long()))


class Block(nn.Module):
    """A layer and a scale for its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(5, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "twice": Twice,
    "tied": Tied,
    "idle": Idle,
    "normed": Normed,
    "scaled": Scaled,
}


def task_of(kind: str) -> Task:
    torch.manual_seed(1)
    return Task(MODELS[kind](), dtype=torch.float64) if kind in MODELS else make_task(kind)


def setting(kind: str) -> tuple[Task, Tensor, Tensor, Tensor, Tree]:
    """A task, examples, ragged index rows [C, K, B], and another start for every client."""
    task, data = task_of(kind), make_data("cnn" if kind == "cnn" else "mlp", clients=6)
    rows = torch.full((CLIENTS, 4, 5), -1)
    for c, n in enumerate((12, 3, 20, 11)):
        rows[c].view(-1)[:n] = torch.arange(c, c + n)
    torch.manual_seed(2)
    starts = tree.stack([tree.map(lambda t: t + 0.1 * torch.randn_like(t), task.init()) for _ in range(CLIENTS)])
    return task, data.x, data.y, rows, starts


def both_ways(kind: str, train: Callable[[Task, Params, Batches], Any]) -> tuple[Any, Any]:
    """What `train` gives folded, and one client after another."""
    task, x, y, rows, starts = setting(kind)

    def mapped(at: Tensor, start: Params, k: Tensor) -> Any:
        return train(task, start, Batches(x, y, at, k, mapped=True))

    keys = torch.stack([key(7, c) for c in range(CLIENTS)])
    with folding(), torch.no_grad():
        together = vmap(mapped)(rows, starts, keys)
    alone = [train(task, tree.take(starts, c), Batches(x, y, rows[c], keys[c])) for c in range(CLIENTS)]
    return together, tree.stack([tree.detach(a) for a in alone])


def plain(task: Task) -> Loss:
    return task.loss


def decayed(task: Task) -> Loss:
    return lambda p, b: task.loss(p, b) + 0.3 * tree.squared_norm(p)


def called_twice(task: Task) -> Loss:
    return lambda p, b: task.loss(p, b) + 0.1 * b.mean(task.predict(p, -b.x).square().sum(1))


def own_teacher(task: Task) -> Loss:
    def loss(p: Params, b: Batch) -> Tensor:
        teacher = task.predict(tree.detach(p), b.x + 1).softmax(1)
        return task.loss(p, b) + b.mean((task.output(p, b) - teacher).square().sum(1))

    return loss


def through_a_detached_weight(task: Task) -> Loss:
    """The weight is also read, without a gradient, where gradients pass through."""

    def loss(p: Params, b: Batch) -> Tensor:
        names = [k for k in p if k.endswith("weight") and p[k].ndim == 2]
        still = {k: v.detach() if k == names[0] else v for k, v in p.items()}
        return task.loss(p, b) + task.loss(still, b)

    return loss


def near(task: Task) -> Loss:
    return Near(task.loss, {k: v + 0.1 for k, v in task.init().items() if k != task.names[1]}, 0.7)


LOSSES: dict[str, Callable[[Task], Loss]] = {
    "plain": plain,
    "decayed": decayed,
    "called-twice": called_twice,
    "own-teacher": own_teacher,
    "detached-weight": through_a_detached_weight,
    "near": near,
}
KINDS = ["mlp", "dropout", "cnn", *MODELS]
CASES = [(kind, "plain") for kind in KINDS] + [(kind, name) for name in list(LOSSES)[1:] for kind in ("mlp", "normed")]


@pytest.fixture(params=["slots", "packed"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small models keep empty slots; with calls that cost nothing they are left out, as in larger models."""
    monkeypatch.setattr(folded, "_CALL", 0 if request.param == "packed" else 10**12)
    return str(request.param)


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    """Layouts that a test has spoilt must not be met by the next one."""
    yield
    folded._packed_clients.cache_clear()


@pytest.fixture
def by_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Perceptrons are differentiated like other models, and their steps not written out."""
    monkeypatch.setattr(Task, "perceptron", None)


@pytest.mark.parametrize("name", ["plain", "near"])
def test_plain_sgd_of_a_perceptron_by_its_graph(name: str, layout: str, by_graph: None) -> None:
    assert_close(*both_ways("mlp", lambda task, p, b: sgd(LOSSES[name](task), p, b, 0.2)))


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{k}-{n}" for k, n in CASES])
def test_plain_sgd(kind: str, name: str, layout: str) -> None:
    together, alone = both_ways(kind, lambda task, p, b: sgd(LOSSES[name](task), p, b, 0.2))
    assert_close(together, alone)


OPTIMIZERS: dict[str, Callable[[Task, Params, Batches], Tree]] = {
    "momentum": lambda t, p, b: sgd(t.loss, p, b, 0.2, momentum=0.9),
    "clip": lambda t, p, b: sgd(t.loss, p, b, 0.2, clip=0.1),
    "near-clip": lambda t, p, b: sgd(near(t), p, b, 0.2, momentum=0.9, clip=0.1),
    "decay": lambda t, p, b: sgd(t.loss, p, b, 0.2, weight_decay=0.1),
    "adamw": lambda t, p, b: adamw(t.loss, p, b, 0.05, weight_decay=0.1),
    "near-momentum": lambda t, p, b: sgd(near(t), p, b, 0.2, momentum=0.9),
    "prox": lambda t, p, b: sgd(t.loss, p, b, 0.2, prox={t.names[0]: lambda w: F.softshrink(w, 0.05)}),
    "gradient": lambda t, p, b: dict(zip(("slope", "value"), gradient_and_value(t.loss, p, next(iter(b))))),
    "mean-gradient": lambda t, p, b: mean_gradient(t.loss, p, b),
}


@pytest.mark.parametrize("kind", ["mlp", "cnn", "scaled"])
@pytest.mark.parametrize("how", OPTIMIZERS)
def test_optimisers_and_gradients(how: str, kind: str, layout: str) -> None:
    together, alone = both_ways(kind, OPTIMIZERS[how])
    assert_close(together, alone)


@pytest.mark.parametrize("part", ["client", "_slots", "_row_of"])
def test_rows_of_other_clients_are_caught(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded, "_CALL", 0)
    right = getattr(folded.PackedClients, part).func
    monkeypatch.setattr(folded.PackedClients, part, property(lambda layout: right(layout).roll(1)))
    with pytest.raises(AssertionError):
        assert_close(*both_ways("normed" if part == "client" else "scaled", lambda t, p, b: sgd(t.loss, p, b, 0.2)))


def test_a_pull_on_clients_without_examples_is_caught(monkeypatch: pytest.MonkeyPatch, by_graph: None) -> None:
    monkeypatch.setattr(folded.FoldedRows, "live", lambda rows, dtype: torch.ones(len(rows.counts), dtype=dtype))
    monkeypatch.setattr(folded, "_mark_steps", lambda *_: set())
    with pytest.raises(AssertionError):
        assert_close(*both_ways("mlp", lambda t, p, b: sgd(near(t), p, b, 0.2)))


def test_segments_are_runs_of_equal_counts() -> None:
    found = folded.PackedClients([4, 4, 0, 4, 2, 2, 0], 4, packed=True).segments
    assert [tuple(s) for s in found] == [(0, 2, 0, 4), (3, 1, 8, 4), (4, 2, 12, 2)]


def test_a_body_that_all_clients_have_in_common() -> None:
    task, x, y, rows, starts = setting("mlp")
    common, heads = {k: v for k, v in task.init().items() if k not in task.head}, {k: starts[k] for k in task.head}

    def train(at: Tensor, head: Params, mapped: bool) -> Tree:
        return sgd(lambda h, b: task.loss(common | h, b), head, Batches(x, y, at, key(1), mapped=mapped), 0.2)

    with folding(), torch.no_grad():
        together = vmap(lambda at, h: train(at, h, True))(rows, heads)
    assert_close(together, tree.stack([train(rows[c], tree.take(heads, c), False) for c in range(CLIENTS)]))


def test_features_and_predictions() -> None:
    def seen(task: Task, p: Params, b: Batches) -> Tree:
        batch = next(iter(b))
        features, output = task.features_and_output(p, batch)
        only = batch.w[:, None]  # empty slots hold some example or other
        return {
            "f": (features * only).sum(0),
            "o": (output * only).sum(0),
            "p": (task.predict(p, batch.x) * only).sum(0),
        }

    assert_close(*both_ways("mlp", seen))


def test_linear_layers_step_in_their_product_where_nothing_else_reads_them(
    monkeypatch: pytest.MonkeyPatch, by_graph: None
) -> None:
    marked: list[int] = []
    mark = folded._mark_steps

    def counted(*args: Any) -> set[int]:
        found = mark(*args)
        marked.append(len(found))
        return found

    monkeypatch.setattr(folded, "_mark_steps", counted)
    expected = {("mlp", "plain"): 6, ("twice", "plain"): 2, ("tied", "plain"): 0, ("cnn", "plain"): 4}
    expected |= {("mlp", "decayed"): 0, ("mlp", "called-twice"): 0, ("scaled", "plain"): 1}
    expected |= {("mlp", "near"): 6}
    for (kind, name), number in expected.items():
        marked.clear()
        both_ways(kind, lambda task, p, b, name=name: sgd(LOSSES[name](task), p, b, 0.2))
        assert set(marked) == {number}, (kind, name)


@pytest.mark.parametrize(("kind", "name"), [("twice", "plain"), ("mlp", "called-twice"), ("mlp", "detached-weight")])
def test_a_step_taken_too_early_is_caught(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults that the rule about uses prevents: each makes the comparison above fail."""

    def always(total: Tensor, leaves: list[Tensor], ends: list[Any], lr: float, pulls: Any) -> set[int]:
        at, stepped, stack, seen = {id(t): i for i, t in enumerate(leaves)}, set(), [total.grad_fn], set()
        while stack:
            node: Any = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for position, (child, _) in enumerate(node.next_functions):
                i = at.get(id(getattr(child, "variable", None)))
                if i is not None and hasattr(node, "steps"):
                    node.steps[position] = folded._Step(lr, None)
                    stepped.add(i)
                stack.append(child)
        return stepped

    monkeypatch.setattr(folded, "_mark_steps", always)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_close(*both_ways(kind, lambda task, p, b: sgd(LOSSES[name](task), p, b, 0.2)))


def test_a_stream_as_one_batch_has_its_empty_slots_at_the_end() -> None:
    def seen(task: Task, p: Params, b: Batches) -> Tree:
        whole = b.whole()
        order = torch.arange(1, len(whole.y) + 1) * whole.w
        features = task.features_of(p, whole) * whole.w[:, None]
        return {
            "n": b.examples,
            "x": order @ whole.x,
            "y": (order * whole.y).sum(),
            "features": order @ features,
            "loss": task.loss(p, whole),
            "slope": tree.ravel(gradient_and_value(task.loss, p, whole)[0]),
        }

    together, alone = both_ways("mlp", seen)
    assert_close(together, alone)

    def width(at: Tensor) -> Tensor:
        return Batches(torch.ones(40, 2), torch.zeros(40).long(), at, key(1), mapped=True).whole().w

    rows = torch.full((2, 3, 4), -1)
    rows[0, 0, :3], rows[0, 2, :2], rows[1, 1, :1] = torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6])
    with folding():
        assert vmap(width)(rows).tolist() == [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]


@pytest.mark.parametrize("kind", ["mlp", "normed"])
@pytest.mark.parametrize("how", ["alone", "vmap", "folded"])
def test_outputs_of_many_heads(kind: str, how: str) -> None:
    task, x, _, _, starts = setting(kind)
    heads = {k: torch.randn(6, *task.init()[k].shape, dtype=torch.float64) for k in task.head}

    def found(p: Params, examples: Tensor) -> Tensor:
        return task.outputs_of_heads(heads, task.features(p, examples))

    if how == "alone":
        got = torch.stack([found(tree.take(starts, c), x[c : c + 7]) for c in range(CLIENTS)])
    else:
        with folding() if how == "folded" else nullcontext():
            got = vmap(found)(starts, torch.stack([x[c : c + 7] for c in range(CLIENTS)]))
    for c in range(CLIENTS):
        h = task.features(tree.take(starts, c), x[c : c + 7])
        for j in range(6):
            expected = task.from_features(tree.take(heads, j), h)
            assert_close({"z": got[c, j]}, {"z": expected.movedim(0, -1).detach()})


@pytest.mark.parametrize("how", ["alone", "vmap", "folded", "twice"])
def test_what_is_written_for_stacks_serves_one_client(how: str) -> None:
    shapes = list[tuple[int, ...]]()

    def f(a: Tensor, b: Tensor) -> Tensor:
        shapes.append(tuple(a.shape))
        return torch.bmm(a, b)

    a, b = torch.randn(5, 2, 3), torch.randn(3, 4)
    if how == "alone":
        got = torch.stack([stacked(f, one, b) for one in a])
    elif how == "twice":
        got = vmap(vmap(lambda one: stacked(f, one, b)))(a[None])[0]
    else:
        with folding() if how == "folded" else nullcontext():
            got = vmap(lambda one: stacked(f, one, b))(a)
    assert torch.allclose(got, a @ b)
    assert set(shapes) == {(1, 2, 3) if how in ("alone", "twice") else (5, 2, 3)}
