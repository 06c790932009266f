"""The only training loops: SGD and AdamW on any tree of parameters, mapped over clients or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import grad, grad_and_value

from fedspan import tree
from fedspan.learn.batches import Batch, Batches
from fedspan.learn.folded import Leaves, Pull, is_folding, mapped_by_hand, unwrapped, wrapped
from fedspan.learn.perceptron import descend
from fedspan.learn.precision import is_bf16
from fedspan.learn.task import LossBeside, Task
from fedspan.tree import Params, Tree

Loss: TypeAlias = Callable[[Any, Batch], Tensor]
"""A scalar function of a tree of parameters and a batch."""

Prox: TypeAlias = Mapping[str, Callable[[Tensor], Tensor]]
"""What is done to single parameters (by path) after every step: a proximal step or a projection."""


class Near:
    """The loss F(p) + λ/2 Σ ‖p − q‖² over the parameters that q names.

    Where clients are folded, `fit` adds the term's gradient λ (p − q) itself, in the product that takes the step.
    """

    def __init__(self, loss: Loss, towards: Params, strength: float) -> None:
        self.loss, self.towards, self.strength = loss, towards, strength

    def __call__(self, params: Params, batch: Batch) -> Tensor:
        far = sum((params[k] - q).square().sum() for k, q in self.towards.items())
        return self.loss(params, batch) + self.strength / 2 * far

    def pulls(self, names: Iterable[str]) -> list[Pull | None]:
        """The term of each of these parameters, without vmap's wrappers."""
        held = {k: unwrapped(q) for k, q in self.towards.items()}
        return [Pull(held[k][0].detach(), self.strength, held[k][1]) if k in held else None for k in names]


StartState: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
Step: TypeAlias = Callable[[list[Tensor], list[Tensor], list[Tensor], "Tensor | None"], None]

NO_PROX: Prox = {}


def gradient(loss: Loss, params: Any, batch: Batch) -> Any:
    """∂loss/∂params on one batch, as a tree of the shape of `params`."""
    return gradient_and_value(loss, params, batch)[0]


def gradient_and_value(loss: Loss, params: Any, batch: Batch) -> tuple[Any, Tensor]:
    """∂loss/∂params on one batch, and the loss itself."""
    if batch.mapped and is_folding():
        flat = tree.flatten(params)
        zero = batch.w.sum() * 0  # gives every client parameters of its own, where they are common to all
        leaves = Leaves([t + zero.to(t.dtype) for t in flat.values()])
        with torch.enable_grad():
            value = _counted(loss, _assemble(params, dict(zip(flat, leaves.given))), batch)
        slopes = {k: g for k, g in zip(flat, leaves.gradients(value)) if g is not None}
        return _assemble(params, slopes), value.detach()
    if batch.mapped:
        both: tuple[Any, Tensor] = grad_and_value(lambda p: _counted(loss, p, batch))(params)
        return both
    at = tree.map(lambda p: p.detach().requires_grad_(), params)
    with torch.enable_grad():
        value = loss(at, batch)
        return _slopes(value, at), value.detach()


def hessian_product(loss: Loss, params: Any, direction: Any, batch: Batch) -> Any:
    """∇²loss(params) · direction on one batch, by differentiating ⟨∇loss, direction⟩."""
    if batch.mapped:
        return grad(lambda p: tree.dot(grad(lambda q: _counted(loss, q, batch))(p), direction))(params)
    at = tree.map(lambda p: p.detach().requires_grad_(), params)
    with torch.enable_grad():
        return _slopes(tree.dot(_slopes(loss(at, batch), at, again=True), direction), at)


def _counted(loss: Loss, params: Any, batch: Batch) -> Tensor:
    """The loss where there is any example: an empty slot of a mapped run is no step, whatever terms a loss has.

    A term must still be finite there, as ∞·0 is not 0.
    """
    value = loss(params, batch)
    return value if batch.rows is not None and batch.rows.all_live else value * batch.live


def _slopes(value: Tensor, at: Any, again: bool = False) -> Any:
    """∂value/∂at by ordinary autograd; with `again` the result can be differentiated itself."""
    leaves = tree.leaves(at)
    grads = iter(torch.autograd.grad(value, leaves, create_graph=again, allow_unused=True, materialize_grads=True))
    return tree.map(lambda _: next(grads), at)


def sgd(
    loss: Loss,
    params: Tree,
    batches: Iterable[Batch],
    lr: float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    prox: Prox = NO_PROX,
) -> Tree:
    """Stochastic gradient descent, one step per batch, as `torch.optim.SGD`. An empty batch changes nothing.

    With `clip`, gradients of all parameters together are cut to that norm before anything else is done to them.
    """
    simple = not momentum and not weight_decay and clip is None
    if isinstance(batches, Batches) and simple and not prox:
        result = (_written_out if batches.mapped else _fused)(loss, params, batches, lr)
        if result is not None:
            return result

    def start(p: list[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(a) for a in p] if momentum else []

    plain, step = lr if simple else None, _descend(lr, momentum, weight_decay)
    return _train(loss, params, batches, start, step, prox, plain, True, clip)[0]


def sgd_from(
    loss: Loss,
    params: Tree,
    velocity: Params,
    batches: Iterable[Batch],
    lr: float,
    *,
    momentum: float,
    weight_decay: float = 0.0,
    clip: float | None = None,
    prox: Prox = NO_PROX,
) -> tuple[Tree, Params]:
    """`sgd` whose momentum goes on from `velocity` (by path, statistics left out); gives the velocity back, too."""
    names = [k for k in tree.flatten(params) if not is_statistic(k)]

    def start(p: list[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(a) + velocity[k] for k, a in zip(names, p)]

    step = _descend(lr, momentum, weight_decay)
    params, state = _train(loss, params, batches, start, step, prox, stacked=True, clip=clip)
    return params, dict(zip(names, state)) if state else velocity


def _descend(lr: float, momentum: float, weight_decay: float) -> Step:
    def step(p: list[Tensor], g: list[Tensor], velocity: list[Tensor], live: Tensor | None) -> None:
        if weight_decay:
            g = [a + weight_decay * b for a, b in zip(g, p)]
        if momentum and live is None:
            torch._foreach_mul_(velocity, momentum)
            torch._foreach_add_(velocity, g)
            g = velocity
        elif momentum:
            for v, a in zip(velocity, g):
                v.copy_(_if(live, momentum * v + a, v))
            g = velocity
        if live is None:
            torch._foreach_sub_(p, g, alpha=lr)
            return
        for a, b in zip(p, g):  # a masked batch has gradient zero, but momentum and decay would still move
            a.sub_(_if(live, b, torch.zeros_like(b)) if momentum or weight_decay else b, alpha=lr)

    return step


def adamw(
    loss: Loss,
    params: Tree,
    batches: Iterable[Batch],
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float | None = None,
    prox: Prox = NO_PROX,
) -> Tree:
    """AdamW, one step per batch, as `torch.optim.AdamW`. An empty batch changes nothing, not even the step count."""
    b1, b2 = betas

    def start(p: list[Tensor]) -> list[Tensor]:
        return [*(torch.zeros_like(a) for a in p), *(torch.zeros_like(a) for a in p), p[0].sum() * 0]

    def step(p: list[Tensor], g: list[Tensor], state: list[Tensor], live: Tensor | None) -> None:
        count = state[-1]
        count.copy_(_if(live, count + 1, count))
        n = count.clamp_min(1)
        for a, x, m, v in zip(p, g, state, state[len(p) :]):
            m.copy_(_if(live, b1 * m + (1 - b1) * x, m))
            v.copy_(_if(live, b2 * v + (1 - b2) * x * x, v))
            move = lr * (m / (1 - b1**n)) / ((v / (1 - b2**n)).sqrt() + eps) + lr * weight_decay * a
            a.sub_(_if(live, move, torch.zeros_like(a)))

    return _train(loss, params, batches, start, step, prox, clip=clip)[0]


def _fused(loss: Loss, params: Tree, batches: Batches, lr: float) -> Tree | None:
    """Plain SGD on a task's own loss, with fused steps; None where that does not apply."""
    task = getattr(loss, "__self__", None)
    if not isinstance(task, Task) or getattr(loss, "__func__", None) is not Task.loss or not params:
        return None
    new: Tree | None = params
    fresh = True
    for batch in batches:
        assert new is not None
        new = task.sgd_step(new, batch, lr, fresh)
        if new is None:  # decided by the first batch, before anything was changed
            return None
        fresh = False
    return new


def _written_out(loss: Loss, params: Tree, batches: Batches, lr: float) -> Tree | None:
    """Plain SGD of a perceptron for all folded clients at once; None where that does not apply."""
    near, inner = (loss, loss.loss) if isinstance(loss, Near) else (None, loss)
    task = getattr(inner, "__self__", None)
    if isinstance(task, Task) and getattr(inner, "__func__", None) is Task.loss:
        inner = LossBeside(task)
    if not isinstance(inner, LossBeside) or not is_folding() or is_bf16() or (net := inner.task.perceptron) is None:
        return None
    moved = inner.named(params)
    others = {k: v for k, v in inner.fixed.items() if k not in moved}
    if not moved or not moved.keys() <= set(net.names) <= moved.keys() | others.keys():
        return None
    rows = batches.of_clients(net.flat)
    if rows is None:
        return None
    pulls = {} if near is None else dict(zip(moved, near.pulls(params)))
    given, fixed = ({k: unwrapped(p) for k, p in part.items()} for part in (moved, tree.select(others, net.names)))
    with mapped_by_hand(), torch.no_grad():
        found = descend(net, given, fixed, rows, lr, pulls)
    return {k: wrapped(t) for k, t in zip(params, found.values())}


def is_statistic(path: str) -> bool:
    """Whether a leaf is a running statistic of batch normalisation: carried along, never trained."""
    return path.endswith(("running_mean", "running_var"))


def _train(
    loss: Loss,
    params: Tree,
    batches: Iterable[Batch],
    start: StartState,
    step: Step,
    prox: Prox,
    plain: float | None = None,
    stacked: bool = False,
    clip: float | None = None,
) -> tuple[Tree, list[Tensor]]:
    """Run `step` and `prox` once per batch on copies of `params`; running statistics ride along and are not trained.

    `plain` is the learning rate where a step is −lr·gradient and nothing else: folded layers may then take it.
    `stacked` says that a step does the same to stacks of parameters, so that it can be taken without vmap.
    Returns the parameters and the optimiser's state, which is empty if there was no batch.
    """
    flat = tree.flatten(params)
    trained = [k for k in flat if not is_statistic(k)]
    if not trained:
        return params, []
    held: dict[str, Tensor] = {}  # what the loss sees: trained copies and owned statistics
    p: list[Tensor] = []
    state: list[Tensor] = []
    leaves: Leaves | None = None
    given: Any = None
    for batch in batches:
        if not p:
            # Adding a mapped zero turns shared starting values into per-client ones, so that steps can be in place.
            zero = (batch.w.sum() * 0).to(flat[trained[0]].dtype) if batch.mapped else None
            for path, t in flat.items():
                held[path] = t.detach().clone() if zero is None else t + zero
                if is_statistic(path):
                    held[path].owned = True  # type: ignore[attr-defined]
            p = [held[k] for k in trained]
            state = start(p)
            if batch.mapped and is_folding():
                leaves = Leaves(p)
                given = _assemble(params, held | dict(zip(trained, leaves.given)))
        if leaves is not None:
            near = loss if isinstance(loss, Near) and batch.rows is not None and any(batch.rows.counts) else None
            with torch.enable_grad():
                value = _counted(loss if near is None else near.loss, given, batch)
            live = None if batch.rows is None or batch.rows.all_live else batch.rows.live(value.dtype)
            found = leaves.gradients(value, plain, () if near is None else near.pulls(trained), live)
            if clip is not None:  # `plain` is None then, and every parameter has its gradient here
                found = [*clipped([g for g in found if g is not None], clip)]
            _step_folded(step, leaves, p, found, state, batch, stacked)
        elif batch.mapped:
            g = tree.leaves(grad(lambda q, b=batch: _counted(loss, q, b))(_assemble(params, held)))
            step(p, g if clip is None else clipped(g, clip), state, batch.live)
        else:
            for a in p:
                a.requires_grad_()
            with torch.enable_grad():
                value = loss(_assemble(params, held), batch)
                g = list(torch.autograd.grad(value, p, allow_unused=True, materialize_grads=True))
            for a in p:
                a.requires_grad_(False)
            step(p, g if clip is None else clipped(g, clip), state, None)
        everybody = not batch.mapped or (batch.rows is not None and batch.rows.all_live)
        for path, f in prox.items():
            held[path].copy_(_if(None if everybody else batch.live, f(held[path]), held[path]))
    if not p:
        return params, []
    for path in flat.keys() - set(trained):
        del held[path].owned  # type: ignore[attr-defined]
    result: Tree = _assemble(params, held)
    return result, state


def clipped(g: list[Tensor], most: float) -> list[Tensor]:
    """The same gradients, or where their common norm is above `most` multiples of them that have it."""
    size = torch.stack([a.square().sum() for a in g]).sum().sqrt()
    part = (most / size.clamp_min(torch.finfo(size.dtype).tiny)).clamp_max(1.0)
    return [a * part for a in g]


def _step_folded(
    step: Step,
    leaves: Leaves,
    p: list[Tensor],
    found: list[Tensor | None],
    state: list[Tensor],
    batch: Batch,
    stacked: bool,
) -> None:
    """One step of all clients with the gradients that were found; parameters without one have taken theirs.

    Where each client has an example and takes it, `stacked`: on the parameters of all at once, without vmap.
    """
    moved = [(k, g) for k, g in enumerate(found) if g is not None]
    if not moved:
        return
    slopes, live = [g for _, g in moved], None if batch.rows is not None and batch.rows.all_live else batch.live
    if live is not None or not stacked:
        step([p[k] for k, _ in moved], slopes, state, live)
        return
    inner, velocity = ([unwrapped(t)[0] for t in part] for part in (slopes, state))
    with mapped_by_hand():
        step([leaves.stacks[k] for k, _ in moved], inner, velocity, None)


def _assemble(like: Any, flat: dict[str, Tensor], prefix: str = "") -> Any:
    """A tree of the shape of `like` with leaves from a flat dict (empty sub-trees kept)."""
    if isinstance(like, dict):
        return {k: _assemble(v, flat, f"{prefix}/{k}" if prefix else k) for k, v in like.items()}
    return flat[prefix]


def _if(live: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if live is None else torch.where(live, new, old)


def mean_gradient(loss: Loss, params: Any, batches: Iterable[Batch]) -> Any:
    """Gradient of the mean loss over all examples of a stream: batch gradients weighted by their examples."""
    total: Any = None
    weight: Tensor | float = 0.0
    for batch in batches:
        n = batch.w.sum()
        part = tree.map(lambda a, n=n: a * n, gradient(loss, params, batch))
        total = part if total is None else tree.add(total, part)
        weight = weight + n
    if total is None:
        return tree.zeros_like(params)
    scale = torch.as_tensor(weight).clamp_min(1)
    return tree.map(lambda a: a / scale, total)
