"""Who belongs to a federation: admit, renew and revoke nodes while it lives. Each is written down before it is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509

from fedspan.deploy.audit_log import AuditLog
from fedspan.deploy.operations import processes
from fedspan.deploy.operations.deployment import Deployment
from fedspan.deploy.operations.keys import (
    AUTHORITY,
    DAYS,
    certify_server,
    check_server_dates,
    fingerprint,
    issue_certificate,
    pem,
    read_certificate,
)
from fedspan.deploy.operations.node_bundle import NodeBundle, check_address
from fedspan.deploy.operations.node_request import NodeRequest, read_request
from fedspan.deploy.roster_file import Place, Places, changing_places, write_places
from fedspan.errors import ConfigError, FedspanError, nearest


class Membership:
    """The members of a deployment.

    Args:
        address: host:port by which nodes reach the server, for their bundles.
    """

    def __init__(self, deployment: Deployment, address: str | None = None, days: int = DAYS) -> None:
        if address is not None:
            check_address(address, "deploy: --server")
        if not 1 <= days <= 3650:
            raise ConfigError(f"deploy: --days must lie in 1..3650. Got {days}.")
        self.deployment, self.address, self.days = deployment, address, days
        self.folder, self.log = deployment.folder, AuditLog(deployment.folder)

    def admit(self, path: Path) -> NodeBundle:
        """Give the node of a request the first free place; a running server asks it from its next round on.

        Raises:
            ConfigError: if the request is bad, its name or key is taken, or no place is free.
        """
        with self._refusals(path), changing_places(self.folder) as held:
            request = read_request(path)
            if request.replaces is not None:
                raise ConfigError(f"Request {path.name}: it is for a new key. Use fedspan deploy renew.")
            _check_new_key(held, request)
            taken, i = held.find(request.name), held.free()
            if taken is not None:
                state = "revoked; let it take another name" if held.places[taken].state == "revoked" else "taken"
                raise ConfigError(f"deploy admit: the name {request.name} is {state}.")
            if i is None:
                raise ConfigError(
                    f"deploy admit: all {len(held.places)} places are taken. A client can still join what was learnt"
                    " with fedspan onboard, and a new federation can have more --places."
                )
            certificate = self._certificate(request.name, request.public_key)
            place = Place(
                id=held.places[i].id,
                state="admitted",
                name=request.name,
                public_key=request.public_key,
                expires=certificate.not_valid_after_utc,
            )
            self.log.append("admitted", _told(i, place))
            return self._bundle(self._write(held.replaced(i, place)), i, certificate)

    def renew(self, who: str) -> NodeBundle:
        """Give a node a new date, if `who` is its name, or a new key, if it is the file of its request.

        Raises:
            ConfigError: if there is no such node, it was revoked, or the request is not signed with the key it has.
        """
        path = Path(who)
        with self._refusals(path), changing_places(self.folder) as held:
            request = read_request(path) if path.is_file() else None
            i = _admitted(held, who if request is None else request.name, "deploy renew")
            place = held.places[i]
            changes: dict[str, object] = {}
            if request is not None:
                if request.replaces is None or request.replaces != place.public_key:
                    raise ConfigError(
                        f"Request {path.name}: it must be signed with the key that {place.name} has. It is not; a node"
                        " that lost its key is revoked, and takes another place."
                    )
                _check_new_key(held, request)
                changes = {"past_keys": [*held.past_keys, place.public_key], "unregister": _gone(held, place)}
                place = place.model_copy(update={"public_key": request.public_key, "node": None})
            certificate = self._certificate(str(place.name), str(place.public_key))
            place = place.model_copy(update={"expires": certificate.not_valid_after_utc})
            self.log.append("renewed", _told(i, place) | {"new_key": request is not None})
            return self._bundle(self._write(held.replaced(i, place, **changes)), i, certificate)

    def renew_server(self) -> str:
        """Give the server a new certificate of the same authority, for its next start; until when."""
        end = certify_server(self.folder, days=self.days)
        self.log.append("renewed", {"server": True, "expires": f"{end:%Y-%m-%d}"})
        return f"{end:%Y-%m-%d}"

    def revoke(self, name: str, reason: str = "") -> None:
        """Take a node's key away for good. A running server refuses it at once, an answer on its way included.

        Raises:
            ConfigError: if there is no such node, or it was revoked before.
        """
        with self._refusals(None), changing_places(self.folder) as held:
            i = _admitted(held, name, "deploy revoke")
            place = held.places[i]
            self.log.append("revoked", _told(i, place) | {"reason": reason})
            changes = {"past_keys": [*held.past_keys, place.public_key], "unregister": _gone(held, place)}
            self._write(held.replaced(i, place.model_copy(update={"state": "revoked", "node": None}), **changes))

    @contextmanager
    def _refusals(self, path: Path | None) -> Iterator[None]:
        """Write down why something was not done."""
        try:
            yield
        except ConfigError as e:
            self.log.append("refused", {"file": None if path is None else path.name, "why": str(e)})
            raise

    def _certificate(self, name: str, public: str) -> x509.Certificate:
        check_server_dates(self.folder)
        return issue_certificate(self.folder, name, public, self.days)

    def _write(self, held: Places) -> Places:
        """Keep the places, which a running server sees, and then tell the SuperLink, if one runs."""
        write_places(self.folder, held)
        if processes.running(self.folder):
            try:
                return self.deployment.synchronise(held)
            except Exception as e:  # whatever a client of Flower raises
                raise FedspanError(
                    f"Deploy: it is written down, but the SuperLink could not be told ({type(e).__name__}). Say"
                    " `fedspan deploy server` or `run` again."
                ) from e
        return held

    def _bundle(self, held: Places, i: int, certificate: x509.Certificate) -> NodeBundle:
        return NodeBundle(
            federation=held.federation,
            name=str(held.places[i].name),
            place=i,
            server=self.address,
            authority=pem(read_certificate(self.folder / AUTHORITY)).decode(),
            certificate=pem(certificate).decode(),
        )


def _check_new_key(held: Places, request: NodeRequest) -> None:
    if request.public_key in held.past_keys:
        raise ConfigError(
            f"deploy: the key of {request.name} was revoked or replaced, and cannot come back. Let the node make"
            " another."
        )
    if any(p.public_key == request.public_key for p in held.places):
        raise ConfigError(f"deploy: the key of {request.name} is in use already. Let the node make another.")


def _admitted(held: Places, name: str, who: str) -> int:
    i = held.find(name)
    if i is None:
        known = [p.name for p in held.places if p.state == "admitted" and p.name]
        raise ConfigError(f"{who}: there is no node {name[:100]!r}.{nearest(name[:100], known)}")
    if held.places[i].state == "revoked":
        raise ConfigError(
            f"{who}: {name} is revoked, for good. It can ask for another place with another name and key."
        )
    return i


def _gone(held: Places, place: Place) -> list[int]:
    return [*held.unregister, *([] if place.node is None else [place.node])]


def _told(i: int, place: Place) -> dict[str, object]:
    expires = None if place.expires is None else f"{place.expires:%Y-%m-%d}"
    return {"node": place.name, "place": i, "key": fingerprint(str(place.public_key)), "expires": expires}
