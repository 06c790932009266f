"""`fedspan watch`: the report page, live while runs are going."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.console import say

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders of them.")]
Port = Annotated[int, typer.Option("--port", help="Port on this machine; 0 takes a free one.", min=0, max=65535)]


def watch(runs: Runs, port: Port = 0) -> None:
    """Serve a page on this machine that follows runs as their rounds finish; Ctrl-C ends it, the runs go on."""
    from fedspan.report.live import Watch, serve

    server = serve(Watch(runs), port)
    host, number = server.socket.getsockname()
    say(f"Watching {', '.join(map(str, runs))} at http://{host}:{number}/ (Ctrl-C ends it)")
    with server:
        server.serve_forever(poll_interval=0.2)
