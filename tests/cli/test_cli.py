"""The commands, each really run on small digits in a temporary directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import fedspan
from conftest import call, failing
from fedspan.cli import running
from fedspan.cli.probe import facts
from fedspan.config import assemble, load_config
from fedspan.methods import METHODS

TINY = """
name = "tiny"
rounds = 3
[data]
source = "digits"
limit = 300
[partition]
kind = "permuted-groups"
clients = 6
groups = 2
[model]
hidden = [8]
[method]
name = "fedper"
[methods.pfl-mf]
rank = 2
[train]
participation = 0.5
evaluate_every = 2
workers = 1
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSPAN_DEBUG", raising=False)
    monkeypatch.delenv("FEDSPAN_DATA", raising=False)
    (tmp_path / "exp.toml").write_text(TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def shell(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedspan.cli.app", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


# ------------------------------------------------------------------------------------------------ run


def test_run_writes_everything_and_is_not_repeated(here: Path) -> None:
    said = call("run", "exp.toml")
    assert "round 3 of 3" in said.stdout and "accuracy" in said.stdout and "runs/tiny-0" in said.stdout
    where = here / "runs" / "tiny-0"
    assert {"config.toml", "metrics.jsonl", "result.json", "checkpoints"} <= {p.name for p in where.iterdir()}
    assert len((where / "metrics.jsonl").read_text().splitlines()) == 3
    assert load_config(where / "config.toml").method["name"] == "fedper"
    first = (where / "result.json").read_text()
    again = call("run", "exp.toml")
    assert "finished already" in again.stderr
    assert (where / "result.json").read_text() == first
    fresh = call("run", "exp.toml", "--fresh", "--quiet")
    assert "round" not in fresh.stdout.split("fedper")[0]
    assert json.loads((where / "result.json").read_text())["digest"] == json.loads(first)["digest"]


def test_resume_says_so_and_gives_the_same(here: Path) -> None:
    call("run", "exp.toml", "rounds=2", "-q", "--out", "a")
    said = call("run", "exp.toml", "rounds=4", "-q", "--out", "a")
    assert "Resuming" in said.stderr and "after round 2" in said.stderr
    call("run", "exp.toml", "rounds=4", "-q", "--out", "b")
    a, b = (json.loads((here / d / "result.json").read_text()) for d in "ab")
    assert a["digest"] == b["digest"] and a["accuracy"] == b["accuracy"] and a["rounds"] == 4


def test_another_configuration_is_refused_and_nothing_changes(here: Path) -> None:
    call("run", "exp.toml", "-q", "--out", "a")
    before = {p.name: p.read_bytes() for p in (here / "a").iterdir() if p.is_file()}
    said = failing("run", "exp.toml", "method.lr=0.05", "--out", "a")
    assert "lr" in said and "--fresh" in said
    assert {p.name: p.read_bytes() for p in (here / "a").iterdir() if p.is_file()} == before


def test_moved_data_and_other_ways_to_save_continue_a_run(here: Path) -> None:
    call("run", "exp.toml", "rounds=1", "-q", "--out", "a")
    said = call("run", "exp.toml", "train.checkpoint_every=2", "data.root=elsewhere", "-q", "--out", "a")
    assert "Resuming" in said.stderr


@pytest.mark.timeout(60)
def test_interrupt(here: Path) -> None:
    more = ["train.checkpoint_seconds=1000.0", "rounds=100000", "--out", "a"]
    process = shell("run", "exp.toml", *more, cwd=here, start_new_session=True)
    try:
        metrics = here / "a" / "metrics.jsonl"
        end = time.monotonic() + 45
        while time.monotonic() < end and not (metrics.exists() and metrics.stat().st_size > 500):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Stopped after round" in err and "run the same command to go on" in err and "Traceback" not in err
    done = int(err.split("Stopped after round ")[1].split(";")[0])
    said = call("run", "exp.toml", f"rounds={done + 1}", "train.checkpoint_seconds=1000.0", "--out", "a", "-q")
    assert f"after round {done}" in said.stderr


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("gap", [0.05, pytest.param(0.002, marks=pytest.mark.long)])
def test_a_storm_of_interrupts_ends_in_one_line_and_a_state_to_go_on_from(here: Path, gap: float) -> None:
    more = ["train.checkpoint_seconds=1000.0", "rounds=100000", "train.workers=2", "--out", "a"]
    process = shell("run", "exp.toml", *more, cwd=here, start_new_session=True)
    try:
        metrics = here / "a" / "metrics.jsonl"
        end = time.monotonic() + 45
        while time.monotonic() < end and not (metrics.exists() and metrics.stat().st_size > 500):
            time.sleep(0.05)
        for _ in range(20):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: workers are hit too
            time.sleep(gap)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130, err
    *before, last = err.splitlines()
    assert last.startswith("Stopped after round ") and last.endswith("; run the same command to go on."), err
    assert before in ([], ["Stopping after this round; press Ctrl-C again to stop at once."]), err
    done = int(last.removeprefix("Stopped after round ").split(";")[0])
    call("run", "exp.toml", f"rounds={done + 2}", "train.workers=2", "--out", "a", "-q")
    call("run", "exp.toml", f"rounds={done + 2}", "--out", "b", "-q")
    a, b = (json.loads((here / d / "result.json").read_text()) for d in "ab")
    assert a["digest"] == b["digest"] and a["accuracy"] == b["accuracy"]


# ----------------------------------------------------------------------------------------------- compare, sweep, report


def test_compare_then_report(here: Path) -> None:
    said = call("compare", "exp.toml", "--methods", "local,pfl-mf", "--seeds", "2", "-q", "method.momentum=0.0")
    for name in ("local-0", "local-1", "pfl-mf-0", "pfl-mf-1"):
        assert (here / "runs" / "tiny" / name / "result.json").is_file()
    assert "pfl-mf" in said.stdout and "local" in said.stdout
    assert (here / "runs" / "tiny" / "report.html").stat().st_size > 1000
    a, b = (json.loads((here / "runs" / "tiny" / f"{m}-0" / "result.json").read_text()) for m in ("local", "pfl-mf"))
    assert a["per_client"]["n"] == b["per_client"]["n"]
    again = call("compare", "exp.toml", "--methods", "local,pfl-mf", "--seeds", "2", "-q", "method.momentum=0.0")
    assert again.stderr.count("already finished") == 4
    call("report", "runs/tiny", "--out", "page.html")
    assert (here / "page.html").read_text().lstrip().lower().startswith("<!doctype html")
    table = call("report", "runs/tiny/local-0", "runs/tiny/pfl-mf-0", "--format", "csv").stdout
    assert table.count("\n") == 3 and "pfl-mf" in table
    call("report", "runs/tiny", "--format", "markdown", "--out", "t.md")
    assert "| method" in (here / "t.md").read_text()
    assert "tabular" in call("report", "runs/tiny", "--format", "latex").stdout


def test_compare_says_what_it_drops(here: Path) -> None:
    (here / "exp.toml").write_text(TINY.replace('name = "fedper"', 'name = "pfl-mf"\nrank = 2'))
    said = call("compare", "exp.toml", "--methods", "fedavg,pfl-mf", "-q", "rounds=1")
    assert "fedavg: has no rank" in said.stderr and "pfl-mf: has no" not in said.stderr
    assert "rank" in failing("compare", "exp.toml", "--methods", "fedavg", "method.rnk=2")


def test_a_diverging_run_does_not_end_a_comparison(here: Path) -> None:
    plain = ["methods.fedavg.lr=1e12", "methods.fedavg.safeguard=false"]
    said = call("compare", "exp.toml", "-m", "fedavg,local", *plain, "-q", "rounds=2", code=2)
    assert "fedavg-0" in said.stderr.splitlines()[-1] and "local" in said.stdout
    assert not (here / "runs" / "tiny" / "fedavg-0" / "result.json").exists()


def test_sweep(here: Path) -> None:
    said = call("sweep", "exp.toml", "method.name=pfl-mf", "method.rank=1,2", "seed=0,1", "-q", "rounds=1")
    made = {p.name for p in (here / "runs" / "tiny-sweep").iterdir()}
    assert made == {f"method.rank={r},seed={s}" for r in (1, 2) for s in (0, 1)} | {"report.html"}
    assert "rank" in said.stdout
    failing("sweep", "exp.toml", "method.rank=0,1")
    failing("sweep", "exp.toml", "seed=" + ",".join(map(str, range(1001))))


def test_demo(here: Path) -> None:
    said = call("demo", "--rounds", "1", "-q")
    for name in ("local", "fedavg", "fedper", "fedrep", "ditto", "oracle", "pfl-mf"):
        assert name in said.stdout
    assert "What to see" in said.stdout and (here / "runs" / "demo" / "report.html").is_file()


# ------------------------------------------------------------------------------------------------ looking


def test_methods_json() -> None:
    found = json.loads(call("methods", "--json").stdout)
    assert [f["name"] for f in found] == list(METHODS)
    kinds = {
        "name": str, "family": str, "paper": str, "equations": list, "shared": list, "private": list, "sent_mean": list,
        "sent_each": list, "weight": str, "secure_aggregation": str, "heterogeneous": str, "file": str, "fields": dict,
        "received": dict, "discloses": dict,
    }  # fmt: skip
    for f in found:
        assert {k: type(v) for k, v in f.items()} == kinds
        assert f["secure_aggregation"] in ("yes", "no") or f["secure_aggregation"].startswith("with ")
        assert f["heterogeneous"] in ("yes", "no")
        assert (Path(fedspan.__file__).parent.parent / f["file"]).is_file()
    by = {f["name"]: f for f in found}
    assert by["pfl-mf"]["equations"] == ["eq. (7)", "eq. (8)", "eq. (9)"]
    assert by["pfl-mf"]["sent_mean"] == ["theta", "delta", "v"] and by["pfl-mf"]["private"] == ["v"]
    assert by["pfl-mf"]["secure_aggregation"] == "with wire = 'full'" and by["oracle"]["secure_aggregation"] == "no"
    assert by["oracle"]["sent_each"] == ["theta"] and by["oracle"]["secure_aggregation"] == "no"
    assert by["local"]["sent_mean"] == by["local"]["shared"] == [] and by["fedavg"]["private"] == []
    assert facts("pfl-mf")["fields"]["rank"] == 10
    assert by["pfl-mf"]["received"]["v"] == [10] and by["pfl-mf"]["discloses"]["private"] == ["v"]
    assert by["local"]["received"] == {} and by["fedavg"]["received"]["theta/body.0.weight"] == [8, 4]


def test_methods_table() -> None:
    said = call("methods").stdout
    assert all(name in said for name in METHODS)
    assert "disclosed" in said
    one = " ".join(call("methods", "pfl-mf").stdout.split())
    assert "rank" in one and "of what it keeps: v" in one and "which classes it holds" in one
    assert "can compute from that, with default fields: how many examples it trained on." in " ".join(
        call("methods", "local").stdout.split()
    )
    assert "fedavg" in failing("methods", "fedavgg")


def test_data_and_partition(here: Path) -> None:
    said = call("data", "--root", str(here)).stdout
    assert "digits" in said and "bundled" in said and "dirichlet" in said
    said = call("partition", "exp.toml", "--png", "p.png").stdout
    assert "6 client(s)" in said and "2 true groups" in said and "entropy" in said
    assert (here / "p.png").stat().st_size > 1000
    said = call(
        "partition", "--source", "digits", "--kind", "dirichlet", "--clients", "5", "partition.alpha=0.1"
    ).stdout
    assert "5 client(s)" in said
    failing("partition")
    failing("partition", "--kind", "iid", "--clients", "3", "--png", "../..")


def test_doctor() -> None:
    said = call("doctor").stdout
    assert "torch" in said and "agree to" in said and "train.mapping" in said and "train.precision='bf16'" in said


@pytest.mark.parametrize("method", ["fedper", "pfl-mf", "oracle", "local"])
def test_bytes_are_those_of_the_run(here: Path, method: str) -> None:
    from fedspan.cli.bytes import count

    config = load_config("exp.toml", [f"method.name={method}"]).resolve()
    _, found = count(config)
    running.execute(config, here / "r", quiet=True)
    result = json.loads((here / "r" / "result.json").read_text())
    assert found.run == {"up": result["bytes"]["up"], "down": result["bytes"]["down"]}
    names = {d: set(v) for d, v in found.per_capacity[None].items()}
    assert names == {d: set(result["bytes"]["names"][d]) for d in ("up", "down")}
    assert method in call("bytes", "exp.toml", f"method.name={method}").stdout


def _nonzero_shares(total: Callable[..., int], where: tuple[str, ...]) -> None:
    """What is sent sparse is counted at a share of non-zeros: by a published rule without where they are."""
    beta = "factorized-fl-beta"
    rest, mu = 88 + 2_944 + 270_528, 2_565_824  # u, affine and v below the head; all entries of μ there
    assert total(beta, "published", {"up": 1, "down": 1}) == 80 * 99 * (rest + mu + 2_952)
    assert total(beta, "published", {"up": 0, "down": 1}) == 80 * (99 * (rest + 2_952) + 49 * mu)
    assert total(beta, "own", {"up": 0, "down": 0}) == 80 * 100 * rest
    assert total(beta, "own", {"up": 1, "down": 1}) == 20 * 50 * 2 * (4 * (rest + mu) + mu // 8)  # beside a bitmap
    said = call("bytes", *where, f"method.name={beta}", "--rule", "published", "--nonzero", "0.25")
    assert "25 % up, 25 % down" in said.stderr and "depends on the data" not in said.stdout
    few = total(beta, "published", {"up": 0.25, "down": 0.25})
    assert f"{few:,}" in said.stdout and few == pytest.approx(80 * 99 * (rest + mu / 4 + 2_952), rel=1e-6)
    for wrong in ("1.5", "a", "0.1,0.2,0.3", "nan"):
        assert "--nonzero takes a share from 0 to 1" in failing("bytes", *where, "--nonzero", wrong)


def test_bytes_of_factorized_fl_as_published_and_as_they_travel(here: Path) -> None:
    from fedspan.cli.bytes import count, find_rule

    exp = Path(__file__).parents[2] / "experiments" / "factorized-fl-bytes.toml"

    def total(method: str, rule: str, nonzero: dict[str, float] | None = None) -> int:
        config = load_config(exp, [f"method.name={method}", f"data.root={here}"]).resolve()  # where no data are
        found = count(config, find_rule(rule, method), nonzero)[1]
        assert found.made_up
        return sum(v for v in found.run.values() if v is not None)

    # ResNet-9: 2,574,290 scalars with 2,952 buffers of batch normalisation; u 88, affine 2,944, z 65,536.
    assert total("fedavg", "published") == 20 * (50 + 49) * 4 * 2_574_290  # 20.39 GB
    assert total("fedavg", "own") == 20 * 100 * 4 * (2_574_290 - 8)  # counters are not sent
    up, down = 88 + 2_944 + 65_536, 88 + 2_944
    assert total("factorized-fl-alpha", "published") == 80 * (50 * (up + 2_952) + 49 * (down + 2_952))  # 0.31 GB
    assert total("factorized-fl-alpha", "own") == 80 * 50 * (up + down)  # 0.29 GB
    where = (str(exp), f"data.root={here}")
    # M = 5 others' models and the client's own, charged both ways, are what the table prints; no other numbers are.
    assert total("fedfomo", "published") == 6 * total("fedavg", "published")
    assert total("fedfomo", "own") == 20 * 50 * (6 * 4 * (2_574_290 - 2_952) + 4 * 5)  # one up, five down
    model = 20 * 4 * 2_574_290
    fitting = [(a, b) for a in range(30) for b in range(30) if abs((50 * a + 49 * b) * model / 1e9 - 122.33) < 0.005]
    assert fitting == [(6, 6)]
    assert "both ways are charged" in call("bytes", *where, "--rule", "published", "method.name=fedfomo").stderr
    assert "20.39 GB" in call("bytes", *where, "--rule", "published", "method.name=fedavg").stdout
    assert "depends on the data" in call("bytes", *where, "model.width=4", "method.name=factorized-fl-beta").stdout
    _nonzero_shares(total, where)
    said = failing("bytes", *where, "--rule", "published", "method.name=fedrep")
    assert "no paper's rule speaks of method 'fedrep'" in said
    assert "--rule must be own" in failing("bytes", *where, "--rule", "mine")
    # Without the data nobody can say who the natural clients are, or what unknown examples look like.
    assert "'cifar10' was not found" in failing("bytes", *where, "partition.kind=natural")
    assert "none.npz" in failing("bytes", *where, "data.source=none.npz")


@pytest.mark.parametrize("method", ["fedper", "factorized-fl-alpha", "pfedpara", "pfedloru"])
def test_export(here: Path, method: str) -> None:
    call("run", "exp.toml", "-q", "--out", "r", f"method.name={method}")
    before = {p: p.read_bytes() for p in (here / "r").rglob("*") if p.is_file()}
    call("export", "r", "--client", "3", "m.safetensors")
    assert {p: p.read_bytes() for p in (here / "r").rglob("*") if p.is_file()} == before
    weights = load_file(here / "m.safetensors")
    with safe_open(here / "m.safetensors", "pt") as f:
        about = f.metadata()
    assert (
        about["method"] == method and about["client"] == "3" and sorted(json.loads(about["names"])) == sorted(weights)
    )
    assert about["plain"] == "true"  # factorised layers are written as the plain ones they stand for
    config = load_config(here / "r" / "config.toml")
    _, task, data = assemble(config)
    module = task.module_with(weights)
    rows = torch.from_numpy(data.test[3])
    with torch.no_grad():
        correct = float((module(data.x[rows]).argmax(1) == data.labels(3, "test")).double().mean())
    result = json.loads((here / "r" / "result.json").read_text())
    assert correct == pytest.approx(result["per_client"]["accuracy"][3], abs=1e-6)
    for bad in (["99", "m.safetensors"], ["x", "m.safetensors"], ["1", "m.bin"], ["1", "no/m.safetensors"]):
        failing("export", "r", "--client", *bad)
    failing("export", "nowhere", "--client", "1", "m.safetensors")


# ------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "missing.toml"],
        ["run", "exp.toml", "method.rnk=3"],
        ["run", "exp.toml", "name=../x"],
        ["run", "exp.toml", "train.participation=0"],
        ["run", "exp.toml", "data.source=/nowhere.npz"],
        ["run", "exp.toml", "--out", "exp.toml"],
        ["run", "exp.toml", "--out", "con"],
        ["run", "exp.toml", "partition.clients=1"],
        ["run", "exp.toml", "partition.clients=301"],
        ["compare", "exp.toml", "--methods", "fedavg,nonsense"],
        ["compare", "exp.toml", "--methods", "../x"],
        ["report", "nowhere"],
        ["report", "."],
        ["bytes", "missing.toml"],
    ],
    ids=" ".join,
)
def test_faults_are_one_line(here: Path, arguments: list[str]) -> None:
    failing(*arguments)
    assert {p.name for p in here.iterdir()} <= {"exp.toml", "runs"}
    assert not (here.parent / "x").exists()


def test_compare_without_methods(here: Path) -> None:
    (here / "exp.toml").write_text(TINY.replace("[methods.pfl-mf]\nrank = 2\n", ""))
    assert "--methods" in failing("compare", "exp.toml")


def test_usage_and_version() -> None:
    assert call("--version").stdout == f"fedspan {fedspan.__version__}\n"
    assert "demo" in call("--help").stdout
    assert call("run", code=2).exit_code == 2
    assert call("nonsense", code=2).exit_code == 2


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSPAN_DEBUG", "1")
    with pytest.raises(fedspan.errors.ConfigError):
        call("run", "missing.toml")


def test_help_does_not_import_torch() -> None:
    code = "import sys, fedspan.cli.app; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})


def test_package_surface() -> None:
    assert callable(fedspan.simulate) and fedspan.simulate.__name__ == "simulate"
    assert set(fedspan.__all__) <= set(dir(fedspan))
    assert all(getattr(fedspan, name) is not None for name in fedspan.__all__)
    assert fedspan.make("fedavg", lr=0.2).lr == 0.2
    with pytest.raises(AttributeError, match="nonsense"):
        fedspan.nonsense  # noqa: B018
