"""Simulations: rounds of a federation on one machine."""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from fedspan import tree, wire
from fedspan.data.client_objects import federate
from fedspan.data.describe import label_counts
from fedspan.data.federated import FederatedData, shape_of
from fedspan.errors import ConfigError, DataError
from fedspan.learn import accelerator
from fedspan.learn.batches import Batch
from fedspan.learn.class_features import class_matrix
from fedspan.learn.losses import IGNORED, kind_of_labels
from fedspan.learn.metrics import check_metrics
from fedspan.learn.precision import Precision, training_in
from fedspan.learn.sgd import sgd
from fedspan.learn.task import Task
from fedspan.method import Federation, Method
from fedspan.method.fields import flat
from fedspan.methods import name_of
from fedspan.randomness import key
from fedspan.simulation import warnings
from fedspan.simulation.asynchronous.asynchronous_transport import AsynchronousTransport, check_run
from fedspan.simulation.asynchronous.timeline import Asynchronous
from fedspan.simulation.defence import Defence
from fedspan.simulation.devices import Devices
from fedspan.simulation.driver import Line, OnRound, RoundDriver
from fedspan.simulation.engine import Engine, Way, choose_mapping, mapping_fault
from fedspan.simulation.local_transport import LocalTransport
from fedspan.simulation.protocols import EvaluationSettings, evaluation_settings
from fedspan.simulation.record import Record
from fedspan.simulation.result import Result
from fedspan.simulation.settings import Settings, settings_from
from fedspan.tree import Tree

LABEL_CELLS = 100_000  # clients times classes; beyond that a picture would show nothing, and the result would swell


class Simulation(RoundDriver):
    """A run: a method on a task and a federation's data. `run()` does what is left to do.

    Args:
        out: the run directory; a run found there is resumed, unless `fresh`.
        config: the configuration to keep with the results.
        read_only: only look at a run that is there; nothing is locked or written.
        devices: what clients would compute with; rounds are then timed as if on them (`clock` in the history).
        evaluate: metrics, and which models are judged, as `EvaluationSettings` or its fields.
        defence: how uploads are judged; not at all if not given.
        asynchronous: how clients train without waiting for one another; in synchronous rounds if not given.
        cluster: address of a Ray cluster that computes the rounds (`auto`, or HOST:PORT); this machine if not given.
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
        evaluate: EvaluationSettings | Mapping[str, Any] | None = None,
        defence: Defence | None = None,
        asynchronous: Asynchronous | None = None,
        cluster: str | None = None,
    ) -> None:
        for name, value in (("rounds", rounds), ("seed", seed)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"Simulation: {name} must be an integer >= 0. Got {value!r}.")
        s = settings or Settings()
        self.task, self.dtype = task, s.torch_dtype
        self.data = data.to(self.dtype)
        check(method, task, self.data, s)
        judging = evaluation_settings(evaluate)
        check_metrics(judging.found(), task.kind, self.data.classes)
        size = None if s.batch_size == "full" else s.batch_size
        steps = s.epochs * (1.0 if size is None else math.ceil(float(np.mean(self.data.sizes)) / size))
        self.mapping, fallback = _mapping(task, self.data, s, steps)
        # Logits of a row are as many as tokens times the vocabulary: no more rows at once than in training.
        how: dict[str, Any] = {"evaluation_batch": min(size or 512, 512)} if task.kind == "language" else {}
        # Who only looks at a run needs no accelerator for it.
        used = [accelerator.HOST] if read_only else accelerator.find(s.device, s.precision)
        _check_cluster(cluster, asynchronous, used[0])
        how |= {"judging": judging, "precision": s.precision, "device": used[0]}
        engine = Engine(method, task, self.data, seed, size, s.epochs, self.mapping, **how)
        self.capacity = tuple(engine.able.capacity(task, i) for i in range(self.data.clients))
        federation = Federation(self.data.clients, seed, self.capacity, self.data.groups)
        config = config or {"method": {"name": name_of(method), **flat(method)}, "rounds": rounds}
        when: dict[str, Any] = {}
        if asynchronous is not None:
            devices = devices or Devices()
            check_run(asynchronous, engine, s, devices, defence)
            when = {"asynchronous": asdict(asynchronous), "devices": asdict(devices)}
        record = Record(
            engine, federation, s, config=config, out=out, fresh=fresh, read_only=read_only, defence=defence, when=when
        )
        rest: dict[str, Any] = {"rounds": rounds, "config": config}
        self.devices, self.asynchronous, self.cluster = devices, asynchronous, cluster
        transport: LocalTransport
        if asynchronous is not None and devices is not None:
            transport = AsynchronousTransport(engine, record, devices, asynchronous, rounds=rounds)
        else:
            there: dict[str, Any] = {} if cluster is not None else {"accelerators": used}
            transport = _transport(cluster)(engine, record, devices, rounds=rounds, **there)
        super().__init__(engine, record, transport, **rest)
        if not read_only and out is not None and data.preprocessing is not None:
            data.preprocessing.write(out)  # so that later rows can be prepared as these were
        if not read_only:
            self.messages.extend([*fallback, *warnings.before_run(method, self.data, rounds)])
        if record.resumed:
            done = record.progress.round
            self.messages.append(f"Resuming {out} after round {done}; {max(0, rounds - done)} of {rounds} are left.")

    def run(self, on_round: OnRound | None = None) -> Result:
        """Do the rounds that are left, evaluate, and return the result.

        Raises:
            Divergence: if training leaves the finite numbers; the last good state has been saved.
            ConfigError: if there is no such cluster, or nobody is left on it.
        """
        if self.cluster is None:
            return super().run(on_round)
        from fedspan.simulation.cluster.ray_connection import joined  # imports what only this needs

        with joined(self.cluster):
            return super().run(on_round)

    def _undisturbed(self) -> AbstractContextManager[list[bool]]:
        return _finish_first()

    def _sampled(self, t: int) -> Sequence[int]:
        if isinstance(self.transport, AsynchronousTransport):
            return [flight.client for flight in self.transport.events(t).started]
        return super()._sampled(t)

    def _stepped(self, line: Line) -> None:
        """Tell once that the losses have exploded, or that a term overshoots; the note stays with the run."""
        notes = self.record.progress.notes
        self.messages.extend(warnings.exploded_first(self.task, self.data, line, notes))
        if self.cluster is None:  # there private states are on other machines
            found = warnings.overshooting_after(self.method, self.data, line, self.rounds, self.personal, notes)
            self.messages.extend(found)

    def personal(self, client: int) -> tuple[Task, Tree]:
        """The task and the weights client `client` predicts with now, on the host."""
        if not 0 <= client < self.data.clients:
            raise ConfigError(f"Result: client must lie in 0..{self.data.clients - 1}. Got {client}.")
        capacity, t = self.record.capacity(client), self.record.progress.round
        down = self.engine.able.download(
            self.record.server, self.engine.ids([client], at_home=True), capacity, t, use=True
        )
        both, _ = wire.roundtrip({**down.shared, **tree.take(down.own, 0)}, self.engine.able.coded.codecs(t))
        weights = self.engine.personal(capacity, t, client, self.record.row(client), both, self.record.common)
        return self.engine.host_model(capacity), accelerator.to_device(weights, accelerator.HOST)

    def _about(self) -> dict[str, Any]:
        return {
            "mapping": self.mapping,
            "names": self.data.names,
            "groups": None if self.data.groups is None else self.data.groups.tolist(),
            "labels": self._labels(),
            "capacities": [str(c) for c in self.capacity] if len(set(self.capacity)) > 1 else None,
            "cluster": self.transport.facts.to_json() if self.cluster is not None else {},  # type: ignore[attr-defined]
            "simulation": self,
        }

    def _labels(self) -> list[list[int]] | None:
        """Who holds how many of which class, unless there are none, or too many to be looked at."""
        classes = self.data.classes
        if classes is None or self.task.kind != "classification" or self.data.clients * classes > LABEL_CELLS:
            return None
        counts: list[list[int]] = label_counts(self.data).tolist()
        return counts


def _check_cluster(cluster: str | None, asynchronous: Asynchronous | None, device: torch.device) -> None:
    """Refuse what a cluster does not compute.

    Raises:
        ConfigError: for asynchronous rounds, and for a device that its actors have not.
    """
    if cluster is not None and asynchronous is not None:
        raise ConfigError("Simulation: a run with [asynchronous] goes on one machine; leave out the cluster. Got both.")
    if cluster is not None and device.type != "cpu":
        raise ConfigError(
            f"Simulation: on a cluster train.device must be 'cpu', as chunks are computed by its processors. Got"
            f" {str(device)!r}."
        )


def _transport(cluster: str | None) -> type[LocalTransport]:
    """What brings work to simulated clients."""
    if cluster is None:
        return LocalTransport
    from fedspan.simulation.cluster.cluster_transport import ClusterTransport  # imports what only this needs

    return ClusterTransport


def simulate(
    method: Method,
    model: nn.Module | Task | Callable[[], nn.Module],
    clients: FederatedData | Sequence[Any] | Mapping[str, Any],
    *,
    rounds: int,
    seed: int = 0,
    out: str | Path | None = None,
    fresh: bool = False,
    on_round: OnRound | None = None,
    evaluate: EvaluationSettings | Mapping[str, Any] | None = None,
    defence: Defence | None = None,
    devices: Devices | None = None,
    asynchronous: Asynchronous | None = None,
    cluster: str | None = None,
    **settings: Any,
) -> Result:
    """Simulate a federation on this machine.

    Args:
        model: a module (its weights are the common start), a function that builds one (seeded by `seed`), or a `Task`.
        clients: `FederatedData`, or what `federate` takes: one (x, y) pair, data set or frame per client, split 75/25
            inside each client.
        out: a run directory; a run found there is resumed, unless `fresh`.
        evaluate: what is measured beside loss and accuracy, e.g. `{"metrics": ["roc_auc", my_metric]}`; see
            `EvaluationSettings`.
        defence: how uploads are judged, e.g. `Defence(rule="clip")`; not at all if not given.
        devices: what clients would compute with, e.g. `Devices(gflops=(1.0, 0.1), mbps=(10.0,))`; rounds are then timed
            as if on them.
        asynchronous: how clients train without waiting for one another, e.g. `Asynchronous(buffer=10)`; needs
            `devices`. In synchronous rounds if not given.
        cluster: address of a Ray cluster that computes the rounds (`auto`, or HOST:PORT); this machine if not given.
        settings: fields of `Settings`, e.g. `participation=0.1, batch_size=256`.
    """
    data = clients if isinstance(clients, FederatedData) else federate(clients, seed=seed)
    chosen = settings_from(settings, "simulate")
    if not isinstance(model, Task):
        dtype = chosen.torch_dtype
        kind = kind_of_labels(data.y, getattr(data, "task", None))
        model = Task(model, kind, dtype=dtype, seed=None if isinstance(model, nn.Module) else seed)
    path = None if out is None else Path(out)
    more: dict[str, Any] = {"settings": chosen, "out": path, "fresh": fresh, "evaluate": evaluate}
    more |= {"defence": defence, "devices": devices, "asynchronous": asynchronous, "cluster": cluster}
    sim = Simulation(method, model, data, rounds=rounds, seed=seed, **more)
    return sim.run(on_round)


def check(method: Method, task: Task, data: FederatedData, settings: Settings) -> None:
    """Refuse what cannot run, before anything runs."""
    if task.stats and settings.batch_size == 1:
        raise ConfigError("Train: batch_size must be at least 2 with batch normalisation. Got 1; or use GroupNorm.")
    if method.about.needs_groups and data.groups is None:
        raise ConfigError(
            f"{type(method).__name__}: the partition must know the groups of its clients; use permuted-groups,"
            " shifted-groups, label-groups or domains, or choose another method."
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
        if settings.precision == "bf16":
            _try_bf16(member, data)
    if method.about.needs_classes:
        class_matrix(task, type(method).__name__)


def _mapping(task: Task, data: FederatedData, settings: Settings, steps: float) -> tuple[Way, list[str]]:
    """How clients are computed, and a note where a model that should be mapped cannot be.

    Raises:
        ConfigError: if `vmap` or `folded` is asked for and cannot be had.
    """
    mode = settings.mapping
    mapping = choose_mapping(task, mode, steps)
    if mapping == "loop":
        return mapping, []
    fault = _fault(task, data, mapping, settings.precision)
    if fault is not None and mode == "auto" and mapping == "folded":  # what cannot be folded may be mapped
        mapping, fault = "vmap", _fault(task, data, "vmap", settings.precision)
    if fault is None:
        return mapping, []
    if mode != "auto":
        raise ConfigError(
            f"Task: the model cannot be trained for many clients at once ({fault}); run with train.mapping='loop'."
        )
    return "loop", [f"Clients are computed one after another, as the model cannot be mapped over them: {fault}."]


def _fault(task: Task, data: FederatedData, way: Way, precision: Precision) -> str | None:
    """Why one of the models cannot be computed for many clients at once in this way; None if all can."""
    rows = _two_rows(data)
    x, y = tree.take(data.x, rows), data.y[rows]
    found = (mapping_fault(m, x, y, way, precision) for m in task.kinds.values() or [task])
    return next((fault for fault in found if fault is not None), None)


def _try(task: Task, data: FederatedData) -> None:
    """Refuse a model that does not take the data or does not give what they need."""
    rows = _two_rows(data)
    x = tree.take(data.x, rows)
    try:
        output = task.predict(task.init(), x)
    except ConfigError:
        raise  # it says already what is wrong
    except (RuntimeError, ValueError, IndexError, TypeError) as e:
        raise ConfigError(f"Task: the model does not take examples of shape {shape_of(data.x)}: {e}") from None
    wide = output.shape[1] if output.ndim == 2 else 0
    if task.kind == "classification":
        if data.classes is None or data.y.is_floating_point():
            raise ConfigError(f"Data: class labels must be integers. Got {data.y.dtype}; or use a regression task.")
        if wide < data.classes:
            raise ConfigError(f"Task: the model must have at least {data.classes} outputs, one per class. Got {wide}.")
    tokens = tree.leaves(data.x)[0]
    if task.kind == "language" and (output.ndim != 3 or data.y.shape != tokens.shape or data.y.is_floating_point()):
        raise ConfigError(
            f"Task: a language model must turn rows of tokens into rows of logits, with labels of the rows' shape"
            f" {shape_of(data.x)}. Got outputs of shape {tuple(output.shape[1:])} and labels of"
            f" {tuple(data.y.shape[1:])}."
        )
    if task.kind in ("regression", "multi-label") and output[0].numel() != data.y[0].numel():
        raise ConfigError(f"Task: the model must have {data.y[0].numel()} output(s). Got {output[0].numel()}.")
    if task.kind == "survival" and output[0].numel() != 1:
        raise ConfigError(f"Task: a survival model must have 1 output, the risk. Got {output[0].numel()}.")
    _check_labels(task, data)
    task.example_loss(output, data.y[rows])  # a batch of two tells a value per example from one of the batch


def _try_bf16(task: Task, data: FederatedData) -> None:
    """Refuse a model whose training pass cannot be computed in bf16."""
    rows = _two_rows(data)
    batch = Batch(tree.take(data.x, rows), data.y[rows], None, key(0, "bf16"), 0)
    try:
        with training_in("bf16"):
            sgd(task.loss, task.init(), [batch], 0.0)
    except (RuntimeError, NotImplementedError) as e:
        raise ConfigError(
            f"Task: the model cannot be trained in bf16 ({str(e).splitlines()[0][:160]}); run with"
            " train.precision='float32'."
        ) from None


def _check_labels(task: Task, data: FederatedData) -> None:
    """Refuse labels that are not what the kind of task takes, naming a client that has them.

    Raises:
        DataError: otherwise.
    """
    y, flat = data.y, data.y.reshape(len(data.y), -1)
    if task.kind == "multi-label":
        wrong, want = ((flat != 0) & (flat != 1)).any(1), "0 or 1 for every label"
    elif task.kind == "survival":
        if y.ndim != 2 or y.shape[1] != 2 or not y.is_floating_point():
            raise DataError(
                "Data: a survival task needs a time and an event (1, or 0 if censored) per example, real numbers of"
                f" shape [examples, 2]. Got {y.dtype} of shape {tuple(y.shape)}."
            )
        wrong = ~((y[:, 0] >= 0) & ((y[:, 1] == 0) | (y[:, 1] == 1)))
        want = "a time of at least 0 and an event of 0 or 1"
    elif task.kind == "tagging" and not y.is_floating_point():
        most = IGNORED if data.classes is None else data.classes - 1
        held = flat != task.ignored
        wrong = (held & ((flat < 0) | (flat > most))).any(1) if data.classes is not None else (held & (flat < 0)).any(1)
        want = f"classes 0..{most}, or {task.ignored} where nothing is to be found" if data.classes else "classes >= 0"
    else:
        return
    rows = wrong.nonzero().reshape(-1).numpy()
    for i, own in enumerate(zip(data.train, data.test, data.validation)):
        bad = np.intersect1d(np.concatenate(own), rows)
        if len(bad):
            got = flat[int(bad[0])].tolist()
            raise DataError(
                f"Data: labels of a {task.kind} task must be {want}. Got {str(got)[:60]} in pool row {bad[0]} of client"
                f" {data.names[i]}."
            )


def _two_rows(data: FederatedData) -> torch.Tensor:
    """Two training examples, of the first clients that have them; twice the same if there is but one."""
    rows = np.concatenate([own[:2] for own in data.train[:2]])
    return torch.from_numpy(np.resize(rows, 2))


@contextmanager
def _finish_first() -> Iterator[list[bool]]:
    """Let Ctrl-C wait for the end of the block; a second one does not wait, and is the handler's that was there before.

    Outside the main thread, and where Ctrl-C is ignored, nothing changes.
    """
    pressed: list[bool] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield pressed
        return

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            before(number, frame)
            return
        pressed.append(True)
        print("Stopping after this round; press Ctrl-C again to stop at once.", file=sys.stderr, flush=True)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # the handler before may have put another one in its place
            signal.signal(signal.SIGINT, before)
