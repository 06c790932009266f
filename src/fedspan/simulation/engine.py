"""Runs the one-client functions of a method for a chunk of clients: all at once by `vmap`, or one after another."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedspan import tree, wire
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError, FedspanError
from fedspan.learn import accelerator
from fedspan.learn.batches import SHUFFLED, Amount, Batch, Batches, Epochs, Index, KeyedTransform, draw, pad, rows_of
from fedspan.learn.folded import folding, has_folded_form
from fedspan.learn.frozen_body import FrozenBody
from fedspan.learn.metrics import UndefinedMetric
from fedspan.learn.precision import Precision, training_in
from fedspan.learn.sgd import gradient, sgd
from fedspan.learn.task import Task
from fedspan.method import Abilities, Capacity, ClientInfo, Method, Sent, Visit
from fedspan.method.promises import ChunkWatch, SameShapes, need_tensors
from fedspan.randomness import key
from fedspan.simulation.protocols import RECEIVED, EvaluationSettings, JudgedModel
from fedspan.tree import Inputs, Params, Tree

Way: TypeAlias = Literal["vmap", "folded", "loop"]
"""How the clients of a chunk are computed: mapped, folded into the batch axis, or one after another."""

SMALL_MODEL = 20_000
"""Up to this many parameters mapping wins clearly: the work of one client is smaller than the cost of asking for it."""

MIDDLE_MODEL = 1_000_000
"""Up to this many, perceptrons are folded; mapping still wins for others where a visit has no more than two steps."""

AT_ONCE = 2_400_000
"""Parameters of the clients of a folded chunk together: what a processor's caches hold."""


AT_ONCE_ON_A_DEVICE = 250_000_000
"""Parameters of the clients of a chunk on an accelerator: 1 GB for each copy of them in float32."""


TRAINING = "before "
"""Marks the streams of the local round that comes before a use of the model."""


HEAD_FIT = "head fit"
"""The stream by which the head of a received model is fitted before it is judged."""


@dataclass(frozen=True)
class Answer:
    """What a chunk of clients gave: rows to keep, uploads, bytes of coded parts; all stacked in the order of ids."""

    rows: Tree
    sent: Sent
    coded: dict[str, Tensor]
    raw: Sent | None = None
    """Uploads as they were before the codecs, where they were asked for."""


@dataclass
class EvaluatedChunk:
    """What was measured of a chunk of clients, in the order of ids."""

    sums: dict[str, Tensor]
    """Sums of measures over the examples, and how many there were (`n`)."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Metrics of gathered predictions; NaN for a client that does not define one."""
    left_out: dict[str, dict[int, str]] = field(default_factory=dict)
    """By metric the clients that do not define it, and why."""
    predictions: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """Client, labels and predictions, as metrics take them."""


class AsksWho(RuntimeError):
    """A method wants to know which client it works for."""


class NobodysVisit(Visit):
    """A visit that would be the same at every client: whoever reads what only one client knows is refused."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("key", "examples"):
            raise AsksWho(name)
        return super().__getattribute__(name)


class NoHeadToFit(FedspanError):
    """A method does not predict with one model whose head could be fitted."""


@dataclass
class Engine:
    """A method, its task and the data, ready to run chunks of clients."""

    method: Method
    task: Task
    data: FederatedData
    seed: int
    batch_size: int | None
    epochs: int
    mapping: Way
    evaluation_batch: int = 512
    judging: EvaluationSettings = field(default_factory=EvaluationSettings)
    precision: Precision = "float32"
    """What training passes are computed in; float64 where the task and the data are."""
    device: torch.device = accelerator.HOST
    """What it computes on; task and data are given on the host, and results lie on the device."""

    def __post_init__(self) -> None:
        self._models: dict[Capacity, Task] = {}
        self._there: tuple[Inputs, Tensor, Tensor | None] | None = None
        self._fitting = accelerator.Fitting(self.device)
        self._shapes = SameShapes()
        self.able = Abilities(self.method)
        self._by_rule: dict[str | None, Abilities] = {None: self.able}
        self.metrics = self.judging.found()
        summed = {"rmse", *self.task.summed}
        self.gathered = [m for m in self.metrics if m.name not in summed]
        self.dtype = next(iter(self.task.init().values())).dtype

    def __getstate__(self) -> dict[str, Any]:
        """What a process that is sent this engine needs: nothing that lies on a device."""
        return self.__dict__ | {"_models": {}, "_there": None, "_fitting": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.device = accelerator.assigned(self.device)
        self._fitting = accelerator.Fitting(self.device)

    def model(self, capacity: Capacity) -> Task:
        """The task as the method trains it at one capacity, built once, on the engine's device."""
        return self.host_model(capacity).on(self.device)

    def host_model(self, capacity: Capacity) -> Task:
        """The same on the host, where it is drawn, so that every device begins alike."""
        if capacity not in self._models:
            self._models[capacity] = self.able.model(self.task, capacity)
        return self._models[capacity]

    @property
    def home(self) -> torch.device:
        """Where the server's state lies and is computed with: on the device, or the host if that has no float64."""
        return accelerator.HOST if self.device.type == "mps" else self.device

    def at_home(self, values: Any) -> Any:
        """A tree where the server's state lies."""
        return values if self.device.type == "cpu" else accelerator.to_device(values, self.home)

    def placed(self, values: Any) -> Any:
        """A tree on the engine's device."""
        return values if self.device.type == "cpu" else accelerator.to_device(values, self.device)

    @property
    def pool(self) -> tuple[Inputs, Tensor, Tensor | None]:
        """Inputs, labels and the clients' names for classes, on the engine's device: moved there once."""
        if self._there is None:
            data = self.data
            self._there = self.placed((data.x, data.y)) + (None if data.relabel is None else self.placed(data.relabel),)
        return self._there

    def ids(self, ids: Sequence[int], at_home: bool = False) -> Tensor:
        """Numbers of clients, to be used on the device, or beside the server's state."""
        found: Tensor = (self.at_home if at_home else self.placed)(torch.tensor(ids, dtype=torch.int64))
        return found

    def begin(self, capacity: Capacity, client: int) -> Tree:
        """A client's private state before its first round."""
        who = ClientInfo(client, capacity, key(self.seed, "client", client), self.seed)
        made = self.method.init_client(self.model(capacity), who)
        need_tensors(self.method, "init_client", made)
        placed: Tree = self.placed(made)
        return placed

    def update(
        self,
        capacity: Capacity,
        round: int,
        ids: list[int],
        rows: Tree,
        shared: Tree,
        own: Tree,
        common: Tree,
        raw: bool = False,
        keep_raw: bool = False,
    ) -> Answer:
        """`client_update` of every client in `ids`; rows and own are stacked in that order.

        `raw` leaves uploads as they are before the codecs, for whoever really writes them; `keep_raw` gives both.
        """
        task, shared, common = self.model(capacity), tree.aligned(self.placed(shared)), self.placed(common)
        codecs = {} if raw else self.able.coded.codecs(round)
        rows, own = tree.aligned(self.placed((rows, own)))  # now, so that what is watched is what the method is given
        given = {"rows": rows, "shared": shared, "own": own, "common": common}
        watch = ChunkWatch(self.method, round, self._shapes, capacity, **given)

        def one(client: Tree, mine: Tree, visit: Visit, _: object) -> tuple[Any, ...]:
            client, sent = watch.update(task, client, {**shared, **mine}, visit)
            mean, sizes = wire.roundtrip(sent.mean, codecs)
            each, more = wire.roundtrip(sent.each, codecs)
            found = client, Sent(sent.weight, mean, each, sent.weights), sizes | more
            return (*found, sent) if keep_raw else found

        new, sent, coded, *before = self._each(one, capacity, round, ids, rows, own, common, self.method.plan(), None)
        watch.finish()
        return Answer(new, sent, coded, *before)

    def evaluate(
        self,
        capacity: Capacity,
        round: int,
        ids: list[int],
        rows: Tree,
        shared: Tree,
        own: Tree,
        common: Tree,
        part: str = "test",
        way: JudgedModel = RECEIVED,
    ) -> EvaluatedChunk:
        """What is measured of every client on one part of its data.

        The model is the one of `way`. Local rounds and fits for it leave no trace; of a client's `own` model `rows`
        hold its state (`row`) and what it sent (`sent`), as it has trained already.
        """
        task, shared, common = self.model(capacity), tree.aligned(self.placed(shared)), self.placed(common)
        rows, own = self.placed((rows, own))
        able = self._predicting_by(way.rule)
        plan = dict(able.adapts.personal_plan(task))
        if way.model == "trained":
            plan |= {TRAINING + name: amount for name, amount in self.method.plan().items()}
        if way.model == "head":
            plan[HEAD_FIT] = Epochs(self.judging.head_epochs)

        def weights_of(client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Tree]:
            """The client's state, and the weights it is judged by."""
            sent = None
            if way.model == "own":
                client, sent = client["row"], client["sent"]
            elif way.model == "trained":
                streams = {k.removeprefix(TRAINING): b for k, b in visit.batches.items() if k.startswith(TRAINING)}
                client, sent = self.method.client_update(task, client, down, replace(visit, batches=streams))
                visit = replace(visit, batches={k: b for k, b in visit.batches.items() if not k.startswith(TRAINING)})
            weights = None
            if sent is not None:
                down = able.adapts.trained(down, sent, capacity)
                weights = able.adapts.personal_trained(task, client, down, visit)
            if weights is None:
                weights = able.method.personal(task, client, down, visit)
            need_tensors(self.method, "personal", weights)
            if way.model == "head":
                weights = self._with_fitted_head(task, weights, visit[HEAD_FIT])
            return client, weights

        def one(client: Tree, mine: Tree, visit: Visit, held: Batches) -> dict[str, Any]:
            client, weights = weights_of(client, {**shared, **mine}, visit)
            total: dict[str, Tensor] = {"n": torch.zeros((), dtype=self.dtype, device=self.device)}
            seen: dict[str, list[Tensor]] = {"output": [], "y": [], "live": []}
            with torch.no_grad():
                for batch in held:
                    output = able.adapts.predict(task, weights, batch.x)
                    for name, values in task.measures(output, batch.y, batch.mask).items():
                        total[name] = total.get(name, 0.0) + (values * batch.w).sum()
                    total["n"] = total["n"] + batch.w.sum()
                    if self.gathered:
                        for name, t in (("output", output), ("y", batch.y), ("live", batch.w > 0)):
                            seen[name].append(t)
            sums: dict[str, Any] = total | self._observed(client, total["n"], way)
            return sums | ({"": {k: torch.cat(v) for k, v in seen.items()}} if self.gathered else {})

        kept = [i for i in ids if len(getattr(self.data, part)[i])]
        if not kept:
            return EvaluatedChunk({"n": torch.zeros(len(ids), dtype=self.dtype, device=self.device)})
        at = self.ids([ids.index(i) for i in kept])
        found = EvaluatedChunk({}, {m.name: [math.nan] * len(ids) for m in self.gathered})
        gather = partial(self._gather, task, found, {i: k for k, i in enumerate(ids)}) if self.gathered else None
        rows, own = tree.take(rows, at), tree.take(own, at)
        result: dict[str, Tensor] = self._each(one, capacity, round, kept, rows, own, common, plan, part, gather)
        found.sums = {name: t.new_zeros(len(ids)).index_copy(0, at, t) for name, t in result.items()}
        return found

    def judges_together(
        self,
        capacity: Capacity,
        round: int,
        ids: list[int],
        rows: Tree,
        shared: Tree,
        own: Tree,
        common: Tree,
        part: str = "test",
        way: JudgedModel = RECEIVED,
    ) -> bool:
        """Whether clients predict with one and the same model, example by example, so that `evaluate_together` may.

        `rows` and `own` are those of any of them. They must be empty, nothing may be fitted before the use, and neither
        the method may ask which client it works for nor the loss or an output depend on the other examples of a batch.
        """
        able, task = self._predicting_by(way.rule), self.model(capacity)
        fitted = way.model != "received" or able.adapts.personal_plan(task)
        if fitted or tree.leaves((rows, own)) or task.loss_of == "batch":
            return False
        few = self.placed(torch.from_numpy(np.concatenate([getattr(self.data, part)[i][:3] for i in ids])[:3]))
        if len(few) < 3:
            return False
        try:
            weights = self._common_weights(able, capacity, round, rows, {**shared, **own}, common)
        except AsksWho:
            return False
        with torch.no_grad():
            three, two = (able.adapts.predict(task, weights, tree.take(self.pool[0], few[:n])) for n in (3, 2))
        return _alike({"": three[:2]}, {"": two})

    def evaluate_together(
        self,
        capacity: Capacity,
        round: int,
        ids: list[int],
        rows: Tree,
        shared: Tree,
        own: Tree,
        common: Tree,
        part: str = "test",
        way: JudgedModel = RECEIVED,
    ) -> EvaluatedChunk:
        """`evaluate` of clients with one model (see `judges_together`): one pass over the held-out examples of all."""
        able, task = self._predicting_by(way.rule), self.model(capacity)
        weights = self._common_weights(able, capacity, round, rows, {**shared, **own}, common)
        held = [getattr(self.data, part)[i] for i in ids]
        sizes = torch.tensor([len(some) for some in held])
        owner, n = torch.repeat_interleave(torch.arange(len(ids)), sizes), sizes.to(accelerator.widest(self.device))
        index = torch.from_numpy(rows_of(np.concatenate(held), self.evaluation_batch))
        index, owner, n, stream = self.placed((index, owner, n, key(self.seed, "visit", round)))
        batches = Batches(*self.pool[:2], index, stream)
        sums: dict[str, Tensor] = {"n": n}
        seen: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for batch, whose in zip(batches, torch.split(owner, self.evaluation_batch)):
                output, y = able.adapts.predict(task, weights, batch.x), self._renamed(batch.y, ids, whose)
                for name, values in task.measures(output, y).items():
                    sums.setdefault(name, torch.zeros_like(n)).index_add_(0, whose, values.to(n.dtype))
                if self.gathered:
                    seen.append((output, y))
        found = EvaluatedChunk(sums | self._observed(rows, n, way))
        found.metrics = {m.name: [math.nan] * len(ids) for m in self.gathered}
        if seen:
            outputs, labels = (torch.split(torch.cat(of), sizes.tolist()) for of in zip(*seen))
            for k, i in enumerate(ids):
                if len(labels[k]):
                    told = {"output": outputs[k], "y": labels[k], "live": slice(None)}
                    self._gather(task, found, {i: k}, {"": told}, i)
        return found

    def _common_weights(
        self, able: Abilities, capacity: Capacity, round: int, client: Tree, down: Tree, common: Tree
    ) -> Tree:
        """The weights that every client of a capacity predicts with.

        Raises:
            AsksWho: if they depend on the client after all.
        """
        nothing, t = self.placed(torch.zeros(())), torch.tensor(round)
        client, down, common = self.placed((client, down, common))
        visit = NobodysVisit(t, nothing, nothing, self.data.clients, {}, common, capacity)
        weights = able.method.personal(self.model(capacity), client, tree.aligned(down), visit)
        need_tensors(self.method, "personal", weights)
        found: Tree = tree.detach(weights)
        return found

    def _renamed(self, y: Tensor, ids: list[int], whose: Tensor) -> Tensor:
        """Labels as the clients call them: example b is of client `ids[whose[b]]`."""
        relabel = self.pool[2]
        if relabel is None:
            return y
        names = relabel[self.ids(ids)[whose]]
        return names.gather(1, y.reshape(len(y), -1)).reshape(y.shape)

    def _observed(self, client: Tree, n: Tensor, way: JudgedModel) -> dict[str, Tensor]:
        """Numbers about a client's own state, as sums over as many examples as it has."""
        told = self.able.observed.observe(client).items() if way == RECEIVED else ()
        return {name: value.to(n.dtype) * n for name, value in told}

    def ways(self, after: bool = False) -> list[JudgedModel]:
        """How every client is judged; `after` also by its trained model (`train.evaluate_after`)."""
        rule: Any = self.able.adapts.prediction_rule()
        return self.judging.ways(rule, ("head", "prototype") if rule else (), after)

    def _predicting_by(self, rule: str | None) -> Abilities:
        """The method's capabilities when it predicts by one of its rules; None: its own."""
        if rule not in self._by_rule:
            assert rule is not None
            method: Any = self.able.adapts.predicting_by(rule)
            self._by_rule[rule] = Abilities(method)
        return self._by_rule[rule]

    def _with_fitted_head(self, task: Task, weights: Tree, stream: Batches) -> Tree:
        """A model whose head has been fitted to a client's training data, its body as it was."""
        if not task.whole(weights) or not task.head:
            raise NoHeadToFit(f"{type(self.method).__name__} does not predict with one model that has a head")
        body, head = tree.without(weights, task.head), tree.select(weights, task.head)
        fixed = FrozenBody(task, body, head, stream)
        fitted: Tree = body | sgd(fixed.loss, head, fixed.batches, self.judging.head_lr)
        return fitted

    def _gather(self, task: Task, found: EvaluatedChunk, places: Mapping[int, int], result: Tree, client: int) -> Tree:
        """Compute the metrics of one client's predictions; what is left are its sums."""
        seen = result[""]
        live = seen["live"]
        y, scores = (t.cpu() for t in task.scores(seen["output"][live], seen["y"][live]))
        found.predictions.append((client, y, scores))
        for m in self.gathered:
            try:
                found.metrics[m.name][places[client]] = m(y.numpy(), scores.numpy())
            except UndefinedMetric as e:
                found.left_out.setdefault(m.name, {})[client] = str(e)
            except ConfigError as e:
                who = f"Client {self.data.names[client]}, {len(y)} examples."
                raise ConfigError(f"{e} {who} Return NaN where the metric is not defined.") from e
        return {k: v for k, v in result.items() if k}

    def personal(self, capacity: Capacity, round: int, client: int, row: Tree, down: Tree, common: Tree) -> Tree:
        """The weights one client predicts with."""
        task, (row, down, common) = self.model(capacity), self.placed((row, down, common))
        visit = self.visit(capacity, round, client, self.able.adapts.personal_plan(task), common)
        with training_in(self.precision):
            result: Tree = tree.detach(self.method.personal(task, row, down, visit))
        return result

    def visit(self, capacity: Capacity, round: int, client: int, plan: Mapping[str, Amount], common: Tree) -> Visit:
        """What one client knows in a round, with the streams of this plan."""
        return self._visit(client, round, plan, common, capacity=capacity)[0]

    # ------------------------------------------------------------------------------------------------ mapping

    def _each(
        self,
        one: Callable[..., Any],
        capacity: Capacity,
        round: int,
        ids: list[int],
        rows: Tree,
        own: Tree,
        common: Tree,
        plan: Mapping[str, Amount],
        part: str | None,
        finish: Callable[[Any, int], Any] | None = None,
    ) -> Any:
        """Run `one(client, own, visit, held-out batches)` for every client and stack what it returns.

        `finish(result, client)` makes of each result what is stacked; it runs for one client at a time.
        """
        if self.mapping == "loop":
            results = []
            for k, i in enumerate(ids):
                visit, held, _ = self._visit(i, round, plan, common, part, capacity)
                try:
                    row, mine = tree.aligned((tree.take(rows, k), tree.take(own, k)))
                    with training_in(self.precision):
                        result = tree.detach(one(row, mine, visit, held))
                    results.append(result if finish is None else finish(result, i))
                except RuntimeError as e:
                    if accelerator.is_full(e):
                        raise accelerator.too_small(self.device) from None
                    raise RuntimeError(f"round {round}, client {i}: {e}") from e
            return tree.stack(results)

        self._fitting.guess(lambda: self._bytes_of_a_client(capacity, rows, own))

        def work(some: slice) -> Any:
            mine, theirs = tree.take((rows, own), some)
            return self._mapped(one, capacity, round, ids[some], mine, theirs, common, plan, part, finish)

        pieces = self._fitting.pieces(len(ids), work)
        return pieces[0] if len(pieces) == 1 else tree.map(lambda *parts: torch.cat(parts), *pieces)

    def _bytes_of_a_client(self, capacity: Capacity, rows: Tree, own: Tree) -> int:
        """Parameters, state and download of one client, and a minibatch of it."""
        state = sum(t[:1].nbytes for t in tree.leaves((rows, own)))
        examples = self.batch_size or int(self.data.sizes.max())
        batch = examples * sum(t[:1].nbytes for t in tree.leaves(self.data.x))
        return tree.nbytes(self.host_model(capacity).init()) + state + batch

    def _mapped(
        self,
        one: Callable[..., Any],
        capacity: Capacity,
        round: int,
        ids: list[int],
        rows: Tree,
        own: Tree,
        common: Tree,
        plan: Mapping[str, Amount],
        part: str | None,
        finish: Callable[[Any, int], Any] | None,
    ) -> Any:
        """`_each` of clients that are computed at once."""
        longest = 0 if part is None else max(len(getattr(self.data, part)[i]) for i in ids)
        width = min(self.evaluation_batch, longest)  # no wider than the longest: empty slots cost as much as others
        streams = [self._streams(i, round, plan, part, width) for i in ids]
        index = {name: pad([s[name] for s in streams]) for name in streams[0]}
        keys = torch.stack([key(self.seed, "visit", round, i) for i in ids])
        sizes = torch.tensor([len(self.data.train[i]) for i in ids], dtype=self.dtype)
        index, keys, sizes = self.placed((index, keys, sizes))
        t = torch.tensor(round)  # on the host, which reads it without waiting
        x, y, relabel = self.pool
        relabel, (rows, own) = None if relabel is None else relabel[self.ids(ids)], tree.aligned((rows, own))

        def mapped(client: Tree, mine: Tree, at: dict[str, Tensor], k: Tensor, n: Tensor, *names: Tensor) -> Any:
            called = names[0] if names else None
            batches = {s: Batches(x, y, r, k, called, True, self._transform(s, plan)) for s, r in at.items()}
            held = batches.pop("", None)
            return one(client, mine, Visit(t, k, n, self.data.clients, batches, common, capacity), held)

        with folding() if self.mapping == "folded" else nullcontext(), training_in(self.precision):
            found = _map_clients(mapped, (rows, own, index, keys, sizes, *(() if relabel is None else (relabel,))))
        return found if finish is None else tree.stack([finish(tree.take(found, k), i) for k, i in enumerate(ids)])

    def _visit(
        self,
        client: int,
        round: int,
        plan: Mapping[str, Amount],
        common: Tree,
        part: str | None = None,
        capacity: Capacity = None,
    ) -> tuple[Visit, Batches | None, Tensor]:
        x, y, relabel = self.pool
        streams = self._streams(client, round, plan, part, self.evaluation_batch)
        n = torch.tensor(len(self.data.train[client]), dtype=self.dtype)
        told = {s: torch.from_numpy(r) for s, r in streams.items()}, key(self.seed, "visit", round, client), n
        index, k, n = self.placed(told)
        names = None if relabel is None else relabel[client]
        batches = {s: Batches(x, y, r, k, names, False, self._transform(s, plan)) for s, r in index.items()}
        held = batches.pop("", None)
        return Visit(torch.tensor(round), k, n, self.data.clients, batches, common, capacity), held, k

    def _transform(self, stream: str, plan: Mapping[str, Amount]) -> KeyedTransform | None:
        """What is done to the inputs of a stream: nothing, unless it trains on shuffled examples."""
        return self.data.transforms if isinstance(plan.get(stream), SHUFFLED) else None

    def _streams(
        self, client: int, round: int, plan: Mapping[str, Amount], part: str | None, width: int
    ) -> dict[str, Index]:
        streams = draw(
            self.data.train[client],
            self.data.validation[client],
            plan,
            seed=self.seed,
            round=round,
            client=client,
            batch_size=self.batch_size,
            epochs=self.epochs,
            drop_last=bool(self.task.stats),
        )
        if part is not None:  # the held-out part travels as a stream without a name
            streams[""] = rows_of(getattr(self.data, part)[client], width)
        return streams


def _map_clients(one: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """`vmap` of a function over the leaves of trees; it is handed lists, as it takes long to walk trees itself."""
    form: list[Any] = []

    def flat(*leaves: Tensor) -> list[Tensor]:
        each = iter(leaves)
        found = one(*tree.map(lambda _: next(each), given))
        form.append(tree.map(lambda _: None, found))
        return tree.leaves(found)

    results = iter(vmap(flat)(*tree.leaves(given)))
    return tree.map(lambda _: next(results), form[0])


def choose_mapping(task: Task, mode: str, steps: float) -> Way:
    """`auto` by a fixed rule on the model and the local steps of a visit, never by timing.

    Models of linear and normalising layers are folded. Of others, convolutions, recurrent layers and batch
    normalisation run one client after another, unless they are tiny; so do large models and visits of many steps, where
    the parameters of several clients would push each other out of the cache.

    Raises:
        ConfigError: if `vmap` is asked for and some layer cannot be mapped; lists all of them.
    """
    faults = task.unmappable()
    if mode in ("vmap", "folded") and faults:
        raise ConfigError(" ".join(faults))
    if mode != "auto":
        ways: tuple[Way, ...] = get_args(Way)
        return next(way for way in ways if way == mode)
    size = sum(p.numel() for p in task.init().values())
    convolutions = task.has(nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if faults or (convolutions and size > SMALL_MODEL):
        return "loop"
    if has_folded_form(task.module) and size <= MIDDLE_MODEL:
        return "folded"
    return "vmap" if size <= SMALL_MODEL or (size <= MIDDLE_MODEL and steps <= 2.0) else "loop"


def mapping_fault(task: Task, x: Inputs, y: Tensor, way: Way = "vmap", precision: Precision = "float32") -> str | None:
    """Why a model or loss cannot be computed for many clients at once, seen on two examples; None if it can.

    Two clients take one gradient each, together and alone; the second has one example, an empty slot and other weights.
    It shows code that vmap cannot run (branches on values, `.item()`), models whose examples depend on one another, and
    layers that read other layers' weights, which cannot be folded. What cannot run under vmap is not folded either: a
    model that looks at values would see those of all clients. Gradients are compared in full precision; in bf16 it is
    only tried whether there are any, as its rounding would hide what differs.
    """
    params, stream = task.init(), key(0, "mapping")
    starts = [params, tree.map(lambda t: t * 0.9 + 0.01, params)]
    rows, slots = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0, 1], [0, -1]])

    def mapped(own: Params, at: Tensor, filled: Tensor) -> Tree:
        found: Tree = gradient(task.loss, own, Batch(tree.take(x, at), y[at], filled, stream, 0))
        return found

    def value(own: Params, at: Tensor, filled: Tensor) -> Tensor:
        return task.loss(own, Batch(tree.take(x, at), y[at], filled, stream, 0))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # slow operators are told about by the run itself
            if way == "folded":
                vmap(value)(tree.stack(starts), rows, slots)
            with folding() if way == "folded" else nullcontext():
                together = vmap(mapped)(tree.stack(starts), rows, slots)
                if precision == "bf16":
                    with training_in(precision):
                        vmap(mapped)(tree.stack(starts), rows, slots)
    except ConfigError:
        raise
    except Exception as e:  # whatever a model of somebody's own raises when it is traced
        return f"{way} gave {type(e).__name__}: {_first_sentence(str(e))}"
    for k, size in enumerate((2, 1)):
        alone = gradient(task.loss, starts[k], Batch(tree.take(x, slice(size)), y[:size], None, stream, 0))
        if not _alike(tree.take(together, k), alone):
            return "an example's gradient depends on the other slots of its batch"
    return None


def _alike(a: Tree, b: Tree) -> bool:
    """Whether two gradients agree far beyond what rounding explains; what is not finite is not judged here."""
    one, other = (
        torch.cat([g.detach().reshape(-1).cpu().double() for g in tree.leaves(t)]) for t in tree.aligned((a, b))
    )
    gap, scale = (one - other).abs().max(), torch.maximum(one.abs().max(), other.abs().max())
    return not bool(gap > 1e-2 * scale + 1e-6)


def _first_sentence(text: str) -> str:
    line = next((part.strip() for part in text.splitlines() if part.strip()), "no reason given")
    return line if len(line) <= 160 else line[:157] + "..."


def chunk_cuts(
    mapping: str, loads: Sequence[int], parameters: int, chunk: int | None, accelerators: int = 0
) -> list[int]:
    """Where the chunks of clients begin that have so much to do each: of equally many if the configuration says so.

    Otherwise there are as many chunks as `chunk_size` makes, and none has much more to do than the others: clients come
    with the largest load first, and chunks of equally many would leave most of a round to the first of them.
    """
    clients = len(loads)
    if chunk is not None or mapping == "loop":  # one after another, sixteen chunks are balance enough
        return list(range(0, clients, chunk_size(mapping, clients, parameters, chunk)))
    number = -(-clients // chunk_size(mapping, clients, parameters, None, accelerators))
    size = at_once(mapping, parameters, accelerators)
    low, high = max(-(-sum(loads) // number), max(loads, default=0)), sum(loads)
    while low < high:  # the smallest bound on a chunk's load with which so many chunks are enough
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(loads, size, middle)) <= number else (middle + 1, high)
    return _filled(loads, size, low)


def _filled(loads: Sequence[int], size: int, most: int) -> list[int]:
    """Where chunks begin that take clients as long as they are at most `size`, with a load of at most `most`."""
    cuts, held = [0], 0
    for k, load in enumerate(loads):
        if k > cuts[-1] and (held + load > most or k - cuts[-1] >= size):
            cuts.append(k)
            held = 0
        held += load
    return cuts


def chunk_size(mapping: str, participants: int, parameters: int, chunk: int | None, accelerators: int = 0) -> int:
    """Clients per chunk: from the configuration, or a rule on the round's size and the model's; never on the machine.

    Accelerators are kept busy by many clients at once: each has one chunk, unless the uploads of a chunk would be too
    large to lie side by side. What does not fit is computed in pieces, whose uploads are added up as if it did.

    One after another, sixteen chunks balance clients of different sizes over the workers. Mapped or folded, a step
    costs the same for few clients as for many while their parameters fit in the cache, so there are few chunks, but at
    least two.
    """
    if chunk is not None:
        return chunk
    if mapping == "loop":
        return max(1, -(-participants // 16))
    if accelerators:
        return max(1, min(-(-participants // accelerators), at_once(mapping, parameters, accelerators)))
    chunks = max(2, -(-participants // 16))
    return max(1, min(-(-participants // chunks), at_once(mapping, parameters)))


def at_once(mapping: str, parameters: int, accelerators: int = 0) -> int:
    """The most clients that are mapped or folded together: as many as the caches hold, or an accelerator's memory."""
    most = AT_ONCE_ON_A_DEVICE if accelerators else AT_ONCE if mapping == "folded" else 4_000_000
    return max(1, most // max(1, parameters))
