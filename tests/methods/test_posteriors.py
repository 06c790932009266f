"""AMHT-LRS, LR-BPFL and WAFFLe: limiting cases and equations, in float64, to 1e-12.

* AMHT-LRS: w and U are least squares for the squared error; b never has more entries than allowed, and none means a
  pure subspace; U stays orthonormal; models U w_i + b_i are found again from noiseless data.
* LR-BPFL: masks of one, frozen, no draws = FedAvg; the divergence is that of torch.distributions; predictions are
  averages of probabilities; the gates of unused components close them.
* WAFFLe: both divergences are those of the books; all factors used = FedAvg of the factorised network; z and q stay.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from conftest import assert_close, finished, make_data, make_task, method_of
from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError
from fedspan.layers import parts, structured
from fedspan.learn.task import Task
from fedspan.linalg import subspace
from fedspan.method import ClientInfo, Converts, Federation, Round
from fedspan.methods import AmhtLrs, FedAvg, LrBpfl, Waffle, make
from fedspan.randomness import key
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Tree

STEPS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}

# ------------------------------------------------------------------------------------------------ AMHT-LRS


def planted(clients: int = 12, d: int = 10, r: int = 2, n: int = 60) -> tuple[Task, FederatedData, torch.Tensor]:
    """Linear regressions whose coefficients are U w_i + b_i with one entry of b_i, without noise."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    U = torch.linalg.qr(draw(d, r))[0]
    theta = draw(clients, r) * 2 @ U.T
    for i in range(clients):
        theta[i, int(torch.randint(d, (1,), generator=g))] += 2.0
    x = [draw(n, d) for _ in range(clients)]
    pairs = [(a, (a @ t)[:, None]) for a, t in zip(x, theta)]
    task = Task(nn.Linear(d, 1, bias=False), "regression", dtype=torch.float64, seed=0)
    return task, FederatedData.from_arrays(pairs, seed=0).to(torch.float64), theta


def test_amht_lrs_finds_a_subspace_and_sparse_parts_again() -> None:
    task, data, theta = planted(clients=30, d=12)
    settings = Settings(workers=1, precision="float64", evaluate_every=99)
    method = AmhtLrs(rank=2, sparsity=2, threshold=1.0, shrink=0.8, b_steps=10, w_steps=1, ridge=1e-12)
    sim = Simulation(method, task, data, rounds=25, seed=5, settings=settings)
    sim.run()
    for i in range(30):
        assert_close(sim.personal(i)[1]["weight"][0], theta[i], 1e-4)
    U = sim.record.server["U"]
    assert_close(U.T @ U, torch.eye(2, dtype=torch.float64))
    without = AmhtLrs(rank=2, sparsity=0, w_steps=1, ridge=1e-12)
    other = Simulation(without, task, data, rounds=3, seed=5, settings=settings)
    other.run()
    heads = torch.stack([other.personal(i)[1]["weight"][0] for i in range(30)])
    assert torch.linalg.matrix_rank(heads) == 2


def test_amht_lrs_solves_least_squares_for_w_and_u() -> None:
    task, data, _ = planted(clients=3)
    method = AmhtLrs(rank=2, sparsity=3, w_steps=1, ridge=1e-13, u_update="solve")
    seen: list[Round] = []

    class Sees(AmhtLrs):
        def server_update(self, server: Tree, round: Round) -> Tree:
            seen.append(round)
            return super().server_update(server, round)

    sim = Simulation(
        Sees(**{k: getattr(method, k) for k in ("rank", "sparsity", "w_steps", "ridge", "u_update")}),
        task, data, rounds=1, seed=5, settings=Settings(workers=1, precision="float64"),
    )  # fmt: skip
    sim.run()
    U = method.init_server(task, Federation(3, 5))["U"]
    K, G = torch.zeros(20, 20).double(), torch.zeros(10, 2).double()
    for i in range(3):
        row, at = sim.record.row(i), torch.from_numpy(data.train[i])
        X, y = data.x[at], data.y[at][:, 0]
        assert 0 < int(row["b"].count_nonzero()) <= 3
        w = torch.linalg.lstsq(X @ U, y - X @ row["b"]).solution
        assert_close(row["w"], w, 1e-9)
        K += torch.kron(torch.outer(w, w), 2 * X.T @ X / len(X)) / 3
        G += torch.outer(2 * X.T @ (X @ (U @ w + row["b"]) - y) / len(X), w) / 3
    assert_close(seen[0].mean["G"], G, 1e-9)
    assert_close(subspace.from_triangle(seen[0].mean["K"], 20), K, 1e-9)
    # vec over (coefficient, feature): the least squares of the paper's server, before it is made orthonormal
    best = U - torch.linalg.solve(K, G.T.reshape(-1)).reshape(2, 10).T
    Q = torch.linalg.qr(best)[0]
    new = sim.record.server["U"]
    assert_close(new @ new.T, Q @ Q.T, 1e-7)


def test_amht_lrs_classifies_with_a_sparse_part_of_its_own() -> None:
    sim = finished(AmhtLrs(rank=2, sparsity=4, lr=0.1), rounds=2, participation=1.0)
    assert all(0 < int(sim.record.row(i)["b"].count_nonzero()) <= 4 for i in range(7))


# ------------------------------------------------------------------------------------------------ LR-BPFL


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_lr_bpfl_with_frozen_masks_of_one_is_fedavg(kind: str) -> None:
    method = method_of(LrBpfl, rank=3, members=0, start_spread=0.0, personal_epochs=0, private_head=False, **STEPS)
    a, b = finished(method, kind, rounds=2), finished(method_of(FedAvg, **STEPS), kind, rounds=2)
    assert_close(a.record.server, b.record.server)
    assert_close(a.personal(1)[1], b.personal(1)[1])


def test_lr_bpfl_divergence_and_average() -> None:
    method = LrBpfl(rank=2, prior_scale=0.3)
    q = method.init_client(make_task(), ClientInfo(0, None, key(0), 0))["q"]
    mean, scale = (torch.tensor(a, dtype=torch.float64) for a in (2**-0.5, 0.3))
    prior, total = torch.distributions.Normal(mean, scale), torch.zeros((), dtype=torch.float64)
    for name in q:
        if name.endswith("_mu"):
            s = nn.functional.softplus(q[name[:-2] + "rho"])
            total += torch.distributions.kl_divergence(torch.distributions.Normal(q[name], s), prior).sum()
    assert_close(method.divergence(q), total)
    sim = finished(method, rounds=1, participation=1.0)
    task, members = sim.personal(0)
    x = sim.data.x[:5]
    mean = torch.stack([task.predict(m, x).softmax(1) for m in members.values()]).mean(0)
    assert len(members) == 4
    assert_close(method.predict(task, members, x).exp(), mean)
    assert len({tree.digest(m) for m in members.values()}) == 4


def test_lr_bpfl_gates_close_components() -> None:
    task = make_task()
    method = LrBpfl(rank=2, adaptive_rank=True, members=0)
    q = method.init_client(task, ClientInfo(0, None, key(0), 0))["q"]
    closed = {k: torch.full_like(a, -9.0) if k.endswith("gate") else a for k, a in q.items()}
    made = method.drawn(task, task.init(), closed, None)
    M = torch.outer(q["0.gamma_mu"][0], q["0.alpha_mu"][0])  # the first component has no gate
    assert_close(made["0.weight"], task.init()["0.weight"] * M)


def test_lr_bpfl_keeps_its_posterior_at_home() -> None:
    sim = finished(LrBpfl(rank=2, members=1), rounds=1, participation=1.0)
    assert sim.result.bytes["names"]["up"].keys() == {"theta"}  # type: ignore[attr-defined]
    assert len({tree.digest(sim.record.row(i)["q"]) for i in range(7)}) == 7


# ------------------------------------------------------------------------------------------------ WAFFLe


def test_waffle_divergences_are_those_of_the_books() -> None:
    method = Waffle(alpha=2.5)
    c, d, alpha = 1.7, 3.1, 2.5
    v = (torch.arange(2_000_00).double() + 0.5) / 2_000_00
    kuma = math.log(c * d) + (c - 1) * v.log() + (d - 1) * torch.log1p(-(v**c))
    beta = math.log(alpha) + (alpha - 1) * v.log()
    numeric = float((kuma.exp() * (kuma - beta)).mean())
    one = {"logit": torch.tensor([0.0]).double(), "log_c": torch.tensor([math.log(c)]).double(),
           "log_d": torch.tensor([math.log(d)]).double()}  # fmt: skip
    same = one | {"log_c": torch.tensor([math.log(alpha)]).double(), "log_d": torch.zeros(1).double()}

    # The same uniform number gives v in both; what differs besides the divergence of v is that of z.
    def parts_of(q: Tree) -> tuple[float, float]:
        from fedspan.randomness import uniform

        u = uniform(key(1), (1,), torch.float64)
        v = (1 - (1 - u) ** (1 / q["log_d"].exp())) ** (1 / q["log_c"].exp())
        kl_z = 0.5 * (math.log(0.5) - v.log()) + 0.5 * (math.log(0.5) - torch.log1p(-v))
        return float(method.divergence(q, "", key(1)) - kl_z), float(kl_z)

    assert parts_of(one)[0] == pytest.approx(numeric, abs=1e-4)
    assert parts_of(same)[0] == pytest.approx(0.0, abs=1e-12)


def test_waffle_with_all_factors_in_use_is_fedavg_of_the_factorised_network() -> None:
    class Sure(Waffle):
        def init_client(self, task: Task, who: ClientInfo) -> Tree:
            client = super().init_client(task, who)
            q = {k: torch.full_like(a, 300.0) if k.endswith("logit") else a for k, a in client["q"].items()}
            return {**client, "q": q}

    class Plain(FedAvg, Converts):
        def model(self, task: Task, capacity: Any) -> Task:
            return Waffle().model(task, capacity)

        def private(self, task: Task) -> list[str]:
            return parts(task.module, "z")

        def init_client(self, task: Task, who: ClientInfo) -> Tree:
            return {"h": {k: torch.ones_like(a) for k, a in super().init_client(task, who)["h"].items()}}

        def client_update(self, task: Task, client: Tree, down: Tree, visit: Any) -> Any:
            z = client["h"]
            theta = self.fit(lambda p, b: task.loss(p | z, b), down["theta"], visit["train"])
            from fedspan.method import Sent

            return client, Sent(self.weigh(visit), mean={"theta": theta})

    a = finished(method_of(Sure, temperature=0.0, private_head=False, **STEPS), rounds=2)
    b = finished(method_of(Plain, **STEPS), rounds=2)
    assert_close(a.record.server["theta"], b.record.server["theta"])
    names = structured(a.engine.model(None).module)
    assert names and not [k for k in a.record.server["theta"] if k.endswith(".z")]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("amht-lrs", {"rank": 0}, "rank must be an integer >= 1. Got 0"),
        ("amht-lrs", {"private_head": True}, "private_head must be false, as the head is U w + b"),
        ("amht-lrs", {"u_update": "newton"}, "u_update must be one of 'solve', 'gradient'"),
        ("lr-bpfl", {"prior_scale": 0.0}, "prior_scale must be a finite number > 0"),
        ("lr-bpfl", {"members": -1}, "members must be an integer >= 0. Got -1"),
        ("waffle", {"start": 1.0}, "start must be a finite number > 0 and < 1"),
        ("waffle", {"tau": 0.0}, "tau must be a finite number > 0"),
    ],
)
def test_bad_fields_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        make(name, **fields)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_amht_lrs_needs_room_for_its_rank() -> None:
    with pytest.raises(ConfigError, match="rank must be at most 21, the parameters of the head"):
        AmhtLrs(rank=22).init_server(make_task(), Federation(7, 0))
    assert make_data().clients == 7
