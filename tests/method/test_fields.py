"""Fields of methods: a sentence under each, flat keys there and back, one sentence for what does not fit.

The words for an annotation are pinned for every kind of annotation there is, as error messages and reference use them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen
from test_all_methods import TABLE

from fedspan.deploy.policy import Policy
from fedspan.errors import ConfigError
from fedspan.learn.optimizer import Optimizer, Schedule
from fedspan.learn.server_optimizer import ServerOptimizer
from fedspan.method import Training
from fedspan.method.fields import (
    AtLeast1,
    Count,
    Decay,
    Fraction,
    NonNegative,
    Positive,
    Share,
    allowed,
    build,
    check,
    fits,
    flat,
    keys_of,
    sentences,
    with_keys,
)
from fedspan.methods import METHODS, make
from fedspan.simulation.devices import Devices
from fedspan.simulation.settings import Settings

ROWS = pytest.mark.parametrize(
    ("name", "keys"), TABLE, ids=[f"{name}-{'-'.join(keys) or 'default'}" for name, keys in TABLE]
)


def refusal(cls: type, **keys: Any) -> str:
    """The sentence with which a class refuses flat keys."""
    with pytest.raises(ConfigError) as e:
        build(cls, keys, "Who")
    text = str(e.value)
    assert "\n" not in text and text.endswith((".", "?"))
    return text


# ------------------------------------------------------------------------------------------------ sentences


def is_sentence(text: str) -> bool:
    """Whether a text begins like a sentence (or with a symbol of a paper), ends like one, and fits in a table."""
    return 10 <= len(text) <= 160 and text.endswith(".") and "\n" not in text and not text.endswith("..")


@pytest.mark.parametrize("name", METHODS)
def test_every_key_of_a_method_has_a_sentence(name: str) -> None:
    said = {key: found.sentence for key, found in keys_of(METHODS[name]).items()}
    assert not [key for key, text in said.items() if not text], f"{name}: keys without a sentence"
    assert not {key: text for key, text in said.items() if not is_sentence(text)}


@pytest.mark.parametrize("cls", [Settings, Devices, Policy, Optimizer, ServerOptimizer, Schedule])
def test_every_key_of_a_section_or_value_has_a_sentence(cls: type) -> None:
    assert sentences(cls).keys() == {f.name for f in fields(cls)}
    assert all(map(is_sentence, sentences(cls).values()))


@dataclass(frozen=True, kw_only=True)
class Told(Training):
    """One field with a sentence, one with another default, one with nothing."""

    rank: AtLeast1 = 4
    """r, the
    rank."""
    lr: NonNegative = 0.5
    silent: bool = False


def test_sentences_stand_under_their_fields_and_are_inherited() -> None:
    known = keys_of(Told)
    assert known["rank"].sentence == "r, the rank."
    assert known["lr"].sentence == keys_of(Training)["lr"].sentence != ""
    assert known["momentum"].sentence == sentences(Optimizer)["momentum"]
    assert known["silent"].sentence == ""
    assert known["lr"].default == 0.5


# ------------------------------------------------------------------------------------------------ there and back


@ROWS
def test_flat_keys_make_the_same_method_again(name: str, keys: dict[str, Any]) -> None:
    method = make(name, **keys)
    written = flat(method)
    assert build(type(method), written, name) == method
    assert flat(build(type(method), written, name)) == written
    assert written.keys() == keys_of(type(method)).keys()
    for key, value in keys.items():
        assert written[key] == (tuple(value) if isinstance(value, list) else value), key


@ROWS
def test_a_default_is_what_the_key_says(name: str, keys: dict[str, Any]) -> None:
    untouched = {k: v for k, v in flat(make(name, **keys)).items() if k not in keys}
    assert untouched == {k: key.default for k, key in keys_of(METHODS[name]).items() if k in untouched}


def test_keys_of_a_value_keep_what_they_do_not_name() -> None:
    method = make("fedavg", momentum=0.5, server_optimizer="adam")
    again = with_keys(method, weight_decay=0.1)
    assert flat(again) == flat(method) | {"weight_decay": 0.1}
    value = build(Training, {"optimizer": Optimizer(momentum=0.2), "weight_decay": 0.3}, "x")
    assert value.optimizer == Optimizer(momentum=0.2, weight_decay=0.3)


def test_a_list_of_an_experiment_file_becomes_a_tuple() -> None:
    assert make("fedper", personal_layers=["0", "2"]) == make("fedper", personal_layers=("0", "2"))


# ------------------------------------------------------------------------------------------------ what does not fit


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_key_is_refused_with_the_nearest(name: str) -> None:
    text = refusal(METHODS[name], momentun=0.5)
    assert text.startswith("Who: unknown key 'momentun'.") and "momentum" in text


def wrong_of(hint: Any) -> list[Any]:
    """Values of another type than an annotation's, whatever it is."""
    return [v for v in (object(), {"a": 1}, b"x", 1j) if not fits(hint, v)]


@pytest.mark.parametrize("name", METHODS)
def test_a_wrong_type_is_refused_for_every_key(name: str) -> None:
    for key, found in keys_of(METHODS[name]).items():
        for value in wrong_of(found.hint):
            text = refusal(METHODS[name], **{key: value})
            assert text == f"Who: {key} must be {allowed(found.hint, value)}. Got {value!r}."


@pytest.mark.parametrize("name", METHODS)
def test_numbers_beyond_their_limits_are_refused_for_every_key(name: str) -> None:
    """By the reader and by the class itself, which is also made in Python."""
    asked = 0
    for key, found in keys_of(METHODS[name]).items():
        for value in (-1e9, -1, 0, 1e9, math.nan, math.inf):
            if fits(found.hint, value) or (isinstance(value, float) and "number" not in allowed(found.hint, value)):
                continue
            text = refusal(METHODS[name], **{key: value})
            assert f": {key} must be {allowed(found.hint, value)}. Got {value!r}." in text
            asked += 1
    assert asked > 0


@pytest.mark.parametrize(
    ("cls", "keys", "sentence"),
    [
        (Told, {"rank": 0}, "Who: rank must be an integer >= 1. Got 0."),
        (Told, {"rank": 2.0}, "Who: rank must be an integer >= 1. Got 2.0."),
        (Told, {"rank": True}, "Who: rank must be an integer >= 1. Got True."),
        (Told, {"silent": 1}, "Who: silent must be true or false. Got 1."),
        (Told, {"lr": "fast"}, "Who: lr must be a number. Got 'fast'."),
        (Told, {"lr": -0.1}, "Who: lr must be a finite number >= 0. Got -0.1."),
        (Told, {"momentum": 1.0}, "Who: momentum must be a finite number >= 0 and < 1. Got 1.0."),
        (Told, {"optimizer": "adam"}, "Who: optimizer must be one of 'sgd', 'adamw'. Got 'adam'."),
        (Told, {"rnak": 2}, "Who: unknown key 'rnak'. Did you mean 'rank'?"),
        (METHODS["cfl"], {"eps_1": -1.0}, "Who: eps_1 must be a number in [0, inf] or 'auto'. Got -1.0."),
        (METHODS["cfl"], {"eps_2": "never"}, "Who: eps_2 must be a number or 'auto'. Got 'never'."),
        (METHODS["pfedpara"], {"gamma": 2.0}, "Who: gamma must be a number in [0, 1]. Got 2.0."),
        (Settings, {"batch_size": "half"}, "Who: batch_size must be an integer >= 1 or 'full'. Got 'half'."),
        (Devices, {"ratios": []}, "Who: ratios must be a list of one or more numbers in (0, 1]. Got []."),
        (Devices, {"gflops": [1.0, 0.0]}, "Who: gflops must be a list of finite numbers > 0. Got [1.0, 0.0]."),
        (Devices, {"gflops": 3.0}, "Who: gflops must be a list of numbers. Got 3.0."),
        (Policy, {"norm_factor": 0.5}, "Who: norm_factor must be a number in [1, inf]. Got 0.5."),
        (Policy, {"deadline": 0.0}, "Who: deadline must be a number in [0.1, 86400]. Got 0.0."),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_one_sentence_says_who_what_and_got(cls: type, keys: dict[str, Any], sentence: str) -> None:
    assert refusal(cls, **keys) == sentence


def test_a_class_made_in_python_is_checked_as_well() -> None:
    with pytest.raises(ConfigError, match=r"^Told: rank must be an integer >= 1. Got 0.$"):
        Told(rank=0)
    with pytest.raises(ConfigError, match=r"^Told: momentum must be a finite number >= 0 and < 1. Got 1.5.$"):
        Told(optimizer=Optimizer(momentum=1.5))
    with pytest.raises(ConfigError, match=r"^Deploy: quorum must be a number in \[0, 1\]. Got 2.$"):
        Policy(quorum=2)
    with pytest.raises(ConfigError, match=r"^Train: participation must be a number. Got 'all'.$"):
        Settings(participation="all")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^Devices: ratios must be a list of one or more numbers in"):
        Devices(ratios=())


def test_infinity_fits_where_it_is_a_limit() -> None:
    assert make("cfl", eps_1=math.inf, eps_2=math.inf) == METHODS["cfl"](eps_1=math.inf, eps_2=math.inf)
    assert Policy(norm_factor=math.inf).norm_factor == math.inf


def test_the_caller_may_say_who() -> None:
    @dataclass
    class Loose:
        share: Share = 2.0

    with pytest.raises(ConfigError, match=r"^Here: share must be"):
        check(Loose(), "Here")
    with pytest.raises(ConfigError, match=r"^Loose: share must be"):
        check(Loose())


# ------------------------------------------------------------------------------------------------ words

Infinite = Annotated[float, Ge(1), Le(math.inf)]


@pytest.mark.parametrize(
    ("hint", "value", "words"),
    [
        (int, None, "an integer"),
        (Count, -1, "an integer >= 0"),
        (Annotated[int, Gt(0), Lt(4)], 4, "an integer > 0 and < 4"),
        (Annotated[int, Ge(1), Le(2**53)], 0, "an integer >= 1 and <= 9007199254740992"),
        (float, math.nan, "a number"),
        (NonNegative, "x", "a number"),
        (NonNegative, True, "a number"),
        (NonNegative, -1, "a finite number >= 0"),
        (Positive, 0, "a finite number > 0"),
        (Decay, 1.0, "a finite number >= 0 and < 1"),
        (Annotated[float, Lt(0)], 1, "a finite number < 0"),
        (Fraction, 2, "a number in [0, 1]"),
        (Share, 0.0, "a number in (0, 1]"),
        (Infinite, 0.5, "a number in [1, inf]"),
        (str, 1, "a string"),
        (bool, 1, "true or false"),
        (Literal["a"], "b", "'a'"),
        (Literal["a", "b"], "c", "one of 'a', 'b'"),
        (Literal["a", 1], 2, "one of 'a', 1"),
        (AtLeast1 | None, 0, "an integer >= 1"),
        (AtLeast1 | Literal["auto"], 0, "an integer >= 1 or 'auto'"),
        (Literal["all", "body"] | tuple[str, ...], 1, "one of 'all', 'body' or a list of strings"),
        (tuple[str, ...], 1, "a list of strings"),
        (tuple[AtLeast1, ...], (0,), "a list of integers >= 1"),
        (tuple[Share, ...], 0.5, "a list of numbers"),
        (tuple[Share, ...], (0.5, 2.0), "a list of numbers in (0, 1]"),
        (Annotated[tuple[Positive, ...], MinLen(1)], (0.0,), "a list of one or more finite numbers > 0"),
        (Annotated[tuple[int, ...], MinLen(2)], (1,), "a list of 2 or more integers"),
        (tuple[tuple[int, ...], ...], 1, "a list of lists of integers"),
        (Optimizer, 1, "Optimizer"),
    ],
)
def test_words_for_every_kind_of_annotation(hint: Any, value: Any, words: str) -> None:
    assert allowed(hint, value) == words


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [0, -3], [0.0, True, None, "1"]),
        (float, [0, -3.5, math.inf], [math.nan, True, "1", None]),
        (AtLeast1, [1, 10**12], [0, 1.0, True]),
        (NonNegative, [0, 0.0, 5], [-1e-9, math.inf, math.nan, False]),
        (Positive, [1e-300], [0, -1, math.inf]),
        (Fraction, [0, 1, 0.5], [-0.1, 1.1, -math.inf]),
        (Share, [1, 0.5], [0, 1.1]),
        (Decay, [0, 0.99], [1, 1.0]),
        (Infinite, [1, 7.0, math.inf], [0.99, -math.inf, math.nan]),
        (Literal["a", 1], ["a", 1], ["b", True, 1.0]),
        (Literal[True], [True], [1, False]),
        (AtLeast1 | None, [None, 1], [0, "none"]),
        (tuple[str, ...], [(), ("a",)], ["a", ["a"], (1,)]),
        (Annotated[tuple[Share, ...], MinLen(1)], [(0.5,), (1, 0.5)], [(), (0.5, 0.0), 0.5]),
        (Any, [None, object()], []),
        (str, ["", "a"], [b"a", None]),
        (Optimizer, [Optimizer()], ["sgd", None]),
    ],
)
def test_what_fits_an_annotation(hint: Any, good: list[Any], bad: list[Any]) -> None:
    assert all(fits(hint, v) for v in good) and not any(fits(hint, v) for v in bad)
