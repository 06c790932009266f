"""Methods that look at features and heads: limiting cases and equations, in float64, to 1e-12.

* FLUTE: without its terms it is FedRep's head phase followed by FedPer's joint one; NC = 0 for a simplex, and its
  step is that of its derivative; heads come back from the server moved.
* FedAS: without alignment and with equal traces = FedPer with uniform weights; the trace is the sum of squared
  gradients; aligning a body with itself changes nothing on the whole data; a client without a past does not align.
* pFedFDA: on Gaussian classes its head is as good as Bayes' rule; beta = 1 is the client's own discriminant, beta = 0
  the common one with the client's label frequencies; beta is the best of its grid; the head stays fixed in training.
* FedKD: without distillation and with all of the energy, the mentee is FedAvg's model and the mentor Local's; what the
  wire loses is at most the energy it may lose; its gradient is that of the loss written out, clipped part by part.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_limits import MAPPING, STEPS, models, run, same_models
from torch import Tensor, nn

from conftest import assert_close, assert_same, make_task, method_of
from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import Epochs
from fedspan.learn.task import Task
from fedspan.method import Federation, Method, Round, Visit
from fedspan.methods import FedAs, FedAvg, FedKd, FedPer, FedRep, Flute, Local, PFedFda
from fedspan.methods.flute import collapse
from fedspan.methods.pfedfda import Gaussians
from fedspan.tree import Tree

# Equations are checked one client after another; that mapped clients do the same is checked for every method.
LOOP = pytest.mark.parametrize("mapping", ["loop"])
FULL: dict[str, Any] = {"rounds": 1, "participation": 1.0, "batch_size": "full", "epochs": 1}


def by_hand(module: nn.Sequential, theta: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features and outputs of the small perceptron, layer by layer."""
    f = (x @ theta["0.weight"].T + theta["0.bias"]).relu()
    f = (f @ theta["2.weight"].T + theta["2.bias"]).relu()
    return f, f @ theta["4.weight"].T + theta["4.bias"]


# ------------------------------------------------------------------------------------------------ FLUTE


class HeadThenBoth(FedPer):
    """FedRep's head phase, then FedPer's joint phase."""

    def plan(self) -> Any:
        return {"head": Epochs(2), "body": Epochs(0), "train": Epochs()}

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Any:
        steps = {"lr": self.lr, "momentum": self.optimizer.momentum, "weight_decay": self.optimizer.weight_decay}
        rep: Method = method_of(FedRep, **steps)
        return super().client_update(task, rep.client_update(task, client, down, visit)[0], down, visit)


@MAPPING
def test_flute_without_its_terms_is_fedreps_head_phase_and_then_fedper(mapping: str) -> None:
    plain = method_of(Flute, head_epochs=2, lam_1=0.0, lam_2=0.0, lam_3=0.0, lr_server=0.0, **STEPS)
    same_models(plain, method_of(HeadThenBoth, **STEPS), mapping=mapping)
    # A server that sees the heads but hardly moves them gives the same models.
    seen = method_of(Flute, head_epochs=2, lam_1=0.0, lam_2=0.0, lam_3=0.0, lr_server=1e-15, **STEPS)
    assert_close(models(run(plain, mapping=mapping)), models(run(seen, mapping=mapping)))


@pytest.mark.parametrize("C", [2, 3, 10])
def test_collapse_vanishes_for_a_simplex_and_has_no_bad_slope(C: int) -> None:
    simplex = (torch.eye(C, dtype=torch.float64) - 1 / C) * 3.0
    ones = torch.ones(C, dtype=torch.float64)
    assert float(collapse(simplex, ones)) < 1e-7
    assert float(collapse(torch.eye(C, dtype=torch.float64), ones)) > 0.01
    for W in (simplex, torch.zeros(C, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64)):
        slope = torch.func.grad(collapse)(W, torch.ones(len(W), dtype=torch.float64))
        assert torch.isfinite(slope).all()
    missing = ones.clone()
    missing[0] = 0
    W = torch.randn(C, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(C))
    gram, target = W @ W.T, (torch.eye(C) - 1 / C) / (C - 1) ** 0.5
    target[0], target[:, 0] = 0, 0
    assert float(collapse(W, missing)) == pytest.approx(float((gram / gram.norm() - target).norm()), abs=1e-7)


@LOOP
def test_flute_minimises_the_sum_of_its_terms(mapping: str) -> None:
    method = Flute(lr=0.1, head_epochs=1, lam_1=0.5, lam_2=0.3, lam_3=0.01, lr_server=0.0)
    sim = run(method, mapping=mapping, **FULL)
    task = make_task()
    for i in (0, 3, 6):
        x, y = sim.data.x[torch.from_numpy(sim.data.train[i])], sim.data.labels(i, "train")
        c = torch.tensor([float((y == k).any()) for k in range(3)], dtype=torch.float64)
        theta = task.init()
        for moving, spread in ((task.head, 0.0), (task.names, 0.01)):
            p = {k: a.clone().requires_grad_() for k, a in theta.items()}
            f, output = by_hand(task.module, p, x)  # type: ignore[arg-type]
            W = p["4.weight"]
            loss = nn.functional.cross_entropy(output, y) + 0.5 * collapse(W, c) + 0.3 * W.square().sum()
            loss = loss + spread * f.square().sum()
            g = dict(zip(p, torch.autograd.grad(loss, list(p.values()))))
            theta = {k: (a - 0.1 * g[k]).detach() if k in moving else a.detach() for k, a in p.items()}
        assert_close(sim.record.row(i)["h"], tree.select(theta, task.head))


@LOOP
def test_flute_server_moves_the_heads_it_received_and_sends_them_back(mapping: str) -> None:
    options = {**FULL, "participation": 0.6, "mapping": mapping}
    home, away = run(Flute(lr=0.1, lr_server=1e-300), **options), run(Flute(lr=0.1, lr_server=0.7), **options)
    assert_same(home.record.server["theta"], away.record.server["theta"])
    asked = [i for i in range(7) if not torch.equal(home.record.server["h"]["4.bias"][i], make_task().init()["4.bias"])]
    assert len(asked) == 4
    for i in range(7):
        W = home.record.server["h"]["4.weight"][i].clone().requires_grad_()
        y = home.data.labels(i, "train")
        c = torch.tensor([float((y == k).any()) for k in range(3)], dtype=torch.float64)
        slope = torch.autograd.grad(collapse(W, c), W)[0] if i in asked else torch.zeros_like(W)
        assert_close(away.personal(i)[1]["4.weight"], (W - 0.7 / 4 * slope).detach())
        assert_same(away.record.row(i), {"h": {}})


def test_flute_needs_a_classifier_and_private_heads() -> None:
    with pytest.raises(ConfigError, match="Flute: private_head must be true"):
        Flute(private_head=False)
    with pytest.raises(ConfigError, match="Flute: the model must be a classifier"):
        Flute().init_server(Task(nn.Linear(3, 1), "regression"), Federation(2, 0))
    nobody = torch.tensor([], dtype=torch.int64)
    mean = {"theta": {"a": torch.ones(2)}}
    assert_same(Flute(lr_server=0.0).server_update({}, Round(1, nobody, nobody, nobody, mean, {}, nobody)), mean)


# ------------------------------------------------------------------------------------------------ FedAS


@MAPPING
def test_fedas_without_alignment_and_with_equal_traces_is_fedper(mapping: str) -> None:
    class Alike(FedAs):
        def trace(self, task: Task, params: Tree, stream: Any) -> Tensor:
            return 0 * super().trace(task, params, stream) + 3.0

    uniform = method_of(FedPer, weighting="uniform", **STEPS)
    same_models(method_of(Alike, align_epochs=0, **STEPS), uniform, mapping=mapping)
    same_models(method_of(FedAs, align_epochs=0, fisher=False, weighting="uniform", **STEPS), uniform, mapping=mapping)
    same_models(method_of(FedAs, align_epochs=0, fisher=False, **STEPS), method_of(FedPer, **STEPS), mapping=mapping)


@LOOP
def test_fedas_weights_are_traces_of_the_fisher_information(mapping: str) -> None:
    sim = run(FedAs(lr=0.1), rounds=1, participation=1.0, mapping=mapping, batch_size=5)
    task, data = make_task(), sim.data
    traces = []
    for i in range(7):
        row, total = sim.record.row(i), 0.0
        x, y = data.x[torch.from_numpy(data.train[i])], data.labels(i, "train")
        for k in range(0, len(x), 5):
            p = {n: a.clone().requires_grad_() for n, a in (row["theta"] | row["h"]).items()}
            loss = nn.functional.cross_entropy(task.predict(p, x[k : k + 5]), y[k : k + 5])
            total += sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(p.values())))
        traces.append(total)
    w = torch.tensor(traces, dtype=torch.float64)
    bodies = tree.stack([sim.record.row(i)["theta"] for i in range(7)])
    assert_close(sim.record.server["theta"], tree.map(lambda a: torch.tensordot(w / w.sum(), a, 1), bodies))
    assert max(traces) > 1.5 * min(traces)


@LOOP
@pytest.mark.parametrize("align", ["class-mean", "example"])
def test_fedas_aligns_with_the_clients_own_past(mapping: str, align: Any) -> None:
    method = FedAs(lr=0.2, align=align, lr_align=0.3, fisher=False)
    sim = run(method, **{**FULL, "mapping": mapping})
    task, new = make_task(), sim.record.server["theta"]
    for i in (1, 4):
        row = sim.record.row(i)
        x, y = sim.data.x[torch.from_numpy(sim.data.train[i])], sim.data.labels(i, "train")
        past = by_hand(task.module, row["theta"] | row["h"], x)[0]  # type: ignore[arg-type]
        p = {k: a.clone().requires_grad_() for k, a in new.items()}
        f = by_hand(task.module, p | row["h"], x)[0]  # type: ignore[arg-type]
        loss = torch.zeros((), dtype=torch.float64)
        for c in set(y.tolist()):
            mine, own = f[y == c], past[y == c].mean(0)
            loss = loss + ((mine.mean(0) - own) if align == "class-mean" else (mine - own)).square().mean()
        g = torch.autograd.grad(loss, list(p.values()))
        expected = {k: (a - 0.3 * d).detach() for (k, a), d in zip(p.items(), g)}
        assert_close(tree.select(sim.personal(i)[1], task.body), expected)
    # Who aligns with the body it already has stands still if a minibatch is all of its data, in the mean of a class.
    one = method._aligned(task, {**sim.record.row(1), "theta": new}, new, sim.engine._visit(1, 2, method.plan(), {})[0])
    still = max(float((one[k] - new[k]).abs().max()) for k in new)
    assert still < 1e-15 if align == "class-mean" else still > 1e-6
    fresh = run(method, rounds=0)
    assert_same(fresh.personal(2)[1], task.init())


# ------------------------------------------------------------------------------------------------ pFedFDA


def gaussian_features(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Gaussians, Tensor]:
    """Features of three classes with a common covariance, their classes, the truth, and their frequencies."""
    g = torch.Generator().manual_seed(seed)
    mu = 1.5 * torch.randn(3, 4, dtype=torch.float64, generator=g)
    A = torch.randn(4, 4, dtype=torch.float64, generator=g)
    prior = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    y = torch.multinomial(prior, n, True, generator=g)
    f = mu[y] + torch.randn(n, 4, dtype=torch.float64, generator=g) @ A.T
    return f, y, Gaussians(mu, A @ A.T), prior


def test_pfedfda_head_reaches_bayes_rule_on_gaussian_classes() -> None:
    f, y, truth, prior = gaussian_features(20_000)
    method = PFedFda(epsilon=1e-9, ridge=0.0)
    member = nn.functional.one_hot(y, 3).double()
    found = method.estimate(f, member, Gaussians(torch.zeros(3, 4).double(), torch.eye(4).double()))
    assert float((found.mu - truth.mu).abs().max()) < 0.15 and float((found.S - truth.S).abs().max()) < 0.2
    density = torch.stack(
        [torch.distributions.MultivariateNormal(m, truth.S).log_prob(f) + p.log() for m, p in zip(truth.mu, prior)], 1
    )
    coef, bias = method.discriminant(truth, prior)
    scores = f @ coef.T + bias
    assert_close(scores - scores[:, :1], density - density[:, :1], 1e-6)  # up to what is common to all classes
    bayes = float((density.argmax(1) == y).double().mean())
    coef, bias = method.discriminant(found, prior)
    assert float(((f @ coef.T + bias).argmax(1) == y).double().mean()) == pytest.approx(bayes, abs=0.005)


def test_pfedfda_estimates_are_those_of_the_books_and_rare_classes_take_the_common_mean() -> None:
    f, y, _, _ = gaussian_features(30)
    y[:2], y[2:] = 2, y[2:].clamp_max(1)
    common = Gaussians(torch.full((3, 4), 7.0, dtype=torch.float64), torch.eye(4, dtype=torch.float64))
    found = PFedFda(ridge=0.1).estimate(f, nn.functional.one_hot(y, 3).double(), common)
    mu = torch.stack([f[y == 0].mean(0), f[y == 1].mean(0), common.mu[2]])
    S = (f - mu[y]).T @ (f - mu[y]) / 29 + 0.1 * torch.eye(4, dtype=torch.float64)
    assert_close((found.mu, found.S), (mu, S))


def test_pfedfda_beta_is_the_best_of_its_grid() -> None:
    f, y, truth, prior = gaussian_features(40, seed=3)
    member = nn.functional.one_hot(y, 3).double()
    wrong = Gaussians(truth.mu.flip(0), truth.S * 4)
    method = PFedFda()
    trusts, doubts = (method._choose(f, member, g, prior) for g in (truth, wrong))
    assert float(doubts[0]) > 0.9 and float(trusts[0]) < float(doubts[0])
    one = PFedFda(single_beta=True)._choose(f, member, wrong, prior)
    assert one[0] == one[1]
    few = method._choose(f, 0 * member, truth, prior)
    assert few.tolist() == [0.0, 0.0]  # nothing to judge by: the common statistics

    def badness(beta: Tensor) -> float:
        rank = torch.tensor([int((y[: k + 1] == y[k]).sum()) - 1 for k in range(40)])
        total = 0.0
        for half in (0, 1):
            fit = method.estimate(f, member * (rank % 2 == half)[:, None], wrong)
            mixed = Gaussians(*(b * a + (1 - b) * c for a, c, b in zip(fit, wrong, beta)))
            coef, bias = method.discriminant(mixed, prior)
            held = rank % 2 != half
            total += float(nn.functional.cross_entropy((f @ coef.T + bias)[held], y[held], reduction="sum"))
        return total

    ticks = torch.linspace(0, 1, 5, dtype=torch.float64)
    assert badness(doubts) <= min(badness(b) for b in torch.cartesian_prod(ticks, ticks)) + 1e-9


@LOOP
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_pfedfda_between_the_common_and_the_own_discriminant(mapping: str, beta: float) -> None:
    method = PFedFda(lr=0.01, beta=beta)
    sim = run(method, rounds=2, mapping=mapping)
    task, server = make_task(), sim.record.server
    for i in (0, 5):
        x, y = sim.data.x[torch.from_numpy(sim.data.train[i])], sim.data.labels(i, "train")
        personal = sim.personal(i)[1]
        assert_close(tree.select(personal, task.body), server["theta"])
        share = torch.bincount(y, minlength=3).double() / len(y) + 1e-4
        common = method._common(server)
        f = by_hand(task.module, personal, x)[0]  # type: ignore[arg-type]
        used = method.estimate(f, nn.functional.one_hot(y, 3).double(), common) if beta else common
        coef, bias = method.discriminant(used, share / share.sum())
        assert_close((personal["4.weight"], personal["4.bias"]), (coef, bias), 1e-9)
    if beta == 0.0:  # nobody adds anything of its own
        start = run(method, rounds=0).record.server
        assert_close((server["mu"], server["S"]), (start["mu"], start["S"]))
    d = sum(a.numel() for a in server["theta"].values())
    assert sim.record.progress.totals["up"] == 2 * 4 * 8 * (d + 3 * 6 + 6 * 7 // 2)


@LOOP
def test_pfedfda_trains_the_body_under_a_fixed_head(mapping: str) -> None:
    method = PFedFda(lr=0.05, beta=0.0)
    sim = run(method, **{**FULL, "mapping": mapping})
    task, start = make_task(), run(method, rounds=0)
    bodies = []
    for i in range(7):
        x, y = sim.data.x[torch.from_numpy(sim.data.train[i])], sim.data.labels(i, "train")
        head = tree.select(start.personal(i)[1], task.head)
        p = {k: a.clone().requires_grad_() for k, a in tree.select(task.init(), task.body).items()}
        loss = nn.functional.cross_entropy(task.predict(p | head, x), y)
        g = torch.autograd.grad(loss, list(p.values()))
        bodies.append({k: len(y) * (a - 0.05 * d).detach() for (k, a), d in zip(p.items(), g)})
    n = sum(len(rows) for rows in sim.data.train)
    assert_close(sim.record.server["theta"], tree.map(lambda a: a.sum(0) / n, tree.stack(bodies)))


def test_pfedfda_needs_a_head_with_a_bias() -> None:
    with pytest.raises(ConfigError, match="PFedFda: the head must have a matrix and a bias"):
        PFedFda().init_server(Task(nn.Linear(3, 2, bias=False)), Federation(2, 0))


# ------------------------------------------------------------------------------------------------ FedKD


@MAPPING
def test_fedkd_without_teaching_is_fedavg_beside_local(mapping: str) -> None:
    method = method_of(FedKd, distill=0.0, clip=1e9, energy_start=1.0, energy_end=1.0, **STEPS)
    same_models(method, method_of(Local, **STEPS), mapping=mapping)
    server = run(method, mapping=mapping).record.server
    assert_close(server, run(method_of(FedAvg, weighting="uniform", **STEPS), mapping=mapping).record.server)


@LOOP
@pytest.mark.parametrize("clip", [0.05, 10.0])
def test_fedkd_descends_on_the_loss_written_out(mapping: str, clip: float) -> None:
    method = FedKd(lr=0.1, distill=0.7, clip=clip, energy_start=1.0, energy_end=1.0)
    sim = run(method, **{**FULL, "mapping": mapping})
    task, start = make_task(), run(method, rounds=0).record.row(0)
    for i in (0, 4):
        x, y = sim.data.x[torch.from_numpy(sim.data.train[i])], sim.data.labels(i, "train")
        parts = [{k: a.clone().requires_grad_() for k, a in task.init().items()} for _ in range(2)]
        W = start["W"].clone().requires_grad_()
        (f, z), (f_g, z_g) = (by_hand(task.module, p, x) for p in parts)  # type: ignore[arg-type]
        ce, ce_g = nn.functional.cross_entropy(z, y), nn.functional.cross_entropy(z_g, y)
        kl = nn.functional.kl_div(z.log_softmax(1), z_g.softmax(1), reduction="batchmean")
        kl_g = nn.functional.kl_div(z_g.log_softmax(1), z.softmax(1), reduction="batchmean")
        mse = nn.functional.mse_loss(f, f_g @ W.T)
        (ce + ce_g + 0.7 * (kl + kl_g + 2 * mse) / (ce + ce_g)).backward()
        for part in (*(list(p.values()) for p in parts), [W]):
            nn.utils.clip_grad_norm_(part, clip)
        row = sim.record.row(i)
        assert_close(row["v"], {k: (a - 0.1 * a.grad).detach() for k, a in parts[0].items() if a.grad is not None})
        assert W.grad is not None
        assert_close(row["W"], (W - 0.1 * W.grad).detach())


def test_fedkd_energy_rises_and_bounds_what_the_wire_loses() -> None:
    method = FedKd(energy_start=0.6, energy_end=0.9, energy_rounds=3)
    assert [method.energy(t) for t in (0, 1, 2, 3, 4, 99)] == pytest.approx([0.6, 0.6, 0.7, 0.8, 0.9, 0.9])
    W = torch.randn(30, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for t in (1, 3):
        got = method.codecs(t)["theta"].roundtrip(W)[0]
        lost = float((got - W).square().sum() / W.square().sum())
        assert 0 < lost <= 1 - method.energy(t)
    cheap = run(FedKd(lr=0.1, energy_start=0.3, energy_end=0.3)).record.progress.totals
    dear = run(FedKd(lr=0.1, energy_start=1.0, energy_end=1.0)).record.progress.totals
    assert cheap["up"] < dear["up"] and cheap["down"] < dear["down"]
    with pytest.raises(ConfigError, match="FedKd: energy_end must be a number in"):
        FedKd(energy_end=0.0)
