"""Every method trains with its own defaults, and with a learning rate far beyond them ends with finite numbers."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

import pytest

from conftest import finished, make_data, make_task
from fedspan.method import Method
from fedspan.method.fields import flat
from fedspan.methods import BUILT_IN, make
from fedspan.methods.as_written import AS_WRITTEN, as_written
from fedspan.tree import all_finite

pytestmark = pytest.mark.slow

LATE = {"fedcollab": {"distance_rounds": 2, "distance_hidden": 5}}
"""Methods whose models begin to train after some rounds, begun earlier."""
OFTEN = {"fedavg", "ditto", "cfl", "pfedsim", "fedbabu", "pfl-mf", "pfl-mf-paper", "pfl-mf-joint", "pfedlora2"}
OFTEN |= {"pfl-mf-adaptive"}
"""What is run before every commit; the others are marked `long`."""
WILD = ["fedavg", "pfl-mf-paper", "pfedlora2", "fedrep", "pfedme", "per-fedavg", "pfl-mf", "pfl-mf-joint", "amht-lrs"]
WILD += ["pfl-mf-adaptive", "pfedpara", "pfedloru", "pfedlora1", "factorized-fl-beta", "fedkd", "fedas"]


def some_long(names: Iterable[str], often: Container[str]) -> list[Any]:
    """The names, those that are not run often marked."""
    return [name if name in often else pytest.param(name, marks=pytest.mark.long) for name in names]


def loss_after(method: Method, rounds: int) -> float:
    """The mean loss of the clients' models after some rounds on data that are easy to learn."""
    data = make_data(clients=4, equal=True, opposed=False)
    sim = finished(method, task=make_task(), data=data, rounds=rounds, participation=1.0, batch_size=4)
    assert all_finite(sim.record.server)
    return float(sim.result.measures["loss"]["mean"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", some_long(BUILT_IN, OFTEN))
def test_a_method_trains_with_its_defaults(name: str) -> None:
    method = make(name, **LATE.get(name, {}))
    before, after = (loss_after(method, rounds) for rounds in (0, 4))
    assert after < before


@pytest.mark.parametrize("name", some_long(WILD, WILD[:3]))
def test_a_thousandfold_learning_rate_is_shortened(name: str) -> None:
    method = make(name)
    rate = getattr(method, "lr", 0.1)
    assert math.isfinite(loss_after(make(name, lr=1000 * rate), 3))


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_what_a_paper_writes_is_an_option_and_not_the_default(name: str) -> None:
    usual = flat(make(name))
    given = flat(make(name, **as_written(name)))
    assert as_written(name) and all(given[k] == v != usual[k] for k, v in as_written(name).items())


def test_a_method_that_trains_as_written_has_no_options_for_it() -> None:
    assert as_written("fedavg") == {}
