"""`fedspan new method NAME`: its files work as they are, and what it says to try works to the letter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import call, failing

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of somebody's own."""
    place = tmp_path / "mine"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def shell(command: str, folder: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line where `python` and `fedspan` are those of this checkout, which no PYTHONPATH hides."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    # -P as in an installed script: the working directory is not on the path by itself.
    both = f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{SRC}" exec {sys.executable}'
    for name, rest in (("python", ""), ("fedspan", " -P -m fedspan.cli.app")):
        (programs / name).write_text(f'#!/bin/sh\n{both}{rest} "$@"\n')
        (programs / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("PYTEST")}
    environment = kept | {"PATH": f"{programs}{os.pathsep}{kept['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.long
def test_what_it_says_to_try_works_to_the_letter(folder: Path, tmp_path: Path) -> None:
    said = call("new", "method", "my_idea").stdout
    assert sorted(p.name for p in folder.iterdir()) == ["my_idea.py", "my_idea.toml", "test_my_idea.py"]
    lines = [line.strip() for line in said.splitlines() if line.startswith("  ")]
    assert len(lines) == 3
    for line, words in zip(lines, ("13 passed", "MyIdea, 20 rounds", "MyIdea")):
        done = shell(line, folder, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert words in done.stdout
    assert (folder / "runs" / "my_idea" / "report.html").is_file()
    refused = shell(lines[1].replace(" --allow-code my_idea", " --fresh"), folder, tmp_path)
    assert refused.returncode == 2 and "must be allowed before it runs" in refused.stderr


def test_the_method_is_short_and_every_field_has_its_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("new", "method", "my_short_idea")
    text = (folder / "my_short_idea.py").read_text()
    assert len(text.splitlines()) <= 40 and "NAME" not in text and "CLASS" not in text
    monkeypatch.syspath_prepend(folder)
    from fedspan.method.fields import keys_of
    from fedspan.methods import find_method, make

    cls = type(make("my_short_idea:MyShortIdea", allow_code=["my_short_idea"]))
    assert all(key.sentence for key in keys_of(cls).values()) and find_method("fedavg")
    del sys.modules["my_short_idea"]


def test_nothing_is_overwritten(folder: Path) -> None:
    (folder / "test_my_idea.py").write_text("mine")
    assert "test_my_idea.py must not exist yet" in failing("new", "method", "my_idea")
    assert [p.name for p in folder.iterdir()] == ["test_my_idea.py"]
    assert (folder / "test_my_idea.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["My", "a-b", "a.b", "../a", "class", "1a", "", "x" * 61])
@pytest.mark.usefixtures("folder")
def test_names_that_python_does_not_take_are_refused(name: str) -> None:
    assert "new method: NAME must be small letters" in failing("new", "method", name)


@pytest.mark.parametrize("name", ["json", "torch", "fedspan"])
def test_names_of_other_modules_are_refused(name: str, folder: Path) -> None:
    assert "must not be that of a module that Python finds already" in failing("new", "method", name)
    assert not list(folder.iterdir())
