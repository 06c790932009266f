"""Fields of a method: checked by their annotations, written as flat keys, each with a sentence for the reference.

A field's annotation says what is allowed: `Annotated[float, Gt(0)]`, `Literal["a", "b"]`, `AtLeast1 | None`,
`Annotated[tuple[Share, ...], MinLen(1)]`. A number with limits is finite, unless infinity is one of them
(`Le(math.inf)`). Values that a method holds (its optimiser, its server's optimiser, its schedule) have several fields
of their own; in an experiment file their keys stand beside the others (`momentum`, `server_lr`, `cycle`). `build` reads
flat keys, `flat` writes them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedspan.errors import ConfigError, nearest

T = TypeVar("T")

Positive: TypeAlias = Annotated[float, Gt(0)]
"""A finite number above 0."""
NonNegative: TypeAlias = Annotated[float, Ge(0)]
"""A finite number of at least 0."""
Fraction: TypeAlias = Annotated[float, Ge(0), Le(1)]
"""A number in [0, 1]."""
Share: TypeAlias = Annotated[float, Gt(0), Le(1)]
"""A number in (0, 1]."""
Decay: TypeAlias = Annotated[float, Ge(0), Lt(1)]
"""A number in [0, 1): a momentum, a moving average's weight."""
Count: TypeAlias = Annotated[int, Ge(0)]
"""An integer of at least 0."""
AtLeast1: TypeAlias = Annotated[int, Ge(1)]
"""An integer of at least 1."""


@dataclass(frozen=True)
class Key:
    """One key of a dataclass as an experiment file writes it."""

    name: str
    hint: Any
    default: Any
    path: tuple[str, ...]
    """The fields that lead to it: one, or the field of a value and the value's own."""
    owner: type
    """The dataclass that has the field, and the sentence under it."""

    @property
    def sentence(self) -> str:
        """What the reference says of it; read from the source when it is asked for, which takes a while."""
        return sentences(self.owner).get(self.path[-1], "")

    def of(self, instance: Any) -> Any:
        """The key's value in an instance."""
        for name in self.path:
            instance = getattr(instance, name)
        return instance


_KEYS: dict[type, dict[str, Key]] = {}


def keys_of(cls: type) -> dict[str, Key]:
    """The flat keys of a dataclass, in the order of its fields."""
    if cls not in _KEYS:
        _KEYS[cls] = _find_keys(cls)
    return _KEYS[cls]


def _find_keys(cls: type) -> dict[str, Key]:
    found: dict[str, Key] = {}
    hints = typing.get_type_hints(cls, include_extras=True)
    for f in fields(cls):
        if not f.init:
            continue
        default = field_default(f)
        inner: Mapping[str, str] | None = getattr(hints[f.name], "KEYS", None)
        if inner is None:
            found[f.name] = Key(f.name, hints[f.name], default, (f.name,), cls)
            continue
        own = keys_of(hints[f.name])
        for name, field in inner.items():
            start = getattr(default, field, MISSING)
            found[name] = Key(name, own[field].hint, start, (f.name, field), own[field].owner)
    return found


def field_default(f: Field[Any]) -> Any:
    """The value of a field that is not given; `MISSING` if it must be."""
    return f.default_factory() if f.default_factory is not MISSING else f.default


@functools.cache
def sentences(cls: type) -> dict[str, str]:
    """The text under every field of a class and its bases, as it stands in the source."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            found |= _sentences(base)
    return found


def _sentences(cls: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):  # made where there is no source
        return {}
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for node, after in zip(body.body, body.body[1:]):
        text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(text, str):
            found[node.target.id] = " ".join(text.split())
    return found


# ------------------------------------------------------------------------------------------------ reading and writing


def build(cls: type[T], values: Mapping[str, Any], who: str) -> T:
    """An instance of a dataclass from flat keys, each checked strictly against its annotation.

    A value that a method holds may also be given as such, under the name of its field.

    Raises:
        ConfigError: for unknown keys (naming the nearest), wrong types, or what the class itself refuses.
    """
    known = keys_of(cls)
    held = {key.path[0] for key in known.values() if len(key.path) > 1}
    given: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name in held and is_dataclass(value):
            given[name] = value
            continue
        if name not in known:
            raise ConfigError(f"{who}: unknown key '{name}'.{nearest(name, known)}")
        key = known[name]
        checked = _typed(key, value, who)
        if len(key.path) > 1:
            inner.setdefault(key.path[0], {})[key.path[1]] = checked
        else:
            given[name] = checked
    for name, some in inner.items():
        start = given[name] if name in given else field_default(next(f for f in fields(cls) if f.name == name))  # type: ignore[arg-type]
        given[name] = replace(start, **some)
    return cls(**given)


def with_keys(instance: T, **values: Any) -> T:
    """A copy of an instance with some of its flat keys changed."""
    return build(type(instance), flat(instance) | values, type(instance).__name__)


def flat(instance: Any) -> dict[str, Any]:
    """The flat keys of an instance: what `build` makes the same instance of."""
    return {name: key.of(instance) for name, key in keys_of(type(instance)).items()}


def _typed(key: Key, value: Any, who: str) -> Any:
    if isinstance(value, list):  # TOML has lists only; fields of frozen dataclasses are tuples
        value = tuple(value)
    try:
        return _adapter(key.hint).validate_python(value)
    except ValidationError:
        raise _refused(who, key, value) from None


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


# ------------------------------------------------------------------------------------------------ checking


def _check_held(instance: Any, who: str) -> None:
    """Refuse what a key holds in the place of the value that has the key: `optimizer="sgd"` for `Optimizer()`."""
    for name in {key.path[0] for key in keys_of(type(instance)).values() if len(key.path) > 1}:
        if not is_dataclass(held := getattr(instance, name)):
            kind = typing.get_type_hints(type(instance))[name].__name__
            raise ConfigError(f"{who}: {name} must be a {kind}, made with its own fields. Got {held!r}.")


def check(instance: Any, who: str | None = None) -> None:
    """Check every field of a dataclass against its annotation.

    Raises:
        ConfigError: in one sentence that names the key, what is allowed and what was got.
    """
    _check_held(instance, who or type(instance).__name__)
    for key in keys_of(type(instance)).values():
        value = key.of(instance)
        if not fits(key.hint, value):
            raise _refused(who or type(instance).__name__, key, value)


def _refused(who: str, key: Key, value: Any) -> ConfigError:
    shown = list(value) if isinstance(value, tuple) else value  # as an experiment file writes it
    return ConfigError(f"{who}: {key.name} must be {allowed(key.hint, value)}. Got {shown!r}.")


def fits(hint: Any, value: Any) -> bool:
    """Whether a value is what an annotation allows; numbers with limits must be finite, and true is not a number."""
    base, limits = _split(hint)
    origin, args = typing.get_origin(base), typing.get_args(base)
    if base is Any:
        return True
    if base is None or base is type(None):
        return value is None
    if origin is Literal:
        return any(value is a or (type(value) is type(a) and value == a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return any(fits(a, value) for a in args)
    if origin is tuple:
        long_enough = isinstance(value, tuple) and len(value) >= _shortest(limits)
        return long_enough and all(fits(args[0], v) for v in value)
    if base in (int, float):
        return _is_number(base, value) and _lets_in(limits, value)
    kind = origin or base
    return isinstance(value, kind) if isinstance(kind, type) else True


def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if typing.get_origin(hint) is Annotated:
        return typing.get_args(hint)[0], hint.__metadata__
    return hint, ()


def _is_number(base: type, value: Any) -> bool:
    kinds = (int,) if base is int else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and not math.isnan(value)


def _lets_in(limits: Iterable[Any], value: float) -> bool:
    bounds = [x for x in limits if isinstance(x, Gt | Ge | Lt | Le)]
    if bounds and math.isinf(value) and not any(isinstance(x, Le) and _edge(x) == value for x in bounds):
        return False  # a bound below does not let infinity in above
    return all(_within(x, value) for x in bounds)


def _within(limit: Gt | Ge | Lt | Le, value: float) -> bool:
    if isinstance(limit, Gt | Ge):
        return value > _edge(limit) if isinstance(limit, Gt) else value >= _edge(limit)
    return value < _edge(limit) if isinstance(limit, Lt) else value <= _edge(limit)


def _shortest(limits: Iterable[Any]) -> int:
    """How many values a list must have at least."""
    return max((x.min_length for x in limits if isinstance(x, MinLen)), default=0)


def allowed(hint: Any, value: Any = None) -> str:
    """An annotation in words; limits are told to who gave a value of the right type."""
    base, limits = _split(hint)
    origin, args = typing.get_origin(base), typing.get_args(base)
    if origin is Literal:
        return repr(args[0]) if len(args) == 1 else "one of " + ", ".join(repr(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(allowed(a, value) for a in args if a is not type(None))
    if origin in (tuple, list):
        inside = next((v for v in value if not fits(args[0], v)), 0) if isinstance(value, tuple | list) else None
        least = {0: "", 1: "one or more "}.get(_shortest(limits), f"{_shortest(limits)} or more ")
        return f"a list of {least}{_plural(allowed(args[0], inside))}"
    if base in (int, float):
        return _number(base, limits, isinstance(value, int | float) and not isinstance(value, bool))
    words = {str: "a string", bool: "true or false"}
    return words.get(base, str(getattr(base, "__name__", base)))


def _number(base: type, limits: Iterable[Any], told: bool) -> str:
    low = next((x for x in limits if isinstance(x, Gt | Ge)), None)
    high = next((x for x in limits if isinstance(x, Lt | Le)), None)
    bounds = [] if low is None else [f"{'>' if isinstance(low, Gt) else '>='} {_written(low)}"]
    bounds += [] if high is None else [f"{'<' if isinstance(high, Lt) else '<='} {_written(high)}"]
    if base is int:
        return f"an integer {' and '.join(bounds)}".strip()
    if not told or not bounds:
        return "a number"
    if low is not None and isinstance(high, Le):
        return f"a number in {'(' if isinstance(low, Gt) else '['}{_written(low)}, {_written(high)}]"
    return f"a finite number {' and '.join(bounds)}"


def _edge(limit: Gt | Ge | Lt | Le) -> float:
    """The number of a limit."""
    return float(getattr(limit, type(limit).__name__.lower()))


def _written(limit: Gt | Ge | Lt | Le) -> str:
    edge = getattr(limit, type(limit).__name__.lower())
    return str(edge) if isinstance(edge, int) else f"{edge:g}"


def _plural(words: str) -> str:
    return re.sub(r"^an? ((?:finite )?\w+)", r"\1s", words)
