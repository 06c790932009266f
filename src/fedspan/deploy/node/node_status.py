"""What a node's owner wants to know: its key and its date, its policy, what it has served, whether it is connected."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fedspan.deploy.node.owner_policy import OwnerPolicy, read_policy
from fedspan.deploy.operations import processes
from fedspan.deploy.operations.keys import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    NEXT_KEY,
    check_node_dates,
    fingerprint,
    public_text,
    read_certificate,
    read_node_key,
)
from fedspan.deploy.operations.node_bundle import check_address, installed
from fedspan.errors import ConfigError


def is_node(folder: Path) -> bool:
    """Whether a folder is a node's, and not a federation's."""
    return (folder / KEY).is_file() and not (folder / "server").is_dir()


def node_status(folder: Path) -> dict[str, Any]:
    """What can be said of a node from its own folder, and by knocking at its server's door."""
    running = [e["name"] for e in processes.running(folder)]
    server, bundle = _server(folder), installed(folder)
    reached = server is not None and _reachable(folder, server)
    own = public_text(read_node_key(folder / KEY).public_key())
    return {
        "node": folder.resolve().name if bundle is None else bundle.name,
        "place": None if bundle is None else bundle.place,
        "key": fingerprint(own),
        "renewal": "requested" if (folder / NEXT_KEY).exists() else None,
        **_dates(folder),
        "policy": _policy(folder),
        "processes": running,
        "server": server,
        "server_reached": reached,
        "connected": reached and "supernode" in running,
        **_served(folder),
    }


def _dates(folder: Path) -> dict[str, Any]:
    try:
        notes, fault = check_node_dates(folder) if (folder / AUTHORITY).exists() else [], None
    except ConfigError as e:
        notes, fault = [], str(e)
    end = None
    if (folder / CERTIFICATE).exists():
        end = f"{read_certificate(folder / CERTIFICATE).not_valid_after_utc:%Y-%m-%d}"
    admitted = (folder / AUTHORITY).exists()
    return {"admitted": admitted, "expires": end, "notes": notes, "fault": fault}


def _policy(folder: Path) -> dict[str, Any] | str:
    """What the owner's policy says otherwise than a fresh one; or why it cannot be read."""
    try:
        found = asdict(read_policy(folder))
    except ConfigError as e:
        return str(e)
    usual = {f.name: f.default for f in fields(OwnerPolicy)}
    return {k: v for k, v in found.items() if v != usual[k]}


def _server(folder: Path) -> str | None:
    try:
        return check_address(str(json.loads((folder / "node.json").read_text(encoding="utf-8"))["server"]), "Node")
    except (OSError, ValueError, KeyError, TypeError):
        bundle = installed(folder)
        return None if bundle is None else bundle.server


def _reachable(folder: Path, server: str, seconds: float = 5.0) -> bool:
    """Whether somebody with a certificate of the node's authority opens."""
    host, _, port = server.rpartition(":")
    try:
        context = ssl.create_default_context(cafile=str(folder / AUTHORITY))
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as plain:
            plain.settimeout(seconds)
            with context.wrap_socket(plain, server_hostname=host.strip("[]")):
                return True
    except (OSError, ValueError):
        return False


def _served(folder: Path) -> dict[str, Any]:
    """The last round that the node trained in, by the states it has kept, and what they take."""
    size = sum(p.stat().st_size for p in (folder / "state").rglob("*") if p.is_file())
    kept = sorted((folder / "state").glob("*/manifest-*.json"), key=lambda p: p.stat().st_mtime_ns)
    found: dict[str, Any] = {"run": None, "round": None, "at": None, "state": None, "state_bytes": size}
    if kept:
        newest, at = kept[-1], datetime.datetime.fromtimestamp(kept[-1].stat().st_mtime, datetime.UTC)
        found |= {"run": newest.parent.name.rsplit("-", 3)[0], "round": _round(newest)}
        found |= {"at": f"{at:%Y-%m-%d %H:%M:%S} UTC", "state": str(newest.parent)}
    return found


def _round(manifest: Path) -> int | None:
    try:
        return int(json.loads(manifest.read_text(encoding="utf-8"))["round"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
