"""Build the wheel, install it into an empty environment, and run the demo there: what a user gets from a release.

    python tests/tools/wheel_demo.py [--keep FOLDER]

Fails where the wheel lacks a file the demo needs (its experiment, the page's scripts), or a dependency is not declared.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]


def run(*words: str | Path, cwd: Path) -> str:
    """Run a command outside the checkout, with nothing of this environment on its path; its output."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run([str(w) for w in words], cwd=cwd, env=clean, text=True, capture_output=True, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def demo(folder: Path) -> None:
    """Build, install, run and look at what came out."""
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, TOP, cwd=folder)
    (wheel,) = folder.glob("fedspan-*.whl")
    run(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    inside = folder / "env" / "bin"
    constraints = TOP / "constraints.txt"
    install = (inside / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*install, "-c", constraints, f"{wheel}[report]", cwd=folder)
    said = run(inside / "fedspan", "demo", "--rounds", "2", "--out", folder / "demo", cwd=folder)
    page = folder / "demo" / "report.html"
    if "pfl-mf" not in said or not page.is_file() or "<svg" not in page.read_text(encoding="utf-8"):
        sys.exit(f"The demo of the wheel wrote no page with figures:\n{said[-3000:]}")
    print(f"{wheel.name}: the demo runs in an empty environment and writes its page ({page.stat().st_size:,} bytes).")


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="a folder to keep everything in")
    keep = parser.parse_args().keep
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        return demo(keep.resolve())
    with tempfile.TemporaryDirectory() as folder:
        demo(Path(folder))


if __name__ == "__main__":
    main()
