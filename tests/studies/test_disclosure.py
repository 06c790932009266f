"""What each method declares to disclose is what attacks on its uploads find."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedspan.method import About, Discloses, Method, Sent
from fedspan.methods import BUILT_IN, METHODS, make
from fedspan.methods.fedavg import FedAvg
from fedspan.studies.disclosure import attacks, measure
from fedspan.studies.disclosure.measure import SET, one_round, stage
from fedspan.tree import Outer

FEW = ("local", "fedproto", "pfl-mf")
"""Between them they disclose each thing, and nothing."""


def check(name: str, method: Method) -> None:
    """Compare what is declared with what attacks find, and name the method."""
    found = measure(method)
    assert method.about.discloses == found.discloses, f"{name} declares {method.about.discloses}; attacks find {found}"


def test_every_method_says_what_it_discloses() -> None:
    assert [name for name in BUILT_IN if METHODS[name].about.discloses is None] == []


@pytest.mark.parametrize("name", FEW)
def test_a_few_disclose_what_they_declare(name: str) -> None:
    check(name, make(name))


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in BUILT_IN if n not in FEW])
def test_every_method_discloses_what_it_declares(name: str) -> None:
    check(name, make(name))


@dataclass(frozen=True, kw_only=True)
class Boasting(FedAvg):
    """FedAvg that claims to disclose nothing."""

    about = About(discloses=Discloses(labels="nothing", model="nothing", examples=False, resembles=False))


@dataclass(frozen=True, kw_only=True)
class Extended(FedAvg):
    """FedAvg that says nothing."""


def test_a_wrong_declaration_fails_with_the_name() -> None:
    with pytest.raises(AssertionError, match="boasting declares"):
        check("boasting", Boasting())


def test_a_declaration_is_not_inherited() -> None:
    assert FedAvg.about.discloses is not None and Extended.about.discloses is None


def test_v_can_be_read_from_both_forms_of_the_upload() -> None:
    for wire in ("rank-one", "full"):
        assert measure(make("pfl-mf", wire=wire), played=1).private["v"] >= 1 - 1e-6, wire


def test_labels_of_strangers_teach_the_server_nothing() -> None:
    """The attack learns from who held what: with that shuffled it guesses, however telling the uploads are."""
    task, real, games = stage()
    method = make("fedavg")
    seen, ours = one_round(method, task, real).uploads(), [one_round(method, task, g).uploads() for g in games]
    learnt = {path: torch.cat([u[path] for u in ours]) for path in seen}
    held = np.concatenate([g.held for g in games])
    right = ((attacks.read_labels(seen, learnt, held) > 0).numpy() == real.held).mean()
    shuffled = np.random.default_rng(0).permutation(held)
    chance = ((attacks.read_labels(seen, learnt, shuffled) > 0).numpy() == real.held).mean()
    assert right >= SET and 0.4 < chance < 0.6


def test_examples_of_the_server_are_none_of_the_clients() -> None:
    _, real, games = stage()
    theirs = {row.numpy().tobytes() for row in real.data.x}
    assert not any(row.numpy().tobytes() in theirs for row in games[0].data.x[:200])
    pairs = real.held[real.partner]
    assert (pairs == real.held).all() and (real.partner != np.arange(len(pairs))).all()
    assert len(set(real.data.sizes.tolist())) > 10  # or a size could be read off by chance


def test_a_private_vector_is_found_as_a_factor() -> None:
    v, g = torch.tensor([3.0, -4.0, 0.0]), torch.tensor([1.0, 2.0])
    start = {"v": torch.zeros(3), "h": {"w": torch.zeros(2)}, "empty": {}}
    for sent in ({"G": Outer(g, v)}, {"M": torch.outer(g, v)}):
        found = attacks.rebuild_private(sent, start)
        cosine = torch.nn.functional.cosine_similarity(found["v"], v, dim=0)
        assert float(cosine.abs()) == pytest.approx(1.0, abs=1e-6)
        assert torch.equal(found["h"]["w"], start["h"]["w"]) and found["empty"] == {}  # type: ignore[index,call-overload]


def test_sizes_are_read_from_weights_of_parts_too() -> None:
    counts = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    sent = Sent(torch.ones(2), weights={"p": counts})
    assert [n.tolist() for n in attacks.read_sizes(sent.weight, sent.weights)] == [[1.0, 1.0], [3.0, 3.0]]


@pytest.mark.long
@pytest.mark.parametrize("name", list(BUILT_IN))
def test_a_stronger_server_finds_what_is_declared_or_more(name: str) -> None:
    """Four times as many played clients: labels that are declared as hints may become a set, never the reverse."""
    levels = ["nothing", "hints", "set"]
    found, declared = measure(make(name), played=20), METHODS[name].about.discloses
    assert declared is not None
    assert levels.index(found.discloses.labels) >= levels.index(declared.labels), f"{name}: {found}"
    assert declared.labels != "nothing" or found.labels == 0.5, f"{name}: {found}"
