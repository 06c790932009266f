"""How rows are dealt to clients: functions of rows, labels and a keyed generator that return rows per client."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedspan.data.federated import Index
from fedspan.errors import DataError

Cut: TypeAlias = Callable[[Index, int, np.random.Generator], list[Index]]
"""Rows, a number of clients and a generator to rows per client."""


def enough(rows: Index, needed: int, what: str) -> None:
    """Refuse a split that asks for more examples than there are."""
    if len(rows) < needed:
        raise DataError(
            f"Partition: {what} needs at least {needed} examples. Got {len(rows)}; take fewer clients or more data."
        )


def iid(rows: Index, clients: int, rng: np.random.Generator) -> list[Index]:
    """A shuffle cut into parts whose sizes differ by at most one."""
    enough(rows, clients, f"one example for each of {clients} clients")
    return equal(rows, clients, rng)


def dirichlet(
    rows: Index, y: Index, clients: int, rng: np.random.Generator, alpha: float, min_samples: int
) -> list[Index]:
    """Label-wise: each label's shuffled rows are cut by proportions over the clients drawn from Dir(alpha)."""
    enough(rows, clients * min_samples, f"min_samples={min_samples} for each of {clients} clients")
    pieces: list[list[Index]] = [[] for _ in range(clients)]
    for label in np.unique(y):
        own = rng.permutation(rows[y == label])
        # Rounded, not cut off: flooring would hand the last client about half an example more of every label.
        cuts = np.rint(np.cumsum(proportions(rng, alpha, clients)) * len(own)).astype(np.int64)[:-1]
        for k, piece in enumerate(np.split(own, np.minimum(cuts, len(own)))):
            if len(piece):
                pieces[k].append(piece)
    return top_up([np.concatenate(p) if p else np.empty(0, np.int64) for p in pieces], min_samples, rng)


def proportions(rng: np.random.Generator, alpha: float, n: int) -> NDArray[np.float64]:
    """Shares drawn from Dir(alpha)."""
    p = rng.dirichlet(np.full(n, alpha))
    if not np.isfinite(p).all() or p.sum() <= 0:  # alpha so small that every gamma draw vanished: its limit is one-hot
        p = np.zeros(n)
        p[rng.integers(n)] = 1.0
    return np.asarray(p / p.sum(), np.float64)


def top_up(held: list[Index], min_samples: int, rng: np.random.Generator) -> list[Index]:
    """Move random examples from the currently largest client to those below `min_samples`; ends for any input.

    The caller has made sure that there are clients * min_samples examples, so while one is short another has to spare.
    """
    if all(len(h) >= min_samples for h in held):
        return held
    stacks = [rng.permutation(h).tolist() for h in held]
    largest = [(-len(s), k) for k, s in enumerate(stacks)]
    heapq.heapify(largest)
    for stack in stacks:
        while len(stack) < min_samples:
            size, donor = heapq.heappop(largest)
            if -size != len(stacks[donor]):  # grew or shrank since it was queued
                heapq.heappush(largest, (-len(stacks[donor]), donor))
                continue
            stack.append(stacks[donor].pop())
            heapq.heappush(largest, (-len(stacks[donor]), donor))
    return [np.array(s, np.int64) for s in stacks]


def dirichlet_clients(
    rows: Index, y: Index, clients: int, rng: np.random.Generator, alpha: float, samples_per_client: int | None
) -> list[Index]:
    """Client-wise: each client draws its own label distribution from Dir(alpha); equal sizes, without replacement.

    When a label runs out, what is missing is drawn again from the client's distribution over the labels that are left
    (by what is left of them, if it gives those no weight). Every such pass uses up a label, so it ends.
    """
    each = len(rows) // clients if samples_per_client is None else samples_per_client
    enough(rows, clients * max(1, each), f"{max(1, each)} example(s) for each of {clients} clients")
    labels = np.unique(y)
    stock = [rng.permutation(rows[y == label]) for label in labels]
    left = np.array([len(s) for s in stock], np.int64)
    held: list[Index] = []
    for _ in range(clients):
        wish = proportions(rng, alpha, len(labels))
        pieces: list[Index] = []
        missing = each
        while missing:
            p = wish * (left > 0)
            if p.sum() <= 0:
                p = left.astype(np.float64)
            take = np.minimum(rng.multinomial(missing, p / p.sum()), left)
            for j in np.flatnonzero(take):
                pieces.append(stock[j][left[j] - take[j] : left[j]])
            left = left - take
            missing -= int(take.sum())
        held.append(np.concatenate(pieces))
    return held


def pathological(
    rows: Index, y: Index, clients: int, rng: np.random.Generator, classes_per_client: int | Sequence[int]
) -> list[Index]:
    """Each client takes the classes fewest others hold, ties by lot; its holders share a class's rows equally.

    Of a list of numbers of classes, client k takes number k, beginning again at its end.
    """
    labels = np.unique(y)
    counts = [classes_per_client] if isinstance(classes_per_client, int) else list(classes_per_client)
    if max(counts) > len(labels):
        raise DataError(
            f"Partition: classes_per_client must be at most the {len(labels)} classes in the data. Got {max(counts)}."
        )
    used = np.zeros(len(labels), np.int64)
    holders: list[list[int]] = [[] for _ in labels]
    for k in range(clients):
        for j in np.lexsort((rng.random(len(labels)), used))[: counts[k % len(counts)]]:
            used[j] += 1
            holders[j].append(k)
    pieces: list[list[Index]] = [[] for _ in range(clients)]
    for j, label in enumerate(labels):
        if not holders[j]:
            continue
        own = rng.permutation(rows[y == label])
        enough(own, len(holders[j]), f"class {label}, which {len(holders[j])} clients hold,")
        for k, piece in zip(holders[j], np.array_split(own, len(holders[j]))):
            pieces[k].append(piece)
    return [np.concatenate(p) for p in pieces]


def shards(rows: Index, y: Index, clients: int, rng: np.random.Generator, shards_per_client: int) -> list[Index]:
    """Sorted by label, cut into clients * shards_per_client shards, dealt at random (McMahan et al., AISTATS 2017)."""
    n = clients * shards_per_client
    enough(rows, n, f"{n} shards")
    order = rng.permutation(len(rows))
    cut = np.array_split(rows[order][np.argsort(y[order], kind="stable")], n)
    dealt = rng.permutation(n).reshape(clients, shards_per_client)
    return [np.concatenate([cut[s] for s in own]) for own in dealt]


def natural(
    rows: Index, owner: Index, clients: int | None, rng: np.random.Generator, min_samples: int, fraction: float
) -> tuple[list[Index], Index]:
    """By the source's own client ids: a keyed fraction of them, without the small ones, at most `clients`.

    Returns the rows per client, and which client of the source each one is.
    """
    ids = np.unique(owner[owner >= 0])
    kept = np.sort(rng.permutation(ids)[: max(1, round(fraction * len(ids)))])
    order = np.argsort(owner, kind="stable")
    start = np.searchsorted(owner[order], kept, "left")
    stop = np.searchsorted(owner[order], kept, "right")
    big = stop - start >= min_samples
    kept, start, stop = kept[big], start[big], stop[big]
    if len(kept) == 0 or (clients is not None and len(kept) < clients):
        raise DataError(
            f"Partition: {1 if clients is None else clients} natural client(s) with at least {min_samples} examples are"
            f" needed. Got {len(kept)}; lower min_samples or raise fraction."
        )
    if clients is not None:
        chosen = np.sort(rng.permutation(len(kept))[:clients])
        kept, start, stop = kept[chosen], start[chosen], stop[chosen]
    return [rows[order[a:b]] for a, b in zip(start, stop)], kept


def equal(rows: Index, clients: int, rng: np.random.Generator) -> list[Index]:
    """A shuffle cut into parts whose sizes differ by at most one, however few rows there are."""
    return list(np.array_split(rng.permutation(rows), clients))


def grouped(
    rows: Index, group_of_row: Index, group_of_client: Index, rng: np.random.Generator, cut: Cut = equal
) -> list[Index]:
    """Each group's rows, shuffled and shared by the clients of that group: equally, or as `cut` does it."""
    held = [np.empty(0, np.int64) for _ in group_of_client]
    for g in np.unique(group_of_client):
        members = np.flatnonzero(group_of_client == g)
        own = rows[group_of_row == g]
        enough(own, len(members), f"group {g}, which has {len(members)} client(s),")
        for k, piece in zip(members, cut(own, len(members), rng)):
            held[k] = piece
    return held


def permutations(n: int, classes: int, rng: np.random.Generator, own: Sequence[int] | None = None) -> Index:
    """n random namings of the classes, different from one another as long as there are enough of them. [n, classes]

    Of client k with only `own[k]` classes, just these change names among themselves.
    """
    seen: set[tuple[int, ...]] = set()
    rows: list[Index] = []
    for k in range(n):
        count = classes if own is None else own[k]
        rest = np.arange(count, classes)
        order = np.append(rng.permutation(count), rest)
        for _ in range(100):
            if tuple(order) not in seen:
                break
            order = np.append(rng.permutation(count), rest)
        seen.add(tuple(order))
        rows.append(order)
    return np.stack(rows)
