"""Makes the environments of other projects in .venv-peers, from the pins beside this file."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from bench.contestants import ROOT, Environments

HERE = Path(__file__).parent
PLACE = ROOT / ".venv-peers"


def prepare(names: Iterable[str]) -> Environments:
    """Make the environments of these names, or find them made."""
    found = Environments()
    for name in sorted(names):
        try:
            found.made[name] = _environment(name)
        except subprocess.CalledProcessError as e:
            told = [line for line in e.stderr.splitlines() if line.strip() and "notice" not in line]
            found.refused[name] = f"its packages could not be installed: {told[-1] if told else e}"[:300]
            print(f"{name}: {found.refused[name]}", flush=True)
    return found


def _environment(name: str) -> str:
    """The interpreter of an environment that holds exactly what its file of pins names."""
    pins, constraints = HERE / f"{name}.txt", ROOT / "constraints.txt"
    python = PLACE / name / "bin" / "python"
    digest = hashlib.sha256(pins.read_bytes() + constraints.read_bytes()).hexdigest()
    done = PLACE / name / "pins.sha256"
    if python.exists() and done.is_file() and done.read_text(encoding="utf-8") == digest:
        return str(python)
    print(f"installing {pins.name} into {PLACE / name}", flush=True)
    _call(sys.executable, "-m", "venv", "--clear", str(PLACE / name))
    held = ["-c", str(constraints)] if name == "torch" else []
    _call(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *held, "-r", str(pins))
    done.write_text(digest, encoding="utf-8")
    return str(python)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
