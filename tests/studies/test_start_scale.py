"""How small factorised models start: exact ratios, a network made as small, and the check that trains all three."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from conftest import make_task, method_of
from fedspan.cli.checks import perform_check
from fedspan.config import from_dict
from fedspan.errors import ConfigError
from fedspan.layers import plain_weights
from fedspan.methods.factorized_fl import FactorizedLocal
from fedspan.studies.claims import find_claim
from fedspan.studies.theory import start_scale

XAVIER = {"lr": 0.1, "mu_start": "xavier"}
BODY = ["conv.weight", "hidden.weight"]


def test_a_shrunk_network_has_the_norms_of_the_factorised_one_and_its_own_directions() -> None:
    plain = make_task("batchnorm")
    factorised = method_of(FactorizedLocal, **XAVIER).model(plain, None)
    ratios = start_scale.squared_ratios(plain, factorised)
    assert list(ratios) == BODY
    large, small = plain.init(), start_scale.shrunk(plain, ratios).init()
    made = plain_weights(factorised.module, factorised.init())
    for k in BODY:
        assert small[k].norm() == pytest.approx(float(made[k].norm()), rel=1e-12)
        assert torch.allclose(small[k] * ratios[k] ** 0.5, large[k], rtol=1e-12, atol=0)
    assert all(torch.equal(small[k], large[k]) for k in large if k not in BODY)


def test_where_a_norm_follows_the_steps_of_smaller_weights_turn_them_by_the_ratio() -> None:
    """Weights scaled by c have gradients divided by c, so that ‖g‖/‖W‖ grows by 1/c²: the rule behind the claim."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(1, 4, 3, bias=False).double(), nn.BatchNorm2d(4, eps=1e-14).double()
    x, weight = torch.randn(8, 1, 6, 6, dtype=torch.float64), torch.randn(8, 4, 4, 4, dtype=torch.float64)

    def turned() -> torch.Tensor:
        conv.zero_grad()
        (norm(conv(x)) * weight).sum().backward()
        assert conv.weight.grad is not None
        return conv.weight.grad.norm() / conv.weight.detach().norm()

    before = turned()
    with torch.no_grad():
        conv.weight.div_(3.0)
    assert float(turned() / before) == pytest.approx(9.0, rel=1e-10)


def test_what_starts_as_the_plain_network_has_a_ratio_of_one() -> None:
    plain = make_task("batchnorm")
    dense = method_of(FactorizedLocal, lr=0.1, mu_start="dense").model(plain, None)
    assert all(r == pytest.approx(1.0, rel=1e-12) for r in start_scale.squared_ratios(plain, dense).values())


def test_a_body_without_factors_and_one_that_starts_at_zero_are_refused() -> None:
    plain = make_task("mlp")
    with pytest.raises(ConfigError, match="must factorise layers of the body"):
        start_scale.squared_ratios(plain, plain)
    made = method_of(FactorizedLocal, lr=0.1, mu_start="zeros").model(plain, None)

    def emptied(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
        return module

    with pytest.raises(ConfigError, match="must not start at zero"):
        start_scale.squared_ratios(plain, made.converted(emptied))
    values = {"rounds": 1, "data": {"source": "digits"}, "partition": {"kind": "iid", "clients": 3}}
    config = from_dict({**values, "model": {"kind": "mlp"}, "method": {"name": "local"}}, name="x").resolve()
    with pytest.raises(ConfigError, match="must be of a factorised model"):
        start_scale.compare(config, config, lrs=[0.1], width=4)


def test_a_first_step_moves_the_product_by_u_and_v_beside_mu() -> None:
    """ΔW = −η (G + G vᵀv + u uᵀG) to first order in η, for the matrix inputs × outputs of a linear layer."""
    torch.manual_seed(0)
    plain, lr = make_task("mlp"), 1e-7
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.arange(12) % 3
    made = method_of(FactorizedLocal, lr=lr, mu_start="xavier").model(plain, None)
    found, p = start_scale.first_step(made, x, y, lr), made.init()
    weights = plain_weights(made.module, p)
    free = {k: w.clone().requires_grad_() for k, w in weights.items()}
    torch.nn.functional.cross_entropy(torch.func.functional_call(plain.module, free, x), y).backward()
    assert list(found) == [k for k, w in weights.items() if w.ndim > 1]
    for k in ("0.weight", "2.weight", "4.weight"):
        grad = free[k].grad
        assert grad is not None
        G, u, v = grad.T, p[k.replace("weight", "u")], p[k.replace("weight", "v")]
        step = lr * (G + G @ v.T @ v + u @ u.T @ G)
        assert found[k] == pytest.approx(float(step.norm() / weights[k].norm()), rel=1e-5)


def test_a_first_step_of_a_plain_network_is_its_gradients() -> None:
    plain, lr = make_task("mlp"), 0.3
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.arange(12) % 3
    free = {k: w.requires_grad_() for k, w in plain.init().items()}
    torch.nn.functional.cross_entropy(torch.func.functional_call(plain.module, free, x), y).backward()
    for k, length in start_scale.first_step(plain, x, y, lr).items():
        grad = free[k].grad
        assert grad is not None and length == pytest.approx(
            lr * float(grad.norm() / free[k].detach().norm()), rel=1e-12
        )


def test_the_check_sees_both_starts_and_trains_all_three_at_every_step_size() -> None:
    claim = find_claim("factorized-fl/step-size")
    assert claim.experiment is not None
    assert claim.check is not None
    check = replace(claim.check, options={"lr": [0.01, 0.1], "width": 32})
    experiment = {**claim.experiment, "rounds": 1, "data": {"source": "digits", "limit": 60}}
    experiment |= {"model": {"kind": "resnet8", "norm": "batch", "width": 4}, "train": {"batch_size": 8, "workers": 1}}
    runs = perform_check(replace(claim, check=check, experiment=experiment, seeds=(200, 201)))["runs"]
    assert len(runs) == 2
    for run in runs:
        for kind in ("squares", "steps"):
            narrow, wide = run["here"][kind], run["wide"][kind]
            assert narrow["least"] < narrow["mean"] < narrow["most"]
            assert wide["mean"] > 2 * narrow["mean"]  # the wider, the smaller it starts beside the plain one
        assert list(run["accuracy"]) == ["0.01", "0.1"]
        for found in run["accuracy"].values():
            assert list(found) == [start_scale.PLAIN, start_scale.SMALL, start_scale.FACTORISED]
            assert all(0 <= v <= 100 for v in found.values())
        assert len({v for found in run["accuracy"].values() for v in found.values()}) > 2
