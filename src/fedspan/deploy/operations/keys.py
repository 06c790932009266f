"""Certificates of a server and keys of nodes, in folders that only their owner can enter."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedspan.deploy.node.owner_policy import write_template
from fedspan.errors import ConfigError, safe_name

DAYS = 825


def make_keys(folder: Path, names: Sequence[str], hosts: Sequence[str] = (), days: int = DAYS) -> None:
    """`server/` with a certificate authority and a certificate, and one folder per node with its key.

    Args:
        hosts: names or addresses under which nodes reach the server, besides localhost.

    Raises:
        ConfigError: if there are keys already: they are never overwritten.
    """
    if (folder / "server").exists():
        raise ConfigError(f"deploy keys: {folder} has keys already. Choose another folder.")
    if not names or len(set(names)) != len(names) or "server" in names:
        raise ConfigError(f"deploy keys: nodes must have different names, none of them 'server'. Got {list(names)}.")
    server = _private(folder / "server")
    authority = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedspan federation")])
    root = _certificate(subject, subject, authority.public_key(), authority, days, None)
    own = ec.generate_private_key(ec.SECP384R1())
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedspan server")])
    certificate = _certificate(named, subject, own.public_key(), authority, days, ["localhost", "127.0.0.1", *hosts])
    _write(server / "ca.key", _pem(authority))
    _write(server / "server.key", _pem(own))
    for name, made in (("ca.crt", root), ("server.crt", certificate)):
        _write(server / name, made.public_bytes(serialization.Encoding.PEM))
    for name in names:
        add_node(folder, name)


def add_node(folder: Path, name: str) -> Path:
    """One more node: its folder with a key and a policy to fill in, and its public key with the server."""
    node = _private(folder / safe_name(name, "deploy keys: a node's name"))
    key = ec.generate_private_key(ec.SECP384R1())  # what Flower's node authentication takes
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    openssh = serialization.PrivateFormat.OpenSSH
    _write(node / "key", key.private_bytes(serialization.Encoding.PEM, openssh, serialization.NoEncryption()))
    _write(node / "key.pub", public + b"\n")
    _write(node / "ca.crt", (folder / "server" / "ca.crt").read_bytes())
    write_template(node)
    known = _private(folder / "server" / "nodes")
    _write(known / f"{name}.pub", public + b"\n")
    return node


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    authority: ec.EllipticCurvePrivateKey,
    days: int,
    hosts: Sequence[str] | None,
) -> x509.Certificate:
    """An authority's own certificate without `hosts`, otherwise a server's."""
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=hosts is None, path_length=0 if hosts is None else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False)
    )
    usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usage |= {"encipher_only": False, "decipher_only": False, "digital_signature": True}
    usage |= {"key_cert_sign": hosts is None, "crl_sign": hosts is None}
    made = made.add_extension(x509.KeyUsage(**usage), True)
    if hosts is not None:
        names = x509.SubjectAlternativeName([_host(h) for h in dict.fromkeys(hosts)])
        made = made.add_extension(names, False)
        made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
    return made.sign(authority, hashes.SHA384())


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, plain, serialization.NoEncryption())


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    return folder


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as f:
        f.write(data)
