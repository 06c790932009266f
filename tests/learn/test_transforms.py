"""Transforms are functions of a key: the same mapped, looped, on workers; part of a run; never in evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

import fedspan
from fedspan.errors import ConfigError
from fedspan.learn.transforms import Transforms, random_crop, random_erase, random_flip
from fedspan.randomness import key


def test_pictures_are_moved_mirrored_and_erased() -> None:
    x = torch.arange(1, 2 * 3 * 6 * 6 + 1, dtype=torch.float32).reshape(2, 3, 6, 6)
    assert torch.equal(random_flip(x, 1.0, key(0)), x.flip(-1)) and torch.equal(random_flip(x, 0.0, key(0)), x)
    assert torch.equal(random_crop(x, 0, key(0)), x)
    moves = set()
    for k in range(40):
        moved = random_crop(x[:1], 1, key(k))[0, 0]
        padded = torch.nn.functional.pad(x[0, 0], (1, 1, 1, 1))
        at = [(i, j) for i in range(3) for j in range(3) if torch.equal(padded[i : i + 6, j : j + 6], moved)]
        assert len(at) == 1
        moves.add(at[0])
    assert len(moves) == 9
    gone = random_erase(x, 1.0, key(1)) == 0
    assert (
        gone.sum((2, 3)).eq(9).all() and gone[:, 0].equal(gone[:, 1]) and not (random_erase(x, 0.0, key(1)) == 0).any()
    )


def test_noise_and_masked_tokens() -> None:
    noisy = Transforms(noise=0.5)(torch.zeros(1000, 4), key(3))
    assert abs(float(noisy.std()) - 0.5) < 0.02 and abs(float(noisy.mean())) < 0.03
    tokens = torch.full((100, 20), 7)
    hidden = Transforms(mask_tokens=0.25, mask_token=3)(tokens, key(4)) == 3
    assert abs(float(hidden.float().mean()) - 0.25) < 0.03


def test_mapped_clients_draw_as_single_ones() -> None:
    t, x = Transforms(crop=2, flip=0.5, erase=0.5, noise=0.1), torch.randn(3, 5, 1, 8, 8, dtype=torch.float64)
    keys = torch.stack([key(0, "k", i) for i in range(3)])
    together = vmap(t)(x, keys)
    for i in range(3):
        assert torch.equal(together[i], t(x[i], keys[i]))
        assert torch.equal(together[i][:2], t(x[i][:2], keys[i]))  # empty slots behind change nothing


def pictures(n: int = 2) -> fedspan.FederatedData:
    g = torch.Generator().manual_seed(0)
    made = []
    for k in range(n):
        x = torch.randn(10 + k, 1, 6, 6, generator=g, dtype=torch.float64)
        made.append((x, (x.mean((1, 2, 3)) > 0).long()))
    return fedspan.federate(made)


def run(data: fedspan.FederatedData, **settings: Any) -> fedspan.Result:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    given = {"rounds": 3, "batch_size": 4, "precision": "float64", **settings}
    return fedspan.simulate(fedspan.make("fedavg", lr=0.1), model, data, **given)


def weights(result: fedspan.Result) -> Tensor:
    assert result.simulation is not None
    return torch.cat([p.reshape(-1) for p in result.simulation.personal(0)[1].values()])


def own(x: Tensor, k: Tensor) -> Tensor:
    """A transform of one's own."""
    return x * (1 + 0.1 * fedspan.normal(k, x.shape[:1], x.dtype)[:, None, None, None])


def test_runs_are_the_same_however_they_are_computed() -> None:
    data = pictures(3).transformed(own, crop=1, flip=0.5, noise=0.1)
    mapped, looped = run(data, mapping="vmap", workers=1), run(data, mapping="loop", workers=1)
    assert torch.allclose(weights(mapped), weights(looped), rtol=0, atol=1e-12)
    assert run(data, mapping="loop", workers=2).digest == looped.digest
    assert run(data, mapping="loop", seed=1).digest != looped.digest
    assert not torch.allclose(weights(run(pictures(3), mapping="loop")), weights(looped))


def test_evaluation_sees_examples_as_they_are() -> None:
    settings = {"lr": 0.0}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    plain, noisy = (
        fedspan.simulate(fedspan.make("fedavg", **settings), model, d, rounds=1)
        for d in (pictures(), pictures().transformed(noise=100.0))
    )
    assert plain.measures == noisy.measures


def test_transforms_are_part_of_a_run(tmp_path: Path) -> None:
    run(pictures().transformed(flip=0.5), out=tmp_path / "run")
    with pytest.raises(fedspan.FedspanError, match=r"data\.transforms"):
        run(pictures().transformed(flip=0.25), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "x", "sentence"),
    [
        ({"crop": 1}, torch.zeros(2, 3), "for pictures"),
        ({"noise": 1.0}, torch.zeros(2, 3, dtype=torch.int64), "use mask_tokens"),
        ({"mask_tokens": 0.5}, torch.zeros(2, 3), "use noise"),
        ({"noise": 1.0}, {"a": torch.zeros(2), "b": torch.zeros(2)}, "one must be named, a, b"),
    ],
)
def test_what_does_not_fit_is_said(changes: dict[str, Any], x: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Transforms(**changes)(x, key(0))


def test_own_functions_keep_shapes_and_flips_are_probabilities() -> None:
    with pytest.raises(ConfigError, match="must return inputs of the shapes and types it was given"):
        Transforms(functions=(lambda x, k: x[:1],))(torch.zeros(2, 3), key(0))
    with pytest.raises(ConfigError, match="flip must be"):
        pictures().transformed(flip=2.0)
    changed = Transforms(noise=1.0, leaf="b")({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}, key(0))
    assert not changed["a"].any() and changed["b"].any()


def test_an_experiment_file_names_transforms_and_code() -> None:
    from fedspan.config import assemble_data, from_dict, to_toml
    from fedspan.method.named_code import only_allowing

    values = {"partition": {"clients": 3}, "data": {"transforms": {"crop": 1, "own": ["test_transforms:own"]}}}
    config = from_dict(values)
    assert "[data.transforms]" in to_toml(config) and config != from_dict({"partition": {"clients": 3}})
    with only_allowing(["test_transforms"], "..."):
        data = assemble_data(config)
    assert data.transforms is not None and data.transforms.crop == 1 and len(data.transforms.functions) == 1
    with only_allowing([], "allow {package}"), pytest.raises(ConfigError, match="'test_transforms' must be allowed"):
        assemble_data(config)
    with pytest.raises(ConfigError, match="unknown key 'flop'"):
        from_dict({"data": {"transforms": {"flop": 1}}})
