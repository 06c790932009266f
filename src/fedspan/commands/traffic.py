"""`fedspan bytes`: what would cross the wire, without training."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedspan.commands.console import note, say, show, size, table
from fedspan.commands.run import Experiment, Overrides

if TYPE_CHECKING:
    from fedspan.config import RunConfig
    from fedspan.method import Method


@dataclass(frozen=True)
class Traffic:
    """Bytes of one client's round by direction and name per capacity, and of the whole run; None = depends on data."""

    per_capacity: dict[Any, dict[str, dict[str, int | None]]]
    clients: dict[Any, int]
    run: dict[str, int | None]


def bytes_(exp: Experiment, overrides: Overrides = None) -> None:
    """Count the bytes of one client's round and of the whole run, up and down, without training."""
    from fedspan.config import load_config
    from fedspan.method import Method

    config = load_config(exp, overrides or []).resolve()
    method, found = count(config)
    rows = []
    for capacity, directions in found.per_capacity.items():
        label = "all clients" if capacity is None else f"{capacity} ({found.clients[capacity]} clients)"
        for direction, names in directions.items():
            rows += [(label, direction, k, _shown(v)) for k, v in names.items()]
            rows.append((label, direction, "together", _shown(_sum(list(names.values())))))
    show(table(["client", "direction", "name", "bytes per round"], rows, right=[3]))
    total = ", ".join(f"{_shown(found.run[d])} {d}" for d in ("up", "down"))
    say(f"{config.method['name']}, {config.rounds} rounds: {total} (weights of uploads and evaluation not counted).")
    if type(method).announce is not Method.announce:
        note("News that this method announces to all clients come on top.")
    if config.train.drop_rate:
        note("Clients that do not answer are counted as if they did.")


def count(config: RunConfig) -> tuple[Method, Traffic]:
    """Run one client of each capacity on two examples, and count what it received and sent."""
    from fedspan import wire
    from fedspan.commands.probe import probe
    from fedspan.config import assemble
    from fedspan.settings import sample

    method, task, data = assemble(config)
    data = data.to(next(iter(task.init().values())).dtype)
    tiny = replace(data, train=[rows[:2] for rows in data.train])
    capacities = [method.capacity_of(i) for i in range(data.clients)]
    # Half precision has a fixed size; what other codecs make of a tensor depends on its values.
    open_ = {k for k, codec in method.codecs(1).items() if not isinstance(codec, wire.Half)}
    half = method.codecs(1).keys() - open_
    per: dict[Any, dict[str, dict[str, int | None]]] = {}
    for capacity in sorted(set(capacities), key=str):
        payload = probe(method, task, tiny, capacities.index(capacity), batch=2)
        up, down = payload.mean | payload.each, payload.down
        per[capacity] = {}
        for direction, tree in (("up", up), ("down", down)):
            sizes = wire.count(
                tree, {k: wire.roundtrip({k: tree[k]}, method.codecs(1))[1][k] for k in half & tree.keys()}
            )
            per[capacity][direction] = {k: None if k in open_ else v for k, v in sizes.items()}
    asked: Counter[Any] = Counter()
    for t in range(1, config.rounds + 1):
        asked.update(capacities[i] for i in sample(data.clients, config.train, config.seed, t))
    run = {
        d: _sum([None if (one := _sum(list(per[c][d].values()))) is None else one * n for c, n in asked.items()])
        for d in ("up", "down")
    }
    return method, Traffic(per, dict(Counter(capacities)), run)


def _sum(values: list[int | None]) -> int | None:
    return None if None in values else sum(v for v in values if v is not None)


def _shown(value: int | None) -> str:
    return (
        "n/a (depends on the data)" if value is None else f"{value:,} ({size(value)})" if value >= 1000 else f"{value}"
    )
