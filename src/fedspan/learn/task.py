"""A task: a module used as a pure function of its parameters, with its loss, its measures and its head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.accelerator import HOST, to_device
from fedspan.learn.batches import Batch
from fedspan.learn.folded import Folded, is_folding, mapped_by_hand, run_watched, stacked
from fedspan.learn.folded import fold as fold_clients
from fedspan.learn.fused import Step, fuse
from fedspan.learn.layout import Layout
from fedspan.learn.losses import (
    IGNORED,
    LossOf,
    OwnLoss,
    TaskKind,
    Ties,
    check_own_loss,
    checked_kind,
    checked_loss,
    classes_first,
    cox_loss,
    label_loss,
    outputs_of,
    squared_error,
    tag_accuracy,
    tag_loss,
    takes_mask,
    token_loss,
)
from fedspan.learn.perceptron import Perceptron, perceptron_of
from fedspan.learn.precision import autocast, is_bf16
from fedspan.learn.products import product
from fedspan.randomness import fold, torch_seed, uniform
from fedspan.tree import EMPTY, Inputs, Params, Tree

_LOOP_ONLY: dict[type[nn.Module], str] = {
    nn.modules.batchnorm._NormBase: "use GroupNorm",
    nn.RNNBase: "write the cell out explicitly",
    nn.MultiheadAttention: "use explicit attention",
    nn.TransformerEncoderLayer: "use explicit attention",
}


class Dropout(nn.Module):
    """Dropout whose mask is a function of a key and the position: the same mapped, in a loop and on a node."""

    key: Tensor

    def __init__(self, p: float, channels: bool = False) -> None:
        super().__init__()
        self.p, self.channels = p, channels
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        shape = x.shape[:2] + (1,) * (x.ndim - 2) if self.channels else x.shape
        dtype = torch.float32 if x.dtype == torch.bfloat16 else x.dtype  # 8 bits would shift the probability
        return x * (uniform(self.key, shape, dtype) >= self.p) / (1.0 - self.p)


class Task:
    """A module as a pure function, with loss and measures.

    Args:
        model: the module, or a function that builds it (needed only if some layer has no `reset_parameters` and a
            method wants independent initialisations).
        kind: what the outputs and labels mean. `multi-label` takes a 0 or 1 for every output, `survival` a time and an
            event (1, or 0 if censored) per example and gives a risk, `tagging` a class for every position of the
            output (tokens, pixels), `language` token rows.
        head: prefix of the head's parameter names; by default the last `nn.Linear` in definition order (none for
            language, whose last layer is mostly the embedding itself).
        zero_head: start the head from zero. A body then learns the same whatever a client's classes are called.
        loss: own loss, `loss(output, y) -> [B]`, one value per example; a loss of torch with `reduction="none"`.
        loss_of: `batch` for a loss that is one value of a whole batch and no mean over its examples (contrastive,
            ranking). With a parameter `mask`, `loss(output, y, mask)`, it leaves out empty slots itself; without one
            clients are computed one after another. Evaluation weighs batches by their examples.
        ties: how Cox's partial likelihood takes events at the same time.
        ignored: the label of positions that are not to be predicted, of `tagging` and `language`.
        seed: key of the initialisation; the same tree on the server and on every client.

    Parameters with `requires_grad=False` stay constants inside the module: neither trained nor sent.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        kind: TaskKind = "classification",
        *,
        head: str | None = None,
        zero_head: bool = False,
        loss: OwnLoss | None = None,
        loss_of: LossOf = "example",
        ties: Ties = "efron",
        ignored: int = IGNORED,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        checked_kind(kind)
        check_own_loss(loss, loss_of)
        if ties not in ("efron", "breslow"):
            raise ConfigError(f"Task: ties must be efron or breslow. Got {ties!r}.")
        self._build = None if isinstance(model, nn.Module) else model
        if self._build is None:
            module = copy.deepcopy(model)
        else:
            with torch_seed(seed if seed is not None else 0, "init"):
                module = self._build()
        if not isinstance(module, nn.Module):
            raise ConfigError(f"Task: the model must be an nn.Module or build one. Got {type(module).__name__}.")
        self._origin: Task | None = None
        self.device = HOST
        self._elsewhere: dict[torch.device, Task] = {}
        self.kind, self.dtype, self.seed = kind, dtype, seed if seed is not None else 0
        self.module = self._prepare(module)
        self._own_loss, self._loss_of, self.ties, self.ignored = loss, loss_of, ties, ignored
        if self._build is None and seed is not None:
            self.module = self._redrawn(seed, "init")
        self.names = [k for k, p in self.module.named_parameters() if p.requires_grad]
        self._head_module, self.head = self._find_head(head)
        self._zero_head = zero_head
        if zero_head:
            self._cleared(self.module)
            if (build := self._build) is not None:
                self._build = lambda: self._cleared(build())
        self._eval = copy.deepcopy(self.module).eval()
        self.module.train()
        self.stats = [k for k, _ in self.module.named_buffers() if k.endswith(("running_mean", "running_var"))]
        self._dropouts = [f"{k}.key" for k, m in self.module.named_modules() if isinstance(m, Dropout)]
        self.body = [k for k in self.names if k not in set(self.head)]
        self._prepare_steps()
        self.kinds: dict[str, Task] = {}
        self.turns: tuple[str, ...] = ()
        self._smallest: Task | None = None
        if not self.names:
            raise ConfigError("Task: the model has no trainable parameters.")

    def _prepare_steps(self) -> None:
        """What training and evaluation find out about the module, from nothing."""
        self._fused: tuple[nn.Module, Step, set[str]] | None = None
        if not self.stats:
            module, step, names = fuse(self.module)
            self._fused = (module, step, set(names)) if names else None
        # How many layers should run in a forward pass; None once that has been seen to hold.
        self._fused_layers: int | None = sum(k.endswith("weight") for k in (self._fused[2] if self._fused else ()))
        self._with_clients: dict[bool, Folded | None] = {}
        self._head_task: tuple[Task | None] | None = None
        self._perceptron: tuple[Perceptron | None] | None = None
        self.layout = Layout(self.module)

    # ---------------------------------------------------------------- devices

    def on(self, device: torch.device) -> Task:
        """The same task with its constants and its start on another device; made once, and this one stays as it is."""
        if device == self.device:
            return self
        if device not in self._elsewhere:
            members = self.kinds or {"": self}
            moved = {k: task._moved(device) for k, task in members.items()}
            for k, task in members.items():
                task._elsewhere[device] = moved[k]
                if self.kinds:
                    least = next(name for name, other in members.items() if other is task._smallest)
                    moved[k].kinds, moved[k]._smallest = moved, moved[least]
        return self._elsewhere[device]

    def _moved(self, device: torch.device) -> Task:
        task, there = copy.copy(self), dict[tuple[int, torch.Size], Tensor]()
        task.module, task._eval = (_copied(module, device, there) for module in (self.module, self._eval))
        task.device, task._elsewhere = device, {}
        task._origin = None if self._origin is None else self._origin.on(device)
        task._prepare_steps()
        return task

    # ---------------------------------------------------------------- models of several kinds

    @staticmethod
    def family(kinds: Mapping[str, Task], turns: Sequence[str]) -> Task:
        """Tasks that differ in their models, as one: clients take the kinds named in `turns` in turn.

        Raises:
            ConfigError: if their heads differ in shape, so that features and classes could not be compared.
        """
        members = dict(kinds)
        shapes = {k: [tuple(t.init()[name].shape) for name in t.head] for k, t in members.items()}
        if len({str(s) for s in shapes.values()}) > 1:
            raise ConfigError(f"Task: models of different kinds must have heads of one shape. Got {shapes}.")
        sizes = {k: sum(p.numel() for p in t.init().values()) for k, t in members.items()}
        least = members[min(sizes, key=lambda k: sizes[k])]
        for task in members.values():
            task.kinds, task.turns, task._smallest = members, tuple(turns), least
        return members[turns[0]]

    def kind_of(self, client: int) -> str | None:
        """The kind of model a client has; None where all have the same."""
        return self.turns[client % len(self.turns)] if self.turns else None

    @property
    def smallest(self) -> Task:
        """Of several kinds the one with fewest parameters, which every client can afford; otherwise the task itself."""
        return self if self._smallest is None else self._smallest

    # ---------------------------------------------------------------- parameters

    def init(self) -> Params:
        """The common start: parameters and, for batch normalisation, running statistics; fresh copies each time."""
        state = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {k: state[k].detach().clone() for k in [*self.names, *self.stats]}

    def fresh(self, *parts: int | str) -> Params:
        """An independent standard initialisation keyed by the parts.

        Raises:
            ConfigError: if a layer owns parameters but has no `reset_parameters`.
        """
        module = self._redrawn(*parts)
        if self._zero_head:
            self._cleared(module)
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        drawn: Params = to_device({k: state[k].detach().clone() for k in [*self.names, *self.stats]}, self.device)
        return drawn

    def fingerprint(self) -> str:
        """A short hash of the common start: names, shapes and values."""
        return tree.digest(self.init())[:16]

    def need_head(self) -> list[str]:
        """Names of the head's parameters.

        Raises:
            ConfigError: if there is no head to keep apart.
        """
        if not self.head:
            raise ConfigError(
                "Task: this method needs a head, the last nn.Linear of the model, and the model has none."
                " Name one with model.head, set private_head = false where the method has it, or choose another method."
            )
        return self.head

    def estimate_statistics(self, params: Params, batches: Iterable[Batch]) -> Params:
        """`params` with running statistics that are the averages of the batches' own; not for mapped use."""
        total: Params = {}
        weight = 0
        momentum = {
            k: m.momentum for k, m in self.module.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)
        }
        for batch in batches:
            if len(batch.y) < 2:
                continue  # one example has no variance
            seen = {k: torch.zeros_like(params[k]) for k in self.stats}
            for t in seen.values():
                t.owned = True  # type: ignore[attr-defined]
            with torch.no_grad():
                self._call(self.module, params | seen, batch.x, batch.key if self._dropouts else None)
            weight += len(batch.y)
            for k, t in seen.items():
                share = t / (momentum[k.rpartition(".")[0]] or 1.0) * len(batch.y)
                total[k] = total[k] + share if k in total else share
        return params | {k: t / weight for k, t in total.items()}

    @property
    def head_layer(self) -> str | None:
        """Name of the module that is the head ('' if the whole model is), None if there is none."""
        return self._head_module if self.head else None

    @property
    def plain(self) -> Task:
        """The task as it was before its layers were converted; itself if they were not."""
        return self if self._origin is None else self._origin

    def whole(self, weights: Tree) -> bool:
        """Whether weights are those of one model: all that is trained, and constants of the module if any."""
        return self.init().keys() <= weights.keys() <= self.module.state_dict().keys()

    def converted(self, change: Callable[[nn.Module], nn.Module]) -> Task:
        """The same task with another module, for example with structured layers; it keeps its head and its loss.

        `change` may alter the copy it is given. What it draws comes from the task's seed, so that the server and all
        clients start alike.
        """
        with torch_seed(self.seed, "convert"):
            module = change(copy.deepcopy(self.module))
        task = Task(module, self.kind, head=self.head_layer, **self._settings())
        task.seed, task._origin = self.seed, self.plain
        build = self._build
        task._build = None if build is None else lambda: change(self._prepare(build()))
        return task

    # ---------------------------------------------------------------- the function

    def predict(self, params: Params, x: Inputs) -> Tensor:
        """Outputs in evaluation mode."""
        return self._call(self._eval, params, x)

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Mean training loss over the examples of a batch; 0 for an empty one."""
        rows = batch.folded if params and self.loss_of == "example" and not is_bf16() else None
        if rows is not None and (folded := self._folded(self.module)) is not None:
            held = self._with_keys(params, batch.key) if self._dropouts else params
            return folded.of_rows(held, rows, self.example_loss, self.layout)
        return self.mean_loss(self.output(params, batch), batch)

    def mean_loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Mean loss of given outputs over the examples of a batch; 0 for an empty one."""
        return batch.mean(self.example_loss(output, batch.y, batch.mask))

    def output(self, params: Params, batch: Batch) -> Tensor:
        """Outputs in training mode."""
        return self._call(self.module, params, batch.x, batch.key if self._dropouts else None)

    @property
    def perceptron(self) -> Perceptron | None:
        """The layers of a classifying perceptron, whose steps can be written out; None of any other task."""
        if self._perceptron is None:
            written = self.responds and not self.stats and not self._dropouts
            self._perceptron = (perceptron_of(self.module) if written else None,)
        return self._perceptron[0]

    def sgd_step(self, params: Params, batch: Batch, lr: float, fresh: bool) -> Params | None:
        """One plain SGD step on the loss with the step of linear layers fused into their backward pass.

        With `fresh` the given tensors are left alone, otherwise they are changed in place. None, and nothing changed,
        if the model or this choice of parameters cannot be stepped this way; the first, fresh step decides.
        """
        if self._fused is None or is_bf16() or params.keys() != set(self.names):
            return None
        module, step, names = self._fused
        leaf = {k: p.detach().requires_grad_() for k, p in params.items()}
        step.begin(leaf, lr, fresh)
        # Fused layers find their parameters themselves; the first time all are given, to see if others use them too.
        given = {k: p for k, p in leaf.items() if k not in names} if self._fused_layers is None else leaf
        with torch.enable_grad():
            out = self._call(module, given, batch.x, batch.key if self._dropouts else None)
            self.mean_loss(out, batch).backward()  # type: ignore[no-untyped-call]
        if self._fused_layers is not None:
            if step.calls != self._fused_layers or any(leaf[k].grad is not None for k in names):
                self._fused = None  # a layer runs twice or not at all, or its weight serves outside it too
                return None
            self._fused_layers = None
        for k, p in leaf.items():
            if k in step.new:
                continue
            held, g = p.detach(), p.grad
            if g is None:
                step.new[k] = held.clone() if fresh else held
            else:
                step.new[k] = torch.sub(held, g, alpha=lr) if fresh else held.sub_(g, alpha=lr)
        return {k: step.new[k] for k in params}

    def example_loss(self, output: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Loss of each example, [B]; every example of a batch has the batch's where the loss is one of batches.

        `mask` says which slots hold an example; those of others may be anything finite.
        """
        if self.loss_of == "batch":
            return checked_loss(self._batch_loss(output, y, mask), len(y), "batch")
        if self._own_loss is not None:
            return checked_loss(self._own_loss(output, y), len(y), "example")
        if self.kind == "classification":
            return F.cross_entropy(output, y, reduction="none")
        if self.kind == "multi-label":
            return label_loss(output, y)
        if self.kind == "tagging":
            return tag_loss(output, y, self.ignored)
        if self.kind == "language":
            return token_loss(output, y) / (y != IGNORED).sum(1).clamp_min(1)
        return squared_error(output, y)

    def _batch_loss(self, output: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        """The loss of a whole batch, of the slots that hold an example."""
        if self._own_loss is None:
            return cox_loss(output, y, mask, self.ties)
        if not takes_mask(self._own_loss):
            return self._own_loss(output, y)
        return self._own_loss(output, y, mask=_all_of(y) if mask is None else mask)

    @property
    def loss_of(self) -> LossOf:
        """Whether the loss is one of examples or of whole batches."""
        own = self._own_loss is not None
        return self._loss_of if own else "batch" if self.kind == "survival" else "example"

    def output_gradient(self, output: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """∂(sum of the examples' losses)/∂output, in closed form where there is one."""
        if self.responds:
            return output.softmax(1) - self.target(output, y)
        if self._own_loss is None and self.kind == "regression":
            gap = 2 * (output - y.reshape(output.shape))
            return gap / max(1, gap[0].numel())
        live = _all_of(y) if mask is None else mask
        result: Tensor = grad(lambda o: (self.example_loss(o, y, mask) * live).sum())(output)
        return result

    @property
    def responds(self) -> bool:
        """Whether ∂loss/∂output is softmax(output) − `target`."""
        return self._own_loss is None and self.kind == "classification"

    def target(self, output: Tensor, y: Tensor) -> Tensor:
        """1 for the class of each example, [B, C]."""
        return F.one_hot(y, output.shape[1]).to(output.dtype)

    @property
    def own_loss(self) -> bool:
        """Whether the loss is one of the user's own."""
        return self._own_loss is not None

    def curvature_bound(self) -> float | None:
        """A number c with ∂²loss/∂output² ≤ c·I for one example, whatever the output; None where none is known."""
        if self._own_loss is not None:
            return None
        # Of the softmax Böhning's bound, of the logistic function σ(1 − σ) ≤ 1/4.
        return {"classification": 0.5, "multi-label": 0.25, "regression": 2.0}.get(self.kind)

    def measures(self, output: Tensor, y: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """What evaluation averages over the examples: loss, and accuracy or squared error, each [B].

        Of several labels all must be right for an example to count as right; of positions it is the share that is.
        Of token rows with the usual loss there is also its sum over a row, `token_loss`, and how many `tokens` that is
        over: evaluation divides the sums, so that long answers count for more than short ones.
        """
        out = {"loss": self.example_loss(output, y, mask)}
        if self.kind == "language" and self._own_loss is None:
            out |= {"token_loss": token_loss(output, y), "tokens": (y != IGNORED).sum(1).to(output.dtype)}
        if self.kind == "classification":
            out["accuracy"] = (output.argmax(1) == y).to(output.dtype)
        elif self.kind == "multi-label":
            out["accuracy"] = ((output.reshape(y.shape) > 0) == (y > 0)).reshape(len(y), -1).all(1).to(output.dtype)
        elif self.kind == "tagging":
            out["accuracy"] = tag_accuracy(output, y, self.ignored)
        elif self.kind == "regression":
            out["squared_error"] = squared_error(output, y)
        return out

    @property
    def summed(self) -> frozenset[str]:
        """Names of the measures of every evaluation that are means over examples."""
        of_kind = {"regression": {"squared_error"}, "language": {"perplexity"}, "survival": set[str]()}
        return frozenset({"loss", *of_kind.get(self.kind, {"accuracy"})})

    def scores(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Labels and predictions as metrics take them: probabilities of classes or labels, targets, risks.

        Positions of a tagger become rows, without those that are not labelled.
        """
        if self.kind == "classification":
            return y, output.softmax(1)
        if self.kind == "multi-label":
            return y, output.reshape(y.shape).sigmoid()
        if self.kind == "survival":
            return y, output.reshape(-1)
        if self.kind == "regression":
            return y, output.reshape(y.shape)
        rows, flat = classes_first(output, y).movedim(1, -1), y.reshape(-1)
        held = flat != (IGNORED if self.kind == "language" else self.ignored)
        return flat[held], rows.reshape(len(flat), -1)[held].softmax(1)

    def features(self, params: Params, x: Inputs, train: bool = False) -> Tensor:
        """The head's input."""
        return self._with_features(self.module if train else self._eval, params, x)[0]

    def features_of(self, params: Params, batch: Batch) -> Tensor:
        """The head's input for each slot of a batch; anything finite where one is empty."""
        found = self._of_rows(self._eval, params, batch)
        return self.features(params, batch.x) if found is None else found[0]

    def features_and_output(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """The head's input and the outputs in training mode, from one pass; anything finite where a slot is empty."""
        found = self._of_rows(self.module, params, batch)
        if found is not None:
            return found
        return self._with_features(self.module, params, batch.x, batch.key if self._dropouts else None)

    def _of_rows(self, module: nn.Module, params: Params, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Features and outputs where clients are folded, from a pass over the examples without the empty slots."""
        rows = batch.folded if params and self.need_head() and not is_bf16() else None
        if rows is None or (folded := self._folded(module)) is None:
            return None
        held = self._with_keys(params, batch.key) if self._dropouts and module.training else params
        return folded.with_inputs(held, rows, self._head_module, self.layout)

    def _with_features(
        self, module: nn.Module, params: Params, x: Inputs, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.need_head()
        output, seen = self._run(module, params, x, key, self._head_module)
        assert seen is not None
        return seen, output

    def from_features(self, params: Params, features: Tensor) -> Tensor:
        """Outputs of the head for given features; `params` needs only the head's entries."""
        self.need_head()
        own = self.of_head(params)
        result: Tensor = functional_call(self._eval.get_submodule(self._head_module), own, (features,))
        return result

    def outputs_of_heads(self, heads: Params, features: Tensor) -> Tensor:
        """Outputs [r, classes, n] of r heads for the features of n examples; `heads` are stacks of their parameters.

        For a linear head they are one product; they cannot be differentiated.
        """
        self.need_head()
        own, module = self.of_head(heads), self._eval.get_submodule(self._head_module)
        with torch.no_grad():
            if type(module) is nn.Linear and features.ndim == 2 and len(own) == 1 + (module.bias is not None):
                return stacked(_outputs_of_heads, *own.values(), features)
            found: Tensor = vmap(lambda head: functional_call(module, head, (features,)))(own)
        return found.movedim(1, -1)

    def head_alone(self, x: Inputs, mapped: bool = False) -> Task | None:
        """The head as a task of its own, whose inputs are features; seen on two examples when first asked for.

        None where training it on stored features would be something else: the body or the head draws random numbers or
        keeps statistics, the body reads the head's parameters, or the head's outputs are not the model's.
        """
        if self._head_task is None:
            with mapped_by_hand() if mapped else nullcontext():
                self._head_task = (self._find_head_alone(tree.take(x, slice(2))),)
        return self._head_task[0]

    def _find_head_alone(self, x: Inputs) -> Task | None:
        if not self.head or not self._head_module or self._dropouts or self.stats:
            return None
        params = {k: p.requires_grad_(k in self.head) for k, p in self.init().items()}
        with torch.enable_grad():
            features, output = self._with_features(self.module, params, x)
            alone = functional_call(self.module.get_submodule(self._head_module), self.of_head(params), (features,))
        if features.requires_grad or not isinstance(alone, Tensor) or not torch.equal(alone, output):
            return None
        return Task(self.module.get_submodule(self._head_module), self.kind, head="", **self._settings())

    def of_head(self, params: Params) -> Params:
        """The head's entries, by their names in the head."""
        prefix = self._head_module and self._head_module + "."
        return {k[len(prefix) :]: v for k, v in params.items() if k.startswith(prefix)}

    def _settings(self) -> dict[str, Any]:
        """What another task of the same loss is made with."""
        own: dict[str, Any] = {"loss": self._own_loss, "loss_of": self._loss_of, "dtype": self.dtype}
        return own | {"ties": self.ties, "ignored": self.ignored}

    # ---------------------------------------------------------------- what the engine needs

    def unmappable(self) -> list[str]:
        """Why the model cannot be trained for many clients at once: one sentence per layer."""
        whole = "Task: a loss of a whole batch (loss_of='batch') cannot be computed for many clients at once, whose"
        whole += " batches are filled up to one length; give it a parameter mask, or run with train.mapping='loop'."
        own, mapped = self._own_loss, self._loss_of == "example"
        return ([] if mapped or own is None or takes_mask(own) else [whole]) + [
            f"Task: {type(m).__name__} at '{name}' cannot be trained for many clients at once;"
            f" {next(r for t, r in _LOOP_ONLY.items() if isinstance(m, t))}, or run with train.mapping='loop'."
            for name, m in self.module.named_modules()
            if isinstance(m, tuple(_LOOP_ONLY))
        ]

    def has(self, *kinds: type[nn.Module]) -> bool:
        """Whether any layer is of one of these kinds."""
        return any(isinstance(m, kinds) for m in self.module.modules())

    def module_with(self, params: Params) -> nn.Module:
        """A copy of the module, in evaluation mode, holding these parameters."""
        module = copy.deepcopy(self._eval)
        module.load_state_dict(params, strict=False)
        return module

    def _call(self, module: nn.Module, params: Params, x: Inputs, key: Tensor | None = None) -> Tensor:
        return self._run(module, params, x, key)[0]

    def _run(
        self, module: nn.Module, params: Params, x: Inputs, key: Tensor | None, layer: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs, and what goes into `layer` on the way; in float32, also where the pass itself is in bf16."""
        if not (is_bf16() and module.training):
            return self._pass(module, params, x, key, layer)
        with autocast(tree.leaves(x)[0].device):
            output, seen = self._pass(module, params, x, key, layer)
        return output.float(), None if seen is None else seen.float()

    def _pass(
        self, module: nn.Module, params: Params, x: Inputs, key: Tensor | None, layer: str | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.stats and module.training:
            if not self.layout.tried:
                with torch.no_grad():  # a training pass that is repeated would count its statistics twice
                    self._pass(self._eval, params, x, None, None)
            # The forward pass writes running statistics in place: only into tensors the training loop owns.
            params = {k: v if k not in self.stats or hasattr(v, "owned") else v.clone() for k, v in params.items()}
        if key is not None:
            params = self._with_keys(params, key)
        if params and is_folding() and isinstance(x, Tensor) and (folded := self._folded(module)) is not None:
            found = folded(params, x, layer, self.layout)
            if found is not None:
                return found

        def run(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
            args, named = _arguments(inputs)

            def call() -> Tensor:
                return outputs_of(functional_call(module, params, args, named) if params else module(*args, **named))

            return run_watched(module, layer, call)

        return self.layout(run, x)

    def _with_keys(self, params: Params, key: Tensor) -> Params:
        """Parameters, and a key for each dropout layer."""
        return params | {name: fold(key, i) for i, name in enumerate(self._dropouts)}

    def _folded(self, module: nn.Module) -> Folded | None:
        """The module with a client axis in its layers, made when first asked for; None where there is no such form."""
        training = module is self.module
        if self.stats or not (training or module is self._eval):
            return None
        if training not in self._with_clients:
            self._with_clients[training] = fold_clients(module, Dropout)
        return self._with_clients[training]

    def _prepare(self, module: nn.Module) -> nn.Module:
        if self.dtype is not None:
            module = module.to(self.dtype)
        for name, m in list(module.named_modules(remove_duplicate=False)):
            if isinstance(m, nn.AlphaDropout | nn.FeatureAlphaDropout):
                raise ConfigError(f"Task: {type(m).__name__} at '{name}' has no keyed form; use nn.Dropout.")
            if isinstance(m, nn.modules.dropout._DropoutNd) and name:
                parent, _, last = name.rpartition(".")
                channels = isinstance(m, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d)
                setattr(module.get_submodule(parent) if parent else module, last, Dropout(m.p, channels))
            if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats and m.momentum is None:
                raise ConfigError(
                    f"Task: {type(m).__name__} at '{name}' must have a momentum, as its step counter is not shared."
                )
        return module

    def _redrawn(self, *parts: int | str) -> nn.Module:
        with torch_seed(*parts):
            if self._build is not None:
                return self._prepare(self._build())
            module = _copied(self.module, HOST, {})  # where draws are the same, whatever computes with them
            for name, m in module.named_modules():
                if not any(p.requires_grad for p in m.parameters(recurse=False)):
                    continue
                reset: Any = getattr(m, "reset_parameters", None)
                if reset is None:
                    raise ConfigError(
                        f"Task: {type(m).__name__} at '{name or 'the model'}' has no reset_parameters to draw another"
                        " initialisation. Pass a function that builds the model instead of the model."
                    )
                reset()
        return module

    def _cleared(self, module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for name, p in module.named_parameters():
                if name in self.head:
                    p.zero_()
        return module

    def _find_head(self, prefix: str | None) -> tuple[str, list[str]]:
        if prefix is None and self.kind == "language":
            return "", []
        if prefix is None:
            modules = [(k, m) for k, m in self.module.named_modules() if isinstance(m, nn.Linear)]
            linear = [k for k, m in modules if any(p.requires_grad for p in m.parameters())]
            prefix = linear[-1] if linear else None
            if prefix is None:
                return "", []
        names = [k for k in self.names if k == prefix or k.startswith(prefix + ".") or not prefix]
        if not names:
            raise ConfigError(f"Task: no trainable parameter is called '{prefix}' or starts with '{prefix}.'.")
        return prefix, names


def _outputs_of_heads(*given: Tensor) -> Tensor:
    """Outputs [C, r, classes, n] for weights [C, r, classes, features], biases [C, r, classes] if any, and features."""
    weight, *bias, features = given
    C, r, classes, _ = weight.shape
    out = product(weight.reshape(C, r * classes, -1), features.mT).view(C, r, classes, -1)
    return out.add_(bias[0][..., None]) if bias else out


def _copied(module: nn.Module, device: torch.device, there: dict[tuple[int, torch.Size], Tensor]) -> nn.Module:
    """A copy of a module on a device; memory that copies share (constants of a language model) is shared there too.

    Args:
        there: by address and shape what has been moved.
    """
    module = copy.deepcopy(module)
    same: dict[int, tuple[Tensor, Any]] = {}  # tensors that stand in several layers stay one
    for m in module.modules():
        for held in (m._parameters, m._buffers):
            for name, t in held.items():
                if t is None or t.device == device:
                    continue
                if id(t) not in same:
                    new = there.setdefault((t.data_ptr(), t.shape), t.detach().to(device))
                    same[id(t)] = t, nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new
                held[name] = same[id(t)][1]
    return module


class LossBeside:
    """A task's loss as a function of some of its parameters, beside others that stay as they are.

    Args:
        prefix: what the names of the parameters that are trained have before those of the task.
    """

    def __init__(self, task: Task, fixed: Params = EMPTY, prefix: str = "") -> None:
        self.task, self.fixed, self.prefix = task, fixed, prefix

    def __call__(self, params: Params, batch: Batch) -> Tensor:
        return self.task.loss(self.fixed | self.named(params), batch)

    def named(self, params: Params) -> Params:
        """Parameters by the task's names."""
        return {k.removeprefix(self.prefix): v for k, v in params.items()} if self.prefix else params


def _all_of(y: Tensor) -> Tensor:
    """True for every example."""
    return torch.ones(len(y), dtype=torch.bool, device=y.device)


def _arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as a module's arguments: a dict by name, a tuple by place, a tensor as the only one."""
    if isinstance(x, dict):
        return (), x
    return (x if isinstance(x, tuple) else (x,)), {}
