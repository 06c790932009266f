"""What every method promises, checked at little cost where its functions are called in a run.

Inputs stay as they are; states and uploads are nested dicts of tensors; a state keeps its form; an upload has the same
shapes in every round. A method that breaks one of these is told so in one sentence instead of an error far from the
cause, or none. `fedspan.testing.check_method` checks the promises that cost more.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedspan.errors import PromiseError
from fedspan.learn.task import Task
from fedspan.method.protocol import Down, Method, Sent, Visit
from fedspan.tree import Outer, Tree

Form: TypeAlias = dict[str, tuple[int, ...]]
"""Shapes by path."""


class Unchanged:
    """Remembers trees that a method is given, to notice if one gets other leaves or a tensor is written to."""

    def __init__(self, **given: Tree) -> None:
        self.given = given
        self.before = self._look()

    def _look(self) -> dict[str, tuple[int, int]]:
        found: dict[str, Any] = {}
        _walk(self.given, "", found)
        return {path: (id(t), _version(t)) for path, t in found.items()}

    def check(self, method: Method, function: str, round: int) -> None:
        """Compare with how they were.

        Raises:
            PromiseError: naming what was changed.
        """
        now = self._look()
        if now == self.before:
            return
        changed = next(p for p in [*self.before, *now] if self.before.get(p) != now.get(p))
        raise PromiseError(
            f"{_who(method)}: {function} must leave what it is given as it is. In round {round} it changed"
            f" '{changed}'; make a new dict or tensor instead."
        )


def _version(t: Any) -> int:
    """How often a tensor was written to; a mapped one does not say, there the whole stack is watched."""
    if not isinstance(t, Tensor) or torch._C._functorch.is_batchedtensor(t):
        return 0
    return t._version


def _who(method: Method) -> str:
    return type(method).__name__


def need_tensors(method: Method, function: str, returned: Any) -> None:
    """Refuse what is not a nested dict of tensors.

    Raises:
        PromiseError: naming the first part that is something else.
    """
    if not isinstance(returned, dict):
        raise PromiseError(f"{_who(method)}: {function} must return a dict of tensors. Got {_called(returned)}.")
    _need_tensors(method, function, returned, "")


def _need_tensors(method: Method, function: str, part: Any, path: str) -> None:
    if isinstance(part, dict):
        for name, inner in part.items():
            if not isinstance(name, str) or "/" in name:
                raise PromiseError(
                    f"{_who(method)}: {function} must name its parts by strings without '/'. Got {name!r}."
                )
            _need_tensors(method, function, inner, f"{path}/{name}" if path else name)
    elif isinstance(part, Outer):
        _need_tensors(method, function, part._asdict(), path)
    elif not isinstance(part, Tensor):
        raise PromiseError(
            f"{_who(method)}: {function} must return tensors in nested dicts. Got {_called(part)} at '{path}'."
        )


def _called(value: object) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def form_of(part: Tree) -> Form:
    """The shapes of a tree by path."""
    found: dict[str, Any] = {}
    _walk(part, "", found)
    return {path: tuple(t.shape) for path, t in found.items()}


def _walk(part: Tree, prefix: str, found: dict[str, Any]) -> None:
    """The leaves by path; without generators, as it is done for every client of every round."""
    for name, inner in part.items():
        if isinstance(inner, dict):
            _walk(inner, f"{prefix}{name}/", found)
        elif isinstance(inner, Outer):
            found[f"{prefix}{name}/a"], found[f"{prefix}{name}/b"] = inner
        else:
            found[prefix + name] = inner


def check_down(method: Method, down: Any, clients: int) -> None:
    """Check what `download` returned.

    Raises:
        PromiseError: if it is no `Down` of tensors, or does not have one row of `own` per client.
    """
    if not isinstance(down, Down):
        raise PromiseError(f"{_who(method)}: download must return a Down. Got {_called(down)}.")
    need_tensors(method, "download", down.shared)
    need_tensors(method, "download", down.own)
    for path, shape in form_of(down.own).items():
        if shape[:1] != (clients,):
            raise PromiseError(
                f"{_who(method)}: download must give one row of own per client, {clients}. Got shape {shape} at"
                f" '{path}'."
            )


class SameShapes:
    """Remembers the shapes of uploads: a part has one shape in every round, as long as downloads keep theirs.

    A method may send other parts in other rounds, as one that only begins to share something later does.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, Form] = {}

    def after(self, given: Any) -> Form:
        """The shapes seen after downloads of one form; what is seen next is added to them."""
        return self._seen.setdefault(given, {})


class ChunkWatch:
    """Calls `client_update` for the clients of a chunk, all of one form, and sees that it keeps its promises.

    Args:
        seen: the shapes of earlier uploads.
        key: what tells clients of other shapes apart.
        rows: the clients' states, stacked, with `own` in the same order; `shared` and `common` are the same for all.
    """

    def __init__(
        self,
        method: Method,
        round: int,
        seen: SameShapes,
        key: Any,
        *,
        rows: Tree,
        shared: Tree,
        own: Tree,
        common: Tree,
    ) -> None:
        self.method, self.round, self.who = method, round, f"{_who(method)}: client_update"
        self.state = {path: shape[1:] for path, shape in form_of(rows).items()}
        down = form_of(shared) | {path: shape[1:] for path, shape in form_of(own).items()}
        self.sent = seen.after((key, *down.items(), *form_of(common).items()))
        self.stacks = Unchanged(client=rows, down={**shared, **own}, common=common)

    def update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        """One client's round.

        Raises:
            PromiseError: naming the promise that it broke.
        """
        given = Unchanged(client=client, down=down)
        returned = self.method.client_update(task, client, down, visit)
        kept, sent = check_answer(self.method, returned)
        given.check(self.method, "client_update", self.round)
        state = form_of(kept)
        if state != self.state:
            self._differ("keep a client's state in the form init_client gave it", self.state, state)
        form = form_of({"mean": sent.mean, "each": sent.each, "weights": sent.weights})
        if form != self.sent:
            before = {path: self.sent[path] for path in form if path in self.sent}
            self._differ("send the same shapes in every round", before, {path: form[path] for path in before})
            self.sent.update(form)
        return kept, sent

    def finish(self) -> None:
        """Look at what all of them were given, after the last one.

        Raises:
            PromiseError: if it was changed.
        """
        self.stacks.check(self.method, "client_update", self.round)

    def _differ(self, promise: str, before: Form, after: Form) -> None:
        """Raise at the first path where forms differ; say nothing where they are equal but for their order."""
        for path in [*before, *after]:
            if before.get(path) != after.get(path):
                got = "nothing" if path not in after else f"shape {after[path]}"
                had = "nothing" if path not in before else f"shape {before[path]}"
                raise PromiseError(
                    f"{self.who} must {promise}. Got {got} at '{path}' in round {self.round}, where there was {had}."
                )


def check_answer(method: Method, returned: Any) -> tuple[Tree, Sent]:
    """Check what `client_update` returned: what is kept, and a `Sent`, both of tensors.

    Raises:
        PromiseError: naming what is missing, or is something else.
    """
    who = f"{_who(method)}: client_update"
    if not isinstance(returned, tuple) or isinstance(returned, Sent) or len(returned) != 2:
        raise PromiseError(f"{who} must return two things, what is kept and a Sent. Got {_called(returned)}.")
    kept, sent = returned
    if not isinstance(sent, Sent):
        raise PromiseError(f"{who} must return a Sent beside what is kept. Got {_called(sent)}.")
    need_tensors(method, "client_update", kept)
    need_tensors(method, "client_update", sent._asdict())
    if sent.weight.shape:
        raise PromiseError(f"{who} must send one number as its weight. Got shape {tuple(sent.weight.shape)}.")
    return kept, sent


def check_server(method: Method, before: Tree, after: Any, round: int) -> Tree:
    """Check what `server_update` returned: tensors, with every part that `init_server` made.

    Parts may be added, and what was added may go again, so names are compared in the first round only.

    Raises:
        PromiseError: naming what is missing or no tensor.
    """
    need_tensors(method, "server_update", after)
    state: Tree = after
    forgotten = [name for name in before if name not in state] if round == 1 else []
    if forgotten:
        raise PromiseError(
            f"{_who(method)}: server_update must return every part of the state that init_server made. In round"
            f" {round} it forgot '{forgotten[0]}'."
        )
    return state
