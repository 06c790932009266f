"""Attacks in simulation: what they do to uploads and data, and that a study of them goes on where it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import call, failing, make_data
from fedspan import tree
from fedspan.config import from_dict
from fedspan.errors import ConfigError
from fedspan.method import Abilities, Sent
from fedspan.methods import make
from fedspan.randomness import key
from fedspan.simulation.defence import Defence
from fedspan.studies.attacks import (
    ATTACKS,
    AttackJob,
    AttackOutcome,
    attack_jobs,
    attacked_run,
    bars,
    carry_out,
    find_attack,
    from_csv,
    to_csv,
    to_markdown,
)
from fedspan.studies.attacks.catalogue import MANY_EXAMPLES, TARGET, mark

TINY = """
name = "tiny"
rounds = 6
[data]
source = "digits"
limit = 400
[partition]
clients = 6
[model]
hidden = [16]
[method]
lr = 0.3
[train]
batch_size = 16
workers = 1
"""
DOWN = {"theta": torch.tensor([1.0, 2.0])}
SENT = Sent(torch.tensor(8.0), mean={"theta": torch.tensor([1.5, 1.0])})


def lied(name: str, method: str = "fedavg") -> Sent:
    attack = find_attack(name)
    assert attack.lie is not None
    return attack.lie(Abilities(make(method)), SENT, DOWN, key(0, "attack"))


def test_lies_are_about_the_change() -> None:
    assert lied("scaling").mean["theta"].tolist() == [6.0, -8.0] and lied("scaling").weight == 8
    assert lied("reversed").mean["theta"].tolist() == [-4.0, 12.0]
    assert lied("inflated").mean["theta"].tolist() == [0.5, 3.0] and lied("inflated").weight == MANY_EXAMPLES
    assert lied("inflated", "fedrep").weight == 8  # whose uploads all weigh alike
    noise = lied("gaussian").mean
    assert float(tree.squared_norm(noise)) ** 0.5 == pytest.approx(19 * float(tree.squared_norm(SENT.mean)) ** 0.5)


def test_poisoned_examples_are_the_attackers_own() -> None:
    data = make_data("cnn", clients=3)
    flipped = find_attack("label-flip").poison(data, [1], 0)  # type: ignore[misc]
    assert torch.equal(flipped.y[flipped.train[1]], 2 - data.y[data.train[1]])
    planted = find_attack("backdoor").poison(data, [1], 0)  # type: ignore[misc]
    x, old = planted.x[planted.train[1]], data.x[data.train[1]]
    marked = (x != old).flatten(1).any(1)
    assert marked.sum() == len(old) // 2 and (planted.y[planted.train[1]][marked] == TARGET).all()
    assert torch.equal(x[marked], mark(old[marked], float(data.x.max())))
    for new in (flipped, planted):
        for i in (0, 2):
            assert np.array_equal(new.train[i], data.train[i])
        assert all(torch.equal(new.x[a], data.x[b]) for a, b in zip(new.test, data.test))
    with pytest.raises(ConfigError, match="a backdoor needs pictures"):
        find_attack("backdoor").poison(make_data(clients=3), [1], 0)  # type: ignore[misc]


def test_a_liar_ruins_a_run_unless_it_is_clipped(tmp_path: Path) -> None:
    config = from_dict({**_tiny(), "partition": {"clients": 6}})
    guards = [Defence(), Defence(rule="clip")]
    jobs = attack_jobs(config, ["fedavg"], ["none", "gaussian", "inflated"], guards, [0])
    found = {(j.attack.name, j.defence.rule): carry_out(j, tmp_path)[0] for j in jobs}
    accuracy = {k: o.accuracy or 0.0 for k, o in found.items()}
    for attack in ("gaussian", "inflated"):
        assert accuracy["none", "none"] - accuracy[attack, "none"] > 0.3
        assert accuracy[attack, "clip"] - accuracy[attack, "none"] > 0.15  # after six rounds, with one liar of six
    assert len(found["none", "none"].attackers) == 1


def _tiny() -> dict[str, object]:
    from fedspan.storage.toml import parse_toml

    return parse_toml(TINY, "tiny")


def test_a_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exp = tmp_path / "exp.toml"
    exp.write_text(TINY)
    short = ("attack", str(exp), "rounds=1", "--out", str(tmp_path / "out"), "--seeds", "0,1")
    first = call(*short, "--attacks", "none,boosted-backdoor")
    assert "[8/8] fedavg, boosted-backdoor, clip, seed 1" in first.output
    (tmp_path / "out" / "fedavg" / "none-clip-seed-1.json").write_text("{}")  # broken off, or damaged
    ran, run = [], attacked_run._run

    def counted(job: AttackJob) -> AttackOutcome:
        ran.append(job)
        return run(job)

    monkeypatch.setattr(attacked_run, "_run", counted)
    again = call(*short, "--attacks", "none,boosted-backdoor")
    assert [(job.attack.name, job.defence.rule, job.config.seed) for job in ran] == [("none", "clip", 1)]
    table = (tmp_path / "out" / "table.md").read_text()
    assert "boosted-backdoor: success" in table and table in again.output
    call(*short, "rounds=2", "--attacks", "none", "--rules", "clip")
    assert len(ran) == 3  # another experiment is run anew


def outcome(attack: str, rule: str, accuracy: float | None, success: float | None = None) -> AttackOutcome:
    return AttackOutcome(
        method="m", attack=attack, rule=rule, seed=200, accuracy=accuracy, success=success, diverged=accuracy is None
    )


def test_the_table_says_what_is_met_and_what_is_not() -> None:
    some = [
        outcome("none", "none", 0.95), outcome("none", "clip", 0.94), outcome("gaussian", "none", None),
        outcome("gaussian", "clip", 0.92), outcome("inflated", "clip", 0.90), outcome("backdoor", "clip", 0.94, 0.1),
        outcome("boosted-backdoor", "clip", 0.94, 0.16),
    ]  # fmt: skip
    assert [(b.asked, round(b.points, 6), b.met) for b in bars(some)] == [
        ("cost without attack", 1.0, False),
        ("gaussian: accuracy lost", 2.0, True),
        ("inflated: accuracy lost", 4.0, False),
        ("boosted backdoor beyond the plain one", 6.0, False),
    ]
    text = to_markdown(some)
    assert "(1 of 1 diverged)" in text and "| m | inflated: accuracy lost | 4.0 | 3 | **no** |" in text
    assert to_markdown(from_csv(to_csv(some))) == text


def test_bad_words_are_refused_in_one_sentence(tmp_path: Path) -> None:
    exp = tmp_path / "exp.toml"
    exp.write_text(TINY)
    assert "'gausian' is no attack. Did you mean 'gaussian'?" in failing("attack", str(exp), "--attacks", "gausian")
    assert "--seeds must be integers >= 0 with commas. Got '1,x'." in failing("attack", str(exp), "--seeds", "1,x")
    assert "rule must be one of 'none', 'clip'. Got 'krum'." in failing("attack", str(exp), "--rules", "krum")
    assert set(ATTACKS) >= {"none", "label-flip"}
