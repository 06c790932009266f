"""The ClientApp that Flower loads on a node: to the warm worker if one runs, otherwise in this very process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedspan.deploy.envelope import Facts
from fedspan.deploy.node import worker
from fedspan.deploy.node.app_factory import make_client_app
from fedspan.errors import ConfigError

FOLDER = "FEDSPAN_NODE"


def handle(run: Mapping[str, Any], node: Mapping[str, Any], facts: Facts, payload: bytes) -> tuple[Facts, bytes]:
    """Answer one request of the server."""
    if FOLDER not in os.environ:
        raise ConfigError(f"Node: {FOLDER} must name the node's folder. Start it with fedspan deploy node.")
    folder, experiment = Path(os.environ[FOLDER]), str(run["experiment"])
    answer = worker.call(folder, {"experiment": experiment, "facts": facts}, payload)
    if answer is not None:
        return answer
    from fedspan.deploy.node.service import Service

    return Service(folder).handle(experiment, facts, payload)


app = make_client_app(handle)
