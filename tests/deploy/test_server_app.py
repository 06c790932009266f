"""The ServerApp: a run that cannot go on says why where its owner looks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import fedspan.deploy
from fedspan.config import load_config, to_toml
from fedspan.deploy.experiment import kind_of
from fedspan.deploy.policy import Policy
from fedspan.deploy.roster_file import empty_places, write_places
from fedspan.deploy.server import server_app
from fedspan.errors import CheckpointError
from fedspan.storage.lock import Lock

pytestmark = pytest.mark.slow


def test_a_run_directory_that_another_server_holds_is_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(Path(fedspan.deploy.__file__).parent / "local.toml", ["partition.clients=2"]).resolve()
    kind = kind_of(config)
    assert kind is not None
    out = tmp_path / "runs" / config.name
    (out / "checkpoints").mkdir(parents=True)
    (tmp_path / "ca.crt").touch()
    write_places(tmp_path, empty_places(2))
    order = {"experiment": to_toml(config), "kind": asdict(kind), "policy": asdict(Policy()), "fresh": False}
    (out / "order.json").write_text(json.dumps(order | {"groups": None}))
    monkeypatch.setenv(server_app.FOLDER, str(tmp_path))
    context: Any = SimpleNamespace(run_config={"name": config.name})
    grid: Any = None
    held = Lock(out / "checkpoints")
    try:
        with pytest.raises(CheckpointError, match="is in use by process"):
            server_app.main(grid, context)
    finally:
        held.close()
    (line,) = (out / "server.log").read_text().splitlines()
    assert "The run ends here: Run directory" in line and "is in use by process" in line
    assert not (out / "started").exists() and not (out / "status.json").exists()
