"""The server of a deployment: it drives Flower's grid itself, one message per client, round by round.

Flower's strategies carry one record for all, have no resume, and end the run at one bad reply. Here every node is asked
for itself, a round ends at its deadline, a bad answer costs its sender only, and a new run goes on from the checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor

from fedspan import tree, wire
from fedspan.deploy.envelope import Facts, seal, unseal
from fedspan.deploy.experiment import DataKind, Experiment, stand_in
from fedspan.deploy.node.node import describe_coded
from fedspan.deploy.policy import Policy
from fedspan.deploy.server.admission import Declared, admit, declare, norm_of, too_large
from fedspan.errors import Divergence, Refused
from fedspan.learn.aggregate import Mean
from fedspan.method import Sent
from fedspan.methods import name_of
from fedspan.randomness import generator
from fedspan.simulation import evaluation
from fedspan.simulation.driver import advance, in_order, partial_sum, stacked, watch
from fedspan.simulation.record import Record
from fedspan.simulation.result import Result
from fedspan.simulation.settings import sample
from fedspan.simulation.simulator import versions
from fedspan.storage.atomic import write_whole
from fedspan.tree import Tree

_MEASURES = {"n", "loss", "accuracy", "squared_error"}
_NORMS = 200  # of accepted uploads that are remembered
_TYPES = {"hello": "query", "train": "train", "evaluate": "evaluate"}

Checked = Callable[[int, Facts, bytes], Any]


@dataclass(frozen=True)
class Roster:
    """Which node is which client: `nodes[i]` is the id of client i's node, as it was registered by its key."""

    nodes: tuple[int, ...]
    names: tuple[str, ...]
    groups: Tensor | None = None


class Server:
    """One run on a grid; `run()` does what is left to do.

    Args:
        kind: what examples look like.
        out: the run directory; a run found there is resumed, unless `fresh`.
        log: told one line at a time what happens.
    """

    def __init__(
        self,
        experiment: Experiment,
        kind: DataKind,
        grid: Grid,
        roster: Roster,
        *,
        terms: Policy | None = None,
        out: Path | None = None,
        fresh: bool = False,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.experiment, self.kind, self.grid, self.roster = experiment, kind, grid, roster
        self.terms, self.out, self.log = terms or Policy(), out, log
        self.method, self.clients = experiment.method, len(roster.nodes)
        self.dtype = experiment.settings.torch_dtype
        self.engine = experiment.engine(stand_in(kind, self.clients, experiment.seed))
        federation = experiment.federation(self.clients, roster.groups)
        config = {k: v for k, v in experiment.config.items() if k not in ("train", "rounds", "methods", "method")}
        config |= {"name": None, "nodes": list(map(str, roster.nodes))}
        self.record = Record(
            self.engine, federation, experiment.settings, config=config, out=out, fresh=fresh, clients=False
        )
        known = self.record.progress.deployed
        known.setdefault("lineage", uuid.uuid4().hex)
        known.setdefault("told", 0)
        known.setdefault("norms", [])
        known.setdefault("nodes", {str(i): {"heard": 0, "answered": 0, "refused": 0} for i in range(self.clients)})
        self._declared: dict[str, Declared] = {}
        self._last: tuple[dict[str, list[float | None]], dict[str, Any]] | None = None
        self.refusals: list[dict[str, Any]] = []

    # ------------------------------------------------------------------------------------------------ rounds

    def run(self, on_round: Callable[[dict[str, Any]], None] | None = None) -> Result:
        """Do the rounds that are left, evaluate, and return the result.

        Raises:
            Divergence: if training leaves the finite numbers; the last good state has been saved.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        progress, rounds = self.record.progress, self.experiment.rounds
        try:
            if self.record.resumed:
                self.log(f"Resuming after round {progress.round}.")
            self._status("waiting")
            while progress.round < rounds:
                self._register()
                t, start = progress.round + 1, time.monotonic()
                line = self._round(t)
                progress.round = t
                line["seconds"] = time.monotonic() - start
                progress.seconds["train"] += line["seconds"]
                if t % self.experiment.settings.evaluate_every == 0 or t == rounds:
                    line |= self._measure(t, line)
                self.record.lines.append(line)
                self.record.save(force=True)  # messages cost seconds: a checkpoint after every round is cheap
                self._status("running")
                self.log(_said(line, rounds))
                if on_round is not None:
                    on_round(line)
            if self._last is None:
                self._register()
                self._last = self._evaluate(progress.round, Counter())
            self.record.save(force=True)
            result = self._result()
            self._status("finished")
            return result
        except BaseException:
            self._status("stopped")
            raise
        finally:
            torch.set_num_threads(threads)
            self.record.close()

    def _round(self, t: int) -> dict[str, Any]:
        wanted = sample(self.clients, self.experiment.settings, self.experiment.seed, t)
        asked = self._more(wanted, t)
        sizes: Counter[str] = Counter()
        ready = [i for i in asked if self._known(i)]
        shared, requests, declared = self._requests("train", t, ready, sizes)
        codecs = self.engine.able.coded.codecs(t)

        def check(i: int, facts: Facts, payload: bytes) -> Sent:
            return admit(
                facts,
                payload,
                who=f"client {self.roster.names[i]}",
                able=self.engine.able,
                declared=declared[i],
                codecs=codecs,
                examples=self._examples(i),
                dtype=self.dtype,
            )

        got, refused, missing = self._exchange("train", t, requests, check, enough=len(wanted), sizes=sizes)
        missing |= {i: "it has not said how many examples it has" for i in asked if not self._known(i)}
        refused |= self._outliers(got)
        for i, why in refused.items():
            self._refuse(t, i, why)
        line: dict[str, Any] = {"round": t, "sampled": len(wanted), "answered": len(got)}
        line |= {"refused": {self.roster.names[i]: why for i, why in refused.items()}}
        line |= {"missing": {self.roster.names[i]: why for i, why in missing.items()}}
        enough = len(got) >= max(1, math.ceil(self.terms.quorum * len(wanted) - 1e-9))
        told = self._conclude(t, asked, got, shared, sizes) if enough else None
        total = {d: sum(v for k, v in sizes.items() if k.startswith(d + "/")) for d in ("up", "down")}
        total |= {"announce": sizes["announce"], "meta": 8 * len(got), "wire": sizes["wire"]}
        p = self.record.progress
        p.totals.update(total)
        p.names.update({k: v for k, v in sizes.items() if "/" in k})
        return {**line, "skipped": told is None, "bytes": total}

    def _conclude(
        self, t: int, asked: Sequence[int], got: Mapping[int, Sent], shared: list[Tree], sizes: Counter[str]
    ) -> bool | None:
        """Average, step, look at the new state, announce; None if nothing of weight came."""
        mean, r = Mean(), self.record
        examples = {i: self._examples(i) for i in got}
        now = {i: r.capacity(i) for i in got}
        for c, capacity in enumerate(r.capacities):
            for i in in_order([i for i in got if now[i] == capacity], examples):
                mean.add(partial_sum(self.engine.able, stacked(got[i]), shared[c], capacity), float(got[i].weight))
        server = advance(
            self.method,
            r.server,
            t,
            asked=asked,
            weights={i: float(s.weight) for i, s in got.items()},
            each={i: s.each for i, s in got.items()},
            mean=mean,
            sizes=np.array([self._examples(i) if self._known(i) else 0 for i in range(self.clients)], np.int64),
            dtype=self.dtype,
        )
        if server is None:
            return None
        p = r.progress
        advice = "the state before it is kept. Use a smaller lr."
        try:
            norm = watch(
                self.engine.able, t, server, before=p.last_norm, start=p.start_norm, who="Server", advice=advice
            )
        except Divergence:
            r.save(force=True)
            raise
        news = self.engine.able.announces.announce(server, t)
        if news is not None:
            r.common = tree.contiguous(self.engine.able.announces.hear(r.common, news))
            p.deployed["told"] += 1
            r.news[str(p.deployed["told"])] = tree.contiguous(news)
            while r.news and tree.nbytes(r.news) > max(tree.nbytes(r.common), tree.nbytes(news)):
                del r.news[min(r.news, key=int)]  # whoever missed that many is sent the whole
        r.server, p.last_norm = tree.contiguous(server), norm
        return True

    def _outliers(self, got: dict[int, Sent]) -> dict[int, str]:
        """Take the uploads out whose norm is beyond measure; the others' norms are remembered."""
        norms = {i: norm_of(s) for i, s in got.items()}
        history = self.record.progress.deployed["norms"]
        refused = {}
        for i, bound in too_large(norms, history, self.terms.norm_factor).items():
            who = f"client {self.roster.names[i]}"
            refused[i] = f"{who}: the upload's norm must be at most {bound:.3g}. Got {norms.pop(i):.3g}."
            del got[i]
        self.record.progress.deployed["norms"] = [*history, *(norms[i] for i in sorted(norms))][-_NORMS:]
        return refused

    def _more(self, wanted: list[int], t: int) -> list[int]:
        """Those wanted and, with over-selection, some more."""
        others = [i for i in range(self.clients) if i not in set(wanted)]
        extra = min(len(others), math.ceil(self.terms.over_selection * len(wanted)))
        if not extra:
            return wanted
        rng = generator(self.experiment.seed, "over-selection", t)
        return sorted([*wanted, *rng.choice(others, extra, replace=False).tolist()])

    # ------------------------------------------------------------------------------------------------ requests

    def _requests(
        self, do: str, t: int, ids: list[int], sizes: Counter[str]
    ) -> tuple[list[Tree], dict[int, tuple[Facts, Tree]], dict[int, Declared]]:
        """What to send to each client, what those of one capacity receive in common, and what uploads must be."""
        r, codecs = self.record, self.engine.able.coded.codecs(t)
        shared: list[Tree] = []
        requests: dict[int, tuple[Facts, Tree]] = {}
        declared: dict[int, Declared] = {}
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
                for name, part in coded.items():
                    sizes[f"down/{name}"] += tree.nbytes(part)
                if do == "train":
                    declared[i] = self._declare(t, i, wire.roundtrip(whole, codecs)[0])
                facts = {"client": i, "clients": self.clients, "coded": describe_coded(whole, set(codecs))}
                facts["level"] = self.engine.able.ranked.level(r.server, i)
                requests[i] = facts, {"down": tree.contiguous(coded)}
        return shared, requests, declared

    def _declare(self, t: int, i: int, down: Tree) -> Declared:
        """What client i's upload must look like; found out once per capacity and shape of the download."""
        capacity = self.record.capacity(i)
        known = f"{capacity!r} {wire.schema(down)} {wire.schema(self.record.common)}"
        if known not in self._declared:
            self._declared[known] = declare(self.engine, capacity, t, i, down, self.record.common)
        return self._declared[known]

    def _with_news(self, i: int, facts: Facts, payload: Tree, heard: int, sizes: Counter[str]) -> tuple[Facts, Tree]:
        """A request with the announcements that client i has not heard, or the whole state where that is less."""
        told, r = self.record.progress.deployed["told"], self.record
        numbers = [str(k) for k in range(heard + 1, told + 1)]
        facts = facts | {"told": told, "base": heard, "whole": False}
        if 0 <= heard <= told and all(k in r.news for k in numbers):
            news = {k: r.news[k] for k in numbers}
            if tree.nbytes(news) <= tree.nbytes(r.common) or not news:
                sizes["announce"] += tree.nbytes(news)
                return facts, payload | {"news": news}
        sizes["announce"] += tree.nbytes(r.common)
        return facts | {"whole": True}, payload | {"common": r.common}

    # ------------------------------------------------------------------------------------------------ the exchange

    def _exchange(
        self,
        do: str,
        t: int,
        requests: Mapping[int, tuple[Facts, Tree]],
        check: Checked,
        *,
        enough: int,
        sizes: Counter[str],
    ) -> tuple[dict[int, Any], dict[int, str], dict[int, str]]:
        """Ask, and collect until enough answers are good or the deadline has come: good, refused, missing."""
        deployed = self.record.progress.deployed
        there = set(self.grid.get_node_ids())
        end = time.monotonic() + self.terms.deadline
        pending: dict[int, str] = {}
        got: dict[int, Any] = {}
        refused: dict[int, str] = {}
        missing = {i: "its node is not connected" for i in requests if self.roster.nodes[i] not in there}

        def ask(i: int, heard: int) -> None:
            facts, payload = self._with_news(i, *requests[i], heard, sizes)
            facts |= {"do": do, "round": t, "lineage": deployed["lineage"]}
            packed = wire.pack(payload)
            sizes["wire"] += len(packed)
            ttl = max(1.0, end - time.monotonic())
            content = seal(facts, packed)
            node = self.roster.nodes[i]
            message = Message(content, node, _TYPES[do], group_id=str(t), ttl=ttl)
            numbers = list(self.grid.push_messages([message]))
            if not numbers or not numbers[0]:
                missing[i] = "its message could not be sent"
            else:
                pending[i] = numbers[0]

        for i in requests:
            if i not in missing:
                ask(i, deployed["nodes"][str(i)]["heard"])
        again: set[int] = set()
        over = False
        while pending and len(got) < enough and not over:
            over = time.monotonic() >= end  # then one last look: what has come in time counts
            for i in list(pending):
                reply = self._pull(pending[i])
                if reply is None:
                    continue
                del pending[i]  # the one vote of this client in this round
                if isinstance(reply, str):
                    missing[i] = reply
                    continue
                if isinstance(reply, Refused):
                    refused[i] = f"client {self.roster.names[i]}: {reply}"
                    continue
                try:
                    facts, payload = self._opened(i, do, t, reply, sizes)
                    if facts.get("status") == "stale" and i not in again:
                        again.add(i)
                        ask(i, -1)
                        continue
                    got[i] = check(i, facts, payload)
                    if isinstance(facts.get("heard"), int):
                        deployed["nodes"][str(i)]["heard"] = facts["heard"]
                    deployed["nodes"][str(i)]["answered"] += do == "train"
                    if facts.get("ahead"):
                        self.log(f"Client {self.roster.names[i]} goes on from a later round than the server's.")
                    if do == "train":
                        for name, n in _upload_sizes(payload).items():
                            sizes[f"up/{name}"] += n
                except Refused as e:
                    refused[i] = str(e)
            if pending and len(got) < enough and not over:
                time.sleep(self.terms.poll)
        late = "not needed any more" if len(got) >= enough else "no answer before the deadline"
        missing |= dict.fromkeys(pending, late)
        return got, refused, missing

    def _pull(self, number: str) -> Message | Refused | str | None:
        """The answer to one message; why it cannot be read; why there will be none; None if it is not there yet.

        One at a time: a reply that cannot be read must not cost the others theirs.
        """
        try:
            replies = list(self.grid.pull_messages([number]))
        except (httpx.HTTPError, OSError):
            raise  # the connection to the SuperLink, not a reply
        except Exception as e:
            return Refused(f"its reply cannot be read ({type(e).__name__}).")
        if not replies:
            return None
        if replies[0].has_error():
            return f"its node reports: {str(replies[0].error.reason)[:300]}"
        return replies[0]

    def _opened(self, i: int, do: str, t: int, reply: Message, sizes: Counter[str]) -> tuple[Facts, bytes]:
        who = f"client {self.roster.names[i]}"
        meta = reply.metadata
        if meta.src_node_id != self.roster.nodes[i]:
            raise Refused(f"{who}: the answer comes from another node, {meta.src_node_id}.")
        try:
            facts, payload = unseal(reply.content)
        except Refused as e:
            raise Refused(f"{who}: {e}") from None
        sizes["wire"] += len(payload)
        if facts.get("round") != t or facts.get("do") != do or meta.group_id != str(t):
            raise Refused(f"{who}: the answer must belong to round {t}. Got {str(facts.get('round'))[:20]}.")
        return facts, payload

    # ------------------------------------------------------------------------------------------------ who is there

    def _known(self, i: int) -> bool:
        return "examples" in self.record.progress.deployed["nodes"][str(i)]

    def _examples(self, i: int) -> int:
        return int(self.record.progress.deployed["nodes"][str(i)]["examples"])

    def _register(self) -> None:
        """Wait until a quorum of nodes is there, and learn how many examples each has; that is asked for once."""
        need = max(1, math.ceil(self.terms.quorum * self.clients - 1e-9))
        end = time.monotonic() + self.terms.wait
        first = not any(self._known(i) for i in range(self.clients))
        while True:
            there = set(self.grid.get_node_ids()) & set(self.roster.nodes)
            if len(there) == self.clients or (len(there) >= need and (not first or time.monotonic() > end)):
                break
            if time.monotonic() > end:
                self.log(f"{len(there)} of {self.clients} nodes are connected; {need} are needed.")
                break
            time.sleep(self.terms.poll)
        new = [i for i in range(self.clients) if self.roster.nodes[i] in there and not self._known(i)]
        if not new:
            return

        def check(i: int, facts: Facts, payload: bytes) -> int:
            who, n = f"client {self.roster.names[i]}", facts.get("examples")
            if facts.get("experiment") != self.experiment.key:
                raise Refused(f"{who}: its experiment is another one; install the same fedspan there.")
            if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= self.terms.most_examples:
                raise Refused(f"{who}: it must have 1..{self.terms.most_examples} examples. Got {str(n)[:20]}.")
            if {k: facts.get(k) for k in ("shape", "classes", "dtype")} != self.kind.facts():
                raise Refused(f"{who}: its examples must be like {self.kind.facts()}.")
            return n

        requests: dict[int, tuple[Facts, Tree]] = {i: ({"client": i, "clients": self.clients}, {}) for i in new}
        t = self.record.progress.round
        got, refused, _ = self._exchange("hello", t, requests, check, enough=len(new), sizes=Counter())
        for i, n in got.items():
            self.record.progress.deployed["nodes"][str(i)]["examples"] = n
            self.log(f"Client {self.roster.names[i]}: {n} examples.")
        for i, why in refused.items():
            self._refuse(t, i, why)

    def _refuse(self, t: int, i: int, why: str) -> None:
        self.record.progress.deployed["nodes"][str(i)]["refused"] += 1
        self.refusals.append({"round": t, "client": self.roster.names[i], "why": why})
        self.log(f"Round {t}: refused. {why}")

    # ------------------------------------------------------------------------------------------------ evaluation

    def _measure(self, t: int, line: dict[str, Any]) -> dict[str, Any]:
        start, sizes = time.monotonic(), Counter[str]()
        self._last = self._evaluate(t, sizes)
        p = self.record.progress
        sent = sum(v for k, v in sizes.items() if k.startswith("down/"))
        p.totals["evaluate"] += sent
        p.totals["wire"] += sizes["wire"]
        line["bytes"]["evaluate"] = sent
        p.seconds["evaluate"] += time.monotonic() - start
        seen = self.engine.able.observed.monitor(self.record.server)
        return {**self._last[1], **({"monitor": seen} if seen else {})}

    def _evaluate(self, t: int, sizes: Counter[str]) -> tuple[dict[str, list[float | None]], dict[str, Any]]:
        """Every connected node measures its personal model on its own held-out part; only sums come back."""
        ids = [i for i in range(self.clients) if self._known(i)]
        requests = self._requests("evaluate", t, ids, sizes)[1]
        part = self.experiment.settings.evaluate_part
        requests = {i: (facts | {"part": part}, payload) for i, (facts, payload) in requests.items()}

        def check(i: int, facts: Facts, payload: bytes) -> dict[str, float]:
            who, sums = f"client {self.roster.names[i]}", facts.get("sums")
            fine = isinstance(sums, dict) and "n" in sums and sums.keys() <= _MEASURES
            numbers = list(sums.values()) if fine and isinstance(sums, dict) else [None]
            if not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in numbers):
                raise Refused(f"{who}: its measures must be finite sums of {', '.join(sorted(_MEASURES))}.")
            assert isinstance(sums, dict)
            if sums["n"] > self.terms.most_examples or sums.get("accuracy", 0) > sums["n"]:
                raise Refused(f"{who}: more is right than it has examples.")
            return {k: float(v) for k, v in sums.items()}

        got, refused, _ = self._exchange("evaluate", t, requests, check, enough=len(requests), sizes=sizes)
        for i, why in refused.items():
            self._refuse(t, i, why)
        names = sorted({k for sums in got.values() for k in sums} | {"n"})
        everyone = range(self.clients)
        sums = {k: np.array([got.get(i, {}).get(k, 0.0) for i in everyone], np.float64) for k in names}
        clients = evaluation.per_client(sums)
        found = {k: v for k, v in evaluation.summarise(clients).items() if v}
        return {"id": list(map(float, everyone)), **clients}, found

    # ------------------------------------------------------------------------------------------------ results

    def _result(self) -> Result:
        assert self._last is not None
        clients, found = self._last
        p, lines = self.record.progress, self.record.lines
        counted = ("up", "down", "announce", "evaluate", "meta", "wire")
        result = Result(
            method=name_of(self.method),
            seed=self.experiment.seed,
            rounds=p.round,
            accuracy=evaluation.protocols(found, lines),
            measures=found,
            per_client=clients,
            bytes={**{k: p.totals[k] for k in counted}, "names": p.by_name()},
            seconds=dict(p.seconds),
            config=self.experiment.config,
            versions=versions(),
            mapping="flower",
            curve=lines,
            digest=tree.digest({"server": self.record.server, "common": self.record.common}),
            messages=self.record.messages,
            names=list(self.roster.names),
            groups=None if self.roster.groups is None else self.roster.groups.tolist(),
        )
        if self.out is not None:
            result.write(self.out)
        return result

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
            "rounds": self.experiment.rounds,
            "seconds": lines[-1]["seconds"] if lines else None,
            "answered": lines[-1]["answered"] if lines else None,
            "accuracy": (evaluated[-1].get("accuracy") or {}).get("mean") if evaluated else None,
            "loss": (evaluated[-1].get("loss") or {}).get("mean") if evaluated else None,
            "bytes": dict(p.totals),
            "nodes": {
                name: p.deployed["nodes"][str(i)] | {"id": str(self.roster.nodes[i])}
                for i, name in enumerate(self.roster.names)
            },
            "refused": self.refusals[-20:],
        }
        write_whole(self.out / "status.json", json.dumps(body, indent=1) + "\n")


def _upload_sizes(payload: bytes) -> dict[str, int]:
    """Bytes per top-level name of an accepted upload, as it was written."""
    brought = wire.unpack(payload)
    return wire.count({k: v for part in ("mean", "each") for k, v in brought.get(part, {}).items()})


def _said(line: Mapping[str, Any], rounds: int) -> str:
    """A round in one line."""
    found = line.get("accuracy")
    shown = f", accuracy {100 * found['mean']:.2f} %" if found else ""
    skipped = ", skipped" if line["skipped"] else ""
    who = f"{line['answered']} of {line['sampled']} answered"
    return f"Round {line['round']} of {rounds}: {who}{skipped}{shown}, {line['seconds']:.1f} s."
