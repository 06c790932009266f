"""What an admitted node gets back: certificates and where the server is. It holds no secret."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Le, MaxLen
from cryptography.exceptions import InvalidSignature
from pydantic import Field, ValidationError

from fedspan.deploy.operations.keys import (
    AUTHORITY,
    AUTHORITY_REMEDY,
    CERTIFICATE,
    KEY,
    NEXT_KEY,
    NODE_REMEDY,
    certified_key,
    certified_name,
    check_date,
    parse_certificate,
    pem,
    public_text,
    read_node_key,
    write_private,
)
from fedspan.deploy.roster_file import MOST_PLACES, NodeName
from fedspan.deploy.server.answers import CheckedFacts, describe_fault
from fedspan.errors import ConfigError
from fedspan.storage.atomic import fsync_directory
from fedspan.storage.toml import read_small

FILE = "bundle.json"
Pem: TypeAlias = Annotated[str, MaxLen(10_000)]
_ADDRESS = re.compile(r"\A[A-Za-z0-9.\[\]:-]{1,253}:[0-9]{1,5}\Z")


class NodeBundle(CheckedFacts):
    """What a node starts from, besides its own key."""

    kind: Literal["fedspan node bundle"] = "fedspan node bundle"
    format: Literal[1] = 1
    federation: Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
    name: NodeName
    place: Annotated[int, Ge(0), Le(MOST_PLACES)]
    server: Annotated[str, MaxLen(300)] | None = None
    """host:port, if the operator said it."""
    authority: Pem
    certificate: Pem
    """By which the authority says whose key this is, and until when."""


def check_address(server: str, who: str) -> str:
    """A host and a port.

    Raises:
        ConfigError: if it is none.
    """
    if not _ADDRESS.match(server) or not 1 <= int(server.rpartition(":")[2]) <= 65535:
        raise ConfigError(f"{who} must be host:port. Got {server[:80]!r}.")
    return server


def install_bundle(folder: Path, path: Path) -> NodeBundle:
    """Put a bundle into the folder of the node that asked for it; a renewed key takes the old one's place.

    Raises:
        ConfigError: if it is damaged, expired, for another node, or of another authority than the node trusts.
    """
    raw, who = read_small(path, "Bundle"), f"Bundle {path.name}"
    try:
        bundle = NodeBundle.model_validate_json(raw)
    except ValidationError as e:
        raise ConfigError(f"{who}: {describe_fault(e)} Ask the server's operator for it again.") from None
    root = parse_certificate(bundle.authority.encode(), f"the authority of {who}")
    certificate = parse_certificate(bundle.certificate.encode(), f"the certificate of {who}")
    try:
        certificate.verify_directly_issued_by(root)
    except (InvalidSignature, ValueError, TypeError):
        raise ConfigError(f"{who}: its certificate must be signed by its authority. It is not.") from None
    if certified_name(certificate) != bundle.name:
        raise ConfigError(f"{who}: its certificate must be for {bundle.name}. It is for another name.")
    if bundle.server is not None:
        check_address(bundle.server, f"{who}: its server")
    check_date(f"the authority of {who}", root.not_valid_after_utc, AUTHORITY_REMEDY)
    check_date(f"the certificate of {who}", certificate.not_valid_after_utc, NODE_REMEDY)
    name = _key_of(folder, certified_key(certificate), who)
    trusted = folder / AUTHORITY
    if trusted.exists() and parse_certificate(read_small(trusted, "Node"), str(trusted)) != root:
        raise ConfigError(f"{who}: it comes from another authority than {trusted}. Remove that file to trust this one.")
    write_private(trusted, pem(root), replace=True)
    write_private(folder / CERTIFICATE, pem(certificate), replace=True)
    write_private(folder / FILE, bundle.model_dump_json(indent=1).encode() + b"\n", replace=True)
    if name == NEXT_KEY:  # last: until then the bundle can be installed again
        os.replace(folder / NEXT_KEY, folder / KEY)
        fsync_directory(folder)
    return bundle


def installed(folder: Path) -> NodeBundle | None:
    """The bundle that a node was started from, if any."""
    try:
        return NodeBundle.model_validate_json(read_small(folder / FILE, "Node"))
    except (ConfigError, ValidationError):
        return None


def _key_of(folder: Path, wanted: str | None, who: str) -> str:
    """Which of the node's keys a certificate is for."""
    for name in (KEY, NEXT_KEY):
        if (folder / name).exists() and public_text(read_node_key(folder / name).public_key()) == wanted:
            return name
    raise ConfigError(f"{who}: it is for another key than those in {folder}. Give each node its own bundle.")
