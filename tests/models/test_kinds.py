"""Clients with models of different kinds: who may, what they share, and what stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import assert_close, make_data, make_task
from conftest import finished as run
from fedspan import tree
from fedspan.config import assemble, from_dict
from fedspan.errors import ConfigError
from fedspan.learn.task import Task
from fedspan.method import Federation
from fedspan.methods import METHODS, make


def net(width: int) -> Task:
    """5 - width - 6 - 3: features and classes alike."""
    torch.manual_seed(width)
    layers = nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, 3)
    return Task(nn.Sequential(*layers), dtype=torch.float64)


def family() -> Task:
    return Task.family({"a": net(9), "b": net(4)}, ("a", "b", "a"))


ABLE = sorted(k for k, c in METHODS.items() if c.about.any_model)


def test_who_may() -> None:
    assert ABLE == ["fedkd", "fedproto", "fedtgp", "lg-fedavg", "local", "pfedafm", "pfedes"]
    with pytest.raises(ConfigError, match=r"FedAvg: all clients must have models of one kind. Got a, b; use a method"):
        run(make("fedavg"), task=family())


@pytest.mark.parametrize("name", ABLE)
def test_mapped_and_one_after_another_agree(name: str) -> None:
    method = make(name, **({"server_epochs": 2} if name == "fedtgp" else {}))
    loop, mapped = (run(method, task=family(), rounds=2, mapping=m) for m in ("loop", "vmap"))
    assert_close(loop.record.server, mapped.record.server)
    widths = [9, 4, 9, 9, 4, 9, 9]
    for i, width in enumerate(widths):
        assert_close(loop.record.row(i), mapped.record.row(i))
        task, weights = loop.personal(i)
        weights = weights.get("theta", weights)
        assert weights["0.weight"].shape == (width, 5) and task is loop.task.kinds["ab"[width == 4]]
    assert loop.result.accuracy["mean"] > 0.2  # type: ignore[attr-defined]
    with_two = run(method, task=family(), rounds=2, mapping="loop", workers=2, chunk=2)
    assert with_two.record.digest() == run(method, task=family(), rounds=2, mapping="loop", chunk=2).record.digest()


def test_without_pull_every_client_trains_alone() -> None:
    a, b = (run(make(name, **fields), task=family()) for name, fields in (("fedproto", {"lam": 0.0}), ("local", {})))
    for i in range(7):
        assert_close(a.record.row(i)["theta"], b.record.row(i)["theta"])


def test_one_kind_is_no_other_method() -> None:
    for name in ("fedproto", "fedkd"):
        alone = run(make(name), task=net(9))
        same = run(make(name), task=Task.family({"a": net(9)}, ("a",)))
        assert_close(alone.record.server, same.record.server)


def test_fedkd_shares_the_smallest() -> None:
    sim = run(make("fedkd"), task=family())
    assert sim.record.server["theta"]["0.weight"].shape == (4, 5)
    assert sim.record.row(0)["v"]["0.weight"].shape == (9, 5) and tree.all_finite(sim.record.server)


@pytest.mark.parametrize(("name", "off"), [("pfedes", {"mu": 0.0}), ("pfedafm", {"lr_alpha": 0.0})])
def test_without_the_common_part_models_are_trained_alone(name: str, off: dict[str, float]) -> None:
    a, b, c = (run(make(n, **f), task=family()) for n, f in ((name, off), ("local", {}), (name, {})))
    for i in range(7):
        assert_close(a.record.row(i)["theta"], b.record.row(i)["theta"])
    assert any(
        not torch.equal(c.record.row(i)["theta"]["0.weight"], b.record.row(i)["theta"]["0.weight"]) for i in range(7)
    )


def test_pfedafm_mixes_features_and_keeps_alpha_within_bounds() -> None:
    """One step from α = 1: θ and α by the gradient of the mixture, then w by its own loss through the new head."""
    data, lr, rate = make_data(clients=1), 0.05, 0.4
    sim = run(make("pfedafm", lr=lr, lr_alpha=rate), task=family(), data=data, rounds=1, epochs=1, batch_size="full")
    big, small = family().kinds["a"], family().kinds["b"]
    theta = {k: p.requires_grad_() for k, p in big.init().items()}
    w = {k: p.requires_grad_() for k, p in tree.select(small.init(), small.body).items()}
    alpha = torch.ones(6, dtype=torch.float64, requires_grad=True)
    rows = torch.from_numpy(data.train[0])
    x, y = data.x[rows], data.y[rows]
    mixed = alpha * big.features(theta, x) + (1 - alpha) * small.features(w, x)
    loss = nn.functional.cross_entropy(big.from_features(theta, mixed), y)
    g = torch.autograd.grad(loss, [*theta.values(), alpha])
    new = {k: (p - lr * d).detach() for (k, p), d in zip(theta.items(), g)}
    row = sim.record.row(0)
    assert_close(row["theta"], new)
    assert_close(row["alpha"], (alpha - rate * g[-1]).clamp(0, 1).detach())
    assert float(row["alpha"].min()) < 1.0 and float(row["alpha"].max()) == 1.0
    after = nn.functional.cross_entropy(big.from_features(new, small.features(w, x)), y)
    d = torch.autograd.grad(after, list(w.values()))
    assert_close(sim.record.server["w"], {k: (p - lr * e).detach() for (k, p), e in zip(w.items(), d)})


def test_pfedes_trains_the_model_then_the_extractor() -> None:
    data, lr = make_data("cnn", clients=1), 0.05
    method, task = make("pfedes", lr=lr, mu=0.25, lr_extractor=0.2), make_task("cnn")
    settings = {"rounds": 1, "epochs": 1, "batch_size": "full", "data": data, "task": task}
    start = run(method, **settings | {"rounds": 0}).record.server["g"]
    sim = run(method, **settings)
    assert start["0.weight"].shape == (8, 1, 3, 3) and start["1.weight"].shape == (1, 8, 3, 3)
    rows = torch.from_numpy(data.train[0])
    x, y = data.x[rows], data.y[rows]
    theta, g = ({k: p.clone().requires_grad_() for k, p in q.items()} for q in (task.init(), start))
    seen = lambda g: method.extract(g, x)  # type: ignore[attr-defined]
    error = lambda p, x: nn.functional.cross_entropy(task.predict(p, x), y)
    d = torch.autograd.grad(0.75 * error(theta, x) + 0.25 * error(theta, seen(start)), list(theta.values()))
    new = {k: (p - lr * e).detach() for (k, p), e in zip(theta.items(), d)}
    assert_close(sim.record.row(0)["theta"], new)
    d = torch.autograd.grad(error(new, seen(g)), list(g.values()))
    assert_close(sim.record.server["g"], {k: (p - 0.2 * e).detach() for (k, p), e in zip(g.items(), d)})
    tokens = Task(nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(3, 2)), dtype=torch.float64)
    with pytest.raises(ConfigError, match="the model must begin with a convolution or a linear layer"):
        method.init_server(tokens, Federation(1, 0))


def test_heads_must_be_alike() -> None:
    other = Task(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), dtype=torch.float64)
    with pytest.raises(ConfigError, match="models of different kinds must have heads of one shape"):
        Task.family({"a": net(9), "b": other}, ("a", "b"))


def test_an_experiment_names_the_kinds() -> None:
    values = {
        "data": {"source": "cifar10"},
        "partition": {"kind": "iid", "clients": 6},
        "model": {"kinds": ["cnn1", "cnn5"], "padding": 2},
        "method": {"name": "fedproto"},
    }
    config = from_dict(values)
    assert config.model.kind == "cnn1" and from_dict(config.to_dict()) == config
    assert "kinds" not in from_dict({}).to_dict()["model"]
    data = make_data("cnn", clients=6)
    image = torch.zeros(len(data.x), 3, 32, 32)
    _, task, _ = assemble(config, type(data)(**{**data.__dict__, "x": image}))
    assert [task.kind_of(i) for i in range(3)] == ["cnn1", "cnn5", "cnn1"]
    assert task.smallest is task.kinds["cnn5"]
    with pytest.raises(ConfigError, match=r"Method fedavg: all clients must have models of one kind. Got model.kinds"):
        from_dict(values, ["method.name=fedavg"])
    with pytest.raises(ConfigError, match="unknown kind 'cnn7'"):
        from_dict(values, ['model.kinds=["cnn1", "cnn7"]'])
