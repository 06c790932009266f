"""`fedspan capacity`: what a round costs every client, and which rank its device can afford; without training."""

from __future__ import annotations

from typing import Any

from fedspan.cli.console import note, say, show, size, table
from fedspan.cli.run import Experiment, Overrides


def capacity(exp: Experiment, overrides: Overrides = None) -> None:
    """Show what a round costs each client, and the rank chosen for its device (section devices of the experiment)."""
    from dataclasses import replace

    from fedspan.config import assemble, load_config
    from fedspan.method import Abilities
    from fedspan.simulation.devices import Devices, assign

    config = load_config(exp, overrides or []).resolve()
    devices = config.devices
    method, task, data = assemble(replace(config, devices=Devices()))
    dtype = config.train.torch_dtype
    method, choices = assign(method, task, data.to(dtype), devices, config.train)
    rows: list[tuple[Any, ...]] = []
    for c in choices:
        what = Abilities(method).capacity(task, c.client)
        rank = c.ratio if c.ratio is not None else "" if what is None else what
        speed = f"{devices.gflops[c.client % len(devices.gflops)]:g}" if devices.gflops else ""
        rate = f"{devices.mbps[c.client % len(devices.mbps)]:g}" if devices.mbps else ""
        room = "" if devices.memory(c.client) is None else size(devices.memory(c.client) or 0.0)
        seconds = "" if c.seconds is None else f"{c.seconds:,.3g}"
        cost = (f"{c.flops / 1e9:,.3g}", size(c.memory), size(c.up + c.down), seconds)
        rows.append((data.names[c.client], speed, rate, room, rank, len(data.train[c.client]), *cost, _word(c.fits)))
    titles = ["client", "GFLOP/s", "Mbit/s", "memory", "capacity", "examples"]
    show(table([*titles, "GFLOP", "memory used", "sent", "seconds", "fits"], rows, right=[1, 2, 3, 4, 5, 6, 7, 8, 9]))
    if choices and choices[0].seconds is not None:
        slowest = max(choices, key=lambda c: c.seconds or 0.0)
        say(f"A round with all clients takes {slowest.seconds:.3g} s; the last is {data.names[slowest.client]}.")
    unfit = [data.names[c.client] for c in choices if not c.fits]
    if unfit:
        who = f"{len(unfit)} client(s) cannot afford a round: {', '.join(unfit[:10])}"
        note(f"{who}. Allow more time, or smaller ratios.")
    if devices == Devices():
        note("The experiment says nothing of devices; add [devices] with gflops, mbps, memory_mb and round_seconds.")
    elif devices.limited and choices[0].ratio is None:
        note(f"{config.method['name']}: its clients have no ranks to choose; all train the same model.")


def _word(fits: bool) -> str:
    return "yes" if fits else "no"
