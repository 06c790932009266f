"""A page that follows runs while they go: read from their directories, served on this machine alone."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedspan.errors import FedspanError
from fedspan.report.assets import plotly
from fedspan.report.page import Live, drawings, page, texts
from fedspan.report.plots import monitor_plots, plots
from fedspan.report.runs import Run, find_runs, group, load_run
from fedspan.report.tables import summary_rows
from fedspan.report.text import clean
from fedspan.storage.toml import parse_toml, read_small

HOST = "127.0.0.1"


class Lines:
    """The lines of a growing file, each read once; a line that is not finished waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, list[dict[str, Any]]()
        self._at = 0

    def read(self) -> list[dict[str, Any]]:
        """All lines so far."""
        try:
            size = self.path.stat().st_size
            if size < self._at:  # a run that was resumed has cut what it will do again
                self._at, self.lines = 0, []
            if size > self._at:
                with self.path.open("rb") as f:
                    f.seek(self._at)
                    new = f.read()
                whole = new[: new.rfind(b"\n") + 1]
                self._at += len(whole)
                self.lines = self.lines + [line for raw in whole.splitlines() if (line := _line(raw)) is not None]
        except OSError:
            self._at, self.lines = 0, []
        return self.lines


def _line(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    good = isinstance(line, dict) and type(line.get("round")) is int and isinstance(line.get("bytes"), dict)
    return line if good else None


def going(path: Path, lines: Sequence[dict[str, Any]]) -> Run:
    """A run that has no result yet, as its lines tell it: the last evaluation stands for the result."""
    config: dict[str, Any] = {}
    if (path / "config.toml").is_file():
        config = parse_toml(read_small(path / "config.toml", "Watch"), "config.toml")
    method = config.get("method")
    named = method.get("name") if isinstance(method, dict) else None
    seed = config.get("seed")
    measures: dict[str, Any] = {}
    for line in lines:
        known = {k: v for k, v in line.items() if isinstance(v, dict) and "mean" in v}
        measures = known or measures
    total = {k: sum(n for li in lines if isinstance(n := li["bytes"].get(k), int)) for k in ("up", "down", "announce")}
    seconds = sum(s for li in lines if isinstance(s := li.get("seconds"), int | float))
    result: dict[str, Any] = {
        "method": named if isinstance(named, str) else clean(path.name),
        "seed": seed if type(seed) is int else 0,
        "rounds": lines[-1]["round"] if lines else 0,
        "measures": measures,
        "per_client": {},
        "bytes": total,
        "seconds": {"train": seconds},
        "config": config,
        "digest": str(path),
    }
    return Run(path, result, list(lines))


class Watch:
    """Run directories, or folders of them, as they are at this moment."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._tails: dict[Path, Lines] = {}
        self._done: dict[Path, tuple[int, Run]] = {}
        self._lock = threading.Lock()
        self._made: tuple[str, dict[str, Any]] | None = None
        if not self._places():
            raise FedspanError(f"Watch: {paths[0]} must be or hold a run directory. Start the run first.")

    def _places(self) -> list[tuple[Path, bool]]:
        """(directory, whether it has finished), each once."""
        found: dict[Path, bool] = {}
        for path in self.paths:
            inside, waiting = find_runs(path)
            found |= dict.fromkeys(inside, True) | dict.fromkeys(waiting, False)
        return list(found.items())

    def version(self) -> str:
        """What there is to see: before the dash which runs there are and which have finished, after it their lines."""
        shape, content = hashlib.sha256(), hashlib.sha256()
        for path, done in self._places():
            shape.update(f"{path}|{done}\n".encode())
            try:
                found = (path / "metrics.jsonl").stat()
                content.update(f"{path}|{found.st_size}|{found.st_mtime_ns}\n".encode())
            except OSError:
                continue
        return f"{shape.hexdigest()[:12]}-{content.hexdigest()[:12]}"

    def runs(self) -> tuple[list[Run], str]:
        """The runs, and how far they are in words."""
        out: list[Run] = []
        state: list[str] = []
        finished = 0
        for path, done in self._places():
            if done:
                finished += 1
                out.append(self._finished(path))
                continue
            run = going(path, self._tails.setdefault(path, Lines(path / "metrics.jsonl")).read())
            of = run.config.get("rounds")
            state.append(f"{clean(path.name)}: round {run.rounds}" + (f" of {of}" if type(of) is int else ""))
            out.append(run)
        if finished:
            state.insert(0, f"{finished} of {len(out)} runs finished" if len(out) > 1 else "The run has finished")
        return out, "; ".join(state[:5]) + ("; …" if len(state) > 5 else "") + "."

    def _finished(self, path: Path) -> Run:
        stamp = (path / "result.json").stat().st_mtime_ns
        known = self._done.get(path)
        if known is None or known[0] != stamp:
            known = self._done[path] = (stamp, load_run(path))
        return known[1]

    def page(self) -> str:
        """The whole page."""
        with self._lock:
            version = self.version()
            runs, state = self.runs()
            return page(runs, None, Live(version, state))

    def news(self, seen: str) -> dict[str, Any]:
        """What is new to a page that shows `seen`; it must be loaded again when other runs, or results, are there."""
        with self._lock:
            version = self.version()
            if version.split("-")[0] != seen.split("-")[0]:
                return {"reload": True}
            if self._made is None or self._made[0] != version:
                runs, state = self.runs()
                groups, rows = group(runs), summary_rows(runs)
                those = [*plots(groups, rows), *monitor_plots(groups)]
                answer = {"version": version, "state": state}
                self._made = version, answer | {"parts": texts(groups, rows), "page": drawings(groups, those)}
            made = self._made[1]
            return made if version != seen else {k: made[k] for k in ("version", "state")}


def serve(watch: Watch, port: int = 0) -> ThreadingHTTPServer:
    """A server on the loopback interface; port 0 takes any that is free. `serve_forever` runs it.

    Raises:
        FedspanError: if the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            number = self.connection.getsockname()[1]
            # Another site's name that points here must not read this machine's runs through the browser.
            if self.headers.get("Host") not in (f"{HOST}:{number}", f"localhost:{number}"):
                return self._send(HTTPStatus.FORBIDDEN, "text/plain", "Only this machine is served.")
            where = urlsplit(self.path)
            try:
                if where.path == "/":
                    return self._send(HTTPStatus.OK, "text/html", watch.page())
                if where.path == "/plotly.js":
                    return self._send(HTTPStatus.OK, "text/javascript", plotly())
                if where.path == "/news":
                    seen = parse_qs(where.query).get("seen", [""])[0]
                    return self._send(HTTPStatus.OK, "application/json", json.dumps(watch.news(seen), allow_nan=False))
            except (FedspanError, OSError) as e:  # a file that is being replaced; the page asks again
                return self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(e))
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "Nothing is here.")

        def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: the terminal belongs to the run."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A browser that closes its window is no error."""

    try:
        return Server((HOST, port), Handler)
    except OSError as e:
        raise FedspanError(f"Watch: port {port} cannot be used: {e.strerror}. Choose another with --port.") from None
