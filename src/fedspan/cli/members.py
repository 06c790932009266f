"""`fedspan deploy request, admit, renew, revoke, audit`: who belongs to a federation, and what was done about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli.console import say, user_path
from fedspan.cli.deploy import Folder, Json, NodeFolder, deploy, needs_flower
from fedspan.errors import ConfigError

if TYPE_CHECKING:
    from fedspan.deploy.operations.membership import Membership
    from fedspan.deploy.operations.node_bundle import NodeBundle

__all__ = ["admit", "audit", "deploy", "renew", "request", "revoke"]

Address = Annotated[str | None, typer.Option("--server", help="host:port by which the node reaches the server.")]
Days = Annotated[int, typer.Option("--days", help="How long the certificate lasts.", min=1, max=3650)]
BundleOut = Annotated[
    Path | None, typer.Option("--out", help="The bundle for the node; default: NAME.bundle.json here.")
]


@deploy.command()
def request(
    folder: NodeFolder,
    name: Annotated[str | None, typer.Option("--name", help="The node's name; default: the folder's.")] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Ask for a new key instead of a first one.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="The request; default: NAME.request.json here.")] = None,
) -> None:
    """On a node: make its own key, which stays there, and a request to send to the server's operator."""
    needs_flower()
    from fedspan.deploy.operations.keys import fingerprint
    from fedspan.deploy.operations.node_bundle import installed
    from fedspan.deploy.operations.node_request import request_place, request_renewal

    user_path(folder, "deploy request: NODE")
    known = installed(folder)
    called = name or (folder.resolve().name if known is None else known.name)
    path = user_path(out or Path(f"{called}.request.json"), "deploy request: --out")
    made = (request_renewal if renew else request_place)(folder, called, path)
    say(f"{path}: send it to the server's operator. The private key stays in {folder}.")
    say(f"Key: {fingerprint(made.public_key)}; the operator sees the same, compare it on the telephone.")


@deploy.command()
def admit(
    folder: Folder,
    file: Annotated[Path, typer.Argument(metavar="REQUEST", help="A node's request.", show_default=False)],
    server: Address = None,
    days: Days = 825,
    out: BundleOut = None,
) -> None:
    """On the server: give the node of a request a free place; a run that goes on asks it from its next round on."""
    _check_out(out)
    _hand_over(_membership(folder, server, days).admit(file), out, "takes")


@deploy.command()
def renew(
    folder: Folder,
    who: Annotated[
        str,
        typer.Argument(
            metavar="WHO", help="A node's name (a new date), its request (a new key), or `server`.", show_default=False
        ),
    ],
    server: Address = None,
    days: Days = 825,
    out: BundleOut = None,
) -> None:
    """On the server: a new date or a new key for a node, or a new certificate for the server itself."""
    _check_out(out)
    members = _membership(folder, server, days)
    if who == "server":
        say(f"The server's certificate lasts until {members.renew_server()}, from its next start on.")
        return
    _hand_over(members.renew(who), out, "keeps")


@deploy.command()
def revoke(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The node's name.", show_default=False)],
    reason: Annotated[str, typer.Option("--reason", help="For the audit log.")] = "",
) -> None:
    """On the server: take a node's key away for good; its answers count no more, nor one that is on its way."""
    _membership(folder).revoke(name, reason)
    say(f"{name} is revoked. Its place stays empty.")


@deploy.command()
def audit(
    folder: Folder,
    verify: Annotated[bool, typer.Option("--verify", help="Only say whether all is as it was written.")] = False,
    head: Annotated[
        str | None, typer.Option("--head", help="A hash noted earlier, which must be in the log.", show_default=False)
    ] = None,
    last: Annotated[int, typer.Option("--last", help="How many events to show.", min=1)] = 50,
    as_json: Json = False,
) -> None:
    """Who was admitted, renewed, revoked, joined or refused, and which round used whom; nothing of it can be edited."""
    needs_flower()
    from collections import deque

    from fedspan.deploy.audit_log import AuditLog
    from fedspan.deploy.operations.deployment import Deployment

    log = AuditLog(Deployment(folder / "server").folder)
    if verify or head is not None:
        count, found = log.verify(head)
        say(f"{count} events, all as they were written. Head: {found}")
        return
    for entry in deque(log.entries(), last):
        if as_json:
            typer.echo(entry.model_dump_json())
            continue
        facts = ", ".join(f"{k} {json.dumps(v, ensure_ascii=False)}" for k, v in entry.facts.items() if v is not None)
        say(f"{entry.number} {entry.time:%Y-%m-%d %H:%M:%S} {entry.by}: {entry.event}: {facts}")


def _membership(folder: Path, server: str | None = None, days: int = 825) -> Membership:
    needs_flower()
    from fedspan.deploy.operations.deployment import Deployment
    from fedspan.deploy.operations.membership import Membership

    return Membership(Deployment(folder / "server"), server, days)


def _check_out(out: Path | None) -> None:
    """Before anything is done: a bundle that cannot be written would have to be made again."""
    if out is not None and user_path(out, "deploy: --out").suffix != ".json":
        raise ConfigError(f"deploy: --out must end in .json. Got {out.name!r}.")
    if out is not None and not out.resolve().parent.is_dir():
        raise ConfigError(f"deploy: the folder {out.parent} must exist. Make it first.")


def _hand_over(bundle: NodeBundle, out: Path | None, verb: str) -> None:
    from fedspan.deploy.operations.keys import certified_key, fingerprint, parse_certificate
    from fedspan.storage.atomic import write_atomic

    path = out or Path(f"{bundle.name}.bundle.json")
    write_atomic(path, bundle.model_dump_json(indent=1) + "\n")
    certificate = parse_certificate(bundle.certificate.encode(), "the certificate")
    end = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
    key = fingerprint(str(certified_key(certificate)))
    say(f"{bundle.name} {verb} place {bundle.place} until {end}. Its key: {key}")
    say(f"{path}: send it to the node, which starts with `fedspan deploy node NODE --bundle {path.name}`; no secret.")
