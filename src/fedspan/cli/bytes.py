"""`fedspan bytes`: what would cross the wire, without training."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspan.cli.console import note, say, show, size, table
from fedspan.cli.run import Experiment, Overrides

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedspan.config import RunConfig
    from fedspan.data.federated import FederatedData
    from fedspan.learn.task import Task
    from fedspan.method import Method
    from fedspan.methods.byte_rules import ByteRule
    from fedspan.tree import Tree

Rule = Annotated[
    str,
    typer.Option(
        "--rule", help="own: what really travels. published: as the method's paper, or a paper by name, counts."
    ),
]
NonZero = Annotated[
    str,
    typer.Option(
        "--nonzero",
        help="Share of entries that are not zero in what is sent sparse, e.g. 0.6, or up and down 0.6,1.",
        show_default=False,
    ),
]
BOTH = ("up", "down")


@dataclass(frozen=True)
class Traffic:
    """Bytes of one client's round by direction and name per capacity, and of the whole run; None = depends on data."""

    per_capacity: dict[Any, dict[str, dict[str, int | None]]]
    clients: dict[Any, int]
    run: dict[str, int | None]
    made_up: str = ""


def bytes_(exp: Experiment, overrides: Overrides = None, rule: Rule = "own", nonzero: NonZero = "") -> None:
    """Count the bytes of one client's round and of the whole run, up and down, without training."""
    from fedspan.config import load_config
    from fedspan.method import Abilities, Announces

    config = load_config(exp, overrides or []).resolve()
    published = find_rule(rule, config.method["name"])
    shares = _shares(nonzero)
    method, found = count(config, published, shares)
    rows = []
    for capacity, directions in found.per_capacity.items():
        label = "all clients" if capacity is None else f"{capacity} ({found.clients[capacity]} clients)"
        for direction, names in directions.items():
            rows += [(label, direction, k, _shown(v)) for k, v in names.items()]
            rows.append((label, direction, "together", _shown(_sum(list(names.values())))))
    show(table(["client", "direction", "name", "bytes per round"], rows, right=[3]))
    total = ", ".join(f"{_shown(found.run[d])} {d}" for d in ("up", "down"))
    say(f"{config.method['name']}, {config.rounds} rounds: {total} (weights of uploads and evaluation not counted).")
    together = _sum([found.run["up"], found.run["down"]])
    say(f"Together: {_shown(together)}.")
    if published is not None:
        note(f"Counted as {published.paper} do: {published.said_of(config.method['name'])}.")
    if shares:
        said = ", ".join(f"{100 * v:g} % {k}" for k, v in shares.items())
        note(f"Counted as if so many entries of what is sent sparse were not zero: {said}.")
    if found.made_up:
        note(f"Counted on made-up examples of the data's shape: {found.made_up}")
    able = Abilities(method)
    if isinstance(method, Announces):
        note("News that this method announces to all clients come on top.")
    if any(len(able.ranked.levels(i)) > 1 for i in range(sum(found.clients.values()))):
        note("Ranks adapt during training: clients that come down send and receive less than this.")
    if config.train.drop_rate:
        note("Clients that do not answer are counted as if they did.")


def find_rule(rule: str, method: str) -> ByteRule | None:
    """The rule of that name for a method; None is our own.

    Raises:
        ConfigError: if there is no such rule, or it does not speak of the method.
    """
    from fedspan.errors import ConfigError, nearest
    from fedspan.methods.byte_rules import RULES

    if rule == "own":
        return None
    if rule != "published" and rule not in RULES:
        raise ConfigError(
            f"bytes: --rule must be own, published or a paper's. Got '{rule[:60]}'.{nearest(rule, RULES)}"
        )
    for name, found in RULES.items():
        if rule in ("published", name) and method in found.methods:
            return found
    whose = "no paper's rule" if rule == "published" else f"the rule of {rule}"
    raise ConfigError(f"bytes: {whose} speaks of method '{method}'; use --rule own.")


def _shares(text: str) -> dict[str, float]:
    """The shares of `--nonzero` by direction; one number is for both, none leaves open what depends on values."""
    from fedspan.cli.console import listed
    from fedspan.errors import ConfigError

    parts = listed(text)
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = [-1.0]
    if len(values) > len(BOTH) or not all(0 <= v <= 1 for v in values):
        raise ConfigError(
            f"bytes: --nonzero takes a share from 0 to 1, or two, up and down, e.g. 0.6,1. Got {text[:60]!r}."
        )
    return dict(zip(BOTH, values * len(BOTH) if len(values) == 1 else values))


def count(
    config: RunConfig, rule: ByteRule | None = None, nonzero: Mapping[str, float] | None = None
) -> tuple[Method, Traffic]:
    """Run one client of each capacity on two examples, and count what it received and sent.

    Args:
        nonzero: by direction, up and down, the share of entries that are not zero in what is sent sparse.
    """
    from fedspan import wire
    from fedspan.cli.probe import probe
    from fedspan.method import Abilities
    from fedspan.simulation.settings import sample

    method, task, data, made_up = assembled(config)
    data = data.to(next(iter(task.init().values())).dtype)
    tiny = replace(data, train=[rows[:2] for rows in data.train])
    able = Abilities(method)
    capacities = [able.capacity(task, i) for i in range(data.clients)]
    # Half precision has a fixed size; what other codecs make of a tensor depends on its values.
    open_ = {k for k, codec in able.coded.codecs(1).items() if not isinstance(codec, wire.Half)}
    half = able.coded.codecs(1).keys() - open_
    sparse = {k for k in open_ if isinstance(able.coded.codecs(1)[k], wire.Sparse)} if nonzero else set()
    per: dict[Any, dict[str, dict[str, int | None]]] = {}
    for capacity in sorted(set(capacities), key=str):
        payload = probe(method, task, tiny, capacities.index(capacity), batch=2)
        up, down = payload.mean | payload.each, payload.down
        per[capacity] = {}
        for direction, tree in (("up", up), ("down", down)):
            sizes = wire.count(
                tree, {k: wire.roundtrip({k: tree[k]}, able.coded.codecs(1))[1][k] for k in half & tree.keys()}
            )
            found = {k: None if k in open_ else v for k, v in sizes.items()}
            for k in sparse & tree.keys():
                assert nonzero
                found[k] = _sparse({k: tree[k]}, nonzero[direction], indices=rule is None)
            if rule is not None and rule.trained_only:
                per[capacity][direction] = _trained(up)
            elif rule is not None and config.method["name"] in rule.both_ways:
                per[capacity][direction] = _own_and_received(task, up, down)
            else:
                per[capacity][direction] = found if rule is None else found | _buffers(task, tree)
    if rule is not None and rule.trained_only:
        share = config.rounds * config.train.participation
        numbers = Counter(capacities)
        total = round(share * sum(n * sum(v or 0 for v in per[c]["up"].values()) for c, n in numbers.items()))
        return method, Traffic(per, dict(numbers), {"up": total, "down": total}, made_up)
    asked: dict[str, Counter[Any]] = {"up": Counter(), "down": Counter()}
    for t in range(1, config.rounds + 1):
        who = [capacities[i] for i in sample(data.clients, config.train, config.seed, t)]
        asked["up"].update(who)
        if rule is None or t > 1:
            asked["down"].update(who)
    run = {
        d: _sum([None if (one := _sum(list(per[c][d].values()))) is None else one * n for c, n in asked[d].items()])
        for d in ("up", "down")
    }
    return method, Traffic(per, dict(Counter(capacities)), run, made_up)


def _trained(payload: Tree) -> dict[str, int | None]:
    """Bytes of what a payload holds besides running statistics, by name."""
    from fedspan import tree
    from fedspan.learn.sgd import is_statistic

    sizes: dict[str, int | None] = {}
    for name, part in payload.items():
        kept = [t for k, t in tree.items({name: part}) if not is_statistic(k)]
        sizes[name] = sum(t.numel() * t.element_size() for t in kept)
    return sizes


def _buffers(task: Task, payload: Tree) -> dict[str, int | None]:
    """Bytes of the buffers that a published rule adds: all of the model's but those that travel anyway."""
    from fedspan import tree
    from fedspan.learn.sgd import is_statistic

    parameters = dict(task.module.named_parameters())
    total = sum(t.numel() for k, t in task.module.state_dict().items() if k not in parameters)
    sent = sum(t.numel() for k, t in tree.items(payload) if is_statistic(k))
    return {"buffers": 4 * (total - sent)} if tree.leaves(payload) and total > sent else {}


def _sparse(payload: Tree, share: float, *, indices: bool) -> int:
    """Bytes of a payload's non-zeros where that share of each tensor's entries is one; where they are, if asked."""
    import torch

    from fedspan import tree, wire

    total = 0
    for t in tree.leaves(payload):
        made = torch.zeros(t.numel(), dtype=t.dtype)
        made[: round(share * t.numel())] = 1
        total += int(wire.Sparse().roundtrip(made)[1]) if indices else int(made.sum()) * t.element_size()
    return total


def _own_and_received(task: Task, up: Tree, down: Tree) -> dict[str, int | None]:
    """Bytes of a client's own model and of all that it receives, with the buffers of each; by name."""
    from fedspan import tree

    sizes: dict[str, int | None] = {}
    for name in up.keys() & down.keys():
        own, others = (tree.leaves({name: payload[name]}) for payload in (up, down))
        models = 1 + sum(t.numel() for t in others) // sum(t.numel() for t in own)
        sizes[name] = sum(t.numel() * t.element_size() for t in (*own, *others))
        for k, one in _buffers(task, {name: up[name]}).items():
            sizes[k] = models * (one or 0)
    return sizes


def assembled(config: RunConfig) -> tuple[Method, Task, FederatedData, str]:
    """The experiment; where its data are missing but their shape is known, with made-up ones and the reason."""
    import torch

    from fedspan.config import assemble
    from fedspan.config.sections import known_shape
    from fedspan.data.federated import FederatedData
    from fedspan.errors import DataError

    try:
        return *assemble(config), ""
    except DataError as e:
        known, clients = known_shape(config.data), config.partition.clients
        if known is None or clients is None or config.partition.kind == "natural":
            raise
        shape, classes = known
        pair = (torch.zeros(4, *shape), torch.zeros(4, dtype=torch.int64))
        groups = [i % 2 for i in range(clients)]
        data = FederatedData.from_arrays([pair] * clients, groups=groups, classes=classes, validation_fraction=0.25)
        return *assemble(config, data), str(e)


def _sum(values: list[int | None]) -> int | None:
    return None if None in values else sum(v for v in values if v is not None)


def _shown(value: int | None) -> str:
    return (
        "n/a (depends on the data)" if value is None else f"{value:,} ({size(value)})" if value >= 1000 else f"{value}"
    )
