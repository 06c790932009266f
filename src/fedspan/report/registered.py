"""The method behind a run, as far as it is registered here: its panels, and what it is in a comparison.

A run directory may name any code, and reading one must not run it: `make` decides which methods there are. Methods
need torch, which takes longer to import than a table takes to write: nothing here imports it before it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedspan.errors import FedspanError
from fedspan.report.measures import monitored
from fedspan.report.runs import Run
from fedspan.report.text import clean

if TYPE_CHECKING:
    from fedspan.method import Method, Panel, Seen, Yardstick
    from fedspan.method.panels import ClientRows, Models
    from fedspan.storage.tree_file import Segment


def yardstick(name: str) -> Yardstick | None:
    """What a method of this name is to others in a comparison; None for most, and for names that are not known."""
    from fedspan.methods import METHODS

    return METHODS[name].about.yardstick if name in METHODS else None


def role(name: str) -> Literal["alone", "common", "told"] | None:
    """The yardstick's role."""
    found = yardstick(name)
    return None if found is None else found.role


def registered_name(run: Run) -> str:
    """The method's name in the registry; a report may show the run under another."""
    section = run.config.get("method")
    name = section.get("name") if isinstance(section, dict) else None
    return name if isinstance(name, str) else str(run.result["method"])


def method_of(run: Run) -> Method:
    """The run's method with the fields it had.

    Raises:
        FedspanError: if it is not registered here, or its fields do not fit.
    """
    from fedspan.methods import METHODS, make

    name = registered_name(run)
    if name not in METHODS and ":" not in name:  # of code that a name asks for, `make` says whether it is allowed
        raise FedspanError(
            f"Report: the method of a run must be registered where its report is written. Got '{clean(name, 60)}';"
            " install the package that brings it."
        )
    section = run.config.get("method")
    fields = {k: v for k, v in section.items() if k != "name"} if isinstance(section, dict) else {}
    return make(name, **fields)


def panels_of(run: Run) -> Sequence[Panel]:
    """The panels that a run's method brings.

    Raises:
        FedspanError: as `method_of`.
    """
    from fedspan.method import Abilities

    return Abilities(method_of(run)).observed.panels()


def methods_with(panel: str) -> list[str]:
    """The registered methods that bring a panel of this name with their default fields."""
    from fedspan.method import Abilities
    from fedspan.methods import METHODS, make

    return [name for name in METHODS if any(p.name == panel for p in Abilities(make(name)).observed.panels())]


# ------------------------------------------------------------------------------------------------ what they look at


def seen_of(run: Run, label: str, models: Models | None = None, clusters: int | None = None) -> Seen:
    """Read what a panel looks at from a run's newest checkpoint; data and model are not needed.

    Args:
        label: what the report calls the run.
        models: every client's model, where someone asked for them.
        clusters: how many clusters someone asked for.

    Raises:
        FedspanError: if there is no checkpoint, or the run has not told its clients.
    """
    from fedspan.method import Seen
    from fedspan.storage.checkpoint import RunDirectory

    if run.path is None:
        raise FedspanError("Report: panels need the directory of a run. Got a run from memory.")
    loaded = RunDirectory(run.path / "checkpoints", None, read_only=True).load()
    if loaded is None:
        raise FedspanError(f"Report: {run.path} must have a checkpoint. Got none; run the experiment again.")
    names, groups = run.result.get("names"), run.result.get("groups")
    if not isinstance(names, list):
        raise FedspanError("Report: panels need the clients' names, which a run tells when it has finished.")
    return Seen(
        label,
        loaded.round,
        run.seed,
        tuple(str(n) for n in names),
        np.array(groups, np.int64) if isinstance(groups, list) and len(groups) == len(names) else None,
        run.lines,
        monitored(run.lines),
        loaded.server["server"],
        loaded.server["common"],
        lambda: [_rows(segments) for segments in loaded.rows if segments],
        models,
        clusters,
    )


def _rows(segments: Sequence[Segment]) -> ClientRows:
    """The states of the clients of one capacity that took part."""
    import torch

    from fedspan.method.panels import ClientRows
    from fedspan.storage.client_store import ClientStore

    ids = sorted({int(i) for segment in segments for i in segment.ids})
    blank = _blank(json.loads(segments[-1].structure))
    store = ClientStore(lambda _: blank, ids)
    store.restore(segments)
    return ClientRows(torch.tensor(ids), store.take(ids))


def _blank(described: Any) -> Any:
    """A tree of the described types and shapes, all zero."""
    import torch

    from fedspan.tree import Outer

    if isinstance(described, dict):
        return {k: _blank(part) for k, part in described.items()}
    if isinstance(described, list):
        return Outer(*map(_blank, described))
    name, shape = described[:-1].split("[")
    return torch.zeros(json.loads(f"[{shape}]"), dtype=getattr(torch, name))
