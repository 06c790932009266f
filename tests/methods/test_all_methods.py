"""One table of methods, one list of promises that every method keeps.

vmap = chunks = loop; 1 worker = 2 workers; pure; order of clients does not matter; bystanders unchanged bit for bit;
counted bytes = bytes of the serialised payload; state survives save and load; zero step size is a fixed point; nothing
private is sent; bad input is refused in one sentence; the loss falls; Flower gives the simulator's numbers.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import assert_close, assert_same, make_data, make_task
from fedspan import tree, wire
from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError
from fedspan.method import Abilities, ClientInfo, Federation, Method
from fedspan.method.fields import keys_of
from fedspan.methods import METHODS, make
from fedspan.randomness import key
from fedspan.simulation.engine import Answer, Engine
from fedspan.simulation.settings import Settings, sample
from fedspan.simulation.simulator import Simulation
from fedspan.tree import Tree

# One row per method and variant worth its own line: name, fields.
TABLE: list[tuple[str, dict[str, Any]]] = [
    ("local", {}),
    ("local", {"momentum": 0.9, "weight_decay": 0.01}),
    ("local", {"optimizer": "adamw", "lr": 0.01}),
    ("fedavg", {}),
    ("fedavg", {"private_head": True, "weighting": "uniform", "momentum": 0.5}),
    ("fedavg", {"server_optimizer": "yogi", "server_lr": 0.05}),
    ("fedprox", {"mu": 0.5, "weight_decay": 0.01}),
    ("fedper", {}),
    ("fedrep", {"head_epochs": 2, "momentum": 0.9}),
    ("fedbabu", {"finetune_epochs": 2}),
    ("lg-fedavg", {}),
    ("ditto", {"lam": 0.3}),
    ("oracle", {}),
    ("cfl", {"start_round": 2, "eps_1": 10.0, "eps_2": 0.0}),
    ("cfl", {"weighting": "samples", "private_head": True, "linkage": "single", "gamma_max": 0.2, "start_round": 1}),
    ("ifca", {"clusters": 2}),
    ("ifca", {"clusters": 2, "averaging": "gradient", "clustered": "head", "private_head": False, "lr": 0.5}),
    ("fedcollab", {"distance_rounds": 2, "distance_hidden": 5, "momentum": 0.5}),
    ("per-fedavg", {}),
    ("per-fedavg", {"variant": "hessian-free", "lr_inner": 0.05, "momentum": 0.5, "adapt": 2}),
    ("per-fedavg", {"variant": "exact", "private_head": True, "adapt_unit": "epoch", "weight_decay": 0.01}),
    ("fedfomo", {}),
    ("apfl", {"momentum": 0.5}),
    ("fedalt", {"v_epochs": 2, "l2": 0.1, "server_momentum": 0.5, "server_lr": 0.9}),
    ("fedalt", {"stateful": False, "v_steps": 3, "server_optimizer": "adam", "server_lr": 0.05}),
    ("fedsim", {"momentum": 0.5}),
    ("pfedsim", {"warmup_rounds": 1}),
    ("pfedsim", {"warmup_rounds": 2, "private_head": True, "momentum": 0.5}),
    ("pfedsim", {"warmup_rounds": 0}),
    ("fedala", {"start_passes": 3}),
    ("fedala", {"top": 3, "private_head": True, "momentum": 0.5, "start_passes": 12, "threshold": 0.01}),
    ("pfedme", {}),
    ("pfedme", {"private_head": True, "beta": 0.7, "momentum": 0.5, "lr_inner": 0.02, "inner_steps": 2}),
    ("l2gd", {"p": 0.4, "private_head": True, "weight_decay": 0.01}),
    ("l2gd", {}),
    ("flute", {"head_epochs": 1}),
    ("flute", {"head_epochs": 1, "lr_server": 0.0, "momentum": 0.5, "rep_epochs": 2}),
    ("fedas", {}),
    ("fedas", {"align": "example", "align_epochs": 2, "private_head": False, "fisher": False, "momentum": 0.5}),
    ("pfedfda", {}),
    ("pfedfda", {"single_beta": True, "momentum": 0.5, "weight_decay": 0.01, "lr": 0.005}),
    ("fedkd", {}),
    ("fedkd", {"private_head": True, "momentum": 0.5, "clip": 0.5, "energy_start": 0.7, "energy_rounds": 2}),
    ("pfedes", {}),
    ("pfedafm", {"momentum": 0.5, "lr_common": 0.05}),
    ("fedproto", {}),
    ("fedproto", {"weighting": "uniform", "predict_by": "prototype", "momentum": 0.5, "lam": 3.0}),
    ("fedtgp", {"server_epochs": 2}),
    ("fedsim", {"l2": 0.1, "l2_towards": "start", "weighting": "uniform"}),
    ("apfl", {"mix": "logits", "alpha_every": "step", "alpha_decay": 0.02, "private_head": True}),
    ("fedfomo", {"models": 2, "private_head": True, "epsilon": 0.5, "momentum": 0.5}),
    ("pfl-mf", {"rank": 3}),
    ("pfl-mf", {"rank": 2, "factorise": "all", "v_steps": 3, "wire": "full", "server_step": "literal", "lr": 0.1}),
    (
        "pfl-mf",
        {"rank": "auto", "rank_start": 4, "rank_round": 1, "rank_gap": 1.001, "gauge_every": 2, "refresh": True},
    ),
    ("pfl-mf-paper", {"rank": 3, "v_scale": "1", "v_steps": 5}),
    ("pfl-mf-paper", {"rank": 2, "v_unit": "epoch", "g_at": "new", "wire": "full", "p": 0.5}),
    ("pfl-mf-joint", {"rank": 2, "start": "random"}),
    ("amht-lrs", {"rank": 2, "sparsity": 3}),
    ("amht-lrs", {"rank": 2, "sparsity": 3, "u_update": "gradient", "lr_u": 0.1, "momentum": 0.5}),
    ("lr-bpfl", {"rank": 2, "members": 1}),
    ("lr-bpfl", {"rank": 2, "members": 0, "joint": True, "adaptive_rank": True, "private_head": True}),
    ("waffle", {"temperature": 0.1}),
    ("factorized-fl-alpha", {"mu_start": "dense"}),
    ("factorized-fl-alpha", {"tau": 0.0, "gauge": True, "momentum": 0.5, "newcomer": "start", "mu_start": "dense"}),
    ("factorized-fl-alpha", {"matching": "random", "shared": "um", "private_head": False, "penalty": "subgradient"}),
    ("factorized-fl-beta", {"lam": 0.01, "eval_prune": True, "weight_decay": 0.001, "gamma": 2}),
    ("factorized-fl-beta", {"matching": "worst", "keep_momentum": True, "momentum": 0.5, "down_share": 0.5}),
    ("factorized-fedavg", {"layers": "body", "mu_start": "dense", "down_threshold": 0.001}),
    ("factorized-local", {"optimizer": "adamw", "lr": 0.01, "mu_start": "dense"}),
    ("fedpara", {"rank": 2, "tanh": True, "private_head": True, "momentum": 0.5}),
    ("pfedpara", {}),
    ("fedloru", {"rank": 2, "tau": 3, "momentum": 0.5}),
    (
        "fedloru",
        {"rank": 2, "tau": 3, "reinit": "momentum", "adapter": "lokr", "private_head": True, "cycle": 3}
        | {"alpha": 2.0, "alpha_over_r": True, "server_optimizer": "adam", "server_lr": 0.03},
    ),
    ("fedlora", {"rank": 2, "adapter": "loha", "server_optimizer": "adagrad", "server_lr": 0.2, "layers": "all"}),
    ("pfedloru", {"rank": 3, "tau": 3, "own_ranks": (1, 2), "ranks": (3, 1), "private_head": True, "momentum": 0.5}),
    ("mfedloru", {"rank": 3, "ranks": (3, 1), "tau": 3, "momentum": 0.5, "alpha_inner_by_rank": True}),
    ("pfedlora1", {"momentum": 0.5}),
    ("pfedlora2", {"rank": 1, "private_head": True, "cycle": 2}),
    ("fedhm", {"rho": (1.0, 3.0), "keep_full_rank_history": True, "weight_decay": 0.01, "momentum": 0.5}),
    ("fedlmt", {"rho": 3.0, "weight_decay": 0.01, "private_head": True}),
    ("feddlr", {"energy": 0.9}),
    ("prism", {"keep": (0.5, 0.8), "weight_decay": 0.01, "momentum": 0.5}),
    ("fedara", {"ratio": (1.0, 0.5), "lam": 1.0, "warmup": 1}),
    (
        "fedara",
        {"layers": "body", "ratio": 0.5, "aggregate": "changes", "lam": 0.1, "fac_reduction": "sum", "warmup": 2}
        | {"rho_rule": "whole", "weight_decay": 0.01, "momentum": 0.5, "watch": True},
    ),
    (
        "fedara",
        {"ratio": (1.0, 0.4), "layers": "body", "adapt_energy": 0.9, "adapt_ratios": (0.4, 0.2), "lam": 1.0}
        | {"warmup": 1, "momentum": 0.5},
    ),
    ("fedara-star", {"lam": 1.0}),
]
ROWS = pytest.mark.parametrize(
    ("name", "fields"), TABLE, ids=[f"{n}-{'-'.join(map(str, f.values())) or 'default'}" for n, f in TABLE]
)
# Every row on the small MLP. Other models where a method has code of its own for them: convolutions where weights are
# composed, differentiated twice or read by channels, dropout where outputs, features or random numbers are asked for in
# another way than by `fit(task.loss, ...)`.
CONVOLUTIONS = {
    "fedavg",
    "per-fedavg",
    "apfl",
    "fedala",
    "pfedme",
    "fedas",
    "flute",
    "fedkd",
    "fedproto",
    "pfedfda",
    "ifca",
}
CONVOLUTIONS |= {"fedcollab", "pfl-mf", "pfl-mf-paper", "pfl-mf-joint", "amht-lrs", "lr-bpfl", "waffle", "prism"}
CONVOLUTIONS |= {"factorized-fl-alpha", "factorized-fl-beta", "fedpara", "pfedpara", "fedloru", "mfedloru", "pfedloru"}
CONVOLUTIONS |= {"pfedlora1", "fedhm", "fedlmt", "feddlr"}
DROPOUT = {"local", "fedavg", "fedrep", "ditto", "per-fedavg", "fedfomo", "apfl", "l2gd", "flute", "fedkd", "fedproto"}
DROPOUT |= {
    "pfedfda",
    "ifca",
    "pfl-mf",
    "pfl-mf-paper",
    "amht-lrs",
    "lr-bpfl",
    "waffle",
    "factorized-fl-alpha",
    "fedpara",
}
DROPOUT |= {"fedloru", "mfedloru", "pfedlora2", "fedhm", "prism"}
FIRST = [TABLE.index(next(row for row in TABLE if row[0] == name)) for name in dict(TABLE)]
FIRST_ROWS = pytest.mark.parametrize(("name", "fields"), [TABLE[k] for k in FIRST], ids=[TABLE[k][0] for k in FIRST])
MODELS = pytest.mark.parametrize(
    ("name", "fields", "kind"),
    [
        pytest.param(*row, kind, id=f"{row[0]}-{'-'.join(map(str, row[1].values())) or 'default'}-{kind}")
        for k, row in enumerate(TABLE)
        for kind in ("mlp", "cnn", "dropout")
        if kind == "mlp" or (k in FIRST and row[0] in (CONVOLUTIONS if kind == "cnn" else DROPOUT))
    ],
)


PURE_ROWS = pytest.mark.parametrize(
    ("name", "fields", "kind"),
    [(*row, kind) for k, row in enumerate(TABLE) for kind in (("mlp", "batchnorm") if k in FIRST else ("mlp",))],
)


# Methods whose server also holds what follows from the data alone, or loses on the wire what was never learnt.
SUMMARISING = {"pfedsim", "fedproto", "fedtgp", "pfedfda", "fedkd", "fedcollab"}
# Where fitting at use also learns: how to do without.
UNTUNED = {"fedbabu": {"finetune_epochs": 0}, "pfedfda": {"beta": 0.0}}


# Methods that do something else after a few rounds: split, part, settle, accumulate, cut the rank.
LATE = {
    "cfl",
    "pfedsim",
    "fedcollab",
    "fedloru",
    "fedlora",
    "pfedloru",
    "mfedloru",
    "pfl-mf",
    "fedkd",
    "l2gd",
    "fedala",
}


# Methods that send an approximation of their model, so that it changes without any training.
TRUNCATING = {"fedhm", "feddlr", "fedara", "fedara-star"}


def test_every_registered_method_is_in_the_table() -> None:
    assert {n for n, _ in TABLE} == set(METHODS)


def begun(method: Method, kind: str = "mlp", rounds: int = 3, out: Path | None = None, **settings: Any) -> Simulation:
    """A run before its first round."""
    data = make_data(kind, opposed=settings.pop("opposed", True))
    settings = {"participation": 0.6, "workers": 1, "dtype": "float64", "batch_size": 8, "epochs": 1} | settings
    chosen = Settings(evaluate_every=100, **settings)
    return Simulation(method, make_task(kind), data, rounds=rounds, seed=3, settings=chosen, out=out)


def run(method: Method, kind: str = "mlp", rounds: int = 3, out: Path | None = None, **settings: Any) -> Simulation:
    """A finished run."""
    sim = begun(method, kind, rounds, out, **settings)
    sim.result = sim.run()  # type: ignore[attr-defined]
    return sim


def state(sim: Simulation) -> Tree:
    rows = {str(i): sim.record.row(i) for i in range(sim.data.clients)}
    return {"server": sim.record.server, "clients": rows}


def alike(method: Method, clients: int = 7) -> list[int]:
    """The clients that have the capacity of the first one: all, unless the method tells them apart."""
    return [
        i for i in range(clients) if Abilities(method).ranked.capacity_of(i) == Abilities(method).ranked.capacity_of(0)
    ]


def federation_of(method: Method, data: FederatedData) -> Federation:
    return Federation(
        data.clients, 3, tuple(Abilities(method).ranked.capacity_of(i) for i in range(data.clients)), data.groups
    )


def one_round(
    method: Method, mapping: str, ids: list[int], kind: str = "mlp", t: int = 1, coded: bool = True
) -> tuple[Tree, Answer]:
    """Rows before, and the answers of one round for `ids`, of one capacity; not `coded`: uploads as before the wire."""
    task, data = make_task(kind), make_data(kind)
    engine = Engine(method, task, data, 3, 8, 1, mapping)  # type: ignore[arg-type]
    federation = federation_of(method, data)
    capacity = Abilities(method).ranked.capacity_of(ids[0])
    first, task = engine.model(federation.kinds[0]), engine.model(capacity)
    server, common = method.init_server(first, federation), Abilities(method).announces.common(first, federation)
    rows = tree.stack([method.init_client(task, ClientInfo(i, capacity, key(3, "client", i), 3)) for i in ids])
    down = method.download(server, torch.tensor(ids), capacity, t)
    shared = wire.roundtrip(down.shared, Abilities(method).coded.codecs(t))[0]
    if not coded:
        raw = type("Raw", (type(method),), {"codecs": lambda self, round: {}})
        engine.method = raw(**{f.name: getattr(method, f.name) for f in dataclasses.fields(method)})
    return rows, engine.update(capacity, t, ids, rows, shared, down.own, common)


@MODELS
def test_vmap_chunks_loop_and_two_workers_agree(name: str, fields: dict[str, Any], kind: str) -> None:
    """Mapped = one after another, in chunks or at once; and not a bit depends on the number of workers."""
    method, k = make(name, **fields), TABLE.index((name, fields))
    rounds = 3 if kind == "mlp" and name in LATE else 2
    options = {"rounds": rounds, "epochs": 2 if kind == "mlp" and k in FIRST else 1}
    runs = {m: run(method, kind, mapping=m, workers=1, chunk=2, **options) for m in ("loop", "vmap")}
    loop, others = runs["loop"], [runs["vmap"]]
    if kind == "mlp" and k in FIRST:
        others.append(run(method, mapping="vmap", workers=1, chunk=100, **options))
        again = ("vmap", "loop")[k % 2]
        two = run(method, mapping=again, workers=2, chunk=2, **options)
        assert two.record.digest() == runs[again].record.digest()
    for mapped in others:
        assert_close(state(loop), state(mapped))
        for measure, values in loop.result.per_client.items():  # type: ignore[attr-defined]
            assert values == pytest.approx(mapped.result.per_client[measure], abs=1e-9)  # type: ignore[attr-defined]


@FIRST_ROWS
def test_batch_normalisation_runs_by_the_loop_and_stays_finite(name: str, fields: dict[str, Any]) -> None:
    sim = run(make(name, **fields), "batchnorm", workers=1, rounds=2)
    assert sim.mapping == "loop"
    assert tree.all_finite(state(sim))
    with pytest.raises(ConfigError, match="BatchNorm2d at 'norm'"):
        begun(make(name, **fields), "batchnorm", mapping="vmap")


@PURE_ROWS
def test_client_update_is_pure(name: str, fields: dict[str, Any], kind: str) -> None:
    method = make(name, **fields)
    task, data = make_task(kind), make_data(kind)
    engine = Engine(method, task, data, 3, 8, 1, "loop")
    capacity, ids = Abilities(method).ranked.capacity_of(0), alike(method)[:2]
    task, federation = engine.model(capacity), federation_of(method, data)
    server, common = method.init_server(task, federation), Abilities(method).announces.common(task, federation)
    rows = tree.stack([method.init_client(task, ClientInfo(i, capacity, key(3, "client", i), 3)) for i in ids])
    down = method.download(server, torch.tensor(ids), capacity, 1)
    before = tree.digest((server, common, rows, down.shared, down.own, task.init()))
    first = engine.update(capacity, 1, ids, rows, down.shared, down.own, common)
    engine.evaluate(capacity, 1, ids, rows, down.shared, down.own, common)
    second = engine.update(capacity, 1, ids, rows, down.shared, down.own, common)
    assert tree.digest((server, common, rows, down.shared, down.own, task.init())) == before
    assert_same((first.rows, first.sent), (second.rows, second.sent))


@FIRST_ROWS
def test_order_of_clients_does_not_matter_and_weights_are_those_declared(name: str, fields: dict[str, Any]) -> None:
    method = make(name, **fields)
    p, q, r, s = [0, 2, 3, 5] if len(alike(method)) == 7 else alike(method)[:4]
    _, a = one_round(method, "vmap", [p, q, r, s])
    _, b = one_round(method, "vmap", [s, p, r, q])
    back = torch.tensor([1, 3, 2, 0])
    assert_close((a.rows, a.sent), tree.take((b.rows, b.sent), back))
    n = [len(make_data().train[i]) for i in (p, q, r, s)]
    if Abilities(method).weight == "own":
        assert all(0 < w <= Abilities(method).weight_bound for w in a.sent.weight.tolist())
    else:
        assert a.sent.weight.tolist() == (n if Abilities(method).weight == "samples" else [1.0] * 4)


@FIRST_ROWS
def test_bystanders_keep_their_state_bit_for_bit(name: str, fields: dict[str, Any]) -> None:
    method = make(name, **fields)
    sim = run(method, rounds=1, participation=0.3)
    asked = sample(7, sim.settings, 3, 1)
    assert 0 < len(asked) < 7
    assert {i for store in sim.record.stores.values() for i in store.touched_ids()} <= set(asked)
    for i in set(range(7)) - set(asked):
        capacity = Abilities(method).ranked.capacity_of(i)
        task = Abilities(method).model(make_task(), capacity)
        assert_same(sim.record.row(i), method.init_client(task, ClientInfo(i, capacity, key(3, "client", i), 3)))


@ROWS
def test_counted_bytes_are_the_bytes_of_the_payload(name: str, fields: dict[str, Any]) -> None:
    method = make(name, **fields)
    start, sim = begun(method), run(method, rounds=1, participation=1.0)
    up, expected = 0, 0
    for capacity in {Abilities(method).ranked.capacity_of(i) for i in range(7)}:
        ids = [i for i in range(7) if Abilities(method).ranked.capacity_of(i) == capacity]
        _, answer = one_round(method, "loop", ids, coded=False)
        for k in range(len(ids)):
            sent = tree.take(answer.sent, k)
            up += written(sent.parts, method)
        down = method.download(start.record.server, torch.tensor(ids), capacity, 1)
        expected += len(ids) * written(down.shared, method)
        expected += sum(written(tree.take(down.own, k), method) for k in range(len(ids)))
    assert sim.result.bytes["up"] == up  # type: ignore[attr-defined]
    assert sim.result.bytes["down"] == expected  # type: ignore[attr-defined]
    assert sum(sim.result.bytes["names"]["up"].values()) == up  # type: ignore[attr-defined]
    assert sim.result.bytes["meta"] == 7 * 8  # type: ignore[attr-defined]


def written(payload: Tree, method: Method) -> int:
    """Bytes of a payload on the wire, its parts encoded as the method says."""
    codecs = Abilities(method).coded.codecs(1)
    coded = {k: tree.map(codecs[k].encode, part) if k in codecs else part for k, part in payload.items()}
    return payload_bytes(wire.pack(coded))


def payload_bytes(data: bytes) -> int:
    """Bytes behind the header of a packed tree."""
    (header,) = struct.unpack("<Q", data[:8])
    json.loads(data[8 : 8 + header])
    return len(data) - 8 - header


@FIRST_ROWS
def test_state_survives_save_and_load(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    method = make(name, **fields)
    rounds = 3 if name in LATE else 2
    whole = run(method, rounds=rounds)
    run(method, rounds=rounds - 1, out=tmp_path / "run")
    again = run(method, rounds=rounds, out=tmp_path / "run")
    assert again.record.resumed
    assert again.record.digest() == whole.record.digest()
    a, b = whole.result.to_json(), again.result.to_json()  # type: ignore[attr-defined]
    assert a["per_client"] == b["per_client"] and a["bytes"]["up"] == b["bytes"]["up"]
    assert [line["round"] for line in again.record.lines] == list(range(1, rounds + 1))


@FIRST_ROWS
def test_zero_step_size_is_a_fixed_point(name: str, fields: dict[str, Any]) -> None:
    if name in TRUNCATING:
        pytest.skip("what is sent is an approximation")
    known = keys_of(METHODS[name])
    method = make(name, **{**fields, **{k: 0.0 for k in known if k == "lr" or k.startswith("lr_")}})
    before = begun(method)
    after = run(method, rounds=2, participation=1.0)
    if getattr(method, "moves", False) or name in SUMMARISING:  # the server may hold other things; the models stay
        for i in range(7):
            computed = ["p", *(make_task().head if name == "pfedfda" else [])]
            a, b = (tree.without(sim.personal(i)[1], computed) for sim in (before, after))
            assert_close(a, b, 1e-7)
    else:
        # Flags and statistics of who was there are not parameters.
        counted = ("server/C", "server/optimizer/steps", "server/seen", "server/last")
        a, b = (
            {
                k: t
                for k, t in tree.items(state(sim))
                if t.dtype != torch.bool and not k.startswith(counted) and "/velocity/" not in k
            }
            for sim in (before, after)
        )
        assert_close(a, b)


@FIRST_ROWS
def test_training_lowers_the_loss(name: str, fields: dict[str, Any]) -> None:
    method = make(name, **fields)
    untuned = make(name, **fields | UNTUNED.get(name, {}))
    start = run(untuned, rounds=0, opposed=False).result.measures["loss"]["mean"]  # type: ignore[attr-defined]
    for rounds in (6, 15):  # most need no more than the first
        end = run(method, rounds=rounds, participation=1.0, opposed=False, epochs=2).result.measures["loss"]["mean"]  # type: ignore[attr-defined]
        if end < 0.8 * start:
            return
    assert end < 0.8 * start


@FIRST_ROWS
def test_dropped_answers_and_empty_rounds_are_survived(name: str, fields: dict[str, Any]) -> None:
    method = make(name, **fields)
    half = run(method, rounds=2, drop_rate=0.5)
    assert tree.all_finite(state(half))
    start = begun(method)
    drop = ("before", "after")[TABLE.index((name, fields)) % 2]
    none = run(method, rounds=1, drop_rate=1.0, drop=drop)
    assert_same(none.record.server, start.record.server)
    assert all(line["skipped"] and line["answered"] == 0 for line in none.record.lines)
    if drop == "before":
        assert_same(state(none), state(start))


@FIRST_ROWS
def test_flower_is_the_simulator(
    name: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flower_grid import assert_same_run, deployed

    monkeypatch.setattr(
        "fedspan.storage.tree_file.os.fsync", lambda _: None
    )  # what is compared here need not outlive a crash
    method, settings = make(name, **fields), {"participation": 1.0, "epochs": 1, "mapping": "loop"}
    server, grid = deployed(method, tmp_path, epochs=1)
    result = server.run()
    sim = Simulation(
        method,
        make_task(),
        make_data(clients=3),
        rounds=2,
        seed=5,
        settings=Settings(evaluate_every=100, batch_size=8, dtype="float64", workers=1, **settings),
    )
    expected = sim.run()
    assert [line["answered"] for line in server.record.lines] == [3, 3]
    assert_same_run(sim, expected, server, grid, result)


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -0.1}, "lr must be a finite number >= 0. Got -0.1"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"lr": float("inf")}, "lr must be a finite number"),
        ({"lr": "fast"}, "lr must be a number. Got 'fast'"),
        ({"lrr": 0.1}, "unknown key 'lrr'. Did you mean 'lr'?"),
        ({"momentum": 1.0}, "momentum must be a finite number >= 0 and < 1"),
        ({"optimizer": "adam"}, "optimizer must be one of 'sgd', 'adamw'"),
    ],
)
def test_bad_fields_are_refused_in_one_sentence(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        make(name, **fields)
    assert message in str(e.value)
    assert "\n" not in str(e.value)
