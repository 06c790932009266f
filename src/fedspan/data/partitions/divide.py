"""Who holds what: `partition` divides a source among clients. All randomness is keyed by (seed, "partition", kind)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedspan.data.federated import FederatedData, Index, split
from fedspan.data.partitions import assign
from fedspan.data.partitions.domains import domains_of_classes
from fedspan.data.partitions.feature_shifts import apply_shifts, parse_shift
from fedspan.data.partitions.kinds import PARTITIONS, check_partition
from fedspan.data.partitions.quantity import parse_law, unequal
from fedspan.data.sources.assemble import Source
from fedspan.errors import ConfigError, DataError
from fedspan.randomness import generator

__all__ = ["PARTITIONS", "check_partition", "partition"]


@dataclass(frozen=True, eq=False)
class _Deal:
    """Rows per client, and what a kind adds to them."""

    held: list[Index]
    groups: Index | None = None
    relabel: Index | None = None
    names: list[str] | None = None
    members: Index | None = None  # natural: which client of the source each one is
    membership: NDArray[np.float64] | None = None  # soft groups: each client's shares of them [clients, groups]
    namings: Index | None = None  # soft groups: each group's own naming of the classes


def partition(
    source: Source,
    kind: str,
    clients: int | None = None,
    seed: int = 0,
    split: str = "client",
    validation: float = 0.0,
    test: float = 0.25,
    **options: Any,
) -> FederatedData:
    """Divide a source among clients by a kind of `PARTITIONS`, with that kind's options.

    `split="client"` merges the source's train and test files and splits inside each client; `split="global"` divides
    the train file, and the source's own test file is everyone's test set: of a client's own domain (kind `domains`),
    or its own test file where the source has one per client (kind `natural`). `split="common"` merges both files and
    draws everyone's test set anew, the share `test` of every class. A test set held in common is judged in each
    client's own naming of the classes (the protocol `global_test_local_labels`).

    Raises:
        ConfigError: for an unknown kind, an unknown option or a value that cannot be.
        DataError: if the source has too few examples, or lacks what the kind or split needs.
    """
    filled = check_partition(kind, clients, split, validation, test, options)
    if split == "global" and len(source.test_rows) == 0:
        raise DataError(
            f"Partition: split='global' needs a source with its own test file. Got '{source.name}', which has"
            " none; use split='client' or 'common'."
        )
    if kind == "domains":
        if filled["domains"] is not None:
            source = domains_of_classes(source, filled["domains"])
        source, clients = _domain_pool(source, clients)
    if split == "common":
        source = replace(source, test_rows=_common_test(source, kind, seed, test))
    rows = source.train_rows if split != "client" else np.arange(len(source), dtype=np.int64)
    dealt = _deal(source, kind, rows, clients, seed, filled)
    parts = [_split(h, i, seed, test if split == "client" else 0.0, validation) for i, h in enumerate(dealt.held)]
    made = FederatedData(
        x=source.x,
        y=source.y,
        train=[p[0] for p in parts],
        validation=[p[1] for p in parts],
        test=[p[2] for p in parts] if split == "client" else _global_test(source, kind, dealt),
        classes=source.classes,
        relabel=None if dealt.relabel is None else torch.from_numpy(dealt.relabel),
        groups=None if dealt.groups is None else torch.from_numpy(dealt.groups),
        names=dealt.names or [],
        class_names=source.class_names,
        source=source.name,
    )
    shifts: list[str] | None = filled.get("shifts")
    if shifts is None and dealt.membership is None:
        return made
    if made.groups is None:  # a kind without groups of its own: clients see their examples in turn
        assert shifts is not None
        made = replace(made, groups=torch.arange(made.clients) % len(shifts))
    return _seen_by_groups(made, dealt, shifts, seed)


_split = split  # `partition` has an argument of the same name


def _deal(source: Source, kind: str, rows: Index, clients: int | None, seed: int, options: dict[str, Any]) -> _Deal:
    # Permuting the labels must not change who holds what: only so are standard and permuted runs comparable.
    rng = generator(seed, "partition", options["base"] if kind == "permuted-clients" else kind)
    y: Index = source.y.numpy()[rows]
    options = {k: v for k, v in options.items() if k != "shifts"}
    if kind == "natural":
        if source.client is None:
            raise DataError(
                f"Partition: kind 'natural' needs a source with client ids (an npz with an array 'client', a column"
                f" client_id, or a folder with one file per client). Got '{source.name}'."
            )
        held, members = assign.natural(rows, source.client[rows], clients, rng, **options)
        return _Deal(held, names=[source.client_names[m] for m in members], members=members)
    assert clients is not None
    numbers = np.arange(clients, dtype=np.int64)
    if kind == "dirichlet":
        return _Deal(assign.dirichlet(rows, y, clients, rng, **options))
    if kind == "dirichlet-clients":
        return _Deal(assign.dirichlet_clients(rows, y, clients, rng, **options))
    if kind == "pathological":
        return _Deal(assign.pathological(rows, y, clients, rng, **options))
    if kind == "shards":
        return _Deal(assign.shards(rows, y, clients, rng, **options))
    cut = _cut(kind, seed, options)
    if kind in ("permuted-groups", "shifted-groups"):
        groups = _groups_of(numbers, options)
        if kind == "shifted-groups":
            return _Deal(cut(rows, clients, rng), groups=groups)
        namings = assign.permutations(options["groups"], source.classes, generator(seed, "partition", kind, "names"))
        return _Deal(cut(rows, clients, rng), groups=groups, relabel=namings[groups])
    if kind == "mixed-groups":
        return _mixed(cut(rows, clients, rng), source.classes, clients, seed, options)
    if kind == "permuted-clients":
        namings = assign.permutations(clients, source.classes, generator(seed, "partition", kind, "names"))
        if options["base"] == "iid":
            return _Deal(assign.iid(rows, clients, rng), relabel=namings)
        held = assign.dirichlet(rows, y, clients, rng, options["alpha"], options["min_samples"])
        return _Deal(held, relabel=namings)
    if kind == "label-groups":
        group_of_class = _class_groups(source, options["groups"])
        groups = _groups_of(numbers, {**options, "groups": int(group_of_class.max()) + 1})
        _all_groups(groups, group_of_class, clients)
        return _Deal(assign.grouped(rows, group_of_class[y], groups, rng, cut), groups=groups)
    if kind == "domains":
        assert source.domain is not None
        groups = numbers % len(source.domain_names)
        held = assign.grouped(rows, source.domain[rows], groups, rng)
        y_all = source.y.numpy()
        counts = [int(y_all[source.domain == d].max()) + 1 for d in range(len(source.domain_names))]
        rng = generator(seed, "partition", kind, "names")
        namings = assign.permutations(clients, source.classes, rng, [counts[g] for g in groups])
        names = [f"{source.domain_names[g]}-{k // len(source.domain_names)}" for k, g in enumerate(groups)]
        return _Deal(held, groups=groups, relabel=namings if options["permute"] else None, names=names)
    return _Deal(cut(rows, clients, rng))


def _cut(kind: str, seed: int, options: dict[str, Any]) -> assign.Cut:
    """How rows are cut among clients: into equal parts, or by a law of sizes that leaves the shuffle as it is."""
    if options.get("sizes") is None:
        return assign.equal if kind == "label-groups" else assign.iid
    law, drawn = parse_law(options["sizes"]), generator(seed, "partition", kind, "sizes")
    return lambda rows, clients, rng: unequal(rows, clients, rng, law, drawn, options["min_samples"])


def _groups_of(numbers: Index, options: dict[str, Any]) -> Index:
    """The group of every client: one after another in turn, or as many in a row as `group_sizes` says."""
    sizes = options["group_sizes"]
    return numbers % options["groups"] if sizes is None else np.repeat(np.arange(len(sizes)), sizes)


def _mixed(held: list[Index], classes: int, clients: int, seed: int, options: dict[str, Any]) -> _Deal:
    """Soft membership: shares of the groups for every client; its main group is the one it has most of."""
    rng = generator(seed, "partition", "mixed-groups", "membership")
    groups, some = options["groups"], options["mixed"] or options["groups"]
    shares = np.zeros((clients, groups))
    for row in shares:
        own = assign.proportions(rng, options["alpha"], some)
        row[np.arange(groups) if some == groups else rng.choice(groups, some, replace=False)] = own
    names = generator(seed, "partition", "mixed-groups", "names")
    namings = assign.permutations(groups, classes, names) if options["permute"] else None
    return _Deal(held, groups=shares.argmax(1), membership=shares, namings=namings)


def _seen_by_groups(data: FederatedData, dealt: _Deal, shifts: list[str] | None, seed: int) -> FederatedData:
    """The data as groups see and name them; of what several groups look at, such as a common test, each has its own."""
    assert data.groups is not None
    soft, hard = dealt.membership, data.groups.numpy()
    count = int(hard.max()) + 1 if soft is None else soft.shape[1]
    codes: dict[str, list[Index]] = {"train": [], "validation": [], "test": []}
    for part, held in codes.items():
        for i, rows in enumerate(getattr(data, part)):
            group: Index | int = int(hard[i])
            if soft is not None:
                group = generator(seed, "partition", "mixed-groups", part, i).choice(count, len(rows), p=soft[i])
            held.append(rows * count + group)
    every = np.unique(np.concatenate([c for held in codes.values() for c in held]))
    rows, groups = every // count, every % count
    x, y = data.x[torch.from_numpy(rows)], data.y[torch.from_numpy(rows)]
    said = [] if shifts is None else [shifts[g % len(shifts)] for g in range(count)]
    for g, text in enumerate(said):
        own = torch.from_numpy(np.flatnonzero(groups == g))
        x[own] = apply_shifts(x[own], parse_shift(text), seed, g)
    if dealt.namings is not None:
        y = torch.from_numpy(dealt.namings[groups, y.numpy()])
    found = {part: [np.searchsorted(every, c).astype(np.int64) for c in held] for part, held in codes.items()}
    return replace(
        data,
        x=x,
        y=y,
        train=found["train"],
        validation=found["validation"],
        test=found["test"],
        membership=None if soft is None else torch.from_numpy(soft),
        group_names=said,
    )


def _all_groups(groups: Index, group_of_class: Index, clients: int) -> None:
    count = int(group_of_class.max()) + 1
    if len(np.unique(groups)) < count:
        raise ConfigError(f"Partition: every group needs a client, so clients must be at least {count}. Got {clients}.")


def _class_groups(source: Source, count: int | None) -> Index:
    """The group of every class: its superclass if the source knows superclasses, otherwise consecutive classes."""
    order = np.arange(source.classes)
    if source.coarse is not None:
        coarse = np.zeros(source.classes, np.int64)
        coarse[source.y.numpy()] = source.coarse
        if count is None or count == coarse.max() + 1:
            return coarse
        order = np.lexsort((order, coarse))  # keeps a superclass together as far as the number of groups allows
    count = max(1, source.classes // 2) if count is None else count
    if count > source.classes:
        raise ConfigError(f"Partition: groups must be at most the number of classes, {source.classes}. Got {count}.")
    groups = np.empty(source.classes, np.int64)
    for g, members in enumerate(np.array_split(order, count)):
        groups[members] = g
    return groups


def _domain_pool(source: Source, clients: int | None) -> tuple[Source, int]:
    """Only the rows that belong to a domain, with labels numbered from 0 inside each, and the number of clients."""
    if source.domain is None:
        raise DataError(
            "Partition: kind 'domains' needs a source that knows domains (cifar100, an npz with an array 'domain', or a"
            " table with a column domain), or lists of classes in the option domains."
            f" Got '{source.name}'."
        )
    count = len(source.domain_names)
    clients = 4 * count if clients is None else clients
    if clients < count:
        raise ConfigError(
            f"Partition: every domain needs a client, so clients must be at least {count}. Got {clients}."
        )
    pool = source.take(np.flatnonzero(source.domain >= 0))
    assert pool.domain is not None
    y = pool.y.numpy().copy()
    classes = 1
    for d in range(count):
        inside = pool.domain == d
        own, y[inside] = np.unique(y[inside], return_inverse=True)
        classes = max(classes, len(own))
    names = [str(i) for i in range(classes)]
    return replace(pool, y=torch.from_numpy(y), classes=classes, class_names=names), clients


def _common_test(source: Source, kind: str, seed: int, share: float) -> Index:
    """Rows of a test set drawn from all examples: of every class the same share, at least one of two or more."""
    rng, y = generator(seed, "partition", "common"), source.y.numpy()
    if kind == "domains" and source.domain is not None:  # there a label means another class in every domain
        y = y + source.classes * source.domain
    held = []
    for label in np.unique(y):
        own = rng.permutation(np.flatnonzero(y == label))
        held.append(own[: max(min(1, len(own) - 1), min(round(share * len(own)), len(own) - 1))])
    return np.sort(np.concatenate(held))


def _global_test(source: Source, kind: str, dealt: _Deal) -> list[Index]:
    test = source.test_rows
    if kind == "domains":
        assert source.domain is not None and dealt.groups is not None
        per_domain = [test[source.domain[test] == d] for d in range(len(source.domain_names))]
        for name, own in zip(source.domain_names, per_domain):
            if len(own) == 0:
                raise DataError(
                    f"Partition: every domain must have test examples. Got none of '{name}' in the source's own test"
                    " file; use split='common' or 'client'."
                )
        return [per_domain[g] for g in dealt.groups]
    if kind == "natural" and source.client is not None and dealt.members is not None and source.client[test].min() >= 0:
        return [test[source.client[test] == m] for m in dealt.members]
    return [test for _ in dealt.held]
