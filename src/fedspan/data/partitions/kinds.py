"""The kinds of partition with their options, and the check of a partition's settings before any data are loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedspan.data.partitions.feature_shifts import parse_shifts, rotations
from fedspan.data.partitions.quantity import parse_group_sizes, parse_law
from fedspan.errors import ConfigError, nearest


class PartitionKind(NamedTuple):
    """A way to divide data: what it does, and its options with their defaults."""

    description: str
    options: dict[str, Any]


_SIZES: dict[str, Any] = {"sizes": None, "min_samples": None}  # by a law: lognormal:1, zipf:1.5, dirichlet:0.5
_SHIFTS: dict[str, Any] = {"shifts": None}  # what groups of clients do to their examples
TEXTS = frozenset({"sizes", "shifts", "group_sizes"})
"""Options that may be typed as one text."""

PARTITIONS: dict[str, PartitionKind] = {
    "iid": PartitionKind("equal parts of one shuffle, or parts whose sizes follow a law", _SIZES | _SHIFTS),
    "dirichlet": PartitionKind(
        "each label's examples divided by proportions from Dir(alpha); nobody below min_samples",
        {"alpha": 0.5, "min_samples": 10} | _SHIFTS,
    ),
    "dirichlet-clients": PartitionKind(
        "each client draws its own label distribution from Dir(alpha); equal sizes",
        {"alpha": 0.5, "samples_per_client": None} | _SHIFTS,
    ),
    "pathological": PartitionKind(
        "each client holds classes_per_client classes (a list: in turn), all classes used alike",
        {"classes_per_client": 2} | _SHIFTS,
    ),
    "shards": PartitionKind(
        "sorted by label, cut, and shards_per_client shards dealt to each client", {"shards_per_client": 2} | _SHIFTS
    ),
    "natural": PartitionKind(
        "by the source's own client ids: a fraction of them, those with at least min_samples",
        {"min_samples": 10, "fraction": 1.0},
    ),
    "permuted-groups": PartitionKind(
        "IID, but every group of clients names the classes by its own permutation",
        {"groups": 4, "group_sizes": None} | _SIZES | _SHIFTS,
    ),
    "shifted-groups": PartitionKind(
        "IID, but every group of clients sees its examples in its own way: by shifts, or else rotated",
        {"groups": None, "group_sizes": None} | _SHIFTS | _SIZES,
    ),
    "mixed-groups": PartitionKind(
        "soft membership: a client's examples come from several groups, by shares from Dir(alpha), or from a number of"
        " them (mixed) that each client draws; groups name the classes by their own permutation (permute) and see"
        " examples in their own way (shifts)",
        {"groups": 3, "mixed": None, "alpha": 0.5, "permute": True} | _SHIFTS | _SIZES,
    ),
    "permuted-clients": PartitionKind(
        "the very split of an iid or dirichlet base, but every client names the classes by its own permutation",
        {"base": "iid", "alpha": 0.5, "min_samples": 10} | _SHIFTS,
    ),
    "label-groups": PartitionKind(
        "classes divided into groups (superclasses where known); a client holds its group's classes only",
        {"groups": None, "group_sizes": None} | _SIZES | _SHIFTS,
    ),
    "domains": PartitionKind(
        "each client holds one domain (the source's, or lists of classes), labels renumbered inside it and permuted"
        " per client; 4 clients per domain",
        {"permute": True, "domains": None},
    ),
}
_OWN_COUNT = {"natural", "domains"}  # kinds that know how many clients there are
_GROUPED = ("permuted-groups", "shifted-groups", "mixed-groups", "label-groups", "domains")
SPLITS = ("client", "global", "common")


def knows_groups(kind: str, options: Mapping[str, Any]) -> bool:
    """Whether a partition knows the true groups of its clients: by its kind, or because groups see examples shifted."""
    return kind in _GROUPED or options.get("shifts") is not None


def groups_known_by() -> str:
    """The partitions that know the groups of their clients, in words."""
    return f"{', '.join(_GROUPED)}, or the option shifts"


def check_partition(
    kind: str,
    clients: int | None = None,
    split: str = "client",
    validation: float = 0.0,
    test: float = 0.25,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Check everything that can be checked before data are loaded; return the options with defaults filled in.

    Raises:
        ConfigError: naming the key, what is allowed and what was got.
    """
    if kind not in PARTITIONS:
        raise ConfigError(f"Partition: unknown kind {str(kind)[:60]!r}.{nearest(str(kind)[:60], PARTITIONS)}")
    if not (clients is None and kind in _OWN_COUNT):
        _integer("clients", clients)
    if split not in SPLITS:
        raise ConfigError(f"Partition: split must be 'client', 'global' or 'common'. Got {split!r}.")
    for name, value in (("validation", validation), ("test", test)):
        if not _is_number(value) or not 0 <= value < 1:
            raise ConfigError(f"Partition: {name} must be a fraction in [0, 1). Got {value!r}.")
    if validation + (test if split == "client" else 0) >= 1:
        raise ConfigError(f"Partition: validation and test must leave room for training. Got {validation} and {test}.")
    if split == "common" and test == 0:
        raise ConfigError("Partition: split 'common' needs test above 0, the share that all are tested on. Got 0.")
    defaults = PARTITIONS[kind].options
    for name in options or {}:
        if name not in defaults:
            raise ConfigError(f"Partition: kind '{kind}' has no option '{name[:60]}'.{nearest(name, defaults)}")
    filled = {**defaults, **(options or {})}
    for name, value in filled.items():
        if value is None and defaults[name] is None:
            continue
        if name == "sizes":
            filled[name] = parse_law(value).text
        elif name == "shifts":
            filled[name] = parse_shifts(value)
        elif name == "group_sizes":
            filled[name] = parse_group_sizes(value, clients)
        elif name == "alpha":
            if not _is_number(value) or not 1e-6 <= value <= 1e6:
                raise ConfigError(f"Partition: alpha must be a number in [1e-06, 1e+06]. Got {value!r}.")
        elif name == "fraction":
            if not _is_number(value) or not 0 < value <= 1:
                raise ConfigError(f"Partition: fraction must be a number in (0, 1]. Got {value!r}.")
        elif name == "base":
            if value not in ("iid", "dirichlet"):
                raise ConfigError(f"Partition: base must be 'iid' or 'dirichlet'. Got {value!r}.")
        elif name == "permute":
            if not isinstance(value, bool):
                raise ConfigError(f"Partition: permute must be true or false. Got {value!r}.")
        elif name == "domains":
            if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v for v in value):
                raise ConfigError(
                    'Partition: domains must be a list of texts, each the classes of one domain, e.g. ["0-3", "4 + 7"]'
                    f" or names of classes or superclasses. Got {str(value)[:60]!r}."
                )
        elif name == "classes_per_client" and isinstance(value, list | tuple):
            if not value or (clients is not None and len(value) > clients):
                raise ConfigError(
                    f"Partition: classes_per_client must be an integer >= 1, or a list of 1 to {clients} of them (one"
                    f" per client, in turn). Got {len(value)} values."
                )
            for each in value:
                _integer("classes_per_client", each)
        else:
            _integer(name, value)
    _check_sizes(filled)
    _check_groups(kind, clients, filled, options or {})
    return filled


def _check_sizes(filled: dict[str, Any]) -> None:
    """`min_samples` goes with a law of sizes, where it has no default of its own."""
    if "sizes" not in filled:
        return
    if filled["sizes"] is None and filled["min_samples"] is not None:
        raise ConfigError("Partition: min_samples goes with sizes, e.g. sizes = 'lognormal:1'. Got min_samples alone.")
    if filled["sizes"] is not None and filled["min_samples"] is None:
        filled["min_samples"] = 10


def _check_groups(kind: str, clients: int | None, filled: dict[str, Any], given: Mapping[str, Any]) -> None:
    """As many groups as their sizes and shifts say, none without a client."""
    sizes, shifts = filled.get("group_sizes"), filled.get("shifts")
    if sizes is not None:
        if given.get("groups") not in (None, len(sizes)):
            raise ConfigError(
                f"Partition: groups and group_sizes must agree. Got {given['groups']} groups and {len(sizes)} sizes;"
                " leave groups out."
            )
        filled["groups"] = len(sizes)
    if kind == "shifted-groups" and filled["groups"] is None:
        filled["groups"] = 4 if shifts is None else len(shifts)
    if kind == "shifted-groups" and shifts is None:
        filled["shifts"] = shifts = rotations(filled["groups"])
    if kind == "mixed-groups" and not filled["permute"] and shifts is None:
        raise ConfigError("Partition: groups of 'mixed-groups' must differ. Got permute = false and no shifts.")
    groups = filled.get("groups")
    if filled.get("mixed") is not None and filled["mixed"] > groups:
        raise ConfigError(f"Partition: mixed must be at most the number of groups, {groups}. Got {filled['mixed']}.")
    if groups is not None and clients is not None and groups > clients and kind != "mixed-groups":
        raise ConfigError(f"Partition: groups must be at most the number of clients, {clients}. Got {groups}.")
    if shifts is not None and len(shifts) > (groups or clients or len(shifts)):
        raise ConfigError(
            f"Partition: there must be at most as many shifts as groups, {groups or clients}. Got {len(shifts)}."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ConfigError(f"Partition: {name} must be an integer >= 1. Got {value!r}.")
