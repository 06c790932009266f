"""The transport of a deployment: nodes on Flower's grid, whose uploads pass the gate or are refused.

Flower's strategies carry one record for all, have no resume, and end the run at one bad reply. Here every node is asked
for itself, a round ends at its deadline, a bad answer costs its sender only, and a new run goes on from the checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from fedspan import tree, wire
from fedspan.data.federated import Index
from fedspan.data.tables.preprocessing import Preprocessing
from fedspan.deploy.envelope import printable
from fedspan.deploy.experiment import DataKind, Experiment
from fedspan.deploy.node.node import describe_coded
from fedspan.deploy.policy import Policy
from fedspan.deploy.server.admission import Declared, admit, declare, norm_of, too_large
from fedspan.deploy.server.answers import EvaluateAnswer, HelloAnswer, TrainAnswer, check_metric_values, check_sums
from fedspan.deploy.server.deployed_state import MOST_NORMS, begin_or_parse
from fedspan.deploy.server.exchange import REPORTS, Check, Exchange, Request, Roster
from fedspan.deploy.server.quota_grid import NodeGrid
from fedspan.errors import ConfigError, Refused
from fedspan.method import Sent
from fedspan.randomness import generator
from fedspan.simulation import defence
from fedspan.simulation.defence import DefenceHistory
from fedspan.simulation.engine import Engine
from fedspan.simulation.protocols import RECEIVED, EvaluationSettings, JudgedModel
from fedspan.simulation.record import Record
from fedspan.simulation.transport import Collected, MeasuredClients, in_order, partial_sum, stacked
from fedspan.tree import Tree
from fedspan.wire import Codec, Direction, Ledger

WORTH_A_LINE = 0.2
"""Of a part so little is left that the log names its client."""

Audit: TypeAlias = Callable[[Literal["joined", "refused", "round"], dict[str, Any]], object]
"""Told of an event and its facts."""

_REFUSALS = 1000  # that are remembered, the newest


class GridTransport:
    """Brings work to the nodes of a deployment, and lets in only answers that keep to the method's declaration.

    Args:
        kind: what examples look like.
        record: holds the server's state, and what is known of the nodes (`progress.deployed`).
        log: told one line at a time what happens.
        live: the roster as it is now, asked for before every round and while answers come in.
        audit: told who joined, who was refused and which round used whom.
        agreed: how rows of the nodes' tables become examples, which a node is told when it registers.
    """

    who = "Server"
    counted: tuple[Direction, ...] = tuple(Direction)
    repeats = False

    def __init__(
        self,
        experiment: Experiment,
        engine: Engine,
        kind: DataKind,
        grid: NodeGrid,
        roster: Roster,
        record: Record,
        policy: Policy,
        log: Callable[[str], None],
        live: Callable[[], Roster] | None = None,
        audit: Audit = lambda event, facts: None,
        agreed: Preprocessing | None = None,
    ) -> None:
        self.live, self.audit, self.agreed = live or (lambda: roster), audit, agreed
        self.experiment, self.engine, self.kind, self.grid = experiment, engine, kind, grid
        self.roster, self.record, self.policy, self.log = roster, record, policy, log
        self.clients, self.dtype = len(roster.nodes), experiment.settings.torch_dtype
        record.progress.deployed, notes = begin_or_parse(record.progress.deployed, self.clients)
        record.messages += notes
        self._declared: dict[str, Declared] = {}
        self._measures: dict[str, frozenset[str]] = {}
        self.refusals: list[dict[str, Any]] = []
        self._reported: dict[int, str] = {}

    @property
    def sizes(self) -> Index:
        """Training examples of every client, as its node has said; 0 where it has not yet."""
        return np.array([self._examples(i) if self._known(i) else 0 for i in range(self.clients)], np.int64)

    def advice(self) -> str:
        """What to do about divergence."""
        return "the state before it is kept. Use a smaller lr."

    def close(self) -> None:
        """The grid is Flower's to close."""

    # ------------------------------------------------------------------------------------------------ rounds

    def train(self, t: int, sampled: Sequence[int], ledger: Ledger) -> Collected:
        """Ask the sampled clients and, with over-selection, some more; collect until enough are in or time is up."""
        asked = self._more(list(sampled), t)
        ready = [i for i in asked if self._known(i)]
        shared, requests, declared, downs = self._requests("train", t, ready, ledger)
        codecs = self.engine.able.coded.codecs(t)

        def check(i: int, answer: TrainAnswer, payload: bytes) -> Sent:
            return admit(
                answer.weight,
                payload,
                who=f"client {self.roster.names[i]}",
                able=self.engine.able,
                declared=declared[i],
                codecs=codecs,
                examples=self._examples(i),
                dtype=self.dtype,
            )

        quotas = {i: d.most_bytes for i, d in declared.items()}
        exchange = self._exchange("train", t, requests, check, enough=len(sampled), ledger=ledger, quotas=quotas)
        got, refused, missing = exchange.got, exchange.refused, exchange.missing
        unknown = "it has not said how many examples it has"
        missing |= {i: self.roster.absent.get(i, unknown) for i in asked if not self._known(i)}
        refused |= self._outliers(got, downs)
        for i, why in refused.items():
            self._refuse(t, i, why)
        facts = {"refused": self._named(refused), "missing": self._named(missing)}
        enough = len(got) >= max(1, math.ceil(self.policy.quorum * len(sampled) - 1e-9))
        found = Collected(asked, enough=enough, facts=facts)
        used = [self.roster.names[i] for i in sorted(got)] if enough else []
        self.audit("round", {"round": t, "used": used, **{k: sorted(v) for k, v in facts.items()}})
        got = self._judged(t, got, downs, facts)
        examples, now = {i: self._examples(i) for i in got}, {i: self.record.capacity(i) for i in got}
        for c, capacity in enumerate(self.record.capacities):  # in the order in which a simulation adds them up
            for i in in_order([i for i in got if now[i] == capacity], examples):
                sent = stacked(got[i])
                total = partial_sum(self.engine.able, sent, shared[c], capacity)
                found.add([i], sent.weight.tolist(), sent.each, total)
        return found

    def keep(self) -> None:
        """Nodes have kept their own states already; a server that goes back is followed by their checkpoints."""

    def take_back(self) -> None:
        """See `keep`."""

    def announce(self, news: Tree, ledger: Ledger) -> None:
        """Keep the news for the next message to each node; bytes are counted when they travel."""
        r, deployed = self.record, self.record.progress.deployed
        deployed["told"] += 1
        r.news[str(deployed["told"])] = tree.contiguous(news)
        while r.news and tree.nbytes(r.news) > max(tree.nbytes(r.common), tree.nbytes(news)):
            del r.news[min(r.news, key=int)]  # whoever missed that many is sent the whole

    def measure(self, t: int, chosen: Sequence[int], ledger: Ledger, way: JudgedModel = RECEIVED) -> MeasuredClients:
        """Every connected node measures its personal model on its own held-out part; only numbers come back.

        Predictions stay on the nodes, so that metrics cannot be pooled.
        """
        if way != RECEIVED:
            raise ConfigError(f"Deploy: models '{way.words}' are judged in simulations only; leave them out.")
        ids = [i for i in chosen if self._known(i)]
        requests = self._requests("evaluate", t, ids, ledger)[1]

        def check(i: int, answer: EvaluateAnswer, payload: bytes) -> tuple[dict[str, float], EvaluateAnswer]:
            who, measures = f"client {self.roster.names[i]}", self._measures[repr(self.record.capacity(i))]
            held_out: int = self._node(i)["held_out"]
            check_metric_values(answer, who=who, metrics=self.engine.gathered if held_out else [])
            return check_sums(answer, who=who, held_out=held_out, measures=measures), answer

        part = self.experiment.settings.evaluate_part
        requests = {i: (facts | {"part": part}, payload) for i, (facts, payload) in requests.items()}
        exchange = self._exchange("evaluate", t, requests, check, enough=len(requests), ledger=ledger)
        got = exchange.got
        for i, why in exchange.refused.items():
            self._refuse(t, i, why)
        names = sorted({k for sums, _ in got.values() for k in sums} | {"n"})
        found = MeasuredClients({k: {i: sums[k] for i, (sums, _) in got.items() if k in sums} for k in names})
        for name in (m.name for m in self.engine.gathered):
            told = {i: answer.metrics[name] for i, (_, answer) in got.items() if name in answer.metrics}
            found.metrics[name] = {i: v for i, v in told.items() if v is not None}
            unsaid = {i: answer.left_out.get(name, "it does not define it") for i, (_, answer) in got.items()}
            found.left_out[name] = {i: printable(unsaid[i]) for i, v in told.items() if v is None}
        found.left_out = {name: why for name, why in found.left_out.items() if why}
        return found

    def _judged(
        self, t: int, got: dict[int, Sent], downs: Mapping[int, Tree], facts: dict[str, Any]
    ) -> dict[int, Sent]:
        """Cut what exceeds the bounds of the defence, as a simulation does, and tell of it."""
        if not self.record.defence.on or not got:
            return got
        able, usual = self.engine.able, DefenceHistory(self.record.defence, self.record.progress.usual)
        measured = {i: defence.measure(able, sent, downs[i]) for i, sent in got.items()}
        bounds = usual.with_round(measured.values())
        shares = {i: one.shares(bounds) for i, one in measured.items()}
        cuts = {i: some for i, some in shares.items() if some}
        usual.note(measured.values())
        facts["defence"] = told = defence.said(bounds, cuts, self.roster.names)
        for name, some in told["most_cut"].items():
            if min(some.values()) < WORTH_A_LINE:
                left = ", ".join(f"{100 * share:.2g} % of its {key}" for key, share in some.items())
                self.log(f"Round {t}: client {name} was cut; {left} is left.")
        return {i: defence.cut(able, sent, downs[i], shares[i]) if shares[i] else sent for i, sent in got.items()}

    def _outliers(self, got: dict[int, Sent], downs: Mapping[int, Tree]) -> dict[int, str]:
        """Take the uploads out whose change has a norm that is an outlier; the others' norms are remembered."""
        able, capacity = self.engine.able, self.record.capacity
        norms = {i: norm_of(defence.change_of(able, s, downs[i], capacity(i))) for i, s in got.items()}
        history = self.record.progress.deployed["norms"]
        refused = {}
        for i, bound in too_large(norms, history, self.policy.norm_factor).items():
            who = f"client {self.roster.names[i]}"
            refused[i] = f"{who}: the change's norm must be at most {bound:.3g}. Got {norms.pop(i):.3g}."
            del got[i]
        self.record.progress.deployed["norms"] = [*history, *(norms[i] for i in sorted(norms))][-MOST_NORMS:]
        return refused

    def _more(self, wanted: list[int], t: int) -> list[int]:
        """Those wanted and, with over-selection, some more."""
        others = [i for i in range(self.clients) if i not in set(wanted)]
        extra = min(len(others), math.ceil(self.policy.over_selection * len(wanted)))
        if not extra:
            return wanted
        rng = generator(self.experiment.seed, "over-selection", t)
        return sorted([*wanted, *rng.choice(others, extra, replace=False).tolist()])

    # ------------------------------------------------------------------------------------------------ requests

    def _requests(
        self, do: str, t: int, ids: list[int], ledger: Ledger
    ) -> tuple[list[Tree], dict[int, Request], dict[int, Declared], dict[int, Tree]]:
        """What those of one capacity receive in common, what to send to each client, what uploads must be, and

        what each client reads of the download, codecs included.
        """
        r, codecs = self.record, self.engine.able.coded.codecs(t)
        shared: list[Tree] = []
        requests: dict[int, Request] = {}
        declared: dict[int, Declared] = {}
        downs: dict[int, Tree] = {}
        now = {i: r.capacity(i) for i in ids}
        for capacity in r.capacities:
            mine = [i for i in ids if now[i] == capacity]
            if not mine:
                shared.append({})
                continue
            down = self.engine.able.download(r.server, torch.tensor(mine), capacity, t, use=do == "evaluate")
            shared.append(wire.roundtrip(down.shared, codecs)[0])
            for k, i in enumerate(mine):
                whole = {**down.shared, **tree.take(down.own, k)}
                coded = wire.encode(whole, codecs)
                ledger.add_names(Direction.DOWN if do == "train" else Direction.EVALUATE, wire.count(coded))
                if do == "train":
                    downs[i] = wire.roundtrip(whole, codecs)[0]
                    declared[i] = self._declare(t, i, downs[i])
                else:
                    self._learn_measures(t, i, whole, codecs)
                facts = {"client": i, "clients": self.clients, "coded": describe_coded(whole, set(codecs))}
                facts["level"] = self.engine.able.ranked.level(r.server, i)
                requests[i] = facts, {"down": tree.contiguous(coded)}
        return shared, requests, declared, downs

    def _declare(self, t: int, i: int, down: Tree) -> Declared:
        """What client i's upload must look like; found out once per capacity and shape of the download."""
        capacity = self.record.capacity(i)
        known = f"{capacity!r} {wire.schema(down)} {wire.schema(self.record.common)}"
        if known not in self._declared:
            self._declared[known] = declare(self.engine, capacity, t, i, down, self.record.common)
        return self._declared[known]

    def _learn_measures(self, t: int, i: int, whole: Tree, codecs: Mapping[str, Codec]) -> None:
        """Find out the names of the measures that client i has to send; once per capacity, like `_declare`."""
        capacity = self.record.capacity(i)
        if repr(capacity) not in self._measures:
            row, part = tree.stack([self.engine.begin(capacity, i)]), self.experiment.settings.evaluate_part
            down = wire.roundtrip(whole, codecs)[0]
            plain = replace(
                self.engine, judging=EvaluationSettings()
            )  # metrics are for predictions that mean something
            found = plain.evaluate(capacity, t, [i], row, down, {}, self.record.common, part)
            self._measures[repr(capacity)] = frozenset(found.sums)

    def _exchange(
        self,
        do: str,
        t: int,
        requests: Mapping[int, Request],
        check: Check,
        *,
        enough: int,
        ledger: Ledger,
        quotas: Mapping[int, int] = MappingProxyType({}),
    ) -> Exchange:
        """Ask, and collect until enough answers are good or the deadline has come."""
        exchange = Exchange(
            self.grid, self.roster, self.record, do, t, requests, check, ledger, self.log, quotas, self.live
        )
        exchange.run(enough, self.policy.deadline, self.policy.poll)
        for i, why in exchange.missing.items():
            if why.startswith(REPORTS) and self._reported.get(i) != why:  # said once, not in every round
                self._reported[i] = why
                self.log(f"Round {t}: client {self.roster.names[i]}: {why}")
        return exchange

    # ------------------------------------------------------------------------------------------------ who is there

    def _node(self, i: int) -> dict[str, Any]:
        """What the server knows of client i's node."""
        known: dict[str, Any] = self.record.progress.deployed["nodes"][str(i)]
        return known

    def _known(self, i: int) -> bool:
        return {"examples", "held_out"} <= self._node(i).keys()

    def _examples(self, i: int) -> int:
        return int(self._node(i)["examples"])

    def ready(self) -> None:
        """Wait until a quorum of nodes is there, and learn how many examples each has; that is asked for once."""
        need = max(1, math.ceil(self.policy.quorum * self.clients - 1e-9))
        end = time.monotonic() + self.policy.wait
        first = not any(self._known(i) for i in range(self.clients))
        while True:
            self.roster = self.live()  # a node may be admitted while the others are waited for
            filled = self.clients - len(self.roster.absent)
            there = set(self.grid.get_node_ids()) & set(self.roster.nodes)
            if len(there) >= max(filled, need) or (len(there) >= need and (not first or time.monotonic() > end)):
                break
            if time.monotonic() > end:
                self.log(f"{len(there)} of {self.clients} nodes are connected; {need} are needed.")
                break
            time.sleep(self.policy.poll)
        new = [i for i in range(self.clients) if self.roster.nodes[i] in there and not self._known(i)]
        if not new:
            return

        agreed = {} if self.agreed is None else {"preprocessing": self.agreed.model_dump()}
        requests: dict[int, Request] = {i: ({"client": i, "clients": self.clients, **agreed}, {}) for i in new}
        t = self.record.progress.round
        exchange = self._exchange("hello", t, requests, self._registered, enough=len(new), ledger=Ledger())
        for i, sizes in exchange.got.items():
            self._node(i).update(sizes)
            self.log(f"Client {self.roster.names[i]}: {sizes['examples']} examples.")
            self.audit("joined", {"round": t, "node": self.roster.names[i], "place": i, **sizes})
        for i, why in exchange.refused.items():
            self._refuse(t, i, why)

    def _registered(self, i: int, answer: HelloAnswer, payload: bytes) -> dict[str, int]:
        """The sizes that a node registers, if its experiment and its examples are those of this server."""
        who, most = f"client {self.roster.names[i]}", self.policy.most_examples
        if answer.experiment != self.experiment.key:
            raise Refused(f"{who}: its experiment is another one; install the same fedspan there.")
        sizes = {"examples": answer.examples, "held_out": answer.held_out}
        if max(sizes.values()) > most:
            raise Refused(f"{who}: it must have at most {most} examples. Got {max(sizes.values())}.")
        if DataKind(tuple(answer.shape), answer.classes, answer.dtype, tuple(answer.label)) != self.kind:
            raise Refused(f"{who}: its examples must be like {self.kind.facts()}.")
        return sizes

    def _named(self, whys: Mapping[int, str]) -> dict[str, str]:
        return {self.roster.names[i]: why for i, why in whys.items()}

    def _refuse(self, t: int, i: int, why: str) -> None:
        self._node(i)["refused"] += 1
        self.refusals[: 1 - _REFUSALS] = []
        self.refusals.append({"round": t, "client": self.roster.names[i], "why": why})
        self.log(f"Round {t}: refused. {why}")
        self.audit("refused", {"round": t, "node": self.roster.names[i], "why": why})
