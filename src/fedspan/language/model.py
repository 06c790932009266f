"""A causal language model as a module of token rows, and where it comes from."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fedspan.errors import ConfigError, nearest
from fedspan.language.llama2c import read_model
from fedspan.language.places import find, library
from fedspan.layers import Structured


class CausalLM(nn.Module):
    """Rows of tokens to rows of logits. Rows are padded on the right: no token sees what comes after it.

    Layers whose names end in one of `targets` are trainable, all else is constant; without targets all is trainable.
    Copies share what is constant for good.
    """

    def __init__(self, lm: Any, targets: Sequence[str] = ()) -> None:
        super().__init__()
        self.lm: Any = lm
        known = [k for k, m in lm.named_modules() if isinstance(m, nn.Linear)]
        for target in targets:
            if not any(_ends(k, target) for k in known):
                endings = sorted({k.rpartition(".")[2] for k in known})
                raise ConfigError(
                    f"Language model: targets must end the name of a linear layer. Got '{target[:60]}'."
                    f"{nearest(target[:60], endings)}"
                )
        if targets:
            for p in lm.parameters():
                p.requires_grad_(False)
            for k in known:
                if any(_ends(k, t) for t in targets):
                    lm.get_submodule(k).requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]."""
        logits: Tensor = self.lm(input_ids=x, use_cache=False).logits
        return logits

    def __deepcopy__(self, memo: dict[int, Any]) -> CausalLM:
        # Weights beside factors are constants for a client only: models with other ones are loaded into copies.
        owned = {id(p) for m in self.modules() if isinstance(m, Structured) for p in m.parameters()}
        for p in self.parameters():
            if not p.requires_grad and id(p) not in owned:
                # Another parameter on the same memory: a cast of one leaves the other alone.
                memo.setdefault(id(p), nn.Parameter(p.data, requires_grad=False))
        made = CausalLM.__new__(CausalLM)
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            made.__dict__[name] = copy.deepcopy(value, memo)
        return made


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def load_base(path: str, **sizes: int) -> Any:
    """The Hugging Face model that `path` means (see `places.find`); `sizes` are those of a model to be built.

    Weights are read from safetensors only. Attention is computed step by step ("eager"), so that a model can be trained
    for many clients at once, and without dropout, which has no keyed form inside it.
    """
    place, where = find(path)
    if place == "llama2c":
        return read_model(next(p for p in sorted(where.glob("*.bin")) if not p.name.startswith("tok")))
    transformers = library("transformers")
    if place == "built":
        config = transformers.LlamaConfig(
            vocab_size=sizes["vocabulary"],
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["mlp"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["kv_heads"],
            max_position_embeddings=sizes["positions"],
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation="eager",
        )
        return transformers.LlamaForCausalLM(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(where),
        attn_implementation="eager",
        use_safetensors=True,
        local_files_only=place == "huggingface",
        trust_remote_code=False,
        dtype="auto",
    )
    if getattr(model.config, "attention_dropout", 0.0):
        model.config.attention_dropout = 0.0
        for m in model.modules():
            if hasattr(m, "attention_dropout"):
                m.attention_dropout = 0.0
    return model


def language_model(module: nn.Module) -> CausalLM:
    """The language model that a task's module is.

    Raises:
        ConfigError: if it is none.
    """
    if not isinstance(module, CausalLM):
        raise ConfigError(f"Language model: the run must be of model 'causal-lm'. Got {type(module).__name__}.")
    return module
