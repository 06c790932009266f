"""What a node does with a request: find its experiment, its data and its state, and do the work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedspan.config import RunConfig, assemble_data
from fedspan.config.client_file import read_own
from fedspan.data.federated import FederatedData
from fedspan.deploy.envelope import Facts
from fedspan.deploy.experiment import kind_of, read_config, read_experiment, seat
from fedspan.deploy.node.node import Node
from fedspan.deploy.node.own_table import ASKED, OwnTable, keep_agreement, kept_agreement
from fedspan.deploy.node.owner_policy import CODE_REMEDY, named_by, read_policy
from fedspan.errors import ConfigError
from fedspan.method.named_code import named_function, only_allowing
from fedspan.simulation import warnings
from fedspan.storage.atomic import write_atomic

SETTINGS = "node.json"
WARNINGS = "warnings.txt"
"""In a node's folder: what its owner should hear about its data, written when a run begins; absent if nothing."""


class Service:
    """A node's folder: `node.json` says where its examples are, `state/` holds what it has learnt.

    `node.json` holds one of `data` (an .npz file with x, y and perhaps x_test, y_test, or a table), `loader`
    ("package.module:function", called with the configuration, which returns the same arrays) or `partition` (a number:
    that client of the experiment's own partition, for trying things out), and perhaps `root`, where sources lie, and
    `allow_code`: packages whose code may be named besides those of `node.toml`. What the server's text may ask for is
    up to `node.toml`, the owner's policy, which is asked before the text is used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._node: tuple[str, Node] | None = None

    def handle(self, experiment: str, facts: Facts, payload: bytes) -> tuple[Facts, bytes]:
        """Answer one request.

        Raises:
            Refused: if the owner's policy does not allow the run, or the message is too large.
        """
        read_policy(self.folder).check_size(len(payload))
        if facts.get("do") in ASKED:
            return self._agree(experiment, facts), b""
        if facts.get("do") == "hello" and "preprocessing" in facts:
            self._allow(experiment)
            keep_agreement(self.folder / "state", experiment, facts)
            self._node = None
        node = self.node(experiment)
        if facts.get("do") == "hello":
            self._warn(node)
        return node.handle(facts, payload)

    def _warn(self, node: Node) -> None:
        """Write what its owner should hear about the node's own data beside them; the server is told nothing of it."""
        said = warnings.of_data(seat(node.data, node.place, 0, 1))
        path = self.folder / WARNINGS
        if said:
            write_atomic(path, "".join(f"{sentence}\n" for sentence in said))
        else:
            path.unlink(missing_ok=True)

    def _agree(self, experiment: str, facts: Facts) -> Facts:
        """What the server asks of this node's table before the first round."""
        where = self._allow(experiment)
        with owners_code(self.folder):
            config = read_config(experiment)
        if not config.data.is_table or "data" not in where:
            raise ConfigError("Node: a run on tables needs a node with --data, a .csv or .parquet file of its own.")
        own = OwnTable(Path(where["data"]), config, int(facts["client"]))
        return {"do": facts["do"], "round": facts["round"], "answer": own.answer(facts)}

    def _allow(self, experiment: str) -> dict[str, Any]:
        """The node's settings, if the owner's policy allows the run; it is asked every time, as it may have changed.

        Raises:
            Refused: if it does not.
        """
        policy, where, named = read_policy(self.folder), read_settings(self.folder), named_by(experiment)
        policy.check_run(named)
        if "partition" in where:
            policy.check_source(named.source)
        if "loader" in where:
            policy.check_loader(str(where["loader"]))
        return where

    def node(self, experiment: str) -> Node:
        """The node of an experiment; the last one is kept.

        Raises:
            Refused: if the owner's policy does not allow the run.
        """
        self._allow(experiment)
        if self._node is None or self._node[0] != experiment:
            with owners_code(self.folder):
                data, place = self._data(read_config(experiment), experiment)
                made = Node(read_experiment(experiment, data), data, place, self.folder / "state")
            self._node = experiment, made
        return self._node[1]

    def _data(self, config: RunConfig, experiment: str) -> tuple[FederatedData, int]:
        where = read_settings(self.folder)
        if where.get("root"):
            config = replace(config, data=replace(config.data, root=where["root"]))
        if "partition" in where:
            data = assemble_data(config)
            if not 0 <= where["partition"] < data.clients:
                raise ConfigError(f"Node: partition must lie in 0..{data.clients - 1}. Got {where['partition']}.")
            return data, int(where["partition"])
        if "data" in where and config.data.is_table:
            kept = kept_agreement(self.folder / "state", experiment)
            return OwnTable(Path(where["data"]), config, kept.client).federation(kept.preprocessing), 0
        if "data" in where:
            kind = kind_of(config)
            classes = config.data.classes if kind is None else kind.classes
            source = read_own(Path(where["data"]), config, classes)[0]
            end = len(source.x) - len(source.test_rows)
            parts: Sequence[Any] = [source.x[:end], source.y[:end]]
            parts = [*parts, source.x[end:], source.y[end:]] if len(source.test_rows) else parts
            return _transformed(config, _one(config, parts, classes)), 0
        if "loader" in where:
            made = _one(config, named_function(str(where["loader"]), "Node: loader")(config), config.data.classes)
            return _transformed(config, made), 0
        raise ConfigError(f"Node: {self.folder / SETTINGS} must hold data, loader or partition.")


def _transformed(config: RunConfig, data: FederatedData) -> FederatedData:
    return replace(data, transforms=config.data.transformation(load=True))


def _one(config: RunConfig, parts: Sequence[Any], classes: int | None) -> FederatedData:
    """One client's arrays, split as the experiment says where it has no test part."""
    if len(parts) not in (2, 4):
        raise ConfigError(f"Node: its data must be x, y or x, y, x_test, y_test. Got {len(parts)} arrays.")
    kind = kind_of(config)
    arrays = [torch.as_tensor(p) for p in parts]
    return FederatedData.from_arrays(
        [(arrays[0], arrays[1])],
        test=[(arrays[2], arrays[3])] if len(parts) == 4 else None,
        test_fraction=config.partition.test,
        validation_fraction=config.partition.validation,
        classes=classes if kind is None else kind.classes,
        seed=config.seed,
    )


def owners_code(folder: Path) -> AbstractContextManager[None]:
    """Allow the code that a node's owner allowed, and no other: a server's text names none by itself.

    Raises:
        ConfigError: if policy or settings cannot be read, or `allow_code` is no list of packages.
    """
    own, allowed = read_policy(folder).allow_code, read_settings(folder).get("allow_code", [])
    if not isinstance(allowed, list):
        raise ConfigError(f"Node: allow_code of {SETTINGS} must be a list of packages. Got {str(allowed)[:60]!r}.")
    return only_allowing([*own, *allowed], CODE_REMEDY, f"Node: allow_code of {SETTINGS}")


def read_settings(folder: Path) -> dict[str, Any]:
    """What `node.json` of a node's folder holds."""
    try:
        settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"Node: {folder / SETTINGS} cannot be read ({type(e).__name__}). Use deploy node.") from None
    return settings
