"""A method that breaks a promise is told so in one sentence: by `check_method`, and by a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from own_method import FedDyn

from conftest import make_data, make_task
from fedspan import ConfigError, Down, Method, PromiseError, Sent, Training, simulate
from fedspan.testing import PROMISES, check_method


@dataclass(frozen=True, kw_only=True)
class Plain(Training):
    """Averages a model and counts a client's rounds: a method that keeps every promise."""

    def init_server(self, task: Any, federation: Any) -> Any:
        return {"theta": task.init(), "rounds": torch.zeros(())}

    def init_client(self, task: Any, who: Any) -> Any:
        return {"visits": torch.zeros(()), "bias": {"b": torch.zeros(2)}}

    def download(self, server: Any, ids: Any, capacity: Any, round: Any) -> Any:
        return Down(shared={"theta": server["theta"]})

    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        theta = self.fit(task.loss, down["theta"], visit["train"])
        return client | {"visits": client["visits"] + 1}, Sent(weight=visit.examples, mean={"theta": theta})

    def server_update(self, server: Any, round: Any) -> Any:
        return {"theta": round.mean["theta"], "rounds": server["rounds"] + 1}

    def personal(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        return down["theta"]


class WritesToItsState(Plain):
    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        client["visits"].add_(1)
        return super().client_update(task, client, down, visit)


class ReplacesAPartOfItsState(Plain):
    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        client["bias"]["b"] = client["bias"]["b"] + 1
        return super().client_update(task, client, down, visit)


class WritesToTheDownload(Plain):
    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        down["theta"]["0.bias"].zero_()
        return super().client_update(task, client, down, visit)


class ReplacesAPartOfTheDownload(Plain):
    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        down["theta"]["0.bias"] = torch.zeros(7, dtype=torch.float64)
        return super().client_update(task, client, down, visit)


class SendsANumber(Plain):
    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        client, sent = super().client_update(task, client, down, visit)
        return client, sent._replace(mean=sent.mean | {"c": 0.5})


class SendsADict(Plain):
    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        client, sent = super().client_update(task, client, down, visit)
        return client, sent.mean


class KeepsNothing(Plain):
    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        return super().client_update(task, client, down, visit)[1]


class ForgetsItsState(Plain):
    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        client, sent = super().client_update(task, client, down, visit)
        return {"visits": client["visits"]}, sent


class GrowsItsState(Plain):
    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        client, sent = super().client_update(task, client, down, visit)
        return client | {"visits": client["visits"].expand(2)}, sent


class SendsAnotherShapeLater(Plain):
    def download(self, server: Any, ids: Any, capacity: Any, round: Any) -> Any:
        object.__setattr__(self, "later", round > 1)
        return super().download(server, ids, capacity, round)

    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        client, sent = super().client_update(task, client, down, visit)
        return client, sent._replace(mean=sent.mean | {"c": torch.zeros(2 if self.later else 1)})


class WeighsWithAVector(Plain):
    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        client, sent = super().client_update(task, client, down, visit)
        return client, sent._replace(weight=sent.weight.expand(2))


class ForgetsAPartOfTheServer(Plain):
    def server_update(self, server: Any, round: Any) -> Any:
        return {"theta": round.mean["theta"]}


class WritesToTheServer(Plain):
    def server_update(self, server: Any, round: Any) -> Any:
        server["rounds"].add_(1)
        return server | {"theta": round.mean["theta"]}


class SendsNothingDown(Plain):
    def download(self, server: Any, ids: Any, capacity: Any, round: Any) -> Any:
        return {"theta": server["theta"]}


class RowsForNobody(Plain):
    def download(self, server: Any, ids: Any, capacity: Any, round: Any) -> Any:
        return Down(shared={"theta": server["theta"]}, own={"p": torch.zeros(1)})


class StartsWithANumber(Plain):
    def init_server(self, task: Any, federation: Any) -> Any:
        return {"theta": task.init(), "rounds": 0}


class StartsClientsWithAList(Plain):
    def init_client(self, task: Any, who: Any) -> Any:
        return {"visits": [0.0]}


class PredictsWithNothing(Plain):
    def personal(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        return None


BROKEN: list[tuple[type[Plain], str]] = [
    (WritesToItsState, "client_update must leave what it is given as it is. In round 1 it changed 'client/visits'"),
    (ReplacesAPartOfItsState, "client_update must leave what it is given as it is. In round 1 it changed 'client/bias"),
    (WritesToTheDownload, "client_update must leave what it is given as it is. In round 1 it changed 'down/theta/0.b"),
    (ReplacesAPartOfTheDownload, "client_update must leave what it is given as it is. In round 1 it changed 'down/the"),
    (SendsANumber, "client_update must return tensors in nested dicts. Got a value of type float at 'mean/c'"),
    (SendsADict, "client_update must return a Sent beside what is kept. Got a value of type dict"),
    (KeepsNothing, "client_update must return two things, what is kept and a Sent. Got a value of type Sent"),
    (
        ForgetsItsState,
        "client_update must keep a client's state in the form init_client gave it. Got nothing at 'bias/b'",
    ),
    (
        GrowsItsState,
        "client_update must keep a client's state in the form init_client gave it. Got shape (2,) at 'visits",
    ),
    (SendsAnotherShapeLater, "must send the same shapes in every round. Got shape (2,) at 'mean/c' in round 2"),
    (WeighsWithAVector, "client_update must send one number as its weight. Got shape (2,)"),
    (ForgetsAPartOfTheServer, "server_update must return every part of the state that init_server made. In round 1 it"),
    (WritesToTheServer, "server_update must leave what it is given as it is. In round 1 it changed 'server/rounds'"),
    (SendsNothingDown, "download must return a Down. Got a value of type dict"),
    (RowsForNobody, "download must give one row of own per client, "),
    (StartsWithANumber, "init_server must return tensors in nested dicts. Got a value of type int at 'rounds'"),
    (StartsClientsWithAList, "init_client must return tensors in nested dicts. Got a value of type list at 'visits'"),
    (PredictsWithNothing, "personal must return a dict of tensors. Got nothing"),
]
NAMED = pytest.mark.parametrize(("cls", "words"), BROKEN, ids=[cls.__name__ for cls, _ in BROKEN])


@NAMED
@pytest.mark.parametrize("mapping", ["vmap", "loop"])
def test_a_run_names_the_broken_promise(cls: type[Plain], words: str, mapping: str) -> None:
    if cls is ReplacesAPartOfItsState and mapping == "vmap":
        pytest.skip("a mapped client has a dict of its own")
    with pytest.raises(PromiseError) as e:
        simulate(
            cls(), make_task(), make_data(), rounds=2, precision="float64", workers=1, mapping=mapping, evaluate_every=1
        )
    assert words in str(e.value) and str(e.value).startswith(f"{cls.__name__}: ")
    assert "\n" not in str(e.value)


@NAMED
def test_check_method_names_the_broken_promise(cls: type[Plain], words: str) -> None:
    with pytest.raises(PromiseError) as e:
        check_method(cls)
    assert words in str(e.value) and "\n" not in str(e.value)


def test_a_worker_hands_the_sentence_over() -> None:
    with pytest.raises(PromiseError, match="Got a value of type float at 'mean/c'"):
        simulate(SendsANumber(), make_task(), make_data(), rounds=1, precision="float64", workers=2, mapping="loop")


def test_a_method_that_keeps_its_promises_is_told_so() -> None:
    assert set(check_method(Plain).values()) == {"kept"}


# ------------------------------------------------------------------------------------------------ what costs more


class AsksForNumbers(Plain):
    """Only a loop can do this: `float` of a mapped tensor."""

    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        assert float(visit.examples) > 0
        return super().client_update(task, client, down, visit)


class Draws(Plain):
    """Random numbers that no key decides."""

    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        client, sent = super().client_update(task, client, down, visit)
        return client, sent._replace(mean={"theta": {k: t + torch.rand(()) for k, t in sent.mean["theta"].items()}})


class Remembers(Plain):
    """State outside the state: it is gone after a checkpoint, and not in a worker."""

    def server_update(self, server: Any, round: Any) -> Any:
        object.__setattr__(self, "seen", getattr(self, "seen", 0) + 1)
        return {"theta": round.mean["theta"], "rounds": torch.tensor(float(self.seen))}


class WeighsOtherwise(Plain):
    """Declares weights by examples, and sends others."""

    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        client, sent = super().client_update(task, client, down, visit)
        return client, sent._replace(weight=sent.weight * 2)


class MovesByItself(Plain):
    """Learns something where the learning rate is zero."""

    def server_update(self, server: Any, round: Any) -> Any:
        return {"theta": {k: t + 0.1 for k, t in round.mean["theta"].items()}, "rounds": server["rounds"]}


class Undecorated(Plain):
    """A field that the class forgot to make one."""

    mu: float = 0.1


class Unlucky(Plain):
    """An error of the method's own."""

    def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
        return client["missing"]


@pytest.mark.parametrize(
    ("cls", "promise", "words"),
    [
        (
            AsksForNumbers,
            "mappings",
            "mapped over clients it must compute what it computes one after another (vmap). Got",
        ),
        (Draws, "pure", "the same inputs must give the same answer. '1/mean/theta/0.weight' differs by"),
        (Remembers, "resume", "a run that goes on from its checkpoint must equal one that was never interrupted"),
        (WeighsOtherwise, "order", "weights must be as about.weight = 'samples' says"),
        (MovesByItself, "zero-step", "with lr = 0 the clients' models must stay as they are"),
        (Undecorated, "keys", "'mu' is none, so decorate the class with @dataclass(frozen=True, kw_only=True)"),
        (Unlucky, "runs", "it must run one client after another. Got KeyError: 'missing'"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_the_promise_that_is_broken_is_named(cls: type[Plain], promise: str, words: str) -> None:
    with pytest.raises(PromiseError) as e:
        check_method(cls, promises=[promise])
    assert words in str(e.value), str(e.value)
    assert "\n" not in str(e.value)


def test_what_is_not_a_method_is_refused() -> None:
    with pytest.raises(PromiseError, match=r"must be a subclass of fedspan\.Method. Got int"):
        check_method(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"unknown promise 'runns'\. Did you mean 'runs'\?"):
        check_method(Plain, promises=["runns"])


def test_every_promise_is_a_sentence() -> None:
    assert all(p.sentence and "\n" not in p.sentence.split("\n\n")[0] for p in PROMISES.values())


def test_a_method_without_step_size_says_what_was_not_checked() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Counts(Method):
        def init_server(self, task: Any, federation: Any) -> Any:
            return {"theta": task.init()}

        download = Plain.download
        personal = Plain.personal

        def client_update(self, task: Any, client: Any, down: Any, visit: Any) -> Any:
            return client, Sent(weight=visit.examples, mean={"n": visit.examples})

        def server_update(self, server: Any, round: Any) -> Any:
            return server

    assert check_method(Counts, promises=["runs", "zero-step"])["zero-step"] == "not checked: it has no lr"


def test_own_method_keeps_every_promise() -> None:
    found = check_method(FedDyn, promises=PROMISES, alpha=0.05, zero_step="state")
    assert set(found.values()) == {"kept"} and found.keys() == PROMISES.keys()
