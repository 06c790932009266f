"""What a run gives back, in memory and as `result.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedspan.errors import FedspanError
from fedspan.simulation.environment import Span
from fedspan.storage.atomic import write_atomic
from fedspan.storage.format_number import FORMAT

if TYPE_CHECKING:
    from fedspan.simulation.simulator import Simulation


@dataclass
class Result:
    """A finished run. Accuracies are fractions; bytes are totals over all rounds and clients."""

    method: str
    seed: int
    rounds: int
    accuracy: dict[str, float]
    measures: dict[str, dict[str, float]]
    per_client: dict[str, list[float | None]]
    bytes: dict[str, Any]
    seconds: dict[str, float]
    config: dict[str, Any]
    versions: dict[str, str]
    mapping: str
    curve: list[dict[str, Any]]
    digest: str
    messages: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # which rounds were computed with which versions
    names: list[str] = field(default_factory=list)
    groups: list[int] | None = None
    labels: list[list[int]] | None = None  # training examples per client and class, as the client names the classes
    capacities: list[str] | None = None  # of every client, if they differ
    evaluation: dict[str, Any] = field(default_factory=dict)  # metrics and protocols, where some were asked for
    cluster: dict[str, Any] = field(default_factory=dict)  # machines of a cluster, and what travelled between them
    simulation: Simulation | None = None

    def personal_model(self, client: int) -> nn.Module:
        """Client `client`'s own model as a module, ready to predict."""
        if self.simulation is None:
            raise FedspanError("Result: personal models need the finished run; load it with `fedspan export RUN`.")
        task, weights = self.simulation.personal(client)
        return task.module_with(weights)

    def to_json(self) -> dict[str, Any]:
        """What `result.json` holds."""
        left_out = {"curve", "simulation"} | {k for k in ("evaluation", "cluster") if not getattr(self, k)}
        return {"format": FORMAT} | {k: v for k, v in self.__dict__.items() if k not in left_out}

    def write(self, directory: Path) -> None:
        """Write `result.json`, all or nothing."""
        write_atomic(directory / "result.json", json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    def __str__(self) -> str:
        if self.evaluation:
            names = [k for k in self.evaluation["metrics"] if k in self.measures]
            shown = ", ".join(f"{k} {self.measures[k]['mean']:.4f}" for k in names)
        elif not self.accuracy:
            shown = ", ".join(f"{k} {v['mean']:.4f}" for k, v in self.measures.items())
        else:
            a = self.accuracy
            shown = f"accuracy {100 * a['mean']:.2f} % (worst tenth {100 * a['p10']:.2f} %)"
        return f"{self.method}: {shown}, {self.bytes['up'] / 1e6:.2f} MB up, {self.bytes['down'] / 1e6:.2f} MB down"
