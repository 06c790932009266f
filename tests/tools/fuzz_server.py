"""Talk to the server's loop as hostile nodes do: `python tests/tools/fuzz_server.py 10000`.

A conversation is what one hostile node says to one request: wrong facts, measures, texts, sizes and payloads, answers
to other questions, answers of others, the same twice, errors, or nothing. Two of six nodes are hostile in runs of a few
rounds, over Flower's messages in one process; after every round the server dies and another resumes from its
checkpoint. What the four honest nodes say was recorded beside silent ones: the server must ask them for the very same
bytes, and end with the very same bits.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "deploy"))

import numpy as np
from flower_grid import FIRST_NODE, LocalGrid, deployed_on, experiment_of, written_and_read
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from conftest import make_data, make_task
from fedspan import wire
from fedspan.deploy.envelope import KIND, Facts, seal, unseal
from fedspan.deploy.policy import Policy
from fedspan.deploy.server.server import Server
from fedspan.methods import FedAvg, FedLoRU

CLIENTS, HOSTILE, ROUNDS = 6, (2, 5), 3
POLICY = Policy(deadline=0.1, poll=0.01, wait=0.0)
SLOW = 20.0
"""Seconds after which a round counts as hanging, on a busy machine."""

ESCAPES = "x\n2026-01-01 00:00:00 Round 9 of 9\x1b[2J\x1b]0;t\x07\u202e\u2028\x9b31m\x00"
VALUES: list[Any] = [
    None,
    ESCAPES,
    "1",
    "9" * 4000,
    [],
    [[[]]],
    {},
    {"a": 1},
    -1,
    -(10**9),
    10**30,
    1e308,
    -1e-300,
    0.5,
]
TEXTS = ["{", "[" * 50_000, '{"weight": NaN}', '{"round": 1e999}', '"x"', "9" * 5000, "", "null", '{"a":' * 3000, "[]"]


@dataclass
class Heard:
    """What became of the conversations."""

    conversations: int = 0
    runs: int = 0
    resumed: int = 0
    refused: int = 0
    missing: int = 0
    crashes: list[str] = field(default_factory=list)
    wrongly_admitted: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    unprintable: list[str] = field(default_factory=list)
    slowest: float = 0.0

    @property
    def fine(self) -> bool:
        """Whether nothing happened that must not."""
        bad = self.crashes or self.wrongly_admitted or self.differences or self.unprintable
        return not bad and self.slowest < SLOW


class Stage:
    """A federation whose honest answers and end are known: recorded in a run in which the hostile nodes are silent."""

    def __init__(self, method: Any, root: Path) -> None:
        self.experiment, self.data = (
            experiment_of(method, make_task(), ROUNDS, evaluate_every=1),
            make_data(clients=CLIENTS),
        )
        self.asked: dict[tuple[int, str, int], tuple[Facts, bytes]] = {}
        self.said: dict[tuple[int, str, int], tuple[Facts, bytes]] = {}
        server, grid = deployed_on(self.experiment, self.data, root / "nodes", POLICY)

        def record(i: int, reply: Message) -> Message | None:
            facts, payload = unseal(reply.content)
            place = i, facts["do"], facts["round"]
            self.asked[place], self.said[place] = unseal(grid.sent[-1].content), (facts, payload)
            return None if i in HOSTILE and facts["do"] != "hello" else reply

        grid.spoil = record
        result = server.run()
        self.digest, self.measures = result.digest, honest(result.per_client)

    def server(self, out: Path, grid: LocalGrid, log: Callable[[str], None]) -> Server:
        """A server on another grid; it resumes what it finds in `out`."""
        made, _ = deployed_on(self.experiment, self.data, out / "unused", POLICY, out=out)
        made.transport.grid, made.transport.log, made.log = grid, log, log
        return made


class HostileGrid(LocalGrid):
    """Honest nodes say what was recorded, if they are asked what was recorded; the others talk as they like."""

    def __init__(self, stage: Stage, rng: np.random.Generator, heard: Heard) -> None:
        super().__init__(None, CLIENTS)  # type: ignore[arg-type]
        self.stage, self.rng, self.heard = stage, rng, heard
        self.more: dict[str, list[Message]] = {}
        self.before: set[tuple[int, str, int]] = set()
        self.friendly = {i: rng.random() < 0.7 for i in HOSTILE}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer at once."""
        numbers = []
        for message in messages:
            arrived = written_and_read(message)
            number, i = arrived.metadata.message_id, arrived.metadata.dst_node_id - FIRST_NODE
            facts, payload = unseal(arrived.content)
            place = i, facts["do"], facts["round"]
            if i in HOSTILE and not (facts["do"] == "hello" and self.friendly[i]):
                self.heard.conversations += 1
                said = talk(self.stage, self.rng, place, arrived)
            else:
                self._compare(place, facts, payload)
                said = [Message(seal(*self.stage.said[place]), reply_to=arrived)]
            self.more[number] = [m if m.has_error() else written_and_read(m) for m in said]
            numbers.append(number)
        return numbers

    def _compare(self, place: tuple[int, str, int], facts: Facts, payload: bytes) -> None:
        """An honest node is asked what it was asked beside silent ones; asked again, it has heard the news already."""
        known, brought = self.stage.asked[place]
        same = facts | {"lineage": ""} == known | {"lineage": ""} and payload == brought
        if place not in self.before and not same:
            self.heard.differences.append(f"client {place[0]} is asked something else to {place[1:]}")
        self.before.add(place)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """All that was said to these messages."""
        return [m for k in message_ids for m in self.more.pop(k, [])]


# ---------------------------------------------------------------------------------------------- what hostile nodes say


def talk(stage: Stage, rng: np.random.Generator, place: tuple[int, str, int], asked: Message) -> list[Message]:
    """What a hostile node says to a request: nothing of it is a good answer, so nothing of it may count."""
    kind = rng.integers(20)
    do = place[1]
    if place not in stage.said:  # a greeting after the first round
        place = place[0], do, min(t for i, d, t in stage.said if (i, d) == (place[0], do))
    facts, payload = stage.said[place]
    facts = json.loads(json.dumps(facts)) | {"round": unseal(asked.content)[0]["round"]}
    if kind == 0:
        return [] if rng.random() < 0.3 else [_error(rng, asked)]
    if kind == 1:
        return [_error(rng, asked)]
    if kind == 2 and do != "hello":
        return [Message(seal({"do": do, "round": facts["round"], "status": "stale", "heard": 0}), reply_to=asked)]
    if kind == 3:  # records that are none of ours
        return [Message(_records(rng, payload), reply_to=asked)]
    if kind == 4:  # what it, or somebody else, said to another question
        others = [k for k in stage.said if k[1:] != (do, facts["round"])]
        return [Message(seal(*stage.said[others[rng.integers(len(others))]]), reply_to=asked)]
    if kind in (5, 6):  # a good answer in somebody else's name, or to another round's message
        reply = Message(seal(facts, payload), reply_to=asked)
        name, value = [("_src_node_id", FIRST_NODE), ("_group_id", ESCAPES)][kind - 5]
        reply.metadata.__dict__[name] = value
        return [reply]
    if kind == 7:  # a bad answer, and a good one after it
        bad = Message(_written(_wrong(facts, rng), payload), reply_to=asked)
        return [bad, Message(seal(facts, payload), reply_to=asked)]
    if kind in (8, 9, 10):
        return [Message(_written(facts, _wrong_payload(do, payload, rng)), reply_to=asked)]
    if kind == 11:
        return [Message(_written(TEXTS[rng.integers(len(TEXTS))], payload), reply_to=asked)]
    return [Message(_written(_wrong(facts, rng), payload), reply_to=asked)]


def _error(rng: np.random.Generator, asked: Message) -> Message:
    return Message(Error(int(rng.integers(0, 9)), ESCAPES * int(rng.integers(0, 500))), reply_to=asked)


def _records(rng: np.random.Generator, payload: bytes) -> RecordDict:
    array = Array(dtype="float32", shape=(2,), stype=str(rng.choice([KIND, "numpy.ndarray", ""])), data=payload)
    record = RecordDict({"tree": ArrayRecord({str(rng.choice(["packed", "x"])): array})})
    if rng.random() < 0.5:
        record["facts"] = ConfigRecord({"json": [ESCAPES, 3, "[]"][rng.integers(3)]})
    return record if rng.random() < 0.8 else RecordDict()


def _wrong(facts: Facts, rng: np.random.Generator) -> Facts:
    """The facts with one that cannot be: gone, unknown, of another type, or out of its range."""
    facts, keys = dict(facts), sorted(facts)
    key, pick = keys[rng.integers(len(keys))], rng.random()
    if "sums" in facts and pick < 0.5:
        return facts | {"sums": _wrong_sums(dict(facts["sums"]), rng)}
    if pick < 0.6:
        del facts[key]
    elif pick < 0.7:
        facts[ESCAPES * int(rng.integers(1, 50))] = VALUES[rng.integers(len(VALUES))]
    else:  # a count of classes may be absent, and is wrong here all the same
        facts[key] = VALUES[rng.integers(len(VALUES))]
    return facts


def _wrong_sums(sums: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    n = sums["n"]
    wrong: list[dict[str, Any]] = [{"n": v} for v in (1e-300, 0, -1, n + 1, n / 2, 9e6, 1e308, "1", None, True, [])]
    wrong += [{"n": 1e-300, "loss": 1e308}, {"n": 9e6, "accuracy": 9e6}, {"loss": 1e308}, {"loss": -1e308}]
    wrong += [{"loss": "0"}, {"accuracy": n + 1}, {"accuracy": -1e-9}, {"accuracy": 1e300}, {ESCAPES: 1.0}, {"": 0.0}]
    wrong += [{str(k): 1.0 for k in range(5000)}]
    pick = int(rng.integers(len(wrong) + 2))
    if pick >= len(wrong):
        del sums[sorted(sums)[rng.integers(len(sums))]]
        return sums
    return sums | (wrong[pick] if n != 1 or wrong[pick].get("n") is not True else {"n": []})


def _wrong_payload(do: str, payload: bytes, rng: np.random.Generator) -> bytes:
    if do != "train":
        return rng.bytes(int(rng.integers(1, 5000)))
    pick = rng.integers(6)
    if pick == 0:
        return payload[: int(rng.integers(len(payload)))]
    if pick == 1:
        return bytes(rng.integers(0, 2)) + rng.bytes(int(rng.integers(0, 3000)))
    if pick == 2:
        return payload + bytes(int(rng.integers(1, 300_000)))
    if pick == 3:  # a header that promises very much
        head = {"mean/theta": {"dtype": "F64", "shape": [2**31, 2**31], "data_offsets": [0, 8]}}
        text = json.dumps(head).encode()
        return len(text).to_bytes(8, "little") + text + bytes(8)
    brought = wire.unpack(payload)
    part = next(iter(brought["mean"].values()))
    name = sorted(part)[rng.integers(len(part))] if isinstance(part, dict) else None
    if name is None:
        return b""
    if pick == 4:
        del part[name]
    else:
        part[ESCAPES] = part[name]
    return wire.pack(brought)


def _written(facts: Facts | str, payload: bytes) -> RecordDict:
    text = facts if isinstance(facts, str) else json.dumps(facts)
    array = Array(dtype="uint8", shape=(len(payload),), stype=KIND, data=payload)
    return RecordDict({"facts": ConfigRecord({"json": text}), "tree": ArrayRecord({"packed": array})})


# -------------------------------------------------------------------------------------------------- runs


def honest(per_client: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The measures of the honest nodes."""
    return {k: [v for i, v in enumerate(values) if i not in HOSTILE] for k, values in per_client.items()}


class _Died(BaseException):
    """The server's process ends after a round."""


def play(stage: Stage, seed: tuple[int, int], heard: Heard) -> None:
    """One run with hostile nodes, whose server dies after every round."""
    grid, lines = HostileGrid(stage, np.random.default_rng(seed), heard), list[str]()
    began = time.perf_counter()

    def die(line: dict[str, Any]) -> None:
        nonlocal began
        heard.slowest = max(heard.slowest, time.perf_counter() - began)
        heard.refused, heard.missing = heard.refused + len(line["refused"]), heard.missing + len(line["missing"])
        if line["answered"] != CLIENTS - len(HOSTILE):
            heard.wrongly_admitted.append(f"{seed}, round {line['round']}: {line['answered']} answered")
        raise _Died

    with tempfile.TemporaryDirectory() as folder:
        for life in range(ROUNDS + 1):
            began = time.perf_counter()
            server = stage.server(Path(folder), grid, lines.append)
            heard.resumed += life > 0 and server.record.progress.round == life
            try:
                result = server.run(die)
            except _Died:
                pass
            except Exception as e:
                heard.crashes.append(f"{seed}, round {life + 1}: {type(e).__name__}: {str(e)[:200]}")
                return
            said = (Path(folder) / "status.json").read_text()
            lines.extend(r["why"] for r in json.loads(said)["refused"])
            heard.unprintable.extend(repr(line) for line in lines if not line.isprintable() or len(line) > 600)
            lines.clear()
        heard.runs += 1
        if result.digest != stage.digest or honest(result.per_client) != stage.measures:
            heard.differences.append(f"{seed}: the honest nodes' result is another one")
        if any(v[i] is not None for k, v in result.per_client.items() if k not in ("id", "n") for i in HOSTILE):
            heard.wrongly_admitted.append(f"{seed}: measures of a hostile node count")


def fuzz_server(number: int, seed: int = 0) -> Heard:
    """Hold so many conversations; a method without and one with announcements take turns."""
    root, heard, k = Path(tempfile.mkdtemp()), Heard(), 0
    try:
        stages = [Stage(FedAvg(), root / "a"), Stage(FedLoRU(rank=2, tau=1), root / "b")]
        while heard.conversations < number:
            play(stages[k % 2], (seed, k), heard)
            k += 1
    finally:
        shutil.rmtree(root)
    return heard


if __name__ == "__main__":
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    fuzz_server(200, seed=1)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    found = fuzz_server(many)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    for text in (*found.crashes, *found.wrongly_admitted, *found.differences, *found.unprintable)[:20]:
        print(text)
    print(
        f"{found.conversations} conversations in {found.runs} runs: {found.refused} refused and {found.missing} missing"
        f" in training, {len(found.crashes)} crashes, {len(found.wrongly_admitted)} wrongly admitted,"
        f" {len(found.differences)} differences from the honest result, {len(found.unprintable)} unprintable texts,"
        f" {found.resumed} resumed; slowest round {found.slowest:.2f} s, memory +{grown:.1f} MB,"
        f" {time.perf_counter() - start:.0f} s"
    )
    sys.exit(not found.fine or grown > 50)
