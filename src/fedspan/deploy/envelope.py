"""What a Flower message of ours holds: a few facts as JSON, and a packed tree as bytes. Needs no torch."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedspan.errors import Refused

Facts: TypeAlias = dict[str, Any]

KIND = "fedspan.tree/1"
MOST_FACTS = 1 << 18
"""Bytes of facts that are read at all; ours are some hundred."""

MOST_TEXT = 500
"""Characters of a sentence with words of a node that are kept."""


def printable(text: str, most: int = MOST_TEXT) -> str:
    """Text of another machine as one line for log, terminal and status: no control, escape or direction characters."""
    kept = "".join(c if c.isprintable() else " " for c in text[:most])
    return kept if len(text) <= most else f"{kept[: most - 3]}..."


def seal(facts: Facts, payload: bytes = b"") -> RecordDict:
    """The content of a message."""
    array = Array(dtype="uint8", shape=(len(payload),), stype=KIND, data=payload)
    text = json.dumps(facts, allow_nan=False)
    return RecordDict({"facts": ConfigRecord({"json": text}), "tree": ArrayRecord({"packed": array})})


def unseal(content: RecordDict) -> tuple[Facts, bytes]:
    """Facts and payload of a message, which is not trusted.

    Raises:
        Refused: if the message is not one of ours.
    """
    try:
        if set(content) != {"facts", "tree"}:
            raise ValueError("its records are others")
        text, arrays = content["facts"]["json"], content["tree"]
        if not isinstance(text, str) or len(text) > MOST_FACTS:
            raise ValueError("its facts are no text of fitting length")
        array = arrays["packed"]
        if len(arrays) != 1 or not isinstance(array, Array) or array.stype != KIND:
            raise ValueError("its payload is of another kind")
        facts = json.loads(text, parse_constant=_no_constant)
        if not isinstance(facts, dict):
            raise ValueError("its facts are no object")
        return facts, array.data
    except Exception as e:  # whatever is wrong with it is its sender's fault
        raise Refused(f"the message is not one of fedspan's: {printable(str(e), 100) or type(e).__name__}.") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def size(content: RecordDict) -> int:
    """Bytes of facts and payload together."""
    facts, payload = unseal(content)
    return len(json.dumps(facts)) + len(payload)
