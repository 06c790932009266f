"""What nodes say is parsed before it is used, logged or stored; what a checkpoint says of them too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_grid import LocalGrid, deployed, deployed_on, experiment_of
from flwr.app import Error, Message

from conftest import assert_same, make_data, make_task
from fedspan.deploy.envelope import MOST_TEXT, printable, seal, unseal
from fedspan.deploy.server.deployed_state import begin_or_parse
from fedspan.deploy.server.server import Server
from fedspan.errors import CheckpointError
from fedspan.learn.metrics import Metric
from fedspan.methods import FedAvg, FedLoRU
from fedspan.simulation.protocols import EvaluationSettings
from tools.fuzz_server import ROUNDS, fuzz_server

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def quick_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes for real, so nothing has to reach the disk."""
    monkeypatch.setattr("fedspan.storage.tree_file.os.fsync", lambda _: None)


def lying(grid: LocalGrid, do: str, change: Change, payload: bytes | None = None) -> None:
    """Client 2 changes the facts of its answers to one kind of request."""

    def spoil(i: int, reply: Message) -> Message:
        if i != 2 or reply.has_error():
            return reply
        facts, brought = unseal(reply.content)
        if facts["do"] == do:
            change(facts)
            reply.content = seal(facts, brought if payload is None else payload)
        return reply

    grid.spoil = spoil


LIES: dict[str, tuple[str, Change, str]] = {
    "heard far below": ("train", lambda f: f.update(heard=-(10**9)), "'heard' of its facts must be greater"),
    "heard far above": ("train", lambda f: f.update(heard=10**9), "must have heard the 0 announcements"),
    "heard no number": ("train", lambda f: f.update(heard="0"), "'heard' of its facts must be a valid integer"),
    "true as weight": ("train", lambda f: f.update(weight=True), "'weight' of its facts must be a valid number"),
    "long weight": ("train", lambda f: f.update(weight=10**400), "'weight' of its facts must be"),
    "unknown fact": ("train", lambda f: f.update(note="x"), "'note' of its facts must not be there"),
    "round true": ("train", lambda f: f.update(round=True), "'round' of its facts must be a valid integer"),
    "stale for ever": ("train", lambda f: (f.clear(), f.update(do="train", round=1, status="stale", heard=0)), "still"),
    "tiny n, huge loss": ("evaluate", lambda f: f["sums"].update(n=1e-300, loss=1e308), "examples it registered"),
    "false test size": ("evaluate", lambda f: f["sums"].update(n=9e6, accuracy=9e6), "examples it registered"),
    "huge loss": ("evaluate", lambda f: f["sums"].update(loss=1e308), "loss must lie in"),
    "more right": ("evaluate", lambda f: f["sums"].update(accuracy=f["sums"]["n"] + 1), "examples can be right"),
    "fewer than none": ("evaluate", lambda f: f["sums"].update(accuracy=-1.0), "examples can be right"),
    "no accuracy": ("evaluate", lambda f: f["sums"].pop("accuracy"), "its measures must be accuracy, loss, n"),
    "other measure": ("evaluate", lambda f: f["sums"].update(x=1.0), "its measures must be accuracy, loss, n"),
    "sums no object": ("evaluate", lambda f: f.update(sums=[1, 2]), "'sums' of its facts must be a valid dict"),
    "many examples": ("hello", lambda f: f.update(examples=10**8), "it must have at most 10000000 examples"),
    "many held out": ("hello", lambda f: f.update(held_out=10**8), "it must have at most 10000000 examples"),
    "examples a list": ("hello", lambda f: f.update(examples=[1]), "'examples' of its facts must be a valid integer"),
    "a long shape": ("hello", lambda f: f.update(shape=[1] * 10_000), "'shape' of its facts"),
    "a shape of minus": ("hello", lambda f: f.update(shape=[-1]), "'shape.0' of its facts must be greater"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_lie_costs_its_teller_only(case: str, tmp_path: Path) -> None:
    do, change, reason = LIES[case]
    server, grid = deployed(FedAvg(), tmp_path, rounds=1, clients=4)
    lying(grid, do, change)
    result = server.run()
    why = [r["why"] for r in server.transport.refusals]
    assert why and all(w.startswith("client n2: ") and reason in w for w in why), why
    assert server.record.lines[0]["answered"] == (4 if do == "evaluate" else 3)
    assert server.record.progress.deployed["nodes"]["2"]["heard"] == 0
    accuracy = result.per_client["accuracy"]
    assert (accuracy[2] is None) == (do != "train") and None not in accuracy[:2]
    assert 0 <= result.measures["accuracy"]["weighted"] <= 1


@pytest.mark.parametrize("do", ["hello", "evaluate"])
def test_only_an_upload_brings_a_payload(do: str, tmp_path: Path) -> None:
    server, grid = deployed(FedAvg(), tmp_path, rounds=1)
    lying(grid, do, lambda f: None, payload=bytes(1000))
    server.run()
    assert (
        server.transport.refusals[0]["why"] == f"client n2: its answer to {do} must bring no payload. Got 1,000 bytes."
    )


EVIL = "fine\n2026-01-01 00:00:00 Round 9 of 9: all answered\x1b[2J\x1b]0;title\x07\u202e\u2028\x9b31m"


@pytest.mark.parametrize("how", ["name of a fact", "value of a fact", "error of the node", "name of a measure"])
def test_text_of_a_node_is_one_printable_line_everywhere(how: str, tmp_path: Path) -> None:
    experiment, lines = experiment_of(FedAvg(), make_task(), 1), []
    server, grid = deployed_on(experiment, make_data(clients=3), tmp_path, out=tmp_path / "run")
    server.transport.log = server.log = lines.append
    if how == "error of the node":
        grid.spoil = lambda i, r: Message(Error(1, EVIL * 50), reply_to=grid.sent[-1]) if i == 2 else r
    elif how == "name of a measure":
        lying(grid, "evaluate", lambda f: f["sums"].update({EVIL: 1.0}))
    else:
        lying(grid, "train", lambda f: f.update({EVIL: 1} if how == "name of a fact" else {"status": EVIL}))
    server.run()
    for name in ("status.json", "metrics.jsonl"):
        for text in strings((tmp_path / "run" / name).read_text()):
            assert text.isprintable() and len(text) <= MOST_TEXT, text
    assert lines and all(line.isprintable() for line in lines)


def strings(text: str) -> list[str]:
    """Every string inside JSON, or inside lines of it."""

    def inside(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [s for k, v in value.items() for s in (k, *inside(v))]
        return [s for v in value for s in inside(v)] if isinstance(value, list) else [value][: isinstance(value, str)]

    bodies = [text] if text.startswith("{\n") else text.splitlines()
    return [s for body in bodies for s in inside(json.loads(body))]


def test_printable_text_is_as_it_was() -> None:
    assert printable("Zürich: 3 of 4 answered, 重 ✓") == "Zürich: 3 of 4 answered, 重 ✓"
    assert printable("a" * 900) == "a" * (MOST_TEXT - 3) + "..."
    assert printable(EVIL).isprintable()


def poisoned(root: Path, change: Change, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that resumes from a checkpoint whose section on the nodes was changed before it was written."""
    experiment, data = experiment_of(FedLoRU(rank=2, tau=1), make_task(), 3), make_data(clients=3)
    server, _ = deployed_on(experiment, data, root, out=root / "run")
    directory = server.record.directory
    assert directory is not None
    save = directory.save

    def spoilt(done: int, state: Any, stores: Any, extra: Any, length: int) -> None:
        extra = json.loads(json.dumps(extra))
        change(extra["deployed"])
        save(done, state, stores, extra, length)

    def die(line: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(directory, "save", spoilt)
    with pytest.raises(KeyboardInterrupt):
        server.run(die)
    return deployed_on(experiment, data, root, out=root / "run")[0]


@pytest.mark.parametrize("heard", [-(10**9), 10**9])
def test_a_checkpoint_with_an_impossible_number_goes_on(
    heard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = deployed(FedLoRU(rank=2, tau=1), tmp_path / "a", rounds=3)
    whole.run()
    again = poisoned(tmp_path / "b", lambda d: d["nodes"]["1"].update(heard=heard), monkeypatch)
    assert f"Client 1 cannot have heard {heard} announcements of 1; it is sent all." in again.messages
    again.run()
    assert_same((whole.record.server, whole.record.common), (again.record.server, again.record.common))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(told=-1),
        lambda d: d.update(lineage="../../etc"),
        lambda d: d.update(norms=[float("inf")]),
        lambda d: d["nodes"]["0"].update(examples=0),
        lambda d: d["nodes"]["0"].update(answered="3"),
        lambda d: d["nodes"].pop("0"),
        lambda d: d.update(nodes=[]),
    ],
)
def test_a_damaged_section_of_a_checkpoint_is_refused_in_words(change: Change) -> None:
    good, notes = begin_or_parse({}, 3)
    assert begin_or_parse(good, 3) == (good, notes) and not notes
    change(good)
    with pytest.raises(CheckpointError, match="Checkpoint: "):
        begin_or_parse(good, 3)


def test_a_node_of_an_older_checkpoint_registers_its_evaluation_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = poisoned(tmp_path, lambda d: [node.pop("held_out") for node in d["nodes"].values()], monkeypatch)
    again.run()
    assert all(node["held_out"] > 0 for node in again.record.progress.deployed["nodes"].values())
    assert not again.transport.refusals


@pytest.mark.slow
def test_hostile_conversations_change_nothing_for_the_honest() -> None:
    heard = fuzz_server(200, seed=2)
    assert heard.fine, heard
    assert heard.conversations >= 200 and heard.resumed == ROUNDS * heard.runs
    assert heard.refused > 40 and heard.missing > 10  # they were heard, and not only lost


LIES_ABOUT_METRICS: dict[str, tuple[Change, str]] = {
    "more than one": (lambda f: f["metrics"].update(roc_auc=1.5), "roc_auc must lie in 0..1. Got 1.5"),
    "below zero": (lambda f: f["metrics"].update(shift=-1e31), "shift must lie in -1e+30..1e+30"),
    "another name": (lambda f: f["metrics"].update(x=1.0), "its metrics must be roc_auc, shift. Got roc_auc, shift, x"),
    "one is missing": (lambda f: f["metrics"].pop("shift"), "its metrics must be roc_auc, shift. Got roc_auc"),
    "no number": (lambda f: f["metrics"].update(shift="0.5"), "'metrics.shift' of its facts must be a valid number"),
    "true": (lambda f: f["metrics"].update(shift=True), "'metrics.shift' of its facts must be"),
    "strange reason": (lambda f: f["left_out"].update(y="x"), "its metrics must be roc_auc, shift"),
    "long reason": (lambda f: f["left_out"].update(shift="x" * 300), "'left_out.shift' of its facts"),
}


def _shift(y: Any, p: Any) -> float:
    return float(p[:, 0].mean() - 0.5)


@pytest.mark.parametrize("case", LIES_ABOUT_METRICS)
def test_a_lie_about_a_metric_costs_its_teller_only(case: str, tmp_path: Path) -> None:
    change, reason = LIES_ABOUT_METRICS[case]
    asked = EvaluationSettings(metrics=("roc_auc", Metric("shift", _shift)))
    experiment = replace(experiment_of(FedAvg(), make_task(), 1), evaluate=asked)
    server, grid = deployed_on(experiment, make_data(clients=4), tmp_path)
    lying(grid, "evaluate", change)
    result = server.run()
    why = [r["why"] for r in server.transport.refusals]
    assert why and all(w.startswith("client n2: ") and reason in w for w in why), why
    assert result.per_client["shift"][2] is None and None not in result.per_client["shift"][:2]


def test_a_node_says_which_metric_its_examples_do_not_define(tmp_path: Path) -> None:
    data = make_data(clients=3)
    y = data.y.clone()
    y[torch.from_numpy(data.test[1])] = 2
    asked = EvaluationSettings(metrics=("roc_auc",))
    experiment = replace(experiment_of(FedAvg(), make_task(), 1), evaluate=asked)
    result = deployed_on(experiment, replace(data, y=y), tmp_path)[0].run()
    assert result.per_client["roc_auc"][1] is None and result.per_client["roc_auc"][0] is not None
    assert result.evaluation["left_out"]["roc_auc"]["n1"] == "it needs examples of two classes"
