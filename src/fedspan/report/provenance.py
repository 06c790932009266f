"""What was run, and how to run it again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedspan.report.runs import Group, differences, settings
from fedspan.report.text import clean, shown, without_paths

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def facts(groups: Sequence[Group]) -> list[str]:
    """Short facts all runs share: data, split, model, rounds, seeds."""
    runs = [run for g in groups for run in g.runs]

    def common(section: str, key: str) -> str | None:
        found = {shown(s.get(key)) if isinstance(s := run.config.get(section), dict) else "none" for run in runs}
        return None if len(found) > 1 or found == {"none"} else clean(found.pop(), 40)

    source, kind, model = common("data", "source"), common("partition", "kind"), common("model", "kind")
    counts = [run.result["per_client"].get("n") for run in runs]
    sizes = {len(n) if isinstance(n, list) else 0 for n in counts}
    rounds, seeds = {run.rounds for run in runs}, {len(g.seeds) for g in groups}
    out = [f"data: {source}" if source else "", f"split: {kind}" if kind else "", f"model: {model}" if model else ""]
    out.append(f"{sizes.pop()} clients" if len(sizes) == 1 else "")
    out.append(f"{rounds.pop()} rounds" if len(rounds) == 1 else "")
    if len(seeds) == 1:
        n = seeds.pop()
        out.append(f"{n} seeds" if n > 1 else f"seed {runs[0].seed}" if len({r.seed for r in runs}) == 1 else "1 seed")
    return [f for f in out if f]


def notes(groups: Sequence[Group]) -> list[str]:
    """Warnings a reader needs before comparing: unequal conditions, unequal seeds, halved learning rates."""
    flats = [settings(g.runs[0]) for g in groups]
    unlike = [k for k in differences(flats) if k.split(".")[0] in ("data", "partition", "model", "train", "rounds")]
    out = []
    if unlike:
        keys = ", ".join(clean(k) for k in unlike[:6]) + (" and others" if len(unlike) > 6 else "")
        out.append(f"These runs differ in more than the method: {keys}. Compare with care.")
    if len({g.seeds for g in groups}) > 1:
        out.append("Not every row has the same seeds.")
    for g in groups:
        for run in g.runs:
            messages = run.result.get("messages")
            known = messages if isinstance(messages, list) else []
            said = [m for m in known if isinstance(m, str) and not m.startswith("Resuming")]
            out += [f"{g.label}, seed {run.seed}: {clean(without_paths(m), 300)}" for m in said[:3]]
    return out[:12]


def configuration(groups: Sequence[Group]) -> str:
    """The section on settings, versions and repeating, as HTML."""
    first = groups[0].runs[0]
    flats = [settings(g.runs[0]) for g in groups]
    keys = differences(flats)
    out = ""
    if len(groups) > 1 and keys:
        head = "".join(f'<th scope="col">{escape(g.label)}</th>' for g in groups)
        body = ""
        for k in keys:
            cells = "".join(f"<td>{escape(clean(shown(f[k]), 60)) if k in f else '–'}</td>" for f in flats)
            body += f'<tr><th scope="row">{escape(clean(k))}</th>{cells}</tr>\n'
        out += (
            '<div class="box" role="region" aria-label="Settings that differ" tabindex="0"><table>'
            "<caption><span>Settings that differ; – where a method has no such setting.</span></caption>"
            f'<thead><tr><th scope="col">setting</th>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n'
        )
    elif len(groups) > 1:
        out += "<p>The rows differ in nothing but the method.</p>\n"
    full = {"seed": first.seed, "rounds": first.rounds} | first.config
    out += (
        f"<details><summary>Full configuration of <strong>{escape(groups[0].label)}</strong>,"
        f" seed {first.seed}</summary><pre>{escape(toml(full))}</pre></details>\n"
    )
    out += _versions(first.result)
    if isinstance(first.config.get("data"), dict):
        out += "<p>To repeat, save the configuration above as <code>config.toml</code> and run</p>\n"
        out += f'<pre class="command">{escape(_command(groups))}</pre>\n'
        if "compare" in _command(groups):
            out += "<p>The first line repeats that one run. The second repeats the table; what differs between methods"
            out += " goes under <code>[methods.NAME]</code>.</p>\n"
    else:
        out += "<p>This run was started from Python; the configuration above is what its method was given.</p>\n"
    return out


def _versions(result: Mapping[str, Any]) -> str:
    """What the numbers were computed with; a list over the spans of rounds where that changed on the way."""
    mapping = result.get("mapping")
    end = f"; mapping {clean(str(mapping))}" if mapping else ""
    spans = result.get("spans")
    known = [s for s in spans if isinstance(s, dict)] if isinstance(spans, list) else []
    if len(known) > 1:
        items = "".join(
            f"<li>rounds {escape(clean(str(s.get('first'))))} to {escape(clean(str(s.get('last'))))}:"
            f" {escape(_pairs(s.get('versions')))}</li>"
            for s in known
        )
        return f"<p>Versions, by the rounds they computed{escape(end)}:</p>\n<ul>{items}</ul>\n"
    said = _pairs(result.get("versions"))
    return f"<p>Versions: {escape(said + end)}.</p>\n" if said else ""


def _pairs(versions: Any) -> str:
    """`name value` for every version, in one order, so that spans can be compared by eye."""
    known = {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}
    order = sorted(known, key=lambda k: (k != "fedspan", k))
    return ", ".join(f"{clean(k)} {clean(without_paths(known[k]))}" for k in order)


def _command(groups: Sequence[Group]) -> str:
    lines = ["fedspan run config.toml"]
    methods = list(dict.fromkeys(g.runs[0].method for g in groups))
    count = len(groups[0].seeds)
    if len(methods) == len(groups) > 1 and all(g.seeds == tuple(range(count)) for g in groups):
        seeds = f" --seeds {count}" if count > 1 else ""
        lines.append(f"fedspan compare config.toml --methods {','.join(methods)}{seeds}")
    return "\n".join(lines)


def toml(values: Mapping[str, Any], prefix: str = "") -> str:
    """Nested settings as TOML; a setting that is none becomes a comment, an absolute path keeps its last part."""
    lines = [_line(k, v) for k, v in values.items() if not isinstance(v, dict)]
    text = "\n".join(lines) + ("\n" if lines else "")
    for k, v in values.items():
        if isinstance(v, dict):
            name = prefix + _key(k)
            text += ("\n" if text else "") + f"[{name}]\n" + toml(v, name + ".")
    return text


def _line(key: str, value: Any) -> str:
    if value is None:
        return f"# {_key(key)} is not set"
    if isinstance(value, str) and without_paths(value) != value:
        return f"# {_key(key)} = {_value(value)} was a path of the machine it ran on; set your own"
    return f"{_key(key)} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(clean(without_paths(value), 300), ensure_ascii=False)
    return clean(json.dumps(value, default=str), 300)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(clean(key))
