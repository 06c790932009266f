"""A causal language model of Hugging Face's, from a folder, the hub, or built from its sizes."""

from __future__ import annotations

from torch import nn

from fedspan.errors import ConfigError
from fedspan.models import checks


def causal_lm(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    path: str = "",
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    hidden: int = 64,
    mlp: int = 172,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 4,
) -> nn.Module:
    """Make a `fedspan.language.CausalLM`.

    Args:
        input_shape: (tokens,), the longest row.
        classes: the size of the tokenizer's vocabulary.
        path: a folder of Hugging Face's or llama2.c's, a name OWNER/NAME of the hub, or '' for a small LLaMA of the
            sizes that follow, on bytes.
        targets: endings of the names of the linear layers that are trained (or get factors); none: all is trained.
    """
    from fedspan.language.model import CausalLM, load_base

    who = "model 'causal-lm'"
    sizes = {"hidden": hidden, "mlp": mlp, "layers": layers, "heads": heads, "kv_heads": kv_heads}
    sizes = {k: checks.integer(who, k, v) for k, v in sizes.items()}
    if hidden % (2 * heads) or heads % kv_heads:
        raise ConfigError(
            f"{who}: hidden must be a multiple of 2 * heads, and heads of kv_heads. Got {hidden}, {heads} and"
            f" {kv_heads}."
        )
    if not isinstance(targets, list | tuple) or not all(isinstance(t, str) and t for t in targets):
        raise ConfigError(f"{who}: targets must be a list of endings of layer names. Got {targets!r}.")
    (length,) = input_shape
    lm = load_base(path, **sizes, vocabulary=classes, positions=length)
    known, longest = lm.config.vocab_size, getattr(lm.config, "max_position_embeddings", length)
    if classes > known:
        raise ConfigError(f"{who}: the tokenizer must have at most the model's {known} tokens. Got {classes}.")
    if length > longest:
        raise ConfigError(
            f"{who}: data.max_length must be at most {longest + 1}, the model's positions and one. Got {length + 1}."
        )
    return CausalLM(lm, tuple(targets))
