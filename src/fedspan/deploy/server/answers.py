"""What a node may answer: every fact is parsed into a checked type with a range before anything uses or stores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Le, MaxLen
from pydantic import BaseModel, ConfigDict, ValidationError

from fedspan.deploy.envelope import Facts, printable
from fedspan.errors import Refused
from fedspan.learn.metrics import Metric

MOST = 2**53
"""The largest count: beyond it a float no longer holds every integer."""

MOST_MEASURE = 1e30
"""The largest mean of a measure over one node's examples: its square over all nodes is still a finite number."""

Count: TypeAlias = Annotated[int, Ge(0), Le(MOST)]
Word: TypeAlias = Annotated[str, MaxLen(200)]
Checked = TypeVar("Checked", bound="CheckedFacts")


class CheckedFacts(BaseModel):
    """Facts of which every one is known, typed and in its range; a number is no text, and true is no number."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class HelloAnswer(CheckedFacts):
    """What a node has: the sizes it registers, by which its later answers are judged."""

    do: Literal["hello"]
    round: Count
    experiment: Word
    examples: Annotated[int, Ge(1), Le(MOST)]
    held_out: Count
    """Examples of the part that evaluations are of."""
    shape: Annotated[list[Count], MaxLen(16)]
    classes: Count | None
    dtype: Word
    label: Annotated[list[Count], MaxLen(16)] = []
    """Shape of one example's labels; empty for a class or a target."""


class TrainAnswer(CheckedFacts):
    """What comes with an upload."""

    do: Literal["train"]
    round: Count
    status: Literal["done"]
    weight: Annotated[float, Ge(0)]
    heard: Count
    ahead: bool


class EvaluateAnswer(CheckedFacts):
    """Sums of measures over a node's held-out examples, whose number is `n`."""

    do: Literal["evaluate"]
    round: Count
    status: Literal["done"]
    heard: Count
    sums: Annotated[dict[Word, float], MaxLen(64)]
    metrics: Annotated[dict[Word, float | None], MaxLen(64)] = {}
    """Metrics of its own predictions, by the experiment's names; None where its examples do not define one."""
    left_out: Annotated[dict[Word, Word], MaxLen(64)] = {}
    """Why."""


class StaleAnswer(CheckedFacts):
    """A node has missed announcements, and asks for the whole state."""

    do: Literal["train", "evaluate"]
    round: Count
    status: Literal["stale"]
    heard: Count


Answer: TypeAlias = HelloAnswer | TrainAnswer | EvaluateAnswer | StaleAnswer

_KINDS: dict[str, type[HelloAnswer | TrainAnswer | EvaluateAnswer]] = {
    "hello": HelloAnswer,
    "train": TrainAnswer,
    "evaluate": EvaluateAnswer,
}


def parse_answer(facts: Facts, do: str, t: int, who: str) -> Answer:
    """The checked answer to the request `do` of round t.

    Raises:
        Refused: in one sentence that names the client, the fact and its fault.
    """
    if facts.get("round") != t or facts.get("do") != do:
        got = f"{facts.get('do')!s:.20} {facts.get('round')!s:.20}"
        raise Refused(f"{who}: the answer must belong to round {t}. Got {printable(got)}.")
    if facts.get("status") == "stale" and do != "hello":
        return parse_facts(StaleAnswer, facts, who)
    return parse_facts(_KINDS[do], facts, who)


def parse_facts(kind: type[Checked], facts: Mapping[str, Any], who: str) -> Checked:
    """Facts as a checked type.

    Raises:
        Refused: in one sentence about the first fact that is wrong.
    """
    try:
        return kind.model_validate(facts)
    except ValidationError as e:
        raise Refused(f"{who}: {describe_fault(e)}") from None


def describe_fault(error: ValidationError) -> str:
    """The first fault of a validation, in words that can be printed."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))
    what = {"missing": "must be there", "extra_forbidden": "must not be there"}.get(first["type"])
    what = what or first["msg"].replace("Input should", "must", 1)
    got = "" if first["type"] == "missing" else f" Got {first['input']!r:.40}."
    return printable(f"'{where[:60]}' of its facts {what}.{got}")


def check_sums(answer: EvaluateAnswer, *, who: str, held_out: int, measures: frozenset[str]) -> dict[str, float]:
    """A node's sums of measures, if they can be sums over the examples that it registered.

    Args:
        held_out: how many examples it registered for evaluation.
        measures: the names that the method's evaluation has, `n` among them; a node without examples has `n` alone.

    Raises:
        Refused: in one sentence that names the client and the fault.
    """
    sums = answer.sums
    names = measures if held_out else frozenset({"n"})
    if sums.keys() != names:
        raise Refused(f"{who}: its measures must be {', '.join(sorted(names))}. Got {', '.join(sorted(sums))[:100]}.")
    if abs(sums["n"] - held_out) > 1e-6 * held_out:  # the node adds up in single precision
        raise Refused(f"{who}: it must measure the {held_out} examples it registered. Got {sums['n']:g}.")
    if not 0 <= sums.get("accuracy", 0) <= held_out:
        raise Refused(f"{who}: 0..{held_out} of its examples can be right. Got {sums['accuracy']:g}.")
    for name, value in sums.items():
        least = 0.0 if name == "squared_error" else -MOST_MEASURE * held_out
        if not least <= value <= MOST_MEASURE * held_out:
            raise Refused(f"{who}: {name} must lie in {least:g}..{MOST_MEASURE * held_out:g}. Got {value:g}.")
    return {**sums, "n": float(held_out)}


def check_metric_values(answer: EvaluateAnswer, *, who: str, metrics: Sequence[Metric]) -> None:
    """Refuse metrics that the experiment does not ask for, or that cannot have such a value.

    Raises:
        Refused: in one sentence that names the client and the fault.
    """
    known = {m.name: m for m in metrics}
    if answer.metrics.keys() != known.keys() or not answer.left_out.keys() <= known.keys():
        got = ", ".join(sorted({*answer.metrics, *answer.left_out}))[:100] or "none"
        want = ", ".join(known) or "none"
        raise Refused(f"{who}: its metrics must be {want}. Got {printable(got)}.")
    for name, value in answer.metrics.items():
        low, high = max(known[name].low, -MOST_MEASURE), min(known[name].high, MOST_MEASURE)
        if value is not None and not low - 1e-9 <= value <= high + 1e-9:  # sums of floats end a little off
            raise Refused(f"{who}: {name} must lie in {low:g}..{high:g}. Got {value:g}.")
