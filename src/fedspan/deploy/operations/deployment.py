"""The server's folder: its SuperLink, the nodes that are registered, and the runs that were ordered."""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.request
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedspan.config import RunConfig, to_toml
from fedspan.deploy import roster_file
from fedspan.deploy.experiment import DataKind
from fedspan.deploy.node import worker
from fedspan.deploy.node.owner_policy import read_policy, write_template
from fedspan.deploy.operations import prefork, processes, unix_socket
from fedspan.deploy.operations.keys import adopt_earlier, check_node_dates, check_server_dates, public_key
from fedspan.deploy.policy import Policy
from fedspan.errors import ConfigError, FedspanError, safe_name
from fedspan.method.named_code import allowance
from fedspan.storage.atomic import write_atomic

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Order:
    """A run as it was ordered."""

    experiment: str
    kind: DataKind | None
    """What examples look like; None where the nodes agree on it first."""
    policy: Policy
    out: Path
    fresh: bool
    groups: list[int] | None
    allow_code: tuple[str, ...] = ()
    """Packages that the experiment may name code of, as whoever ordered it said."""


class Deployment:
    """The folder `server/` that `make_keys` made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        if not (self.folder / "ca.crt").is_file():
            raise ConfigError(f"Deploy: {folder} must be the server's folder of fedspan deploy keys.")
        if not (self.folder / roster_file.FILE).is_file():
            adopt_earlier(self.folder, self._facts().get("nodes", {}))

    # ------------------------------------------------------------------------------------------------ the SuperLink

    @property
    def port(self) -> int:
        """The port of the SuperLink that was started last."""
        return int(self._facts()["port"])

    def start(self, port: int | None = None, seconds: float = 120.0) -> int:
        """Start the SuperLink on the loopback address with TLS, node authentication and a database."""
        check_server_dates(self.folder)
        if processes.running(self.folder):
            raise ConfigError(f"Deploy: {self.folder} is running already. Stop it first: fedspan deploy stop.")
        processes.stop(self.folder)  # what a killed SuperLink has left: its ServerApp would keep the run directory
        port = port or processes.free_port()
        pid = processes.start(self.folder, "superlink", self.command(port), self.environment())
        self._write("server.json", {**self._facts(), "port": port})
        processes.wait_for("the SuperLink", self.ready, seconds, self.folder, "superlink")
        return pid

    def command(self, port: int) -> list[str]:
        """How the SuperLink is started: never on another address, never without TLS and authentication."""
        here = self.folder
        files = ["--ssl-ca-certfile", here / "ca.crt", "--ssl-certfile", here / "server.crt"]
        files += ["--ssl-keyfile", here / "server.key", "--database", here / "state.db"]
        safe = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        return ["flower-superlink", "--host", LOOPBACK, "--port", str(port), *map(str, files), *safe]

    def environment(self) -> dict[str, str]:
        """What the SuperLink and the ServerApp that it starts run with."""
        return processes.environment(self.folder / "flwr", FEDSPAN_DEPLOY=str(self.folder))

    def ready(self) -> bool:
        """Whether the SuperLink answers."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        try:
            with urllib.request.urlopen(f"https://{LOOPBACK}:{self.port}/health", timeout=5, context=context) as r:
                return bool(r.status == 200)
        except OSError:
            return False

    def stop(self) -> list[str]:
        """Stop the SuperLink and what it has started."""
        return processes.stop(self.folder)

    # ------------------------------------------------------------------------------------------------ nodes

    def register(self) -> dict[str, int]:
        """Make the SuperLink know the admitted keys, and forget the others; which node has which id, in their order."""
        with roster_file.changing_places(self.folder) as held:
            held = self.synchronise(held)
        return {p.name: p.node for p in held.places if p.state == "admitted" and p.name and p.node}

    def synchronise(self, held: roster_file.Places) -> roster_file.Places:
        """Register keys that are not yet, and unregister those that shall go, with the SuperLink that runs.

        A step that was done before a crash is found again: a key is registered once, and forgotten once.
        """
        from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        new = [i for i, p in enumerate(held.places) if p.state == "admitted" and p.node is None]
        if not new and not held.unregister:
            return held
        with self._control() as control:
            listed = control.ListNodes(ListNodesRequest()).nodes_info
            for node in {n.node_id for n in listed if n.status != "unregistered"} & {*held.unregister}:
                control.UnregisterNode(UnregisterNodeRequest(node_id=node))
            held = held.model_copy(update={"unregister": []})
            roster_file.write_places(self.folder, held)
            for i in new:
                place = held.places[i]
                key = public_key_to_bytes(public_key(str(place.public_key), f"Node {place.name}"))
                known = [n.node_id for n in listed if n.public_key == key]
                request = RegisterNodeRequest(public_key=key, name=place.name)
                node = known[0] if known else control.RegisterNode(request).node_id
                held = held.replaced(i, place.model_copy(update={"node": int(node)}))
                roster_file.write_places(self.folder, held)
        return held

    @property
    def clients(self) -> int:
        """How many places the federation has."""
        return len(roster_file.read_places(self.folder).places)

    # ------------------------------------------------------------------------------------------------ runs

    def submit(
        self,
        config: RunConfig,
        kind: DataKind | None,
        policy: Policy,
        *,
        fresh: bool = False,
        groups: list[int] | None = None,
    ) -> int:
        """Order a run, and hand it to Flower; the number Flower gives it. A run found in its directory goes on."""
        from flwr.cli.build import build_fab_from_files
        from flwr.common.serde import fab_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        # Where the data lie is each node's own affair.
        config = replace(config, data=replace(config.data, root=None))
        out, text = self.out(config.name), to_toml(config)
        out.mkdir(parents=True, exist_ok=True)
        order: dict[str, Any] = {
            "experiment": text,
            "kind": None if kind is None else asdict(kind),
            "policy": asdict(policy),
            "fresh": fresh,
            "groups": groups,
        }
        order["allow_code"] = sorted(allowance().packages)
        (out / "started").unlink(missing_ok=True)
        self._write(f"runs/{out.name}/order.json", order)
        self._write(f"runs/{out.name}/config.toml", text)
        fab = build_fab_from_files(bundle(config.name, text))[0]
        import hashlib

        with self._control() as control:
            request = StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {})))
            answer = control.StartRun(request)
        if not answer.HasField("run_id"):
            raise FedspanError(f"Deploy: the run was not accepted. See {self.folder / 'superlink.log'}.")
        return int(answer.run_id)

    def out(self, name: str) -> Path:
        """The directory of a run."""
        return self.folder / "runs" / safe_name(name, "Deploy: a run's name")

    def order(self, name: str) -> Order:
        """A run as it was ordered."""
        out = self.out(name)
        values = json.loads((out / "order.json").read_text(encoding="utf-8"))
        kind = None if values["kind"] is None else DataKind(**values["kind"])
        policy, code = Policy(**values["policy"]), tuple(values.get("allow_code", ()))
        return Order(values["experiment"], kind, policy, out, values["fresh"], values["groups"], code)

    def flower_status(self, number: int) -> str:
        """What Flower says of a run, as status:sub-status."""
        from flwr.proto.control_pb2 import ListRunsRequest

        with self._control() as control:
            run = control.ListRuns(ListRunsRequest(run_id=number)).run_dict[number]
        parts = (run.status.status, run.status.sub_status)
        return ":".join(p for p in parts if p)

    def status(self, name: str) -> dict[str, Any] | None:
        """What the server of a run wrote last; None before its first word."""
        try:
            body: dict[str, Any] = json.loads((self.out(name) / "status.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return body

    # ------------------------------------------------------------------------------------------------ parts

    def _control(self) -> Any:
        from contextlib import closing

        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        return closing(
            ControlHttpClient.from_server_address(
                server_address=f"{LOOPBACK}:{self.port}",
                insecure=False,
                root_certificates=(self.folder / "ca.crt").read_bytes(),
                interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
            )
        )

    def _facts(self) -> dict[str, Any]:
        try:
            facts: dict[str, Any] = json.loads((self.folder / "server.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return facts

    def _write(self, name: str, value: Any) -> None:
        write_atomic(self.folder / name, value if isinstance(value, str) else json.dumps(value, indent=1))


def bundle(name: str, experiment: str) -> dict[str, bytes]:
    """The files of the Flower app: nothing but where its code is installed, and the experiment."""
    text = f"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedspan-app"
version = "1.0.0"
description = "fedspan"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedspan"

[tool.flwr.app.components]
serverapp = "fedspan.deploy.server.server_app:app"
clientapp = "fedspan.deploy.node.client_app:app"

[tool.flwr.app.config]
name = {json.dumps(name)}
experiment = {json.dumps(experiment)}
"""
    return {"pyproject.toml": text.encode(), "README.md": b"The code is that of the fedspan installed here.\n"}


def start_node(
    folder: Path, superlink: str, settings: dict[str, Any], *, warm: bool = True, seconds: float = 120.0
) -> None:
    """Start a node: its warm worker and its starter, if wanted, and the SuperNode that connects to the server.

    Args:
        folder: the node's folder of `make_keys`.
        superlink: host:port of the server, or of the proxy in front of it.
        settings: what `node.json` is to hold; see `fedspan.deploy.node.service.Service`.
    """
    import sys

    folder = folder.resolve()
    if not (folder / "key").is_file():
        raise ConfigError(f"Deploy: {folder} must be a node's folder of fedspan deploy keys.")
    if processes.running(folder):
        raise ConfigError(f"Deploy: the node in {folder} is running already. Stop it first: fedspan deploy stop.")
    check_node_dates(folder)
    processes.stop(folder)  # what killed processes have left
    write_template(folder)
    read_policy(folder)  # one that cannot be read is said here, and not only to the server
    write_atomic(folder / "node.json", json.dumps(settings | {"server": superlink}, indent=1))
    env = processes.environment(folder / "flwr", FEDSPAN_NODE=str(folder))
    modules = {"worker": "fedspan.deploy.node.worker", "prefork": "fedspan.deploy.operations.prefork"}
    forks = warm and sys.platform == "linux"  # elsewhere a process that has imported gRPC must not be forked
    helpers = ({"worker": worker.NOTE} if warm else {}) | ({"prefork": prefork.NOTE} if forks else {})
    for name, note in helpers.items():
        unix_socket.remove_note(folder / note)
        processes.start(folder, name, [sys.executable, "-m", modules[name], str(folder)], env)
    first = {"PATH": f"{prefork.install(folder)}{os.pathsep}{env['PATH']}"} if forks else {}
    processes.start(folder, "supernode", node_command(folder, superlink), env | first)
    for name, note in helpers.items():
        processes.wait_for(f"the {name}", (folder / note).exists, seconds, folder, name)


def node_command(folder: Path, superlink: str) -> list[str]:
    """How a SuperNode is started; what it serves itself stays on the loopback address."""
    files = ["--root-certificates", folder / "ca.crt", "--auth-supernode-private-key", folder / "key"]
    own = ["--host", LOOPBACK, "--port", str(processes.free_port())]
    return ["flower-supernode", "--superlink", superlink, *map(str, files), *own]


def watch_run(deployment: Deployment, name: str, number: int, seconds: float, tell: Any) -> dict[str, Any]:
    """Wait for a run, telling of every round; its last status.

    Raises:
        FedspanError: if Flower ended it otherwise than well, or the time is over.
    """
    end, shown = time.monotonic() + seconds, -1
    while True:
        body = deployment.status(name)
        if body is not None and body["round"] > shown and body["state"] != "waiting":
            shown = body["round"]
            tell(body)
        state = deployment.flower_status(number)
        if state.startswith("finished"):
            body = deployment.status(name)
            if state != "finished:completed" or body is None or body["state"] != "finished":
                log = deployment.out(name) / "server.log"
                raise FedspanError(f"Deploy: the run ended as {state}. Order it again to go on. See {log}.")
            return body
        if time.monotonic() > end:
            raise FedspanError(
                f"Deploy: the run is not finished after {seconds:g} s; it goes on without being watched."
            )
        time.sleep(1.0)
