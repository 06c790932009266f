"""`fedspan deploy`: the same methods on a real Flower federation."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspan.cli.console import listed, note, say, show, size, table, user_path
from fedspan.cli.run import Overrides
from fedspan.errors import ConfigError, FedspanError

if TYPE_CHECKING:
    from fedspan.config import RunConfig
    from fedspan.deploy.experiment import DataKind
    from fedspan.deploy.operations.deployment import Deployment
    from fedspan.deploy.policy import Policy

deploy = typer.Typer(
    no_args_is_help=True, help="A real federation on Flower: keys, server, nodes, runs; `local` tries it out."
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of deploy keys.", show_default=False)]
NodeFolder = Annotated[Path, typer.Argument(metavar="NODE", help="The node's own folder.", show_default=False)]
Exp = Annotated[Path, typer.Argument(metavar="EXP.toml", help="The experiment file.", show_default=False)]
Nodes = Annotated[int, typer.Option("--nodes", help="How many nodes.", min=2, max=200)]
Port = Annotated[int | None, typer.Option("--port", help="Port of the SuperLink; default: a free one.")]
Deadline = Annotated[float, typer.Option("--deadline", help="Seconds a round waits for answers.")]
Quorum = Annotated[float, typer.Option("--quorum", help="Share of answers without which a round is skipped.")]
Over = Annotated[float, typer.Option("--over-selection", help="Share of nodes asked beyond those wanted.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")]
Cold = Annotated[bool, typer.Option("--cold", help="No warm worker: every message imports torch again.")]
Wait = Annotated[float, typer.Option("--timeout", help="Seconds to watch the run.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def _needs_unix() -> None:
    if not hasattr(os, "fork") or not hasattr(socket, "AF_UNIX"):
        raise ConfigError(
            f"deploy: a federation runs on Linux and macOS only. Got {platform.system()}; simulate it here with"
            " `fedspan run`."
        )


def needs_flower() -> None:
    _needs_unix()
    for package in ("flwr", "cryptography"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"deploy: it needs {package}. Install it: pip install 'fedspan[flower]'.")


@deploy.command()
def local(
    exp: Annotated[
        Path | None, typer.Argument(metavar="[EXP.toml]", help="Default: digits, pFL-MF, 5 rounds.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    nodes: Nodes = 3,
    out: Annotated[Path | None, typer.Option("--out", help="Keep everything in this folder.")] = None,
    deadline: Deadline = 600.0,
    quorum: Quorum = 0.5,
    cold: Cold = False,
    timeout: Wait = 3600.0,
) -> None:
    """Keys, server, nodes and a run on this machine alone, one partition per node; all is stopped afterwards."""
    needs_flower()
    import fedspan.deploy

    if exp is not None and "=" in exp.name:  # the file may be left out before overrides
        exp, overrides = None, [str(exp), *(overrides or [])]
    default = Path(fedspan.deploy.__file__).parent / "local.toml"
    config = _config(exp or default, [*(overrides or []), f"partition.clients={nodes}"])
    from fedspan.deploy.policy import Policy

    policy = Policy(deadline=deadline, quorum=quorum)
    if out is not None:
        _local(user_path(out, "--out"), config, nodes, policy, cold, timeout)
        say(f"Everything is in {out}; the run in {out / 'server' / 'runs' / config.name}.")
        return
    with tempfile.TemporaryDirectory(prefix="fedspan-local-") as folder:
        _local(Path(folder), config, nodes, policy, cold, timeout, passing=True)


def _local(
    folder: Path, config: RunConfig, nodes: int, policy: Policy, cold: bool, timeout: float, passing: bool = False
) -> None:
    from fedspan.config import assemble_data
    from fedspan.deploy.operations.deployment import LOOPBACK, Deployment, start_node, watch_run
    from fedspan.deploy.operations.keys import make_keys
    from fedspan.deploy.operations.watcher import stopped_afterwards
    from fedspan.method.named_code import allowance

    data = assemble_data(config)  # before anything is started: what cannot be loaded is said at once
    _warn(config, nodes)
    names = [f"node-{i}" for i in range(nodes)]
    if not (folder / "server").exists():
        make_keys(folder, names)
    server = Deployment(folder / "server")
    places = [*(folder / name for name in names), server.folder]  # the server last: nodes would only complain
    with stopped_afterwards(places, remove=folder if passing else None):
        server.start()
        say(f"SuperLink on https://{LOOPBACK}:{server.port}, TLS and node authentication on.")
        if list(server.register()) != names:
            raise ConfigError(f"deploy local: {folder} has other nodes. Use --nodes {len(server.register())}.")
        for i, name in enumerate(names):
            place: dict[str, Any] = {"partition": i, "allow_code": sorted(allowance().packages)}
            place |= {"root": str(Path(config.data.root).resolve())} if config.data.root else {}
            start_node(folder / name, f"{LOOPBACK}:{server.port}", place, warm=not cold)
        say(f"{nodes} nodes started, {'without' if cold else 'each with'} a warm worker.")
        groups = None if data.groups is None else data.groups.tolist()
        number = server.submit(config, _kind(config, data), policy, groups=groups)
        watch_run(server, config.name, number, timeout, _tell)
        _outcome(server.out(config.name))


@deploy.command()
def keys(
    folder: Folder,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="How many nodes; default: 3, or none with --places.", min=0, max=200)
    ] = None,
    names: Annotated[str | None, typer.Option("--names", help="Names of the nodes, with commas.")] = None,
    places: Annotated[
        int | None,
        typer.Option("--places", help="Clients in all; places beyond the nodes are free for deploy admit."),
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A name or address under which nodes reach the server.")
    ] = None,
) -> None:
    """Make the server's certificates, and a key for each node named here; others make their own and are admitted."""
    needs_flower()
    from fedspan.deploy.operations.keys import make_keys

    count = nodes if nodes is not None else 3 if places is None else 0
    called = listed(names) if names else [f"node-{i}" for i in range(count)]
    make_keys(user_path(folder, "deploy keys: DIR"), called, host or [], places=places)
    say(f"{folder / 'server'}: stays on the server.")
    if called:
        say(f"{', '.join(called)}: copy each folder to its node.")
    if places is not None and places > len(called):
        say(f"{places - len(called)} of {places} places are free: fedspan deploy request, then fedspan deploy admit.")


@deploy.command()
def server(folder: Folder, port: Port = None) -> None:
    """Start the SuperLink on the loopback address with TLS, node authentication and a database; register the nodes."""
    needs_flower()
    from fedspan.deploy.operations.deployment import LOOPBACK, Deployment

    made = Deployment(folder / "server")
    made.start(port)
    known = made.register()
    said = f"{len(known)} of {made.clients} places are taken: {', '.join(known) or 'none'}."
    say(f"SuperLink on https://{LOOPBACK}:{made.port}; {said}")
    announce_ends(made)
    say("Only this machine can reach it; for others put the proxy of `fedspan deploy proxy` before it.")


@deploy.command()
def node(
    folder: NodeFolder,
    superlink: Annotated[
        str | None, typer.Option("--server", help="host:port of the server or its proxy; default: the bundle's.")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="What the server's operator sent back, at the first start.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="npz with x, y, perhaps x_test, y_test; or a table (.csv, .parquet).")
    ] = None,
    loader: Annotated[str | None, typer.Option("--loader", help="package.module:function that returns them.")] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", help="A client of the experiment's partition.")
    ] = None,
    root: Annotated[Path | None, typer.Option("--root", help="Where sources lie, with --partition.")] = None,
    cold: Cold = False,
) -> None:
    """Start a node: its own data, its own state, and a connection to the server."""
    needs_flower()
    from fedspan.deploy.node.owner_policy import CODE_REMEDY, read_policy
    from fedspan.deploy.operations import processes
    from fedspan.deploy.operations.deployment import start_node
    from fedspan.deploy.operations.keys import check_node_dates
    from fedspan.deploy.operations.node_bundle import check_address, install_bundle, installed
    from fedspan.method.named_code import Allowance, allowance

    if sum(x is not None for x in (data, loader, partition)) != 1:
        raise ConfigError("deploy node: exactly one of --data, --loader and --partition must be given.")
    if data is not None and not data.is_file():
        raise ConfigError(f"deploy node: --data must be a file. Got {data}.")
    place: dict[str, Any] = {"loader": loader, "partition": partition}
    place |= {"data": str(data.resolve()) if data else None, "root": str(root.resolve()) if root else None}
    place["allow_code"] = sorted(allowance().packages)
    if loader is not None:
        policy = read_policy(folder)
        policy.check_loader(loader)
        allowed = Allowance(allowance().packages | {*policy.allow_code}, CODE_REMEDY)
        allowed.need(loader.partition(":")[0].partition(".")[0], loader, "deploy node: --loader")
    if bundle is not None:
        if processes.running(folder.resolve()):
            raise ConfigError(f"deploy node: the node in {folder} is running. Stop it first: fedspan deploy stop.")
        install_bundle(folder, bundle)
    known = installed(folder)
    where = superlink or (known.server if known is not None else None)
    if where is None:
        raise ConfigError("deploy node: --server must say where the server is; the bundle does not.")
    for text in check_node_dates(folder) if (folder / "ca.crt").exists() else ():
        note(text)
    start_node(
        folder,
        check_address(where, "deploy node: --server"),
        {k: v for k, v in place.items() if v is not None},
        warm=not cold,
    )
    say(f"{folder.name} is started. Its log: {folder / 'supernode.log'}; which runs it serves: {folder / 'node.toml'}.")
    say(f"What a run finds to say about its data, to you alone: {folder / 'warnings.txt'}.")


@deploy.command()
def run(
    folder: Folder,
    exp: Exp,
    overrides: Overrides = None,
    deadline: Deadline = 600.0,
    quorum: Quorum = 0.5,
    over_selection: Over = 0.0,
    norm_factor: Annotated[
        float, typer.Option("--norm-factor", help="Times the median norm of a change that is refused.")
    ] = 20.0,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Shape of an example, with commas, where the source is not known.")
    ] = None,
    fresh: Fresh = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not watch it.")] = False,
    timeout: Wait = 86_400.0,
) -> None:
    """Order a run; one that was interrupted goes on after its last round."""
    needs_flower()
    from fedspan.deploy.operations.deployment import Deployment, watch_run
    from fedspan.deploy.operations.keys import check_server_dates
    from fedspan.deploy.policy import Policy

    made = Deployment(folder / "server")
    known = made.register()
    if made.clients < 2:
        raise ConfigError(f"deploy run: a federation must have at least 2 places. Got {made.clients}.")
    config = _config(exp, [*(overrides or []), f"partition.clients={made.clients}"])
    policy = Policy(deadline=deadline, quorum=quorum, over_selection=over_selection, norm_factor=norm_factor)
    check_server_dates(made.folder)
    _warn(config, made.clients)
    number = made.submit(config, _kind(config, None, shape), policy, fresh=fresh)
    who = f"{len(known)} nodes in {made.clients} places"
    say(f"Run {number} is ordered: {config.method['name']}, {config.rounds} rounds, {who}.")
    announce_ends(made)
    if not detach:
        watch_run(made, config.name, number, timeout, _tell)
        _outcome(made.out(config.name))


@deploy.command()
def status(folder: Folder, as_json: Json = False) -> None:
    """What runs, and how far: a federation's runs, nodes and refusals; a node's key, policy, last round and state."""
    needs_flower()
    from fedspan.deploy.node.node_status import is_node, node_status

    if is_node(folder):
        _show_node(node_status(folder), as_json)
        return
    from fedspan.deploy.operations import processes
    from fedspan.deploy.operations.deployment import Deployment

    made = Deployment(folder / "server" if (folder / "server").is_dir() else folder)
    parts = {p.name: processes.running(p) for p in sorted(folder.iterdir()) if p.is_dir()}
    names = sorted(p.parent.name for p in (folder / "server" / "runs").glob("*/status.json"))
    runs = {name: made.status(name) for name in names}
    if as_json:
        found = {"processes": {k: [e["name"] for e in v] for k, v in parts.items() if v}, "runs": runs}
        found["places"] = places_of(made)
        typer.echo(json.dumps(found, indent=1))
        return
    for name, entries in parts.items():
        if entries:
            say(f"{name}: " + ", ".join(f"{e['name']} (pid {e['pid']})" for e in entries))
    if not any(parts.values()):
        say("Nothing of it runs on this machine.")
    rows = [(p["place"], p["name"] or "", p["state"], p["expires"] or "", p["key"] or "") for p in places_of(made)]
    show(table(["place", "node", "", "key until", "key"], rows, right=(0,)))
    announce_ends(made)
    for name, body in runs.items():
        if body is not None:
            say(f"{name}: {body['state']}")
            _tell(body)
            counts = [(k, v.get("examples"), v["answered"], v["refused"]) for k, v in body["nodes"].items()]
            show(table(["node", "examples", "answers", "refused"], counts, right=(1, 2, 3)))
            for entry in body["refused"][-5:]:
                say(f"  round {entry['round']}: {entry['why']}")


@deploy.command()
def stop(folder: Folder) -> None:
    """Stop what `deploy` started in a folder: a whole federation's, the server's or one node's."""
    _needs_unix()
    from fedspan.deploy.operations import processes

    folders = [folder, *(p for p in sorted(folder.iterdir()) if p.is_dir())] if folder.is_dir() else []
    # The server last: nodes that lose it would only complain.
    for place in sorted(folders, key=lambda p: p.name == "server"):
        for name in processes.stop(place):
            say(f"{place.name}: {name} stopped.")


@deploy.command()
def proxy(
    folder: Folder,
    host: Annotated[str, typer.Option("--host", help="The server's name, as nodes know it.")],
    listen: Annotated[int, typer.Option("--listen", help="The port nodes connect to.")] = 443,
    port: Annotated[int, typer.Option("--port", help="The SuperLink's port.")] = 8000,
    body_mb: Annotated[int, typer.Option("--body-mb", help="Largest request.", min=6)] = 8,
) -> None:
    """Print a configuration for nginx: TLS, only what nodes need, and a limit on requests."""
    from fedspan.deploy.operations.proxy import nginx

    typer.echo(nginx(folder.resolve() / "server", host, listen, port, body_mb), nl=False)


@deploy.command()
def predict(
    folder: NodeFolder,
    data: Annotated[Path, typer.Option("--data", help="npz with x, or a table; perhaps with labels to compare with.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Write labels and probabilities (.npz, .csv), or labels alone (.npy).")
    ] = None,
) -> None:
    """Predict with a node's personal model, on the node, without the server; labels are not needed."""
    from fedspan.data.tables.arrow_files import is_table
    from fedspan.deploy.node.inference import check_out, predict_file, predict_table, write_predictions

    if out is not None:
        check_out(user_path(out, "--out"))
    found = predict_table(folder, data) if is_table(data) else predict_file(folder, data)
    if out is not None:
        write_predictions(out, found)
    else:
        typer.echo("\n".join(map(str, found.labels.tolist())))
    if found.right is not None:
        note(f"{100 * found.right:.2f} % right of {len(found.labels)}.")


@deploy.command()
def export(
    folder: NodeFolder,
    file: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.", show_default=False)],
) -> None:
    """Write a node's personal model to a file, as `fedspan export` does."""
    from fedspan.deploy.node.inference import export_model

    user_path(file, "deploy export: the file")
    if file.suffix != ".safetensors":
        raise ConfigError(f"deploy export: the file must end in .safetensors. Got {file.name!r}.")
    about = export_model(folder, file)
    say(f"{file}: client {about['client']} after round {about['round']}, {size(file.stat().st_size)}.")


# ------------------------------------------------------------------------------------------------ parts


def places_of(made: Deployment) -> list[dict[str, Any]]:
    """The places of a federation, as they are shown."""
    from fedspan.deploy.operations.keys import fingerprint
    from fedspan.deploy.roster_file import read_places

    return [
        {
            "place": i,
            "name": p.name,
            "state": p.state,
            "expires": None if p.expires is None else f"{p.expires:%Y-%m-%d}",
            "key": None if p.public_key is None else fingerprint(p.public_key),
        }
        for i, p in enumerate(read_places(made.folder).places)
    ]


def announce_ends(made: Deployment) -> None:
    """Say what ends soon or has ended: the server's certificates, and nodes' keys."""
    from fedspan.deploy.operations.keys import check_date, check_server_dates
    from fedspan.deploy.roster_file import read_places

    ends: list[Callable[[], list[str]]] = [partial(check_server_dates, made.folder)]
    for p in read_places(made.folder).places:
        if p.state == "admitted" and p.expires is not None:
            what, remedy = f"the key of {p.name}", f"Renew it: fedspan deploy renew DIR {p.name}"
            ends.append(partial(check_date, what, p.expires, remedy))
    for check in ends:
        try:
            notes = check()
        except ConfigError as e:
            notes = [str(e)]
        for text in notes:
            note(text)


def _show_node(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    policy = found["policy"]
    allowed = policy if isinstance(policy, str) else ", ".join(f"{k} = {v}" for k, v in policy.items()) or "everything"
    served = "none yet" if found["round"] is None else f"round {found['round']} of {found['run']}, {found['at']}"
    connected = "yes" if found["connected"] else "no, no SuperNode runs" if found["server_reached"] else "no"
    rows = [
        ("key", found["key"] + (", a renewal is requested" if found["renewal"] else "")),
        ("key until", found["expires"] or ("no date" if found["admitted"] else "not admitted yet")),
        ("policy allows", allowed),
        ("last round served", served),
        ("state", f"{found['state'] or 'none'} ({size(found['state_bytes'])} in all)"),
        ("processes", ", ".join(found["processes"]) or "none"),
        ("server", found["server"] or "not known"),
        ("connected", connected),
    ]
    say(f"{found['node']}:" if found["place"] is None else f"{found['node']}, place {found['place']}:")
    show(table(["", ""], rows))
    for text in [*found["notes"], *([found["fault"]] if found["fault"] else [])]:
        note(text)


def _config(exp: Path, overrides: Sequence[str]) -> RunConfig:
    from fedspan.config import load_config
    from fedspan.deploy.experiment import deployable, with_defence

    config = deployable(load_config(exp, overrides).resolve())
    if config.defence is None:
        note("[defence] is on, as the file says nothing of it: simulate the run's config.toml for the same numbers.")
    return with_defence(config)


def _warn(config: RunConfig, clients: int) -> None:
    """Say what is probably not meant, as far as it can be known without the nodes' data."""
    from fedspan.simulation import warnings

    for sentence in warnings.of_settings(config.only(config.method["name"]), clients, config.rounds):
        note(sentence)


def _kind(config: RunConfig, data: Any, shape: str | None = None) -> DataKind | None:
    """What examples look like: from the source's name, from data, or as the user says; None for nodes' own tables."""
    from fedspan.deploy.experiment import DataKind, kind_of

    known = kind_of(config)
    if known is not None:
        return known
    if data is not None:
        return DataKind.of(data)
    if config.data.is_table:
        return None
    if shape is None:
        raise ConfigError(f"deploy run: the source '{config.data.source}' is not a known one; say --shape 3,32,32.")
    try:
        return DataKind(tuple(int(n) for n in shape.split(",")), config.data.classes)
    except ValueError:
        raise ConfigError(f"deploy run: --shape must be integers with commas. Got {shape[:40]!r}.") from None


def _tell(body: dict[str, Any]) -> None:
    facts = [f"round {body['round']} of {body['rounds']}"]
    if body["answered"] is not None:
        facts.append(f"{body['answered']} of {len(body['nodes'])} nodes answered")
    if body["accuracy"] is not None:
        facts.append(f"accuracy {100 * body['accuracy']:.2f} %")
    facts.append(f"{size(body['bytes'].get('up', 0))} up, {size(body['bytes'].get('down', 0))} down")
    if body["seconds"] is not None:
        facts.append(f"{body['seconds']:.1f} s")
    refused = sum(v["refused"] for v in body["nodes"].values())
    guard = body.get("defence") or {}
    cut = [f"{guard[k]} {k}" for k in ("clipped", "capped") if guard.get(k)]
    say("  " + "; ".join([", ".join(facts), *([f"{refused} refused"] if refused else []), *cut]))


def _outcome(out: Path) -> None:
    """Personal accuracy of every node."""
    try:
        result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise FedspanError(f"deploy: {out / 'result.json'} cannot be read ({type(e).__name__}).") from None
    measured = result["per_client"]
    usual = "accuracy" if "accuracy" in measured else "loss"
    shown = [usual, *(m for m in result.get("evaluation", {}).get("metrics", {}) if m in measured and m != usual)]
    rows = [
        (name, n, *(_measured(measured[m][k], m) for m in shown))
        for k, (name, n) in enumerate(zip(result["names"], measured["n"]))
    ]
    titles = ["node", "test examples", *(f"personal {m}" for m in shown)]
    show(table(titles, rows, right=range(1, len(titles))))


def _measured(value: float | None, measure: str) -> str:
    return "n/a" if value is None else f"{100 * value:.2f} %" if measure == "accuracy" else f"{value:.4f}"
