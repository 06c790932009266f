"""Search spaces as they are typed: `method.lr=log:1e-3:1`, `float:a:b`, `int:a:b`, `choice:a,b,c`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedspan.errors import ConfigError

if TYPE_CHECKING:
    from optuna.trial import Trial

Value = float | int | str
USUAL_SPACE = "method.lr=log:0.001:1"
"""What every method of a comparison is given where nothing else is asked for."""
_KINDS = ("log", "float", "int", "choice")
_FORMS = "log:a:b, float:a:b, int:a:b or choice:a,b,c"


@dataclass(frozen=True)
class Space:
    """The values that one key may take."""

    key: str
    kind: Literal["log", "float", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """As it was typed."""
        if self.kind == "choice":
            return f"choice:{','.join(self.choices)}"
        return f"{self.kind}:{self.low:g}:{self.high:g}"

    def at(self, share: float) -> Value:
        """The value at a share in [0, 1) of the way through the space."""
        if self.kind == "choice":
            return self.choices[int(share * len(self.choices))]
        if self.kind == "int":
            return int(self.low) + int(share * (int(self.high) - int(self.low) + 1))
        if self.kind == "log":
            return float(self.low * (self.high / self.low) ** share)
        return self.low + (self.high - self.low) * share

    def suggest(self, trial: Trial) -> Value:
        """What Optuna takes next; of real numbers three digits, which is what a person would write down."""
        if self.kind == "choice":
            return str(trial.suggest_categorical(self.key, self.choices))
        if self.kind == "int":
            return int(trial.suggest_int(self.key, int(self.low), int(self.high)))
        drawn = float(trial.suggest_float(self.key, self.low, self.high, log=self.kind == "log"))
        return min(max(float(f"{drawn:.3g}"), self.low), self.high)

    def edge(self, chosen: Value, tried: Sequence[Value]) -> str | None:
        """Whether the chosen value is the smallest or largest of all that were tried, so that nothing brackets it.

        Of choices, those that are fewer than three, or no numbers, have no edge.
        """
        numbers = [n for n in map(_number, self.choices or tried) if n is not None]
        own = _number(chosen)
        if own is None or len(numbers) < len(self.choices or tried) or len(set(numbers)) < (3 if self.choices else 2):
            return None
        return "smallest" if own <= min(numbers) else "largest" if own >= max(numbers) else None


def parse_space(text: str) -> Space | None:
    """A search space from `section.key=kind:...`; None if the text is an ordinary setting.

    Raises:
        ConfigError: for a space that cannot be.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    kind, colon, rest = value.partition(":")
    if not equals or not colon or kind not in _KINDS:
        return None
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,60}(\.[A-Za-z0-9_-]{1,60}){1,2}", key) or key in ("method.name",):
        raise ConfigError(f"tune: a space needs a key of a section, as in {USUAL_SPACE}. Got {text[:60]!r}.")
    if key.partition(".")[0] in ("data", "partition", "devices") or key.startswith("train.evaluate"):
        raise ConfigError(f"tune: what is tuned must not change what it is judged by. Got {key}.")
    if kind == "choice":
        choices = tuple(dict.fromkeys(c.strip() for c in rest.split(",")))
        if len(choices) < 2 or not all(choices):
            raise ConfigError(
                f"tune: {key} needs at least two different choices, as in choice:a,b,c. Got {value[:60]!r}."
            )
        return Space(key, "choice", choices=choices)
    numbers = [_number(part) for part in rest.split(":")]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None or not numbers[0] < numbers[1]:
        raise ConfigError(f"tune: {key} must be {_FORMS} with a below b. Got {value[:60]!r}.")
    low, high = numbers[0], numbers[1]
    if kind == "log" and low <= 0:
        raise ConfigError(f"tune: {key} must begin above 0 on a logarithmic scale. Got {value[:60]!r}; use float:a:b.")
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise ConfigError(f"tune: {key} must have whole numbers in int:a:b. Got {value[:60]!r}.")
    return Space(key, "log" if kind == "log" else "int" if kind == "int" else "float", low, high)


def split_spaces(texts: Sequence[str]) -> tuple[list[Space], list[str]]:
    """Search spaces and ordinary settings, told apart by their form; each key once.

    Raises:
        ConfigError: for a space that cannot be, or two of one key.
    """
    spaces: list[Space] = []
    rest: list[str] = []
    for text in texts:
        found = parse_space(text)
        if found is None:
            rest.append(text)
        elif found.key in [s.key for s in spaces]:
            raise ConfigError(f"tune: every key must have one space. Got two of {found.key}.")
        else:
            spaces.append(found)
    return spaces, rest


def _number(value: object) -> float | None:
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) else None
