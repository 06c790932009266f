"""Keys of nodes' own making: requests, bundles, places, renewal and revocation, and dates that end."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")
from conftest import call, failing
from fedspan.deploy.audit_log import AuditLog
from fedspan.deploy.node.node_status import is_node, node_status
from fedspan.deploy.operations import keys, membership
from fedspan.deploy.operations.deployment import Deployment, start_node
from fedspan.deploy.operations.keys import make_keys, write_private
from fedspan.deploy.operations.membership import Membership
from fedspan.deploy.operations.node_bundle import install_bundle
from fedspan.deploy.operations.node_request import read_request, request_place, request_renewal
from fedspan.deploy.roster_file import FILE, NOBODY, LiveRoster, read_places, write_places
from fedspan.errors import ConfigError, FedspanError

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def quick_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes for real, so nothing has to reach the disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture
def fed(tmp_path: Path) -> Membership:
    """A federation of two nodes and two free places."""
    make_keys(tmp_path / "fed", ["berlin", "paris"], places=4)
    return Membership(Deployment(tmp_path / "fed" / "server"), "fed.example.org:443")


def asked(folder: Path, name: str) -> Path:
    request_place(folder / name, name, folder / f"{name}.request.json")
    return folder / f"{name}.request.json"


def events(fed: Membership) -> list[str]:
    return [e.event for e in fed.log.entries()]


# ------------------------------------------------------------------------------------------------ the usual way


def test_a_node_joins_with_a_key_that_never_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call("deploy", "keys", "fed", "--places", "3")
    assert sorted(p.name for p in Path("fed").iterdir()) == ["server"]
    call("deploy", "request", "rome")
    secret = Path("rome/key").read_bytes()
    assert Path("rome/key").stat().st_mode & 0o777 == 0o600 and Path("rome").stat().st_mode & 0o777 == 0o700
    said = call("deploy", "admit", "fed", "rome.request.json", "--server", "fed.example.org:443").stdout
    assert "rome takes place 0 until" in said
    for path in ("rome.request.json", "rome.bundle.json", *map(str, Path("fed/server").glob("*"))):
        assert b"OPENSSH PRIVATE" not in Path(path).read_bytes(), path
    assert install_bundle(Path("rome"), Path("rome.bundle.json")).server == "fed.example.org:443"
    assert Path("rome/key").read_bytes() == secret
    found = json.loads(call("deploy", "status", "rome", "--json").stdout)
    assert found["place"] == 0 and found["admitted"] and found["key"] in said and not found["connected"]
    assert found["policy"] == {} and found["round"] is None and found["server"] == "fed.example.org:443"
    rows = json.loads(call("deploy", "status", "fed", "--json").stdout)["places"]
    assert [r["state"] for r in rows] == ["admitted", "empty", "empty"] and rows[0]["key"] == found["key"]
    assert "2 events, all as they were written" in call("deploy", "audit", "fed", "--verify").stdout
    assert "admitted" in call("deploy", "audit", "fed").stdout
    assert "rome is revoked" in call("deploy", "revoke", "fed", "rome", "--reason", "left").stdout
    assert "is revoked, for good" in failing("deploy", "renew", "fed", "rome")
    assert "certificate lasts until" in call("deploy", "renew", "fed", "server").stdout
    last = [json.loads(x) for x in call("deploy", "audit", "fed", "--json", "--last", "3").stdout.splitlines()]
    assert [e["event"] for e in last] == ["revoked", "refused", "renewed"] and last[0]["facts"]["reason"] == "left"


def test_places_are_filled_in_order_and_then_there_are_none(fed: Membership, tmp_path: Path) -> None:
    for name, place in (("rome", 2), ("oslo", 3)):
        assert fed.admit(asked(tmp_path, name)).place == place
    with pytest.raises(ConfigError, match=r"all 4 places are taken. A client can still join .* fedspan onboard"):
        fed.admit(asked(tmp_path, "wien"))
    assert events(fed) == ["made", "admitted", "admitted", "refused"]


def test_a_renewed_key_replaces_the_old_one(fed: Membership, tmp_path: Path) -> None:
    node, file, sent = tmp_path / "fed" / "berlin", tmp_path / "r.json", tmp_path / "b.json"
    old, before = (node / "key").read_bytes(), read_places(fed.folder).places[0]
    request_renewal(node, "berlin", file)
    assert (node / "key").read_bytes() == old and (node / "key.next").stat().st_mode & 0o777 == 0o600
    assert node_status(node)["renewal"] == "requested"
    sent.write_text(fed.renew(str(file)).model_dump_json())
    place = read_places(fed.folder).places[0]
    assert place.id == before.id and place.public_key != before.public_key and place.node is None
    install_bundle(node, sent)
    assert (node / "key").read_bytes() != old and not (node / "key.next").exists()
    assert keys.check_node_dates(node) == []
    with pytest.raises(ConfigError, match="must be signed with the key that berlin has"):
        fed.renew(str(file))  # the same once more


def test_a_new_date_for_the_same_key(fed: Membership) -> None:
    before = read_places(fed.folder).places[1]
    Membership(fed.deployment, days=10).renew("paris")
    after = read_places(fed.folder).places[1]
    assert after.public_key == before.public_key and after.expires < before.expires  # type: ignore[operator]
    assert after.node == before.node


# ------------------------------------------------------------------------------------------------ bad requests


BAD: dict[str, tuple[Change, str]] = {
    "another name": (lambda r: r.update(name="madrid"), "its signature must be made with the key that it names"),
    "no signature": (lambda r: r.update(signature=""), "its signature must be made with the key"),
    "a signature that is no base64": (lambda r: r.update(signature="?" * 90), "its signature must be made"),
    "another day": (lambda r: r.update(made="2026-01-01T00:00:00Z"), "its signature must be made"),
    "a name that leads out": (lambda r: r.update(name="../x"), "'name' of its facts"),
    "no key": (lambda r: r.pop("public_key"), "'public_key' of its facts must be there"),
    "a short key": (lambda r: r.update(public_key="ecdsa-sha2-nistp384 " + "A" * 120), "its public key cannot be read"),
    "another kind of key": (lambda r: r.update(public_key="ssh-rsa AAAA"), "'public_key' of its facts"),
    "more facts": (lambda r: r.update(note="x"), "'note' of its facts must not be there"),
    "another format": (lambda r: r.update(format=2), "'format' of its facts"),
    "a bundle": (lambda r: r.update(kind="fedspan node bundle"), "'kind' of its facts"),
    "an old key alone": (lambda r: r.update(old_signature="AAAA"), "must come together"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_and_written_down(case: str, fed: Membership, tmp_path: Path) -> None:
    change, reason = BAD[case]
    path = asked(tmp_path, "rome")
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        fed.admit(path)
    assert reason in str(caught.value) and str(caught.value).startswith("Request rome.request.json: ")
    assert events(fed) == ["made", "refused"] and read_places(fed.folder).free() == 2


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff\xfe", b"null", b"[" * 10_000, b"x" * (2 << 20)])
def test_a_damaged_file_is_refused_in_words(raw: bytes, fed: Membership, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(raw)
    with pytest.raises(ConfigError):
        fed.admit(path)
    with pytest.raises(ConfigError):
        install_bundle(tmp_path / "fed" / "berlin", path)
    (fed.folder / FILE).write_bytes(raw)
    with pytest.raises(ConfigError):
        fed.revoke("berlin")
    with pytest.raises(ConfigError):
        LiveRoster(fed.folder)()


def test_requests_grow_old(fed: Membership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = asked(tmp_path, "rome")
    monkeypatch.setattr("fedspan.deploy.operations.node_request.DAYS_VALID", -1)
    with pytest.raises(ConfigError, match=r"it must be at most -1 days old. Got one of"):
        read_request(path)


def test_names_and_keys_are_taken_once(fed: Membership, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the name berlin is taken"):
        fed.admit(asked(tmp_path, "berlin"))
    rome = asked(tmp_path, "rome")
    fed.admit(rome)
    with pytest.raises(ConfigError, match="the key of rome is in use already"):
        fed.admit(rome)
    fed.revoke("rome")
    with pytest.raises(ConfigError, match="was revoked or replaced, and cannot come back"):
        fed.admit(rome)
    (tmp_path / "again").mkdir()
    with pytest.raises(ConfigError, match="the name rome is revoked; let it take another name"):
        fed.admit(asked(tmp_path / "again", "rome"))
    with pytest.raises(ConfigError, match=r"has a key already. Use --renew"):
        asked(tmp_path, "rome")
    with pytest.raises(ConfigError, match="must not be 'server'"):
        asked(tmp_path, "server")
    assert fed.admit(asked(tmp_path, "oslo")).place == 3  # the place of a revoked node stays empty


def test_only_a_member_is_renewed_or_revoked(fed: Membership, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"deploy revoke: there is no node 'berlim'. Did you mean 'berlin'"):
        fed.revoke("berlim")
    with pytest.raises(ConfigError, match="there is no node"):
        fed.renew("nobody")
    stranger, file = tmp_path / "stranger", tmp_path / "r.json"
    request_place(stranger, "berlin", file)
    with pytest.raises(ConfigError, match="must be signed with the key that berlin has"):
        fed.renew(str(file))  # a first request is none for a new key
    request_renewal(stranger, "berlin", file)
    with pytest.raises(ConfigError, match="must be signed with the key that berlin has"):
        fed.renew(str(file))
    with pytest.raises(ConfigError, match=r"it is for a new key. Use fedspan deploy renew"):
        fed.admit(file)
    request_renewal(tmp_path / "fed" / "paris", "paris", file)
    fed.revoke("paris")
    for again in (lambda: fed.renew(str(file)), lambda: fed.renew("paris"), lambda: fed.revoke("paris")):
        with pytest.raises(ConfigError, match="paris is revoked, for good"):
            again()
    with pytest.raises(ConfigError, match="has no key to renew"):
        request_renewal(tmp_path / "nowhere", "x", file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("admit", "fed", "none.json"), "cannot be read"),
        (("admit", "fed", "none.json", "--server", "no port"), "must be host:port"),
        (("admit", "fed", "none.json", "--out", "x.txt"), "--out must end in .json"),
        (("admit", "fed", "none.json", "--out", "no/where.json"), "must exist"),
        (("admit", ".", "none.json"), "must be the server's folder"),
        (("audit", "fed", "--head", "0" * 63 + "1"), "was cut or begun anew"),
        (("keys", "other", "--nodes", "3", "--places", "2"), "--places must lie in 3..1000"),
        (("keys", "other", "--places", "0"), "--places must lie in 1..1000"),
        (("request", "berlin", "--name", "a/b"), "--name must be"),
        (("node", "fed/berlin", "--partition", "0"), "--server must say where the server is"),
        (("node", "fed/berlin", "--partition", "0", "--server", "x"), "--server must be host:port"),
    ],
)
def test_commands_refuse_in_one_sentence(
    arguments: tuple[str, ...], message: str, fed: Membership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in failing("deploy", *arguments)


# ------------------------------------------------------------------------------------------------ bundles


def test_a_bundle_is_for_its_node_alone(fed: Membership, tmp_path: Path) -> None:
    sent = tmp_path / "b.json"
    good = json.loads(fed.admit(asked(tmp_path, "rome")).model_dump_json())
    make_keys(tmp_path / "other", ["x", "y"], places=3)
    other = Membership(Deployment(tmp_path / "other" / "server"))
    (tmp_path / "two").mkdir()
    foreign = json.loads(other.admit(asked(tmp_path / "two", "rome")).model_dump_json())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"authority": foreign["authority"]}, "must be signed by its authority"),
        ({"certificate": foreign["certificate"], "authority": foreign["authority"]}, "for another key than those in"),
        ({"certificate": "no"}, "must be a certificate"),
        ({"name": "oslo"}, "must be for oslo"),
        ({"server": "x; rm"}, "must be host:port"),
        ({"place": -1}, "'place' of its facts"),
    ]
    for change, message in cases:
        sent.write_text(json.dumps(good | change))
        with pytest.raises(ConfigError, match=message):
            install_bundle(tmp_path / "rome", sent)
        assert not (tmp_path / "rome" / "ca.crt").exists()
    sent.write_text(json.dumps(good))
    with pytest.raises(ConfigError, match="for another key"):
        install_bundle(tmp_path / "fed" / "berlin", sent)
    write_private(tmp_path / "rome" / "ca.crt", foreign["authority"].encode())
    with pytest.raises(ConfigError, match="from another authority"):
        install_bundle(tmp_path / "rome", sent)
    (tmp_path / "rome" / "ca.crt").unlink()
    install_bundle(tmp_path / "rome", sent)
    write_private(tmp_path / "rome" / "node.crt", foreign["certificate"].encode(), replace=True)
    with pytest.raises(ConfigError, match="is for another key than"):
        start_node(tmp_path / "rome", "localhost:1", {})


# ------------------------------------------------------------------------------------------------ dates


def test_what_has_expired_is_refused_and_what_ends_soon_is_announced(tmp_path: Path) -> None:
    make_keys(tmp_path / "old", ["a", "b"], days=0)
    made = Deployment(tmp_path / "old" / "server")
    with pytest.raises(ConfigError, match=r"the server's certificate has expired on .* Renew it with"):
        made.start()
    assert "the server's certificate has expired" in call("deploy", "status", str(tmp_path / "old")).stderr
    with pytest.raises(ConfigError, match="the key of a has expired on"):
        start_node(tmp_path / "old" / "a", "localhost:1", {})
    assert "has expired" in node_status(tmp_path / "old" / "a")["fault"]
    roster = LiveRoster(made.folder)()
    assert roster.nodes == (NOBODY, NOBODY) and "its key has expired on" in roster.absent[0]
    with pytest.raises(ConfigError, match="the server's certificate has expired"):
        Membership(made).renew("a")
    before = keys.read_certificate(made.folder / "server.crt")
    Membership(made, days=20).renew_server()
    after = keys.read_certificate(made.folder / "server.crt")
    assert after.extensions.get_extension_for_oid(keys.x509.OID_SUBJECT_ALTERNATIVE_NAME) == (
        before.extensions.get_extension_for_oid(keys.x509.OID_SUBJECT_ALTERNATIVE_NAME)
    )
    (soon,) = keys.check_server_dates(made.folder)
    assert soon.startswith("the server's certificate expires on") and "in 19 days" in soon
    Membership(made, days=25).renew("a")
    said = call("deploy", "status", str(tmp_path / "old")).stderr
    assert "the key of a expires on" in said and "the key of b has expired on" in said
    assert "the server's certificate expires on" in said


# ------------------------------------------------------------------------------------------------ the SuperLink


class Control:
    """Flower's control API, as far as it is asked: a key is registered once, and forgotten for good."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.fail = False

    def ListNodes(self, request: Any) -> Any:
        return SimpleNamespace(nodes_info=list(self.nodes))

    def RegisterNode(self, request: Any) -> Any:
        assert all(n.public_key != request.public_key for n in self.nodes)
        self.nodes.append(SimpleNamespace(node_id=100 + len(self.nodes), public_key=request.public_key, status="new"))
        if self.fail:
            raise OSError("the connection was lost")
        return self.nodes[-1]

    def UnregisterNode(self, request: Any) -> None:
        (node,) = [n for n in self.nodes if n.node_id == request.node_id and n.status != "unregistered"]
        node.status = "unregistered"


def test_the_superlink_learns_of_every_change_and_a_lost_answer_is_found_again(
    fed: Membership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control()
    monkeypatch.setattr(Deployment, "_control", lambda self: nullcontext(control))
    monkeypatch.setattr(membership.processes, "running", lambda folder: [{}])
    assert fed.deployment.register() == {"berlin": 100, "paris": 101} == fed.deployment.register()
    live = LiveRoster(fed.folder)
    assert live().nodes == (100, 101, NOBODY, NOBODY) and live().names[2:] == ("place-2", "place-3")
    assert live().absent == {2: "its place is empty", 3: "its place is empty"}
    control.fail, path = True, asked(tmp_path, "rome")
    with pytest.raises(FedspanError, match="it is written down, but the SuperLink could not be told"):
        fed.admit(path)
    assert live().absent[2] == "its key is not registered yet"
    control.fail = False
    assert fed.deployment.register()["rome"] == 102  # registered before the connection was lost
    fed.revoke("paris")
    assert control.nodes[1].status == "unregistered" and live().absent[1] == "its node is revoked"
    request_renewal(tmp_path / "rome", "rome", path)
    fed.renew(str(path))
    assert [n.status for n in control.nodes] == ["new", "unregistered", "unregistered", "new"]
    assert live().nodes == (100, NOBODY, 103, NOBODY) and live().names[:3] == ("berlin", "paris", "rome")
    assert len(set(live().places)) == 4
    assert read_places(fed.folder).unregister == []


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["places"][1].update(name="berlin"),
        lambda r: r["places"][1].update(id=r["places"][0]["id"]),
        lambda r: r["places"][1].update(expires=None),
        lambda r: r["places"][2].update(state="admitted"),
        lambda r: r["places"][0].update(state="empty"),
        lambda r: r["places"][0].update(node=0),
        lambda r: r.update(places=[]),
        lambda r: r.update(format=9),
    ],
)
def test_a_damaged_roster_is_refused(change: Change, fed: Membership) -> None:
    values = json.loads((fed.folder / FILE).read_text())
    change(values)
    (fed.folder / FILE).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"roster.json is damaged: .* Restore it from a copy"):
        read_places(fed.folder)


def test_a_federation_of_an_earlier_version_is_taken_over(fed: Membership, tmp_path: Path) -> None:
    server = fed.folder
    held = read_places(server)
    (server / "nodes").mkdir()
    for p in held.places[:2]:
        (server / "nodes" / f"{p.name}.pub").write_text(f"{p.public_key}\n")
    (server / "server.json").write_text(json.dumps({"port": 1, "nodes": {"paris": 2**63 + 5, "berlin": 7}}))
    (server / FILE).unlink()
    roster = LiveRoster(Deployment(server).folder)()
    assert roster.names == ("paris", "berlin") and roster.nodes == (2**63 + 5, 7)
    assert roster.places == tuple(map(str, roster.nodes))  # by which its runs are known
    (server / FILE).unlink()
    (server / "nodes" / "paris.pub").write_text("nonsense")
    with pytest.raises(ConfigError, match="its public key cannot be read"):
        Deployment(server)
    for p in (server / "nodes").glob("*"):
        p.unlink()
    with pytest.raises(ConfigError, match=r"must hold roster.json"):
        Deployment(server)


def test_folders_are_told_apart(fed: Membership, tmp_path: Path) -> None:
    assert is_node(tmp_path / "fed" / "berlin") and not is_node(tmp_path / "fed") and not is_node(tmp_path)
    write_places(fed.folder, read_places(fed.folder))
    assert (fed.folder / FILE).stat().st_mode & 0o777 == 0o600
    assert AuditLog(fed.folder).verify()[0] == 1
