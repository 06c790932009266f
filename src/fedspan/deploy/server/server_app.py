"""The ServerApp that Flower loads beside the SuperLink."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import cast

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid.http_grid import HttpGrid

from fedspan.deploy.envelope import printable
from fedspan.errors import ConfigError, FedspanError

FOLDER = "FEDSPAN_DEPLOY"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do what is left of the run that `fedspan deploy run` asked for."""
    from fedspan.deploy.audit_log import AuditLog
    from fedspan.deploy.experiment import read_config, read_experiment
    from fedspan.deploy.operations.deployment import Deployment
    from fedspan.deploy.operations.processes import end_with
    from fedspan.deploy.roster_file import LiveRoster
    from fedspan.deploy.server.database import trim_database
    from fedspan.deploy.server.quota_grid import QuotaGrid
    from fedspan.deploy.server.server import Server
    from fedspan.deploy.server.table_agreement import agree_on_table, kind_of_table
    from fedspan.method.named_code import only_allowing

    if FOLDER not in os.environ:
        raise ConfigError(f"Server: {FOLDER} must name the folder. Start the SuperLink with fedspan deploy server.")
    deployment = Deployment(Path(os.environ[FOLDER]))
    end_with(deployment.folder, "superlink")  # Flower may take a minute, and this process holds the run directory
    order = deployment.order(str(context.run_config["name"]))

    def tell(text: str) -> None:
        with open(order.out / "server.log", "a") as log:  # what a ServerApp prints goes to nobody
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n")

    def trimmed() -> None:
        freed = trim_database(deployment.folder / "state.db", tell)
        if freed:
            tell(f"The SuperLink's database gave {freed / 1e6:.0f} MB back.")

    quota = QuotaGrid(cast(HttpGrid, grid))
    live, journal = LiveRoster(deployment.folder, order.groups), AuditLog(deployment.folder)
    fresh = order.fresh and not (order.out / "started").exists()
    try:
        with only_allowing(order.allow_code, "order the run with --allow-code {package}"):
            agreed = None
            if order.kind is None:  # only the nodes know their tables
                config = read_config(order.experiment)
                agreed = agree_on_table(config, quota, live(), order.policy, order.out, fresh=fresh, log=tell)
            kind = order.kind if agreed is None else kind_of_table(agreed)
            assert kind is not None
            experiment = read_experiment(order.experiment, kind)
        server = Server(
            experiment,
            kind,
            quota,
            live(),
            policy=order.policy,
            out=order.out,
            fresh=fresh,
            log=tell,
            live=live,
            audit=lambda event, facts: journal.append(event, {"run": experiment.name, **facts}, "server"),
            agreed=agreed,
        )
        (order.out / "started").touch()  # a restart of the same order goes on where it was
        server.run(lambda _: trimmed())
    except Exception as e:
        tell(f"The run ends here: {e if isinstance(e, FedspanError) else repr(e)}")
        raise
