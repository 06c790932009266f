"""`os:system` in the place of a model or a method executes nothing, by no command, and one sentence says why.

Ten ways in, each for both keys; the tenth, a node, is in `tests/deploy/test_owner_policy.py`.
"""

from __future__ import annotations

import html
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import call, failing
from fedspan.cli.user_settings import read_user_settings, settings_path

EXPERIMENT = """
rounds = 1
[data]
source = "digits"
limit = 200
[partition]
clients = 4
[model]
kind = "logistic"
[method]
name = "pfl-mf"
rank = 2
"""
ON_A_FILE = {name: [name] for name in ("run", "bytes", "capacity", "partition", "diagnose")}
ON_A_RUN = {
    "export": ["export", "RUN", "OUT.safetensors", "--client", "0"],
    "onboard": ["onboard", "RUN", "--data", "NPZ"],
    "analyse": ["analyse", "subspace", "RUN", "--refresh"],
    "report": ["report", "RUN", "--out", "OUT.html"],
}
SAID = "code of package 'os' must be allowed before it runs. Got 'os:system'; allow it with --allow-code os"
KEYS = [("model", "kind"), ("method", "name")]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `os.system` was called with."""
    calls: list[Any] = []
    monkeypatch.setattr(os, "system", lambda *a, **k: calls.append((a, k)))
    return calls


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run and examples of a new client, as somebody could send them."""
    folder = tmp_path_factory.mktemp("sent")
    (folder / "exp.toml").write_text(EXPERIMENT)
    call("run", str(folder / "exp.toml"), "--quiet", "--out", str(folder / "run"))
    np.savez(folder / "new.npz", x=np.zeros((8, 1, 8, 8), np.float32), y=np.arange(8))
    return folder


def hostile(text: str, section: str, key: str) -> str:
    """An experiment's text with `os:system` at a key, and a command for it."""
    head, found, tail = text.partition(f"[{section}]\n")
    lines = [line for line in tail.splitlines() if not line.startswith(f"{key} =")]
    assert found and len(lines) < len(tail.splitlines())
    return "\n".join([head + f"[{section}]", f'{key} = "os:system"', 'command = "true"', *lines, ""])


@pytest.mark.parametrize(("section", "key"), KEYS)
@pytest.mark.parametrize("command", ON_A_FILE)
def test_an_experiment_file_executes_nothing(
    command: str, section: str, key: str, tmp_path: Path, executed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exp = tmp_path / "exp.toml"
    exp.write_text(hostile(EXPERIMENT, section, key))
    said = failing(*ON_A_FILE[command], str(exp))
    assert SAID in said
    assert "must be a subclass of" in failing(*ON_A_FILE[command], str(exp), "--allow-code", "os")
    assert executed == [] and [p.name for p in tmp_path.iterdir()] == ["exp.toml"]


@pytest.mark.parametrize(("section", "key"), KEYS)
@pytest.mark.parametrize("command", ON_A_RUN)
def test_a_received_run_directory_executes_nothing(
    command: str, section: str, key: str, finished: Path, tmp_path: Path, executed: list[Any]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    config = run / "config.toml"
    config.write_text(hostile(config.read_text(), section, key))
    result = json.loads((run / "result.json").read_text())
    result["config"][section] |= {key: "os:system", "command": "true"}
    (run / "result.json").write_text(json.dumps(result))
    places = {"RUN": str(run), "NPZ": str(finished / "new.npz")}
    places |= {f"OUT.{end}": str(tmp_path / f"out.{end}") for end in ("safetensors", "html")}
    arguments = [places.get(a, a) for a in ON_A_RUN[command]]
    if command == "report":  # the page shows the run, and says of its method why it is not asked for more
        call(*arguments)
        page = html.unescape((tmp_path / "out.html").read_text())
        assert (SAID in page) == (section == "method")
    else:
        assert SAID in failing(*arguments)
    assert executed == []


def test_a_report_can_be_told_whose_code_to_use(finished: Path, tmp_path: Path) -> None:
    call("report", str(finished / "run"), "--out", str(tmp_path / "page.html"), "--allow-code", "own_method")
    assert (tmp_path / "page.html").is_file()


# ------------------------------------------------------------------------------------------------ settings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's settings file, where `FEDSPAN_SETTINGS` says."""
    monkeypatch.setenv("FEDSPAN_SETTINGS", str(tmp_path / "mine.toml"))
    return tmp_path / "mine.toml"


def own(folder: Path) -> str:
    """An experiment file that names a method of one's own."""
    (folder / "own.toml").write_text(EXPERIMENT.replace('"pfl-mf"\nrank = 2', '"own_method:FedDyn"'))
    return str(folder / "own.toml")


def test_packages_of_the_settings_file_are_allowed(settings: Path, tmp_path: Path) -> None:
    exp = own(tmp_path)
    settings.write_text("# nothing\n")
    assert "code of package 'own_method' must be allowed" in failing("bytes", exp)
    settings.write_text('allow_code = ["own_method"]\n')
    call("bytes", exp)
    assert "code of package 'os' must be allowed" in failing("bytes", exp, "method.name=os:system")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('allow_code = "own_method"', "allow_code must be a list of strings. Got 'own_method'"),
        ('allow_code = ["own_method:FedDyn"]', "a package must be given by its top-level name"),
        ("allowcode = []", "unknown key 'allowcode'. Did you mean 'allow_code'?"),
        ("allow_code = [", "is not valid TOML"),
        (None, "FEDSPAN_SETTINGS: must name a file"),
    ],
)
def test_settings_that_cannot_be_read_are_said(settings: Path, tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        settings.write_text(text)
    assert words in failing("bytes", own(tmp_path)) and "mine.toml" in failing("bytes", own(tmp_path))


def test_settings_lie_where_the_platform_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.get_app_dir", lambda name: str(tmp_path / name))
    assert settings_path() is None  # an empty FEDSPAN_SETTINGS, as the tests have it
    monkeypatch.delenv("FEDSPAN_SETTINGS")
    assert settings_path() is None
    (tmp_path / "fedspan").mkdir()
    (tmp_path / "fedspan" / "settings.toml").write_text('allow_code = ["own_method"]')
    assert read_user_settings().allow_code == ("own_method",)
    call("bytes", own(tmp_path))


def test_settings_do_not_go_for_a_node(settings: Path, tmp_path: Path) -> None:
    settings.write_text('allow_code = ["own_method"]')
    said = failing("deploy", "node", str(tmp_path), "--server", "localhost:1", "--loader", "own_method:read")
    assert "--loader: code of package 'own_method' must be allowed before it runs" in said
