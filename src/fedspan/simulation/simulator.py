"""Rounds on one machine: sample, map in chunks over workers, average, evaluate, checkpoint."""

from __future__ import annotations

import copy
import importlib
import math
import os
import platform
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspan import __version__, tree, wire
from fedspan.data.describe import label_counts
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError, Divergence
from fedspan.learn.aggregate import Mean
from fedspan.learn.class_features import class_matrix
from fedspan.learn.task import Task
from fedspan.method import Capacity, Federation, Method
from fedspan.method.fields import build, flat, with_keys
from fedspan.methods import name_of
from fedspan.randomness import generator
from fedspan.simulation import evaluation
from fedspan.simulation.devices import Clock, Cost, Devices, largest, measure
from fedspan.simulation.driver import advance, in_order, partial_sum, watch
from fedspan.simulation.engine import Engine, choose_mapping, chunk_size
from fedspan.simulation.record import Progress, Record
from fedspan.simulation.result import Result
from fedspan.simulation.settings import Settings, dropped, sample
from fedspan.simulation.workers import Executor, InProcess, Job, Meta, executor_of
from fedspan.tree import Tree

LABEL_CELLS = 100_000  # clients times classes; beyond that a picture would show nothing, and the result would swell
MATRIX_CLIENTS = 100  # beyond that a matrix over the clients would swell every line of the metrics

OnRound = Callable[[dict[str, Any]], None]


class Simulation:
    """A run: a method on a task and a federation's data. `run()` does what is left to do.

    Args:
        out: the run directory; a run found there is resumed, unless `fresh`.
        config: the configuration to keep with the results.
        read_only: only look at a run that is there; nothing is locked or written.
        devices: what clients would compute with; rounds are then timed as if on them (`clock` in the history).
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        data: FederatedData,
        *,
        rounds: int,
        seed: int = 0,
        settings: Settings | None = None,
        out: Path | None = None,
        fresh: bool = False,
        config: dict[str, Any] | None = None,
        read_only: bool = False,
        devices: Devices | None = None,
    ) -> None:
        for name, value in (("rounds", rounds), ("seed", seed)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"Simulation: {name} must be an integer >= 0. Got {value!r}.")
        s = self.settings = settings or Settings()
        self.method, self.task, self.rounds, self.seed, self.out = method, task, rounds, seed, out
        self.dtype = s.torch_dtype
        self.data = data.to(self.dtype)
        check(method, task, self.data, s)
        size = None if s.batch_size == "full" else s.batch_size
        steps = s.epochs * (1.0 if size is None else math.ceil(float(np.mean(self.data.sizes)) / size))
        self.mapping = choose_mapping(task, s.mapping, steps)
        # Logits of a row are as many as tokens times the vocabulary: no more rows at once than in training.
        held_out = {"evaluation_batch": min(size or 512, 512)} if task.kind == "language" else {}
        self.engine = Engine(method, task, self.data, seed, size, s.epochs, self.mapping, **held_out)
        self.capacity = tuple(self.engine.able.capacity(task, i) for i in range(self.data.clients))
        federation = Federation(self.data.clients, seed, self.capacity, self.data.groups)
        self.parameters = sum(p.numel() for p in task.init().values())
        self.config = config or {"method": {"name": name_of(method), **flat(method)}, "rounds": rounds}
        kept = {k: v for k, v in self.config.items() if k not in ("train", "rounds", "methods", "method", "name")}
        self.record = Record(self.engine, federation, s, config=kept, out=out, fresh=fresh, read_only=read_only)
        for _ in range(self.record.progress.halvings):
            self._halve()
        self.capacities = self.record.capacities
        if self.record.resumed:
            done = self.record.progress.round
            self.messages.append(f"Resuming {out} after round {done}; {max(0, rounds - done)} of {rounds} are left.")
        self.clock: Clock | None = None
        if devices is not None and devices.timed:
            self.clock = Clock(devices, self._cost)
        self.pool: Executor = InProcess(self._handle)
        self._busy = False
        self._down: dict[Capacity, float] = {}  # bytes that one client of a capacity last received
        self._last: tuple[dict[str, list[float | None]], dict[str, Any], int] | None = None

    @property
    def messages(self) -> list[str]:
        """What a person should be told: resumption, damage found, step sizes halved."""
        return self.record.messages

    # ------------------------------------------------------------------------------------------------ rounds

    def run(self, on_round: OnRound | None = None) -> Result:
        """Do the rounds that are left, evaluate, and return the result.

        Raises:
            Divergence: if training leaves the finite numbers; the last good state has been saved.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that the numbers are the same in this process and in every worker
        workers = self.settings.workers or len(os.sched_getaffinity(0))
        if workers > 1 and self.mapping == "vmap":
            # torch.func.grad imports this when first called, which takes seconds: once here, not in every worker.
            importlib.import_module("torch._dynamo")
        try:
            with closing(executor_of(self._handle, workers)) as self.pool:
                while self.record.progress.round < self.rounds:
                    with _finish_first() as interrupted:
                        line = self._step()
                    if on_round is not None:
                        on_round(line)
                    if interrupted:
                        raise KeyboardInterrupt
                if self._last is None:  # a run of no rounds, or one that was finished before
                    self._last = self._evaluate(self.record.progress.round)
            self.record.save(force=True)
            return self._result()
        except KeyboardInterrupt:
            if not self._busy:  # in the middle of a round the last checkpoint is the last consistent state
                self.record.save(force=True)
            raise
        finally:
            torch.set_num_threads(threads)
            self.record.close()

    def _step(self) -> dict[str, Any]:
        """One round with its evaluation; a round that diverges is taken back whole."""
        t = self.record.progress.round + 1
        self._busy = True
        while True:
            back = self._remember()
            start = time.perf_counter()
            try:
                line = self._round(t)
                progress = self.record.progress
                progress.round = t
                line["seconds"] = time.perf_counter() - start
                progress.seconds["train"] += line["seconds"]
                if t % self.settings.evaluate_every == 0 or t == self.rounds:
                    line |= self._measure(t)
                    line["bytes"]["evaluate"] = progress.totals["evaluate"] - back[2].totals["evaluate"]
                break
            except Divergence as e:
                self._take_back(back)
                progress = self.record.progress
                if self.settings.on_divergence == "stop" or progress.halvings >= 3:
                    self.record.save(force=True)
                    raise
                progress.halvings += 1
                self._halve()
                progress.notes.append(f"{e} Step sizes halved ({progress.halvings} of 3).")
                self.messages.append(progress.notes[-1])
        self.record.lines.append(line)
        self._busy = False
        self.record.save()
        return line

    def _measure(self, t: int) -> dict[str, Any]:
        """Evaluate, count it, and return what belongs into the round's line."""
        start = time.perf_counter()
        self._last = self._evaluate(t)
        progress = self.record.progress
        progress.totals["evaluate"] += self._last[2]
        progress.seconds["evaluate"] += time.perf_counter() - start
        seen, kept = self.engine.able.observed.monitor(self.record.server), {}
        if self.data.clients <= MATRIX_CLIENTS:
            kept = {k: _rounded(m) for k, m in self.engine.able.observed.matrices(self.record.server).items()}
        return {**self._last[1], **({"monitor": seen} if seen else {}), **({"matrices": kept} if kept else {})}

    def _remember(self) -> tuple[Tree, Tree, Progress]:
        r = self.record
        self._replaced: list[tuple[list[int], Tree]] = []
        return r.server, r.common, copy.deepcopy(r.progress)

    def _take_back(self, before: tuple[Tree, Tree, Progress]) -> None:
        r = self.record
        r.server, r.common, r.progress = before
        for ids, rows in self._replaced:
            r.put(ids, rows)

    def _round(self, t: int) -> dict[str, Any]:
        sampled = sample(self.data.clients, self.settings, self.seed, t)
        lost = dropped(sampled, self.settings, self.seed, t)
        going = [i for i in sampled if not (self.settings.drop == "before" and i in lost)]
        sizes: Counter[str] = Counter()
        now: dict[int, Capacity] = {}
        rows: list[tuple[list[int], Tree, Tree]] = []
        mean, each, weights = Mean(), {}, {}
        up: Counter[Capacity] = Counter()
        for job, meta, answer in self._train(t, going, lost, sizes):
            capacity = self.capacities[job.meta["capacity"]]
            now |= dict.fromkeys(job.meta["ids"], capacity)
            up[capacity] += sum(meta["bytes"].values())
            rows.append((job.meta["ids"], job.data["rows"], answer["rows"]))
            if meta["answered"]:
                mean.add(answer["mean"], sum(meta["weights"]))
            for k, i in enumerate(meta["answered"]):
                weights[i], each[i] = meta["weights"][k], tree.take(answer["each"], k)
        r = self.record
        server, common, told = r.server, r.common, 0
        ids = sorted(weights)
        new_server = advance(
            self.method, server, t, asked=sampled, weights=weights, each=each, mean=mean, sizes=self.data.sizes,
            dtype=self.dtype,
        )  # fmt: skip
        skipped = new_server is None
        if new_server is not None:
            server = new_server
            norm = self._watch(t, server)
            news = self.engine.able.announces.announce(server, t)
            if news is not None:
                common, told = self.engine.able.announces.hear(common, news), tree.nbytes(news) * self.data.clients
            r.progress.last_norm = norm
        # Nothing of the round is kept before all of it is known to be finite.
        for who, old, new in rows:
            self._replaced.append((who, old))
            r.put(who, new)
        r.server, r.common = tree.contiguous(server), tree.contiguous(common)
        total = {d: sum(v for k, v in sizes.items() if k.startswith(d + "/")) for d in ("up", "down")}
        total |= {"announce": told, "meta": 8 * len(ids)}  # meta: the weight of each upload
        r.progress.totals.update(total)
        r.progress.names.update(sizes)
        line = {"round": t, "sampled": len(sampled), "answered": len(ids), "skipped": skipped, "bytes": total}
        return line if self.clock is None else {**line, "clock": self._time(self.clock, now, weights, up)}

    def _time(
        self, clock: Clock, going: dict[int, Capacity], weights: dict[int, float], up: Counter[Capacity]
    ) -> dict[str, Any]:
        """The round on the clients' devices: seconds, since the start, who was last, operations of all together."""
        since = self.record.lines[-1].get("clock", {}).get("total", 0.0) if self.record.lines else 0.0
        if not going:
            return {"seconds": 0.0, "total": since, "slowest": None, "flops": 0.0}
        heard = Counter(going[i] for i in weights)
        sent = {c: self._down[c] + up[c] / max(1, heard[c]) for c in set(going.values())}
        timed = clock.round({i: len(self.data.train[i]) for i in going}, going, sent)
        return {**timed._asdict(), "total": since + timed.seconds}

    def _cost(self, client: int, capacity: Capacity) -> Cost:
        """What a round at a capacity costs, measured on the client with most examples that can afford as much."""
        who = largest(self.data, self.capacity, client)
        level = self.record.levels[who].index(capacity)
        return measure(self.method, self.task, self.data, who, self.settings, level)

    def _train(self, t: int, ids: list[int], lost: set[int], sizes: Counter[str]) -> Iterator[tuple[Job, Meta, Tree]]:
        """Run `client_update` for all of `ids`; yields chunks in a fixed order, whatever the workers do."""
        jobs = self._jobs("train", t, ids, sizes, {i: len(self.data.train[i]) for i in ids})
        for job in jobs:
            job.meta["answering"] = [i not in lost for i in job.meta["ids"]]
        for job, (meta, data) in zip(jobs, self.pool.run(jobs)):
            if meta["bad"]:
                names = ", ".join(self.data.names[i] for i in meta["bad"][:5])
                raise Divergence(f"Simulator: round {t} gave NaN or infinity on client(s) {names}; {self._advice()}")
            sizes.update(meta["bytes"])
            yield job, meta, data

    def _jobs(self, do: str, t: int, ids: list[int], sizes: Counter[str], load: dict[int, int]) -> list[Job]:
        """Cut clients into chunks of one capacity, the largest first so that a chunk wastes little on empty slots."""
        jobs, now = [], {i: self.record.capacity(i) for i in ids}
        for c, capacity in enumerate(self.capacities):
            mine = in_order([i for i in ids if now[i] == capacity], load)
            if not mine:
                continue
            own = self._download(do, t, c, mine, sizes)
            size = chunk_size(self.mapping, len(mine), self.parameters, self.settings.chunk)
            for k in range(0, len(mine), size):
                who = mine[k : k + size]
                data = {"rows": self.record.take(who), "own": tree.take(own, slice(k, k + size))}
                jobs.append(Job({"do": do, "round": t, "capacity": c, "ids": who}, data, f"{do}-{c}"))
        return jobs

    def _download(self, do: str, t: int, c: int, ids: list[int], sizes: Counter[str]) -> Tree:
        """Ask the method for a download, pass it through the codecs, count it, and share it with the workers."""
        down = self.engine.able.download(
            self.record.server, torch.tensor(ids), self.capacities[c], t, use=do == "evaluate"
        )
        codecs = self.engine.able.coded.codecs(t)
        shared, coded = wire.roundtrip(down.shared, codecs)
        own = down.own
        more: dict[str, Tensor] = {}
        if codecs.keys() & own.keys():
            own, more = torch.func.vmap(lambda row: wire.roundtrip(row, codecs))(own)
        alike, single = wire.count(shared, coded), wire.count(own, {k: v.sum() for k, v in more.items()})
        for name, n in alike.items():
            sizes[f"down/{name}"] += n * len(ids)
        for name, n in single.items():
            sizes[f"down/{name}"] += n
        self._down[self.capacities[c]] = sum(alike.values()) + sum(single.values()) / len(ids)
        self.pool.share(f"{do}-{c}", {"shared": shared, "common": self.record.common})
        return own

    def _evaluate(self, t: int) -> tuple[dict[str, list[float | None]], dict[str, Any], int]:
        """Per-client measures with a fresh download for every client, their summaries, and the bytes it would take."""
        chosen = list(range(self.data.clients))
        if self.settings.evaluate_clients is not None and t < self.rounds:
            rng = generator(self.seed, "evaluate", t)
            size = min(len(chosen), self.settings.evaluate_clients)
            chosen = sorted(rng.choice(chosen, size, replace=False).tolist())
        sizes: Counter[str] = Counter()
        clients = self._judge("evaluate", t, chosen, sizes)
        if self.settings.evaluate_after:  # the local round that would come next; its download is the one just counted
            after = self._judge("after", t + 1, chosen, Counter())
            clients |= {f"{k}_after": v for k, v in after.items() if k != "n"}
        found = {k: v for k, v in evaluation.summarise(clients).items() if v}
        if not all(math.isfinite(x) for v in found.values() for x in v.values()):
            raise Divergence(f"Simulator: evaluation after round {t} gave NaN or infinity; {self._advice()}")
        return {"id": list(map(float, chosen)), **clients}, found, sum(sizes.values())

    def _judge(self, do: str, t: int, chosen: list[int], sizes: Counter[str]) -> dict[str, list[float | None]]:
        """Per-client measures of the models that clients use, or have after a local round of their own."""
        part = getattr(self.data, self.settings.evaluate_part)
        load = self.data.train if do == "after" else part
        jobs = self._jobs(do, t, chosen, sizes, {i: len(load[i]) for i in chosen})
        once = do == "evaluate" and self._one_for_all(jobs, [part[i] for i in chosen])
        if once:
            jobs = [replace(jobs[0], meta={**jobs[0].meta, "ids": jobs[0].meta["ids"][:1]})]
        sums: dict[str, dict[int, float]] = {}
        for job, (_, data) in zip(jobs, self.pool.run(jobs)):
            for name, values in data["sums"].items():
                told = dict.fromkeys(chosen, float(values[0])) if once else dict(zip(job.meta["ids"], values.tolist()))
                sums.setdefault(name, {}).update(told)
        return evaluation.per_client({k: np.array([v.get(i, 0.0) for i in chosen]) for k, v in sums.items()})

    def _one_for_all(self, jobs: list[Job], held: Sequence[np.ndarray[Any, Any]]) -> bool:
        """Whether clients have one model and one test set: nothing of their own, no names of their own for classes."""
        if len(self.capacities) > 1 or any(tree.leaves((job.data["rows"], job.data["own"])) for job in jobs):
            return False
        plan = self.engine.able.adapts.personal_plan(self.engine.model(self.capacities[0]))
        return not plan and self.data.relabel is None and all(np.array_equal(rows, held[0]) for rows in held)

    # ------------------------------------------------------------------------------------------------ in the workers

    def _handle(self, meta: Meta, data: Tree, broadcast: Tree) -> tuple[Meta, Tree]:
        """One chunk of clients; runs in a worker process (or in this one)."""
        capacity, ids, t = self.capacities[meta["capacity"]], meta["ids"], meta["round"]
        args = (capacity, t, ids, data["rows"], broadcast["shared"], data["own"], broadcast["common"])
        if meta["do"] in ("evaluate", "after"):
            after = meta["do"] == "after"
            return {}, {"sums": self.engine.evaluate(*args, part=self.settings.evaluate_part, after=after)}
        answer = self.engine.update(*args)
        if not (tree.all_finite(answer.rows) and tree.all_finite(answer.sent)):
            parts = [(i, tree.take((answer.rows, answer.sent), k)) for k, i in enumerate(ids)]
            return {"bad": [i for i, part in parts if not tree.all_finite(part)]}, {}
        heard = torch.tensor([k for k, yes in enumerate(meta["answering"]) if yes], dtype=torch.int64)
        sent = answer.sent if len(heard) == len(ids) else tree.take(answer.sent, heard)
        names = [ids[k] for k in heard.tolist()]
        for i, w in zip(names, sent.weight.tolist()):
            n, bound = len(self.data.train[i]), self.engine.able.weight_bound
            wire.check_upload(
                {}, w, who=f"client {i}", declared={}, kind=self.engine.able.weight, examples=n, bound=bound
            )
        sizes = {f"up/{k}": v for k, v in wire.count(sent.mean | sent.each).items()}
        sizes |= {f"up/{k}": int(v[heard].sum()) for k, v in answer.coded.items()}
        facts = {"bad": [], "answered": names, "weights": sent.weight.tolist(), "bytes": sizes}
        return facts, {
            "rows": answer.rows,
            "mean": partial_sum(self.engine.able, sent, broadcast["shared"], capacity),
            "each": sent.each,
        }

    # ------------------------------------------------------------------------------------------------ guards

    def _watch(self, t: int, server: Tree) -> float:
        """Raise before a state that is not finite, or grows without measure, replaces a good one."""
        p = self.record.progress
        advice = self._advice()
        return watch(
            self.engine.able, t, server, before=p.last_norm, start=p.start_norm, who="Simulator", advice=advice
        )

    def _advice(self) -> str:
        lr = getattr(self.method, "lr", None)
        now = "" if lr is None else f" (now {lr:g})"
        return f"the state before it is kept. Use a smaller lr{now}, or train.on_divergence='halve'."

    def _halve(self) -> None:
        """Halve every step size of the method; workers start anew with it."""
        rates = {k: v for k, v in flat(self.method).items() if k == "lr" or k.startswith("lr_")}
        self.method = with_keys(self.method, **{k: v / 2 for k, v in rates.items() if v is not None})
        self.engine = replace(self.engine, method=self.method)
        if hasattr(self, "pool"):
            self.pool.close()

    # ------------------------------------------------------------------------------------------------ results

    def personal(self, client: int) -> tuple[Task, Tree]:
        """The task and the weights client `client` predicts with now."""
        if not 0 <= client < self.data.clients:
            raise ConfigError(f"Result: client must lie in 0..{self.data.clients - 1}. Got {client}.")
        capacity, t = self.record.capacity(client), self.record.progress.round
        down = self.engine.able.download(self.record.server, torch.tensor([client]), capacity, t, use=True)
        both, _ = wire.roundtrip({**down.shared, **tree.take(down.own, 0)}, self.engine.able.coded.codecs(t))
        weights = self.engine.personal(capacity, t, client, self.record.row(client), both, self.record.common)
        return self.engine.model(capacity), weights

    def _result(self) -> Result:
        assert self._last is not None
        clients, found, _ = self._last
        p = self.record.progress
        result = Result(
            method=name_of(self.method),
            seed=self.seed,
            rounds=p.round,
            accuracy=evaluation.protocols(found, self.record.lines),
            measures=found,
            per_client=clients,
            bytes={**{k: p.totals[k] for k in ("up", "down", "announce", "evaluate", "meta")}, "names": p.by_name()},
            seconds=dict(p.seconds),
            config=self.config,
            versions=versions(),
            mapping=self.mapping,
            curve=self.record.lines,
            digest=self.record.digest(),
            messages=self.messages,
            names=self.data.names,
            groups=None if self.data.groups is None else self.data.groups.tolist(),
            labels=self._labels(),
            capacities=[str(c) for c in self.capacity] if len(set(self.capacity)) > 1 else None,
            simulation=self,
        )
        if self.out is not None:
            result.write(self.out)
        return result

    def _labels(self) -> list[list[int]] | None:
        """Who holds how many of which class, unless there are none, or too many to be looked at."""
        classes = self.data.classes
        if classes is None or self.task.kind == "language" or self.data.clients * classes > LABEL_CELLS:
            return None
        counts: list[list[int]] = label_counts(self.data).tolist()
        return counts


def simulate(
    method: Method,
    model: nn.Module | Task | Callable[[], nn.Module],
    clients: FederatedData | Sequence[tuple[Any, Any]],
    *,
    rounds: int,
    seed: int = 0,
    out: str | Path | None = None,
    fresh: bool = False,
    on_round: OnRound | None = None,
    **settings: Any,
) -> Result:
    """Simulate a federation on this machine.

    Args:
        model: a module (its weights are the common start), a function that builds one (seeded by `seed`), or a `Task`.
        clients: `FederatedData`, or one (x, y) pair per client, split 75/25 inside each client.
        out: a run directory; a run found there is resumed, unless `fresh`.
        settings: fields of `Settings`, e.g. `participation=0.1, batch_size=256`.
    """
    data = clients if isinstance(clients, FederatedData) else FederatedData.from_arrays(clients, seed=seed)
    chosen = build(Settings, settings, "simulate")
    if not isinstance(model, Task):
        dtype = chosen.torch_dtype
        kind = "regression" if data.classes is None else "classification"
        model = Task(model, kind, dtype=dtype, seed=None if isinstance(model, nn.Module) else seed)  # type: ignore[arg-type]
    path = None if out is None else Path(out)
    sim = Simulation(method, model, data, rounds=rounds, seed=seed, settings=chosen, out=path, fresh=fresh)
    return sim.run(on_round)


def check(method: Method, task: Task, data: FederatedData, settings: Settings) -> None:
    """Refuse what cannot run, before anything runs."""
    if task.stats and settings.batch_size == 1:
        raise ConfigError("Train: batch_size must be at least 2 with batch normalisation. Got 1; or use GroupNorm.")
    if method.about.needs_groups and data.groups is None:
        raise ConfigError(
            f"{type(method).__name__}: the partition must know the groups of its clients; use permuted-groups,"
            " label-groups or domains, or choose another method."
        )
    if settings.evaluate_part == "validation" and not any(len(v) for v in data.validation):
        raise ConfigError("Train: evaluate_part='validation' needs a validation part: set partition.validation > 0.")
    if task.kinds and not method.about.any_model:
        raise ConfigError(
            f"{type(method).__name__}: all clients must have models of one kind. Got {', '.join(task.kinds)}; use a"
            " method that shares no models of theirs, such as fedproto, fedtgp or fedkd."
        )
    for member in task.kinds.values() or [task]:
        _try(member, data)
    if method.about.needs_classes:
        class_matrix(task, type(method).__name__)


def _try(task: Task, data: FederatedData) -> None:
    """Refuse a model that does not take the data or does not give what they need."""
    x = data.x[torch.from_numpy(data.train[0][:1])]
    try:
        output = task.predict(task.init(), x)
    except (RuntimeError, ValueError, IndexError, TypeError) as e:
        raise ConfigError(f"Task: the model does not take examples of shape {tuple(x.shape[1:])}: {e}") from None
    wide = output.shape[1] if output.ndim == 2 else 0
    if task.kind == "classification":
        if data.classes is None or data.y.is_floating_point():
            raise ConfigError(f"Data: class labels must be integers. Got {data.y.dtype}; or use a regression task.")
        if wide < data.classes:
            raise ConfigError(f"Task: the model must have at least {data.classes} outputs, one per class. Got {wide}.")
    if task.kind == "language" and (output.ndim != 3 or data.y.shape != data.x.shape or data.y.is_floating_point()):
        raise ConfigError(
            f"Task: a language model must turn rows of tokens into rows of logits, with labels of the rows' shape"
            f" {tuple(data.x.shape[1:])}. Got outputs of shape {tuple(output.shape[1:])} and labels of"
            f" {tuple(data.y.shape[1:])}."
        )
    if task.kind == "regression" and output[0].numel() != data.y[0].numel():
        raise ConfigError(f"Task: the model must have {data.y[0].numel()} output(s). Got {output[0].numel()}.")


@contextmanager
def _finish_first() -> Iterator[list[bool]]:
    """Let Ctrl-C wait for the end of the block; a second one does not wait. Outside the main thread nothing changes."""
    pressed: list[bool] = []

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)
        print("Stopping after this round; press Ctrl-C again to stop at once.", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _rounded(matrix: Tensor) -> list[list[float | None]]:
    """A matrix for a line of the metrics: four digits are enough to draw it, and JSON has no NaN."""
    return [[round(v, 4) if math.isfinite(v) else None for v in row] for row in matrix.tolist()]


def versions() -> dict[str, str]:
    """What the numbers depend on besides the configuration."""
    return {
        "fedspan": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
    }
