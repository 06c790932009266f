"""Certificates of a server and keys of nodes, in folders that only their owner can enter."""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedspan.deploy.audit_log import AuditLog
from fedspan.deploy.node.owner_policy import write_template
from fedspan.deploy.roster_file import MOST_PLACES, Place, empty_places, write_places
from fedspan.errors import ConfigError, safe_name
from fedspan.storage.atomic import replacing
from fedspan.storage.toml import read_small

DAYS = 825
"""How long a certificate of a server or a node lasts."""

AUTHORITY_DAYS = 3650
"""How long the federation's own authority lasts; with it every node would need a new ca.crt."""

SOON = datetime.timedelta(days=30)
"""From then on an end is announced."""

KEY, NEXT_KEY, CERTIFICATE, AUTHORITY = "key", "key.next", "node.crt", "ca.crt"
"""A node's files: its private key, the one it has asked to change to, and what the server gave it."""


def make_keys(
    folder: Path, names: Sequence[str], hosts: Sequence[str] = (), days: int = DAYS, places: int | None = None
) -> None:
    """`server/` with a certificate authority and a certificate, and one folder per named node with its key.

    Args:
        hosts: names or addresses under which nodes reach the server, besides localhost.
        places: how many clients the federation has; those beyond the names are kept for nodes that make their own key.

    Raises:
        ConfigError: if there are keys already: they are never overwritten.
    """
    if (folder / "server").exists():
        raise ConfigError(f"deploy keys: {folder} has keys already. Choose another folder.")
    places = len(names) if places is None else places
    if len(set(names)) != len(names) or "server" in names:
        raise ConfigError(f"deploy keys: nodes must have different names, none of them 'server'. Got {list(names)}.")
    if not max(1, len(names)) <= places <= MOST_PLACES:
        raise ConfigError(f"deploy keys: --places must lie in {max(1, len(names))}..{MOST_PLACES}. Got {places}.")
    for name in names:
        safe_name(name, "deploy keys: a node's name")
    server = private_folder(folder / "server")
    authority = new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedspan federation")])
    root = _certificate(subject, subject, authority.public_key(), authority, max(days, AUTHORITY_DAYS), None)
    write_private(server / "ca.key", _pem(authority))
    write_private(server / AUTHORITY, pem(root))
    certify_server(server, ["localhost", "127.0.0.1", *hosts], days)
    made = empty_places(places)
    for i, name in enumerate(names):
        made = made.replaced(i, _make_node(folder, name, made.places[i], days))
    write_places(server, made)
    AuditLog(server).append("made", {"federation": made.federation, "places": places, "nodes": list(names)})


def _make_node(folder: Path, name: str, place: Place, days: int) -> Place:
    """A node whose key is made here, for a trial on one machine; its folder, and its place with that key."""
    node = private_folder(folder / name)
    public = make_node_key(node, KEY)
    certificate = issue_certificate(folder / "server", name, public, days)
    write_private(node / AUTHORITY, (folder / "server" / AUTHORITY).read_bytes())
    write_private(node / CERTIFICATE, pem(certificate))
    write_template(node)
    return Place(id=place.id, state="admitted", name=name, public_key=public, expires=certificate.not_valid_after_utc)


def adopt_earlier(server: Path, known: Mapping[str, int]) -> None:
    """Write the roster of a folder that an earlier version made, with a public key per node and no dates.

    Raises:
        ConfigError: if it holds no keys of nodes.
    """
    paths = {p.stem: p for p in (server / "nodes").glob("*.pub")}
    names = [*(n for n in known if n in paths), *sorted(n for n in paths if n not in known)]
    if not names:
        raise ConfigError(f"Deploy: {server} must hold roster.json. Make the federation with fedspan deploy keys.")
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=DAYS)
    made = empty_places(len(names))
    for i, name in enumerate(names):
        text = " ".join(read_small(paths[name], "Deploy").decode(errors="replace").split()[:2])
        public, node = public_text(public_key(text, f"Node {name}")), known.get(name)
        # Its runs are known by the numbers that Flower gave the nodes.
        who = made.places[i].id if node is None else str(node)
        place = Place(id=who, state="admitted", name=name, public_key=public, node=node, expires=end)
        made = made.replaced(i, place)
    write_places(server, made)
    facts = {"federation": made.federation, "places": len(names), "nodes": names, "earlier": True}
    AuditLog(server).append("made", facts)


def make_node_key(node: Path, name: str) -> str:
    """Make a private key in a node's folder, readable by its owner only; its public half as one line."""
    key = new_key()  # what Flower's node authentication takes
    openssh = serialization.PrivateFormat.OpenSSH
    secret = key.private_bytes(serialization.Encoding.PEM, openssh, serialization.NoEncryption())
    write_private(node / name, secret)
    return public_text(key.public_key())


def new_key() -> ec.EllipticCurvePrivateKey:
    """A key of the one kind that is used."""
    return ec.generate_private_key(ec.SECP384R1())


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A node's private key.

    Raises:
        ConfigError: if there is none of the right kind.
    """
    try:
        key = serialization.load_ssh_private_key(read_small(path, "Node"), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as e:
        raise ConfigError(
            f"Node: {path} must be a private key of fedspan. It cannot be read ({type(e).__name__})."
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ConfigError(f"Node: {path} must be a private key on the curve secp384r1. Got another kind.")
    return key


def public_text(key: ec.EllipticCurvePublicKey) -> str:
    """A public key as one line, as ssh-keygen writes it."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def public_key(text: str, who: str) -> ec.EllipticCurvePublicKey:
    """A public key from its line.

    Raises:
        ConfigError: if it is none on the one curve that is used.
    """
    try:
        key = serialization.load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm) as e:
        raise ConfigError(f"{who}: its public key cannot be read ({type(e).__name__}).") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ConfigError(f"{who}: its public key must lie on the curve secp384r1. Got another kind.")
    return key


def fingerprint(public: str) -> str:
    """A public key in short, as `ssh-keygen -l` shows it: what two people compare on the telephone."""
    raw = hashlib.sha256(base64.b64decode(public.split()[1])).digest()
    return f"SHA256:{base64.b64encode(raw).decode().rstrip('=')}"


# ------------------------------------------------------------------------------------------------ certificates


def issue_certificate(server: Path, name: str, public: str, days: int = DAYS) -> x509.Certificate:
    """A certificate by which the federation's authority says whose key this is, and until when."""
    authority, root = _authority(server)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    key = public_key(public, f"Node {name}")
    return _certificate(subject, root.subject, key, authority, days, (), root)


def certify_server(server: Path, hosts: Sequence[str] | None = None, days: int = DAYS) -> datetime.datetime:
    """Give the server a new key and certificate of the same authority; until when.

    Args:
        hosts: names and addresses it is for; without them those of the certificate it has.
    """
    authority, root = _authority(server)
    if hosts is None:
        old = read_certificate(server / "server.crt").extensions
        names = old.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    key = new_key()
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedspan server")])
    made = _certificate(named, root.subject, key.public_key(), authority, days, hosts, root)
    write_private(server / "server.key", _pem(key), replace=True)
    write_private(server / "server.crt", pem(made), replace=True)
    return made.not_valid_after_utc


def read_certificate(path: Path) -> x509.Certificate:
    """A certificate from its file.

    Raises:
        ConfigError: if there is none.
    """
    return parse_certificate(read_small(path, "Deploy"), str(path))


def parse_certificate(raw: bytes, where: str) -> x509.Certificate:
    """A certificate from its text.

    Raises:
        ConfigError: if it is none.
    """
    try:
        return x509.load_pem_x509_certificate(raw)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"Deploy: {where} must be a certificate. It cannot be read ({type(e).__name__}).") from None


def check_date(what: str, end: datetime.datetime, remedy: str) -> list[str]:
    """A sentence if something ends soon, none otherwise.

    Raises:
        ConfigError: if it has ended.
    """
    left = end - datetime.datetime.now(datetime.UTC)
    if left <= datetime.timedelta(0):
        raise ConfigError(f"Deploy: {what} has expired on {end:%Y-%m-%d}. {remedy}.")
    if left <= SOON:
        return [f"{what} expires on {end:%Y-%m-%d}, in {left.days} days. {remedy}."]
    return []


SERVER_REMEDY = "Renew it with `fedspan deploy renew DIR server`, and start the server again"
AUTHORITY_REMEDY = "A federation with new keys is needed: `fedspan deploy keys`"
NODE_REMEDY = "Ask the server's operator for `fedspan deploy renew`"


def check_server_dates(server: Path) -> list[str]:
    """Sentences about what ends soon.

    Raises:
        ConfigError: if the server's certificate or its authority has expired.
    """
    ends = [("the authority's certificate", AUTHORITY, AUTHORITY_REMEDY)]
    ends.append(("the server's certificate", "server.crt", SERVER_REMEDY))
    notes = [check_date(what, read_certificate(server / f).not_valid_after_utc, todo) for what, f, todo in ends]
    return [text for some in notes for text in some]


def check_node_dates(node: Path) -> list[str]:
    """Sentences about what ends soon; a folder of an earlier version has no date of its own.

    Raises:
        ConfigError: if the node's certificate or the server's authority has expired, or its key is another one.
    """
    ends = [(f"the certificate of the authority of {node.name}", AUTHORITY, AUTHORITY_REMEDY)]
    if (node / CERTIFICATE).exists():
        ends.append((f"the key of {node.name}", CERTIFICATE, NODE_REMEDY))
        own = public_text(read_node_key(node / KEY).public_key())
        if certified_key(read_certificate(node / CERTIFICATE)) != own:
            raise ConfigError(
                f"Node: {node / CERTIFICATE} is for another key than {node / KEY}. Give deploy node its --bundle again."
            )
    notes = [check_date(what, read_certificate(node / f).not_valid_after_utc, todo) for what, f, todo in ends]
    return [text for some in notes for text in some]


def certified_key(certificate: x509.Certificate) -> str | None:
    """The public key of a certificate as one line; None if it is of another kind."""
    key = certificate.public_key()
    return public_text(key) if isinstance(key, ec.EllipticCurvePublicKey) else None


def certified_name(certificate: x509.Certificate) -> str | None:
    """Whose certificate it is."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if len(names) == 1 else None


def _authority(server: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    try:
        key = serialization.load_pem_private_key(read_small(server / "ca.key", "Deploy"), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as e:
        raise ConfigError(f"Deploy: {server / 'ca.key'} must be the authority's key ({type(e).__name__}).") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"Deploy: {server / 'ca.key'} must be the authority's key. Got another kind.")
    return key, read_certificate(server / AUTHORITY)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    authority: ec.EllipticCurvePrivateKey,
    days: int,
    hosts: Sequence[str] | None,
    root: x509.Certificate | None = None,
) -> x509.Certificate:
    """An authority's own certificate if `hosts` is None, a server's with some, a node's with none; in `root`'s time."""
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(end if root is None else min(end, root.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=hosts is None, path_length=0 if hosts is None else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False)
    )
    usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usage |= {"encipher_only": False, "decipher_only": False, "digital_signature": True}
    usage |= {"key_cert_sign": hosts is None, "crl_sign": hosts is None}
    made = made.add_extension(x509.KeyUsage(**usage), True)
    if hosts:
        names = x509.SubjectAlternativeName([_host(h) for h in dict.fromkeys(hosts)])
        made = made.add_extension(names, False)
    if hosts is not None:
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        made = made.add_extension(x509.ExtendedKeyUsage([purpose]), False)
    return made.sign(authority, hashes.SHA384())


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, plain, serialization.NoEncryption())


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as text."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def private_folder(folder: Path) -> Path:
    """A folder that only its owner can enter."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    return folder


def write_private(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a file that only its owner can read, whole and synced.

    Raises:
        FileExistsError: if it is there, unless it may be replaced: a key is never overwritten by mistake.
    """
    if not replace and path.exists():
        raise FileExistsError(f"{path} is there already.")
    with replacing(path) as place:
        place.unlink(missing_ok=True)
        fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as f:
            f.write(data)
