"""Instruction data in the Alpaca format: records as rows of tokens, prompts masked, divided among clients."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspan.data import FederatedData, Source, partition
from fedspan.data.federated import Index
from fedspan.data.formats.part import printable
from fedspan.errors import ConfigError, DataError
from fedspan.language.tokens import plain_ids
from fedspan.randomness import generator

NOTHING = -100
"""The label of a token that is not to be predicted: prompts and padding."""

MAX_LENGTH = 256
_MAX_BYTES = 2**30
_FIELDS = ("instruction", "input", "output")
_BINS = 10


@dataclass(frozen=True)
class Encoded:
    """Records as tokens: row k of `x` predicts row k of `y`, which is one token ahead; both padded on the right."""

    x: Tensor
    y: Tensor

    @property
    def answers(self) -> Tensor:
        """Tokens to be predicted, per record."""
        return (self.y != NOTHING).sum(1)


def read_records(path: str | Path, columns: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """A JSON list of records, or one record per line, with instruction, perhaps input, and output.

    Args:
        columns: other names of these fields, and perhaps those of `client` (who holds a record) and `label` (its kind).

    Raises:
        DataError: naming file and record, if something is not as it must be.
    """
    path, names = Path(path), {f: f for f in _FIELDS} | dict(columns or {})
    for name in names:
        if name not in (*_FIELDS, "client", "label"):
            raise ConfigError(f"Data: columns of records are {', '.join(_FIELDS)}, client, label. Got '{name[:60]}'.")
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise DataError(f"{path}: records must fit into {_MAX_BYTES:,} bytes. Got {size:,}.")
    try:
        text = path.read_text(encoding="utf-8")
        lines = text.lstrip().startswith("{") and path.suffix == ".jsonl"
        values = [json.loads(line) for line in text.splitlines() if line.strip()] if lines else json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: must be a JSON list of records, or .jsonl with one per line ({error}).") from None
    if not isinstance(values, list) or not values:
        raise DataError(f"{path}: must hold a list of at least one record. Got {type(values).__name__}.")
    records = []
    for k, value in enumerate(values):
        if not isinstance(value, dict):
            raise DataError(f"{path}: record {k} must have fields. Got {type(value).__name__}.")
        record = {}
        for name, column in names.items():
            found = value.get(column, "" if name == "input" else None)
            if name in ("client", "label") and isinstance(found, int):
                found = str(found)
            if not isinstance(found, str) or (not found.strip() and name != "input"):
                raise DataError(f"{path}: record {k} must have a text '{column[:60]}'. Got {str(found)[:60]!r}.")
            record[name] = found
        records.append(record)
    return records


def prompt(record: Mapping[str, str]) -> str:
    """What stands before the answer: the instruction and, if there is one, the input, each under its heading."""
    given = f"### Input:\n{record['input']}\n\n" if record["input"].strip() else ""
    return f"### Instruction:\n{record['instruction']}\n\n{given}### Response:\n"


def encode(records: Sequence[Mapping[str, str]], tokenizer: Any, max_length: int = MAX_LENGTH) -> Encoded:
    """Begin, prompt, answer, end, of at most `max_length` tokens; only the answer and the end are predicted.

    A prompt that leaves too little room keeps its last tokens, at least half of all; then the answer is cut.
    """
    _check_length(max_length)
    rows: list[tuple[list[int], int]] = []
    for record in records:
        begin, asked, answer = _parts(record, tokenizer)
        room = max_length - len(begin)
        asked = asked[-max(room - len(answer), room // 2) :]
        rows.append(((begin + asked + answer)[:max_length], len(begin) + len(asked)))
    longest = max(len(ids) for ids, _ in rows)
    x = torch.zeros(len(rows), longest - 1, dtype=torch.int64)
    y = torch.full_like(x, NOTHING)
    for k, (ids, start) in enumerate(rows):
        x[k, : len(ids) - 1] = torch.tensor(ids[:-1])
        y[k, start - 1 : len(ids) - 1] = torch.tensor(ids[start:])
    return Encoded(x, y)


def whole_ones(
    records: Sequence[Mapping[str, str]], tokenizer: Any, max_length: int = MAX_LENGTH
) -> list[Mapping[str, str]]:
    """Records that `encode` need not cut: begin, prompt, answer and end have at most `max_length` tokens.

    Raises:
        DataError: if there is none.
    """
    _check_length(max_length)
    tokens = [sum(map(len, _parts(record, tokenizer))) for record in records]
    kept = [record for record, n in zip(records, tokens) if n <= max_length]
    if not kept:
        raise DataError(
            f"Data: whole_records needs a record of at most max_length = {max_length} tokens. The shortest of"
            f" {len(records)} has {min(tokens)}."
        )
    return kept


def _check_length(max_length: int) -> None:
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 8:
        raise ConfigError(f"Data: max_length must be an integer >= 8. Got {max_length!r}.")


def _parts(record: Mapping[str, str], tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """The tokens of a record: begin, prompt, and answer with its end."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return begin, plain_ids(tokenizer, prompt(record)), plain_ids(tokenizer, record["output"]) + end


def instruction_data(
    source: str,
    tokenizer: Any,
    *,
    root: str | Path | None = None,
    kind: str = "iid",
    clients: int | None = 10,
    seed: int = 0,
    split: str = "client",
    validation: float = 0.0,
    test: float = 0.25,
    max_length: int = MAX_LENGTH,
    whole_records: bool = False,
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
    **options: Any,
) -> FederatedData:
    """Records divided among clients by a kind of partition.

    Kinds that go by labels take a record's `label` if `columns` names one, otherwise which tenth its answer is in by
    length; kind `natural` takes its `client`.

    Args:
        whole_records: leave out records of more than `max_length` tokens, which are cut otherwise; before `limit`.

    Raises:
        ConfigError: for a partition that renames labels, which tokens do not have.
        DataError: if the file is missing or not usable, or no record is short enough.
    """
    records: list[Mapping[str, str]] = [*read_records(_file(source, root), columns)]
    if whole_records:
        records = whole_ones(records, tokenizer, max_length)
    if limit is not None and limit < len(records):
        kept = np.sort(generator(seed, "limit").permutation(len(records))[:limit])
        records = [records[k] for k in kept]
    rows = encode(records, tokenizer, max_length)
    labels, names = _labels(records, rows)
    people, who = _numbers([r.get("client", "") for r in records])
    pool = Source(
        name=source,
        x=rows.x,
        y=torch.from_numpy(labels),
        classes=len(names),
        class_names=names,
        client=people if "client" in (columns or {}) else None,
        client_names=who,
    )
    dealt = partition(pool, kind, clients, seed, split, validation, test, **options)
    if dealt.relabel is not None or dealt.membership is not None:
        raise ConfigError(f"Partition: kind '{kind}' renames labels, which token rows do not have. Use another kind.")
    return replace(dealt, y=rows.y, classes=len(tokenizer), class_names=[])


def _file(source: str, root: str | Path | None) -> Path:
    base = root if root is not None else os.environ.get("FEDSPAN_DATA")
    places = [Path(source).expanduser(), *([Path(base).expanduser() / source] if base else [])]
    for place in places:
        if place.is_file():
            return place
    raise DataError(
        f"Data: instruction records must be a .json or .jsonl file. '{source[:80]}' was not found; looked at"
        f" {', '.join(map(str, places))}."
    )


def _labels(records: Sequence[Mapping[str, str]], rows: Encoded) -> tuple[Index, list[str]]:
    if "label" in records[0]:
        return _numbers([r["label"] for r in records])
    order = np.argsort(rows.answers.numpy(), kind="stable")
    bins = min(_BINS, len(records))
    labels = np.empty(len(records), np.int64)
    for b, part in enumerate(np.array_split(order, bins)):
        labels[part] = b
    return labels, [f"answers of length {b + 1} of {bins}" for b in range(bins)]


def _numbers(names: Sequence[str]) -> tuple[Index, list[str]]:
    known, ids = np.unique(np.array(names), return_inverse=True)
    return ids.astype(np.int64), printable(known.tolist())
