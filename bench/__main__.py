"""`make bench`: a table of samples per second, and bench.json."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from bench.workloads import WORKLOADS

PFL_MF = {"rank": 10, "v_steps": 1, "lr": 0.1}


def one(workload: str, method: str) -> dict[str, object]:
    """One row, measured in this process."""
    import torch

    from bench.measure import fedspan_speed, floor, limit

    w = WORKLOADS[workload]
    seconds = 4.0 if w.model == "mlp" else 12.0
    base = floor(w, seconds)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    top = limit(w, 3.0)
    speed, memory = fedspan_speed(w, method, PFL_MF if method == "pfl-mf-paper" else {})
    return {
        "workload": workload,
        "method": method,
        "samples_per_s": round(speed),
        "floor": round(base),
        "limit": None if top is None else round(top),
        "ratio_floor": round(speed / base, 3),
        "ratio_limit": None if top is None else round(speed / top, 3),
        "peak_rss_mb": round(memory),
    }


def main() -> None:
    """Run each row in a process of its own, so that memory and caches of one do not colour the next."""
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument("--workloads", default="all", help=f"comma-separated, from {', '.join(WORKLOADS)}, scale")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    parser.add_argument("--row", nargs=2, metavar=("WORKLOAD", "METHOD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(one(*args.row)))
        return
    names = [*WORKLOADS, "scale"] if args.workloads == "all" else args.workloads.split(",")
    unknown = [n for n in names if n not in WORKLOADS and n != "scale"]
    if unknown:
        sys.exit(f"bench: unknown workload {unknown[0]!r}. Allowed: {', '.join(WORKLOADS)}, scale.")
    rows = []
    titles = ("samples/s", "floor", "x floor", "limit", "x limit", "MB")
    print(f"{'workload':<15}{'method':<14}" + "".join(f"{t:>10}" for t in titles))
    for name in names:
        if name == "scale":
            continue
        for method in ("fedavg", "pfl-mf-paper"):
            row = json.loads(
                subprocess.run(
                    [sys.executable, "-m", "bench", "--row", name, method], check=True, capture_output=True, text=True
                ).stdout.splitlines()[-1]
            )
            rows.append(row)
            top, ratio = ("-", "-") if row["limit"] is None else (f"{row['limit']:,}", f"{row['ratio_limit']:.2f}")
            print(
                f"{name:<15}{method:<14}{row['samples_per_s']:>10,}{row['floor']:>10,}{row['ratio_floor']:>10.2f}"
                f"{top:>10}{ratio:>10}{row['peak_rss_mb']:>10,}",
                flush=True,
            )
    if "scale" in names:
        from bench.scale import main as scale

        rows += scale()
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
