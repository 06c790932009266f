"""Break a real federation on the loopback address and see what is left.

    python tests/tools/deploy_faults.py [same node superlink serverapp strangers replay flood join rounds ten ...]

same       the deployed run has the simulator's numbers
node       kill -9 a node's processes in a round: the round ends at its deadline, the node returns with its state
superlink  kill -9 the SuperLink in a run: a new run goes on, at most one round is lost
serverapp  kill -9 the ServerApp in a run: likewise
strangers  A1: six bad nodes; A2: five control actions through the proxy (needs nginx)
replay     A3: a node sends every update again, changed, and from an old round: each counts once
flood      a node sends 400 MB where some kB are declared: memory, database, time of the round; later it is heard again
join       a node takes a reserved place in a running federation, one changes its key, one is revoked; the audit log
rounds     seconds per round with almost no work, without and with warm workers
ten        ten nodes for ten rounds without a failure; bytes as fedspan counts them and as they pass by

Without names: all. Every process is stopped by its number at the end; the exit code is 0 only if all held.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil

import fedspan.deploy
from fedspan import tree
from fedspan.config import assemble, load_config
from fedspan.deploy.experiment import kind_of
from fedspan.deploy.operations import processes
from fedspan.deploy.operations.deployment import LOOPBACK, Deployment, node_command, start_node, watch_run
from fedspan.deploy.operations.keys import make_keys
from fedspan.deploy.operations.proxy import nginx
from fedspan.deploy.policy import Policy
from fedspan.errors import CheckpointError, FedspanError
from fedspan.simulation.settings import Settings
from fedspan.simulation.simulator import Simulation
from fedspan.storage.checkpoint import RunDirectory
from fedspan.storage.lock import Lock

LOCAL = Path(fedspan.deploy.__file__).parent / "local.toml"
# What is printed when a node is turned away, by itself (TLS) or by the SuperLink (authentication); without such a sign
# it may only have been slow.
OWN_SIGNS = ("CERTIFICATE_VERIFY", "Connection attempt failed")
SIGNS = re.compile(r'POST /v1/fleet/[a-z-]+ HTTP/1.1" 4\d\d')
PATIENCE = 900.0  # a busy machine takes long to start anything


class Meter:
    """Passes connections on to a port of this machine and counts what goes by, TLS and all."""

    def __init__(self, target: int) -> None:
        self.target, self.up, self.down = target, 0, 0
        self._lock = threading.Lock()
        self._door = socket.create_server((LOOPBACK, 0))
        self.port = int(self._door.getsockname()[1])
        threading.Thread(target=self._admit, daemon=True).start()

    def close(self) -> None:
        self._door.close()

    def _admit(self) -> None:
        while True:
            try:
                guest, _ = self._door.accept()
                host = socket.create_connection((LOOPBACK, self.target))
            except OSError:
                return  # closed
            threading.Thread(target=self._pump, args=(guest, host, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(host, guest, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
                with self._lock:
                    self.up, self.down = self.up + len(data) * up, self.down + len(data) * (not up)
        except OSError:
            pass  # one of the two has gone
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Federation:
    """A server and its nodes in a folder of their own."""

    meter: Meter | None

    def __init__(
        self, folder: Path, nodes: int, warm: bool = True, metered: bool = False, places: int | None = None
    ) -> None:
        self.folder, self.warm = folder, warm
        self.names = [f"node-{i}" for i in range(nodes)]
        make_keys(folder, self.names, places=places)
        self.server = Deployment(folder / "server")
        self.metered, self.meter = metered, None

    def start(self) -> None:
        self.server.start(seconds=PATIENCE)
        self.server.register()
        self.meter = Meter(self.server.port) if self.metered else None
        for i in range(len(self.names)):
            self.start_node(i)

    def start_node(self, i: int) -> None:
        where = f"{LOOPBACK}:{self.meter.port if self.meter else self.server.port}"
        start_node(self.folder / self.names[i], where, {"partition": i}, warm=self.warm, seconds=PATIENCE)

    def stop(self) -> None:
        for name in self.names:
            processes.stop(self.folder / name)
        self.server.stop()
        if self.meter:
            self.meter.close()

    def order(
        self, *overrides: str, file: Path = LOCAL, deadline: float = 300.0, quorum: float = 0.5
    ) -> tuple[str, int]:
        config = load_config(file, [f"partition.clients={self.server.clients}", *overrides]).resolve()
        kind = kind_of(config)
        assert kind is not None
        return config.name, self.server.submit(config, kind, Policy(deadline=deadline, quorum=quorum, wait=120))

    def until_round(self, name: str, number: int, t: int) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            body = self.server.status(name)
            if body is not None and body["round"] >= t:
                return body
            state = self.server.flower_status(number)
            if state.startswith("finished"):
                said = (self.server.out(name) / "server.log").read_text().splitlines()[-1:]
                raise FedspanError(f"{name}: the run ended as {state} before round {t}: {said}")
            time.sleep(0.2)
        raise FedspanError(f"{name}: round {t} was not reached in {PATIENCE:g} s")

    def wait(self, name: str, number: int) -> dict[str, Any]:
        return watch_run(self.server, name, number, PATIENCE, lambda _: None)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(x) for x in (self.server.out(name) / "metrics.jsonl").read_text().splitlines()]

    def state(self, name: str) -> Any:
        loaded = RunDirectory(self.server.out(name) / "checkpoints", None, read_only=True).load()
        assert loaded is not None
        return loaded.server["server"]


@contextmanager
def federation(
    nodes: int = 3, warm: bool = True, metered: bool = False, places: int | None = None
) -> Iterator[Federation]:
    folder = Path(tempfile.mkdtemp(prefix="fedspan-faults-"))
    usual, temporary = tempfile.gettempdir(), folder / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    made = Federation(folder, nodes, warm, metered, places)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        os.environ["TMPDIR"] = tempfile.tempdir = usual
        left = _left_behind(folder)
        if left:
            print(f"  LEFT OVER: {left}")
            globals()["leftovers"] = True
        shutil.rmtree(folder, ignore_errors=True)


leftovers = False


def _left_behind(folder: Path) -> list[str]:
    """F13: what should not be there after everything was stopped: processes, temporary files, locks that are held."""
    left = [f"process {p.pid}" for p in psutil.process_iter() if _ours(p, folder)]
    left += [str(p) for p in (*(folder / "tmp").iterdir(), *folder.rglob("*.tmp"))]
    for path in folder.rglob("lock"):
        try:
            Lock(path.parent).close()
        except CheckpointError as e:
            left.append(str(e))
    return left


def _ours(p: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder) in " ".join(p.cmdline()) or p.environ().get("FLWR_HOME", "").startswith(str(folder))
    except psutil.Error:
        return False


def simulated(*overrides: str, file: Path = LOCAL, clients: int = 3) -> Any:
    config = load_config(file, [f"partition.clients={clients}", *overrides]).resolve()
    method, task, data = assemble(config)
    settings = Settings(**{**vars(config.train), "mapping": "loop", "workers": 1, "evaluate_every": 1000})
    guard = config.defence
    sim = Simulation(method, task, data, rounds=config.rounds, seed=config.seed, settings=settings, defence=guard)
    sim.run()
    return sim.record.server


def gap(a: Any, b: Any) -> float:
    x, y = dict(tree.items(a)), dict(tree.items(b))
    assert x.keys() == y.keys()
    return max(
        (float((x[k].double() - y[k].double()).abs().max() / x[k].double().abs().max().clamp_min(1)) for k in x
         if x[k].numel()), default=0.0
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ scenarios


def same() -> bool:
    """Simulator and deployment agree."""
    good = True
    with federation() as f:
        for name in ("fedavg", "fedrep", "pfl-mf", "factorized-fl-alpha", "fedloru", "fedara"):
            more = [f"name={name}", f"method.name={name}", "rounds=2", "train.evaluate_every=2"]
            more += ["method.rank=2"] if name == "fedloru" else []
            text = LOCAL.read_text() if name == "pfl-mf" else LOCAL.read_text().replace("rank = 3\n", "")
            file = f.folder / "exp.toml"
            file.write_text(text.replace("lr = 0.5", "lr = 0.1"))
            f.wait(*f.order(*more, file=file))
            expected, found = simulated(*more, file=file), f.state(name)
            equal, difference = tree.digest(expected) == tree.digest(found), gap(expected, found)
            print(f"  {name}: bits equal {equal}, largest relative difference {difference:.1e}", flush=True)
            good &= difference <= 1e-6
    return good


def node() -> bool:
    """Kill -9 a node in a round."""
    with federation() as f:
        name, number = f.order("rounds=16", "train.evaluate_every=16", deadline=60.0)
        f.until_round(name, number, 1)
        victim = f.folder / f.names[2]
        held = sorted(p.name for p in (victim / "state").glob("*/manifest-*.json"))
        for entry in processes.running(victim):
            for pid in (*processes._descendants(entry["pid"]), entry["pid"]):
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGKILL)
        f.until_round(name, number, 2)
        f.start_node(2)
        f.wait(name, number)
        lines = f.lines(name)
        kept = sorted(p.name for p in (victim / "state").glob("*/manifest-*.json"))
        answered, longest = [line["answered"] for line in lines], max(line["seconds"] for line in lines)
        print(f"  answered {answered}, longest round {longest:.0f} s; states before {held}, after {kept}")
        missed = [line["missing"] for line in lines if line["missing"]]
        print(f"  missing: {missed}")
        back = answered[-1] == 3 and 2 in answered and len(kept) > 0
        return len(lines) == 16 and not any(line["skipped"] for line in lines) and back and longest < 75


def _resumed(kill: Callable[[Federation], None]) -> bool:
    more = ("rounds=4", "train.evaluate_every=4")
    with federation() as f:
        name, number = f.order(*more)
        before = f.until_round(name, number, 2)["round"]
        old = _family(f.server.folder)
        kill(f)
        start = time.monotonic()
        if not f.server.ready():
            f.server.start(f.server.port, seconds=PATIENCE)
        _, number = f.order(*more)
        f.until_round(name, number, before + 1)
        going = time.monotonic() - start
        done = f.wait(name, number)
        lines, equal = f.lines(name), tree.digest(simulated(*more)) == tree.digest(f.state(name))
        log = (f.server.out(name) / "server.log").read_text()
        again = [line for line in log.splitlines() if "Resuming after round" in line]
        print(f"  killed after round {before}; {again[-1:]}; rounds {[line['round'] for line in lines]}")
        print(f"  the next round was done {going:.0f} s after; bit for bit an undisturbed simulation's state: {equal}")
        held = done["state"] == "finished" and [line["round"] for line in lines] == [1, 2, 3, 4] and equal
        return held and (_lives(old[0]) or (not any(map(_lives, old)) and _ends_by_itself(f)))


def _pid(f: Federation) -> int:
    """The number of the SuperLink."""
    (entry,) = processes.running(f.server.folder)
    return int(entry["pid"])


def _family(folder: Path) -> list[psutil.Process]:
    """The process of a folder that was started first, and all that it has started."""
    first = psutil.Process(processes.running(folder)[0]["pid"])
    return [first, *first.children(recursive=True)]


def _lives(p: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    return False


def _ends_by_itself(f: Federation) -> bool:
    """Whether all that a SuperLink has started ends within 30 s after it was killed in a round, if nobody helps."""
    name, number = f.order("name=left", "rounds=50", "train.evaluate_every=50")
    f.until_round(name, number, 1)
    family, start = _family(f.server.folder), time.monotonic()
    family[0].kill()
    family[0].wait(10)  # as the system's first process does for one whose parent has gone
    while any(map(_lives, family)) and time.monotonic() < start + 30:
        time.sleep(0.2)
    left = [" ".join(p.cmdline())[:80] for p in family if _lives(p)]
    print(f"  left to themselves, its {len(family) - 1} processes ended {time.monotonic() - start:.0f} s later; {left}")
    return not left


def superlink() -> bool:
    """Kill -9 the SuperLink; the next one ends what it has left, and without a next one that ends by itself."""

    def kill(f: Federation) -> None:
        pid = _pid(f)
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while any(e["pid"] == pid for e in processes.running(f.server.folder)) and time.monotonic() < end:
            time.sleep(0.01)  # a killed process takes a moment to end

    return _resumed(kill)


def serverapp() -> bool:
    """Kill -9 the ServerApp."""

    def kill(f: Federation) -> None:
        os.kill(json.loads((f.server.out("local") / "status.json").read_text())["pid"], signal.SIGKILL)
        time.sleep(2)

    return _resumed(kill)


def strangers() -> bool:
    """Nodes that must stay out, and a control plane that must not be reached."""
    with federation(2) as f:
        return all([_bad_nodes(f), _control(f)])


def _bad_nodes(f: Federation) -> bool:
    other = f.folder / "other"
    make_keys(other, ["x", "y"])
    stranger, where = other / "x", f"{LOOPBACK}:{f.server.port}"
    right_ca = str(f.server.folder / "ca.crt")
    base = ["flower-supernode", "--superlink", where, "--host", LOOPBACK, "--max-retries", "1"]
    own = str(stranger / "key")
    gone = f.folder / "gone"
    shutil.copytree(f.folder / f.names[1], gone, ignore=shutil.ignore_patterns("flwr", "*.log", "*.json", "state"))
    expired = f.folder / "expired"
    make_keys(expired, ["z"], days=0)
    cases = {
        "no key": [*base, "--root-certificates", right_ca],
        "unregistered key": [*base, "--root-certificates", right_ca, "--auth-supernode-private-key", own],
        "no TLS": [*base, "--insecure"],
        "wrong authority": [
            *base,
            "--root-certificates",
            str(stranger / "ca.crt"),
            "--auth-supernode-private-key",
            own,
        ],
        "expired certificate": None,
        "unregistered after use": None,
    }
    good = True
    for case, command in cases.items():
        if case == "expired certificate":
            good &= _expired(expired)
            continue
        if case == "unregistered after use":
            from flwr.proto.control_pb2 import UnregisterNodeRequest

            processes.stop(f.folder / f.names[1])
            with f.server._control() as control:
                control.UnregisterNode(UnregisterNodeRequest(node_id=f.server.register()[f.names[1]]))
            command = [*node_command(gone, where), "--max-retries", "1"]
        assert command is not None
        env = processes.environment(f.folder / "flwr-stranger", FEDSPAN_NODE=str(stranger))
        command = [*command, "--port", str(processes.free_port())]
        server_log = f.server.folder / "superlink.log"
        seen = len(server_log.read_text())
        with open(f.folder / "stranger.log", "w+") as log:
            stranger_process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            end = time.monotonic() + 90
            said: list[str] = []
            try:
                while not said and time.monotonic() < end:
                    time.sleep(0.5)
                    log.seek(0)
                    said = [line.strip() for line in log if any(sign in line for sign in OWN_SIGNS)]
                    said = SIGNS.findall(server_log.read_text()[seen:]) or said
            finally:
                stranger_process.kill()
                stranger_process.wait()
        with f.server._control() as control:
            from flwr.proto.control_pb2 import ListNodesRequest

            online = [n for n in control.ListNodes(ListNodesRequest()).nodes_info if n.status == "online"]
        inside = len(online) > (1 if case == "unregistered after use" else 2)
        print(f"  A1 {case}: {'INSIDE' if inside else 'refused'}; sign: {said[:1]}", flush=True)
        good &= not inside and bool(said)
    return good


def _expired(folder: Path) -> bool:
    """A client does not talk to a server whose certificate has expired."""
    time.sleep(1)
    server = Deployment(folder / "server")
    try:
        server.start(seconds=30)
        print("  A1 expired certificate: STARTED")
        return False
    except FedspanError as e:
        print(f"  A1 expired certificate: {e}", flush=True)
    try:
        port = processes.free_port()
        processes.start(server.folder, "superlink", server.command(port), server.environment())
        end = time.monotonic() + 90
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection((LOOPBACK, port), 1):
                break
            time.sleep(0.5)
        context = ssl.create_default_context(cafile=str(folder / "server" / "ca.crt"))
        try:
            urllib.request.urlopen(f"https://{LOOPBACK}:{port}/health", timeout=5, context=context)
            return False
        except (urllib.error.URLError, OSError) as e:
            print(f"  A1 expired certificate: refused; {str(e)[:100]}", flush=True)
            return "expired" in str(e)
    finally:
        server.stop()


def _control(f: Federation) -> bool:
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        print("  A2: nginx is not installed; not tried")
        return False
    outside = processes.free_port()
    text = nginx(f.server.folder, "localhost", listen=outside, port=f.server.port)
    text = text.replace(f"listen {outside} ssl", f"listen {LOOPBACK}:{outside} ssl")
    where = f.folder / "nginx"
    where.mkdir()
    whole = f"pid {where}/pid;\nerror_log {where}/error.log;\ndaemon off;\nuser root;\nevents {{}}\n"
    whole += (
        f"http {{\naccess_log off;\nclient_body_temp_path {where}/body;\nproxy_temp_path {where}/proxy;\n{text}}}\n"
    )
    (where / "nginx.conf").write_text(whole)
    processes.start(where, "nginx", [program, "-c", str(where / "nginx.conf"), "-p", str(where)], dict(os.environ))
    context = ssl.create_default_context(cafile=str(f.server.folder / "ca.crt"))

    def asked(port: int, path: str, body: bytes = b"") -> int | str:
        url = f"https://localhost:{port}{path}"
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/protobuf"})
        try:
            with urllib.request.urlopen(request, timeout=20, context=context) as r:
                return int(r.status)
        except urllib.error.HTTPError as e:
            return e.code
        except OSError as e:
            return type(e).__name__

    time.sleep(2)
    good = True
    try:
        for action in ("register-node", "start-run", "stop-run", "list-runs", "stream-logs"):
            path, log = f"/v1/control/{action}", f.server.folder / "superlink.log"
            before = log.read_text().count(path)
            got = asked(outside, path)
            through = log.read_text().count(path) > before
            inside = asked(f.server.port, path)  # a control: the action is there, and asking leaves a trace
            traced = log.read_text().count(path) > before
            print(f"  A2 {action}: {got}, reached the SuperLink: {through} ({inside} when asked there)", flush=True)
            good &= got == 404 and not through and traced
        for path in ("/health", "/docs", "/v1/runtime/acquire-task", "/v1/fleet/../control/list-runs"):
            good &= asked(outside, path) in (400, 404)
        fleet = asked(outside, "/v1/fleet/pull-messages")
        long = asked(outside, "/v1/fleet/push-object", bytes(20 << 20))
        print(f"  A2 the fleet without a key: {fleet}; a request of 20 MB: {long}", flush=True)
        return bool(good and fleet in (400, 401, 412) and long in (413, "BrokenPipeError", "URLError", "SSLEOFError"))
    finally:
        processes.stop(where)


def replay() -> bool:
    """Updates sent more than once count once."""
    more = ("rounds=3", "train.evaluate_every=3")
    with federation() as f:
        processes.stop(f.folder / f.names[2])  # from here on this process speaks for it, with its key
        name, number = f.order(*more)
        over, tried = threading.Event(), Counter[str]()
        greedy = threading.Thread(target=_send_again, args=(f, f.folder / f.names[2], over, tried))
        greedy.start()
        try:
            f.wait(name, number)
        finally:
            over.set()
            greedy.join(60)
        lines, equal = f.lines(name), tree.digest(simulated(*more)) == tree.digest(f.state(name))
        print(f"  {dict(tried)}; answered {[line['answered'] for line in lines]}")
        print(f"  bit for bit the state of a simulation in which everybody sends once: {equal}")
        return equal and all(line["answered"] == 3 for line in lines) and tried["again"] == tried["changed"] == 3


FLOOD = int(os.environ.get("FLOOD_MB", "400")) << 20


def flood() -> bool:
    """A node sends far more than is declared."""
    with federation() as f:
        usual = _measured(f, "usual", 0)
        processes.stop(f.folder / f.names[2])  # from here on this process speaks for it, with its key
        flooded = _measured(f, "flooded", FLOOD)
        after = sum(p.stat().st_size for p in f.server.folder.glob("state.db*")) / 2**20
        for what in usual:
            print(f"  {what}: at most {usual[what]:.1f} in a usual run, {flooded[what]:.1f} flooded")
        print(f"  database afterwards: {after:.1f} MB")
        lines = f.lines("flooded")
        answered, refused = [line["answered"] for line in lines], [list(line["refused"]) for line in lines]
        print(f"  answered {answered}; {[line['refused'] or line['missing'] for line in lines]}")
        kept = after < usual["database, MB"] + 32 and flooded["ServerApp, MB"] < usual["ServerApp, MB"] + 50
        return kept and answered == [2, 2, 3] and refused == [[f.names[2]], [f.names[2]], []]


def _measured(f: Federation, name: str, size: int) -> dict[str, float]:
    """A run of three rounds, with a node that sends so many bytes if any: its peaks of memory, database and time."""
    link = _pid(f)
    _, number = f.order(f"name={name}", "rounds=3", "train.evaluate_every=3", deadline=120.0)
    over, most, folder = threading.Event(), dict[str, float](), f.folder / f.names[2]
    threads = [threading.Thread(target=_peaks, args=(f, name, link, over, most))]
    if size:
        threads.append(threading.Thread(target=_send_again, args=(f, folder, over, Counter[str](), name, size)))
    for thread in threads:
        thread.start()
    try:
        f.wait(name, number)
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    return most | {"round, s": max(line["seconds"] for line in f.lines(name))}


def _peaks(f: Federation, name: str, link: int, over: threading.Event, most: dict[str, float]) -> None:
    """Keep the largest memory of SuperLink and ServerApp, and the largest database."""
    while not over.wait(0.1):
        status = f.server.status(name)
        for what, pid in {"SuperLink, MB": link, "ServerApp, MB": status["pid"] if status else link}.items():
            with suppress(psutil.Error):
                most[what] = max(most.get(what, 0.0), psutil.Process(pid).memory_info().rss / 2**20 if status else 0.0)
        with suppress(OSError):
            size = sum(p.stat().st_size for p in f.server.folder.glob("state.db*")) / 2**20
            most["database, MB"] = max(most.get("database, MB", 0.0), size)


def _send_again(
    f: Federation, folder: Path, over: threading.Event, tried: Counter[str], name: str = "local", flood: int = 0
) -> None:
    """A node that answers as it should, and then sends its update again, a changed one, and those of old rounds.

    With `flood` it sends so many bytes instead of its updates of rounds 1 and 2, and the right one in round 3.
    """
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, pull_and_inflate_object_from_tree
    from flwr.supernode.fleet_http_connection import http_request_response

    from fedspan.deploy.envelope import seal, unseal
    from fedspan.deploy.node.service import Service

    key: Any = load_ssh_private_key((folder / "key").read_bytes(), None)
    where = f"{LOOPBACK}:{f.server.port}"
    certificate = (folder / "ca.crt").read_bytes()
    experiment = f.server.order(name).experiment
    service, old = Service(folder), list[Message]()
    with http_request_response(where, False, certificate, (key, key.public_key()), max_retries=2) as connection:
        receive, send, pull, push, confirm = (connection[i] for i in (1, 2, 5, 6, 7))

        def post(message: Message, kind: str) -> None:
            tried[kind] += 1
            try:
                missing, session = send(message, get_object_tree(message), 0.1)
                for number, some in get_all_nested_objects(message).items():
                    if number in missing:
                        push(message.metadata.run_id, session, number, some.deflate())
            except (httpx.HTTPError, RuntimeError, ObjectPushError):  # a SuperNode goes on after any of them, too
                if kind == "right":
                    raise
                tried[f"{kind}, refused by Flower"] += 1

        while not over.wait(0.2):
            got = receive()
            if got is None:
                continue
            head, objects = got
            run = head.metadata.run_id
            request = pull_and_inflate_object_from_tree(
                objects, lambda o, run=run: pull(run, o), lambda o, run=run: confirm(run, o), return_type=Message
            )
            request.metadata.__dict__["_message_id"] = objects.object_id
            facts, payload = service.handle(experiment, *unseal(request.content))

            def answer(payload: bytes, request: Message = request, facts: Any = facts) -> Message:
                made = Message(seal(facts, payload), reply_to=request)
                made.metadata.__dict__["_message_id"] = made.object_id
                return made

            if flood and facts["do"] == "train" and facts["round"] < 3:
                post(answer(os.urandom(flood)), "flood")
                continue
            right = answer(payload)
            post(right, "right")
            if facts["do"] == "train" and not flood:
                post(right, "again")
                post(answer(payload[:-4] + b"\0\0\x80?"), "changed")
                for earlier in old:
                    post(earlier, "old")
                old.append(right)


def join() -> bool:
    """The fourth of four places is taken while rounds run; another node changes its key, a third is revoked."""
    from fedspan.deploy.audit_log import AuditLog
    from fedspan.deploy.operations.membership import Membership
    from fedspan.deploy.operations.node_bundle import install_bundle
    from fedspan.deploy.operations.node_request import request_place, request_renewal

    with federation(3, places=4) as f:
        members, sent = Membership(f.server, f"{LOOPBACK}:{f.server.port}"), f.folder / "sent.json"
        name, number = f.order("rounds=500", "train.evaluate_every=500", deadline=120.0)
        empty = f.until_round(name, number, 2)["round"]

        def handed_over(i: int, how: Callable[[], Any]) -> float:
            """Give a node its bundle and start it; when it was admitted."""
            sent.write_text(how().model_dump_json())
            begun = time.monotonic()
            install_bundle(f.folder / f.names[i], sent)
            f.start_node(i)
            return begun

        def answering(who: str, after: int, absent: bool = False) -> int:
            """The first round after another that used a node, or did not."""
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end:
                for entry in AuditLog(f.server.folder).entries():
                    facts = entry.facts
                    if entry.event == "round" and facts["round"] > after and (who in facts["used"]) != absent:
                        return int(facts["round"])
                time.sleep(0.3)
            raise FedspanError(f"{who} was not heard of in {PATIENCE:g} s")

        f.names.append("late")
        asked = f.folder / "late.request.json"
        request_place(f.folder / "late", "late", asked)
        begun = handed_over(3, lambda: members.admit(asked))
        started, at = time.monotonic() - begun, f.until_round(name, number, 0)["round"]
        first = answering("late", at)
        print(f"  admitted and started in {started:.1f} s, after round {at}; trains from round {first}", flush=True)

        request_renewal(f.folder / "node-0", "node-0", asked)
        renewed_at = f.until_round(name, number, 0)["round"]
        renewed = members.renew(str(asked))
        processes.stop(f.folder / "node-0")
        handed_over(0, lambda: renewed)
        again = answering("node-0", renewed_at + 1)
        print(f"  node-0 has a new key since round {renewed_at}; trains with it in round {again}", flush=True)

        seen, revoked_at = len((f.server.folder / "superlink.log").read_text()), f.until_round(name, number, 0)["round"]
        (pid,) = (e["pid"] for e in processes.running(f.folder / "node-1") if e["name"] == "supernode")
        begun = time.monotonic()
        members.revoke("node-1", "it was asked to leave")
        took = time.monotonic() - begun
        without = answering("node-1", revoked_at, absent=True)
        # As its parent this process must wait for it: until then what it started believes that it lives.
        ended = psutil.wait_procs([psutil.Process(pid)], timeout=120)[0]
        last = f.until_round(name, number, without + 2)["round"]
        turned_away = SIGNS.findall((f.server.folder / "superlink.log").read_text()[seen:])
        print(
            f"  node-1 was revoked in {took:.2f} s after round {revoked_at}; not used from round {without} on",
            flush=True,
        )
        print(f"  the SuperLink turned it away: {turned_away[:1]}; its SuperNode has ended: {bool(ended)}", flush=True)

        os.kill(int(f.server.status(name)["pid"]), signal.SIGKILL)  # and a run goes on with the new roster
        time.sleep(2)
        done = f.wait(*f.order(f"rounds={last + 2}", "train.evaluate_every=500", deadline=120.0))
        lines = f.lines(name)
        used = {e.facts["round"]: e.facts["used"] for e in AuditLog(f.server.folder).entries() if e.event == "round"}
        later = [who for t, some in used.items() if t >= without for who in some]
        events = Counter(e.event for e in AuditLog(f.server.folder).entries())
        count, head = AuditLog(f.server.folder).verify()
        print(f"  answered {[line['answered'] for line in lines]}; missing last {lines[-1]['missing']}")
        print(f"  audit log: {dict(events)}; {count} events, verified, head {head[:16]}")
        mended = (f.server.folder / "audit.jsonl").read_bytes().replace(b'"revoked"', b'"renewed"', 1)
        (f.folder / "audit.jsonl").write_bytes(mended)
        try:
            AuditLog(f.folder).verify()
            return False
        except FedspanError as e:
            print(f"  edited: {e}")
        fine = done["state"] == "finished" and lines[-1]["answered"] == 3 and "node-1" not in later
        fine &= (
            "late" in used[last + 2] and "node-0" in used[last + 2] and first <= at + 2 and bool(turned_away and ended)
        )
        fine &= lines[0]["missing"] == {"place-3": "its place is empty"} and lines[empty - 1]["answered"] == 3
        return fine and events["admitted"] == events["renewed"] == events["revoked"] == 1


def ten() -> bool:
    """Ten nodes, ten rounds; bytes counted and bytes that went by."""
    with federation(10, metered=True) as f:
        assert f.meter is not None
        before = f.meter.up, f.meter.down
        more = ("method.name=fedavg", "method.lr=0.1", "model.hidden=[2048]", "rounds=10", "train.evaluate_every=10")
        file = f.folder / "exp.toml"
        file.write_text(LOCAL.read_text().replace("rank = 3\n", ""))
        f.wait(*f.order(*more, file=file))
        lines = f.lines("local")
        answered, took = [line["answered"] for line in lines], [line["seconds"] for line in lines]
        print(f"  answered {answered}; {', '.join(f'{s:.1f}' for s in took)} s")
        good = answered == [10] * 10 and not any(line["refused"] or line["missing"] for line in lines)
        for way, wire in (("up", f.meter.up - before[0]), ("down", f.meter.down - before[1])):
            counted = sum(line["bytes"][way] for line in lines)
            print(f"  {way}: counted {counted:,} bytes, on the wire {wire:,} ({wire / counted:.3f} x)")
            good &= counted <= wire
        return good


def rounds() -> bool:
    """Seconds per round with almost no work."""
    for warm in (False, True):
        with federation(3, warm) as f:
            f.wait(*f.order("rounds=6", "train.evaluate_every=6", "train.epochs=1"))
            took = [line["seconds"] for line in f.lines("local")]
            kind = "with warm workers" if warm else "without"
            print(f"  {kind}: {', '.join(f'{s:.1f}' for s in took)} s; mean {sum(took) / len(took):.1f}", flush=True)
    return True


SCENARIOS = {f.__name__: f for f in (same, node, superlink, serverapp, strangers, replay, flood, join, rounds, ten)}

if __name__ == "__main__":
    failed = []
    for wanted in sys.argv[1:] or SCENARIOS:
        print(f"{wanted}: {(SCENARIOS[wanted].__doc__ or '').strip()}", flush=True)
        begun = time.monotonic()
        held = SCENARIOS[wanted]()
        print(f"{wanted}: {'held' if held else 'FAILED'} ({time.monotonic() - begun:.0f} s)", flush=True)
        failed += [] if held else [wanted]
    sys.exit(bool(failed or leftovers))
