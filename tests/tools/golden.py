"""Compare two checkouts on one machine: hashes of the final states of every registered method.

    python tests/tools/golden.py OLD NEW            each a checkout, or hashes that --write has written
    python tests/tools/golden.py --write FILE CHECKOUT

Every row of the common checks' table runs in float64 on the small federation of the tests: mapped, in the loop, on two
workers, and the first row of every method on Flower's grid in one process. The hash is of the server's and all clients'
states. Hashes belong to one CPU type and one version of torch, so none are kept in the repository. Methods and rows
that only one checkout has are listed and not compared. Exits with 1 where a hash differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Hashes = dict[str, str]
MAPPINGS = {"vmap": {"mapping": "vmap", "workers": 1}, "loop": {"mapping": "loop", "workers": 1}}
MAPPINGS |= {"workers": {"mapping": "auto", "workers": 2}}


def hashes(checkout: Path) -> Hashes:
    """Run a checkout in a process of its own and return its hashes by row and way of running."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "hashes.json"
        paths = [str(checkout / "src"), *sorted({str(p.parent) for p in (checkout / "tests").rglob("*.py")})]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, __file__, "--inside", str(out)], env=environment, check=True, cwd=folder)
        found: Hashes = json.loads(out.read_text())
        return found


def inside(out: Path) -> None:
    """Compute the hashes of whatever fedspan is on the path."""
    from flower_grid import deployed, held_by
    from test_all_methods import TABLE

    from conftest import make_data, make_task
    from fedspan import make, simulate, tree

    found: Hashes = {}
    grids: set[str] = set()
    for name, fields in TABLE:
        row = f"{name} {json.dumps(fields, sort_keys=True)}"
        for way, settings in MAPPINGS.items():
            result = simulate(
                make(name, **fields), make_task(), make_data(), rounds=4, seed=5, participation=0.6, batch_size=8,
                epochs=2, precision="float64", evaluate_every=100, **settings,  # type: ignore[arg-type]
            )  # fmt: skip
            found[f"{row} {way}"] = result.digest
        if name in grids:
            continue
        grids.add(name)
        with tempfile.TemporaryDirectory() as folder:
            server, grid = deployed(make(name, **fields), Path(folder), epochs=1)
            server.run()
            rows = {str(i): held_by(grid, server, i).row for i in range(3)}
            state: Any = {"server": server.record.server, "common": server.record.common, "clients": rows}
            found[f"{row} flower"] = tree.digest(state)
    out.write_text(json.dumps(found, indent=1))


def read(place: str) -> Hashes:
    """Return the hashes of a checkout, or those in a file."""
    path = Path(place).resolve()
    return json.loads(path.read_text()) if path.is_file() else hashes(path)  # type: ignore[no-any-return]


def main() -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(given.inside)
        return 0
    if given.write:
        given.write.write_text(json.dumps(read(given.checkouts[0]), indent=1))
        return 0
    if len(given.checkouts) != 2:
        parser.error("two checkouts are compared: OLD NEW")
    old, new = map(read, given.checkouts)
    for title, some in (
        ("only in the first", old.keys() - new.keys()),
        ("only in the second", new.keys() - old.keys()),
    ):
        for row in sorted(some):
            print(f"{title}: {row}")
    differing = [row for row in old if row in new and old[row] != new[row]]
    for row in differing:
        print(f"differs: {row}")
    same = len(old.keys() & new.keys()) - len(differing)
    print(f"{same} of {same + len(differing)} hashes are equal.")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
