"""What a node's owner decides: node.toml is asked before anything of a server's text is looked up."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flower_grid import LocalGrid

from conftest import failing
from fedspan import ConfigError, FedspanError
from fedspan.deploy.envelope import Facts
from fedspan.deploy.experiment import DataKind, read_experiment
from fedspan.deploy.local_grid import AT_ONCE, FIRST_NODE
from fedspan.deploy.node import service as service_module
from fedspan.deploy.node.owner_policy import OwnerPolicy, named_by, read_policy, write_template
from fedspan.deploy.node.service import Service
from fedspan.deploy.operations.keys import make_keys
from fedspan.deploy.server.exchange import Roster
from fedspan.deploy.server.server import Server
from fedspan.errors import Refused

TEXT = """
name = "t"
rounds = 1
[data]
source = "digits"
limit = 60
[partition]
clients = 3
[model]
kind = "logistic"
[method]
name = "fedavg"
"""
HELLO = {"do": "hello", "round": 0, "client": 0, "clients": 3}


def node_with(folder: Path, policy: str, **settings: Any) -> Service:
    folder.mkdir(exist_ok=True)
    (folder / "node.toml").write_text(policy)
    (folder / "node.json").write_text(json.dumps({"partition": 0} | settings))
    return Service(folder)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Using the server's text is a failure: the policy must have refused it before."""

    def fail(*_: Any) -> None:
        raise AssertionError("the server's text was used")

    monkeypatch.setattr(service_module, "read_config", fail)
    monkeypatch.setattr(service_module, "read_experiment", fail)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ('methods = ["fedrep", "local"]', "a method must be one of fedrep, local. Got 'fedavg'; ask the node's owner."),
        ("methods = []", "a method must be one of none. Got 'fedavg'"),
        ('models = ["cnn"]', "a model must be one of cnn. Got 'logistic'"),
        ('sources = ["mnist"]', "a source must be one of mnist. Got 'digits'"),
        ("least_cohort = 4", "a run must declare a cohort of at least 4 clients in every round .* Got 3."),
        (
            "privacy_required = true",
            "a run must declare differential privacy. Got none; fedspan cannot declare it yet.",
        ),
        ("largest_download_mb = 0.001", "a download must be at most 0.001 MB. Got 0.002 MB; ask the node's owner."),
    ],
)
def test_a_policy_refuses_in_one_sentence_before_the_text_is_used(tmp_path: Path, policy: str, said: str) -> None:
    with pytest.raises(Refused, match=f"^Node: node.toml: {said}") as e:
        node_with(tmp_path, policy).handle(TEXT, HELLO, bytes(2000))
    assert "\n" not in str(e.value) and len(str(e.value)) < 250


@pytest.mark.parametrize(
    "policy",
    [
        "",
        'methods = ["fedavg"]\nmodels = ["logistic"]\nsources = ["digits"]',
        "least_cohort = 3\nlargest_download_mb = 1\nprivacy_required = false",
    ],
)
def test_what_is_allowed_is_done(tmp_path: Path, policy: str) -> None:
    assert node_with(tmp_path, policy).handle(TEXT, HELLO, b"")[0]["examples"] > 0


def test_a_change_goes_for_the_next_message(tmp_path: Path) -> None:
    node = node_with(tmp_path, "")
    assert node.handle(TEXT, HELLO, b"")
    (tmp_path / "node.toml").write_text('methods = ["local"]')
    with pytest.raises(Refused, match="must be one of local"):
        node.handle(TEXT, HELLO, b"")


@pytest.mark.usefixtures("untouched")
def test_every_method_and_model_of_a_text_is_asked_for(tmp_path: Path) -> None:
    node = node_with(tmp_path, 'methods = ["fedavg"]\nmodels = ["logistic"]')
    with pytest.raises(Refused, match="Got 'os:system'"):
        node.handle(TEXT + '[methods."os:system"]\nlr = 0.1\n', HELLO, b"")
    with pytest.raises(Refused, match="Got 'cnn'"):
        node.handle(TEXT.replace('kind = "logistic"', 'kinds = ["logistic", "cnn"]'), HELLO, b"")
    with pytest.raises(Refused, match="must name its method"):
        node.handle("rounds = 1\n", HELLO, b"")


@pytest.mark.parametrize(
    ("train", "cohort"),
    [("", 3), ("participation = 0.34", 1), ("participation = 0.67", 2), ('sampling = "bernoulli"', None)],
)
def test_a_cohort_is_what_every_round_asks(train: str, cohort: int | None) -> None:
    assert named_by(f"{TEXT}[train]\n{train}\n").cohort == cohort


def test_loaders_are_the_owners_too(tmp_path: Path) -> None:
    policy = 'loaders = ["own_data:read"]\nallow_code = ["own_data", "other"]'
    node = node_with(tmp_path, policy)
    (tmp_path / "node.json").write_text(json.dumps({"loader": "other:read"}))
    with pytest.raises(Refused, match=r"a loader must be one of own_data:read\. Got 'other:read'"):
        node.handle(TEXT, HELLO, b"")
    (tmp_path / "node.json").write_text(json.dumps({"loader": "own_data:read"}))
    with pytest.raises(ConfigError, match="own_data cannot be imported"):  # allowed, and not there
        node.handle(TEXT, HELLO, b"")


def test_a_node_is_started_with_a_loader_that_its_policy_allows(tmp_path: Path) -> None:
    def said(policy: str) -> str:
        (tmp_path / "node.toml").write_text(policy)
        return failing("deploy", "node", str(tmp_path), "--server", "localhost:1", "--loader", "own_data:read")

    assert "its owner can allow it with deploy node --allow-code own_data, or allow_code in node.toml" in said("")
    assert "a loader must be one of none. Got 'own_data:read'" in said('loaders = []\nallow_code = ["own_data"]')
    assert "must be a node's folder of fedspan deploy keys" in said('allow_code = ["own_data"]')  # the next fault


@pytest.mark.parametrize(("section", "key"), [("model", "kind"), ("method", "name")])
def test_os_system_executes_nothing_on_a_node(tmp_path: Path, section: str, key: str) -> None:
    mark = tmp_path / "executed"
    text = re.sub(rf'(\[{section}\]\n){key} = "\w+"', rf'\1{key} = "os:system"\ncommand = "touch {mark}"', TEXT)
    for policy, said in (
        ("", "code of package 'os' must be allowed"),
        ('allow_code = ["os"]', "must be a subclass of"),
    ):
        with pytest.raises(ConfigError, match=said) as e:
            node_with(tmp_path / "node", policy).handle(text, HELLO, b"")
        assert "\n" not in str(e.value)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ('method = ["fedavg"]', r"Node: node.toml: unknown key 'method'\. Did you mean 'methods'\?"),
        ('methods = "fedavg"', "Node: node.toml: methods must be a list of strings. Got 'fedavg'"),
        ("least_cohort = 0", "Node: node.toml: least_cohort must be an integer >= 1. Got 0"),
        ("largest_download_mb = -1", "Node: node.toml: largest_download_mb must be"),
        (
            'allow_code = ["a.b"]',
            r"Node: node.toml: allow_code: a package must be given by its top-level name. Got 'a\.b'",
        ),
        ("privacy_required = 1", "Node: node.toml: privacy_required must be true or false. Got 1"),
        ("methods = [", "node.toml is not valid TOML"),
    ],
)
def test_a_policy_that_cannot_be_read_serves_no_run(tmp_path: Path, untouched: None, policy: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        node_with(tmp_path, policy).handle(TEXT, HELLO, b"")


@pytest.mark.parametrize("value", ["-1", "nan", "1e400", "[[1]]", "[3]", "{ a = 1 }", "true", "1979-05-27"])
@pytest.mark.parametrize(
    "key", ["method.name", "model.kind", "model.kinds", "data.source", "partition.clients", "train.participation"]
)
def test_a_text_that_names_something_else_is_refused_in_one_sentence(key: str, value: str) -> None:
    section, name = key.split(".")
    text = f"[{section}]\n{name} = {value}\n" + ("" if section == "method" else "[method]\nname = 'fedavg'\n")
    with pytest.raises(FedspanError, match=r"^Node: the run: \w+ must be [^\n]+$"):
        named_by(text)
    with pytest.raises(FedspanError, match=f"^Node: {section} of the run must be a section"):
        named_by(f"{section} = {value}\n") if "{" not in value else named_by(f"{section} = 3\n")


def test_keys_bring_a_policy_with_comments_that_changes_nothing(tmp_path: Path) -> None:
    make_keys(tmp_path / "fed", ["a", "b"])
    path = tmp_path / "fed" / "a" / "node.toml"
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_policy(path.parent) == OwnerPolicy()
    keys = re.sub(r"^# (\w+ = )", r"\1", path.read_text(), flags=re.M)
    path.write_text(keys)  # every key is there, and what stands in the comment fits
    filled = read_policy(path.parent)
    assert filled.methods == ("fedavg", "fedrep") and filled.allow_code == ("hospital_data",)
    assert set(re.findall(r"^(\w+) = ", keys, re.M)) == set(OwnerPolicy.__dataclass_fields__)
    write_template(path.parent)
    assert path.read_text() == keys  # it is the owner's


def test_a_refusal_reaches_the_servers_log(tmp_path: Path) -> None:
    nodes = {i: node_with(tmp_path / f"n{i}", "" if i else 'methods = ["local"]', partition=i) for i in range(3)}

    def handle(run: Mapping[str, Any], node: Mapping[str, Any], facts: Facts, payload: bytes) -> tuple[Facts, bytes]:
        return nodes[int(node["number"])].handle(TEXT, facts, payload)

    kind = DataKind((1, 8, 8), 10)
    said: list[str] = []
    roster = Roster(tuple(FIRST_NODE + i for i in range(3)), ("n0", "n1", "n2"))
    grid: Any = LocalGrid(handle, 3)  # type: ignore[arg-type]
    result = Server(read_experiment(TEXT, kind), kind, grid, roster, policy=AT_ONCE, log=said.append).run()
    refusals = [line for line in said if "node.toml" in line]
    assert len(refusals) == 1, said
    sentence = "Node: node.toml: a method must be one of local. Got 'fedavg'; ask the node's owner."
    assert refusals[0] == f"Round 0: client n0: its node reports: {sentence}"
    assert result is not None
