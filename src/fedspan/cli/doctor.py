"""`fedspan doctor`: is this machine fit, and how should it run?"""

from __future__ import annotations

import importlib.util
import itertools
import os
import platform
import sys
import time
from typing import Any

import typer

from fedspan.cli.console import fail, say, show, table

EXTRAS = {
    "matplotlib": "figures and report pages: pip install 'fedspan[report]'",
    "plotly": "report pages: pip install 'fedspan[report]'",
    "pyarrow": "data sets in parquet files: pip install 'fedspan[data]'",
    "PIL": "pictures in parquet files: pip install 'fedspan[data]'",
    "datasets": "data sets of the Hugging Face hub: pip install 'fedspan[data]'",
}


def doctor() -> None:
    """Check versions, cores, memory, data and extras; test folded against loop; suggest train.mapping."""
    import numpy
    import torch

    from fedspan import __version__
    from fedspan.cli.data import found
    from fedspan.data.sources.catalog import KNOWN
    from fedspan.simulation.workers import available_cores

    there = [n for n in ("digits", *KNOWN) if found(n, None).startswith("yes")]
    rows: list[tuple[str, Any]] = [
        ("fedspan", __version__),
        ("python", f"{platform.python_version()} ({sys.platform}, {platform.machine()})"),
        ("torch", f"{torch.__version__}, {'CUDA' if torch.cuda.is_available() else 'no CUDA'}"),
        ("numpy", numpy.__version__),
        ("cores", f"{available_cores()} for this process, {os.cpu_count()} in the machine"),
        ("torch threads", f"{torch.get_num_threads()} (a run uses 1 per worker)"),
        ("bf16", bf16()),
        ("memory", memory()),
        ("data", f"{', '.join(there)}; $FEDSPAN_DATA is {os.environ.get('FEDSPAN_DATA') or 'not set'}"),
    ]
    rows += [(n, "installed" if importlib.util.find_spec(n) else f"missing; {why}") for n, why in EXTRAS.items()]
    show(table(["", ""], rows))
    far = self_test()
    if far > 1e-12:
        fail(f"doctor: folded and loop differ by {far:.2g}: use train.mapping='loop', and report the lines above.")
        raise typer.Exit(1)
    say(f"Self-test: fedavg folded and by loop agree to {far:.1g}.")
    say(suggestion())


def bf16() -> str:
    """What `train.precision = "bf16"` runs on: tiles (AMX), vector instructions, or emulation."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        return "AMX tiles: train.precision='bf16' makes convolutions and large products quicker"
    if torch.cpu._is_avx512_bf16_supported():
        return "AVX-512 instructions, no AMX: train.precision='bf16' may be quicker or slower; time both"
    return "no instructions of this CPU: train.precision='bf16' is slower than float32"


def memory() -> str:
    """Memory of the machine, where the system tells."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = (os.sysconf(f"SC_{k}PHYS_PAGES") * page / 2**30 for k in ("", "AV"))
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{total:.1f} GiB, {free:.1f} GiB free"


def self_test() -> float:
    """Largest difference between fedavg mapped and in a loop, after two rounds in double precision."""
    import torch

    from fedspan import tree
    from fedspan.cli.probe import toy
    from fedspan.learn.task import Task
    from fedspan.methods import make
    from fedspan.models import build
    from fedspan.simulation.settings import Settings
    from fedspan.simulation.simulator import Simulation

    _, data = toy()
    task = Task(lambda: build("mlp", (4,), 2, hidden=[3]), dtype=torch.float64, seed=0)
    ends = []
    for mapping in ("folded", "loop"):
        settings = Settings(mapping=mapping, precision="float64", workers=1, batch_size=4, device="cpu")
        simulation = Simulation(make("fedavg"), task, data, rounds=2, settings=settings)
        simulation.run()
        ends.append(tree.ravel(simulation.record.server["theta"]))
    return float((ends[0] - ends[1]).abs().max())


def suggestion() -> str:
    """Time a round both ways on a small and a middling perceptron, and say which setting to use."""
    from fedspan.data import load, partition
    from fedspan.simulation.engine import MIDDLE_MODEL

    data = partition(load("digits"), "iid", clients=20)
    parts = []
    for hidden in (64, 512):
        seconds = {m: _seconds(m, hidden, data) for m in ("folded", "loop")}
        best = min(seconds, key=lambda m: seconds[m])
        count = 64 * hidden + hidden + 10 * hidden + 10
        parts.append(
            f"{count:,} parameters: folded {1000 * seconds['folded']:.0f} ms, loop {1000 * seconds['loop']:.0f} ms"
            f" per round of 20 clients, so train.mapping='{best}' is quicker"
        )
    return (
        f"Measured on one worker: {'; '.join(parts)}. train.mapping='auto' folds up to {MIDDLE_MODEL:,} parameters"
        " and goes by the model alone, so that results do not depend on the day."
    )


def _seconds(mapping: Any, hidden: int, data: Any) -> float:
    from fedspan.learn.task import Task
    from fedspan.methods import make
    from fedspan.models import build
    from fedspan.simulation.settings import Settings
    from fedspan.simulation.simulator import Simulation

    task = Task(lambda: build("mlp", (1, 8, 8), 10, hidden=[hidden]), seed=0)
    settings = Settings(mapping=mapping, workers=1, batch_size=16, evaluate_every=1000, device="cpu")
    simulation = Simulation(make("fedavg"), task, data, rounds=4, settings=settings)
    ticks: list[float] = []
    simulation.run(lambda _: ticks.append(time.perf_counter()))
    # The first round warms up, and the last one also evaluates.
    return min(b - a for a, b in itertools.pairwise(ticks[:3]))
