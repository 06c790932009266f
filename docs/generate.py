"""Write the reference pages and the README's table of methods from the code: `python docs/generate.py`, or `make docs`.

Pictures of claims are drawn where their figures have changed. With `--check` nothing is written; it names the pages
that differ from what would be written, pictures of other figures, and ends with 1.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import itertools
import json
import re
import statistics
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
START, END = "<!-- methods: written by `make docs` -->", "<!-- end of methods -->"
WRITTEN = "<!-- Written by `make docs` from the code; edit the docstrings and sentences there. -->"

# ------------------------------------------------------------------------------------------------ words and tables


def cell(text: object) -> str:
    """A text that cannot end a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A Markdown table."""
    titles = list(titles)
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return lines + ["| " + " | ".join(cell(c) for c in row) + " |" for row in rows]


def shown(value: object) -> str:
    """A default as an experiment file would write it; nothing where there is none."""
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value in ({}, ()):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, tuple | list):
        return f"`[{', '.join(shown(v).strip('`') for v in value)}]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def keys(cls: type, without: Iterable[str] = ()) -> list[str]:
    """The keys of a dataclass: name, default, what is allowed, its sentence."""
    from fedspan.method.fields import keys_of

    left_out = set(without)
    rows = [
        (f"`{k.name}`", shown(k.default), permitted(k.hint), k.sentence)
        for k in keys_of(cls).values()
        if k.name not in left_out
    ]
    return table(("key", "default", "allowed", "what it does"), rows)


def permitted(hint: Any) -> str:
    """What an annotation allows, with its limits."""
    from fedspan.method.fields import allowed

    words = allowed(hint, 0.0).replace("a finite number", "a number")  # limits are told to who gives a number
    words = re.sub(r"'([^']*)'", r"`\1`", words).removeprefix("one of ")
    return f"{words}, or not set" if type(None) in typing.get_args(hint) else words.replace("dict", "a table")


def prose(doc: str | None) -> list[str]:
    """A docstring as Markdown: its examples as code, its Args and Raises as lists."""
    lines, code, listed = [], False, False
    for line in inspect.cleandoc(doc or "").splitlines():
        if line.startswith((">>>", "...")) and not code:
            lines += ["```pycon"]
            code = True
        elif code and not line.strip():
            lines += ["```"]
            code = False
        section = re.fullmatch(r"(Args|Raises|Returns|Yields):", line)
        if section:
            lines += [f"**{section[1]}**", ""]
            listed = True
            continue
        item = re.match(r"    (\w[\w, *]*): (.*)", line) if listed else None
        if item:
            line = f"* `{item[1]}`: {item[2]}"
        elif listed and line.startswith("        "):
            line = "  " + line.strip()
        elif listed and line.startswith("    "):
            line = line.strip()
        elif listed and line and not line.startswith(" "):
            listed = False
        lines.append(line)
    return lines + (["```"] if code else [])


def page(title: str, *parts: Iterable[str]) -> str:
    """A whole page."""
    lines = [WRITTEN, "", f"# {title}", ""]
    for part in parts:
        lines += [*part, ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).rstrip() + "\n"


# ------------------------------------------------------------------------------------------------ methods


def families() -> list[tuple[str, dict[str, str]]]:
    """The families in their order, each with its methods and a line about each.

    Raises:
        SystemExit: if a registered method has no line, or a line no method.
    """
    read = tomllib.loads((DOCS / "families.toml").read_text(encoding="utf-8"))["family"]
    named = [name for family in read for name in family["methods"]]
    registered = built_in()
    wrong = [n for n in named if n not in registered or named.count(n) > 1]
    missing = [n for n in registered if n not in named]
    if wrong or missing:
        sys.exit(f"docs/families.toml: give every method one line. Missing: {missing}; unknown or twice: {wrong}.")
    return [(family["title"], family["methods"]) for family in read]


def built_in() -> dict[str, type]:
    """The methods that come with fedspan, by name; those of other installed packages are left out."""
    from fedspan.methods import METHODS

    classes = {name: METHODS[name] for name in METHODS}
    return {name: cls for name, cls in classes.items() if cls.__module__.startswith("fedspan.methods.")}


def reference(cls: Any) -> str:
    """The paper of a method."""
    return str(cls.about.reference)


def readme_methods() -> list[str]:
    """The README's table: all methods by family."""
    classes, lines = built_in(), [START]
    for title, methods in families():
        rows = [(f"[`{n}`](docs/reference/methods.md#{n})", reference(classes[n]), says) for n, says in methods.items()]
        lines += [f"**{title}**", "", *table(("method", "paper", "what is shared, and what stays at home"), rows), ""]
    return [*lines[:-1], END]


def readme() -> str:
    """The README with its table of methods put between the markers."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if text.count(START) != 1 or text.count(END) != 1:
        sys.exit(f"README.md: the lines '{START}' and '{END}' must stand in it once each.")
    before, _, rest = text.partition(START)
    return before + "\n".join(readme_methods()) + rest.partition(END)[2]


def methods_page() -> str:
    """Every method: what it keeps and sends, measured; its fields with their sentences; limiting cases; tables."""
    from fedspan.cli.methods import computed
    from fedspan.cli.probe import facts, published, traffic
    from fedspan.methods.equivalences import of

    classes = built_in()
    about = {name: facts(name) for name in classes}
    intro = """\
        What each method keeps and sends was measured by running one round of it. Bytes are those of one client in its
        first round, down and up, with default fields and a perceptron of 64-32-10 (2,410 parameters; FedAvg: 9,640 each
        way). *Up as mean* is what the server needs only the weighted mean of, *up each* what it must see client by
        client; *secure sum* says whether uploads could be added up without being seen. Limiting cases are tested to
        1e-12, see [equivalences](equivalences.md); published tables are those that `fedspan reproduce` runs the method
        in, beside the printed figures. *Disclosed* is what a curious server can compute from one client's upload, with
        default fields: it is declared next to each method and held to [attacks](../explanation/disclosure.md) by tests.

        Names of parts are the papers' symbols, explained in each method's own text below."""
    titles = ("method", "kept", "down", "up as mean", "up each", "secure sum", "disclosed", "bytes down / up")
    parts: list[list[str]] = [textwrap.dedent(intro).splitlines()]
    for title, methods in families():
        rows = []
        for name in methods:
            f, (down, up) = about[name], traffic(name)
            symbols = (", ".join(f[k]) for k in ("private", "shared", "sent_mean", "sent_each"))
            told = f["secure_aggregation"], computed(f, "keywords")
            rows.append((f"[`{name}`](#{name})", *symbols, *told, f"{down:,} / {up:,}"))
        parts.append([f"**{title}**", "", *table(titles, rows)])
    for title, methods in families():
        parts.append([f"## {title}"])
        for name, says in methods.items():
            f, cases = about[name], "; ".join(line.words for line in of(name))
            facts_of = [
                ("paper", reference(classes[name])),
                ("in one line", says),
                ("the server receives", ", ".join(f["sent_mean"] + f["sent_each"]) or "nothing but a weight"),
                ("of a client it can compute", computed(f)),
                ("source", f"`{f['file']}`"),
                ("equations cited", ", ".join(f["equations"])),
                ("limiting cases tested", cases),
                ("published tables", ", ".join(f"`{t}`" for t in published(name))),
            ]
            parts.append(
                [f"### {name}", "", *prose(classes[name].__doc__), "", *table(("", ""), [r for r in facts_of if r[1]])]
                + ["", *keys(classes[name])]
            )
    return page("Methods", *parts)


def equivalences_page() -> str:
    """Which method turns into which, and the test that shows it."""
    from fedspan.methods.equivalences import LINES

    intro = """\
        Two methods that differ in one switch must be one method where the switch is neutral. Every line is a test, in
        double precision, to 1e-12; both sides have the same weighting, start, minibatches and number of steps. The list
        itself is `fedspan.methods.equivalences`, and a test sees to it that each line has its test.
        [What does not hold](../explanation/equivalences.md) is told elsewhere."""
    rows = []
    for line in LINES:
        file, test = line.test.split("::")
        rows.append((line.words, line.condition, f"`{file}.py`: {test.removeprefix('test_').replace('_', ' ')}"))
    titles = ("what is equal", "under which further conditions", "where")
    return page("Equivalences", textwrap.dedent(intro).splitlines(), table(titles, rows))


def conformance_page() -> str:
    """Every method's page of plain torch, how far it is off, and what differs from papers and public code."""
    sys.path[:0] = [p for p in (str(ROOT / "tests" / "reference"),) if p not in sys.path]
    plain = importlib.import_module("plain")
    for path in sorted((ROOT / "tests" / "reference" / "pages").glob("*.py")):
        importlib.import_module(f"pages.{path.stem}")
    classes, held = built_in(), plain.PAGES
    notes = tomllib.loads((DOCS / "conformance.toml").read_text(encoding="utf-8"))
    measured = json.loads((DOCS / "conformance.json").read_text(encoding="utf-8"))
    wrong = {n for known in (notes, held, measured["largest"]) for n in known.keys() - classes.keys()}
    if wrong:
        sys.exit(f"docs/conformance.toml, docs/conformance.json, tests/reference/pages: no such method. {wrong}")
    cases = sum(len(entry.cases) for entry in held.values())
    intro = f"""\
        Every method is compared with a page of plain torch: `tests/reference/pages`. A page imports torch and numpy
        alone, which a test checks on its syntax tree; it gets the start, who takes part, the minibatches and what a
        paper calls random as plain tensors, and its own loops do the rest. Three rounds on five clients of different
        sizes, three of them in each round, a perceptron of 5-7-6-3, double precision: all personal models, and parts of
        the server's state, must agree within 1e-10 of max(1, the largest number). {len(held)} methods in {cases} cases,
        with the options that papers use; the largest difference seen ({measured["where"]}) stands in the table.

        How independent a page is differs. *Written from* says what was read: equations and algorithms by number are
        those of the four papers' own texts; a *description* is a summary of the method, not its paper. *Code seen* says
        what of this library's code its writer had seen before the page was done: there the two agree on the arithmetic,
        which shows nothing about the reading of the paper. Nor does a page show how a model starts: starts come from
        this library. Convolutions, normalisation layers and the wire have tests of their own.

        Below are the deviations on purpose from papers and from public code (FL-bench, PFLlib, HtFLlib, the authors'
        own), and what was found wrong there by reading or running it, in the versions of that time."""
    rows = []
    for n in (n for _, methods in families() for n in methods):
        own = held.get(n)
        compared = (own.source, own.seen, len(own.cases)) if own else ("no page yet", "", 0)
        rows.append((f"[`{n}`](#{n})", reference(classes[n]), *compared, measured["largest"].get(n, "not compared")))
    titles = ("method", "paper", "written from", "code seen", "cases", "largest difference")
    parts = [textwrap.dedent(intro).splitlines(), table(titles, rows)]
    kinds = {"paper": "beyond the paper", "peers": "other public code", "found": "found wrong"}
    for title, methods in families():
        said = [(n, kinds[k], text) for n in methods for k in kinds for text in notes.get(n, {}).get(k, ())]
        parts.append([f"## {title}"])
        for n in methods:
            lines = [f"* *{kind}*: {text}" for name, kind, text in said if name == n]
            parts.append([f"### {n}", "", *(lines or ["Nothing that differs is known."])])
    return page("Conformance", *parts)


# ------------------------------------------------------------------------------------------------ claims


def claims_page() -> str:
    """Every claim with its verdict, computed from the stored outcomes; what was not run, and its minutes."""
    from fedspan.studies.claims import catalogue
    from fedspan.studies.claims.claim_file import papers

    found = [(claim, *decided(claim)) for claim in catalogue()]
    counts: dict[str, int] = {}
    for _, _, d in found:
        counts[d.word] = counts.get(d.word, 0) + 1
    intro = f"""\
        What the four papers claim, and what came out: {len(found)} claims, of which
        {", ".join(f"{n} {word}" for word, n in counts.items())}. Every verdict on this page is computed from a stored
        outcome by the claim's own test; none is typed. `fedspan claims run NAME` repeats one, `fedspan claims verify`
        holds all outcomes to their hashes and computes some again.

        A test is a difference between two rows, taken seed by seed, with its mean and Student's 90 % interval: it
        passes where the interval lies beyond the bar, fails where it lies on the other side, and decides nothing where
        it lies on both. A claim holds if all of its tests pass; *only if* names the condition under which they do.
        Every row gets the same number of trials of the same length on development seeds 0 to 9, starting from one grid
        that goes on beyond its end; * marks a chosen step size that nothing brackets. Figures are of seeds 200 and on.
        Controls stand in every table, and a second part of a client's work has the run's epochs. Most settings are
        small: a verdict is one on the setting named beside it, whose differences from the paper's are listed."""
    parts = [textwrap.dedent(intro).splitlines()]
    for paper, about in papers().items():
        rows = [
            (
                f"[{c.stem}](claims-{paper}.md#{c.stem})",
                c.sentence,
                f"**{d.text}**",
                main_effect(d),
                "" if o is None else f"{o.seconds / 60:.1f}",
            )
            for c, o, d in found
            if c.paper == paper
        ]
        titles = ("claim", "what the paper says", "verdict", "effect [90 % interval]", "minutes")
        parts.append([f"## {about['title']}", "", f"{about['reference']}.", "", *table(titles, rows)])
    waiting = [(c.name, c.sentence, f"{c.minutes:g}") for c, o, d in found if d.word == "not run"]
    total = sum(c.minutes for c, _, d in found if d.word == "not run")
    words = ["## Not run", "", f"{len(waiting)} claims, about {total:,.0f} minutes of one core in all.", ""]
    parts.append(words + (table(("claim", "what the paper says", "minutes, estimated"), waiting) if waiting else []))
    return page("Claims", *parts)


def decided(claim: Any) -> tuple[Any, Any]:
    """The stored outcome of a claim, if there is one, and the verdict.

    Raises:
        SystemExit: if the outcome is damaged, or of another version of the claim.
    """
    from fedspan.studies.claims import decide, sound_outcomes

    stored = sound_outcomes((claim,))
    outcome = stored.outcomes.get(claim.name)
    if stored.damaged:
        sys.exit(f"{claim.name}: {stored.damaged[claim.name]}. `fedspan claims run {claim.name}` makes it anew.")
    return outcome, decide(claim, None if outcome is None else outcome.figures)


def main_effect(decision: Any) -> str:
    """Effect and interval of the first test without a condition."""
    return next((t.interval for t in decision.tests if not t.only_if), "")


def claims_of(paper: str) -> str:
    """The claims of one paper, each with settings, tests, its table, and what every row was given."""
    from fedspan.studies.claims import catalogue
    from fedspan.studies.claims.claim_file import papers
    from fedspan.studies.claims.claim_pages import effort_table, figure_table, test_table
    from fedspan.studies.claims.claim_pictures import pictures_of

    about = papers()[paper]
    parts: list[list[str]] = [
        [f"{about['reference']}. [All claims](claims.md) has how to read this page."],
    ]
    for claim in (c for c in catalogue() if c.paper == paper):
        outcome, decision = decided(claim)
        why = f": {claim.not_testable}" if claim.not_testable else ""
        lines = [
            f"## {claim.stem}",
            "",
            f"> {claim.sentence}",
            "",
            f"*{claim.place}.* **Verdict: {decision.text}{why}.**",
        ]
        told = [("The paper", claim.setting.paper), ("Here", claim.setting.ours)]
        lines += ["", *(f"* *{who}*: {text}" for who, text in told if text)]
        lines += [f"* *Differs*: {d}." for d in claim.setting.differences]
        for made in (test_table(claim, decision), figure_table(claim, outcome), effort_table(claim, outcome)):
            if made is not None:
                lines += ["", *table(made.titles, made.rows)]
        for picture in pictures_of(claim, outcome):
            lines += ["", f"![{cell(picture.words)}](claims/{picture.file})"]
        lines += ["", *provenance(claim, outcome)]
        parts.append(lines)
    return page(f"Claims of {about['title']}", *parts)


def claims_by_method() -> str:
    """Each method's own table: every stored outcome that it has a row in, its figure, step size and steps."""
    from fedspan.studies.claims import catalogue
    from fedspan.studies.claims.claim_pages import summary

    rows: dict[str, list[tuple[str, ...]]] = {}
    for claim in catalogue():
        outcome, _ = decided(claim)
        for name, told in (outcome.effort if outcome is not None else {}).items():
            columns = outcome.figures[name]
            figures = [summary(columns.get(c, {}).get("accuracy", {}), percent=True) for c in ("tuned", "published")]
            lr = "none" if told.lr is None else f"{told.lr:g}{'*' if told.edge else ''}"
            link = f"[{claim.name}](claims-{claim.paper}.md#{claim.stem})"
            rows.setdefault(told.method, []).append((link, name, *figures, lr, f"{told.steps:g}"))
    intro = """\
        Every method in every stored table of [the claims](claims.md), as subject or control: accuracy in percent,
        mean and spread over reported seeds, the step size its trials chose (* where nothing brackets it), and gradient
        steps of a client in a round. Methods without a row have not stood in a table yet."""
    parts = [textwrap.dedent(intro).splitlines()]
    titles = ("claim", "row", "as tuned", "as published", "step size", "steps a round")
    for title, methods in families():
        shown = [n for n in methods if n in rows]
        if shown:
            parts.append([f"## {title}"])
        parts += [[f"### {n}", "", *table(titles, rows[n])] for n in shown]
    return page("Methods in the claims' tables", *parts)


BLOCK_OF_CLAIMS = re.compile(r"<!-- figures: (\w+) ([\w -]+?) -->\n.*?<!-- end of figures -->", re.DOTALL)


def with_claims(path: Path) -> str:
    """A page whose marked blocks are filled from stored outcomes: `<!-- figures: KIND CLAIM CLAIM ... -->`.

    Raises:
        SystemExit: for a kind that there is not.
    """
    from fedspan.studies.claims import find_claim

    kinds = {
        "verdicts": verdict_lines,
        "rows": row_lines,
        "across": across_lines,
        "tests": effect_lines,
        "pictures": picture_lines,
    }

    def filled(match: re.Match[str]) -> str:
        kind, names = match[1], match[2]
        if kind not in kinds:
            sys.exit(f"{path.name}: a block of figures must be one of {', '.join(kinds)}. Got '{kind}'.")
        claims = [(claim, *decided(claim)) for claim in map(find_claim, names.split())]
        start = match[0].partition("\n")[0]
        return "\n".join([start, *kinds[kind](claims), END_OF_FIGURES])

    return BLOCK_OF_CLAIMS.sub(filled, path.read_text(encoding="utf-8"))


def with_blocks() -> list[Path]:
    """The pages that have such blocks."""
    found = sorted((DOCS / "explanation").glob("*.md"))
    return [path for path in found if BLOCK_OF_CLAIMS.search(path.read_text(encoding="utf-8"))]


Decided = list[tuple[Any, Any, Any]]
"""Claims with their stored outcomes, None where there is none, and their decisions."""


def linked(claim: Any) -> str:
    """A claim's name as a link from a page beside the reference."""
    return f"[{claim.stem}](../reference/claims-{claim.paper}.md#{claim.stem})"


def verdict_lines(claims: Decided) -> list[str]:
    """What each claim says and what came out."""
    rows = [(linked(c), c.sentence, f"**{d.text}**", main_effect(d)) for c, _, d in claims]
    return table(("claim", "sentence", "verdict", "effect [90 % interval]"), rows)


def row_lines(claims: Decided) -> list[str]:
    """Accuracy of every row of these claims, each once: controls that stand in several are the same runs."""
    from fedspan.studies.claims.claim_pages import summary

    found: dict[bool, dict[tuple[str, str, str], None]] = {False: {}, True: {}}  # controls below all others
    for claim, outcome, _ in claims:
        own = {row.name for row in claim.rows if not row.control}
        for name, columns in outcome.figures.items() if outcome is not None else ():
            cells = [summary(columns.get(c, {}).get("accuracy", {}), percent=True) for c in ("tuned", "published")]
            found[name not in own][name, cells[0], cells[1]] = None
    rows = [*found[False], *found[True]]
    waiting = [f"Not run: {linked(c)}." for c, outcome, _ in claims if outcome is None]
    return [*table(("row", "accuracy as tuned, %", "as published, %"), rows), *([""] if waiting else []), *waiting]


def across_lines(claims: Decided) -> list[str]:
    """Rows that stand in several claims beside each other: as tuned and, below, as published.

    The measure is that of each claim's first test, for the protocol by which clients are judged.
    """
    from fedspan.studies.claims.claim_pages import summary

    found: dict[str, list[str]] = {}
    for k, (claim, outcome, _) in enumerate(claims):
        measure = claim.tests[0].measure
        for name, columns in outcome.figures.items() if outcome is not None else ():
            cells = [summary(columns.get(c, {}).get(measure, {}), percent=True) for c in ("tuned", "published")]
            found.setdefault(name, [""] * len(claims))[k] = "<br>".join(c for c in cells if c)
    waiting = [f"Not run: {linked(c)}." for c, outcome, _ in claims if outcome is None]
    titles = ("row", *(linked(c) for c, _, _ in claims))
    return [*table(titles, ([k, *v] for k, v in found.items())), *([""] if waiting else []), *waiting]


def effect_lines(claims: Decided) -> list[str]:
    """Tests that stand in several claims beside each other: what each is about, and its effect in each claim."""
    titles = ["", *(linked(c) for c, _, _ in claims)]
    found: dict[str, list[str]] = {}
    for k, (claim, _, decision) in enumerate(claims):
        effects = {t.says: f"{t.interval}, {t.state}" for t in decision.tests}
        for test in claim.tests:
            line = found.setdefault(test.words, [""] * len(claims))
            line[k] = effects.get(test.words, "not run")
    return table(titles, ([words, *line] for words, line in found.items()))


def picture_lines(claims: Decided) -> list[str]:
    """The pictures of claims, those that have been run."""
    from fedspan.studies.claims.claim_pictures import pictures_of

    lines = []
    for claim, outcome, _ in claims:
        for picture in pictures_of(claim, outcome):
            lines += [f"{linked(claim)}:", "", f"![{cell(picture.words)}](../reference/claims/{picture.file})", ""]
    waiting = [f"No picture yet, as it has not been run: {linked(c)}." for c, outcome, _ in claims if outcome is None]
    return [*lines, *itertools.chain.from_iterable((line, "") for line in waiting)][:-1]


def provenance(claim: Any, outcome: Any) -> list[str]:
    """How an outcome was made, or what it would cost."""
    if claim.not_testable:
        return []
    if outcome is None:
        return [f"Not run: about {claim.minutes:g} minutes of one core; `fedspan claims run {claim.name}`."]
    seeds = ", ".join(map(str, outcome.seeds["reported"])) or "none (nothing is drawn)"
    chosen = ", ".join(map(str, outcome.seeds["development"]))
    made = ", ".join(f"{k} {v}" for k, v in outcome.versions.items())
    lines = [f"Reported seeds: {seeds}." + (f" Step sizes chosen on seed {chosen}." if chosen else "")]
    lines += [f"{outcome.seconds:,.0f} s; {made}; code `{outcome.code}`, outcome `{outcome.sha256[:16]}`."]
    return [" ".join(lines)]


# ------------------------------------------------------------------------------------------------ experiment files


def configuration_page() -> str:
    """Every section of an experiment file."""
    from fedspan.config import RunConfig
    from fedspan.config.sections import DataConfig, ModelConfig, PartitionConfig, TaskConfig
    from fedspan.deploy.policy import Policy
    from fedspan.learn.transforms import Transforms
    from fedspan.simulation.asynchronous import Asynchronous
    from fedspan.simulation.defence import Defence
    from fedspan.simulation.devices import Devices
    from fedspan.simulation.protocols import EvaluationSettings
    from fedspan.simulation.settings import Settings

    intro = """\
        An experiment is a TOML file; every value can be replaced on the command line by `section.key=value`. A key that
        is not known is refused, with the nearest one that is. Whatever a run was given is written out whole as
        `config.toml` in its directory."""
    tables = ("data", "partition", "model", "method", "methods", "task", "train", "evaluate", "devices", "defence")
    tables += ("asynchronous",)
    method = """\
        `name` is one of [the methods](methods.md), or `package.module:Class` for
        [one of your own](../tutorials/add_a_method.md), which needs `--allow-code PACKAGE`; the other keys are the
        fields of that method. In a comparison `[methods.NAME]` holds what only one method gets, and keys of `[method]`
        that a method lacks but another has are left out for it. A number of rounds may be a share of the run's:
        `start_round = "20%"`."""
    sections: list[tuple[str, str, list[str]]] = [
        ("At the top", "", keys(RunConfig, without=tables)),
        ("[data]", "The sources are listed in [Data](data.md).", keys(DataConfig)),
        ("[data.transforms]", "", keys(Transforms, ["functions"])),
        ("[partition]", "Kinds and their options are listed in [Data](data.md).", keys(PartitionConfig, ["options"])),
        ("[model]", "Kinds and their options are listed in [Models](models.md).", keys(ModelConfig, ["options"])),
        ("[method] and [methods.NAME]", textwrap.dedent(method), []),
        ("[task]", "", keys(TaskConfig)),
        ("[train]", "", keys(Settings)),
        ("[evaluate]", "", [*keys(EvaluationSettings), "", *metrics_table()]),
        ("[devices]", "", keys(Devices)),
        ("[defence]", "", keys(Defence)),
        ("[asynchronous]", "", keys(Asynchronous)),
        ("The policy of a deployment", "Options of `fedspan deploy run`, not keys of the file.", keys(Policy)),
    ]
    classes = {"[task]": TaskConfig, "[train]": Settings, "[evaluate]": EvaluationSettings, "[devices]": Devices}
    classes |= {"[defence]": Defence, "[asynchronous]": Asynchronous, "[data.transforms]": Transforms}
    parts = [textwrap.dedent(intro).splitlines()]
    for title, text, rows in sections:
        about = prose(classes[title].__doc__) if title in classes else text.splitlines()
        parts.append([f"## {title}", "", *about, "", *rows])
    return page("Configuration", *parts)


def metrics_table() -> list[str]:
    """The metrics that `evaluate.metrics` can name."""
    from fedspan.learn.metrics import METRICS

    rows = [
        (f"`{name}`", ", ".join(sorted(m.kinds or ())) + (", two classes" if m.binary else ""), _better(m.higher))
        for name, m in METRICS.items()
    ]
    return ["Metrics by name, beside `loss` and, of language models, `perplexity`:", "", *table(_METRIC_TITLES, rows)]


_METRIC_TITLES = ("metric", "tasks", "better")


def _better(higher: bool) -> str:
    return "higher" if higher else "lower"


GROUPS = """\
    Options that several kinds have. Each can be combined with what else the kind does, and `fedspan partition` draws
    the result: shades for labels, a bar for sizes that differ, a second field for groups.

    * `group_sizes = [20, 8, 4, 2, 2]` (or `"20:8:4:2:2"`): groups of unequal numbers of clients, in this order; they
      add up to `clients`, and say how many groups there are.
    * `sizes = "zipf:1.2"`: how many examples a client gets follows a law, nobody below `min_samples` (10 if not given).
    * `shifts = ["none", "rotate:90", "noise:0.5+blur:1"]`: what each group does to its examples, training and test
      alike; fewer shifts than groups are taken in turn. With a kind that has no groups, clients take them in turn, and
      groups are known from then on. `rotate`, `blur` and `contrast` need pictures.
    * `mixed-groups` is soft membership: every example of a client belongs to a group drawn by the client's own shares.
      Its main group is what a yardstick that must know groups is told."""


def data_page() -> str:
    """Sources of data, and kinds of partition."""
    from fedspan.data import PARTITIONS, SOURCES
    from fedspan.data.partitions.feature_shifts import SHIFTS
    from fedspan.data.partitions.quantity import LAWS
    from fedspan.data.sources.catalog import KNOWN

    intro = """\
        `data.source` is one of these. Named data sets are looked for under `data.root`, or `$FEDSPAN_DATA`, in a folder
        of their name, and asked of the Hugging Face hub if the `datasets` library is installed; `fedspan data` says
        what is found on this machine."""
    sources = table(("source", "what it is"), [(f"`{name}`", about) for name, about in SOURCES.items()])
    rows = [
        (f"`{name}`", "×".join(map(str, k.shape)), len(k.class_names), f"`{k.hub}`", f"{k.mean} / {k.std}")
        for name, k in KNOWN.items()
    ]
    known = table(("data set", "shape", "classes", "on the hub", "mean / deviation of pixels in 0..1"), rows)
    kinds = [
        (f"`{name}`", kind.description, ", ".join(f"`{o}` = {shown(v) or 'not set'}" for o, v in kind.options.items()))
        for name, kind in PARTITIONS.items()
    ]
    parts = table(("kind", "who holds what", "options and their defaults"), kinds)
    laws = table(("`sizes`", "its number"), [(f"`{name}`", about) for name, about in LAWS.items()])
    shifts = table(
        ("`shifts`", "its amount"), [(f"`{name}`", "" if kind is None else kind.about) for name, kind in SHIFTS.items()]
    )
    more = "Keys that all kinds have are listed under [`[partition]`](configuration.md#partition)."
    return page(
        "Data",
        ["## Sources", "", *textwrap.dedent(intro).splitlines(), "", *sources],
        ["## Data sets known by name", "", *known],
        ["## Partitions", "", more, "", *parts],
        ["## Groups, shifts and sizes", "", *textwrap.dedent(GROUPS).splitlines(), "", *laws, "", *shifts],
    )


def models_page() -> str:
    """The models by name, with their options."""
    from fedspan.models import MODELS

    intro = """\
        `model.kind` is one of these, or `package.module:Class` for a module of your own, which needs `--allow-code
        PACKAGE`; options stand beside it in `[model]`. From Python any `torch.nn.Module` will do."""
    rows = [
        (f"`{name}`", entry.about, ", ".join(f"`{o}` = {shown(v) or 'not set'}" for o, v in entry.options.items()))
        for name, entry in MODELS.items()
    ]
    titles = ("kind", "what it is", "options and their defaults")
    return page("Models", textwrap.dedent(intro).splitlines(), table(titles, rows))


# ------------------------------------------------------------------------------------------------ command line


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A command and all below it, with what is typed to reach each."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from commands(inner, f"{path} {name}")
    else:
        yield path, command


def usage(path: str, command: Any) -> str:
    """The line that shows how a command is called."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = [p.metavar or (p.name.upper() if p.required else f"[{p.name.upper()}]") for p in arguments]
    options = ["[OPTIONS]"] if len(command.params) > len(arguments) else []
    return " ".join([path, *words, *options])


def option(p: Any) -> str:
    """An option with what it takes."""
    names = ", ".join([*p.opts, *p.secondary_opts])
    if getattr(p, "is_flag", False):
        return f"`{names}`"
    takes = "|".join(getattr(p.type, "choices", ())) or p.type.name.removesuffix(" range").upper()
    return f"`{names} {p.metavar or takes}`"


def command_page() -> str:
    """Every command with its arguments and options."""
    import typer

    from fedspan.cli.app import app

    intro = """\
        `fedspan COMMAND --help` says the same. Every command ends with 0, or with 2 after one line that begins with
        `Error:` and says what to change, or with 130 when it was stopped by hand. `FEDSPAN_DEBUG=1` shows the
        traceback."""
    parts = [textwrap.dedent(intro).splitlines()]
    for path, command in commands(typer.main.get_command(app), "fedspan"):
        rows = []
        for p in command.params:
            if getattr(p, "hidden", False) or p.name == "help":
                continue
            argument = p.param_type_name == "argument"
            plain = isinstance(p.default, str | int | float | enum.Enum) and p.default not in (False, "")
            default = p.default if plain else None
            rows.append((f"`{p.metavar or p.name.upper()}`" if argument else option(p), p.help or "", shown(default)))
        width = 3 if any(default for *_, default in rows) else 2
        options = table(("", "what it does", "default")[:width], [r[:width] for r in rows]) if rows else []
        parts.append([f"## {path}", "", "```", usage(path, command), "```", "", *prose(command.help), "", *options])
    return page("Command line", *parts)


# ------------------------------------------------------------------------------------------------ Python


class Verbatim(str):
    """An annotation that is shown as it stands in the source, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def signature(name: str, thing: Any) -> list[str]:
    """How a function or a class is called, if it can be said."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return []
    bare = lambda a: Verbatim(a) if isinstance(a, str) else a
    parameters = [p.replace(annotation=bare(p.annotation)) for p in found.parameters.values()]
    found = found.replace(parameters=parameters, return_annotation=bare(found.return_annotation))
    words = re.sub(r" at 0x[0-9a-f]+", "", str(found))
    lines = textwrap.wrap(f"{name}{words}", 110, subsequent_indent="    ", break_long_words=False)
    return ["```python", *lines, "```", ""]


def members(cls: type) -> list[tuple[str, str]]:
    """The public functions of a class's own body, each with the first line of its docstring."""
    found = []
    for name, member in vars(cls).items():
        inner = getattr(member, "__func__", member)
        inner = inner.fget if isinstance(member, property) else inner
        if not name.startswith("_") and (inspect.isfunction(inner) or isinstance(member, property)):
            first = (inspect.getdoc(inner) or "").split("\n\n")[0]
            arguments = "" if isinstance(member, property) else _arguments(inner, of_class=True)
            found.append((f"`{name}{arguments}`", first))
    return found


def _arguments(function: Any, of_class: bool = False) -> str:
    parameters = list(inspect.signature(function).parameters.values())
    if of_class and parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"({', '.join(stars.get(p.kind, '') + p.name for p in parameters)})"


def public(name: str, thing: Any) -> list[str]:
    """One public name."""
    lines = [f"## {name}", ""]
    if inspect.ismodule(thing):
        functions = [
            (f"`{n}{_arguments(f)}`", (inspect.getdoc(f) or "").split("\n\n")[0])
            for n, f in vars(thing).items()
            if inspect.isfunction(f) and f.__module__ == thing.__name__ and not n.startswith("_")
        ]
        return [*lines, *prose(thing.__doc__), "", *table(("function", "what it does"), functions)]
    if inspect.isclass(thing):
        lines += [] if dataclasses.is_dataclass(thing) or "__init__" not in vars(thing) else signature(name, thing)
        lines += [*prose(thing.__doc__), ""]
        if dataclasses.is_dataclass(thing) and any(f.init for f in dataclasses.fields(thing)):
            lines += [*fields_of(thing), ""]
        if issubclass(thing, tuple) and hasattr(thing, "_fields"):
            lines += [*parts_of(thing), ""]
        rows = members(thing)
        return lines + (table(("member", "what it does"), rows) if rows else [])
    if callable(thing):
        return [*lines, *signature(f"fedspan.{name}", thing), *prose(thing.__doc__)]
    return [*lines, *prose(type(thing).__doc__)]


def parts_of(cls: Any) -> list[str]:
    """The parts of a named tuple, each with the string under it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    rows = []
    for node, after in itertools.zip_longest(body.body, body.body[1:]):
        if isinstance(node, ast.AnnAssign):
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
            rows.append((f"`{ast.unparse(node.target)}`", f"`{ast.unparse(node.annotation)}`", said or ""))
    return table(("part", "type", "what it is"), rows)


def fields_of(cls: type) -> list[str]:
    """The fields of a dataclass of the public surface."""
    from fedspan.method.fields import sentences

    said = sentences(cls)
    rows = []
    for f in dataclasses.fields(cls):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        plain = default if isinstance(default, str | int | float | tuple | types.NoneType) else dataclasses.MISSING
        kind = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
        value = "" if plain is dataclasses.MISSING and default is not dataclasses.MISSING else shown(plain)
        rows.append((f"`{f.name}`", f"`{kind}`", value, said.get(f.name, "")))
    return table(("field", "type", "default", "what it is"), rows)


def attacks_page() -> str:
    """What dishonest clients reach, from the stored outcomes of `fedspan attack` in docs/attacks."""
    from fedspan.simulation.defence import Defence
    from fedspan.studies.attacks import ATTACKS, from_csv, to_markdown

    guard = Defence(rule="clip")
    intro = f"""\
        A client can send what is well-formed and false. With `[defence]` and `rule = "clip"` the server judges what an
        upload *changes* of what its client was sent: parts that have the name and shape of a part of the download by
        their difference from it, others (gradients, sums, coefficients) as they are. Every part is cut, all its tensors
        together, to quantile {guard.quantile:g} of the norms of that part in the last {guard.window} rounds with
        uploads, and no upload weighs more than {guard.most_weight:g} medians of recent weights. What has no past yet
        (the first round, a part that was zero so far) waits until the round is in and is judged by the round; three
        values are the least that say what is usual. Norms are remembered as they came, before they were cut, and a
        checkpoint holds them, so that a run that goes on has the same bits. In a deployment uploads whose change has
        more than `--norm-factor` times the median norm are still refused.

        It is off in a simulation, unless the file says otherwise, and on in what `fedspan deploy` runs, which writes it
        into the run's `config.toml`: simulating that file gives the deployment's numbers. Every round's line in
        `metrics.jsonl` says how many uploads were clipped and capped, the bounds, and who was cut most; the log and
        `fedspan deploy status` tell of it too.

        The tables are of `fedspan attack`, in which a tenth of the clients, drawn by the seed, is dishonest from the
        first round on. Success of a backdoor is how often a mark in a corner makes an honest client's model say the
        attacker's class. The constants were chosen on seeds 0 to 8 of the same experiments."""
    limits = """\
        What it does not do: an attacker whose change has a usual norm is believed, so a plain backdoor works as well as
        without, and flipped labels are not found; with half of the clients dishonest the median is theirs. Integers (a
        chosen cluster) are not judged. Clients of different ranks share the bounds of their parts. Of two
        clients a liar is half, and nobody can say which half."""
    parts = [
        textwrap.dedent(intro).splitlines(),
        [
            "## The attacks",
            "",
            *table(["name", "what a dishonest client does"], ((a, b.sentence) for a, b in ATTACKS.items())),
        ],
    ]
    for path in sorted((DOCS / "attacks").glob("*.csv")):
        title, *text = path.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
        told = to_markdown(from_csv(path.read_text(encoding="utf-8"))).splitlines()
        parts.append([f"## {title}", "", *text, "", *told])
    parts.append(["## Limits", "", *textwrap.dedent(limits).splitlines()])
    return page("Dishonest clients", *parts)


# ------------------------------------------------------------------------------------------------ diagnose


def diagnose_page() -> str:
    """How good the advice of `fedspan diagnose` is, from the outcome in docs/diagnose."""
    from fedspan.studies.diagnosis.score import NEAR, case_from, totals

    stored = json.loads((DOCS / "diagnose" / "score.json").read_text(encoding="utf-8"))
    cases = [case_from(c) for c in stored["cases"]]
    total = totals(cases)
    first, last = stored["seeds"]
    count = lambda key: "{} of {}".format(*total[key])
    intro = f"""\
        `fedspan diagnose` advises before anything is trained. Here its first advice is run as it proposes it, beside a
        common set of methods on the same federations, seeds {first} to {last}: the kind of heterogeneity is named
        rightly {count("kind")} times where it is known, the rank is the true number of directions {count("rank")} times
        where there is one, and on {count("near")} federations the advice is at most {100 * NEAR:g} points behind the
        best row (of errors: {100 * NEAR:g} % of the best).

        Every row chooses its learning rate among {", ".join(f"{lr:g}" for lr in stored["rates"])} (a method that clips
        gradients by default among {", ".join(f"{lr:g}" for lr in stored["clipped"])}) by the validation
        parts of seed 0. The advice was made on development seeds 0 to 4 of the federations of digits. Rows of natural
        federations are those of [Natural federations](natural-federations.md) at the same seeds, with the settings of
        their files; their figures were known when the advice was made.
        `python experiments/diagnose/score.py` repeats it and writes `docs/diagnose/score.json`.
        """
    told = [
        (
            c.name,
            c.kind or "not known",
            ", ".join(dict.fromkeys(c.kinds)),
            "" if c.rank is None else c.rank,
            ", ".join(dict.fromkeys(map(str, c.ranks))),
            ", ".join(f"`{m}`" for m in dict.fromkeys(c.first)),
            _scored(c, c.reached),
            f"`{c.best[0]}`, {_scored(c, c.best[1])}",
            _behind(c),
        )
        for c in cases
    ]
    titles = (
        "federation",
        "kind",
        "named",
        "rank",
        "said",
        "first advice",
        "reached",
        "best of the common set",
        "behind",
    )
    rows = dict.fromkeys(m for c in cases for m in c.rows)
    means = {c.name: c.means() for c in cases}
    each = [(f"`{m}`", *(_scored(c, means[c.name].get(m)) if m in c.rows else "" for c in cases)) for m in rows]
    left = stored["not_run"]
    return page(
        "How good the advice is",
        prose(textwrap.dedent(intro)),
        [f"Not run yet, about a minute of one core each: {', '.join(left)}."] if left else [],
        ["## First advice and best row", "", *table(titles, told)],
        ["## The common set", "", *table(("row", *(c.name for c in cases)), each)],
    )


def _scored(case: Any, value: float | None) -> str:
    if value is None:
        return "diverged" if case.advised else ""
    return f"{100 * value:.1f}" if case.higher else f"{value:.2f}"


def _behind(case: Any) -> str:
    if case.behind is None:
        return ""
    end = "" if case.higher else " %"
    return f"{100 * case.behind:+.1f}{end}"


# ------------------------------------------------------------------------------------------------ natural federations

# What was run for each comparison, beside its file.
COMPARED = {
    "heart": "--methods local,fedavg,fedavg-ft,fedavg-head,ditto,fedrep,fedper,apfl,pfl-mf --tune 8",
    "heart-linear": "'model={kind = \"linear\"}' --methods local,fedavg,fedavg-ft,ditto,apfl,pfl-mf --tune 8",
    "tcga-brca": "--methods local,fedavg,fedavg-ft,ditto,apfl,pfl-mf --tune 8",
    "school": "--methods local,fedavg,fedavg-ft,pfl-mf,amht-lrs --tune 4 method.lr=log:1e-4:0.1",
    "parkinsons": "--methods local,fedavg,fedavg-ft,ditto,pfl-mf --tune 4 --tune-seeds 3 method.lr=log:1e-4:3e-3",
    "shakespeare": "--methods local,fedavg,fedavg-ft,fedavg-head,fedper,pfl-mf --tune 4 method.lr=log:0.03:3",
}
# What the figures alone do not say.
CAVEATS = {
    "parkinsons": """\
        No verdict: this is the fourth try, and settings were changed after results on these seeds had been seen, so
        the seeds are not untouched. Targets lie near 29 and models start near 0; with larger learning rates `fedavg`
        exploded, with or without halving, so the range was narrowed, and every row took the largest value tried. In
        thirty rounds `fedavg` has probably not arrived, while `pfl-mf` solves for its coefficients. Its R2 is below
        0 too, worse than each patient's own mean.""",
    "school": """\
        `pfl-mf` diverged at every learning rate with its usual steps on v; the file has it solve for v.""",
}
CLEAR = 0.05  # Holm's p of Wilcoxon's test below which a difference is called clear


def natural_page() -> str:
    """The natural federations: their cards, and what methods reach on them, from the outcomes in docs/natural."""
    intro = """\
        Five federations whose clients really are somebody: hospitals, regions, schools, patients, roles of plays.
        Each is one file in `experiments/natural`, run from its data as they are; they are not part of the project
        (`FEDSPAN_DATA` says where they lie). Every figure is the mean over clients of their test parts, then
        over seeds; ± is the deviation over seeds, and accuracies are in percent. R2 and explained variance
        below 0 are worse than a client's own mean. Learning rates were chosen on validation parts of
        development seeds (column *seeds*), with the same number of trials for every row, by the measure that
        the column *on validation* names; reported seeds are others. Such parts are small (of a Swiss hospital
        six patients), so choices are noisy. Methods that treat a head apart are left out where the model is
        linear, as the head is then all of it. Nothing but the learning rate was tuned. Paired tests take
        clients and seeds as pairs and are corrected by Holm for the number of rows; clients of one run share
        what they learnt, and where a split is given all seeds share the test rows, so p is a guide.

        The outcomes are kept in `docs/natural`, written by `experiments/natural/run.py`; this page is written from
        them."""
    parts = [textwrap.dedent(intro).splitlines(), flamby_rows()]
    for name, options in COMPARED.items():
        parts.append(natural_federation(name, options))
    return page("Natural federations", *parts)


def flamby_rows() -> list[str]:
    """FLamby's own rows beside its figures."""
    rows = []
    for row in _outcome("flamby")["rows"]:
        mean, spread = statistics.fmean(row["values"]), statistics.stdev(row["values"])
        theirs = f"{100 * row['published']:.1f}"
        theirs += f" ± {100 * row['published_spread']:.1f}" if row["published_spread"] else ""
        away = abs(mean - row["published"])
        within = "yes" if away <= max(spread, row["published_spread"] or 0.0) else f"no, {100 * away:.1f} away"
        ours = f"{100 * mean:.1f} ± {100 * spread:.1f}"
        rows.append((row["federation"], row["row"], row["settings"], row["measure"], ours, theirs, within))
    says = """\
        FLamby (Ogier du Terrail et al., NeurIPS 2022) publishes rows for the first two. They are repeated here on its
        splits with its linear models, one output and its losses, seeds 200 to 204, for the settings that its repository
        has had. *Within* says whether the means differ by at most a deviation over seeds, the larger of ours and the
        published one where that is known. What may differ: the draws, and that a round here begins a new pass over a
        client's examples, where FLamby goes on with the last one. FedAdam's moments are not corrected, β₂ = 0.999."""
    titles = ("federation", "row", "settings", "measure", "here", "published", "within")
    return ["## FLamby's own rows", "", *textwrap.dedent(says).splitlines(), "", *table(titles, rows)]


def natural_federation(name: str, options: str) -> list[str]:
    """One federation: its card, and the comparison if it has been run."""
    file = name.removesuffix("-linear")
    text = (ROOT / "experiments" / "natural" / f"{file}.toml").read_text(encoding="utf-8")
    card = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    facts = re.split(r"\b(Who|What|Licence|Split|Published)(?: \(([^)]*)\))?: ", card)
    rows: list[Iterable[str]] = [
        (key.lower(), f"{source}: {said.strip()}" if source else said.strip())
        for key, source, said in zip(facts[1::3], facts[2::3], facts[3::3], strict=True)
    ]
    lines = [f"## {name}", "", *table(("", ""), rows), ""]
    if name != file:
        lines = [f"## {name}", "", f"The same table as {file}, with FLamby's logistic regression as the model.", ""]
    if not (DOCS / "natural" / f"{name}.json").is_file():
        return [*lines, "No comparison of it is kept."]
    kept = _outcome(name)
    seeds = f"seed={kept['seeds'][0]} --seeds {len(kept['seeds'])}"
    command = f"fedspan compare experiments/natural/{file}.toml {options} {seeds} --out runs/natural/{name}"
    lines += ["<!-- not run: minutes, and the table is needed -->"]
    lines += ["```console", f"$ {command}", f"$ python experiments/natural/run.py keep runs/natural/{name}", "```", ""]
    measures = kept["measures"]
    titles = ["row", *(m["name"] for m in measures), *(f"{m['name']}, all examples together" for m in measures)]
    rows = [
        [f"`{row['label']}`"]
        + [_spread(row[of][m["name"]], m["percent"]) for of in ("values", "pooled") for m in measures]
        for row in kept["rows"]
    ]
    lines += [*table(titles, rows), "", *(f"* {_brings(kept, m)}" for m in measures), ""]
    lines += [*textwrap.dedent(CAVEATS.get(name, "")).splitlines(), "", *_tests(kept)]
    given = kept["given"]
    lines += ["", "What each row was given (* marks the smallest or largest value tried):", ""]
    return [*lines, *table(given["titles"], given["rows"]), *(f"\n{said}" for said in kept["left_out"])]


def _brings(kept: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """What personal models bring by one measure, in words that follow from the figures."""
    mean = {row["label"]: statistics.fmean(row["values"][first["name"]]) for row in kept["rows"]}
    mean = dict(sorted(mean.items(), key=lambda item: item[1], reverse=first["higher"]))
    named = lambda labels: ", ".join(f"`{label}`" for label in labels) or "none"
    shown = lambda label: f"`{label}` ({_spread([mean[label]], first['percent'])})"
    found, over = [f"By {first['name']} the first row is {shown(next(iter(mean)))}."], []
    for base in ("local", "fedavg"):
        those = [t for t in kept["paired"] if t["measure"] == first["name"] and t["against"] == base]
        clear = [t for t in those if t["p_wilcoxon"] is not None and t["p_wilcoxon"] < CLEAR]
        better = [t["label"] for t in clear if t["gain"] > 0]
        worse = [t["label"] for t in clear if t["gain"] <= 0]
        over.append({base, *better})
        found.append(f"Against {shown(base)} clearly better: {named(better)}; clearly worse: {named(worse)}.")
    both = [label for label in mean if all(label in those for those in over) and label not in ("local", "fedavg")]
    found.append(
        f"Personal models that are clearly better than both: {named(both)}."
        if both
        else "No personal model is clearly better than both: what personalisation brings here, if anything, is less"
        " than these tests can tell."
    )
    controls = [label for label in mean if label in ("local", "fedavg", "fedavg-ft", "fedavg-head")]
    if next(iter(mean)) in controls:
        found.append("A control leads: a method made for personal models brings nothing here beyond it.")
    return " ".join(found)


def _tests(kept: Mapping[str, Any]) -> list[str]:
    percent = {m["name"]: m["percent"] for m in kept["measures"]}
    p = lambda value: "–" if value is None else f"{value:.3f}" if value >= 0.001 else "< 0.001"
    rows = []
    for t in kept["paired"]:
        scaled = t["gain"] * (100 if percent[t["measure"]] else 1)
        counts = f"{t['better']} / {t['clients'] - t['better'] - t['worse']} / {t['worse']}"
        names = t["measure"], f"`{t['label']}`", f"`{t['against']}`"
        rows.append((*names, f"{scaled:+.3g}", counts, p(t["p_sign"]), p(t["p_wilcoxon"])))
    titles = ("measure", "row", "against", "mean gain", "better / equal / worse", "p (sign)", "p (Wilcoxon)")
    return table(titles, rows)


def _spread(values: Iterable[float | None], percent: bool) -> str:
    known = [v * (100 if percent else 1) for v in values if v is not None]
    if not known:
        return "–"
    text = f"{statistics.fmean(known):.1f}" if percent else f"{statistics.fmean(known):.4g}"
    if len(known) < 2:
        return text
    return f"{text} ± {statistics.stdev(known):.1f}" if percent else f"{text} ± {statistics.stdev(known):.2g}"


def _outcome(name: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((DOCS / "natural" / f"{name}.json").read_text(encoding="utf-8"))
    return kept


# ------------------------------------------------------------------------------------------------ speed


def speed_page() -> str:
    """What is measured by `make bench`, how, and what came out where an outcome is kept in docs/speed.json."""
    intro = """\
        `make bench` times whole runs as a user gets them: rounds, evaluation, checkpoints and the end, nothing
        replaced. Training speed is read off the record of the run itself, all rounds but the first. Contestants take
        turns (A B C A B C ...), each turn in a process of its own, so that a drift of the machine's speed hits all of
        them; a ratio is taken within a turn, and the median over the turns is shown. With `PEERS=1` the same FedAvg
        also runs in [pfl-research](https://github.com/apple/pfl-research),
        [FedJAX](https://github.com/google/fedjax) and [Flower](https://flower.ai) with Ray, in environments of their
        own that are made in `.venv-peers` from the pins in `bench/peers`. Whoever wins a row is shown; so is the
        reason why a row could not be run.

        <!-- not run: minutes, and the machine should do nothing else -->
        ```console
        $ make bench QUICK=1              # some minutes
        $ make bench                      # every row, three turns
        $ make bench PEERS=1 RESUME=1     # the same beside other projects; what bench.json has is kept
        $ make bench WORKLOADS=scale      # many clients: memory and seconds per participant
        ```

        ## What is measured

        * **Workloads.** A 784-200-200-10 perceptron on 70,000 pictures of MNIST's shape over 100 or 1000 clients; a CNN
          of two 5x5 convolutions on 60,000 of CIFAR's shape over 100; ResNet-9 on 2,400 over 100. Labels follow
          Dirichlet(0.5), a quarter of each client's examples is held out, 10 % of the clients take part in a round,
          one local epoch, plain SGD. Pictures are patterns under noise: no file is needed.
        * **Samples per second.** A sample counts once for every gradient that comes back through its loss. Gradients
          are counted in a run with the same clients and minibatches (`bench/counting.py`), not by a formula. Where a
          method takes several per example (Ditto two, FedRep with ten epochs of the head eleven), the ratio in brackets
          counts each participant's examples once per round instead.
        * **The plain loop** is torch without federation: the same clients' minibatches one after another on one model,
          by the fastest of the ways tried (`torch.autograd.grad` and one in-place step; `torch.optim.SGD` is 5 to 15 %
          slower). It is warm when the clock starts: the first optimiser of a process imports `torch._dynamo`, which
          takes more than a second. The allocator's settings made no difference.
        * **The batched-GEMM limit** is what the matrix products of the perceptron alone would take, all participants at
          once.
        * **Memory** is the most that all processes of a row held together, shared pages once.
        * **bf16** is quick on CPUs with AMX; rows of others say that there is none.
        * **The job** is `experiments/mnist-dirichlet.toml` by `fedspan run`, from the start of the process to its end,
          beside programs that read the same parquet files, average a hundred rounds and evaluate every tenth.
          "The first time" includes decoding the pictures, which fedspan keeps afterwards; the others are then given
          decoded pictures too. It needs `FEDSPAN_DATA`.

        Peers run without evaluation. FedJAX fills up every last batch by repeating examples; they count once.
        Flower has two Ray actors of one core, pfl-research one process with torch's threads. `python -m bench.keep`
        keeps an outcome for this page."""
    text = textwrap.dedent(intro).splitlines()
    path = DOCS / "speed.json"
    told = speed_tables(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []
    return page("Speed", text, told)


def speed_tables(kept: Mapping[str, Any]) -> list[str]:
    """The tables of a kept outcome."""
    on = kept["machine"]
    has = [name for name, there in (("AVX-512", on.get("avx512")), ("AMX", on.get("amx"))) if there]
    where = f"{on['cpu']}, {on.get('cores')} cores, {' and '.join(has) or 'neither AVX-512 nor AMX'}"
    turns = "one turn each" if kept["turns"] == 1 else f"medians of {kept['turns']} turns"
    lines = ["## What came out", "", f"On {where}; torch {on.get('torch')}, {turns}."]
    lines += [f"Versions: {', '.join(kept['versions'])}."] if kept["versions"] else []
    for title, name in (
        ("Samples per second, as a multiple of the plain loop on one thread", "ratios"),
        ("`experiments/mnist-dirichlet.toml` from start to end", "job"),
        ("Every row", "details"),
    ):
        if kept[name]["rows"]:
            lines += ["", f"### {title}", "", *table(kept[name]["titles"], kept[name]["rows"])]
    lines += ["", *(f"* {said}." for said in kept["notes"])]
    return [*lines, "", *(f"* Not run: {said}." for said in kept["not_run"])]


# ------------------------------------------------------------------------------------------------ a cluster

FIGURES, END_OF_FIGURES = "<!-- figures -->", "<!-- end of figures -->"
NODES, CORES = (8, 64), 2  # what is expected on paper


def cluster_page() -> str:
    """The how-to about clusters, with the figures of docs/cluster.json put between its markers."""
    kept = json.loads((DOCS / "cluster.json").read_text(encoding="utf-8"))
    return with_figures(DOCS / "how-to" / "cluster.md", cluster_figures(kept))


def with_figures(path: Path, figures: Iterable[str]) -> str:
    """A page with lines put between its markers."""
    before, _, rest = path.read_text(encoding="utf-8").partition(FIGURES)
    return before + "\n".join([FIGURES, *figures, END_OF_FIGURES]) + rest.partition(END_OF_FIGURES)[2]


def cluster_figures(kept: Mapping[str, Any]) -> list[str]:
    """What `python -m bench.cluster` has measured, and what it lets expect."""
    on, calls = kept["machine"], kept["overhead"]
    lines = [
        f"On {on['cpu']}, {on['cores']} cores; torch {on['torch']}, Ray {on['ray']}; two nodes of one CPU"
        " on loopback beside"
        f" two local workers, medians of {kept['turns']} turns. On one machine Ray's own processes take"
        " their time from the"
        " same two cores.",
        *_busy(kept),
        "",
        "**A chunk without work**, sent with a tree and answered with it, two workers at a time:",
        "",
        *table(
            ["bytes each way", "local workers, ms", "Ray, ms"],
            [[f"{c['bytes']:,}", f"{c['local']:.2f}", f"{c['ray']:.1f}"] for c in calls],
        ),
    ]
    if "speed" in kept:
        rows = [
            [
                r["title"],
                r["chunks"],
                f"{r['local']:.2f}",
                f"{r['ray']:.2f}",
                f"{r['local'] / r['ray']:.2f}",
                _yes(r["same"]),
            ]
            for r in kept["speed"]
        ]
        titles = ["FedAvg", "chunks in a round", "local, s per round", "Ray, s per round", "Ray's speed", "same hash"]
        lines += ["", "**Rounds**, a tenth of the clients in each:", "", *table(titles, rows)]
    if "private" in kept:
        p = kept["private"]
        moved = p["counted_per_round"].get("rows between nodes", 0)
        travelled = f"{moved / 1e6:,.1f} MB" if moved else "none"
        counted = ", ".join(f"{k} {v / 1e6:.2f} MB" for k, v in p["counted_per_round"].items() if v) or "nothing"
        lines += [
            "",
            f"**Private models.** {p['clients']:,} clients with Ditto and a perceptron of"
            f" {p['row_bytes'] / 1e6:.2f} MB each, all of"
            f" them in every round: {p['rows_bytes'] / 1e6:,.0f} MB of private states, of which {travelled}"
            " travelled in a round. Through"
            f" loopback went {p['loopback_per_round'] / 1e6:,.1f} MB per round, Ray's own messages"
            " included; fedspan counted"
            f" {counted}. The evaluation, whose chunks are others, fetched"
            f" {p['rows_for_evaluation'] / 1e6:,.0f} MB from node to node,"
            f" and at the end all states came home once ({p['rows_at_the_end'] / 1e6:,.0f} MB). A round took"
            f" {p['seconds_per_round']['ray']:.1f} s, with two local workers"
            f" {p['seconds_per_round']['local']:.1f} s.",
        ]
    if "compare-1" in kept and "compare-2" in kept:
        one, two = kept["compare-1"], kept["compare-2"]
        lines += [
            "",
            f"**Whole runs.** `compare` of eight runs took {one:.0f} s on one node and {two:.0f} s on two,"
            f" {one / two:.2f} times the"
            " speed, reading and the report included.",
        ]
    else:
        lines += ["", "**Whole runs.** `compare` of eight runs on one node and on two has not been timed yet."]
    return [*lines, *(_expected(kept) if "speed" in kept else [])]


def _expected(kept: Mapping[str, Any]) -> list[str]:
    """On paper: chunks of so much work, and a process that hands them out one after another."""
    small, large = kept["overhead"][0], kept["overhead"][-1]
    per_byte = (large["ray"] - small["ray"]) / (large["bytes"] - small["bytes"])
    rows = []
    for r in kept["speed"]:
        work = 2e3 * r["local"] / r["chunks"]  # of one core, in ms
        cost = small["ray"] + per_byte * r["bytes"]
        gain = [min(n * CORES / (work + cost), 1 / cost) * work / 2 for n in NODES]
        rows.append([r["title"], f"{work:.0f}", f"{cost:.1f}", *(f"{g:.1f}" for g in gain), f"{work / cost:.0f}"])
    titles = ["", "work of a chunk, ms", "cost of a chunk, ms", *(f"{n} nodes" for n in NODES), "stops at, cores"]
    return [
        "",
        f"**On paper**, nodes of {CORES} cores beside one machine of {CORES}, by the figures above: every"
        " chunk costs the process that"
        " hands them out its time, one after another, so that more cores than work ÷ cost have nothing to"
        " do. It holds for rounds with"
        " several chunks for each core; a round of ten chunks can use ten cores at most. A network that is"
        " slower than loopback"
        " adds its own time, and nobody has measured more than two nodes.",
        "",
        *table(titles, rows),
        "",
        "Where it stops early, use larger chunks (`train.chunk`, part of the configuration: other chunks"
        " round otherwise), or spread whole"
        " runs, which exchange nothing while they run.",
    ]


def _busy(kept: Mapping[str, Any]) -> list[str]:
    """A warning where other work ran beside what was measured."""
    worst = max(kept.get("busy", {}).values(), default=0.0)
    if worst < 0.5:
        return []
    return [
        "",
        f"**Other work ran meanwhile** (load {worst:g} for each core): times are no more than an order of magnitude,"
        " and ratios of Ray to local workers, of two nodes to one, and what is expected on paper are not to be relied"
        " on. Bytes and hashes do not depend on it.",
    ]


def _yes(held: bool) -> str:
    return "yes" if held else "no"


def adaptive_page() -> str:
    """The page on adaptive pFL-MF, with the reported table of docs/adaptive between its markers."""
    path = ROOT / "experiments" / "adaptive" / "run.py"
    found = importlib.util.spec_from_file_location("adaptive_run", path)
    assert found is not None and found.loader is not None
    run = importlib.util.module_from_spec(found)
    sys.modules[found.name] = run  # dataclasses look their module up
    found.loader.exec_module(run)
    table = run.tables(run.Outcomes(run.OUT), list(run.FEDERATIONS), run.REPORTED)
    return with_figures(DOCS / "explanation" / "adaptive.md", table)


def profile_page() -> str:
    """Where the time of a round goes, from what `python -m bench.profiling` kept in docs/speed-profile.json."""
    intro = """\
        What a round of the perceptron's workloads consists of, and what stands between it and the limits of the CPU.
        The workloads and the plain loop are those of [Speed](speed.md).

        <!-- not run: minutes, and the machine should do nothing else -->
        ```console
        $ python -m bench.profiling                        # all rows; writes docs/speed-profile.json
        $ python -m bench.profiling mlp-100-b32 fedavg     # one of them
        ```

        One process computes all chunks of a round, as one worker does; times are CPU time. Rounds as they are, rounds
        under Python's profiler and the plain loop take turns. Calls into torch are read off the profiler, which hardly
        slows them down; Python is what is left of the round as it is. The ratio is of examples per second of this one
        thread to the plain loop's; what two workers reach together stands in [Speed](speed.md)."""
    text = textwrap.dedent(intro).splitlines()
    path = DOCS / "speed-profile.json"
    return page("Where the time goes", text, profile_tables(json.loads(path.read_text(encoding="utf-8"))))


def profile_tables(kept: Mapping[str, Any]) -> list[str]:
    """The profiles of all rows, and what they mean."""
    on, found = kept["machine"], kept["profiles"]
    kinds = list(found[0]["parts"])
    lines = ["## Milliseconds of a round", "", f"On {on['cpu']}, torch {on.get('torch')}, medians of {kept['rounds']}."]
    cells = [
        [r["workload"], r["row"], f"{r['ms']:.0f}", *(f"{r['parts'][k]:.1f}" for k in kinds), f"{r['ratio']:.2f}"]
        for r in found
    ]
    lines += ["", *table(["workload", "row", "all", *kinds, "ratio, one thread"], cells), ""]
    limits = ", ".join(f"{name} {value:,.0f}" for name, value in kept["limits"].items())
    meaning = f"""\
        ## What stands in the way

        * **The products themselves.** MKL's products, which the batched-GEMM limit is made of, reached in the same run
          on one thread (examples/s): {limits}. On this CPU MKL uses half the width of its registers; products that are
          large enough go to oneDNN instead, which uses all of it. It is about twice as quick at 256 rows, and little
          quicker at 32, where it takes a weight apart for few rows.
        * **Small minibatches.** With 32 rows a step reads and writes 0.8 MB of weights for 28 million operations. The
          weights of several clients do not fit a core's own cache: each pass over them goes through the shared one.
        * **Shapes.** oneDNN prepares a product of every new shape, which takes longer than the product. A client's rows
          are filled up to a multiple of eight, so that there are few shapes.
        * **Passes beside the products.** Ditto reads a private model for every participant and writes another; with a
          thousand clients each is used for one or two steps, so that private rows and passes over weights take a
          third to a half of what the products take. Sums of uploads and the test that they are finite read every
          weight once more.
        * **Python.** A step of a folded perceptron is some thirty calls; a chunk of clients has a cost of its own
          (streams, keys, checks, `vmap`), which is what small visits of a thousand clients show. FedRep takes ten times
          as many steps on its small head, on features that are computed once.
        * **Two workers** share the memory's bandwidth and the last cache. Chunks hold about equally many examples, so
          that neither waits long for the other."""
    return lines + textwrap.dedent(meaning).splitlines()


def python_page() -> str:
    """The public names of the package: `fedspan.__all__`."""
    import fedspan

    intro = """\
        These names, and the keys and files of [what is stable](../explanation/stability.md), are what other code may
        rely on; everything else may change. All can be imported from `fedspan` itself, and nothing is loaded before it
        is used: `import fedspan` does not import torch."""
    names = [n for n in sorted(fedspan.__all__, key=lambda n: (n.startswith("_"), n.lower())) if n != "__version__"]
    parts = [public(name, getattr(fedspan, name)) for name in names]
    return page("Python", textwrap.dedent(intro).splitlines(), *parts)


# ------------------------------------------------------------------------------------------------ all of them


# ------------------------------------------------------------------------------------------------ defaults

SETTINGS = {
    "digits": "Digits whose labels are permuted: 20 clients in 4 groups, batches of 16, 2 epochs, 15 rounds",
    "setup3": "Setup 3 of pFL-MF: MNIST, 1000 clients in 10 groups, 100 rounds, a tenth of them in each",
    "mnist": "6,000 digits of MNIST over 20 clients with uneven labels, 20 rounds",
    "cifar": "3,000 pictures of CIFAR-10 at 16 × 16 over 10 clients with uneven labels, a convolutional network",
}


def defaults_page() -> str:
    """What every method reaches with its defaults, from the outcomes in docs/defaults."""
    intro = """\
        No option is given but the setting, which is a file in `experiments/defaults`; step sizes are the methods' own.
        Defaults were chosen on seeds 0 to 9, most of them on the test part of seed 0; figures are from other seeds.
        An empty cell has not been run, and a mean is over the seeds that were. How a step is judged too long was
        changed once after some of these rows had been seen (no default was), and code has changed since: rows are run
        again when it has. `python experiments/defaults/run.py` repeats
        them, and this page is written from what it keeps in `docs/defaults`. A method whose clients all have the same
        model at the end is marked *one model*: where labels mean different things to different clients, no such model
        can be right for all."""
    parts = [textwrap.dedent(intro).splitlines()]
    for name, title in SETTINGS.items():
        path = DOCS / "defaults" / f"{name}.json"
        if path.is_file():
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            parts.append([f"## {title}", "", *defaults_table(rows)])
    return page("Methods with their defaults", *parts)


def defaults_table(rows: list[dict[str, Any]]) -> list[str]:
    """A row per method: mean accuracy, that of every seed, the difference from Local."""
    by: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by.setdefault(row["method"], []).append(row)
    seeds = sorted({row["seed"] for row in rows})
    mean = {k: statistics.fmean(r["accuracy"] for r in v) for k, v in by.items() if all(not r["ended"] for r in v)}
    lines = []
    for method, found in by.items():
        each = {r["seed"]: "" if r["accuracy"] is None else f"{100 * r['accuracy']:.1f}" for r in found}
        gap = f"{100 * (mean[method] - mean['local']):+.1f}" if method in mean and "local" in mean else ""
        said = found[0]["ended"] or ("one model" if all(r["models"] == 1 for r in found) else "")
        shown_mean = f"{100 * mean[method]:.1f}" if method in mean else ""
        lines.append([f"`{method}`", shown_mean, gap, *(each.get(s, "") for s in seeds), said])
    return table(["method", "mean, %", "over Local", *(f"seed {s}" for s in seeds), ""], lines)


def pictures() -> Mapping[Path, Any]:
    """Every picture that is drawn from a stored outcome."""
    from fedspan.studies.claims import catalogue
    from fedspan.studies.claims.claim_pictures import pictures_of

    found = [p for claim in catalogue() for p in pictures_of(claim, decided(claim)[0])]
    return {DOCS / "reference" / "claims" / p.file: p for p in found}


def pages() -> Mapping[Path, str]:
    """Every file that is written, with its text."""
    from fedspan.studies.claims.claim_file import papers

    return {
        ROOT / "README.md": readme(),
        DOCS / "reference" / "configuration.md": configuration_page(),
        DOCS / "reference" / "methods.md": methods_page(),
        DOCS / "reference" / "data.md": data_page(),
        DOCS / "reference" / "models.md": models_page(),
        DOCS / "reference" / "command-line.md": command_page(),
        DOCS / "reference" / "attacks.md": attacks_page(),
        DOCS / "reference" / "python.md": python_page(),
        DOCS / "reference" / "equivalences.md": equivalences_page(),
        DOCS / "reference" / "conformance.md": conformance_page(),
        DOCS / "reference" / "claims.md": claims_page(),
        DOCS / "reference" / "claims-methods.md": claims_by_method(),
        **{DOCS / "reference" / f"claims-{paper}.md": claims_of(paper) for paper in papers()},
        DOCS / "reference" / "defaults.md": defaults_page(),
        DOCS / "explanation" / "natural-federations.md": natural_page(),
        DOCS / "explanation" / "diagnose.md": diagnose_page(),
        DOCS / "explanation" / "speed.md": speed_page(),
        DOCS / "how-to" / "cluster.md": cluster_page(),
        DOCS / "explanation" / "speed-profile.md": profile_page(),
        DOCS / "explanation" / "adaptive.md": adaptive_page(),
        **{path: with_claims(path) for path in with_blocks()},
    }


def main() -> None:
    """Write the pages, or name those that are not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not current")
    check = parser.parse_args().check
    stale = {p: t for p, t in pages().items() if not p.exists() or p.read_text(encoding="utf-8") != t}
    for path, text in stale.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'not current' if check else 'written'}")
    drawn = pictures()
    undrawn = [path for path, picture in drawn.items() if not picture.is_current(path)]
    for path in undrawn:
        if not check:
            drawn[path].write(path)
        print(f"{path.relative_to(ROOT)}: {'not current' if check else 'drawn'}")
    left = sorted({*(DOCS / "reference" / "claims").glob("*.svg")} - drawn.keys())
    for path in left:
        if not check:
            path.unlink()
        print(f"{path.relative_to(ROOT)}: {'of no claim' if check else 'removed, as no claim has it'}")
    if check and (stale or undrawn or left):
        sys.exit("Run `make docs`.")


if __name__ == "__main__":
    main()
