"""Plays: roles are clients, examples are windows of what one role says, tested on the last quarter of it."""

from __future__ import annotations

import ast
import gzip
from pathlib import Path

import numpy as np
import pytest

from fedspan.config import assemble, from_dict
from fedspan.data import load
from fedspan.data.formats.play import STRIDE, WINDOW, play_parts
from fedspan.errors import DataError
from fedspan.simulation.simulator import Simulation

LIMIT = 2**30
SAID = {"KING": "to be, or not to be: that is the question. " * 12, "First Clown": "a grave-maker, says he; " * 20}


@pytest.fixture
def play(tmp_path: Path) -> Path:
    """Two roles that speak in turn."""
    path = tmp_path / "play.txt.gz"
    half = {role: len(text) // 2 for role, text in SAID.items()}
    speeches = [(role, text[: half[role]]) for role, text in SAID.items()]
    speeches += [(role, text[half[role] :]) for role, text in SAID.items()]
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        stream.write("\n\n".join(f"{role}:\n{text}" for role, text in speeches))
    return path


def test_windows_are_of_one_role_and_tested_on_its_last_quarter(play: Path) -> None:
    train, test = play_parts(play, LIMIT)
    alphabet = [ast.literal_eval(c) for c in train.class_names]
    for role, text in SAID.items():
        whole = text[: len(text) // 2] + "\n" + text[len(text) // 2 :]
        for part, said in ((train, whole[: len(whole) - len(whole) // 4]), (test, whole[-(len(whole) // 4) :])):
            assert part.client is not None
            mine = np.flatnonzero(part.client == role)
            assert len(mine) == -(-(len(said) - WINDOW) // STRIDE)
            for k, row in enumerate(mine):
                window = "".join(alphabet[int(i)] for i in part.x[row]) + alphabet[int(part.y[row])]
                assert window == said[k * STRIDE : k * STRIDE + WINDOW + 1]


def test_an_experiment_runs_from_the_file(play: Path) -> None:
    config = from_dict(
        {
            "rounds": 2,
            "data": {"source": str(play)},
            "partition": {"kind": "natural", "split": "global"},
            "model": {"kind": "characters", "width": 3, "hidden": 5},
            "method": {"name": "fedper", "lr": 0.1},
            "train": {"precision": "float64", "workers": 1},
        }
    )
    method, task, data = assemble(config)
    assert data.names == ["First Clown", "KING"] and data.classes == load(str(play)).classes
    states = []
    for mapping in ("vmap", "folded", "loop"):
        settings = type(config.train)(**{**vars(config.train), "mapping": mapping})
        sim = Simulation(method, task, data, rounds=2, settings=settings)
        assert sim.run().accuracy["mean"] > 0
        states.append(sim.record.server["theta"])
    for name, value in states[-1].items():
        assert all(np.allclose(state[name], value, rtol=0, atol=1e-12) for state in states[:-1])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"no roles here", "at least two roles"),
        (b"ONE:\n" + b"a" * 500, "at least two roles"),
        (b"ONE:\nshort\n\nTWO:\nshort", "must say at least"),
        (b"ONE:\n\xff\xfe\n\nTWO:\nx", "must be UTF-8"),
        (b"ONE:\n" + "".join(map(chr, range(0x4E00, 0x5300))).encode() + b"\n\nTWO:\nx", "different characters"),
    ],
)
def test_what_is_no_play_is_refused_in_one_sentence(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says):
        load(str(path))


def test_damaged_and_large_texts(play: Path, tmp_path: Path) -> None:
    raw = play.read_bytes()
    for k in range(0, len(raw), 7):
        damaged = tmp_path / "damaged.txt.gz"
        damaged.write_bytes(raw[:k])
        with pytest.raises(DataError):
            load(str(damaged))
    with pytest.raises(DataError, match="at most"):
        play_parts(play, 1000)
