"""Small LLaMA models in the raw format of llama2.c: seven numbers, then all weights; and their lists of pieces."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspan.errors import DataError
from fedspan.language.places import library

_HEADER = struct.Struct("<7i")
_MOST = 2**31


def read_model(path: str | Path) -> Any:
    """A `LlamaForCausalLM` with the weights of a llama2.c file.

    The format stores pairs of rotated coordinates side by side, Hugging Face the first halves before the second ones:
    rows of the query and key projections are put in that order, which leaves every attention score as it was.

    Raises:
        DataError: if the file is not of this format.
    """
    path = Path(path)
    raw = path.read_bytes()
    if len(raw) < _HEADER.size:
        raise DataError(f"{path}: a llama2.c model must begin with seven numbers. Got {len(raw)} bytes.")
    dim, hidden, layers, heads, kv_heads, signed, length = _HEADER.unpack_from(raw)
    vocabulary, tied = abs(signed), signed > 0
    if min(dim, hidden, layers, heads, kv_heads, vocabulary, length) < 1 or dim % heads or heads % kv_heads:
        raise DataError(
            f"{path}: the numbers of a llama2.c model must be sizes that fit together. Got {_HEADER.unpack_from(raw)}."
        )
    head = dim // heads
    kv = head * kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (vocabulary, dim),
        "input_layernorm": (layers, dim),
        "self_attn.q_proj": (layers, dim, dim),
        "self_attn.k_proj": (layers, kv, dim),
        "self_attn.v_proj": (layers, kv, dim),
        "self_attn.o_proj": (layers, dim, dim),
        "post_attention_layernorm": (layers, dim),
        "mlp.gate_proj": (layers, hidden, dim),
        "mlp.down_proj": (layers, dim, hidden),
        "mlp.up_proj": (layers, hidden, dim),
        "norm": (dim,),
        "rotary": (2, length, head // 2),
        **({} if tied else {"lm_head": (vocabulary, dim)}),
    }
    wanted = _HEADER.size + 4 * sum(int(np.prod(s, dtype=object)) for s in shapes.values())
    if wanted != len(raw) or wanted > _MOST:
        raise DataError(f"{path}: a llama2.c model of these sizes must have {wanted:,} bytes. Got {len(raw):,}.")
    held: dict[str, Tensor] = {}
    at = _HEADER.size
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        held[name] = torch.from_numpy(np.frombuffer(raw, "<f4", n, at).astype(np.float32).reshape(shape))
        at += 4 * n
    state = {"model.embed_tokens.weight": held["embed"], "model.norm.weight": held["norm"]}
    state["lm_head.weight"] = held["embed"] if tied else held["lm_head"]
    for name in shapes.keys() - {"embed", "norm", "rotary", "lm_head"}:
        for i in range(layers):
            w = held[name][i]
            if name.endswith(("q_proj", "k_proj")):
                w = w.reshape(-1, head // 2, 2, dim).transpose(1, 2).reshape(w.shape)
            state[f"model.layers.{i}.{name}.weight"] = w
    transformers = library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model


def read_pieces(path: str | Path) -> tuple[list[str], list[float]]:
    """The pieces and scores of a llama2.c tokenizer file.

    Raises:
        DataError: if the file is not of this format.
    """
    path = Path(path)
    raw = path.read_bytes()
    pieces: list[str] = []
    scores: list[float] = []
    at = 4  # the length of the longest piece, which nobody needs
    try:
        while at < len(raw):
            score, n = struct.unpack_from("<fi", raw, at)
            at += 8
            if n < 0 or at + n > len(raw):
                raise DataError(f"{path}: a piece of {n} bytes at byte {at} does not fit into the file.")
            pieces.append(raw[at : at + n].decode())
            scores.append(score)
            at += n
    except (struct.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: must be a tokenizer of llama2.c. Reading stopped at byte {at} ({error}).") from None
    if len(pieces) < 259 or pieces[3] != "<0x00>" or pieces[258] != "<0xFF>":
        raise DataError(f"{path}: a tokenizer of llama2.c must begin with 3 special pieces and 256 bytes. It does not.")
    return pieces, scores
