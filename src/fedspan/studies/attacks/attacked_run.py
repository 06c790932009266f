"""A simulation in which some clients are dishonest, and what becomes of the honest ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from fedspan import tree
from fedspan.config import RunConfig, assemble
from fedspan.data.federated import FederatedData, Index
from fedspan.errors import ConfigError, Divergence
from fedspan.method import Sent
from fedspan.randomness import generator, key
from fedspan.simulation.defence import Defence, downloads
from fedspan.simulation.engine import Engine
from fedspan.simulation.local_transport import LocalTransport
from fedspan.simulation.record import Record
from fedspan.simulation.simulator import Simulation
from fedspan.storage.atomic import write_atomic
from fedspan.studies.attacks.catalogue import TARGET, Attack, find_attack, mark
from fedspan.tree import Tree

SHARE = 0.1
"""Of the clients, how many attack; at least one."""


class AttackedTransport(LocalTransport):
    """The transport of a simulation, over which some clients send what an attack makes of their uploads."""

    def __init__(self, engine: Engine, record: Record, attack: Attack, attackers: Sequence[int]) -> None:
        super().__init__(engine, record)
        self.attack, self.attackers = attack, frozenset(attackers)

    @property
    def sizes(self) -> Index:
        """Training examples of every client, as it says."""
        said = super().sizes
        if self.attack.claims is not None:
            said = said.copy()
            said[list(self.attackers)] = self.attack.claims
        return said

    def _arrived(self, t: int, ids: list[int], sent: Sent, shared: Tree, own: Tree) -> Sent:
        if self.attack.lie is None or self.attackers.isdisjoint(ids):
            return sent
        rows, downs = [tree.take(sent, k) for k in range(len(ids))], downloads(shared, own, len(ids))
        for k, i in enumerate(ids):
            if i in self.attackers:
                rows[k] = self.attack.lie(self.engine.able, rows[k], downs[k], key(self.engine.seed, "attack", t, i))
        lied: Sent = tree.stack(rows)
        return lied


class AttackOutcome(BaseModel):
    """What honest clients have after a run: mean accuracy, and how often a mark makes their models say the target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    attack: str
    rule: str
    """Of the defence."""
    seed: int
    accuracy: float | None
    """None if the run diverged."""
    success: float | None
    """Of the backdoor; without one, how often the mark misleads by chance. None where examples are no pictures."""
    diverged: bool = False
    attackers: list[int] = []
    decided: dict[str, Any] = {}
    """What decides the numbers of the run."""


@dataclass(frozen=True)
class AttackJob:
    """One run: an experiment of one method and seed, an attack, a defence."""

    config: RunConfig
    attack: Attack
    defence: Defence

    @property
    def file(self) -> str:
        """Where its outcome lies, below the study's directory."""
        guard = self.defence.rule
        return f"{self.config.method['name']}/{self.attack.name}-{guard}-seed-{self.config.seed}.json"

    @property
    def described(self) -> dict[str, Any]:
        """What decides its numbers."""
        config = replace(self.config, defence=self.defence)
        return {**config.identity(), "rounds": config.rounds}


def attack_jobs(
    config: RunConfig, methods: Iterable[str], attacks: Iterable[str], defences: Iterable[Defence], seeds: Iterable[int]
) -> list[AttackJob]:
    """All runs of a study; the fields of every method come from the file.

    Raises:
        ConfigError: if the file asks for asynchronous rounds.
    """
    if config.asynchronous is not None:
        raise ConfigError("attack: rounds must be synchronous. Got [asynchronous]; leave it out.")
    compared, seeds, defences = list(methods), list(seeds), list(defences)
    chosen = [find_attack(name) for name in attacks]
    resolved = [config.resolve(m, compared, s) for m in compared for s in seeds]
    return [AttackJob(c, a, d) for c in resolved for a in chosen for d in defences]


def attackers_of(clients: int, seed: int) -> list[int]:
    """Who attacks, drawn by the seed."""
    count = max(1, round(SHARE * clients))
    return sorted(generator(seed, "attackers").choice(clients, count, replace=False).tolist())


def carry_out(job: AttackJob, where: Path) -> tuple[AttackOutcome, bool]:
    """The outcome of a job, and whether it was found in the directory; a run that is done is not repeated."""
    path = where / job.file
    found = _read(path)
    if found is not None and found.decided == job.described:
        return found, True
    outcome = _run(job)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, outcome.model_dump_json(indent=1) + "\n")
    return outcome, False


def _read(path: Path) -> AttackOutcome | None:
    try:
        return AttackOutcome.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None  # then it is run again


def _run(job: AttackJob) -> AttackOutcome:
    config, attack, seed = job.config, job.attack, job.config.seed
    method, task, data = assemble(config)
    who = attackers_of(data.clients, seed)
    used = data if attack.poison is None else attack.poison(data, who, seed)
    rounds, guard = config.rounds, job.defence
    sim = Simulation(method, task, used, rounds=rounds, seed=seed, settings=config.train, defence=guard)
    sim.transport = AttackedTransport(sim.engine, sim.record, attack, who)
    about: dict[str, Any] = {"method": config.method["name"], "attack": attack.name, "rule": job.defence.rule}
    about |= {"seed": seed, "decided": job.described, "attackers": who}
    try:
        result = sim.run()
    except Divergence:
        return AttackOutcome(**about, accuracy=None, success=None, diverged=True)
    values = [v for i, v in zip(result.per_client["id"], result.per_client["accuracy"]) if i not in who]
    accuracy = float(np.mean([v for v in values if v is not None]))
    return AttackOutcome(**about, accuracy=accuracy, success=_misled(sim, data, who))


def _misled(sim: Simulation, data: FederatedData, who: Sequence[int]) -> float | None:
    """Mean over honest clients: of their marked test pictures of other classes, how many are taken for the target."""
    if data.x.ndim != 4:
        return None
    shares, bright = [], float(sim.data.x.max())
    for i in range(data.clients):
        rows = torch.from_numpy(data.test[i])
        rows = rows[data.y[rows] != TARGET]
        if i in who or not len(rows):
            continue
        task, weights = sim.personal(i)
        with torch.no_grad():
            said = sim.engine.able.adapts.predict(task, weights, mark(sim.data.x[rows], bright)).argmax(1)
        wanted = TARGET if data.relabel is None else int(data.relabel[i][TARGET])
        shares.append(float((said == wanted).double().mean()))
    return float(np.mean(shares)) if shares else None
