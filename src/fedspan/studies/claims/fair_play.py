"""The same for every row: controls in every table, equal local work, schedules that fit the number of rounds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedspan.config import RunConfig, from_dict
from fedspan.data.partitions.kinds import knows_groups
from fedspan.errors import ConfigError
from fedspan.method.fields import keys_of
from fedspan.methods import find_method
from fedspan.methods.as_written import as_written
from fedspan.studies.claims.claim_file import Claim, ClaimRow
from fedspan.studies.papers.experiment_file import copied, put

COMMON = ("fedavg", "fedavg-ft", "fedavg-head", "local")
"""Controls of every table of personal models."""
ONE_TEST = ("fedavg", "local")
"""Controls where all clients are judged by one test set under the same names: nothing is there to be fitted to."""
OWN_NAMES = ("permuted-clients", "permuted-groups", "mixed-groups", "domains")
"""Partitions in which clients name the classes differently."""
GROUPED = ("oracle", "ifca", "cfl")
"""Controls where the clients have groups."""
WORK = {
    "ditto": "personal_epochs",
    "fedalt": "v_epochs",
    "fedavg-ft": "finetune_epochs",
    "fedavg-head": "finetune_epochs",
    "fedrep": "head_epochs",
    "pfedlora1": "personal_epochs",
    "pfedloru": "personal_epochs",
}
"""Epochs of a second part of a client's work: the run's, unless a row says otherwise."""
SCHEDULES = {
    "cfl": "start_round",
    "pfedsim": "warmup_rounds",
    "fedara": "warmup",
    "fedara-star": "warmup",
    "fedkd": "energy_rounds",
}
"""Numbers of rounds that were published for runs of about a hundred: in a claim they are that share of its rounds."""


def config_of(claim: Claim, row: ClaimRow, extra: Mapping[str, Any], seed: int) -> RunConfig:
    """The checked experiment of a row with further fields of its method, e.g. a step size.

    Raises:
        ConfigError: if the claim has no experiment, or anything does not fit.
    """
    if claim.experiment is None:
        raise ConfigError(f"claims: {claim.name} has no [experiment].")
    values = copied(claim.experiment)
    for key, value in row.set.items():
        put(values, key, value)
    values["method"] = {**values.get("method", {}), "name": row.method, **row.fields, **extra}
    values["seed"] = seed
    for key, value in usual_fields(row.method, _epochs(values)).items():
        values["method"].setdefault(key, value)
    own = keys_of(find_method(row.method))
    shared = {k for k in claim.experiment.get("method", {}) if k not in own}  # e.g. momentum, which one row lacks
    values["method"] = {k: v for k, v in values["method"].items() if k not in shared or k in row.fields}
    return from_dict(values, name=claim.stem).resolve()


def _epochs(values: Mapping[str, Any]) -> int:
    return int(values.get("train", {}).get("epochs", 1))


def usual_fields(method: str, epochs: int) -> dict[str, Any]:
    """What a row is given where it says nothing: its paper's options, the run's epochs, schedules that fit."""
    made = as_written(method)
    if method in WORK:
        made[WORK[method]] = epochs
    if method in SCHEDULES:
        published = made.get(SCHEDULES[method], keys_of(find_method(method))[SCHEDULES[method]].default)
        made[SCHEDULES[method]] = f"{published}%"
    return made


def all_rows(claim: Claim) -> list[ClaimRow]:
    """A claim's rows and, for each setting among them, the controls that are not there yet."""
    rows = list(claim.rows)
    settings = {json.dumps(row.set, sort_keys=True): row for row in claim.rows}
    for like in settings.values():
        have = {r.method for r in claim.rows if r.set == like.set}
        end = "" if len(settings) == 1 else f" ({', '.join(f'{k} = {v}' for k, v in like.set.items()) or 'as it is'})"
        for method in controls(claim, like):
            if method not in have and method not in claim.left_out:
                fields = {"clusters": _groups(claim, like)} if method == "ifca" else {}
                row = ClaimRow(name=f"{method}{end}", method=method, fields=fields, set=like.set, control=True)
                rows.append(row if like.lr is None or len(settings) == 1 else replace(row, lr=like.lr))
    return rows


def controls(claim: Claim, like: ClaimRow) -> tuple[str, ...]:
    """The controls of a table: fewer where one test set judges all, more where clients have groups."""
    config = config_of(claim, like, {}, claim.seeds[0])
    if config.partition.split != "client" and config.partition.kind not in OWN_NAMES:
        return ONE_TEST
    if config.model.kinds:
        return tuple(m for m in COMMON if find_method(m).about.any_model)
    grouped = knows_groups(config.partition.kind, config.partition.options)
    return COMMON + (GROUPED if grouped else ())


def _groups(claim: Claim, like: ClaimRow) -> int:
    """How many groups the clients have, as the experiment says."""
    options = config_of(claim, like, {}, claim.seeds[0]).partition.options
    if sizes := options.get("group_sizes"):
        return len(sizes)
    if groups := options.get("groups"):
        return int(groups)
    raise ConfigError(f"claims: {claim.name}: give ifca a row with its clusters; the partition does not say how many.")
