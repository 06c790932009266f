"""`fedspan claims`: the list, one claim whole, and what `verify` says of sound and of changed outcomes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import call
from fedspan.studies.claims import catalogue
from fedspan.studies.claims.outcome_file import outcomes_folder

CHEAP = "fedloru/theorem-3-2"


def told(*words: str, code: int = 0) -> Any:
    """What a command prints as JSON."""
    return json.loads(call("claims", *words, "--json", code=code).stdout)


@pytest.fixture
def outcomes(tmp_path: Path) -> Path:
    """A copy of one stored outcome."""
    (tmp_path / CHEAP).parent.mkdir(parents=True)
    shutil.copy(outcomes_folder() / f"{CHEAP}.json", tmp_path / f"{CHEAP}.json")
    return tmp_path


def test_every_claim_is_listed_with_its_state(tmp_path: Path) -> None:
    found = {line["claim"]: line for line in told()}
    assert set(found) == {c.name for c in catalogue()} and found[CHEAP]["verdict"] == "holds"
    assert found["fedara/tiny-imagenet"]["verdict"] == "not testable here"
    untried = {line["verdict"] for line in told("list", "--outcomes", str(tmp_path))}
    assert untried == {"not run", "not testable here"}
    assert f"{len(found)} claims" in call("claims").stdout


def test_a_claim_is_shown_whole() -> None:
    said = call("claims", "show", "theorem-3-2").stdout
    assert "Verdict: holds" in said and "Theorem 3.2" in said and "few − many, R = 200" in said
    assert "takes about" in call("claims", "show", "fedloru/many-clients", "--outcomes", "none").stdout
    assert told("show", CHEAP)["outcome"]["claim"] == CHEAP
    assert "Did you mean" in call("claims", "show", "theorem-3-3", code=2).stderr


def test_verify_finds_what_was_changed(outcomes: Path) -> None:
    (sound,) = told("verify", "--rerun", "0", "--outcomes", str(outcomes))
    assert sound["state"] == "as stored"
    path = outcomes / f"{CHEAP}.json"
    values = json.loads(path.read_text())
    values["figures"]["few − many, R = 200"]["tuned"]["value"]["200"] = -5.0
    path.write_text(json.dumps(values))
    (changed,) = told("verify", "--rerun", "1", "--outcomes", str(outcomes), code=1)
    assert changed["state"] == "differs" and "sha256 differs" in changed["says"]
    path.write_text("{}")
    assert "is no outcome" in call("claims", "verify", "--rerun", "0", "--outcomes", str(outcomes), code=1).stdout


def test_what_cannot_be_tried_is_refused(tmp_path: Path) -> None:
    assert "not testable here" in call("claims", "run", "llama", "--out", str(tmp_path), code=2).stderr
    assert "--root must be a folder" in call("claims", "run", "llama", "--root", str(tmp_path / "none"), code=2).stderr
