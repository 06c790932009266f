"""Outcomes as small JSON files: figures by row and seed, what each row was given, hashes, versions, seconds.

A file carries the digest of the claim it belongs to, the verdict as computed when it was written, and a hash of all of
itself, so that neither figures nor verdict nor claim can be changed without being noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedspan.errors import FedspanError
from fedspan.storage.atomic import write_atomic
from fedspan.storage.toml import MAX_BYTES
from fedspan.studies.claims.claim_file import Claim
from fedspan.studies.claims.verdict import decide

FORMAT = 1


class RowEffort(BaseModel):
    """What a row was given: its trials, what they chose, and the steps of a client."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    trials: int = Field(ge=0)
    diverged: int = Field(ge=0)
    tried: dict[str, float | None]
    """Accuracy on validation parts, or what is tuned by, at each step size; null where the trial diverged."""
    lr: float | None
    edge: str | None
    """Whether the chosen step size is the smallest or largest of all tried."""
    steps: float
    """Gradient steps of a client in a round, mean over clients."""
    steps_before_use: float
    seconds: float
    """Of the row's reported runs."""


class ClaimOutcome(BaseModel):
    """What came out, as the file holds it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    claim: str
    claim_digest: str
    seeds: dict[str, list[int]]
    """`development`, on which step sizes were chosen, and `reported`."""
    figures: dict[str, dict[str, dict[str, dict[str, float | None]]]]
    """row → column → measure → seed → value."""
    effort: dict[str, RowEffort] = Field(default_factory=dict)
    data: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Hashes of examples, labels and split, by seed."""
    code: str
    versions: dict[str, str]
    seconds: float
    """Of all runs, trials included, or of the check."""
    verdict: dict[str, Any]
    sha256: str = ""

    @property
    def seconds_again(self) -> float:
        """What it takes to compute the figures again: the reported runs, without the trials."""
        return sum(e.seconds for e in self.effort.values()) if self.effort else self.seconds

    def sealed(self) -> ClaimOutcome:
        """The same with the hash of its contents."""
        return self.model_copy(update={"sha256": self.contents()})

    def contents(self) -> str:
        """The hash of everything but itself."""
        values = self.model_dump(exclude={"sha256"})
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def write(self, path: Path) -> Path:
        """Write it, all or nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(self.model_dump(), indent=1, allow_nan=False) + "\n")
        return path


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The outcomes of a folder: those that can be read, and what is wrong with the others."""

    outcomes: dict[str, ClaimOutcome] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)


def outcomes_folder() -> Path:
    """Where the outcomes that come with fedspan lie."""
    return Path(str(resources.files("fedspan.studies.claims").joinpath("outcomes")))


def file_of(claim: Claim, folder: Path) -> Path:
    """The file of a claim's outcome."""
    return folder / claim.paper / f"{claim.stem}.json"


def read_outcome(path: Path) -> ClaimOutcome:
    """An outcome from its file.

    Raises:
        FedspanError: if it cannot be read, or is none.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FedspanError(f"claims: {path} must be at most 1 MB. It is larger.")
        found = ClaimOutcome.model_validate_json(path.read_bytes())
    except OSError as e:
        raise FedspanError(f"claims: {path} cannot be read: {e.strerror}.") from None
    except ValidationError as e:
        raise FedspanError(f"claims: {path} is no outcome of a claim: {e.errors()[0]['msg']}.") from None
    if found.format != FORMAT:
        raise FedspanError(f"claims: {path} must have format {FORMAT}. Got {found.format}.")
    return found


def stored_outcomes(claims: tuple[Claim, ...], folder: Path | None = None) -> Stored:
    """The outcomes there are of these claims."""
    where = folder or outcomes_folder()
    found = Stored()
    for claim in claims:
        path = file_of(claim, where)
        if not path.is_file():
            continue
        try:
            found.outcomes[claim.name] = read_outcome(path)
        except FedspanError as e:
            found.damaged[claim.name] = str(e)
    return found


def sound_outcomes(claims: tuple[Claim, ...], folder: Path | None = None) -> Stored:
    """The outcomes that are as they were written, of the claims as they are; the others are damaged."""
    found = stored_outcomes(claims, folder)
    wrong = {c.name: "; ".join(faults(c, found.outcomes[c.name])) for c in claims if c.name in found.outcomes}
    damaged = found.damaged | {name: f"its outcome is not used: {said}" for name, said in wrong.items() if said}
    return Stored(outcomes={n: o for n, o in found.outcomes.items() if n not in damaged}, damaged=damaged)


def faults(claim: Claim, outcome: ClaimOutcome) -> list[str]:
    """What is wrong with a stored outcome: its hash, its claim, its verdict; nothing if all is as it was written."""
    out = []
    if outcome.sha256 != outcome.contents():
        out.append("its contents are not those it was written with (sha256 differs)")
    if outcome.claim != claim.name or outcome.claim_digest != claim.digest:
        out.append("the claim's file has been changed since; run the claim again")
    try:
        if decide(claim, outcome.figures).to_json() != outcome.verdict:
            out.append("its verdict does not follow from its figures")
    except FedspanError as e:
        out.append(str(e))
    return out


def verdict_of(claim: Claim, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on figures, as it is stored."""
    return decide(claim, figures).to_json()
