"""What decides a run's numbers, listed once.

Whatever asks "is this the same run?" asks here: a run directory before it is resumed, the command line before it
repeats a finished run, a server before it lets a node in. Values that may differ between two halves of one run are
named in `FREE_SECTIONS` and `FREE_SETTINGS`; everything else decides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedspan.simulation.settings import Settings

FREE_SECTIONS = frozenset({"name", "rounds", "evaluate"})
"""Of a configuration: what a run is called, how many rounds it shall have (more rounds go on with the same run), and
what is measured besides."""

FREE_SETTINGS = frozenset(
    {"evaluate_after", "device", "workers", "start_method", "checkpoint_every", "checkpoint_seconds", "memory_mb"}
)
"""Of `Settings`: how and where a run is carried out and saved, and what is measured besides. Another device rounds
otherwise, as another processor does: both are recorded with the rounds (`environment`)."""

RENAMED = {"precision": "dtype"}
"""Of `Settings`: names that changed. Identities keep the name before, so that runs and hashes from then still fit."""

GIVEN = frozenset({"train", "method", "methods"})
"""Of a configuration: what a run knows as values, whose defaults are filled in."""

LOCAL = frozenset({"data"})
"""Of a configuration: what every node of a deployment has for itself."""


def of_settings(settings: Settings) -> dict[str, Any]:
    """The settings that can change the numbers."""
    return {RENAMED.get(k, k): v for k, v in asdict(settings).items() if k not in FREE_SETTINGS}


def of_config(config: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The sections of a configuration that can change the numbers of a round."""
    kept = {k: v for k, v in config.items() if k not in FREE_SECTIONS and not _says_nothing(k, v)}
    return {**kept, "train": of_settings(settings)}


def _says_nothing(section: str, values: Any) -> bool:
    """Whether a section is one without which the numbers are the same: a defence that is off."""
    return section == "defence" and (not values or values["rule"] == "none")


def of_run(
    config: Mapping[str, Any], settings: Settings, *, method: Mapping[str, Any], **values: Any
) -> dict[str, Any]:
    """All that a run directory belongs to, with dotted keys.

    Args:
        method: its name and keys, all of them.
        values: seed, mapping, hashes of data and model.
    """
    sections = {k: v for k, v in of_config(config, settings).items() if k not in GIVEN}
    return dotted({"config": sections, "train": of_settings(settings), "method": method, **values})


def of_experiment(config: Mapping[str, Any], settings: Settings, **values: Any) -> str:
    """A short hash of what a server and its nodes must have alike: all but the data, of which each has its own."""
    sections = {k: v for k, v in of_config(config, settings).items() if k not in LOCAL}
    text = json.dumps([sections, values], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as one dict with dotted keys."""
    out: dict[str, Any] = {}
    for k, v in values.items():
        if isinstance(v, Mapping):
            out |= dotted(v, f"{prefix}{k}.")
        else:
            out[prefix + k] = list(v) if isinstance(v, tuple) else v
    return out
