"""Losses of the kinds of tasks, each per example or of a whole batch, and measures that are means over examples."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedspan.errors import ConfigError

TaskKind: TypeAlias = Literal["classification", "multi-label", "regression", "survival", "tagging", "language"]
LossOf: TypeAlias = Literal["example", "batch"]
Ties: TypeAlias = Literal["efron", "breslow"]
OwnLoss: TypeAlias = Callable[..., Tensor]
"""`loss(output, y)`; one of a whole batch may also take `mask`, which is True where a slot holds an example."""

KINDS: tuple[str, ...] = get_args(TaskKind)
IGNORED = -100
"""The label of a position that is not to be predicted, as torch has it."""

LOSS_REMEDY = "use reduction='none', or say loss_of='batch' if it is no mean over examples"


def kind_of_labels(y: Tensor, hint: str | None = None) -> TaskKind:
    """What labels mean, where they alone say it; `hint` is what their source knows.

    Integers, one per example, are classes. Several per example are labels of which any number may hold if all are 0 or
    1, else a class for every position. Real numbers are targets of a regression: times and events of patients look
    the same, so that survival must be said.
    """
    if hint is not None:
        return checked_kind(hint)
    if y.is_floating_point():
        return "regression"
    if y.ndim == 1:
        return "classification"
    return "multi-label" if y.numel() == 0 or (int(y.min()) >= 0 and int(y.max()) <= 1) else "tagging"


def checked_kind(kind: str) -> TaskKind:
    """A kind of task, if it is one.

    Raises:
        ConfigError: otherwise.
    """
    if kind not in KINDS:
        raise ConfigError(f"Task: kind must be {', '.join(KINDS[:-1])} or {KINDS[-1]}. Got {kind!r}.")
    return kind  # type: ignore[return-value]


def takes_mask(loss: Callable[..., object]) -> bool:
    """Whether an own loss has a parameter `mask`, so that it can leave out empty slots itself."""
    try:
        return "mask" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return False


def check_own_loss(loss: OwnLoss | None, loss_of: LossOf) -> None:
    """Refuse a loss that is known to be of another kind than declared, before any data are seen.

    Raises:
        ConfigError: for an unknown kind, a kind without a loss, or a loss of torch that reduces over the batch.
    """
    if loss_of not in ("example", "batch"):
        raise ConfigError(f"Task: loss_of must be example or batch. Got {loss_of!r}.")
    if loss is None:
        if loss_of == "batch":
            raise ConfigError("Task: loss_of='batch' needs a loss of one's own. Got none; pass loss, or leave it out.")
        return
    if not callable(loss):
        raise ConfigError(f"Task: the loss must be a function of outputs and labels. Got {type(loss).__name__}.")
    reduction = getattr(loss, "reduction", "none")
    if loss_of == "example" and reduction in ("mean", "sum"):
        raise ConfigError(
            f"Task: the loss must give one value per example. Got {type(loss).__name__} with reduction='{reduction}';"
            f" {LOSS_REMEDY}."
        )


def checked_loss(value: Tensor, examples: int, loss_of: LossOf) -> Tensor:
    """What an own loss gave, [B], if it is what was declared. Shapes are known without looking at a number.

    Raises:
        ConfigError: if it is no tensor, or of another shape.
    """
    if not isinstance(value, Tensor):
        raise ConfigError(f"Task: the loss must return a tensor. Got {type(value).__name__}.")
    if loss_of == "batch":
        if value.numel() != 1:
            raise ConfigError(
                "Task: a loss with loss_of='batch' must give one value for the whole batch. Got shape"
                f" {tuple(value.shape)} for {examples} examples; leave loss_of out if it is one per example."
            )
        return value.reshape(()).expand(examples)
    if value.ndim == 0 or len(value) != examples or value.numel() != examples:
        raise ConfigError(
            f"Task: the loss must give one value per example, shape ({examples},) for {examples} examples. Got"
            f" {tuple(value.shape)}; {LOSS_REMEDY if value.ndim < 2 else 'take the mean over the other axes'}."
        )
    return value.reshape(examples)


# ---------------------------------------------------------------------------------------------------- kinds


def token_loss(output: Tensor, y: Tensor) -> Tensor:
    """Loss of each row of tokens, summed over what is to be predicted, [B]."""
    return F.cross_entropy(output.transpose(1, 2), y, reduction="none", ignore_index=IGNORED).sum(1)


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    """Mean over the targets of each example, [B]."""
    return (output.reshape(y.shape) - y).square().reshape(len(y), -1).mean(1)


def label_loss(output: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy of labels of which any number may hold, the mean over the labels of each example, [B]."""
    y = y.to(output.dtype)
    return F.binary_cross_entropy_with_logits(output.reshape(y.shape), y, reduction="none").reshape(len(y), -1).mean(1)


def classes_first(output: Tensor, y: Tensor) -> Tensor:
    """Outputs of a tagger as [B, C, positions], from [B, positions, C] (tokens) or [B, C, positions] (pictures).

    Raises:
        ConfigError: if neither has the labels' positions.
    """
    last, second = output.shape[1:-1] == y.shape[1:], output.shape[2:] == y.shape[1:]
    if output.ndim != y.ndim + 1 or not (last or second):
        raise ConfigError(
            "Task: a model that labels positions must give a row of logits for each, [*positions, classes] or"
            f" [classes, *positions] with positions {tuple(y.shape[1:])}. Got {tuple(output.shape[1:])}."
        )
    if last and (output.ndim == 3 or not second):
        return output.movedim(-1, 1)
    return output


def tag_loss(output: Tensor, y: Tensor, ignored: int = IGNORED) -> Tensor:
    """Cross-entropy of each example, the mean over its labelled positions, [B]."""
    value = F.cross_entropy(classes_first(output, y), y, reduction="none", ignore_index=ignored)
    count = (y != ignored).reshape(len(y), -1).sum(1).clamp_min(1)
    return value.reshape(len(y), -1).sum(1) / count


def tag_accuracy(output: Tensor, y: Tensor, ignored: int = IGNORED) -> Tensor:
    """Share of each example's labelled positions whose class is found, [B]."""
    held = (y != ignored).reshape(len(y), -1)
    right = (classes_first(output, y).argmax(1) == y).reshape(len(y), -1) & held
    return right.sum(1).to(output.dtype) / held.sum(1).clamp_min(1)


def cox_loss(output: Tensor, y: Tensor, mask: Tensor | None = None, ties: Ties = "efron") -> Tensor:
    """Cox's negative log partial likelihood of a batch, divided by its examples; 0 for an empty one.

    Each event is compared with those at risk in the batch, whose times are no shorter. With tied events Breslow's form
    takes all of them as at risk for each, Efron's takes away their share one after another.

    Args:
        output: risk scores, [B] or [B, 1]; higher is worse.
        y: time and event (1, or 0 if censored) of each example, [B, 2].
        mask: which slots hold an example; all if not given.
    """
    s, time, event = output.reshape(-1), y[:, 0], y[:, 1] > 0.5
    live = torch.ones_like(event) if mask is None else mask
    event = event & live
    risk = (time[None, :] >= time[:, None]) & live[None, :]  # [i, j]: j is at risk when i has its event
    # A finite floor: a row of which nobody is at risk belongs to an empty slot, and is multiplied by 0.
    top = torch.where(risk, s[None, :], torch.finfo(s.dtype).min / 4).amax(1).detach()
    top = torch.where(live, top, torch.zeros_like(top))
    each = torch.exp(torch.where(risk, s[None, :] - top[:, None], torch.full_like(s, -1e4)[None, :]))
    total = each.sum(1)
    if ties == "efron":
        tied = (time[None, :] == time[:, None]) & event[None, :] & event[:, None]
        before = torch.ones_like(tied).tril(-1)
        rank = (tied & before).sum(1).to(s.dtype) / tied.sum(1).clamp_min(1)  # l / d of the l-th of d tied events
        total = total - rank * (each * tied).sum(1)
    total = torch.where(event, total, torch.ones_like(total))
    terms = torch.where(event, total.log() + top - s, torch.zeros_like(s))
    return terms.sum() / live.sum().clamp_min(1)


def outputs_of(result: Any) -> Tensor:
    """The tensor of outputs that a model returned, itself or as `logits` of an output object.

    Raises:
        ConfigError: if there is none.
    """
    if isinstance(result, Tensor):
        return result
    found = getattr(result, "logits", None)
    if isinstance(found, Tensor):
        return found
    raise ConfigError(
        f"Task: the model must return a tensor, or an object whose 'logits' is one. Got {type(result).__name__};"
        " wrap the model in a module that returns its outputs."
    )
