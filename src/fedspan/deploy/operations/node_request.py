"""A node's request to join or to change its key: name and public key, signed with the private key that stays there."""

from __future__ import annotations

import base64
import binascii
import datetime
import json
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from annotated_types import MaxLen
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import AwareDatetime, ValidationError

from fedspan.deploy.node.owner_policy import write_template
from fedspan.deploy.operations.keys import (
    KEY,
    NEXT_KEY,
    make_node_key,
    private_folder,
    public_key,
    public_text,
    read_node_key,
)
from fedspan.deploy.roster_file import NodeName, PublicKey
from fedspan.deploy.server.answers import CheckedFacts, describe_fault
from fedspan.errors import ConfigError, safe_name
from fedspan.storage.atomic import write_atomic
from fedspan.storage.toml import read_small

DAYS_VALID = 30
"""A request that is older is not admitted: nobody remembers it."""

SEALED = b"fedspan node request 1\n"
"""What a signature begins with, so that a key signs nothing else by it."""

Signature: TypeAlias = Annotated[str, MaxLen(300)]


class NodeRequest(CheckedFacts):
    """What a node asks for; `signature` shows that it has the private key."""

    kind: Literal["fedspan node request"] = "fedspan node request"
    format: Literal[1] = 1
    name: NodeName
    public_key: PublicKey
    made: AwareDatetime
    replaces: PublicKey | None = None
    """The key that the node has now, if it asks for another one."""
    signature: Signature
    old_signature: Signature | None = None
    """Made with the key that it has now."""


def request_place(folder: Path, name: str, out: Path) -> NodeRequest:
    """Make a node's folder with a key of its own, and write its request.

    Raises:
        ConfigError: if there is a key already.
    """
    safe_name(name, "deploy request: --name")
    if name == "server":
        raise ConfigError("deploy request: --name must not be 'server'. Choose another one.")
    if (folder / KEY).exists():
        raise ConfigError(f"deploy request: {folder} has a key already. Use --renew for a new one.")
    private_folder(folder)
    make_node_key(folder, KEY)
    write_template(folder)
    return _write(out, name, read_node_key(folder / KEY), None)


def request_renewal(folder: Path, name: str, out: Path) -> NodeRequest:
    """Make the key that a node will change to, and write a request that is signed with both; the old one stays in use.

    Raises:
        ConfigError: if the node has no key to change.
    """
    if not (folder / KEY).exists():
        raise ConfigError(f"deploy request: {folder} has no key to renew. Leave out --renew.")
    old = read_node_key(folder / KEY)
    if not (folder / NEXT_KEY).exists():  # otherwise the same is asked for again
        make_node_key(folder, NEXT_KEY)
    return _write(out, name, read_node_key(folder / NEXT_KEY), old)


def read_request(path: Path) -> NodeRequest:
    """A request from a file that anybody may have written.

    Raises:
        ConfigError: if it is damaged, too old, or not signed with the keys that it names.
    """
    raw, who = read_small(path, "Request"), f"Request {path.name}"
    try:
        request = NodeRequest.model_validate_json(raw)
    except ValidationError as e:
        raise ConfigError(f"{who}: {describe_fault(e)} Ask the node for a new one.") from None
    safe_name(request.name, f"{who}: its name")
    if request.name == "server":
        raise ConfigError(f"{who}: its name must not be 'server'. Ask the node for another one.")
    body = _body(request)
    _verify(request.public_key, request.signature, body, who, "signature")
    if (request.replaces is None) != (request.old_signature is None):
        raise ConfigError(f"{who}: the key that it replaces and a signature with it must come together.")
    if request.replaces is not None:
        _verify(request.replaces, str(request.old_signature), body, who, "old_signature")
    age = datetime.datetime.now(datetime.UTC) - request.made
    if not datetime.timedelta(days=-1) <= age <= datetime.timedelta(days=DAYS_VALID):
        raise ConfigError(
            f"{who}: it must be at most {DAYS_VALID} days old. Got one of {request.made:%Y-%m-%d}; ask for a new one."
        )
    return request


def _write(
    out: Path, name: str, key: ec.EllipticCurvePrivateKey, old: ec.EllipticCurvePrivateKey | None
) -> NodeRequest:
    bare = NodeRequest(
        name=name,
        public_key=public_text(key.public_key()),
        made=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
        replaces=None if old is None else public_text(old.public_key()),
        signature="",
    )
    body = _body(bare)
    signed = {"signature": _sign(key, body), "old_signature": None if old is None else _sign(old, body)}
    request = bare.model_copy(update=signed)
    write_atomic(out, request.model_dump_json(indent=1) + "\n")
    return request


def _body(request: NodeRequest) -> bytes:
    values = request.model_dump(mode="json", exclude={"signature", "old_signature"})
    return SEALED + json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _sign(key: ec.EllipticCurvePrivateKey, body: bytes) -> str:
    return base64.b64encode(key.sign(body, ec.ECDSA(hashes.SHA384()))).decode()


def _verify(public: str, signature: str, body: bytes, who: str, what: str) -> None:
    key = public_key(public, who)
    try:
        key.verify(base64.b64decode(signature, validate=True), body, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, binascii.Error, ValueError):
        raise ConfigError(
            f"{who}: its {what} must be made with the key that it names. It is not; ask the node for a new one."
        ) from None
