"""How clients are computed: what vmap cannot take runs in the loop and is told, what it can take stays mapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import assert_close, make_data, make_model, make_task
from fedspan.errors import ConfigError
from fedspan.learn.task import Task
from fedspan.methods import FedAvg
from fedspan.simulation.engine import mapping_fault
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation


class Odd(nn.Module):
    """The small MLP with a line that vmap cannot run, or that mixes the examples of a batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = make_model("mlp"), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "branch" and x.sum() > 0:
            x = x * 1.0
        if self.how == "item":
            x = x / max(1.0, x.abs().max().item())
        if self.how == "mixed":
            x = x - x.mean(0)
        if self.how == "random":
            x = x + 0 * torch.rand_like(x)
        return self.inner(x)


def simulation(how: str, mapping: Any) -> Simulation:
    settings = Settings(precision="float64", batch_size=4, workers=1, mapping=mapping)
    return Simulation(FedAvg(), Task(Odd(how), dtype=torch.float64), make_data(), rounds=1, settings=settings)


@pytest.mark.parametrize("how", ["branch", "item", "mixed", "random"])
def test_what_vmap_cannot_take_runs_in_the_loop_with_a_note(how: str) -> None:
    sim, asked = simulation(how, "auto"), simulation(how, "loop")
    result = sim.run()
    asked.run()
    assert sim.mapping == result.mapping == "loop"
    assert [m.split(", as the model")[0] for m in result.messages] == ["Clients are computed one after another"]
    assert ("depends on the other slots" in result.messages[0]) == (how == "mixed")
    assert_close(sim.record.server, asked.record.server)
    assert asked.messages == []  # nobody is told what they asked for
    with pytest.raises(
        ConfigError, match=r"cannot be trained for many clients at once .*run with train.mapping='loop'"
    ):
        simulation(how, "vmap")


@pytest.mark.parametrize("kind", ["mlp", "dropout", "cnn"])
def test_what_vmap_can_take_stays_mapped_in_silence(kind: str) -> None:
    settings = Settings(precision="float64", workers=1)
    sim = Simulation(FedAvg(), make_task(kind), make_data(kind), rounds=1, settings=settings)
    assert sim.mapping == ("vmap" if kind == "cnn" else "folded") and sim.messages == []
    data = make_data(kind)
    assert mapping_fault(make_task(kind), data.x[:2], data.y[:2]) is None
