"""What an upload means to a server that has moved on: the change of what its sender received, applied to what is there.

A method that sends a whole model would otherwise pull the server back to where it was when the client began. A part of
an upload with the name and the form of a part of the download is the download trained further, so its difference to
that is what the client has to say. Other parts (gradients, sums, statistics) are averaged as they came.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from fedspan.errors import ConfigError
from fedspan.learn.sgd import is_statistic
from fedspan.method import Abilities, Announces, Judged, Ranked, Sent
from fedspan.tree import Outer, Tree


def check_method(able: Abilities) -> None:
    """Refuse a method whose late uploads have no meaning, as far as that is known before anybody trains.

    Raises:
        ConfigError: in one sentence.
    """
    method, why = able.method, ""
    if isinstance(method, Ranked):
        why = "factors of clients with ranks of their own are no changes of one model"
    elif isinstance(method, Announces) and not able.announces.silent():
        why = "all clients must hear its announcements at one time"
    elif able.coded.codecs(1):
        why = "parts are coded, so that it is not known before the end of a training when they arrive"
    elif isinstance(method, Judged):
        why = "uploads are no changes of the download's parts of their names"
    if why:
        raise _refusal(method, why)


def check_sent(able: Abilities, sent: Sent) -> None:
    """Refuse a method by what its clients send.

    Raises:
        ConfigError: in one sentence.
    """
    if sent.each:
        raise _refusal(able.method, f"the server needs every client's own {', '.join(sent.each)} of one round")
    if sent.weights:
        raise _refusal(able.method, f"{', '.join(sent.weights)} have weights of their own")


def _refusal(method: object, why: str) -> ConfigError:
    return ConfigError(f"{type(method).__name__}: it cannot run asynchronously, as {why}. Leave out [asynchronous].")


def changes(mean: Tree, down: Tree, estimates: Collection[str] = ()) -> tuple[Tree, list[str]]:
    """An upload with the download taken off where it is the download trained further; and the paths where it was.

    `mean` may be stacked over clients. What is left as it is: parts in `estimates`, and running statistics.
    """
    taken: list[str] = []
    return _shifted(mean, down, -1.0, estimates, taken), taken


def on_top_of(change: Tree, down: Tree, estimates: Collection[str] = ()) -> tuple[Tree, list[str]]:
    """The inverse of `changes`, with the download of another time."""
    added: list[str] = []
    return _shifted(change, down, 1.0, estimates, added), added


def _shifted(mean: Tree, down: Tree, sign: float, estimates: Collection[str], found: list[str]) -> Tree:
    kept = {k: part for k, part in down.items() if k not in estimates}
    return {k: _leaf_by_leaf(part, kept.get(k), sign, k, found) for k, part in mean.items()}


def _leaf_by_leaf(part: Any, base: Any, sign: float, path: str, found: list[str]) -> Any:
    if isinstance(part, dict):
        below = base if isinstance(base, dict) else {}
        return {k: _leaf_by_leaf(v, below.get(k), sign, f"{path}/{k}", found) for k, v in part.items()}
    if isinstance(part, Outer) or not isinstance(base, Tensor) or is_statistic(path):
        return part
    if not part.is_floating_point() or base.dtype != part.dtype or base.shape != part.shape:
        return part
    found.append(path)
    return part + sign * base
