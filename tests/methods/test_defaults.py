"""Every method trains with its own defaults, and with a learning rate far beyond them ends with finite numbers."""

from __future__ import annotations

import math

import pytest

from conftest import finished, make_data, make_task
from fedspan.method import Method
from fedspan.methods import BUILT_IN, make
from fedspan.tree import all_finite

pytestmark = pytest.mark.slow

LATE = {"fedcollab": {"distance_rounds": 2, "distance_hidden": 5}}
"""Methods whose models begin to train after some rounds, begun earlier."""
WILD = ["fedavg", "fedrep", "pfedme", "per-fedavg", "pfl-mf", "pfl-mf-paper", "pfl-mf-joint", "amht-lrs", "pfedpara"]
WILD += ["pfedloru", "pfedlora1", "pfedlora2", "factorized-fl-beta", "fedkd", "fedas"]


def loss_after(method: Method, rounds: int) -> float:
    """The mean loss of the clients' models after some rounds of full batches of digits that are easy to learn."""
    data = make_data(clients=4, equal=True)
    sim = finished(method, task=make_task(), data=data, rounds=rounds, participation=1.0, batch_size=4)
    assert all_finite(sim.record.server)
    return float(sim.result.measures["loss"]["mean"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_method_trains_with_its_defaults(name: str) -> None:
    method = make(name, **LATE.get(name, {}))
    before, after = (loss_after(method, rounds) for rounds in (0, 4))
    assert after < before


@pytest.mark.parametrize("name", WILD)
def test_a_thousandfold_learning_rate_is_shortened(name: str) -> None:
    method = make(name)
    rate = getattr(method, "lr", 0.1)
    assert math.isfinite(loss_after(make(name, lr=1000 * rate), 3))
