"""Figures by group of clients, where groups have names: of domains, say."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from fedspan.studies.papers.experiment_file import slug


def named_groups(result: Mapping[str, Any]) -> dict[str, list[int]]:
    """The clients of each group by the group's name, in the order of the groups; none where groups have no names.

    A partition that names its groups calls their clients NAME-NUMBER.
    """
    groups, names = result.get("groups"), result.get("names") or []
    if groups is None or len(groups) != len(names):
        return {}
    members: dict[int, list[int]] = {}
    for client, group in enumerate(groups):
        members.setdefault(group, []).append(client)
    called = {g: {_group_of(names[i]) for i in of} for g, of in members.items()}
    single = {g: next(iter(said)) for g, said in called.items() if len(said) == 1}
    if len(single) < len(members) or "" in single.values() or len(set(single.values())) < len(single):
        return {}
    return {single[g]: members[g] for g in sorted(members)}


def _group_of(client: str) -> str:
    """What stands before a client's number; nothing if it has none."""
    name, _, number = client.rpartition("-")
    return name if number.isdecimal() else ""


def by_group(result: Mapping[str, Any], measure: str = "accuracy") -> dict[str, float]:
    """The mean of a measure over the clients of each named group; groups without a client that has it are left out."""
    values = result.get("per_client", {}).get(measure, [])
    found = {}
    for name, clients in named_groups(result).items():
        known = [values[i] for i in clients if i < len(values) and values[i] is not None]
        if known:
            found[name] = statistics.fmean(known)
    return found


def group_measures(result: Mapping[str, Any]) -> dict[str, float]:
    """Accuracies by every protocol and named group, as measures: accuracy_household, accuracy_after_household."""
    protocols = [k for k in result.get("per_client", {}) if k.startswith("accuracy")]
    return {
        f"{measure}_{slug(name).replace('-', '_')}": value
        for measure in protocols
        for name, value in by_group(result, measure).items()
    }
