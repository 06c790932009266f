"""`fedspan watch`: what a run in progress looks like, what is new, and who is served."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from test_report import lines, read, result, write

from conftest import failing
from fedspan.errors import FedspanError
from fedspan.report.live import HOST, Lines, Watch, going, serve

CONFIG = 'seed = 3\nrounds = 9\n[method]\nname = "fedavg"\n'


def start(path: Path, done: int) -> Path:
    path.mkdir(parents=True)
    (path / "config.toml").write_text(CONFIG)
    (path / "metrics.jsonl").write_text("")
    return add(path, done)


def add(path: Path, done: int, at: int = 0) -> Path:
    with open(path / "metrics.jsonl", "a") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines(tuple(0.1 * k for k in range(1, done + 1)))[at:])
    return path


@contextmanager
def served(watch: Watch) -> Iterator[int]:
    server = serve(watch)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_run_in_progress_is_told_by_its_lines(tmp_path: Path) -> None:
    run = going(tmp_path, lines((0.2, 0.5)))
    assert run.rounds == 2 and run.result["measures"]["accuracy"]["mean"] == 0.5
    assert run.result["bytes"] == {"up": 2_000_000, "down": 3_000_000, "announce": 1_000_000}
    assert going(start(tmp_path / "x", 1), []).seed == 3


def test_lines_are_read_once_whole_and_again_after_a_cut(tmp_path: Path) -> None:
    path = start(tmp_path / "x", 2) / "metrics.jsonl"
    tail = Lines(path)
    assert len(tail.read()) == 2
    with open(path, "a") as f:
        f.write('{"round": 3, "by')
    assert len(tail.read()) == 2
    with open(path, "a") as f:
        f.write('tes": {}}\nnot json\n[1]\n')
    assert [line["round"] for line in tail.read()] == [1, 2, 3]
    add(path.parent, 0)
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert len(tail.read()) == 1
    path.unlink()
    assert tail.read() == []


def test_news_are_told_until_the_shape_changes(tmp_path: Path) -> None:
    write(tmp_path / "a", "local", 3)
    going_on = start(tmp_path / "b", 1)
    watch = Watch([tmp_path])
    first = watch.version()
    assert "1 of 2 runs finished; b: round 1 of 9." in watch.page()
    assert watch.news(first).keys() == {"version", "state"}
    add(going_on, 2, at=1)
    news = watch.news(first)
    assert news["version"] != first and "b: round 2 of 9" in news["state"]
    assert "fedavg" in news["parts"]["results"]
    over = next(f for f in news["page"]["figures"] if f["id"] == "over-rounds")
    assert any(d.get("name") == "fedavg" and d["x"] == [1, 2] for d in over["data"])
    (going_on / "result.json").write_text(json.dumps(result(seed=3)))
    assert watch.news(news["version"]) == {"reload": True}
    assert "2 of 2 runs finished." in watch.page()


def test_only_this_machine_is_served_and_only_what_there_is(tmp_path: Path) -> None:
    with served(Watch([start(tmp_path / "x", 0)])) as port:

        def get(path: str, host: str = "") -> tuple[int, bytes]:
            there = HTTPConnection(HOST, port, timeout=30)
            there.request("GET", path, headers={"Host": host or f"{HOST}:{port}"})
            answer = there.getresponse()
            body = answer.read()
            there.close()
            return answer.status, body

        status, body = get("/")
        (tmp_path / "page.html").write_bytes(body)
        text, words = read(tmp_path / "page.html")
        assert status == 200 and "data-live=" in text and "x: round 0 of 9." in words
        assert get("/plotly.js")[1].startswith(b"/**")
        assert get("/news?seen=zzz") == (200, b'{"reload": true}')
        assert get("/../../etc/passwd")[0] == get("/metrics.jsonl")[0] == 404
        assert get("/", "evil.example")[0] == 403
        with pytest.raises(FedspanError, match=f"port {port} cannot be used"):
            serve(Watch([tmp_path]), port)


def test_nothing_to_watch_is_one_sentence(tmp_path: Path) -> None:
    assert "must be or hold a run directory" in failing("watch", str(tmp_path))
