"""A real browser for tests: Chromium without a window, spoken to over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Tab:
    """One page: what it asks for over the network, what it complains about, and what it says when asked."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.count = socket, 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command and its answer; events on the way are kept."""
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=60))
            if message.get("id") == self.count:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._event(message.get("method", ""), message.get("params", {}))

    def _event(self, name: str, params: dict[str, Any]) -> None:
        if name == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params)))
        elif name == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif name == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("data:", "blob:")):
                self.requests.append(url)

    def look(self, width: int = 1200, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Size and theme."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go there, and wait until it is all there."""
        self.send("Page.navigate", url=url)
        self.wait("document.documentElement !== null && document.readyState === 'complete'")

    def ask(self, script: str) -> Any:
        """The value of an expression; promises are waited for."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        """Ask until the answer is true."""
        end = time.monotonic() + seconds
        while not (found := self.ask(script)):
            assert time.monotonic() < end, f"never true: {script}; {self.errors}"
            time.sleep(0.05)
        return found

    def picture(self, path: Path, whole: bool = True) -> Path:
        """A screenshot."""
        more: dict[str, Any] = {}
        if whole:
            box = self.send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": box["width"], "height": box["height"], "scale": 1}
            more = {"captureBeyondViewport": True, "clip": clip}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **more)["data"]))
        return path


@contextmanager
def browser() -> Iterator[Tab]:
    """A browser with one tab, closed afterwards."""
    from websockets.sync.client import connect

    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={home}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = Path(home) / "DevToolsActivePort"
            end = time.monotonic() + 60
            while not (port.exists() and port.read_text().count("\n")):
                assert time.monotonic() < end and process.poll() is None, "Chromium did not start"
                time.sleep(0.05)
            number = port.read_text().split("\n")[0]
            with urlopen(f"http://127.0.0.1:{number}/json") as answer:
                pages = json.load(answer)
            address = next(p["webSocketDebuggerUrl"] for p in pages if p["type"] == "page")
            with connect(address, max_size=None, open_timeout=60) as socket:
                yield Tab(socket)
        finally:
            process.terminate()
            process.wait(timeout=30)
