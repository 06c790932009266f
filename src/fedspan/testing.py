"""`check_method`: the promises that every method keeps, for methods of one's own; fedspan's own pass the same checks.

>>> from fedspan.testing import check_method
>>> found = check_method("fedavg", promises=["keys", "runs"], lr=0.05)
>>> found["runs"]
'kept'
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from fedspan import tree, wire
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError, PromiseError, nearest
from fedspan.learn.task import Task
from fedspan.method import Abilities, ClientInfo, Federation, Method
from fedspan.method.fields import build, flat, keys_of, with_keys
from fedspan.method.named_code import brief
from fedspan.methods import make, name_of
from fedspan.randomness import key, torch_seed
from fedspan.simulation.engine import Answer, Engine, Way
from fedspan.simulation.result import Result
from fedspan.simulation.settings import Settings, sample
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Tree

__all__ = ["PROMISES", "Case", "Promise", "check_method", "small_data", "small_task"]

TOLERANCE = 1e-12
"""Two ways of computing the same thing in float64: |difference| <= TOLERANCE * max(1, largest entry)."""
SEED = 3


def small_task() -> Task:
    """A perceptron 5-7-6-3 in float64, small enough for every check."""
    with torch_seed(0):
        layers = nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)
    return Task(nn.Sequential(*layers), dtype=torch.float64)


def small_data(clients: int = 7, seed: int = 0) -> FederatedData:
    """Clients of very different sizes in two groups, of which one renames the classes."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(3, 5)) * 2
    pairs = []
    for i in range(clients):
        y = rng.integers(0, 3, int(rng.integers(6, 30)))
        x = centres[y] + rng.normal(size=(len(y), 5))
        pairs.append((torch.tensor(x), torch.tensor((y + i % 2) % 3)))
    return FederatedData.from_arrays(pairs, groups=[i % 2 for i in range(clients)], seed=seed).to(torch.float64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A method, and where its promises are tried."""

    method: Method
    task: Callable[[], Task] = small_task
    """Makes the task, in float64, anew for every run."""
    data: FederatedData
    """Clients in float64, at least four of them."""
    few: FederatedData
    """A few clients for the deployment."""
    rounds: int = 2
    epochs: int = 1
    fixed: Literal["models", "state", "no"] = "models"
    """What a learning rate of zero leaves as it is: the clients' models, all of the state, or nothing."""
    computed: tuple[str, ...] = ()
    """Parts of a model that are computed from the data when it is used, whatever the learning rate."""
    drop: Literal["before", "after"] = "after"
    """Where answers are lost: before or after the client has trained."""

    @property
    def who(self) -> str:
        """The method in an error's sentence."""
        return type(self.method).__name__

    @property
    def able(self) -> Abilities:
        """The method's capabilities."""
        return Abilities(self.method)

    def begun(self, out: Path | None = None, rounds: int | None = None, **settings: Any) -> Simulation:
        """A run before its first round."""
        usual = {"participation": 0.6, "workers": 1, "precision": "float64", "batch_size": 8, "epochs": self.epochs}
        usual |= {"device": "cpu"}
        chosen = Settings(evaluate_every=100, **{**usual, **settings})
        count = self.rounds if rounds is None else rounds
        return Simulation(self.method, self.task(), self.data, rounds=count, seed=SEED, settings=chosen, out=out)

    def run(
        self, promise: str, out: Path | None = None, rounds: int | None = None, **settings: Any
    ) -> tuple[Simulation, Result]:
        """A finished run; one that fails breaks the promise."""
        with self.naming(promise):
            sim = self.begun(out, rounds, **settings)
            return sim, sim.run()

    @contextlib.contextmanager
    def naming(self, promise: str) -> Iterator[None]:
        """Turn what a method's code raises into a sentence that names the promise."""
        try:
            yield
        except (PromiseError, ConfigError):
            raise
        except Exception as error:
            raise PromiseError(f"{self.who}: {promise}. Got {brief(error)}.") from error

    def close(self, promise: str, a: Any, b: Any, tolerance: float = TOLERANCE) -> None:
        """Compare trees up to rounding.

        Raises:
            PromiseError: naming the promise and where they differ.
        """
        x, y = dict(tree.items(a)), dict(tree.items(b))
        if x.keys() != y.keys():
            raise PromiseError(f"{self.who}: {promise}. Only one of them has '{sorted(x.keys() ^ y.keys())[0]}'.")
        for path in x:
            p, q = x[path].detach(), y[path].detach()
            if p.shape != q.shape:
                raise PromiseError(f"{self.who}: {promise}. '{path}' has shape {tuple(p.shape)} and {tuple(q.shape)}.")
            gap, scale = _gap(p, q)
            if not gap <= tolerance * scale:
                raise PromiseError(f"{self.who}: {promise}. '{path}' differs by {gap:.1e}.")

    def same(self, promise: str, a: Any, b: Any) -> None:
        """Compare trees bit for bit.

        Raises:
            PromiseError: naming the promise and where they differ.
        """
        if tree.digest(a) != tree.digest(b):
            self.close(promise, a, b, 0.0)
            raise PromiseError(f"{self.who}: {promise}. They differ in type or in the sign of a zero.")

    def need(self, promise: str, kept: bool, got: str) -> None:
        """Raise unless the promise is kept.

        Raises:
            PromiseError: naming it, and what was got.
        """
        if not kept:
            raise PromiseError(f"{self.who}: {promise}. Got {got}.")


def _gap(p: Tensor, q: Tensor) -> tuple[float, float]:
    """The largest difference, and the scale it is measured by."""
    if not p.numel():
        return 0.0, 1.0
    if p.dtype == torch.bool or q.dtype == torch.bool:
        return (0.0 if torch.equal(p, q) else float("inf")), 1.0
    return float((p - q).abs().max()), max(1.0, float(p.abs().max()))


def state_of(sim: Simulation) -> Tree:
    """The server's state and every client's."""
    return {"server": sim.record.server, "clients": {str(i): sim.record.row(i) for i in range(sim.data.clients)}}


def alike(case: Case) -> list[int]:
    """The clients that have the capacity of the first one: all, unless the method tells them apart."""
    of = case.able.ranked.capacity_of
    return [i for i in range(case.data.clients) if of(i) == of(0)]


class Prepared:
    """Clients of one capacity before a round, with what they receive."""

    def __init__(self, case: Case, mapping: Way, ids: list[int]) -> None:
        self.method, self.ids, able = case.method, ids, case.able
        data, of = case.data, case.able.ranked.capacity_of
        self.engine = Engine(case.method, case.task(), data, SEED, 8, 1, mapping)
        self.capacity = of(ids[0])
        federation = Federation(data.clients, SEED, tuple(of(i) for i in range(data.clients)), data.groups)
        first, self.task = self.engine.model(federation.kinds[0]), self.engine.model(self.capacity)
        self.server = case.method.init_server(first, federation)
        self.common = able.announces.common(first, federation)
        self.rows: Tree = tree.stack([self.engine.begin(self.capacity, i) for i in ids])
        self.down = able.download(self.server, torch.tensor(ids), self.capacity, 1)
        self.shared = wire.roundtrip(self.down.shared, able.coded.codecs(1))[0]

    def update(self, raw: bool = False) -> Answer:
        """The clients' answers in round 1; `raw`: before the codecs."""
        place = (self.capacity, 1, self.ids, self.rows, self.shared, self.down.own, self.common)
        return self.engine.update(*place, raw=raw)

    def inputs(self) -> tuple[Any, ...]:
        """All that the method was given."""
        return self.server, self.common, self.rows, self.shared, self.down.shared, self.down.own, self.task.init()


# ------------------------------------------------------------------------------------------------ the promises

Kept: TypeAlias = "str | None"
"""None, or why a promise was not checked."""


def keys_round_trip(case: Case) -> Kept:
    """Every field has a key, and the keys of an experiment file make the same method again."""
    cls = type(case.method)
    names = {f.name for f in fields(case.method)}
    for name, hint in get_type_hints(cls).items():
        constant = "ClassVar" in str(hint) or hasattr(Method, name)
        said = f"a field must have a default and stand in a frozen dataclass; '{name}' is none, so decorate the class"
        case.need(f"{said} with @dataclass(frozen=True, kw_only=True)", name in names or constant, "an annotation only")
    again = build(cls, flat(case.method), case.who)
    case.need("its keys must make the same method again", again == case.method, f"{again} from {case.method}")
    return None


def runs(case: Case) -> Kept:
    """It runs, returns a `Sent` of tensors in the same shapes each round, and its numbers stay finite."""
    promise = "it must run one client after another"
    sim, result = case.run(promise, mapping="loop")
    case.need("its numbers must stay finite", tree.all_finite(state_of(sim)), "NaN or infinity")
    case.need(promise, result.rounds == case.rounds, f"{result.rounds} rounds")
    return None


def is_pure(case: Case) -> Kept:
    """It leaves its inputs as they are, and gives the same answer when asked again."""
    promise = "its functions must leave what they are given as it is"
    with case.naming(promise):
        at = Prepared(case, "loop", alike(case)[:2])
        before = tree.digest(at.inputs())
        first = at.update()
        at.engine.evaluate(at.capacity, 1, at.ids, at.rows, at.shared, at.down.own, at.common)
        second = at.update()
    case.need(promise, tree.digest(at.inputs()) == before, "changed values")
    case.same("the same inputs must give the same answer", (first.rows, first.sent), (second.rows, second.sent))
    return None


def mappings_agree(case: Case) -> Kept:
    """Mapped over clients by vmap, in chunks or at once, it computes what it computes one client after another."""
    faults = case.task().unmappable()
    if faults:
        return faults[0]
    promise = "mapped over clients it must compute what it computes one after another"
    loop, expected = case.run(promise, mapping="loop", chunk=2)
    ways: tuple[tuple[Way, int], ...] = (("vmap", 2), ("vmap", 100), ("folded", 3))
    for way, chunk in ways:
        mapped, found = case.run(f"{promise} ({way})", mapping=way, chunk=chunk)
        case.close(promise, state_of(loop), state_of(mapped))
        for measure, values in expected.per_client.items():
            case.need(f"{promise} ({measure})", _near(values, found.per_client[measure], 1e-9), "other measures")
    return None


def _near(a: Iterable[float | None], b: Iterable[float | None], tolerance: float) -> bool:
    return all((x is None) == (y is None) and (x is None or y is None or abs(x - y) <= tolerance) for x, y in zip(a, b))


def workers_agree(case: Case) -> Kept:
    """Two worker processes give the very bits of one."""
    promise = "two workers must give the very bits of one"
    mapping: Way = "loop" if case.task().unmappable() else "vmap"
    one, _ = case.run(promise, mapping=mapping, chunk=2)
    two, _ = case.run(promise, mapping=mapping, chunk=2, workers=2)
    case.same(promise, state_of(one), state_of(two))
    return None


def order_is_free(case: Case) -> Kept:
    """The order of clients does not matter, and uploads weigh what `about` declares."""
    promise = "the order of clients must not matter"
    able, same = case.able, alike(case)
    mapping: Way = "loop" if case.task().unmappable() else "vmap"
    p, q, r, s = same[:4] if len(same) < 6 else (same[0], same[2], same[3], same[5])
    with case.naming(promise):
        a, b = (Prepared(case, mapping, ids).update() for ids in ([p, q, r, s], [s, p, r, q]))
    case.close(promise, (a.rows, a.sent), tree.take((b.rows, b.sent), torch.tensor([1, 3, 2, 0])))
    weights = a.sent.weight.tolist()
    if able.weight == "own":
        inside = all(0 < w <= able.weight_bound for w in weights)
        case.need(f"weights must lie in (0, {able.weight_bound:g}]", inside, f"{weights}")
        return None
    declared = [float(len(case.data.train[i])) for i in (p, q, r, s)] if able.weight == "samples" else [1.0] * 4
    case.need(f"weights must be as about.weight = '{able.weight}' says, {declared}", weights == declared, f"{weights}")
    return None


def bystanders_rest(case: Case) -> Kept:
    """A client that was not asked keeps its state bit for bit."""
    promise = "a client that was not asked must keep its state"
    sim, _ = case.run(promise, rounds=1, participation=0.3)
    asked = sample(case.data.clients, sim.settings, SEED, 1)
    touched = {i for store in sim.record.stores.values() for i in store.touched_ids()}
    case.need(promise, touched <= set(asked), f"clients {sorted(touched)} of {asked}")
    for i in set(range(case.data.clients)) - set(asked):
        capacity = case.able.ranked.capacity_of(i)
        who = ClientInfo(i, capacity, key(SEED, "client", i), SEED)
        begin = case.method.init_client(case.able.model(case.task(), capacity), who)
        case.same(promise, sim.record.row(i), begin)
    return None


def bytes_are_counted(case: Case) -> Kept:
    """Counted bytes are those of the serialised payload."""
    promise = "counted bytes must be those of the payload"
    start = case.begun()
    _, result = case.run(promise, rounds=1, participation=1.0)
    of, clients = case.able.ranked.capacity_of, range(case.data.clients)
    up = down = 0
    for capacity in {of(i) for i in clients}:
        ids = [i for i in clients if of(i) == capacity]
        sent = Prepared(case, "loop", ids).update(raw=True).sent
        each = [tree.take(sent, k) for k in range(len(ids))]
        up += sum(_written(case, one.parts) for one in each)
        given = case.able.download(start.record.server, torch.tensor(ids), capacity, 1)
        down += len(ids) * _written(case, given.shared)
        down += sum(_written(case, tree.take(given.own, k)) for k in range(len(ids)))
    counted = result.bytes
    case.need(f"{promise}, {up} up", counted["up"] == up, str(counted["up"]))
    case.need(f"{promise}, {down} down", counted["down"] == down, str(counted["down"]))
    named = sum(counted["names"]["up"].values())
    case.need(f"{promise}, {up} over all names", named == up, str(named))
    case.need(f"{promise}, 8 for each weight", counted["meta"] == 8 * len(clients), str(counted["meta"]))
    return None


def _written(case: Case, payload: Tree) -> int:
    """Bytes of a payload behind its header, its parts encoded as the method says."""
    codecs = case.able.coded.codecs(1)
    coded = {k: tree.map(codecs[k].encode, part) if k in codecs else part for k, part in payload.items()}
    packed = wire.pack(coded)
    return len(packed) - 8 - int.from_bytes(packed[:8], "little")


def state_survives(case: Case) -> Kept:
    """A run that is saved, loaded and continued is the run that was never interrupted."""
    promise = "a run that goes on from its checkpoint must equal one that was never interrupted"
    whole, expected = case.run(promise)
    with tempfile.TemporaryDirectory(prefix="fedspan-check-") as folder:
        out = Path(folder) / "run"
        case.run(promise, out, case.rounds - 1)
        again, found = case.run(promise, out)
        case.need(promise, again.record.resumed, "a run that began anew")
        case.same(promise, state_of(whole), state_of(again))
        case.need(promise, whole.record.digest() == again.record.digest(), "another common state")
    a, b = expected.to_json(), found.to_json()
    case.need(f"{promise} (measures)", a["per_client"] == b["per_client"], "other measures")
    case.need(f"{promise} (bytes)", a["bytes"]["up"] == b["bytes"]["up"], f"{b['bytes']['up']}")
    lines = [line["round"] for line in again.record.lines]
    case.need(f"{promise} (metrics)", lines == list(range(1, case.rounds + 1)), f"rounds {lines}")
    return None


COUNTED = ("server/C", "server/optimizer/steps", "server/seen", "server/last")
"""Flags and statistics of who was there: they change without any training."""


def zero_step_stays(case: Case) -> Kept:
    """With every learning rate zero nothing is learnt: models stay as they are."""
    rates = [k for k in keys_of(type(case.method)) if k == "lr" or k.startswith("lr_")]
    if "lr" not in rates:
        return "it has no lr"
    if case.fixed == "no":
        return "it was left out"
    promise = f"with {', '.join(f'{k} = 0' for k in rates)} the clients' models must stay as they are"
    still = replace(case, method=with_keys(case.method, **dict.fromkeys(rates, 0.0)))
    before = still.begun()
    after, _ = still.run(promise, participation=1.0)
    if case.fixed == "models":
        for i in range(case.data.clients):
            a, b = (tree.without(sim.personal(i)[1], case.computed) for sim in (before, after))
            case.close(promise, a, b, 1e-7)
        return None
    a, b = (
        {
            k: t
            for k, t in tree.items(state_of(sim))
            if t.dtype != torch.bool and not k.startswith(COUNTED) and "/velocity/" not in k
        }
        for sim in (before, after)
    )
    case.close(promise.replace("the clients' models", "all states"), a, b)
    return None


def lost_answers_are_survived(case: Case) -> Kept:
    """Lost answers are survived, and a round without any changes nothing on the server."""
    promise = "lost answers must be survived"
    half, _ = case.run(promise, drop_rate=0.5)
    case.need(promise, tree.all_finite(state_of(half)), "NaN or infinity")
    promise, start = "a round without answers must leave the server as it is", case.begun()
    none, _ = case.run(promise, rounds=1, drop_rate=1.0, drop=case.drop)
    case.same(promise, none.record.server, start.record.server)
    case.need(promise, all(line["skipped"] and not line["answered"] for line in none.record.lines), "a counted round")
    if case.drop == "before":
        case.same(promise, state_of(none), state_of(start))
    return None


def flower_agrees(case: Case) -> Kept:
    """Deployed on Flower's messages it gives the simulator's numbers."""
    if importlib.util.find_spec("flwr") is None:
        return "flwr is not installed: pip install 'fedspan[flower]'"
    from fedspan.deploy.experiment import Experiment
    from fedspan.deploy.local_grid import deploy_here, held_by

    promise = "deployed on Flower it must give the simulator's numbers"
    usual: dict[str, Any] = {"batch_size": 8, "epochs": 1, "precision": "float64", "evaluate_every": 100}
    config = {"method": {"name": name_of(case.method)}, "rounds": 2}
    with tempfile.TemporaryDirectory(prefix="fedspan-check-") as folder, case.naming(promise):
        experiment = Experiment(case.method, case.task(), SEED, Settings(**usual), 2, "check", config)
        server, grid = deploy_here(experiment, case.few, Path(folder))
        found = server.run()
        held = [held_by(grid, server, i).row for i in range(case.few.clients)]
        chosen = Settings(**usual, mapping="loop", workers=1, device="cpu")
        sim = Simulation(case.method, case.task(), case.few, rounds=2, seed=SEED, settings=chosen)
        expected = sim.run()
    refusals = server.transport.refusals
    case.need(promise, not refusals, f"refusals: {str(refusals)[:200]}")
    everybody = [case.few.clients] * 2
    answered = [line["answered"] for line in server.record.lines]
    case.need(promise, answered == everybody, f"{answered} answers instead of {everybody}")
    case.close(promise, sim.record.server, server.record.server)
    case.close(promise, sim.record.common, server.record.common)
    for i, row in enumerate(held):
        case.close(promise, sim.record.row(i), row)
    for measure, values in expected.per_client.items():
        case.need(f"{promise} ({measure})", _near(values, found.per_client[measure], 1e-12), "other measures")
    a, b = ([r.bytes[k] for k in ("up", "down", "meta")] for r in (expected, found))
    case.need(f"{promise} (bytes)", a == b, f"{b} instead of {a}")
    return None


def loss_falls(case: Case) -> Kept:
    """Training lowers the loss by a fifth within fifteen rounds."""
    promise = "training must lower the loss by a fifth within 15 rounds"
    start = case.run(promise, rounds=0)[1].measures["loss"]["mean"]
    end = start
    for rounds in (6, 15):  # most need no more than the first
        end = case.run(promise, rounds=rounds, participation=1.0, epochs=2)[1].measures["loss"]["mean"]
        if end < 0.8 * start:
            return None
    raise PromiseError(f"{case.who}: {promise}. Got {end:.4g} from {start:.4g}; use another lr.")


@dataclass(frozen=True)
class Promise:
    """One promise: its check raises `PromiseError` where it is broken, and returns why it was not checked, if so."""

    check: Callable[[Case], Kept]

    @property
    def sentence(self) -> str:
        """What is promised."""
        return inspect.getdoc(self.check) or ""


PROMISES: dict[str, Promise] = {
    "keys": Promise(keys_round_trip),
    "runs": Promise(runs),
    "pure": Promise(is_pure),
    "mappings": Promise(mappings_agree),
    "workers": Promise(workers_agree),
    "order": Promise(order_is_free),
    "bystanders": Promise(bystanders_rest),
    "bytes": Promise(bytes_are_counted),
    "resume": Promise(state_survives),
    "zero-step": Promise(zero_step_stays),
    "lost-answers": Promise(lost_answers_are_survived),
    "flower": Promise(flower_agrees),
    "learns": Promise(loss_falls),
}
"""The promises by name, in the order in which they are checked. `learns` is checked only when it is asked for."""


def check_method(
    method: Method | type[Method] | str,
    *,
    task: Callable[[], Task] = small_task,
    data: FederatedData | None = None,
    promises: Iterable[str] | None = None,
    rounds: int = 2,
    zero_step: Literal["models", "state", "no"] = "models",
    **keys: Any,
) -> dict[str, str]:
    """Check every promise that a method keeps, on a small federation in float64; takes a few seconds.

    Args:
        method: a method, its class, or its name.
        task: makes the task anew for every run, in float64; a small perceptron if it is not given.
        data: clients for that task, at least four; seven small ones if they are not given.
        promises: names of `PROMISES`; all but `learns` if they are not given.
        rounds: how many rounds runs have; more for a method that does something else later.
        zero_step: what a learning rate of zero leaves alone: the clients' `models`, all of the `state`, or `no`thing.
        keys: keys of the method, as an experiment file writes them.

    Returns:
        `kept`, or why it was not checked, by the promise's name.

    Raises:
        PromiseError: naming the first promise that is broken.
    """
    made = _made(method, keys)
    chosen = [name for name in PROMISES if name != "learns"] if promises is None else list(promises)
    for name in chosen:
        if name not in PROMISES:
            raise ConfigError(f"check_method: unknown promise '{name}'.{nearest(name, PROMISES)}")
    if data is not None and data.clients < 4:
        raise ConfigError(f"check_method: data must have at least 4 clients. Got {data.clients}.")
    given = small_data() if data is None else data.to(torch.float64)
    few = small_data(clients=3) if data is None else given
    case = Case(method=made, task=task, data=given, few=few, rounds=rounds, fixed=zero_step)
    found: dict[str, str] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in every worker, so that sums are added in one order
    try:
        for name in chosen:
            why = PROMISES[name].check(case)
            found[name] = "kept" if why is None else f"not checked: {why}"
    finally:
        torch.set_num_threads(threads)
    return found


def _made(method: Method | type[Method] | str, keys: dict[str, Any]) -> Method:
    if isinstance(method, str):
        return make(method, **keys)
    if inspect.isclass(method) and issubclass(method, Method):
        return build(method, keys, method.__name__)
    if not isinstance(method, Method):
        raise PromiseError(f"check_method: a method must be a subclass of fedspan.Method. Got {type(method).__name__}.")
    return with_keys(method, **keys) if keys else method
