"""Tokenizers: of a model's own folder, of a list of scored pieces, or plain bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedspan.language.llama2c import read_pieces
from fedspan.language.places import find, library

SPECIAL = ("<unk>", "<s>", "</s>")


def piece_tokenizer(pieces: Sequence[str], scores: Sequence[float]) -> Any:
    """A tokenizer of pieces with scores: of two neighbours that make a piece, those that make the best are joined.

    The first three pieces are unknown, begin and end, the next 256 the bytes that stand for what no piece has. A space
    is put in front of a text.
    """
    tokenizers, transformers = library("tokenizers"), library("transformers")
    pieces = [*SPECIAL, *pieces[len(SPECIAL) :]]
    first = len(SPECIAL) + 256
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    # A rank per pair, not per piece: pieces in order of their scores, each with all the pairs that make it.
    ranked = sorted(range(first, len(pieces)), key=lambda i: (-scores[i], i))
    merges = [
        (pieces[i][:k], pieces[i][k:])
        for i in ranked
        for k in range(1, len(pieces[i]))
        if pieces[i][:k] in vocabulary and pieces[i][k:] in vocabulary
    ]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, unk_token=SPECIAL[0], byte_fallback=True, fuse_unk=False)
    )
    made.normalizer = tokenizers.normalizers.Prepend(" ")
    parts = tokenizers.decoders
    made.decoder = parts.Sequence([parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


def byte_tokenizer() -> Any:
    """A tokenizer that knows bytes only: 259 tokens."""
    pieces = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    return piece_tokenizer(pieces, [0.0] * len(pieces))


def load_tokenizer(path: str) -> Any:
    """The tokenizer that belongs to a model, by the model's path."""
    place, where = find(path)
    if place == "built":
        return byte_tokenizer()
    if place == "llama2c":
        return piece_tokenizer(*read_pieces(next(iter(sorted(where.glob("tok*.bin"))))))
    return library("transformers").AutoTokenizer.from_pretrained(str(where), local_files_only=place == "huggingface")


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without begin and end."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
