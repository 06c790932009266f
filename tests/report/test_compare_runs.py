"""`fedspan compare RUN...`: targets, paired tests, and what is written for a paper."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_report import lines, result, run, write

from conftest import call, failing
from fedspan.errors import FedspanError
from fedspan.report import paired as client_by_client
from fedspan.report import summary_rows, to_csv, to_latex, to_markdown
from fedspan.report.grid import latex_text
from fedspan.report.paired import holm, p_values, pairs
from fedspan.report.runs import as_run
from fedspan.report.tables import usual_target

LINE = re.compile(r"^(.*) \\\\$")


def parse_latex(text: str) -> list[list[str]]:
    """The cells of a booktabs table, if it is one LaTeX would take: balanced, rows of one length, nothing unescaped."""
    assert text.isascii() and "\t" not in text
    found = re.fullmatch(
        r"\\begin\{tabular\}\{([lr]+)\}\n\\toprule\n(.*?)\n\\midrule\n(.*?)\n\\bottomrule\n\\end\{tabular\}\n",
        text,
        re.S,
    )
    assert found is not None
    rows = []
    for line in [found.group(2), *found.group(3).split("\n")]:
        ended = LINE.match(line)
        assert ended is not None, line
        cells = re.split(r"(?<!\\) & ", ended.group(1))
        assert len(cells) == len(found.group(1)), line
        for cell in cells:
            bare = re.sub(r"\\[&%$#_{}]", "", cell)
            assert bare.count("$") % 2 == 0 and not re.search(r"[&%#_^]", bare), cell
            depth = 0
            for c in bare:
                depth += (c == "{") - (c == "}")
                assert depth >= 0
            assert depth == 0 and set(re.findall(r"\\([a-zA-Z]+)", bare)) <= {
                *("textbf", "textasciitilde", "textasciicircum", "textbackslash", "textless", "textgreater"),
                *("pm", "geq", "leq", "ldots", "alpha", "tau", "lambda"),
            }
        rows.append(cells)
    return rows


def test_latex_takes_every_name() -> None:
    made = to_latex(summary_rows([run("a_b & α% {x}^~\\ é漢"), run("b", fields={"tau": "τ"})], 0.5))
    rows = parse_latex(made.replace("é", "e"))
    assert len(rows) == 3 and "$\\alpha$" in rows[1][0] + rows[2][0] and "?" in made
    assert latex_text("λ ο ±") == r"$\lambda$ ? $\pm$"
    with pytest.raises(AssertionError):
        parse_latex(made.replace("é", "e").replace(r"\&", "&"))


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on this machine")
def test_latex_compiles(tmp_path: Path) -> None:
    body = to_latex(summary_rows([run("a_b & α% {x}^~\\ é"), run("b")], 0.5))
    start = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n"
    (tmp_path / "t.tex").write_text(start + body + "\\end{document}\n")
    subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, check=True, capture_output=True)


def test_targets_count_what_was_spent_until_then() -> None:
    fast = [as_run(result("fast", s) | {"curve": lines((0.6, 0.7))}) for s in (0, 1)]
    slow = [as_run(result("slow", s) | {"curve": lines((0.1, 0.6 if s else 0.2))}) for s in (0, 1)]
    rows = {r.label: r for r in summary_rows([*fast, *slow], 0.55)}
    aim = rows["fast"].target
    assert aim is not None and (aim.reached, aim.rounds, aim.megabytes, aim.seconds) == (2, 1.0, 3.0, 0.75)
    late = rows["slow"].target
    assert late is not None and (late.reached, late.rounds, late.megabytes) == (1, 2.0, 6.0)
    made = to_markdown([*rows.values()])
    assert "rounds to 55.00 %" in made and "2 (1 of 2 seeds)" in made and "**3.00**" in made
    none = summary_rows(fast, 0.99)
    assert "never" in to_markdown(none)
    titles, values = csv.reader(to_csv(none).splitlines())
    assert dict(zip(titles, values))["seeds_that_reach_it"] == "0" and values[-1] == "n/a"
    assert usual_target(summary_rows(fast)) == 0.57  # 95 % of 60 %
    errors = [run("a", values=(1.0, 3.0), measure="rmse")]
    assert usual_target(summary_rows(errors)) == pytest.approx(2.1)


def test_pairs_are_the_same_clients_and_the_sign_is_the_gain() -> None:
    base = [0.5 + 0.01 * k for k in range(12)]
    runs = [run("a", values=tuple(base)), run("b", values=tuple(v - 0.1 - 0.002 * k for k, v in enumerate(base)))]
    runs.append(run("c", values=(0.9, 0.8)))  # other clients
    (pair,) = pairs(runs, "b")
    assert pair.label == "a" and pair.against == "b" and pair.better == 12 and pair.worse == 0
    assert pair.sign == pytest.approx(2 / 2**12) and pair.wilcoxon == pytest.approx(2 / 2**12)
    assert float(pair.gains.mean()) == pytest.approx(0.111)
    (back,) = pairs(runs[:2])
    assert back.against == "a" and back.worse == 12 and "−11.10" in client_by_client.to_markdown([back])
    worse = pairs([run("a", values=(1.0, 3.0), measure="rmse"), run("b", values=(2.0, 4.0), measure="rmse")])
    assert worse[0].worse == 2  # a larger error is a loss
    with pytest.raises(FedspanError, match="reference must be one of a, b"):
        pairs(runs[:2], "z")


def test_p_values_with_ties_zeros_and_nothing() -> None:
    assert p_values(np.zeros(5)) == (None, None)
    sign, rank = p_values(np.array([0.1] * 8 + [0.0, -0.1]))
    assert sign == pytest.approx(20 / 512) and rank is not None and 0.005 < rank < 0.05
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])


def test_the_command_writes_a_folder_for_a_paper(tmp_path: Path) -> None:
    for m, shift in (("local", 0.0), ("pfl-mf", 0.1)):
        for s in (0, 1):
            write(tmp_path / "runs" / f"{m}-{s}", m, s, values=tuple(0.3 + shift + 0.01 * k for k in range(10)))
    out = tmp_path / "paper"
    said = call("compare", str(tmp_path / "runs"), "--out", str(out), "--format", "svg", "--target", "0.35").output
    assert "against pfl-mf" in said and "< 0.001" in said and "to 35.00 %" in said
    assert {p.name for p in out.iterdir()} == {
        *(f"{a}.{b}" for a in ("table", "paired") for b in ("md", "csv", "tex")),
        *(f"{f}.svg" for f in ("over-rounds", "over-bytes", "over-time", "clients", "bytes", "differences")),
    }
    assert len(parse_latex((out / "table.tex").read_text())) == 3
    assert parse_latex((out / "paired.tex").read_text())[1][0] == "local"
    titles, values = csv.reader((out / "paired.csv").read_text().splitlines())
    assert dict(zip(titles, values))["clients_and_seeds"] == "20"


def test_options_of_the_other_kind_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    assert "go with an experiment file" in failing("compare", str(folder), "--seeds", "2")
    assert "go with finished runs" in failing("compare", str(tmp_path / "x.toml"), "--target", "0.5")
    assert "Nothing to compare" in call("compare", str(folder)).stderr
