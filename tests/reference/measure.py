"""Write docs/conformance.json: how far every method was from its page on this machine.

Run it after a page or a method has changed: `python tests/reference/measure.py`, then `make docs`.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def above(x: float) -> str:
    """A number rounded up to one digit: 2e-16."""
    if x == 0:
        return "0"
    power = math.floor(math.log10(x))
    return f"{math.ceil(x / 10.0**power - 1e-9) * 10.0**power:.0e}"


def main() -> None:
    """Compare all, and keep the largest difference of each."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import torch
    from harness import differences
    from plain import PAGES

    seen = {}
    for name in sorted(PAGES):
        seen[name] = above(max(max(differences(name, fields).values()) for fields in PAGES[name].cases))
        print(f"{name:22s} {seen[name]}", flush=True)
    where = f"{platform.machine()}, torch {torch.__version__.partition('+')[0]}"
    text = json.dumps({"where": where, "largest": seen}, indent=1)
    (ROOT / "docs" / "conformance.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
