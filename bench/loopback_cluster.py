"""A real Ray cluster of two nodes on loopback, for tests and for `bench.cluster`.

Ray listens on all interfaces, and whoever reaches it runs code. So the nodes, and the process that uses them, live in
namespaces of their own that have nothing but loopback, and all of them end with it; a token is asked for besides.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PORT = 6391
ADDRESS = f"127.0.0.1:{PORT}"
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
RAY = Path(sys.executable).with_name("ray")


def usable() -> str | None:
    """Why there can be no such cluster here; None if there can."""
    try:
        subprocess.run([*NAMESPACES, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "needs namespaces of its own (unshare), so that Ray listens on loopback only"
    return None if RAY.exists() else "needs Ray"


def inside(script: Path, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a script in namespaces of its own; when it ends, or time is up, so does all it has started."""
    command = [*NAMESPACES, sys.executable, str(script), *arguments]
    path = [str(Path(__file__).resolve().parent.parent), *(p for p in sys.path if p)]
    more = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    how: dict[str, Any] = {"env": os.environ | more, "capture_output": True, "text": True, "timeout": seconds}
    return subprocess.run(command, check=False, **how)


@dataclass
class LoopbackCluster:
    """Nodes that were started; the first is the head, with this process on it."""

    folder: Path
    store_mb: int = 400
    """Of every node's object store."""

    def start(self, cpus: int, head: bool = False, ip: str = "127.0.0.1") -> None:
        """Start a node."""
        where = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        command = [str(RAY), "start", *(where if head else [f"--address={ADDRESS}"]), f"--node-ip-address={ip}"]
        command += [f"--num-cpus={cpus}", f"--object-store-memory={self.store_mb}000000", "--disable-usage-stats"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)


@contextmanager
def loopback_cluster(cpus: Sequence[int] = (1, 1), store_mb: int = 400) -> Iterator[LoopbackCluster]:
    """A cluster with so many CPUs on each node, inside namespaces that this process is alone in."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # interfaces of a new namespace are down
        fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        raise RuntimeError("loopback_cluster: must run in a network namespace of its own; see `inside`.")
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
    folder = Path(tempfile.mkdtemp(prefix="fs-", dir="/tmp"))  # short: its sockets' names have an end
    try:
        cluster = LoopbackCluster(folder, store_mb)
        for k, number in enumerate(cpus):
            cluster.start(number, head=k == 0, ip=f"127.0.0.{k + 1}")
        yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)
