"""Experiment files: what is read is what is written, and whatever does not fit is refused in one sentence, at once."""

from __future__ import annotations

import json
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspan import config as config_module
from fedspan.cli.console import child, directory
from fedspan.cli.sweep import folder, split
from fedspan.config import RunConfig, assemble, from_dict, load_config, to_toml
from fedspan.errors import ConfigError
from fedspan.methods import METHODS
from fedspan.storage.toml import parse_value, write_toml

FULL = """
name = "trial"
seed = 3
rounds = 7
[data]
source = "digits"
limit = 900
[partition]
kind = "permuted-groups"
clients = 8
groups = 2
validation = 0.1
[model]
kind = "mlp"
hidden = [16]
[method]
name = "pfl-mf"
rank = 3
lr = 0.2
[methods.fedavg]
lr = 0.3
[methods.fedper]
personal_layers = ["head"]
[train]
participation = 0.5
batch_size = "full"
"""


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading data is a failure: faults must be found before."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("data were loaded")

    monkeypatch.setattr(config_module, "load", load)
    monkeypatch.setattr(config_module, "partition", load)
    config_module._source.cache_clear()


def read(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "exp.toml"
    path.write_text(text)
    return load_config(path, overrides)


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    start = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, *overrides)
    assert time.perf_counter() - start < 1.0
    said = str(caught.value)
    assert "\n" not in said and 10 < len(said) < 500
    return said


# ------------------------------------------------------------------------------------------------ round trip


def test_round_trip(tmp_path: Path) -> None:
    c = read(tmp_path, FULL)
    again = read(tmp_path, to_toml(c))
    assert again == c
    assert to_toml(again) == to_toml(c)


@pytest.mark.parametrize("name", METHODS)
def test_resolved_round_trip_is_complete(tmp_path: Path, name: str) -> None:
    text = (
        '[partition]\nkind = "permuted-groups"\nclients = 8\n[model]\nhidden = [4]\n' + f'[method]\nname = "{name}"\n'
    )
    c = read(tmp_path, text).resolve()
    again = read(tmp_path, to_toml(c))
    assert again == c and again.resolve() == c
    assert c.identity() == again.identity()
    written = tomllib.loads(to_toml(c))
    assert written["train"]["batch_size"] == 32 and written["partition"]["groups"] == 4
    assert written["method"]["lr"] == c.method["lr"]


values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), values, max_size=4))
@settings(max_examples=150, deadline=None)
def test_toml_writer(data: dict[str, Any]) -> None:
    assert json.dumps(tomllib.loads(write_toml(data)), sort_keys=True) == json.dumps(data, sort_keys=True)


# ------------------------------------------------------------------------------------------------ overrides


def test_overrides(tmp_path: Path) -> None:
    c = read(tmp_path, FULL, "method.rank=5", "train.participation=1.0", "seed=9", "name=other", "model.hidden=[8, 8]")
    assert (c.method["rank"], c.train.participation, c.seed, c.name) == (5, 1.0, 9, "other")
    assert c.model.options["hidden"] == [8, 8]
    assert parse_value("mnist") == "mnist" and parse_value("0.1") == 0.1 and parse_value("true") is True
    assert parse_value('"0.1"') == "0.1" and parse_value("a\nb = 1") == "a\nb = 1"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("method.v_scale=1", "1"),
        ('method.v_scale="1"', "1"),
        ("method.v_scale=1/n", "1/n"),
        ("method.rank=1", 1),
        ("methods.pfl-mf-paper.v_scale=1", "1"),
        ("name=2026", "2026"),
        ("name=2026-01-02", "2026-01-02"),
        ("data.source=7", "7"),
        ("data.columns.label=3", "3"),
        ("model.head=2", "2"),
        ("train.batch_size=4", 4),
        ("train.batch_size=full", "full"),
    ],
)
def test_overrides_are_read_by_the_type_of_their_field(tmp_path: Path, override: str, expected: object) -> None:
    text = FULL.replace("limit = 900\n", "").replace('name = "pfl-mf"', 'name = "pfl-mf-paper"')
    text = text if "v_scale" in override or "rank" in override else FULL
    found: Any = read(tmp_path, text, override).to_dict()
    for key in override.partition("=")[0].split("."):
        found = found[key]
    assert found == expected and type(found) is type(expected)


def test_the_type_of_a_key_that_only_a_compared_method_has(tmp_path: Path) -> None:
    config = read(tmp_path, "[method]\nname = 'fedavg'\n[methods.pfl-mf-paper]\nrank = 2\n", "method.v_scale=1")
    assert config.only("pfl-mf-paper").v_scale == "1"  # type: ignore[attr-defined]
    assert "must be one of '1', '1/n'. Got 2" in refused(
        tmp_path, "[method]\nname = 'pfl-mf-paper'\n", "method.v_scale=2"
    )
    assert "v_scale must be one of '1', '1/n'. Got 1" in refused(
        tmp_path, "[method]\nname = 'pfl-mf-paper'\nv_scale = 1\n"
    )


def test_override_of_method_wins_over_single_methods(tmp_path: Path) -> None:
    c = read(tmp_path, FULL, "method.lr=0.7")
    assert c.resolve("fedavg").method["lr"] == 0.7
    c = read(tmp_path, FULL, "method.lr=0.7", "methods.fedavg.lr=0.6")
    assert c.resolve("fedavg").method["lr"] == 0.6


@pytest.mark.parametrize("text", ["rank", "=3", "a.b.c.d=3", "method..rank=3", "meth od.rank=1", "seed.x=1"])
def test_bad_override(tmp_path: Path, text: str) -> None:
    refused(tmp_path, FULL, text)


def test_shared_keys_are_dropped_only_where_another_method_has_them(tmp_path: Path) -> None:
    c = read(tmp_path, FULL)
    assert c.fields_of("fedavg") == ({"lr": 0.3}, ["rank"])
    assert "rank" not in c.resolve("fedavg").method
    with pytest.raises(ConfigError, match="unknown key 'lamm'"):
        read(tmp_path, FULL, "method.lamm=1").resolve("ditto")
    alone = read(tmp_path, '[partition]\nclients = 4\n[method]\nname = "fedavg"\n')
    with pytest.raises(ConfigError, match="rank"):
        from_dict({**alone.to_dict(), "method": {"name": "fedavg", "rank": 2}})


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rouns=3", "'rounds'"),
        ("data.sorce=digits", "'source'"),
        ("partition.client=3", "clients"),
        ("partition.grops=3", "'groups'"),
        ("model.hiden=[3]", "'hidden'"),
        ("model.classes=3", "comes from the data"),
        ("model.input_shape=[3]", "comes from the data"),
        ("method.rnk=3", "'rank'"),
        ("methods.fedavgg.lr=1", "'fedavg'"),
        ("train.participaton=0.5", "'participation'"),
        ("method.name=fedavgg", "'fedavg'"),
        ("model.kind=mpl", "'mlp'"),
        ("partition.kind=irichlet", "'dirichlet'"),
    ],
)
def test_unknown_keys_name_the_nearest(tmp_path: Path, no_data: None, override: str, said: str) -> None:
    assert said in refused(tmp_path, FULL, override)


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1", "seed=1.5", "seed=true", "rounds=-1", "rounds=ten", "rounds=1e308", "seed=99999999999999999999",
        "name=[3]", "data.source=[3]", "data.size=0", "data.limit=-5", "data.limit=1.5", "data.columns=3",
        "partition.clients=0", "partition.clients=-3", "partition.clients=2.5", "partition.clients=1",
        "partition.clients=1798", "partition.groups=0", "partition.groups=9", "partition.test=1.0",
        "partition.validation=-0.1", "partition.validation=nan", "partition.split=both",
        "model.hidden=[0]", "model.hidden=3", "model.hidden=[[1]]", "model.kind=3", "model.head=[3]",
        "method.rank=0", "method.rank=-1", "method.rank=2.5", "method.rank='3'", "method.rank=true",
        "method.lr=nan", "method.lr=inf", "method.lr=1e308", "method.lr=-0.1", "method.lr=fast", "method.name=[1]",
        "method={}", "method=3", "methods=3", "methods.fedavg=3", "train=3", "method.wire=both",
        "train.participation=0", "train.participation=0.0", "train.participation=1.5", "train.participation=-0.1",
        "train.participation=nan", "train.batch_size=0", "train.batch_size=1.5", "train.batch_size=half",
        "train.epochs=-1", "train.drop_rate=2.0", "train.mapping=fast", "train.dtype=float16", "train.dtype=bfloat16",
        "train.chunk=0", "train.workers=0", "seed=1979-05-27", "method.lr=[0.1]", "methods.oracle.lr=inf",
    ],
)  # fmt: skip
def test_wrong_values(tmp_path: Path, no_data: None, override: str) -> None:
    if override == "method={}":
        read(tmp_path, FULL, override)  # an empty section is fedavg with its defaults
        return
    said = refused(tmp_path, FULL, override)
    assert override.partition("=")[0].split(".")[-1] in said


def test_a_number_of_rounds_may_be_a_share_of_the_runs() -> None:
    def cfl(rounds: int, **fields: Any) -> dict[str, Any]:
        return from_dict({"rounds": rounds, "method": {"name": "cfl", **fields}}).resolve().method

    assert [cfl(n, start_round="20%")["start_round"] for n in (15, 50, 1)] == [3, 10, 1]
    assert (
        from_dict({"rounds": 40}, ["method.name=cfl", "method.start_round=12.5%"]).resolve().method["start_round"] == 5
    )
    for wrong in ({"start_round": "many"}, {"lr": "20%"}, {"start_round": "-5%"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            cfl(20, **wrong)


def test_oracle_needs_groups(tmp_path: Path, no_data: None) -> None:
    assert "groups" in refused(tmp_path, '[partition]\nkind = "iid"\nclients = 4\n[method]\nname = "oracle"\n')


def test_validation_must_be_there_to_be_evaluated(tmp_path: Path, no_data: None) -> None:
    refused(tmp_path, FULL, "partition.validation=0.0", "train.evaluate_part=validation")


def test_a_model_that_does_not_fit_is_found_before_loading(tmp_path: Path, no_data: None) -> None:
    refused(tmp_path, FULL, "model={kind = 'cnn'}", "data.size=1")


@pytest.mark.parametrize(
    "raw",
    [
        b"x" * (10 << 20),
        b"a = 1\n" * (2 << 20),
        b"a = " + b"[" * 100_000,
        b"a = " + b"[" * 100_000 + b"]" * 100_000,
        b".".join([b"a"] * 400_000) + b" = 1",
        b"[" + b".".join([b"a"] * 400_000) + b"]",
        b"a = {" + b"b = {" * 5_000,
        b"[a.b.c.d.e.f]\nx = 1",
        b"\xff\xfe",
        b"\0",
        b"a = !!python/object:os.system",
        b"name = 'x'\nname = 'y'",
        b"seed = " + b"9" * 10_000,
        b"[[method]]\nname = 'fedavg'",
    ],
    ids=lambda raw: raw[:12].decode("latin1").strip(),
)
def test_hostile_files(tmp_path: Path, no_data: None, raw: bytes) -> None:
    path = tmp_path / "exp.toml"
    path.write_bytes(raw)
    start = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert time.perf_counter() - start < 1.0
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["missing.toml", ".", "a\0b.toml"])
def test_unreadable_files(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)


# ------------------------------------------------------------------------------------------------ names


BAD = ["../x", "/etc/passwd", "a\0b", "a" * 300, "ѕeed", "ａ", "con", "NUL.txt", "a/b", "a\\b", "", ".", "..", ".x",
       "x.", "-x", "a b", "a\n", "~", "$HOME", "%2e%2e", "com1"]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_names(name: str) -> None:
    with pytest.raises(ConfigError):
        from_dict({"name": name})


@given(st.one_of(st.text(max_size=120), st.sampled_from(BAD), st.text("./\\~ab\0=,-+", max_size=12)))
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_written_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    root = tmp_path / "root"
    (root / "runs").mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(root)
    for make in (
        lambda: directory(None, name, "0"),
        lambda: child(Path("runs"), name),
        lambda: child(Path("runs"), folder(name)),
    ):
        try:
            made = make()
        except ConfigError:
            continue
        made.mkdir(parents=True, exist_ok=True)
        assert made.resolve().parent == (root / "runs").resolve()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root"]
    assert sorted(p.name for p in root.iterdir()) == ["runs"]


def test_symbolic_link_out_of_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root" / "runs").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root" / "runs" / "x-0").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "root")
    with pytest.raises(ConfigError, match="inside"):
        directory(None, "x", "0")


def test_sweep_values() -> None:
    assert split("method.rank=1,5,10") == ("method.rank", ["1", "5", "10"])
    assert split("model.hidden=[1,2],[3]") == ("model.hidden", ["[1,2]", "[3]"])
    assert split("seed=0,0") == ("seed", ["0"])
    for bad in ("rank", "rank=", "rank= ,"):
        with pytest.raises(ConfigError):
            split(bad)
    assert folder("method.rank=1,seed=0") == "method.rank=1,seed=0"
    assert folder("data.source=../x") != folder("data.source=..\\x")


# ------------------------------------------------------------------------------------------------ assembling


def test_assemble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = config_module.load
    monkeypatch.setattr(config_module, "load", lambda *a, **k: calls.append(1) or real(*a, **k))
    config_module._source.cache_clear()
    c = read(tmp_path, FULL, "train.dtype=float64")
    for name in ("fedavg", "pfl-mf"):
        method, task, data = assemble(c.resolve(name))
        assert type(method) is METHODS[name]
        assert data.clients == 8 and data.classes == 10
        assert {str(p.dtype) for p in task.init().values()} == {"torch.float64"}
    assert len(calls) == 1
    first, second = (assemble(c.resolve())[1].init() for _ in range(2))
    assert all(bool((first[k] == second[k]).all()) for k in first)
    other = assemble(c.resolve(seed=4))[1].init()
    assert any(bool((first[k] != other[k]).any()) for k in first)
