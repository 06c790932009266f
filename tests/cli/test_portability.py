"""Commands without a federation, in processes from which is taken what Windows and macOS do not have.

A `sitecustomize` takes it from every Python that starts, so spawned workers have none of it either. Texts that are read
or written without an encoding are errors there, and what is printed goes through a code page of Windows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="takes away from Linux what the others do not have")

LESS = """
import builtins, os, select, signal, socket, sys, warnings
import psutil, selectors, subprocess  # their ways for Linux ask for names that are taken away below

MISSING = {"fcntl", "resource", "pwd", "grp", "termios"}
real = builtins.__import__

def less(name, globals=None, locals=None, fromlist=(), level=0):
    # Only for fedspan: what it stands on has ways of its own on every system.
    if name in MISSING and str((globals or {}).get("__name__")).startswith("fedspan"):
        raise ModuleNotFoundError(f"No module named {name!r}")
    return real(name, globals, locals, fromlist, level)

builtins.__import__ = less
for module, names in {
    os: (
        "fork", "forkpty", "sched_getaffinity", "getuid", "geteuid", "getpgid", "killpg", "pread",
        "preadv", "pwrite", "pwritev", "O_CLOEXEC",
    ),
    select: ("epoll", "poll"),
    signal: ("SIGKILL", "SIGHUP", "SIGALRM", "pthread_sigmask"),
    socket: ("AF_UNIX", "SO_PEERCRED"),
}.items():
    for name in names:
        delattr(module, name)
selectors.DefaultSelector = selectors.SelectSelector
subprocess.Popen.kill = lambda process: process.send_signal(9)  # which on Windows needs no SIGKILL
warnings.filterwarnings("error", category=EncodingWarning, module="fedspan")
with open(os.environ["STARTED"], "a", encoding="utf-8") as started:
    print(os.getpid(), file=started)
"""
EXPERIMENT = """
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
name = "pfl-mf"
rank = 2
[train]
evaluate_every = 2
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a Python that has less."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "less").mkdir()
    (tmp_path / "less" / "sitecustomize.py").write_text(LESS)
    (tmp_path / "exp.toml").write_text(EXPERIMENT)
    path = os.pathsep.join(filter(None, [str(tmp_path / "less"), os.environ.get("PYTHONPATH", "")]))
    told = {
        "USERNAME": "somebody",  # as Windows has it; torch asks for it, or for getuid
        "STARTED": str(tmp_path / "started"),
        "PYTHONPATH": path,
        "PYTHONWARNDEFAULTENCODING": "1",
        "PYTHONIOENCODING": "cp1252",
    }
    return {**os.environ, **told}


def processes() -> int:
    """How many interpreters have started since this was last asked."""
    text = Path("started").read_text(encoding="utf-8")
    Path("started").unlink()
    return len(text.splitlines())


def fedspan(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedspan.cli.app", *words],
        env=env,
        capture_output=True,
        encoding="cp1252" if env else None,
        timeout=150,
    )


def test_the_names_are_really_gone(elsewhere: dict[str, str]) -> None:
    asked = "hasattr(os, 'fork'), hasattr(signal, 'SIGKILL'), hasattr(socket, 'AF_UNIX')"
    code = f"import os, signal, socket; print([{asked}])"
    done = subprocess.run([sys.executable, "-c", code], env=elsewhere, capture_output=True, text=True)
    assert done.stdout == "[False, False, False]\n", done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_elsewhere_has_the_same_bits(elsewhere: dict[str, str], workers: int) -> None:
    here = fedspan("run", "exp.toml", "-q", "train.workers=1", "--out", "here")
    assert here.returncode == 0, here.stderr
    chosen = [f"train.workers={workers}"] if workers else []
    first = fedspan("run", "exp.toml", "-q", "rounds=2", *chosen, "--out", "there", env=elsewhere)
    assert first.returncode == 0, first.stderr
    there = fedspan("run", "exp.toml", "-q", *chosen, "--out", "there", env=elsewhere)  # resumed from a checkpoint
    assert there.returncode == 0 and "after round 2" in there.stderr, there.stderr
    assert processes() == 2 * (1 + workers)  # without a number, none is worth its start in so short a run
    a, b = (json.loads((Path(d) / "result.json").read_text(encoding="utf-8")) for d in ("here", "there"))
    assert a["digest"] == b["digest"] and a["accuracy"] == b["accuracy"]
    if workers:
        done = fedspan("report", "there", env=elsewhere)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [
        ("doctor",),
        ("data",),
        pytest.param(("bytes", "exp.toml"), marks=pytest.mark.long),
        pytest.param(("capacity", "exp.toml"), marks=pytest.mark.long),
        ("methods", "pfl-mf"),
        pytest.param(("partition", "exp.toml"), marks=pytest.mark.long),
        ("diagnose", "exp.toml", "train.workers=2"),
        pytest.param(("demo", "--rounds", "2", "-q", "--out", "demo"), marks=pytest.mark.long),
        pytest.param(
            ("compare", "exp.toml", "--methods", "local,fedavg", "-q", "rounds=1", "train.workers=2"),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda words: words[0],
)
def test_commands_run_elsewhere(elsewhere: dict[str, str], words: tuple[str, ...]) -> None:
    done = fedspan(*words, env=elsewhere)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [("local",), ("keys", "k"), ("server", "k"), ("status", "k"), ("stop", "k")])
def test_deploy_says_in_one_sentence_where_it_runs(elsewhere: dict[str, str], words: tuple[str, ...]) -> None:
    done = fedspan("deploy", *words, env=elsewhere)
    assert done.returncode == 2, done.stderr
    text = " ".join(done.stderr.split())
    assert "a federation runs on Linux and macOS only" in text and "Traceback" not in text
