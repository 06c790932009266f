"""Keeps an outcome for the page on speed: `python -m bench.keep bench.json` writes docs/speed.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.contestants import JOB, ROOT
from bench.outcome import Outcome, Row, wide_table

KEPT = ROOT / "docs" / "speed.json"
DETAILS = {
    "gradients_per_s": ("samples/s", ",.0f"),
    "examples_per_s": ("examples/s", ",.0f"),
    "evaluate_seconds": ("evaluation, s", ".2f"),
    "whole_seconds": ("whole run, s", ".1f"),
    "peak_mb": ("memory, MB", ",.0f"),
}


def kept(outcome: Outcome) -> dict[str, Any]:
    """The tables of an outcome, in words and numbers as a page shows them."""
    rows = outcome.rows()
    titles, lines = wide_table(rows)
    return {
        "machine": outcome.machine,
        "turns": max((r.get("turns", 0) for r in rows), default=0),
        "ratios": {"titles": titles, "rows": lines},
        "details": _details([r for r in rows if r["workload"] != JOB]),
        "job": _job([r for r in rows if r["workload"] == JOB]),
        "not_run": [f"{r['title']}, {r['column']}: {r['error']}" for r in rows if "error" in r],
        "notes": sorted({f"{r['title']}: {r['note']}" for r in rows if "note" in r}),
        "versions": sorted({r["version"] for r in rows if "version" in r}),
    }


def _details(rows: list[Row]) -> dict[str, Any]:
    lines = []
    for r in rows:
        if "error" not in r:
            cells = [format(r[k], form) if k in r else "–" for k, (_, form) in DETAILS.items()]
            lines.append([r["column"], r["title"], *cells])
    return {"titles": ["workload", "row", *(title for title, _ in DETAILS.values())], "rows": lines}


def _job(rows: list[Row]) -> dict[str, Any]:
    lines = [
        [r["title"], f"{r['wall_seconds']:.1f}", f"{r['peak_mb']:,}", f"{100 * r['accuracy']:.1f} %"]
        for r in rows
        if "error" not in r
    ]
    return {"titles": ["", "seconds", "memory, MB", "accuracy at the end"], "rows": lines}


def main() -> None:
    """Write the file that the page is made of."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "bench.json")
    if not path.is_file():
        sys.exit(f"bench: {path} is not there; `make bench` writes it.")
    KEPT.write_text(json.dumps(kept(Outcome.load(path)), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written: {KEPT}; `make docs` writes the page")


if __name__ == "__main__":
    main()
