"""Asynchronous rounds: who trains when, what late uploads count, and that a run repeats to the same bits."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import assert_close, assert_same, call, failing, make_data, make_task, method_of
from fedspan.config import load_config
from fedspan.data.federated import FederatedData
from fedspan.deploy.experiment import deployable
from fedspan.errors import CheckpointError, ConfigError, PromiseError
from fedspan.learn.task import Task
from fedspan.method import Capacity, ClientInfo, Down, Federation, Method, Round, Sent, Visit
from fedspan.methods import METHODS, Ditto, FedAvg, FedLoRU, FedRep, PflMf
from fedspan.report import write_page
from fedspan.report.runs import load_run
from fedspan.simulation.asynchronous import Asynchronous
from fedspan.simulation.asynchronous.asynchronous_transport import AsynchronousTransport
from fedspan.simulation.asynchronous.late_uploads import changes, on_top_of
from fedspan.simulation.asynchronous.timeline import Timeline
from fedspan.simulation.defence import Defence
from fedspan.simulation.devices import Devices
from fedspan.simulation.evaluation import to_target
from fedspan.simulation.settings import Settings, sample
from fedspan.simulation.simulator import Simulation, simulate
from fedspan.studies.theory import update_rank
from fedspan.tree import Outer, Tree

ROOT = Path(__file__).parents[2]
TRAIN = Settings(batch_size=4, workers=1, precision="float64", evaluate_every=2, mapping="loop")
ALIKE = Devices(gflops=(0.01,), mbps=(1.0,))
TENFOLD = Devices(gflops=(0.01, 0.001, 0.004), mbps=(1.0,))
LATE = Asynchronous(buffer=2, concurrency=4)


def simulation(method: Method, rounds: int = 6, settings: Settings = TRAIN, **about: Any) -> Simulation:
    """A run on devices of tenfold speeds, unless something else is said."""
    given: dict[str, Any] = {"devices": TENFOLD, "asynchronous": LATE} | about
    data = given.pop("data", None) or make_data()
    return Simulation(method, given.pop("task", None) or make_task(), data, rounds=rounds, settings=settings, **given)


def state(sim: Simulation) -> Tree:
    """All that a run has learnt."""
    rows = {str(i): sim.record.row(i) for i in range(sim.data.clients)}
    return {"server": sim.record.server, "rows": rows, "common": sim.record.common}


def curve(sim: Simulation) -> list[dict[str, Any]]:
    """The lines of a run without the time this machine took."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in sim.record.lines]


# ------------------------------------------------------------------------------------------------ a run by hand


@dataclass(frozen=True, kw_only=True)
class Push(Method):
    """Every client moves the server's number by 2^id, and counts how often it has trained."""

    def init_server(self, task: Task, federation: Federation) -> Tree:
        return {"m": torch.zeros((), dtype=torch.float64)}

    def init_client(self, task: Task, who: ClientInfo) -> Tree:
        return {"move": torch.tensor(2.0**who.id, dtype=torch.float64), "times": torch.tensor(0)}

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"m": server["m"]})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return {**client, "times": client["times"] + 1}, Sent(visit.examples, {"m": down["m"] + client["move"]})

    def server_update(self, server: Tree, round: Round) -> Tree:
        return {"m": round.mean["m"]}

    def personal(self, task: Task, client: Tree, down: Tree, visit: Visit) -> Tree:
        return task.init()


def three_clients() -> FederatedData:
    """Three clients with 3, 5 and 2 examples."""
    x, y = torch.zeros(10, 5, dtype=torch.float64), torch.arange(10) % 3
    own = [np.arange(0, 3), np.arange(3, 8), np.arange(8, 10)]
    return FederatedData(x, y, own, own, classes=3)


def pushed(monkeypatch: pytest.MonkeyPatch, rule: Asynchronous, rounds: int = 3) -> Simulation:
    """Three clients that take 1, 2.5 and 7 seconds."""
    monkeypatch.setattr(AsynchronousTransport, "_timed", lambda self, i: ((1.0, 2.5, 7.0)[i], 1.0))
    return simulation(Push(), rounds, data=three_clients(), asynchronous=rule)


def test_late_uploads_count_as_a_computation_by_hand_says(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = pushed(monkeypatch, Asynchronous(buffer=2, concurrency=3))
    sim.run()
    # Clients 0 and 1 make the steps at 2.5 and 5 s; at 6 and 7 s come 0, and 2, which began before the first step.
    m = 0.0
    for _ in range(2):
        m += (3 * 1 + 5 * 2) / (3 + 5)
    late = 2 * (1 + 2) ** -0.5
    m += (3 * 1 + late * 4) / (3 + late)
    assert float(sim.record.server["m"]) == pytest.approx(m, abs=1e-14)
    assert [line["clock"]["total"] for line in sim.record.lines] == [2.5, 5.0, 7.0]
    assert [line["clock"]["slowest"] for line in sim.record.lines] == [1, 1, 2]
    assert [line["sampled"] for line in sim.record.lines] == [3, 2, 2]
    assert [line["staleness"]["mean"] for line in sim.record.lines] == [0.0, 0.0, 1.0]
    assert sim.record.lines[2]["staleness"] == {"mean": 1.0, "max": 2, "uploads": {"0": 1, "2": 1}, "thrown_away": 0}
    # Client 1 still trains: it keeps the state it began with, by which it would be judged.
    assert [int(sim.record.row(i)["times"]) for i in range(3)] == [3, 2, 1]
    assert list(sim.record.flights) == ["1"] and int(sim.record.flights["1"]["row"]["times"]) == 3
    assert sim.record.progress.bytes.by_name("up") == {"m": 6 * 8}  # type: ignore[arg-type]
    assert sim.record.progress.bytes.by_name("down") == {"m": 7 * 8}  # type: ignore[arg-type]


def test_an_upload_that_is_too_late_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = pushed(monkeypatch, Asynchronous(buffer=2, concurrency=3, max_staleness=1))
    sim.run()
    assert float(sim.record.server["m"]) == pytest.approx(3 * 13 / 8)
    last = sim.record.lines[-1]
    assert last["clock"]["total"] == 7.5 and last["staleness"]["thrown_away"] == 1 and last["answered"] == 2
    assert int(sim.record.row(2)["times"]) == 1  # it has trained, and keeps what it learnt
    assert last["bytes"]["up"] == 3 * 8


def test_age_may_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = pushed(monkeypatch, Asynchronous(buffer=2, concurrency=3, staleness_exponent=0.0))
    sim.run()
    assert float(sim.record.server["m"]) == pytest.approx(2 * 13 / 8 + (3 * 1 + 2 * 4) / 5)


# ------------------------------------------------------------------------------------------------ who trains when


def events(rule: Asynchronous, clients: int, steps: int, seconds: Callable[[int], float]) -> list[Any]:
    line, found = Timeline(), []
    for t in range(1, steps + 1):
        found.append(line.until_step(t, rule, rule.concurrency or 1, clients, 7, seconds))
        line = found[-1].after
    return found


@pytest.mark.parametrize("rule", [LATE, Asynchronous(buffer=9, concurrency=3), Asynchronous(buffer=3, concurrency=9)])
@pytest.mark.parametrize("oldest", [None, 0, 2])
def test_nobody_trains_twice_at_once_and_no_place_stays_empty(rule: Asynchronous, oldest: int | None) -> None:
    rule, trains, now, filled = replace(rule, max_staleness=oldest), set[int](), 0.0, 0
    for t, e in enumerate(events(rule, 9, 60, lambda i: 1.0 + (i % 4) * 2.3), 1):
        arriving = [f.client for f in (*e.arrived, *e.late)]
        assert not trains & {f.client for f in e.started}  # who trains is not drawn
        assert len({f.client for f in e.started}) == len(e.started)  # (round, client) is a key: once in a round
        trains = (trains | {f.client for f in e.started}) - set(arriving)
        assert trains == {f.client for f in e.after.flights} and len(trains) <= (rule.concurrency or 0)
        assert len(e.arrived) == rule.buffer == len({f.client for f in e.arrived})
        assert oldest is None or all(t - f.round <= oldest for f in e.arrived)
        assert now <= e.after.now == e.arrived[-1].arrives
        # Up to the last moment a place was empty only because nobody was left who had not sent anything.
        last = [f.client for f in (*e.arrived, *e.late) if f.arrives == e.after.now]
        full = min(rule.concurrency or 0, 9 - (len(arriving) - len(last)))
        assert len(trains) + len(last) == full or e.after.now == now
        filled += e.after.now > now
        now = e.after.now
    assert filled > 30


def test_slow_clients_are_drawn_too_and_are_late() -> None:
    found = events(Asynchronous(buffer=3, concurrency=6), 100, 300, lambda i: 10.0 if i % 2 else 1.0)
    stale = {0: list[int](), 1: list[int]()}
    for t, e in enumerate(found, 1):
        for f in e.arrived:
            stale[f.client % 2].append(t - f.round)
    assert np.mean(stale[0]) < 1 and np.mean(stale[1]) > 5 * np.mean(stale[0])
    assert 0.8 < len(stale[1]) / len(stale[0]) < 1.1  # drawn alike, while they do not train


def test_clients_that_end_together_are_followed_by_a_synchronous_draw() -> None:
    found = events(Asynchronous(buffer=3, concurrency=3), 9, 5, lambda _: 1.0)
    settings = Settings(participation=3 / 9)
    assert [[f.client for f in e.started] for e in found] == [sample(9, settings, 7, t) for t in range(1, 6)]


# ------------------------------------------------------------------------------------------------ the synchronous limit


def refusal(name: str) -> str:
    """Why a method with its defaults cannot run asynchronously; nothing if it can."""
    try:
        simulation(METHODS[name](), data=replace(make_data(), groups=torch.arange(7) % 2))
    except ConfigError as e:
        return str(e)
    return ""


REFUSED = {name: why for name in METHODS if (why := refusal(name))}
ABLE = [name for name in METHODS if name not in REFUSED]


@pytest.mark.parametrize("name", ABLE)
def test_equal_devices_and_a_buffer_of_all_who_train_are_synchronous_rounds(name: str) -> None:
    """Three of seven clients, equal in examples and speed: whoever trains ends at the same moment."""
    about: dict[str, Any] = {"data": make_data(equal=True), "devices": ALIKE}
    settings = replace(TRAIN, participation=3 / 7)
    rounds = simulation(METHODS[name](), 3, settings, **about, asynchronous=None)
    free = simulation(METHODS[name](), 3, settings, **about, asynchronous=Asynchronous(buffer=3))
    rounds.run()
    free.run()
    assert_close(state(free), state(rounds))
    for a, b in zip(rounds.record.lines, free.record.lines):
        assert a["bytes"] == b["bytes"] and b["staleness"]["max"] == 0
        assert b["clock"]["total"] == pytest.approx(a["clock"]["total"], rel=1e-12)
        assert b["clock"]["flops"] == a["clock"]["flops"]


@pytest.mark.parametrize("method", [FedAvg(), Ditto(), FedRep(), PflMf(rank=2)], ids=lambda m: type(m).__name__)
def test_a_buffer_of_all_clients_is_synchronous_whatever_their_speeds(method: Method) -> None:
    free = simulation(method, 4, asynchronous=Asynchronous(buffer=7))
    rounds = simulation(method, 4, asynchronous=None)
    free.run()
    rounds.run()
    assert_close(state(free), state(rounds))
    assert free.record.lines[-1]["clock"]["total"] == pytest.approx(rounds.record.lines[-1]["clock"]["total"])


def two_kinds() -> Task:
    """Models of two depths with heads of one shape and name."""
    torch.manual_seed(0)
    bodies = {"flat": nn.Linear(5, 6), "deep": nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6))}
    nets = {k: nn.Sequential(OrderedDict(body=body, act=nn.ReLU(), head=nn.Linear(6, 3))) for k, body in bodies.items()}
    return Task.family({k: Task(net, dtype=torch.float64) for k, net in nets.items()}, ("flat", "deep"))


def test_clients_with_models_of_two_kinds_share_their_heads_as_in_rounds() -> None:
    method = METHODS["lg-fedavg"]()
    free = simulation(method, 4, task=two_kinds(), asynchronous=Asynchronous(buffer=7))
    rounds = simulation(method, 4, task=two_kinds(), asynchronous=None)
    free.run()
    rounds.run()
    assert_close(state(free), state(rounds))
    late = [simulation(method, 6, task=two_kinds()) for _ in range(2)]
    assert late[0].run().digest == late[1].run().digest
    assert max(line["staleness"]["max"] for line in late[0].record.lines) >= 1


# ------------------------------------------------------------------------------------------------ replay


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrep", "pfl-mf", "amht-lrs", "pfedfda"])
def test_a_run_repeats_to_the_same_bits(name: str) -> None:
    one, two = simulation(METHODS[name](), 8), simulation(METHODS[name](), 8)
    assert one.run().digest == two.run().digest
    assert curve(one) == curve(two)
    assert max(line["staleness"]["max"] for line in one.record.lines) >= 2
    assert_same(one.record.flights, two.record.flights)
    assert simulation(METHODS[name](), 8, seed=1).run().digest != one.record.digest()


@pytest.mark.parametrize("mapping", ["loop", "vmap", "folded"])
def test_workers_and_mapping_change_nothing(mapping: Any) -> None:
    found = []
    for workers in (1, 2):
        sim = simulation(Ditto(), 5, replace(TRAIN, mapping=mapping, workers=workers, chunk=2))
        found.append((sim.run().digest, curve(sim)))
    assert found[0] == found[1]
    plain = simulation(Ditto(), 5)
    plain.run()
    assert_close(state(sim), state(plain))


def test_states_on_disk_change_nothing(tmp_path: Path) -> None:
    def run(**settings: Any) -> Simulation:
        torch.manual_seed(0)
        wide = Task(nn.Sequential(nn.Linear(5, 4000), nn.ReLU(), nn.Linear(4000, 3)), dtype=torch.float64)
        sim = simulation(Ditto(), 4, replace(TRAIN, **settings), task=wide, out=tmp_path / str(settings))
        sim.run()
        return sim

    here, there = run(), run(memory_mb=1)
    assert there.record.stores[None].on_disk and not here.record.stores[None].on_disk
    assert here.record.digest() == there.record.digest()


@pytest.mark.long
def test_a_run_of_spawned_workers_is_the_same() -> None:
    there = simulation(FedRep(), 3, replace(TRAIN, workers=2, start_method="spawn"))
    assert there.run().digest == simulation(FedRep(), 3).run().digest


@pytest.mark.parametrize("name", ["fedavg", "ditto", "pfl-mf"])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path, name: str) -> None:
    whole = simulation(METHODS[name](), 9, out=tmp_path / "whole")
    expected = whole.run().digest
    for stop in (1, 4, 7):  # each time by another process's rules: only the files are left
        simulation(METHODS[name](), stop, out=tmp_path / "parts").run()
        held = simulation(METHODS[name](), stop, out=tmp_path / "parts", read_only=True)
        assert held.record.flights
    parts = simulation(METHODS[name](), 9, out=tmp_path / "parts")
    assert parts.run().digest == expected
    assert [line["clock"] for line in parts.record.lines] == [line["clock"] for line in whole.record.lines]
    assert_same(parts.record.flights, whole.record.flights)


EXPERIMENT = """
name = "late"
rounds = 8
[data]
source = "digits"
limit = 200
[partition]
kind = "iid"
clients = 8
[model]
kind = "mlp"
hidden = [8]
[method]
name = "ditto"
[train]
checkpoint_seconds = 0.0
workers = 1
evaluate_every = 4
[devices]
gflops = [0.01, 0.001, 0.004]
mbps = [1.0]
[asynchronous]
buffer = 2
concurrency = 5
"""


def killed(fault: str, run: Callable[[], object]) -> None:
    """Run something in a child that is killed (SIGKILL) at a point of a save."""
    child = os.fork()
    if child == 0:
        os.environ["FEDSPAN_FAULT"] = fault
        try:
            run()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "fault", ["after-tmp-write@server-5.safetensors", "between-rename-and-manifest@manifest-5.json"]
)
def test_a_run_that_was_killed_goes_on_with_the_same_bits(tmp_path: Path, fault: str) -> None:
    settings = replace(TRAIN, checkpoint_seconds=0.0)
    whole = simulation(Ditto(), 8, settings, out=tmp_path / "whole")
    expected = whole.run().digest
    killed(fault, lambda: simulation(Ditto(), 8, settings, out=tmp_path / "killed").run())
    again = simulation(Ditto(), 8, settings, out=tmp_path / "killed")
    assert again.record.progress.round == 4 and len(again.record.flights) == 3
    assert again.run().digest == expected
    assert curve(again) == curve(whole)


def test_commands_and_the_report_know_asynchronous_runs(tmp_path: Path) -> None:
    file, out = tmp_path / "late.toml", tmp_path / "run"
    file.write_text(EXPERIMENT, encoding="utf-8")
    assert "s on devices, staleness" in call("run", str(file), "--out", str(out)).output
    loaded = load_run(out)
    write_page([loaded], tmp_path / "page.html", "late")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "over time on devices" in page and "until enough uploads have arrived" in page
    found = to_target(loaded.lines, 0.0)
    assert found is not None and found["clock"] == loaded.lines[3]["clock"]["total"]
    # What it was given is written out whole, and read again: more rounds go on, another buffer is another run.
    assert load_config(out / "config.toml").asynchronous == Asynchronous(buffer=2, concurrency=5)
    assert "8 rounds" in call("run", str(out / "config.toml"), "--out", str(out)).output
    assert "asynchronous.buffer is 2 there and 3 here" in failing(
        "run", str(file), "asynchronous.buffer=3", "--out", str(out)
    )


def test_the_directory_of_another_rule_or_of_synchronous_rounds_is_refused(tmp_path: Path) -> None:
    simulation(FedAvg(), 2, out=tmp_path / "run").run()
    other = Asynchronous(buffer=3, concurrency=4)
    for about in ({"asynchronous": other}, {"asynchronous": None}, {"devices": ALIKE}):
        with pytest.raises(CheckpointError, match="another configuration"):
            simulation(FedAvg(), 4, out=tmp_path / "run", **about)


def test_a_checkpoint_without_its_uploads_is_refused() -> None:
    held = Timeline().until_step(1, LATE, 4, 7, 0, lambda i: 1.0 + i).after.to_json()
    assert Timeline.from_json(held, dict.fromkeys(str(f["client"]) for f in held["flights"])).to_json() == held
    with pytest.raises(CheckpointError, match="uploads on their way are missing"):
        Timeline.from_json(held, {})
    with pytest.raises(CheckpointError, match="damaged"):
        Timeline.from_json({"now": 0.0}, {})


def test_a_round_that_diverges_is_taken_back_with_its_flights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halved rates repeat the round from the same clients, times and uploads on their way."""
    settings = replace(TRAIN, on_divergence="halve")
    sim = simulation(method_of(FedAvg, lr=0.1), 5, settings)
    plain = simulation(method_of(FedAvg, lr=0.1), 5)
    plain.run()
    real, faults = AsynchronousTransport._not_finite, [3]

    def once(self: AsynchronousTransport, ids: list[int], answer: Any) -> list[int]:
        if self.record.progress.round == 2 and faults:
            return faults
        return real(self, ids, answer)

    monkeypatch.setattr(AsynchronousTransport, "_not_finite", once)
    monkeypatch.setattr(type(sim), "_repeat_with_half", lambda self, why: faults.clear())
    sim.run()
    assert sim.record.digest() == plain.record.digest() and curve(sim) == curve(plain)


def test_other_studies_replay_an_asynchronous_run() -> None:
    sim = simulation(method_of(FedLoRU, tau=None, rank=1), 4)
    sim.run()
    ranks = update_rank.run(sim).numbers["layers"]
    assert all(layer["ranks"][-1] >= 1 for layer in ranks.values())


# ------------------------------------------------------------------------------------------------ rebasing


def test_a_late_upload_is_a_change_of_what_was_downloaded() -> None:
    then = {"theta": {"w": torch.tensor([1.0, 2.0]), "bn.running_var": torch.tensor([3.0])}, "C": torch.ones(2)}
    now = {"theta": {"w": torch.tensor([10.0, 20.0]), "bn.running_var": torch.tensor([7.0])}, "C": torch.zeros(2)}
    sent = {
        "theta": {"w": torch.tensor([1.5, 1.0]), "bn.running_var": torch.tensor([4.0])},
        "M": Outer(torch.ones(2), torch.ones(3)),
        "C": torch.full((2,), 5.0),
        "G": torch.ones(4),
    }
    change, taken = changes(sent, then, ("C",))
    found, added = on_top_of(change, now, ("C",))
    assert taken == added == ["theta/w"]
    assert found["theta"]["w"].tolist() == [10.5, 19.0]
    # Running statistics, estimates and what the download does not have are taken as they came.
    assert found["theta"]["bn.running_var"].tolist() == [4.0] and found["C"].tolist() == [5.0, 5.0]
    assert found["M"] is sent["M"] and found["G"] is sent["G"]


def test_batch_normalisation_keeps_its_variances_positive() -> None:
    data, settings = make_data("batchnorm"), replace(TRAIN, batch_size=4)
    sim = simulation(FedAvg(), 12, settings, data=data, task=make_task("batchnorm"))
    sim.run()
    theta = sim.record.server["theta"]
    assert max(line["staleness"]["max"] for line in sim.record.lines) >= 2
    assert all(bool((v > 0).all()) for k, v in theta.items() if k.endswith("running_var"))


# ------------------------------------------------------------------------------------------------ refusals


def test_a_refusal_is_one_sentence() -> None:
    form = r"\w+: it cannot run asynchronously, as [^.]+\. Leave out \[asynchronous\]\."
    assert all(re.fullmatch(form, why) for why in REFUSED.values()) and len(REFUSED) > 10


def test_the_page_lists_the_methods_that_run_asynchronously() -> None:
    page = (ROOT / "docs" / "how-to" / "asynchronous.md").read_text(encoding="utf-8")
    listed = page.split("<!-- methods -->")[1].split("\n\n")[0]
    assert re.findall(r"`([\w-]+)`", listed) == ABLE


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (METHODS["fedhm"](), "ranks of their own"),
        (METHODS["ifca"](), "no changes of the download's parts"),
        (METHODS["cfl"](), "every client's own delta"),
        (METHODS["fedkd"](), "parts are coded"),
        (method_of(FedLoRU, tau=2), "hear its announcements"),
        (method_of(PflMf, gauge_every=2), "hear its announcements"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Method) else None,
)
def test_methods_whose_late_uploads_mean_nothing_are_refused(method: Method, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^{type(method).__name__}: it cannot run asynchronously, as .*{why}"):
        simulation(method)


@dataclass(frozen=True, kw_only=True)
class Weighed(Push):
    """Sends weights of their own."""

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return client, Sent(visit.examples, {"m": down["m"]}, weights={"m": visit.examples})


@dataclass(frozen=True, kw_only=True)
class Growing(Push):
    """Whose server's number becomes a vector in the second round."""

    def download(self, server: Tree, ids: Tensor, capacity: Capacity, round: int) -> Down:
        return Down(shared={"m": server["m"] if round == 1 else server["m"].expand(2)})

    def client_update(self, task: Task, client: Tree, down: Tree, visit: Visit) -> tuple[Tree, Sent]:
        return client, Sent(visit.examples, {"m": down["m"].sum()})


def test_weights_of_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match="as m have weights of their own"):
        simulation(Weighed(), data=three_clients(), asynchronous=Asynchronous(buffer=2))


def test_a_download_that_changes_its_form_is_a_broken_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsynchronousTransport, "_timed", lambda self, i: ((1.0, 2.5, 7.0)[i], 1.0))
    sim = simulation(Growing(), 4, data=three_clients(), asynchronous=Asynchronous(buffer=2, concurrency=3))
    with pytest.raises(PromiseError, match=r"Growing: download must keep names and shapes .* round 3 .* round 1"):
        sim.run()


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"devices": None}, "Asynchronous: devices must have gflops and mbps"),
        ({"devices": Devices(memory_mb=(1.0,))}, "Asynchronous: devices must have gflops and mbps"),
        ({"asynchronous": Asynchronous(buffer=8)}, "buffer must be at most the number of clients, 7. Got 8"),
        ({"asynchronous": Asynchronous(buffer=1, concurrency=9)}, "concurrency must be at most .* 7. Got 9"),
        ({"settings": replace(TRAIN, drop_rate=0.1)}, "train.drop_rate must be 0. Got 0.1"),
        ({"settings": replace(TRAIN, sampling="bernoulli")}, "train.sampling must be 'fraction'"),
        ({"defence": Defence(rule="clip")}, "defence.rule must be 'none'"),
        ({"evaluate": {"models": ("received", "own")}}, "evaluate.models must not have 'own'"),
    ],
)
def test_what_does_not_go_together_is_refused(about: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        simulation(FedAvg(), **about)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("buffer = 0", "Asynchronous: buffer must be an integer >= 1. Got 0."),
        ("concurrency = 0", "Asynchronous: concurrency must be an integer >= 1. Got 0."),
        ("staleness_exponent = -1.0", "Asynchronous: staleness_exponent must be"),
        ("max_staleness = -1", "Asynchronous: max_staleness must be an integer >= 0"),
        ("bufer = 3", "Asynchronous: unknown"),
    ],
)
def test_bad_keys_are_refused_in_one_sentence(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "late.toml"
    file.write_text(EXPERIMENT.split("[asynchronous]")[0] + f"[asynchronous]\n{text}\n", encoding="utf-8")
    assert why in failing("run", str(file), "--out", str(tmp_path / "run"))


def test_a_file_without_devices_and_a_deployment_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "late.toml"
    file.write_text(EXPERIMENT, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^Deploy: asynchronous rounds are for simulations"):
        deployable(load_config(file))
    assert "attack: rounds must be synchronous" in failing("attack", str(file))
    file.write_text(
        EXPERIMENT.replace("[devices]\ngflops = [0.01, 0.001, 0.004]\nmbps = [1.0]\n", ""), encoding="utf-8"
    )
    assert "add the section [devices]" in failing("run", str(file))
    file.write_text("asynchronous = 3\n", encoding="utf-8")
    assert "asynchronous must be a section" in failing("run", str(file))


def test_simulate_takes_devices_and_the_rule() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    pairs = [(torch.randn(8, 5), torch.arange(8) % 3) for _ in range(4)]
    rule = Asynchronous(buffer=2, concurrency=3)
    result = simulate(FedAvg(), net, pairs, rounds=4, devices=TENFOLD, asynchronous=rule, workers=1)
    assert result.curve[-1]["clock"]["total"] > 0 and "staleness" in result.curve[-1]


# ------------------------------------------------------------------------------------------------ kept figures


def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "asynchronous" / "digits.json").read_text(encoding="utf-8"))
    return found


def experiment() -> Any:
    """`experiments/asynchronous/run.py` as a module."""
    spec = importlib.util.spec_from_file_location("measured", ROOT / "experiments" / "asynchronous" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_what_was_measured() -> None:
    page = (ROOT / "docs" / "how-to" / "asynchronous.md").read_text(encoding="utf-8")
    found = kept()
    assert "\n".join(experiment().table(found)) in page
    assert found["reported"] == [200, 201, 202] and not {*found["development"]} & {*found["reported"]}
    for row in found["rows"]:
        assert {len(v) for v in row["tried"].values()} == {3} and len(row["tried"]) == 3


@pytest.mark.slow
def test_a_measured_run_can_be_repeated() -> None:
    """When uploads come is the same on every machine; the last bits of an accuracy may not be."""
    row = next(r for r in kept()["rows"] if (r["method"], r["mode"]) == ("fedavg", "asynchronous"))
    measured = experiment()
    result = measured.run("fedavg", "asynchronous", row["lr"], 200, "test")
    assert round(float(np.mean([line["staleness"]["mean"] for line in result.curve])), 3) == row["staleness"][0]
    for target, seconds in row["seconds"].items():
        assert measured.seconds_to(result, float(target)) == pytest.approx(seconds[0], rel=0.3)
