"""The format of a run directory: one number for its checkpoints, `result.json` and the lines of `metrics.jsonl`.

Checkpoints of another format are refused, since going on from half-understood state gives wrong numbers in silence.
Results and metrics of an older format are read; what they lack is left out. Those of a newer one are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedspan.errors import FedspanError

FORMAT = 3
"""1: totals of bytes without directions. 2: a ledger. 3: hashes of all data, versions per span of rounds."""


def check_format(values: Mapping[str, Any], where: str) -> None:
    """Refuse a result or a line of metrics that a newer fedspan wrote.

    Raises:
        FedspanError: naming the file and both numbers.
    """
    number = values.get("format", 0)  # before 3 they had none
    if type(number) is not int or number < 0:
        raise FedspanError(f"{where}: 'format' must be an integer from 0 to {FORMAT}. Got {number!r}; run it again.")
    if number > FORMAT:
        raise FedspanError(
            f"{where} was written by a newer fedspan (format {number}, this one reads up to {FORMAT}). Update fedspan."
        )
