"""What happens on a real cluster of two nodes: `cluster_scenarios.py NAME` prints a line of JSON; see `inside`."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from bench.loopback_cluster import ADDRESS, loopback_cluster
from torch import nn

from fedspan.data.federated import FederatedData
from fedspan.errors import FedspanError
from fedspan.methods import METHODS
from fedspan.simulation.cluster import ray_workers
from fedspan.simulation.cluster.ray_connection import joined, the_ray
from fedspan.simulation.simulator import simulate

SIX = ("fedavg", "pfl-mf", "ditto", "fedloru", "fedara", "factorized-fl-beta")


def federation(clients: int = 10) -> FederatedData:
    draw = torch.Generator().manual_seed(3)
    sizes = [24 + 4 * i for i in range(clients)]
    return FederatedData.from_arrays(
        [(torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)) for n in sizes]
    )


def run(name: str, width: int = 8, rounds: int = 4, **how: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    usual = {"batch_size": 8, "chunk": 2, "evaluate_every": 2, "participation": 0.6}
    return simulate(METHODS[name](), net, federation(), rounds=rounds, **{**usual, **how})


def processes(begin: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        # A process may end, or be someone else's, between being listed and being asked.
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(begin):
                found.append(process)
    return found


def kill_node(ip: str) -> None:
    """End a node as a power cut does: its raylet and all that hang on it."""
    raylets = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet" and f"--node_ip_address={ip}" in process.cmdline():
                raylets.append(process)
    assert raylets, f"no raylet of {ip} is running"
    for raylet in raylets:
        for process in [*raylet.children(recursive=True), raylet]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def methods() -> dict[str, Any]:
    """Six methods, on local workers and on the cluster, and the machines of the run that most nodes took part in."""
    found: dict[str, Any] = {"machines": []}
    with loopback_cluster(), joined(ADDRESS):
        for name in SIX:
            here, there = run(name, workers=2), run(name, cluster=ADDRESS)
            same = here.digest == there.digest and here.per_client == there.per_client
            found[name] = same and [x["bytes"] for x in here.curve] == [x["bytes"] for x in there.curve]
            found["machines"] = max(found["machines"], there.cluster["machines"], key=_nodes)
    return found


def _nodes(machines: list[dict[str, Any]]) -> int:
    """How many nodes had an actor by the end of a run: a short one may be over before the second has started."""
    return sum(m["nodes"] for m in machines)


def actor() -> dict[str, Any]:
    """An actor is killed after each of ten rounds, and rows outlive it."""
    killed: list[int] = []

    def kill(line: dict[str, Any]) -> None:
        if line["round"] <= 10:
            victim = processes("ray::ChunkActor")[0]
            victim.kill()
            killed.append(victim.pid)

    with loopback_cluster(), joined(ADDRESS):
        here = run("ditto", 4000, 12, workers=1)
        there = run("ditto", 4000, 12, cluster=ADDRESS, on_round=kill)
    return {"same": here.digest == there.digest, "killed": len(set(killed)), "cluster": there.cluster,
            "returns": sum("computed again" in m for m in there.messages)}  # fmt: skip


def node() -> dict[str, Any]:
    """A node is killed in the middle of round 6; its rows go with it."""
    heard: list[int] = []

    def kill(line: dict[str, Any]) -> None:
        heard.append(line["round"])
        if line["round"] == 5:
            threading.Timer(0.05, kill_node, ["127.0.0.2"]).start()

    with loopback_cluster(), joined(ADDRESS), tempfile.TemporaryDirectory() as folder:
        here = run("ditto", 4000, 10, workers=1, evaluate={"metrics": ["balanced_accuracy"]})
        saved: dict[str, Any] = {"out": folder, "checkpoint_every": 3, "checkpoint_seconds": 0.0}
        there = run(
            "ditto", 4000, 10, evaluate={"metrics": ["balanced_accuracy"]}, cluster=ADDRESS, on_round=kill, **saved
        )
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {"same": here.digest == there.digest and here.measures == there.measures, "heard": heard,
            "lines": [line["round"] for line in lines], "messages": there.messages,
            "alive": sum(n["Alive"] for n in the_ray().nodes()) if the_ray().is_initialized() else None}  # fmt: skip


def nothing() -> dict[str, Any]:
    """The only node with a CPU is killed and none comes; then one does, and the run is resumed."""
    ray_workers.WAIT_SECONDS = 20.0
    with loopback_cluster((0, 1)) as cluster, joined(ADDRESS), tempfile.TemporaryDirectory() as folder:
        saved: dict[str, Any] = {"out": folder, "checkpoint_every": 2, "checkpoint_seconds": 0.0, "cluster": ADDRESS}
        said = ""
        try:
            run("ditto", 4000, 8, **saved, on_round=lambda line: kill_node("127.0.0.2") if line["round"] == 4 else None)
        except FedspanError as e:
            said = str(e)
        cluster.start(1, ip="127.0.0.3")
        there, here = run("ditto", 4000, 8, **saved), run("ditto", 4000, 8, workers=1)
    return {"said": said, "same": here.digest == there.digest}


def joining() -> dict[str, Any]:
    """A node joins while a run goes on, and takes part."""
    with loopback_cluster((1,)) as cluster, joined(ADDRESS):

        def more(line: dict[str, Any]) -> None:
            if line["round"] == 2:
                cluster.start(1, ip="127.0.0.2")
            time.sleep(1.0)

        there = run("ditto", 4000, 20, cluster=ADDRESS, on_round=more)
        here = run("ditto", 4000, 20, workers=1)
    return {"same": here.digest == there.digest, "machines": there.cluster["machines"]}


def whole_runs() -> dict[str, Any]:
    """Eight runs of `compare` on two nodes, of which one is killed meanwhile; then beside those of one machine."""
    from typer.testing import CliRunner

    from fedspan.cli.app import app

    text = """name = "spread"\nrounds = 30\n[data]\nsource = "digits"\n[partition]\nkind = "iid"\nclients = 6
[method]\nname = "fedavg"\n[train]\nevaluate_every = 10\n"""
    with loopback_cluster(), tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        (at / "exp.toml").write_text(text)
        what = ["compare", str(at / "exp.toml"), "-m", "fedavg,ditto,local,fedprox", "--seeds", "2", "-q"]
        CliRunner().invoke(app, [*what, "--out", str(at / "here")])
        threading.Timer(12.0, kill_node, ["127.0.0.2"]).start()
        done = CliRunner().invoke(app, [*what, "--out", str(at / "there"), "--cluster", ADDRESS])
        names = sorted(p.parent.name for p in at.glob("here/*/result.json"))
        digests = [
            [json.loads((at / k / n / "result.json").read_text())["digest"] for n in names] for k in ("here", "there")
        ]
        again = CliRunner().invoke(app, [*what, "--out", str(at / "there"), "--cluster", ADDRESS])
    return {"runs": len(names), "same": digests[0] == digests[1], "code": done.exit_code, "output": done.output,
            "again": again.output.count("already finished")}  # fmt: skip


TABLE = """rounds = 2
data = { source = "digits", limit = 300 }
partition = { kind = "iid", clients = 4 }
model = { hidden = [8] }
paper = { title = "Tiny", reference = "Nobody 2025", table = "Table 7", columns = ["digits"] }
grid = { lr = [0.1, 0.5] }
runs = { seeds = 2, validation = 0.1 }
[[rows]]
label = "Local"
method = "local"
[[rows]]
label = "FedAvg"
method = "fedavg"
[[rows]]
label = "FedAvg, far too fast"
method = "fedavg"
lr = [1e17, 1e18]
fields = { safeguard = false }
"""


def studies() -> dict[str, Any]:
    """`reproduce` with a row that diverges, and `tune`, here and on the cluster."""
    from typer.testing import CliRunner

    from fedspan.cli.app import app

    with loopback_cluster(), tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        (at / "tiny.toml").write_text(TABLE)
        (at / "exp.toml").write_text(TABLE.partition("paper =")[0])
        told: dict[str, Any] = {}
        for name, where in (("here", []), ("there", ["--cluster", ADDRESS])):
            out = at / name
            table = CliRunner().invoke(app, ["reproduce", str(at / "tiny.toml"), "--out", str(out / "table"), *where])
            what = ["tune", str(at / "exp.toml"), "method.lr=log:1e-2:1", "partition.validation=0.2", "--trials", "3"]
            tuned = CliRunner().invoke(app, [*what, "--out", str(out / "tuned"), *where])
            codes = [table.exit_code, tuned.exit_code]
            runs = sorted(out.rglob("config.toml"))
            digests = {
                str(p.parent.relative_to(out)): json.loads((p.parent / "result.json").read_text())["digest"]
                for p in runs
                if (p.parent / "result.json").is_file()
            }
            lost = sorted(str(p.parent.relative_to(out)) for p in out.rglob("diverged.json"))
            best = (out / "tuned" / "best.toml").read_text() if not tuned.exit_code else tuned.output
            told[name] = {"codes": codes, "runs": digests, "diverged": lost, "best": best}
    return told


if __name__ == "__main__":
    scenarios = {f.__name__: f for f in (methods, actor, node, nothing, joining, whole_runs, studies)}
    print("\n" + json.dumps(scenarios[sys.argv[1]]()), flush=True)
