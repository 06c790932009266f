"""Before the first round of a run on tables: the nodes describe their columns, and sums give means and deviations.

The server sees names of columns and categories, and sums over each node's training rows; no row. A node whose table
differs is left out with one sentence, and the others go on while they are enough.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from flwr.app import Message
from pydantic import BaseModel, ValidationError

from fedspan.config import RunConfig
from fedspan.data.tables.preprocessing import Preprocessing
from fedspan.data.tables.schema_agreement import (
    ClientSchema,
    ColumnSums,
    DeviationSums,
    agree,
    centre,
    conclude,
)
from fedspan.deploy.envelope import Facts, printable, seal, unseal
from fedspan.deploy.experiment import DataKind
from fedspan.deploy.policy import Policy
from fedspan.deploy.server.answers import CheckedFacts, describe_fault
from fedspan.deploy.server.exchange import REPORTS, Roster, own_words
from fedspan.deploy.server.quota_grid import NodeGrid, QuotaGrid
from fedspan.errors import FedspanError, Refused

A = TypeVar("A", bound=BaseModel)


class SchemaAnswer(CheckedFacts):
    """What a node says of its columns."""

    do: Literal["describe"]
    round: Literal[0]
    answer: ClientSchema


class SumsAnswer(CheckedFacts):
    """Sums over a node's training rows."""

    do: Literal["sums"]
    round: Literal[0]
    answer: ColumnSums


class DeviationsAnswer(CheckedFacts):
    """Sums of deviations over a node's training rows."""

    do: Literal["deviations"]
    round: Literal[0]
    answer: DeviationSums


def kind_of_table(made: Preprocessing) -> DataKind:
    """What examples look like that a preprocessing makes."""
    names = made.encoding.class_names
    return DataKind(
        (len(made.names),),
        None if names is None else len(names),
        label=(len(made.encoding.target),) if names is None and len(made.encoding.target) > 1 else (),
    )


def agree_on_table(
    config: RunConfig,
    grid: NodeGrid,
    roster: Roster,
    policy: Policy,
    out: Path,
    *,
    fresh: bool,
    log: Callable[[str], None],
) -> Preprocessing:
    """What the nodes of a run agree on: found again in the run's directory, or asked of them.

    Raises:
        FedspanError: if too few nodes have tables that fit together.
    """
    kept = None if fresh else Preprocessing.read(out)
    if kept is not None:
        return kept
    asking = _Asking(grid, roster, policy, log)
    there = asking.wait()
    schemas = asking.ask({i: {"do": "describe"} for i in there}, SchemaAnswer)
    asking.need(list(schemas))
    encoding, faults = agree({roster.names[i]: a.answer for i, a in schemas.items()}, config.data.table)
    for name, why in faults.items():
        log(f"Client {name} is left out: {why}")
    fine = [i for i in schemas if roster.names[i] not in faults]
    asking.need(fine)
    shape = encoding.model_dump()
    sums = asking.ask({i: {"do": "sums", "encoding": shape} for i in fine}, SumsAnswer)
    asking.need(list(sums))
    about = centre([a.answer for a in sums.values()], encoding)
    request = {"do": "deviations", "encoding": shape, "centre": about}
    apart = asking.ask({i: dict(request) for i in sums}, DeviationsAnswer)
    asking.need(list(apart))
    both = [i for i in sums if i in apart]
    made = conclude(encoding, config.data.table, [sums[i].answer for i in both], [apart[i].answer for i in both])
    made.write(out)
    log(f"{len(both)} nodes agree on {len(made.names)} inputs; standardise: {made.standardise}.")
    return made


class _Asking:
    """Asks nodes one thing at a time; what is wrong with an answer costs its sender only."""

    def __init__(self, grid: NodeGrid, roster: Roster, policy: Policy, log: Callable[[str], None]) -> None:
        self.grid, self.roster, self.policy, self.log = grid, roster, policy, log
        self.least = max(1, math.ceil(policy.quorum * len(roster.nodes) - 1e-9))

    def wait(self) -> list[int]:
        """The clients whose nodes are connected, all of them or as many as come in time."""
        end = time.monotonic() + self.policy.wait
        while True:
            connected = set(self.grid.get_node_ids())
            there = [i for i, node in enumerate(self.roster.nodes) if node in connected]
            if len(there) == len(self.roster.nodes) or time.monotonic() > end:
                self.need(there)
                return there
            time.sleep(self.policy.poll)

    def need(self, clients: list[int]) -> None:
        """Refuse to go on with too few.

        Raises:
            FedspanError: naming how many are needed.
        """
        if len(clients) < self.least:
            raise FedspanError(
                f"Deploy: {self.least} nodes with tables that fit together are needed. Got {len(clients)}; see the log"
                " for what the others lack."
            )

    def ask(self, requests: Mapping[int, Facts], kind: type[A]) -> dict[int, A]:
        """The checked answers of those who gave one before the deadline."""
        end, pending = time.monotonic() + self.policy.deadline, {}
        for i, facts in requests.items():
            told = {**facts, "round": 0, "client": i, "clients": len(self.roster.nodes)}
            message = Message(seal(told), self.roster.nodes[i], "query", group_id="0", ttl=self.policy.deadline)
            numbers = list(self.grid.push_messages([message]))
            if numbers and numbers[0]:
                pending[i] = numbers[0]
        got: dict[int, A] = {}
        while pending and time.monotonic() < end:
            for i, number in list(pending.items()):
                try:
                    reply = self._pull(number, end)
                    if reply is None:
                        continue
                    got[i] = self._opened(i, reply, kind)
                except FedspanError as e:
                    self.log(printable(f"Client {self.roster.names[i]} is left out: {e}"))
                del pending[i]
            if pending:
                time.sleep(self.policy.poll)
        for i in pending:
            self.log(f"Client {self.roster.names[i]} is left out: no answer before the deadline.")
        return {i: got[i] for i in requests if i in got}

    def _pull(self, number: str, end: float) -> Message | None:
        if isinstance(self.grid, QuotaGrid):
            self.grid.quota, self.grid.end = 0, end
        replies = list(self.grid.pull_messages([number]))
        return replies[0] if replies else None

    def _opened(self, i: int, reply: Message, kind: type[A]) -> A:
        if reply.has_error():
            raise Refused(f"{REPORTS} {own_words(str(reply.error.reason))[:300]}")
        if reply.metadata.src_node_id != self.roster.nodes[i]:
            raise Refused(f"the answer comes from another node, {reply.metadata.src_node_id}.")
        facts, payload = unseal(reply.content)
        if payload:
            raise Refused(f"its answer must bring no payload. Got {len(payload):,} bytes.")
        return parse_nested(kind, facts)


def parse_nested(kind: type[A], facts: Mapping[str, Any]) -> A:
    """Facts with values inside values as a checked type.

    Raises:
        Refused: in one sentence about the first fact that is wrong.
    """
    try:
        return kind.model_validate_json(json.dumps(facts, allow_nan=False))
    except (ValidationError, ValueError) as e:
        said = describe_fault(e) if isinstance(e, ValidationError) else "its facts hold no finite numbers."
        raise Refused(said) from None
