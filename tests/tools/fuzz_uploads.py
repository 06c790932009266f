"""Throw broken uploads at the gate: `python tests/tools/fuzz_uploads.py 10000`.

Half are mutations of a valid upload (bits, lengths, names, shapes, types, values, facts), half are made up. Each goes
the whole way: Flower's content, facts, bytes, codecs, declaration. Every one must be refused in words, or be valid by
an independent check; afterwards the round of the honest clients has the same bits as without the attacker.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "deploy"))

import numpy as np
import torch
from flower_grid import experiment_of
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from conftest import make_data, make_task
from fedspan import tree, wire
from fedspan.deploy.envelope import KIND, seal, unseal
from fedspan.deploy.experiment import DataKind, stand_in
from fedspan.deploy.server.admission import Declared, admit, declare, norm_of, too_large
from fedspan.deploy.server.answers import TrainAnswer, parse_answer
from fedspan.errors import Refused
from fedspan.method import Abilities, Sent
from fedspan.methods import FactorizedFLBeta, FedAvg, FedKd, PflMf
from fedspan.simulation.driver import advance
from fedspan.simulation.transport import Collected, partial_sum, stacked

EXAMPLES = 20


@dataclass
class Found:
    """What became of the uploads."""

    tried: int = 0
    refused: int = 0
    valid: int = 0
    crashed: int = 0
    wrongly_admitted: int = 0
    same_result: bool = True
    slowest: float = 0.0
    times: list[float] = field(default_factory=list)


class Target:
    """The gate of one method, with a valid upload to start from and three honest ones."""

    def __init__(self, method: Any) -> None:
        self.method, data = method, make_data(clients=4)
        e = self.experiment = experiment_of(method, make_task(), 1)
        kind = DataKind(tuple(data.x.shape[1:]), data.classes)
        federation = e.federation(4)
        self.engine = e.engine(stand_in(kind, 4, e.seed))
        task = self.engine.model(None)
        self.server = method.init_server(task, federation)
        self.common = Abilities(method).announces.common(task, federation)
        self.codecs = Abilities(method).coded.codecs(1)
        down = method.download(self.server, torch.arange(4), None, 1)
        self.shared = wire.roundtrip(down.shared, self.codecs)[0]
        self.down = {**self.shared, **tree.take(down.own, 0)}
        self.declared: Declared = declare(self.engine, None, 1, 0, self.down, self.common)
        self.facts = {"do": "train", "round": 1, "status": "done", "weight": self.weight, "heard": 0, "ahead": False}
        self.payload = self.write(0)
        self.honest = {i: self.admit(seal(self.facts, self.write(i))) for i in range(3)}
        self.reference = self.step(self.honest)

    @property
    def weight(self) -> float:
        return float(EXAMPLES) if Abilities(self.method).weight == "samples" else 1.0

    def write(self, seed: int) -> bytes:
        generator = torch.Generator().manual_seed(seed)

        def numbers(like: torch.Tensor) -> torch.Tensor:
            if like.dtype.is_floating_point:
                return torch.randn(like.shape, generator=generator, dtype=like.dtype)
            return torch.ones(like.shape, dtype=like.dtype)

        parts = {k: tree.map(numbers, getattr(self.declared, k)) for k in ("mean", "each")}
        return wire.pack({k: wire.encode(p, self.codecs) for k, p in parts.items()})

    def admit(self, content: RecordDict) -> Sent:
        facts, payload = unseal(content)
        answer = parse_answer(facts, "train", 1, "client f")
        if not isinstance(answer, TrainAnswer):
            raise Refused("client f: it is stale.")
        return admit(
            answer.weight, payload, who="client f", able=Abilities(self.method), declared=self.declared,
            codecs=self.codecs, examples=EXAMPLES, dtype=torch.float64,
        )  # fmt: skip

    def is_valid(self, sent: Sent) -> bool:
        """Looked at afresh, without the gate's own functions."""
        w = float(sent.weight)
        fine = (
            0 <= w <= (EXAMPLES if Abilities(self.method).weight == "samples" else Abilities(self.method).weight_bound)
        )
        for like, given in ((self.declared.mean, sent.mean), (self.declared.each, sent.each)):
            a, b = dict(tree.items(like)), dict(tree.items(given))
            fine = fine and a.keys() == b.keys()
            fine = fine and all(a[k].shape == b[k].shape and a[k].dtype == b[k].dtype for k in a)
            fine = fine and all(bool(np.isfinite(t.numpy()).all()) for t in b.values() if t.is_floating_point())
        return fine

    def step(self, got: dict[int, Sent]) -> str:
        found = Collected([0, 1, 2, 3])
        for i in sorted(got):
            sent = stacked(got[i])
            total = partial_sum(Abilities(self.method), sent, self.shared, None)
            found.add([i], sent.weight.tolist(), sent.each, total)
        sizes = np.full(4, EXAMPLES, np.int64)
        server = advance(self.method, self.server, 1, found, sizes=sizes, dtype=torch.float64)
        return tree.digest(server)


def mutate(t: Target, rng: np.random.Generator) -> RecordDict:
    """A valid upload with something wrong."""
    facts, data = dict(t.facts), bytearray(t.payload)
    pick = rng.integers(8)
    if pick == 0:  # bits of the header
        head = 8 + int.from_bytes(data[:8], "little")
        for _ in range(rng.integers(1, 5)):
            data[rng.integers(head)] ^= 1 << int(rng.integers(8))
    elif pick == 1:  # bits anywhere
        for _ in range(rng.integers(1, 20)):
            data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    elif pick == 2:  # another length
        data = data[: rng.integers(len(data))] if rng.random() < 0.5 else data + bytes(rng.integers(1, 9000))
    elif pick == 3:  # facts
        strange: list[Any] = [None, -1, 0, 1e300, "1", [], {}, True, EXAMPLES + 1, 0.5, "x" * 300_000]
        facts[str(rng.choice(list(facts)))] = strange[rng.integers(len(strange))]
    else:  # the tree itself
        brought = wire.unpack(bytes(data))
        flat = {k: v.clone() for k, v in tree.flatten(brought).items()}
        name = str(rng.choice(sorted(flat)))
        change = rng.integers(7)
        x = flat[name]
        if change == 0:
            del flat[name]
        elif change == 1:
            flat[name[:3] + "/" + "z" * int(rng.integers(1, 200))] = torch.zeros(3)
        elif change == 2:
            flat[name] = torch.zeros([int(n) for n in rng.integers(0, 9, rng.integers(0, 5))], dtype=x.dtype)
        elif change == 3:
            flat[name] = x.to(torch.float32 if x.dtype == torch.float64 else torch.float64)
        elif change == 4 and x.is_floating_point() and x.numel():
            x.reshape(-1)[rng.integers(x.numel())] = [float("nan"), float("inf"), -float("inf")][rng.integers(3)]
        elif change == 5 and not x.is_floating_point() and x.numel():
            x.reshape(-1)[rng.integers(x.numel())] = int(rng.integers(-100, 100)) if x.dtype != torch.uint8 else 255
        else:
            flat = {(k.replace("/", "//", 1) if k == name else k): v for k, v in flat.items()}
        try:
            data = bytearray(wire.pack(tree.unflatten(flat)))
        except Exception:  # a tree that cannot even be written: send its beginning
            data = data[:50]
    return _sealed(facts, bytes(data))


def invent(t: Target, rng: np.random.Generator) -> RecordDict:
    """An upload out of nothing: random bytes, bombs, other kinds of records."""
    pick = rng.integers(7)
    if pick == 0:
        return seal(t.facts, rng.bytes(int(rng.integers(0, 5000))))
    if pick == 1:  # a header that promises very much
        huge = [int(n) for n in rng.choice([0, 1, 2**31, 2**62, -1, 10**9], 3)]
        head = {"mean/theta": {"dtype": "F64", "shape": huge, "data_offsets": [0, 8]}}
        text = json.dumps(head).encode()
        return seal(t.facts, len(text).to_bytes(8, "little") + text + bytes(8))
    if pick == 2:  # thousands of names, or a deep one
        text = json.dumps({f"mean/{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(300)})
        deep = '{"a":' * 3000 + "0" + "}" * 3000
        raw = (text if rng.random() < 0.5 else deep).encode()
        return seal(t.facts, len(raw).to_bytes(8, "little") + raw)
    if pick == 3:  # a pickle, and numpy's own format
        raw = b"\x80\x04\x95" + rng.bytes(30) if rng.random() < 0.5 else b"\x93NUMPY\x01\x00" + rng.bytes(60)
        return seal(t.facts, raw)
    if pick == 4:  # records of other names or kinds
        array = Array(dtype="float32", shape=(2,), stype=str(rng.choice([KIND, "numpy.ndarray", ""])), data=t.payload)
        record = RecordDict({"tree": ArrayRecord({str(rng.choice(["packed", "x"])): array})})
        if rng.random() < 0.7:
            record["facts"] = ConfigRecord({"json": [str(rng.bytes(20)), 3, "[]"][rng.integers(3)]})
        return record
    if pick == 5:  # facts that are no JSON of ours
        text = str(rng.choice(["{", "[" * 100_000, '{"weight": NaN}', '{"weight": 1e999}', '"x"', "9" * 5000]))
        return _sealed(text, t.payload)
    return RecordDict()


def _sealed(facts: dict[str, Any] | str, payload: bytes) -> RecordDict:
    text = facts if isinstance(facts, str) else json.dumps(facts)
    array = Array(dtype="uint8", shape=(len(payload),), stype=KIND, data=payload)
    return RecordDict({"facts": ConfigRecord({"json": text}), "tree": ArrayRecord({"packed": array})})


def fuzz(number: int, seed: int = 0, tell: Callable[[str], None] = lambda _: None) -> Found:
    """Throw so many; four methods take turns: plain, sparse, by singular values, and a rank-one pair."""
    targets = [Target(m) for m in (FedAvg(), FactorizedFLBeta(), FedKd(), PflMf(rank=2))]
    found = Found()
    for k in range(number):
        rng = np.random.default_rng((seed, k))
        t = targets[k % len(targets)]
        content = mutate(t, rng) if k % 8 < 4 else invent(t, rng)
        found.tried += 1
        start = time.perf_counter()
        try:
            sent = t.admit(content)
            bound = too_large({9: norm_of(sent)}, [norm_of(s) for s in t.honest.values()], 20.0)
            if bound:
                raise Refused("norm")
            found.valid += 1
            found.wrongly_admitted += not t.is_valid(sent)
        except Refused:
            found.refused += 1
        except Exception as e:
            found.crashed += 1
            tell(f"{k}: {type(e).__name__}: {e}")
        found.times.append(time.perf_counter() - start)
    found.same_result = all(t.step(t.honest) == t.reference for t in targets)
    return found


if __name__ == "__main__":
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    fuzz(100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = fuzz(many, tell=print)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    p99 = 1000 * float(np.percentile(result.times, 99))
    print(
        f"{result.tried} uploads: {result.refused} refused, {result.valid} valid by declaration,"
        f" {result.crashed} crashes,"
        f" {result.wrongly_admitted} wrongly admitted; honest round the same: {result.same_result};"
        f" p99 {p99:.1f} ms, slowest {1000 * max(result.times):.1f} ms; memory +{grown:.1f} MB"
    )
    sys.exit(bool(result.crashed or result.wrongly_admitted or not result.same_result))
