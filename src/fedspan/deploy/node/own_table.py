"""A node's own table: what it tells of it so that all can agree, and the examples it becomes once they have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from pydantic import ValidationError

from fedspan.config import RunConfig
from fedspan.data.federated import FederatedData, split
from fedspan.data.sources.load import MAX_BYTES
from fedspan.data.tables.arrow_files import is_table, read_table
from fedspan.data.tables.preprocessing import Agreed, Encoding, Preprocessing
from fedspan.data.tables.schema_agreement import describe_columns, first_sums, second_sums
from fedspan.data.tables.table_columns import columns_of
from fedspan.data.tables.table_federation import examples_of_one, one_client
from fedspan.errors import ConfigError, DataError, Refused
from fedspan.storage.atomic import write_atomic

ASKED = ("describe", "sums", "deviations")
"""What a server asks of a table before the first round."""

WHO = "Node"


class KeptAgreement(Agreed):
    """What a node keeps of an agreement: which client it is, and how its rows become examples."""

    client: Annotated[int, Ge(0)]
    preprocessing: Preprocessing


class OwnTable:
    """The table of one node, as an experiment's layout reads it.

    Args:
        number: which client the node is; rows without a split column are divided as a simulation divides them.
    """

    def __init__(self, path: Path, config: RunConfig, number: int) -> None:
        if not is_table(path):
            raise DataError(f"{WHO}: this run needs a table (.csv, .csv.gz, .tsv, .parquet). Got {path.name!r}.")
        self.config, self.layout, self.number = config, config.data.table, number
        columns = columns_of(read_table(path, MAX_BYTES), WHO)
        owner = columns.pop(self.layout.client, None) if self.layout.client is not None else None
        if owner is not None and len(set(owner.words())) > 1:
            raise DataError(
                f"{WHO}: column '{self.layout.client}' must name this client alone. Got {len(set(owner.words()))}"
                " different ones; give the node its own rows."
            )
        p = config.partition

        def divided(n: int) -> tuple[Any, Any, Any]:
            return split(np.arange(n, dtype=np.int64), number, config.seed, p.test, p.validation)

        self.columns, self.parts = one_client(columns, self.layout, WHO, divided)
        if not len(self.parts[0]):
            raise DataError(f"{WHO}: its table must have training rows. Got none.")

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What the server asks: a description of columns, or sums over training rows.

        Raises:
            DataError: naming column and remedy, if the table does not fit what was agreed.
            Refused: if the question is none of ours.
        """
        train = np.sort(self.parts[0])
        if asked["do"] == "describe":
            return describe_columns(self.columns, self.layout, train, WHO).model_dump()
        try:
            encoding = Encoding.model_validate_json(json.dumps(asked["encoding"]))
            x = encoding.matrix(self.columns, _row)[train]
            if asked["do"] == "sums":
                return first_sums(x).model_dump()
            centre = [float(v) for v in asked["centre"]]
        except (KeyError, TypeError, ValidationError) as e:
            raise Refused(f"{WHO}: what all agree on cannot be read ({type(e).__name__}).") from None
        if len(centre) != x.shape[1]:
            raise Refused(f"{WHO}: a centre must have {x.shape[1]} numbers. Got {len(centre)}.")
        return second_sums(x, centre).model_dump()

    def federation(self, agreed: Preprocessing) -> FederatedData:
        """Its examples, as all agreed, as a federation of one."""
        made = examples_of_one(self.columns, self.parts, self.layout, agreed, WHO)
        return replace(made, transforms=self.config.data.transformation(load=True))


def _row(row: int) -> str:
    return f"{WHO}, row {row}"


def agreement_file(state: Path, experiment: str) -> Path:
    """Where a node keeps what was agreed on for an experiment."""
    return state / f"table-{hashlib.sha256(experiment.encode()).hexdigest()[:16]}.json"


def keep_agreement(state: Path, experiment: str, asked: Mapping[str, Any]) -> None:
    """Keep what the server says all agreed on.

    Raises:
        Refused: if it is no preprocessing.
    """
    try:
        text = json.dumps({"client": asked["client"], "preprocessing": asked["preprocessing"]})
        kept = KeptAgreement.model_validate_json(text)
    except (KeyError, TypeError, ValueError) as e:
        raise Refused(f"{WHO}: what all agreed on cannot be read ({type(e).__name__}).") from None
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(agreement_file(state, experiment), kept.model_dump_json(indent=1) + "\n")


def kept_agreement(state: Path, experiment: str) -> KeptAgreement:
    """What the node knows of an agreement.

    Raises:
        ConfigError: if it knows none; the server tells it with its first message.
    """
    try:
        return KeptAgreement.model_validate_json(agreement_file(state, experiment).read_bytes())
    except (OSError, ValidationError) as e:
        raise ConfigError(
            f"{WHO}: it has not been told what the others' tables are like ({type(e).__name__}). Order the run with"
            " --fresh."
        ) from None
