"""`fedspan run experiments/mnist-dirichlet.toml` in a process, as from a shell: `python -m bench.job.ours JOB [first]`.

The first time means a cache of decoded pictures that is empty; otherwise it was filled before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Run it in a directory that is removed afterwards, and tell what accuracy it reached."""
    with tempfile.TemporaryDirectory(prefix="fedspan-bench-") as folder:
        out = Path(folder) / "run"
        env = dict(os.environ)
        if "first" in sys.argv:
            env["XDG_CACHE_HOME"] = folder
        start = [sys.executable, "-c", "from fedspan.cli.app import main; main()"]
        command = [*start, "run", str(ROOT / "experiments" / "mnist-dirichlet.toml"), "--out", str(out)]
        subprocess.run(command, check=True, env=env, stdout=sys.stderr)
        result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    told = {"accuracy": result["accuracy"]["mean"], "evaluate_seconds": result["seconds"]["evaluate"]}
    print(json.dumps(told | {"train_seconds": result["seconds"]["train"]}))


if __name__ == "__main__":
    main()
