"""What a contestant's process prints: one line of JSON, the last of its output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from bench.workloads import WORKLOADS

Measurement: TypeAlias = dict[str, Any]
"""`examples` and `gradients` of the timed part and its `seconds`; what else a contestant can tell."""


def main(measure: Callable[..., Measurement]) -> None:
    """Measure the workload of the command line with the words after it, and print the outcome."""
    name, *words = sys.argv[1:]
    print(json.dumps(measure(WORKLOADS[name], *words)), flush=True)


class Rounds:
    """Marks the ends of rounds; the first is a warm-up and is not counted."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.seen: list[int] = []
        self.examples = 0

    def add(self, examples: int) -> None:
        """Count examples that the present round trains on, once each."""
        self.examples += examples

    def end(self) -> None:
        """End a round."""
        self.marks.append(time.perf_counter())
        self.seen.append(self.examples)

    def measurement(self) -> Measurement:
        """Of all rounds but the first."""
        examples, seconds = self.seen[-1] - self.seen[0], self.marks[-1] - self.marks[0]
        return {
            "examples": examples,
            "gradients": examples,
            "seconds": seconds,
            "rounds": len(self.marks) - 1,
        }
