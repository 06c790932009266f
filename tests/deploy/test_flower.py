"""A federation on Flower's messages in one process: who is refused, who is missed, and what is found again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_grid import FIRST_NODE, LocalGrid, deployed, deployed_on, experiment_of, held_by
from flwr.app import Error, Message

from conftest import assert_same, failing, make_data, make_task
from fedspan import tree, wire
from fedspan.deploy.envelope import seal, unseal
from fedspan.deploy.experiment import read_config
from fedspan.deploy.local_grid import AT_ONCE
from fedspan.deploy.node import worker
from fedspan.deploy.operations import prefork, unix_socket
from fedspan.deploy.operations.keys import make_keys
from fedspan.deploy.operations.proxy import nginx
from fedspan.deploy.policy import Policy
from fedspan.deploy.server.admission import Declared, admit, too_large
from fedspan.deploy.server.server import Server
from fedspan.errors import CheckpointError, ConfigError, Refused
from fedspan.method import Abilities
from fedspan.methods import FedAvg, FedLoRU, FedRep, make
from fedspan.simulation.defence import Defence
from fedspan.tree import Outer
from tools.fuzz_uploads import fuzz


@pytest.fixture(autouse=True)
def quick_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes for real, so nothing has to reach the disk."""
    monkeypatch.setattr("fedspan.storage.tree_file.os.fsync", lambda _: None)


def resent(reply: Message, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Message:
    """A reply with other facts or another upload."""
    facts, payload = unseal(reply.content)
    upload = wire.unpack(payload) if payload else {}
    change(facts, upload)
    reply.content = seal(facts, wire.pack(upload))
    return reply


def only(client: int, do: str, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Any:
    """Spoils what one client answers to one kind of request."""

    def spoil(i: int, reply: Message) -> Message:
        mine = i == client and not reply.has_error() and unseal(reply.content)[0]["do"] == do
        return resent(reply, change) if mine else reply

    return spoil


def first_upload(upload: dict[str, Any], value: float) -> None:
    upload["mean"]["theta"]["0.weight"] = torch.full_like(upload["mean"]["theta"]["0.weight"], value)


BAD = {
    "NaN": (lambda f, u: first_upload(u, float("nan")), "holds NaN or infinity"),
    "huge": (lambda f, u: first_upload(u, 1e6), "norm must be at most"),
    "missing": (lambda f, u: u["mean"]["theta"].pop("0.weight"), "is missing from the upload"),
    "extra": (lambda f, u: u["each"].update(x=torch.zeros(1)), "is not part of this method's upload"),
    "shape": (lambda f, u: u["mean"]["theta"].update({"0.weight": torch.zeros(2, dtype=torch.float64)}), "must be"),
    "type": (lambda f, u: u["mean"]["theta"].update({"0.bias": torch.zeros(7)}), "must be float64 of shape [7]"),
    "long": (lambda f, u: u["each"].update(x=torch.zeros(100_000)), "must have at most"),
    "weight": (lambda f, u: f.update(weight=1e9), "its number of examples"),
    "no weight": (lambda f, u: f.update(weight=None), "'weight' of its facts must be a valid number. Got None"),
    "old round": (lambda f, u: f.update(round=0), "must belong to round"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_upload_costs_its_sender_only(case: str, tmp_path: Path) -> None:
    change, reason = BAD[case]
    server, grid = deployed(FedAvg(), tmp_path / "a", rounds=1, clients=4)
    grid.spoil = only(2, "train", change)
    server.run()
    honest, other = deployed(FedAvg(), tmp_path / "b", rounds=1, clients=4)
    other.spoil = lambda i, reply: None if i == 2 and unseal(reply.content)[0]["do"] == "train" else reply
    honest.transport.policy = Policy(deadline=0.1, poll=0.01, wait=0.0)
    honest.run()
    assert_same(server.record.server, honest.record.server)
    line = server.record.lines[0]
    assert line["answered"] == 3 and list(line["refused"]) == ["n2"] and not line["skipped"]
    assert line["refused"]["n2"].startswith("client n2: ") and reason in line["refused"]["n2"]
    assert server.record.progress.deployed["nodes"]["2"]["refused"] == 1
    assert honest.record.lines[0]["missing"] == {"n2": "no answer before the deadline"}


def test_a_change_is_refused_where_the_whole_upload_would_pass(tmp_path: Path) -> None:
    server, grid = deployed(FedAvg(lr=1e-4), tmp_path, rounds=1, clients=4)
    start = tree.map(torch.clone, server.record.server["theta"])
    far = lambda f, u: u["mean"].update(theta=tree.map(lambda t: 1.5 * t, start))  # 1.5 times the usual whole
    grid.spoil = only(2, "train", far)
    server.run()
    refused = server.record.lines[0]["refused"]
    assert list(refused) == ["n2"] and "the change's norm must be at most" in refused["n2"]


def test_who_is_cut_most_is_named_in_the_log(tmp_path: Path) -> None:
    said: list[str] = []
    experiment = replace(experiment_of(FedAvg(), make_task(), 2), defence=Defence(rule="clip"))
    server, grid = deployed_on(experiment, make_data(clients=5), tmp_path, replace(AT_ONCE, norm_factor=1e9))
    server.log = server.transport.log = said.append
    grid.spoil = only(3, "train", lambda f, u: first_upload(u, 1e6))
    server.run()
    for line in server.record.lines:
        told = line["defence"]
        assert next(iter(told["most_cut"])) == "n3" and told["most_cut"]["n3"]["theta"] < 1e-4
        assert not line["refused"] and told["bounds"]["theta"] < 100
    assert any(s.startswith("Round 1: client n3 was cut; ") and s.endswith("of its theta is left.") for s in said)
    assert any("clipped" in s and s.startswith("Round 2 of 2: 5 of 5 answered, ") for s in said)


def test_an_answer_from_another_node_or_to_another_round_is_not_counted(tmp_path: Path) -> None:
    server, grid = deployed(FedAvg(), tmp_path, rounds=2)
    first: dict[int, Message] = {}

    def replay(i: int, reply: Message) -> Message:
        if unseal(reply.content)[0]["do"] != "train":
            return reply
        if i == 1 and i in first:
            return first[1]  # what it sent in round 1, once more
        first.setdefault(i, reply)
        if i == 2:
            reply.metadata.__dict__["_src_node_id"] = FIRST_NODE
        return reply

    grid.spoil = replay
    server.run()
    a, b = server.record.lines
    assert list(a["refused"]) == ["n2"] and "comes from another node" in a["refused"]["n2"]
    assert list(b["refused"]) == ["n1", "n2"] and "must belong to round 2" in b["refused"]["n1"]
    assert a["answered"] == 2 and b["answered"] == 1 and b["skipped"]


def test_too_few_answers_skip_the_round_and_leave_the_state(tmp_path: Path) -> None:
    server, grid = deployed(FedAvg(), tmp_path, rounds=1, policy=Policy(deadline=1, poll=0.01, wait=0, quorum=0.9))
    before = tree.digest(server.record.server)
    grid.spoil = lambda i, reply: reply
    server.transport.ready()
    grid.away = {0}
    grid.spoil = lambda i, reply: Message(Error(5, "Node Unavailable"), reply_to=grid.sent[-1]) if i == 1 else reply
    server.run()
    line = server.record.lines[0]
    assert line["skipped"] and line["answered"] == 1 and tree.digest(server.record.server) == before
    assert line["missing"] == {"n0": "its node is not connected", "n1": "its node reports: Node Unavailable"}


def test_over_selection_takes_the_first_answers(tmp_path: Path) -> None:
    policy = Policy(deadline=5, poll=0.01, wait=0, over_selection=0.5)
    server, grid = deployed(FedAvg(), tmp_path, rounds=1, clients=6, policy=policy, participation=0.5)
    server.run()
    asked = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert len(asked) == 5  # 3 wanted, half of that more, rounded up
    line = server.record.lines[0]
    assert line["sampled"] == 3 and line["answered"] >= 3 and not line["skipped"]


def run_in_parts(method: Any, root: Path, stop_at: int, rounds: int, forget: bool) -> tuple[Server, LocalGrid]:
    """A run whose server dies after a round; with `forget` its last checkpoint is lost with it."""
    data, experiment = make_data(clients=3), experiment_of(method, make_task(), rounds)
    server, _ = deployed_on(experiment, data, root, out=root / "run")

    def die(line: dict[str, Any]) -> None:
        if line["round"] == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.run(die)
    if forget:
        newest = max((root / "run" / "checkpoints").glob("manifest-*.json"), key=lambda p: int(p.stem.split("-")[1]))
        newest.unlink()
    again, grid = deployed_on(experiment, data, root, out=root / "run")
    again.run()
    return again, grid


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("method", [FedRep(), FedLoRU(rank=2, tau=2)], ids=["fedrep", "fedloru"])
def test_a_killed_server_goes_on_with_the_same_bits(method: Any, forget: bool, tmp_path: Path) -> None:
    whole, grid = deployed(method, tmp_path / "a", rounds=4)
    whole.run()
    again, other = run_in_parts(method, tmp_path / "b", 3, 4, forget)
    assert [line["round"] for line in again.record.lines] == [1, 2, 3, 4]
    assert_same((whole.record.server, whole.record.common), (again.record.server, again.record.common))
    for i in range(3):
        assert_same(held_by(grid, whole, i).row, held_by(other, again, i).row)


def test_a_node_that_lost_its_disk_or_missed_news_is_brought_up_to_date(tmp_path: Path) -> None:
    server, grid = deployed(FedLoRU(rank=2, tau=1), tmp_path, rounds=4)

    def trouble(line: dict[str, Any]) -> None:
        if line["round"] == 1:
            grid.away = {0}
        if line["round"] == 3:
            grid.away = set()
            shutil.rmtree(tmp_path / "node-1")

    server.run(trouble)
    assert [line["answered"] for line in server.record.lines] == [3, 2, 2, 3]
    assert not server.transport.refusals
    for i in range(3):  # all hold the same common state, whatever happened to them
        assert_same(held_by(grid, server, i).common, server.record.common)
        assert held_by(grid, server, i).heard == server.record.progress.deployed["told"] == 4


def test_personal_state_is_private_and_of_its_experiment(tmp_path: Path) -> None:
    server, grid = deployed(FedRep(), tmp_path, rounds=1)
    server.run()
    (folder,) = (tmp_path / "node-0").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert held_by(grid, server, 0).round == 1
    newest = max(folder.glob("server-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")  # damaged: the generation before is taken
    assert held_by(grid, server, 0).round == 0
    for path in folder.glob("manifest-*.json"):
        path.write_text("{}")
    with pytest.raises(CheckpointError, match="none of its"):
        held_by(grid, server, 0)


def test_norms_are_judged_by_the_median_of_many() -> None:
    assert too_large({0: 1.0, 1: 1e9}, [], 10) == {}  # of two nobody can say which one is strange
    assert too_large({0: 1.0, 1: 1.2, 2: 1e9}, [], 10) == {2: 12.0}
    assert too_large({0: 50.0}, [1.0, 1.0, 1.0], 10) == {0: 10.0}
    assert too_large({0: 0.0, 1: 0.0, 2: 0.0}, [], 10) == {}


@pytest.mark.parametrize(
    "codec", [wire.Half(), wire.Sparse(), wire.Rows(), wire.Energy(0.9)], ids=lambda c: type(c).__name__
)
def test_coded_parts_are_written_read_and_checked(codec: wire.Codec) -> None:
    torch.manual_seed(0)
    sparse = torch.randn(6, 5).where(torch.rand(6, 5) < 0.3, torch.zeros(()))
    payload = {"w": {"a": sparse, "b": torch.randn(4), "o": Outer(torch.randn(3), torch.randn(2))}, "v": torch.ones(2)}
    coded = wire.unpack(wire.pack(wire.encode(payload, {"w": codec})))
    like = tree.map(lambda t: t.to("meta"), payload)
    back = wire.decode(coded, {"w": codec}, like)
    assert_same(back["v"], payload["v"])
    expected = wire.roundtrip(payload, {"w": codec})[0]
    for path, t in tree.items(expected):
        assert torch.allclose(dict(tree.items(back))[path], t, atol=1e-6), path
    bomb = {"u": torch.zeros(10**4, 1), "s": torch.ones(1), "v": torch.zeros(1, 10**4), "values": torch.ones(99)}
    for wrong in (bomb, {"dense": torch.zeros(7, 5)}, {"half": torch.zeros(6, 5)}, {}):
        with pytest.raises(Refused, match="is not written as"):
            wire.decode({"w": coded["w"] | {"0": wrong}}, {"w": codec}, like)
    with pytest.raises(Refused, match="coded tensors"):
        wire.decode({"w": {}}, {"w": codec}, like)


def test_fuzzed_uploads_never_pass_as_something_else(tmp_path: Path) -> None:
    found = fuzz(300, seed=1)
    assert found.tried == 300 and found.refused + found.valid == 300
    assert found.refused > 200 and found.crashed == 0 and found.wrongly_admitted == 0
    assert found.same_result


def test_the_gate_reads_nothing_that_is_too_long() -> None:
    declared = Declared({"w": torch.empty(3, device="meta")}, {})
    with pytest.raises(Refused, match="at most"):
        admit(
            1.0,
            b"\0" * 10_000,
            who="client x",
            able=Abilities(FedAvg()),
            declared=declared,
            codecs={},
            examples=1,
            dtype=torch.float32,
        )


@pytest.mark.parametrize("field", ["deadline", "quorum", "over_selection", "norm_factor", "wait", "poll"])
def test_bad_terms_are_refused(field: str) -> None:
    for value in (-1.0, float("nan"), "much", True):
        with pytest.raises(ConfigError, match=f"Deploy: {field} must be a number"):
            Policy(**{field: value})


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path / "fed", ["a", "b"], ["fed.example.org", "10.0.0.1"])
    server = tmp_path / "fed" / "server"
    made = {"ca.crt", "ca.key", "server.crt", "server.key", "roster.json", "audit.jsonl", "audit.lock"}
    assert {p.name for p in server.iterdir()} == made
    assert {p.name for p in (tmp_path / "fed" / "a").iterdir()} == {"key", "ca.crt", "node.crt", "node.toml"}
    assert all(p.stat().st_mode & 0o077 == 0 for p in (tmp_path / "fed").rglob("*"))
    assert not (tmp_path / "fed" / "a" / "ca.key").exists()
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
    root = x509.load_pem_x509_certificate((server / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(root)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fed.example.org"]
    with pytest.raises(ConfigError, match="has keys already"):
        make_keys(tmp_path / "fed", ["a"])
    with pytest.raises(ConfigError, match="different names"):
        make_keys(tmp_path / "other", ["a", "a"])


def test_the_proxy_passes_the_fleet_alone(tmp_path: Path) -> None:
    make_keys(tmp_path, ["a", "b"])
    text = nginx(tmp_path / "server", "127.0.0.1", listen=18443)
    assert text.count("proxy_pass https") == 1 and "location ~ ^/v1/fleet/[a-z-]+$" in text and "return 404" in text
    with pytest.raises(ConfigError, match="--host must be"):
        nginx(tmp_path, "x; include /etc/passwd")
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        return  # the text is all that can be looked at here
    whole = f"pid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;\nevents {{}}\nhttp {{\naccess_log off;\n{text}}}\n"
    (tmp_path / "nginx.conf").write_text(whole.replace("listen 18443 ssl", "listen 127.0.0.1:18443 ssl"))
    done = subprocess.run(
        [program, "-t", "-c", tmp_path / "nginx.conf", "-p", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_worker_answers_its_owner_and_says_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Echo:
        def __init__(self, folder: Path) -> None: ...

        def handle(self, experiment: str, facts: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
            if facts.get("fail"):
                raise ConfigError("Node: it is told to fail.")
            return {"got": experiment, **facts}, payload[::-1]

    monkeypatch.setattr("fedspan.deploy.node.service.Service", Echo)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # only the main thread of a process may set it
    assert worker.call(tmp_path, {"experiment": "e", "facts": {}}, b"") is None
    threading.Thread(target=worker.serve, args=(tmp_path,), daemon=True).start()
    end = time.monotonic() + 20
    while not (tmp_path / worker.NOTE).exists() and time.monotonic() < end:
        time.sleep(0.02)
    where = Path(json.loads((tmp_path / worker.NOTE).read_text())["socket"])
    assert where.stat().st_mode & 0o777 == 0o600 and where.parent.stat().st_mode & 0o777 == 0o700
    body = os.urandom(3 << 20)
    assert worker.call(tmp_path, {"experiment": "e", "facts": {"a": 1}}, body) == ({"got": "e", "a": 1}, body[::-1])
    with pytest.raises(worker.WorkerFault, match="told to fail"):
        worker.call(tmp_path, {"experiment": "e", "facts": {"fail": True}}, b"")
    unix_socket.remove_note(tmp_path / worker.NOTE)  # the thread does not end before the process does
    assert not where.parent.exists()


def test_the_starter_forks_flowers_program_and_without_it_the_program_runs_itself(tmp_path: Path) -> None:
    program = prefork.install(tmp_path) / prefork.PROGRAM

    def asked() -> str:
        return subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout

    assert "--runtime-api-address" in asked()
    env = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
    command = [sys.executable, "-u", "-m", "fedspan.deploy.operations.prefork", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "Ready.\n"
            assert asked() == ""  # it is the fork that speaks, where the starter does
            assert process.stdout.readline().startswith("usage: flwr-clientapp")
        finally:
            process.terminate()
    assert not (tmp_path / prefork.NOTE).exists()
    assert "--runtime-api-address" in asked()


def test_what_flower_starts_for_every_message_imports_no_torch() -> None:
    code = "import sys, fedspan.deploy.node.client_app; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}).returncode == 0
    )


def test_deploy_refuses_in_one_sentence(tmp_path: Path) -> None:
    assert "server's folder" in failing("deploy", "status", str(tmp_path))
    assert "exactly one of" in failing("deploy", "node", str(tmp_path), "--server", "localhost:1")
    assert "no personal model" in failing("deploy", "export", str(tmp_path), str(tmp_path / "x.safetensors"))
    assert "unknown key" in failing("deploy", "local", "train.epoch=1")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("[train]\ndrop_rate = 0.5", "train.drop_rate is for simulations. Got 0.5; leave it out"),
        ('[train]\non_divergence = "halve"', "train.on_divergence is for simulations"),
        ("[devices]\nmemory_mb = [10.0]", "devices with limits are for simulations"),
        ('[data]\nsource = "a.json"\n[model]\nkind = "causal-lm"', "language models can be simulated only"),
    ],
)
def test_what_only_a_simulation_has_is_refused(section: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"Deploy: {message}"):
        read_config(section)


@pytest.mark.parametrize(
    ("client", "sections"),
    [
        (0, '[model]\nkind = "mlp"\nhidden = [8]\n[method]\nname = "fedrep"\n'),
        (1, '[model]\nkinds = ["cnn", "mlp"]\npadding = 2\nhidden = [512]\n[method]\nname = "local"\n'),
    ],
    ids=["one kind of model", "a kind of its own"],
)
def test_a_node_predicts_and_exports_with_its_own_model(tmp_path: Path, client: int, sections: str) -> None:
    import numpy as np
    from safetensors import safe_open

    from conftest import call
    from fedspan.deploy.node.service import Service

    node = tmp_path / "clinic"
    node.mkdir()
    rng = np.random.default_rng(0)
    x = rng.random((60, 1, 8, 8), np.float32)
    y = (x[:, 0, 0, 0] > 0.5).astype(np.int64)
    np.savez(tmp_path / "own.npz", x=x, y=y)
    (node / "node.json").write_text(json.dumps({"data": str(tmp_path / "own.npz")}))
    text = f'name = "t"\nrounds = 1\n[partition]\nclients = 2\n{sections}'
    service = Service(node)
    made = service.node(text)
    method, task = made.experiment.method, made.experiment.task
    capacity = made.experiment.capacity(client)
    task = Abilities(method).model(task, capacity)
    server = method.init_server(task, made.experiment.federation(2))
    down = wire.pack({"down": dict(method.download(server, torch.tensor([client]), capacity, 1).shared), "news": {}})
    asked = {"do": "hello", "round": 1, "client": client, "clients": 2, "lineage": "ab12", "coded": {}, "told": 0}
    asked["base"] = 0
    assert service.handle(text, asked, b"")[0]["examples"] == 45
    # FedRep weighs all alike, and an average of nothing has no weights.
    assert service.handle(text, asked | {"do": "train"}, down)[0]["weight"] in (1.0, 45.0)
    sums = service.handle(text, asked | {"do": "evaluate"}, down)[0]["sums"]
    assert sums["n"] == 15
    right = call("deploy", "predict", str(node), "--data", str(tmp_path / "own.npz")).stderr
    assert "right of 60" in right
    predictions_without_labels(tmp_path, node, x)
    call("deploy", "export", str(node), str(tmp_path / "m.safetensors"))
    with safe_open(tmp_path / "m.safetensors", "pt") as f:
        assert f.metadata()["client_name"] == "clinic" and f.metadata()["plain"] == "true"
        assert set(f.keys()) == set(task.init())


def predictions_without_labels(folder: Path, node: Path, x: Any) -> None:
    """Labels and probabilities in each format, and what is refused."""
    import csv

    import numpy as np

    from conftest import call

    def predict(out: str, **arrays: Any) -> Path:
        np.savez(folder / "new.npz", **arrays)
        call("deploy", "predict", str(node), "--data", str(folder / "new.npz"), "--out", str(folder / out))
        return folder / out

    with np.load(predict("p.npz", x=x)) as found:
        labels, chances = found["labels"], found["probabilities"]
    assert labels.shape == (60,) and chances.shape == (60, 10) and np.allclose(chances.sum(1), 1)
    assert (chances.argmax(1) == labels).all() and (np.load(predict("p.npy", x=x)) == labels).all()
    with predict("p.csv", x=x).open(newline="") as stream:
        head, *rows = csv.reader(stream)
    assert head == ["example", "label", *(f"p_{k}" for k in range(10))]
    assert [int(r[1]) for r in rows] == labels.tolist()
    assert np.allclose([[float(p) for p in r[2:]] for r in rows], chances, rtol=1e-5)
    for arrays, message in (
        ({"y": labels}, "an npz needs the array x"),
        ({"x": x[:, :, :4]}, "x must have shape (1, 8, 8)"),
        ({"x": x[:0]}, "at least one example"),
        ({"x": x, "y": labels[:3]}, "y must hold one label per example"),
        ({"x": np.float32(3)}, "at least one feature"),
    ):
        np.savez(folder / "bad.npz", **arrays)
        assert message in failing("deploy", "predict", str(node), "--data", str(folder / "bad.npz"))
    (folder / "bad.csv").write_text("1,2\n")
    assert "so its data must be .npz. Got 'bad.csv'." in failing(
        "deploy", "predict", str(node), "--data", str(folder / "bad.csv")
    )
    new = str(folder / "new.npz")
    assert "--out must end in" in failing("deploy", "predict", str(node), "--data", new, "--out", str(folder / "a.b"))


def test_an_experiment_that_is_another_one_is_refused(tmp_path: Path) -> None:
    server, grid = deployed(make("fedavg"), tmp_path, rounds=1)
    grid.handle.nodes[1].experiment = experiment_of(make("fedavg", lr=0.3), make_task(), 1, batch_size=4)
    server.run()
    assert "its experiment is another one" in server.transport.refusals[0]["why"]
    assert server.record.lines[0]["answered"] == 2
