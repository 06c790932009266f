"""What a run made of a language model, in the formats that Hugging Face's libraries read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedspan.errors import ConfigError
from fedspan.language.model import CausalLM, language_model
from fedspan.language.places import library
from fedspan.layers import Adapter, plain_weights, structured
from fedspan.learn.task import Task
from fedspan.linalg import lowrank
from fedspan.tree import Params

PREFIX = "lm."  # where CausalLM keeps the model

Pair = tuple[Tensor, Tensor]


def save_adapter(task: Task, weights: Params, folder: str | Path, base: str = "") -> int:
    """Write a model as a LoRA adapter of its base in PEFT's format; returns the adapter's rank.

    Factors are taken as they are: the paper's A is PEFT's lora_B, its B is lora_A, and the scale goes into A. What has
    been accumulated in W, or was trained without factors, is W − W⁰, whose exact factors come from its singular value
    decomposition; all pairs of a layer stand side by side as one pair of the sum of their ranks.

    Args:
        task: the task as the method trained it.
        weights: what a client predicts with.
        base: the name of the base model that PEFT is to remember.

    Raises:
        ConfigError: if something else than linear layers was trained, which an adapter cannot hold.
    """
    made = language_model(task.module)
    start = task.plain.init()
    layers = structured(task.module)
    inside = {f"{k}." for k in layers}
    pairs: dict[str, list[Pair]] = {}
    held = task.module_with(weights)
    for k in layers:
        layer = held.get_submodule(k)
        assert isinstance(layer, Adapter)
        given = layer.factors in ((), ("A", "B"))
        weight = layer.weight if given else layer.compose()  # LoHa and LoKr have no pair to give
        pairs[k] = [*(_given(layer) if given else []), *_moved(weight.detach(), start[f"{k}.weight"])]
    for name, p in weights.items():
        if any(name.startswith(k) for k in inside):
            continue
        layer_name, _, last = name.rpartition(".")
        if last == "weight" and isinstance(made.get_submodule(layer_name), nn.Linear):
            pairs[layer_name] = _moved(p, start[name])
        elif not torch.equal(p, start[name]):
            raise ConfigError(f"export: an adapter holds weights of linear layers only, and '{name}' was trained, too.")
    rank = max((sum(A.shape[1] for A, _ in some) for some in pairs.values()), default=0)
    if not rank:
        raise ConfigError("export: the model is still its base, so there is no adapter to write.")
    _write(made, pairs, rank, Path(folder), base)
    return rank


def _given(layer: Adapter) -> list[Pair]:
    """The pairs a layer holds, scales put into the first of each."""
    pairs = [(layer.alpha * layer.A, layer.B)] if layer.factors == ("A", "B") else []
    if layer.own:
        pairs.append((layer.own_alpha * layer.L, layer.U))
    return [(A.detach(), B.detach()) for A, B in pairs]


def _moved(new: Tensor, old: Tensor) -> list[Pair]:
    """Factors of new − old, of the rank it has beyond the rounding of its sum."""
    P, sigma, Q = lowrank.changed(new, old)
    if not len(sigma):
        return []
    root = sigma.sqrt()
    return [((P * root).to(new.dtype), (Q * root).T.to(new.dtype))]


def _write(made: CausalLM, pairs: dict[str, list[Pair]], rank: int, folder: Path, base: str) -> None:
    tensors: Params = {}
    for k, some in pairs.items():
        if not some:
            m, n = made.get_submodule(k).weight.shape  # type: ignore[misc]
            some = [(torch.zeros(int(m), 0), torch.zeros(0, int(n)))]
        A, B = torch.cat([a for a, _ in some], 1), torch.cat([b for _, b in some], 0)
        # One rank for all layers: what is missing is zero.
        A = torch.cat([A, A.new_zeros(len(A), rank - A.shape[1])], 1)
        B = torch.cat([B, B.new_zeros(rank - len(B), B.shape[1])], 0)
        name = f"base_model.model.{k.removeprefix(PREFIX)}"
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = B.contiguous(), A.contiguous()
    names = [k.removeprefix(PREFIX) for k in pairs]
    config = library("peft").LoraConfig(
        r=rank,
        lora_alpha=rank,  # the scale is in the factors
        target_modules=_short(made, names),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _short(made: CausalLM, names: list[str]) -> list[str]:
    """The last parts of layer names where they mean these layers and no others, otherwise the whole names."""
    endings = {k.rpartition(".")[2] for k in names}
    known = {k for k, m in made.lm.named_modules() if hasattr(m, "weight") and k.rpartition(".")[2] in endings}
    return sorted(endings) if known == set(names) else sorted(names)


def save_merged(task: Task, weights: Params, folder: str | Path, tokenizer: Any = None) -> None:
    """Write a model with everything added up as a folder of Hugging Face's, with its tokenizer if that is given."""
    made = language_model(copy.deepcopy(task.plain.module))
    made.load_state_dict(plain_weights(task.module, weights), strict=False)
    with _quiet():
        made.lm.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a progress bar for one small file."""
    logging = library("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
