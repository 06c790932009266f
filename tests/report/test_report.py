"""The report: loading, grouping, tables, figures and the page. Numbers are checked against a case made by hand."""

from __future__ import annotations

import builtins
import csv
import json
import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedspan.errors import FedspanError
from fedspan.report import load_runs, summary_rows, to_csv, to_latex, to_markdown, to_rich, write_page
from fedspan.report.assets import plotly
from fedspan.report.figures import bytes_bars, clients, curves
from fedspan.report.narrative import headline, summary
from fedspan.report.page import client_table
from fedspan.report.plots import label_table, monitor_plots, plots
from fedspan.report.runs import Run, as_run, group, load_run
from fedspan.report.tables import short
from fedspan.report.text import clean, without_paths

VOID = {"meta", "br", "img", "link", "input", "hr"}


def result(
    method: str = "fedavg",
    seed: int = 0,
    values: tuple[float | None, ...] = (0.5, 0.7),
    measure: str = "accuracy",
    **more: Any,
) -> dict[str, Any]:
    """A result by hand: two clients, two rounds, 2 MB up and 4 MB down in all."""
    known = [v for v in values if v is not None]
    mean = sum(known) / len(known)
    std = (sum((v - mean) ** 2 for v in known) / len(known)) ** 0.5
    low = min(known) + 0.1 * (max(known) - min(known)) if len(known) == 2 else min(known)
    found = {"mean": mean, "weighted": mean, "std": std, "p10": low}
    fields = more.pop("fields", {})
    return {
        "method": method,
        "seed": seed,
        "rounds": 2,
        "accuracy": found if measure == "accuracy" else {},
        "measures": {measure: found},
        "per_client": {"n": [10] * len(values), measure: list(values), "id": [float(i) for i in range(len(values))]},
        "bytes": {"up": 2_000_000, "down": 3_000_000, "announce": 1_000_000, "evaluate": 9, "meta": 9, "names": {}},
        "seconds": {"train": 1.5, "evaluate": 0.5},
        "config": {
            "name": "hand",
            "seed": seed,
            "data": {"source": "digits", "root": f"/home/someone/data{seed}"},
            "method": {"name": method, **fields},
        },
        "versions": {"fedspan": "0.1.0"},
        "mapping": "vmap",
        "digest": f"{method}{seed}{fields}",
        "messages": ["Resuming /home/someone/run after round 1 of 2."],
        "names": [f"c{i}" for i in range(len(values))],
        "groups": None,
    } | more


def lines(values: tuple[float, ...] = (0.3, 0.6), measure: str = "accuracy") -> list[dict[str, Any]]:
    sent = {"up": 1_000_000, "down": 1_500_000, "announce": 500_000, "meta": 8}
    count = {"sampled": 2, "answered": 1, "skipped": False}
    return [
        {"round": k, **count, "bytes": dict(sent), "seconds": 0.75, measure: {"mean": v}}
        for k, v in enumerate(values, 1)
    ]


def run(*args: Any, **more: Any) -> Run:
    found = result(*args, **more)
    measure = next(iter(found["measures"]), "accuracy")
    return as_run(found | {"curve": lines(measure=measure)})


def write(path: Path, *args: Any, **more: Any) -> Path:
    made = run(*args, **more)
    path.mkdir(parents=True)
    (path / "result.json").write_text(json.dumps(made.result))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made.lines))
    return path


class Check(HTMLParser):
    """Fails on a tag that is not closed, or closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [v for k, v in attrs if k == "id" and v]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [v for k, v in attrs if k == "id" and v]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)


def read(path: Path) -> tuple[str, str]:
    """A well-formed page and its words."""
    text = path.read_text(encoding="utf-8")
    check = Check()
    check.feed(text)
    check.close()
    assert not check.open
    assert len(check.ids) == len(set(check.ids))
    return text, " ".join(" ".join(check.words).split())


# ---------------------------------------------------------------------------------------------------- loading


def test_loads_runs_and_directories_of_runs_once(tmp_path: Path) -> None:
    first = write(tmp_path / "all" / "fedavg" / "seed-10", seed=10)
    write(tmp_path / "all" / "fedavg" / "seed-9", seed=9)
    (tmp_path / "all" / "figures").mkdir()
    (tmp_path / "all" / "going").mkdir()
    (tmp_path / "all" / "going" / "metrics.jsonl").write_text("")
    waiting: list[Path] = []
    runs = load_runs([tmp_path / "all", first, first / "result.json"], waiting)
    assert [r.seed for r in runs] == [9, 10]
    assert [p.name for p in waiting] == ["going"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: (p / "result.json").unlink(), "has not finished"),
        (lambda p: (p / "metrics.jsonl").unlink(), "must hold a metrics.jsonl"),
        (lambda p: (p / "result.json").write_text('{"method": '), "is damaged"),
        (lambda p: (p / "result.json").write_text("[" * 100_000), "is damaged"),
        (lambda p: (p / "result.json").write_text("[1]"), "must be a JSON object"),
        (lambda p: (p / "result.json").write_text('{"method": 3, "seed": true}'), "damaged: method, seed, rounds"),
        (lambda p: (p / "result.json").write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda p: (p / "metrics.jsonl").write_text('{"round": 1, "bytes": {}}\n{"rou'), "line 2 of"),
        (lambda p: (p / "metrics.jsonl").write_text('{"round": "x"}\n'), "must be an object"),
    ],
)
def test_missing_and_damaged_files_are_one_sentence(tmp_path: Path, spoil: Any, says: str) -> None:
    path = write(tmp_path / "run")
    spoil(path)
    with pytest.raises(FedspanError, match=re.escape(says)) as caught:
        load_run(path)
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_runs(tmp_path: Path) -> None:
    for given, says in ((tmp_path / "none", "nothing there"), (tmp_path, "finished run directories"), ([], "Got none")):
        with pytest.raises(FedspanError, match=says):
            load_runs(given)


# ---------------------------------------------------------------------------------------------------- grouping


def test_groups_collect_seeds_and_name_what_a_sweep_changes() -> None:
    runs = [run("pfl-mf", s, fields={"rank": r, "lr": 0.1}) for r in (5, 10) for s in (1, 0)] + [run("fedavg", 0)]
    assert [(g.label, g.seeds) for g in group(runs)] == [
        ("pfl-mf rank=5", (0, 1)),
        ("pfl-mf rank=10", (0, 1)),
        ("fedavg", (0,)),
    ]


def test_a_run_given_twice_counts_once_and_two_runs_of_a_seed_stay_apart(tmp_path: Path) -> None:
    a, b = load_run(write(tmp_path / "a")), load_run(write(tmp_path / "b"))
    assert [len(g.runs) for g in group([a, b])] == [1]
    c = load_run(write(tmp_path / "c", values=(0.1, 0.2), digest="other"))
    assert [g.label for g in group([a, c])] == ["fedavg", "fedavg (c)"]


# ---------------------------------------------------------------------------------------------------- tables


def test_numbers_of_the_hand_made_case() -> None:
    (row,) = summary_rows([run(seed=0, values=(0.5, 0.7)), run(seed=1, values=(0.6, 0.8, None))])
    assert row.mean == pytest.approx(0.65)
    assert row.over_seeds == pytest.approx(0.1 / 2**0.5)
    assert row.over_clients == pytest.approx(0.1)
    assert row.worst == pytest.approx((0.52 + 0.62) / 2)
    assert (row.up_total, row.down_total, row.total) == (2.0, 4.0, 6.0)
    assert (row.up, row.down) == (1.0, 1.0)  # 2 MB over 2 answers; 4 MB over 4 downloads
    assert row.seconds == 1.5


def test_best_comes_first_and_spread_is_headed() -> None:
    one = summary_rows([run("a", values=(0.1, 0.2)), run("b", values=(0.8, 0.9))])
    assert [r.label for r in one] == ["b", "a"]
    text = to_markdown(one)
    assert "accuracy % (± over clients)" in text and "**85.00 ± 5.00**" in text and "| 15.00 ± 5.00 |" in text
    several = to_markdown(summary_rows([run("a"), run("a", 1, values=(0.6, 0.8)), run("b")]))
    assert "(± over seeds)" in several and "60.00 ± n/a" in several and "65.00 ± 7.07" in several


def test_errors_are_best_when_small_and_their_worst_tenth_is_large() -> None:
    rows = summary_rows([run("a", values=(2.0, 4.0), measure="rmse"), run("b", values=(1.0, 2.0), measure="rmse")])
    assert [r.label for r in rows] == ["b", "a"]
    assert rows[0].worst == pytest.approx(1.9)
    assert "RMSE" in to_markdown(rows) and "%" not in to_markdown(rows)


def test_missing_values_are_said_to_be_missing() -> None:
    empty = run("a", accuracy={}, measures={}, bytes={}, seconds={})
    rows = summary_rows([empty])
    assert to_markdown(rows).splitlines()[2] == "| a | n/a | n/a | n/a | n/a | n/a | n/a | 2 | 1 |"
    assert "n/a" in to_csv(rows)


def test_csv_has_full_precision_and_no_formulas() -> None:
    rows = summary_rows([run("=cmd|x", values=(1 / 3, 1 / 3))])
    (line,) = csv.DictReader(to_csv(rows).splitlines())
    assert float(line["accuracy"]) == 1 / 3
    assert line["label"] == "'=cmd|x"
    assert line["mb_total"] == "6.0"


def test_latex_and_markdown_are_escaped() -> None:
    rows = summary_rows([run(r"a_b&50%$#{x}~^\y|<z>")])
    latex, markdown = to_latex(rows), to_markdown(rows)
    assert r"a\_b\&50\%\$\#\{x\}\textasciitilde{}\textasciicircum{}\textbackslash{}y" in latex
    assert r"\toprule" in latex and r"60.00 $\pm$ 10.00" in latex and r"accuracy \%" in latex
    assert "\\|&lt;z&gt;" in markdown and markdown.count("\n") == 3


def test_terminal_table_takes_brackets_as_they_are() -> None:
    console = Console(width=120, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(to_rich(summary_rows([run("a[red]", values=(0.9, 0.9)), run("b")])))
    assert "a[red]" in console.export_text(clear=False)
    assert re.search(r"\x1b\[1;32m\s*90.00 ± 0.00", console.export_text(styles=True))


def test_texts_are_made_fit_to_be_shown() -> None:
    assert [short(v) for v in (None, 0.0, 0.0012345, 12.345, 12345.6, 1e-9)] == [
        *("n/a", "0", "0.00123", "12.3", "12,346", "< 0.000001")
    ]
    assert clean("a\x1b[31m\u202e\ud800") == "a\ufffd[31m\ufffd\ufffd"
    assert without_paths("see /home/me/x.npz, 1/2 and ../a/b") == "see …/x.npz, 1/2 and ../a/b"
    assert without_paths("/home/my files/x y.npz") == "…/x y.npz"
    assert (
        without_paths(r"C:\Users\me\x.npz")
        == without_paths("~/a/x.npz")
        == without_paths("file:///a/x.npz")
        == "…/x.npz"
    )


# ---------------------------------------------------------------------------------------------------- figures


def test_figures_are_written_by_suffix(tmp_path: Path) -> None:
    runs = [run("$x", s, values=(0.5 + s / 10, 0.7)) for s in (0, 1)] + [run("local", bytes={"up": 0, "down": 0})]
    assert curves(runs, tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
    assert clients(runs, tmp_path / "b.pdf").read_bytes().startswith(b"%PDF")
    assert "<svg" in bytes_bars(runs, tmp_path / "c.svg").read_text()
    assert "$x" in curves(runs, tmp_path / "d.svg", x="bytes").read_text()
    found = result(measure="rmse") | {"curve": lines(measure="rmse")}  # as Result.plot gives it
    assert "RMSE" in curves([found], tmp_path / "e.svg", x="seconds").read_text()
    with pytest.raises(FedspanError, match=r"\.png, \.pdf or \.svg"):
        curves(runs, tmp_path / "a.gif")
    with pytest.raises(FedspanError, match="x must be"):
        curves(runs, tmp_path / "a.svg", x="bogus")  # type: ignore[arg-type]


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(FedspanError, match=re.escape("pip install 'fedspan[report]'")):
        curves([run()], tmp_path / "a.png")


def test_without_plotly_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(FedspanError, match=re.escape("needs plotly; use `pip install 'fedspan[report]'`")):
        write_page([run()], tmp_path / "a.html")


# ---------------------------------------------------------------------------------------------------- the page


def test_page_says_what_the_numbers_say(tmp_path: Path) -> None:
    runs = [run("local", s, values=(0.5, 0.6 + s / 50), bytes={"up": 0, "down": 0}) for s in (0, 1)]
    runs += [run("fedavg", s, values=(0.4, 0.5 + s / 50)) for s in (0, 1)]
    runs += [run("pfl-mf", s, values=(0.8, 0.9 + s / 50), bytes={"up": 200_000, "down": 400_000}) for s in (0, 1)]
    text, words = read(write_page(runs, tmp_path))  # a directory: report.html inside
    assert "pfl-mf is best on average: 85.50 % after 2 rounds (mean of 2 seeds)." in words
    assert "It also serves the worst tenth of clients best (81.10 %)." in words
    assert "Over training alone (55.50 %) it gains 30.00 points on average and 30.00 points" in words
    assert "4 of 4 clients (over all seeds) do better than alone." in words
    assert "Over FedAvg (45.50 %) it gains 40.00 points" in words
    assert "It sends 0.600 MB in total, 10.0 times less than fedavg (6.00 MB)." in words
    assert (
        "The lead over the next best, local, is 30.00 points, more than the spread over seeds (1.00 points)." in words
    )
    assert "fedspan run config.toml" in words and "--methods local,fedavg,pfl-mf --seeds 2" in words
    assert 'lang="en"' in text and 'name="viewport"' in text and text.count('role="img"') == 5
    assert "/home/" not in text and "someone" not in text and str(tmp_path) not in text


def said(runs: list[Run]) -> str:
    return " ".join(re.sub("<[^>]*>", "", s) for s in summary(summary_rows(runs), group(runs)))


def test_one_seed_is_said_to_be_too_few() -> None:
    assert "One seed cannot tell luck from merit" in said([run("a"), run("b", values=(0.4, 0.7))])
    alone = said([run("a")])
    assert "a reaches 60.00 % on average after 2 rounds (one seed), and 52.00 % for the worst tenth" in alone


def test_a_lead_within_the_spread_is_not_called_a_lead() -> None:
    runs = [run(m, s, values=(0.5 + s / 5, 0.5 + s / 5 + d)) for m, d in (("a", 0.0), ("b", 0.02)) for s in (0, 1)]
    assert "within the spread over seeds" in said(runs) and "cannot be told apart" in said(runs)
    assert "a, b share the best average" in said([run("a"), run("b")])


def test_losses_are_not_hidden() -> None:
    words = said([run("local", values=(0.5, 0.5)), run("ditto", values=(0.3, 0.9))])
    assert "it gains 10.00 points on average but loses 14.00 points for the worst tenth; 1 of 2 clients" in words
    assert "The worst tenth of clients fares best with local: 50.00 %, against 36.00 % with ditto." in words
    assert "No method here beats training alone." in said([run("local", values=(0.9, 0.9)), run("b")])


def test_nothing_untrusted_reaches_the_page_as_markup(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>\"'&\ud800"
    runs = [
        run(bad, names=[bad, bad], messages=[bad], versions={bad: bad}, mapping=bad, fields={bad: bad}),
        run("b", config={"name": bad, "data": {"source": bad}, bad: {bad: [bad, None]}}),
    ]
    text, words = read(write_page(runs, tmp_path / "x.html"))
    assert text.count("<script") == 3 and "alert(1)</script" not in text  # the data, the library, the one script
    assert words.count("<script>alert(1)</script>") > 10
    assert not re.search(r"https?://|<link|<img|@import|src=", text)


def test_page_bears_missing_values_and_errors_instead_of_accuracy(tmp_path: Path) -> None:
    empty = run("a", accuracy={}, measures={}, per_client={}, bytes={}, seconds={}, names=None, messages=None)
    _, words = read(write_page([empty], tmp_path / "x.html"))
    assert "nothing to compare" in words
    with pytest.raises(FedspanError, match="at least one run"):
        write_page([], tmp_path / "z.html")
    _, words = read(
        write_page([run("a", measure="rmse"), run("b", values=(1.0, None), measure="rmse")], tmp_path / "y.html")
    )
    assert "a is best on average: RMSE 0.6" in words


def test_page_of_ten_runs_and_a_hundred_clients_is_small_and_quick(tmp_path: Path) -> None:
    values, held = tuple(i / 100 for i in range(100)), [[i % 7] * 10 for i in range(1, 101)]
    runs = [run(f"m{k // 2}", k % 2, values=values, labels=held) for k in range(10)]
    long = [as_run(r.result | {"curve": lines(values * 3)}) for r in runs]
    start = time.process_time()
    path = write_page(long, tmp_path / "x.html")
    assert time.process_time() - start < 10
    assert path.stat().st_size < 3_000_000
    read(path)


def test_every_client_is_listed_the_worst_of_the_best_method_first() -> None:
    runs = [run("a", values=(0.5, 0.2, None)), run("b", values=(0.9, 0.6, 0.7), groups=[0, 1, 0])]
    table = client_table(summary_rows(runs), group(runs))
    assert re.findall(r'<th scope="row" data-v="(c\d)"', table) == ["c1", "c2", "c0"]
    assert '<td class=best data-v="0.6">60.00</td><td data-v="0.2">20.00</td>' in table
    assert '<td data-v="">n/a</td>' in table and "group" in table and "seed" not in table
    errors = [run("a", values=(1.0, 3.0), measure="rmse")]
    table = client_table(summary_rows(errors), group(errors))
    assert re.findall(r'<th scope="row" data-v="(c\d)"', table) == ["c1", "c0"]


def test_figures_hold_what_the_runs_hold() -> None:
    runs = [
        run("local", bytes={"up": 0, "down": 0}, curve=[]),
        *(run("b", s, values=(0.4 + s / 5, 0.8)) for s in (0, 1)),
    ]
    runs[0] = as_run(runs[0].result | {"curve": [li | {"bytes": {"up": 0, "down": 0}} for li in lines()]})
    found = {p.id: p for p in plots(group(runs), summary_rows(runs))}
    assert list(found) == ["over-rounds", "over-bytes", "over-time", "bytes", "clients"]
    band, _, mean = found["over-rounds"].data
    assert band["fill"] == "toself" and band["meta"] == mean["meta"] == 1
    assert mean["x"] == [1, 2] and mean["y"] == [30.0, 60.0] and mean["customdata"] == ["0.00", "0.00"]
    alone = next(d for d in found["over-bytes"].data if d.get("name", "").startswith("local"))
    assert alone["name"] == "local (sends nothing)" and alone["x"] == [3.0, 6.0]
    assert found["over-time"].data[-1]["x"] == [0.75, 1.5]
    boxes = {d["name"]: d for d in found["clients"].data}
    assert boxes["b"]["x"] == [40.0, 60.0, 80.0, 80.0] and "seed 1" in boxes["b"]["text"][1]


def test_labels_capacities_and_monitors_are_drawn_where_a_run_tells_them() -> None:
    one = run("fedhm", labels=[[3, 1], [0, 4]], capacities=["0.25", "1.0"], groups=[1, 0], names=["<b>", "y"])
    one.lines[0]["monitor"] = {"rank": 3, "odd": "x"}
    found = {p.id: p for p in plots(group([one]), summary_rows([one]))}
    heat = found["labels"].data[0]
    assert heat["z"] == [[0.0, 100.0], [75.0, 25.0]] and heat["y"] == ["y (group 0)", "&lt;b&gt; (group 1)"]
    assert [d["name"] for d in found["capacities"].data] == ["fedhm, 0.25", "fedhm, 1.0"]
    (plot,) = monitor_plots(group([one]))
    assert plot.title == "rank" and plot.data[0]["y"] == [3.0]
    odd = [run("a", labels=[[3, 1], [0, 4]], names=3, groups="x")]
    assert plots(group(odd), summary_rows(odd))[-1].data[0]["y"] == ["0", "1"]
    for damaged in ([[1], [1, 2]], "x", [[-1]], [], {"a": 1}):
        assert label_table(run(labels=damaged)) is None


def test_the_oracle_is_a_yardstick_not_the_winner() -> None:
    runs = [run("oracle", values=(0.9, 0.9)), run("fedper", values=(0.7, 0.9)), run("local")]
    assert summary_rows(runs)[0].method == "oracle"
    assert headline(summary_rows(runs))[0][2] == "fedper"
    assert "fedper is best on average: 80.00 %" in said(runs)
    assert "Knowing the groups would give 90.00 % (oracle, a yardstick)." in said(runs)
    assert "oracle reaches 90.00 %" in said([run("oracle", values=(0.9, 0.9))])
