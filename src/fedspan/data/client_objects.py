"""What people hold their data in, as one federation: arrays, data sets of torch and Hugging Face, frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedspan import tree
from fedspan.data.federated import FederatedData
from fedspan.data.formats.parquet import need
from fedspan.data.formats.part import short
from fedspan.data.partitions.divide import partition
from fedspan.data.sources.assemble import Source
from fedspan.data.tables.table_federation import federate_tables
from fedspan.data.tables.table_layout import TableLayout
from fedspan.errors import ConfigError, DataError
from fedspan.method.fields import build
from fedspan.method.named_code import describe_object

Collate: TypeAlias = Callable[[list[Any]], tuple[Any, Any]]
"""Makes (x, y) of examples: stacks them, or pads them to one length first."""

KINDS = (
    "an (x, y) pair, a torch Dataset, a Hugging Face Dataset with target='column', or a pandas, polars or arrow frame"
    " with target='column'"
)
_PART = "fedspan part"


def federate(
    clients: Any,
    *,
    test: Any = None,
    test_fraction: float = 0.25,
    validation_fraction: float = 0.0,
    target: str | Sequence[str] | None = None,
    collate: Collate | None = None,
    groups: Sequence[int] | None = None,
    classes: int | None = None,
    seed: int = 0,
    **layout: Any,
) -> FederatedData:
    """A federation of clients, each given in what its data are held in.

    Args:
        clients: a list of clients, or a dict of them by name; each is an (x, y) pair of arrays or tensors, a torch
            Dataset of such pairs, a Hugging Face Dataset, or a frame (pandas, polars, arrow). Also one frame of all
            clients with `client="column"`, or a FederatedDataset of flwr-datasets. x may be a dict or a tuple of
            arrays: a model is called with them by name or by place.
        test: one client's test part for each of them; without it each client's examples are split by a keyed shuffle.
        target: the column to be predicted, where columns have names.
        collate: makes (x, y) of a list of (x, y) examples, e.g. pads them to one length; called once with those of all
            clients. Without it examples must be of one shape.
        classes: how many classes there are, where labels alone do not say it.
        layout: further keys of a table: `features`, `categorical`, `missing`, `standardise`, ... as in `[data]`.

    Raises:
        DataError: naming the client, if something is not usable.
    """
    given, test_parts = _by_name(clients), None if test is None else _by_name(test)
    if test_parts is not None and len(test_parts) != len(given):
        raise DataError(f"Data: test needs one part per client ({len(given)}). Got {len(test_parts)}.")
    everything = [*given.values(), *(test_parts or {}).values()]
    _refuse_others(given)
    tabular = [_is_table(c, target) for c in everything]
    split = {"test_fraction": test_fraction, "validation_fraction": validation_fraction, "seed": seed}
    if all(tabular):
        if target is None:
            raise DataError("Data: a frame needs the column to be predicted. Got no target; pass target='column'.")
        if collate is not None or classes is not None:
            raise ConfigError("Data: collate and classes are not for frames. Got one; remove it.")
        made = _federate_frames(given, test_parts, target, layout, split)
        return made if groups is None else replace(made, groups=torch.as_tensor(groups))
    if any(tabular):
        raise DataError("Data: clients must all be frames, or none. Got both; turn them into one kind.")
    if layout:
        raise ConfigError(f"Data: {next(iter(layout))} is for frames, whose columns have names. Got arrays; remove it.")
    names = [*given]
    pairs = _pairs([*given.items(), *(test_parts or {}).items()], target, collate)
    made = FederatedData.from_arrays(
        pairs[: len(given)],
        test=pairs[len(given) :] or None,
        groups=groups,
        classes=classes,
        **split,  # type: ignore[arg-type]
    )
    return replace(made, names=names)


def _by_name(clients: Any) -> dict[str, Any]:
    """Clients by name; a frame of all of them stands under an empty one."""
    if hasattr(clients, "load_partition"):
        return _flower_partitions(clients)
    if _is_frame(clients) or _is_hub(clients):
        return {"": clients}
    if isinstance(clients, Mapping):
        found = {str(k): v for k, v in clients.items()}
    elif isinstance(clients, Iterable) and not isinstance(clients, str | bytes | Dataset | DataLoader):
        found = {str(k): v for k, v in enumerate(clients)}
    else:
        raise DataError(
            f"Data: clients must be a list or dict of clients, each {KINDS}. Got {describe_object(clients)}; put"
            " it in a list."
        )
    if not found:
        raise DataError("Data: there must be at least one client. Got none.")
    return found


def _flower_partitions(federation: Any) -> dict[str, Any]:
    """The partitions of a FederatedDataset's training split."""
    try:
        partitioner = federation.partitioners["train"]
        federation.load_partition(0)  # only then does it know its data set
        return {str(i): federation.load_partition(i) for i in range(partitioner.num_partitions)}
    except Exception as error:  # it downloads, and has its own kinds of errors
        raise DataError(f"Data: the FederatedDataset could not load its partitions: {short(error)}.") from None


def _is_frame(client: Any) -> bool:
    return hasattr(client, "__arrow_c_stream__") and not isinstance(client, Tensor)


def _is_hub(client: Any) -> bool:
    return hasattr(client, "with_format") and hasattr(client, "column_names") and hasattr(client, "features")


def _refuse_others(clients: Mapping[str, Any]) -> None:
    """Refuse what is often tried and cannot be a client, with what to pass instead."""
    for name, client in clients.items():
        if isinstance(client, DataLoader):
            raise DataError(
                f"Data: client {name} must be {KINDS}. Got a DataLoader, which draws batches itself; pass its .dataset."
            )
        if isinstance(client, IterableDataset):
            raise DataError(
                f"Data: client {name} must be a Dataset with a length, whose examples have numbers. Got an"
                " IterableDataset; pass list(dataset) as a Dataset, or arrays."
            )
        pair = isinstance(client, tuple | list) and len(client) == 2
        if not (pair or isinstance(client, Dataset) or _is_map_style(client) or _is_frame(client) or _is_hub(client)):
            got = describe_object(client)
            got += f" of length {len(client)}" if isinstance(client, tuple | list) else ""
            raise DataError(f"Data: client {name} must be {KINDS}. Got {got}.")


def _is_map_style(client: Any) -> bool:
    indexed = hasattr(client, "__getitem__") and hasattr(client, "__len__")
    return indexed and not isinstance(client, str | bytes | Mapping | tuple | list | np.ndarray | Tensor)


def _is_table(client: Any, target: str | Sequence[str] | None) -> bool:
    """Whether a client has named columns of single values."""
    if _is_hub(client):
        nested = ("list", "large_list", "fixed_size_list", "struct", "binary", "extension")
        return not any(str(f.type).startswith(nested) for f in client.features.arrow_schema)
    return _is_frame(client)


# ------------------------------------------------------------------------------------------------ frames


def _arrow(client: Any, name: str) -> Any:
    pa = need("pyarrow")
    try:
        table = client.with_format("arrow")[:] if _is_hub(client) else pa.table(client)
    except Exception as error:  # whatever another library says of its own frame
        raise DataError(f"Data: client {name} could not be read as a table: {short(error)}.") from None
    return table.select([n for n in table.column_names if not n.startswith("__index_level_")])


def _federate_frames(
    clients: Mapping[str, Any],
    test: Mapping[str, Any] | None,
    target: str | Sequence[str],
    layout: Mapping[str, Any],
    split: Mapping[str, Any],
) -> FederatedData:
    pa = need("pyarrow")
    chosen = build(TableLayout, {**layout, "target": target if isinstance(target, str) else tuple(target)}, "Data")
    tables = {name: _arrow(c, name) for name, c in clients.items()}
    if test is not None:
        if chosen.split is not None:
            raise ConfigError("Data: test parts and a split column exclude one another. Got both; leave one out.")
        chosen = build(TableLayout, {**layout, "target": chosen.target, "split": _PART}, "Data")
        for name, other in zip(list(tables), test.values()):
            held = _arrow(other, name)
            parts = [(tables[name], "train"), (held.select(tables[name].column_names), "test")]
            marked = [t.append_column(_PART, pa.array([mark] * t.num_rows)) for t, mark in parts]
            tables[name] = pa.concat_tables(marked, promote_options="permissive")

    def divide(rows: Source, where: str) -> FederatedData:
        return partition(
            rows,
            "natural",
            None,
            split["seed"],
            where,
            split["validation_fraction"],
            split["test_fraction"],
            min_samples=1,
        )

    return federate_tables(tables, chosen, divide, seed=split["seed"], name="frame")


# ------------------------------------------------------------------------------------------------ examples


def _pairs(
    clients: Sequence[tuple[str, Any]], target: str | Sequence[str] | None, collate: Collate | None
) -> list[tuple[Any, Any]]:
    """Every client as (x, y); where examples have to be put together, those of all clients at once."""
    if collate is None and all(isinstance(c, tuple | list | TensorDataset) for _, c in clients):
        return [_ready(name, c) for name, c in clients]
    samples = [list(_samples(name, c, target)) for name, c in clients]
    x, y = _collated([s for some in samples for s in some], collate)
    ends = np.cumsum([len(s) for s in samples]).tolist()
    return [(tree.take(x, slice(end - len(s), end)), y[end - len(s) : end]) for s, end in zip(samples, ends)]


def _ready(name: str, client: Any) -> tuple[Any, Any]:
    parts = client.tensors if isinstance(client, TensorDataset) else client
    if len(parts) != 2:
        raise DataError(
            f"Data: client {name} must hold x and y. Got {len(parts)} arrays; put several inputs in a tuple."
        )
    return parts[0], parts[1]


def _samples(name: str, client: Any, target: str | Sequence[str] | None) -> Iterable[tuple[Any, Any]]:
    """The (x, y) examples of a client."""
    if isinstance(client, tuple | list):
        x, y = _ready(name, client)
        n = len(y)
        return [(tree.map(lambda a, k=k: a[k], x), y[k]) for k in range(n)]
    client = client.with_format("torch") if _is_hub(client) else client
    found = []
    for k in range(len(client)):
        try:
            sample = client[k]
        except Exception as error:  # a data set of somebody's own
            raise DataError(f"Data: client {name}: example {k} could not be read: {short(error)}.") from error
        found.append(_sample(name, k, sample, target))
    return found


def _sample(name: str, k: int, sample: Any, target: str | Sequence[str] | None) -> tuple[Any, Any]:
    if isinstance(sample, Mapping):
        if not isinstance(target, str) or target not in sample:
            raise DataError(
                f"Data: client {name}: examples by name need the name of the label, one of {', '.join(sample)[:100]}."
                f" Got {target!r}; pass target='name'."
            )
        rest = {n: _scaled_picture(v) for n, v in sample.items() if n != target}
        return (next(iter(rest.values())) if len(rest) == 1 else rest), sample[target]
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return sample[0], sample[1]
    got = f"{len(sample)} values" if isinstance(sample, tuple | list) else describe_object(sample)
    raise DataError(
        f"Data: client {name}: an example must be a pair (x, y). Got {got} for example {k}; put several inputs in"
        " a tuple or dict, or let the Dataset return pairs."
    )


def _scaled_picture(value: Any) -> Any:
    """Pictures of bytes as numbers in −1..1, as those of files are; other values as they are."""
    if isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim == 3:
        return value.float().div(255.0).sub(0.5).div(0.5)
    return value


def _collated(samples: list[Any], collate: Collate | None) -> tuple[Any, Tensor]:
    if collate is None:
        from torch.utils.data import default_collate

        try:
            x, y = default_collate(samples)
        except (RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"Data: examples must be of one shape to be put together ({short(error)}); pass collate, which makes"
                " (x, y) of a list of examples, for example pads them to one length."
            ) from None
        return _trees(x), torch.as_tensor(y)
    made = collate(samples)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise DataError(f"Data: collate must return (x, y). Got {describe_object(made)}.")
    x, y = _trees(made[0]), torch.as_tensor(made[1])
    for path, leaf in tree.items(x):
        if not isinstance(leaf, Tensor) or len(leaf) != len(samples):
            got = f"{len(leaf)} rows" if isinstance(leaf, Tensor) and leaf.ndim else describe_object(leaf)
            raise DataError(
                f"Data: collate must return a row for each of {len(samples)} examples. Got {got} for {path or 'x'}."
            )
    return x, y


def _trees(x: Any) -> Any:
    """Lists, as collate functions return them, as tuples."""
    if isinstance(x, Mapping):
        return {str(k): _trees(v) for k, v in x.items()}
    return tuple(_trees(v) for v in x) if isinstance(x, tuple | list) else x
