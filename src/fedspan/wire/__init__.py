"""What crosses the wire: payloads and their bytes, codecs, the gate in front of every upload, frames on sockets."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedspan.wire.codecs import Codec, Energy, Half, Rows, Sparse, decode, encode, roundtrip
    from fedspan.wire.gate import check_upload, check_weights
    from fedspan.wire.ledger import Direction, Ledger
    from fedspan.wire.payload import Schema, count, pack, schema, unpack

__all__ = [
    "Codec", "Direction", "Energy", "Half", "Ledger", "Rows", "Schema", "Sparse", "check_upload", "check_weights",
    "count", "decode", "encode", "pack", "roundtrip", "schema", "unpack",
]  # fmt: skip

_WHERE = {
    **dict.fromkeys(("Codec", "Energy", "Half", "Rows", "Sparse", "decode", "encode", "roundtrip"), "codecs"),
    **dict.fromkeys(("Schema", "count", "pack", "schema", "unpack"), "payload"),
    **dict.fromkeys(("Direction", "Ledger"), "ledger"),
    **dict.fromkeys(("check_upload", "check_weights"), "gate"),
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that whoever only frames messages need not load torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'fedspan.wire' has no attribute '{name}'")
    found = globals()[name] = getattr(importlib.import_module(f"fedspan.wire.{_WHERE[name]}"), name)
    return found
