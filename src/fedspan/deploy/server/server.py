"""The server of a deployment: the round driver over Flower's grid, with a status file and a log beside it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.data.tables.preprocessing import Preprocessing
from fedspan.deploy.experiment import DataKind, Experiment, stand_in
from fedspan.deploy.policy import Policy
from fedspan.deploy.server.exchange import Roster
from fedspan.deploy.server.grid_transport import Audit, GridTransport
from fedspan.deploy.server.quota_grid import NodeGrid
from fedspan.simulation import warnings
from fedspan.simulation.driver import Line, OnRound, RoundDriver
from fedspan.simulation.record import Record
from fedspan.simulation.result import Result
from fedspan.storage.atomic import write_atomic


class Server(RoundDriver):
    """One run on a grid; `run()` does what is left to do.

    Args:
        kind: what examples look like.
        out: the run directory; a run found there is resumed, unless `fresh`.
        log: told one line at a time what happens.
        live, audit, agreed: see `GridTransport`.
    """

    always_save = True  # messages cost seconds: a checkpoint after every round is cheap
    transport: GridTransport

    def __init__(
        self,
        experiment: Experiment,
        kind: DataKind,
        grid: NodeGrid,
        roster: Roster,
        *,
        policy: Policy | None = None,
        out: Path | None = None,
        fresh: bool = False,
        log: Callable[[str], None] = lambda _: None,
        live: Callable[[], Roster] | None = None,
        audit: Audit = lambda event, facts: None,
        agreed: Preprocessing | None = None,
    ) -> None:
        self.experiment, self.log = experiment, log
        clients = len(roster.nodes)
        engine = experiment.engine(stand_in(kind, clients, experiment.seed))
        federation = experiment.federation(clients, roster.groups)
        config = {**experiment.config, "nodes": list(roster.places or map(str, roster.nodes))}
        record = Record(
            engine,
            federation,
            experiment.settings,
            config=config,
            out=out,
            fresh=fresh,
            clients=False,
            defence=experiment.defence,
        )
        transport = GridTransport(
            experiment, engine, kind, grid, roster, record, policy or Policy(), log, live, audit, agreed
        )
        super().__init__(engine, record, transport, rounds=experiment.rounds, config=experiment.config)
        self.warnings = warnings.of_settings(experiment.method, clients, experiment.rounds)
        self.messages.extend(self.warnings)

    @property
    def roster(self) -> Roster:
        """Which node is which client, as the last round had it."""
        return self.transport.roster

    def run(self, on_round: OnRound | None = None) -> Result:
        """Do the rounds that are left, evaluate, and return the result; `status.json` says how far it is.

        Raises:
            Divergence: if training leaves the finite numbers; the last good state has been saved.
        """
        try:
            if self.record.resumed:
                self.log(f"Resuming after round {self.record.progress.round}.")
            for sentence in self.warnings:
                self.log(sentence)
            self._status("waiting")
            result = super().run(on_round)
            self._status("finished")
            return result
        except BaseException:
            self._status("stopped")
            raise

    @property
    def names(self) -> Sequence[str]:
        """What clients are called."""
        return self.roster.names

    def _stepped(self, line: Line) -> None:
        self._status("running")
        self.log(_said(line, self.rounds, [m.name for m in self.engine.gathered]))
        task, notes = self.experiment.task, self.record.progress.notes
        if task.kind != "regression" or task.own_loss:  # how large targets are, only nodes know
            found = warnings.exploded_first(task, self.engine.data, line, notes)
            self.messages.extend(found)
            for sentence in found:
                self.log(sentence)

    def _about(self) -> dict[str, Any]:
        groups = self.roster.groups
        return {
            "mapping": "flower",
            "names": list(self.roster.names),
            "groups": None if groups is None else groups.tolist(),
        }

    def _status(self, state: str) -> None:
        """What `fedspan deploy status` shows, written whole."""
        if self.out is None:
            return
        p, lines = self.record.progress, self.record.lines
        evaluated = [line for line in lines if line.get("accuracy") or line.get("loss")]
        body = {
            "state": state,
            "pid": os.getpid(),
            "time": time.time(),
            "round": p.round,
            "rounds": self.rounds,
            "seconds": lines[-1]["seconds"] if lines else None,
            "answered": lines[-1]["answered"] if lines else None,
            "accuracy": (evaluated[-1].get("accuracy") or {}).get("mean") if evaluated else None,
            "loss": (evaluated[-1].get("loss") or {}).get("mean") if evaluated else None,
            "bytes": p.bytes.totals(self.transport.counted),
            "nodes": {
                name: p.deployed["nodes"][str(i)] | {"id": str(self.roster.nodes[i])}
                for i, name in enumerate(self.roster.names)
            },
            "refused": self.transport.refusals[-20:],
            "defence": lines[-1].get("defence") if lines else None,
        }
        write_atomic(self.out / "status.json", json.dumps(body, indent=1) + "\n")


def _said(line: Mapping[str, Any], rounds: int, metrics: Sequence[str] = ()) -> str:
    """A round in one line."""
    found = line.get("accuracy")
    shown = f", accuracy {100 * found['mean']:.2f} %" if found else ""
    shown += "".join(f", {name} {line[name]['mean']:.4g}" for name in metrics if line.get(name))
    skipped = ", skipped" if line["skipped"] else ""
    guard = line.get("defence", {})
    cut = "".join(f", {guard[k]} {k}" for k in ("clipped", "capped") if guard.get(k))
    who = f"{line['answered']} of {line['sampled']} answered"
    return f"Round {line['round']} of {rounds}: {who}{cut}{skipped}{shown}, {line['seconds']:.1f} s."
