"""A task: a module used as a pure function of its parameters, with its loss, its measures and its head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

from fedspan import tree
from fedspan.errors import ConfigError
from fedspan.learn.batches import Batch
from fedspan.learn.folded import Folded, is_folding, run_watched
from fedspan.learn.folded import fold as fold_clients
from fedspan.learn.fused import Step, fuse
from fedspan.randomness import fold, torch_seed, uniform
from fedspan.tree import Params, Tree

TaskKind: TypeAlias = Literal["classification", "regression", "language"]
LossOf: TypeAlias = Literal["example", "batch"]
OwnLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_LOOP_ONLY: dict[type[nn.Module], str] = {
    nn.modules.batchnorm._NormBase: "use GroupNorm",
    nn.RNNBase: "write the cell out explicitly",
    nn.MultiheadAttention: "use explicit attention",
    nn.TransformerEncoderLayer: "use explicit attention",
}

_LOSS_REMEDY = "use reduction='none', or say loss_of='batch' if it is no mean over examples"


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
        return x * (uniform(self.key, shape, x.dtype) >= self.p) / (1.0 - self.p)


class Task:
    """A module as a pure function, with loss and measures.

    Args:
        model: the module, or a function that builds it (needed only if some layer has no `reset_parameters` and a
            method wants independent initialisations).
        kind: what the outputs and labels mean. `language` takes token rows as labels, −100 where nothing is predicted.
        head: prefix of the head's parameter names; by default the last `nn.Linear` in definition order (none for
            language, whose last layer is mostly the embedding itself).
        zero_head: start the head from zero. A body then learns the same whatever a client's classes are called.
        loss: own loss, `loss(output, y) -> [B]`, one value per example; a loss of torch with `reduction="none"`.
        loss_of: `batch` for a loss that is one value of a whole batch and no mean over its examples (contrastive,
            ranking); clients are then computed one after another, and evaluation weighs batches by their examples.
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
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        if kind not in ("classification", "regression", "language"):
            raise ConfigError(f"Task: kind must be classification, regression or language. Got {kind!r}.")
        _check_own_loss(loss, loss_of)
        self._build = None if isinstance(model, nn.Module) else model
        if self._build is None:
            module = copy.deepcopy(model)
        else:
            with torch_seed(seed if seed is not None else 0, "init"):
                module = self._build()
        if not isinstance(module, nn.Module):
            raise ConfigError(f"Task: the model must be an nn.Module or build one. Got {type(module).__name__}.")
        self._origin: Task | None = None
        self.kind, self.dtype, self.seed = kind, dtype, seed if seed is not None else 0
        self.module = self._prepare(module)
        self._own_loss, self._loss_of = loss, loss_of
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
        self._fused: tuple[nn.Module, Step, set[str]] | None = None
        if not self.stats:
            module, step, names = fuse(self.module)
            self._fused = (module, step, set(names)) if names else None
        self._with_clients: dict[int, Folded | None] = {}
        self.kinds: dict[str, Task] = {}
        self.turns: tuple[str, ...] = ()
        self._smallest: Task | None = None
        # How many layers should run in a forward pass; None once that has been seen to hold.
        self._fused_layers: int | None = sum(k.endswith("weight") for k in (self._fused[2] if self._fused else ()))
        if not self.names:
            raise ConfigError("Task: the model has no trainable parameters.")

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
        return {k: state[k].detach().clone() for k in [*self.names, *self.stats]}

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
                " Name one with model.head, or choose a method without a head."
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
            if len(batch.x) < 2:
                continue  # one example has no variance
            seen = {k: torch.zeros_like(params[k]) for k in self.stats}
            for t in seen.values():
                t.owned = True  # type: ignore[attr-defined]
            with torch.no_grad():
                self._call(self.module, params | seen, batch.x, batch.key if self._dropouts else None)
            weight += len(batch.x)
            for k, t in seen.items():
                share = t / (momentum[k.rpartition(".")[0]] or 1.0) * len(batch.x)
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
        own: dict[str, Any] = {"loss": self._own_loss, "loss_of": self._loss_of}
        task = Task(module, self.kind, head=self.head_layer, dtype=self.dtype, **own)
        task.seed, task._origin = self.seed, self.plain
        build = self._build
        task._build = None if build is None else lambda: change(self._prepare(build()))
        return task

    # ---------------------------------------------------------------- the function

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """Outputs in evaluation mode."""
        return self._call(self._eval, params, x)

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Mean training loss over the examples of a batch; 0 for an empty one."""
        return batch.mean(self.example_loss(self.output(params, batch), batch.y))

    def output(self, params: Params, batch: Batch) -> Tensor:
        """Outputs in training mode."""
        return self._call(self.module, params, batch.x, batch.key if self._dropouts else None)

    def sgd_step(self, params: Params, batch: Batch, lr: float, fresh: bool) -> Params | None:
        """One plain SGD step on the loss with the step of linear layers fused into their backward pass.

        With `fresh` the given tensors are left alone, otherwise they are changed in place. None, and nothing changed,
        if the model or this choice of parameters cannot be stepped this way; the first, fresh step decides.
        """
        if self._fused is None or params.keys() != set(self.names):
            return None
        module, step, names = self._fused
        leaf = {k: p.detach().requires_grad_() for k, p in params.items()}
        step.begin(leaf, lr, fresh)
        # Fused layers find their parameters themselves; the first time all are given, to see if others use them too.
        given = {k: p for k, p in leaf.items() if k not in names} if self._fused_layers is None else leaf
        with torch.enable_grad():
            out = self._call(module, given, batch.x, batch.key if self._dropouts else None)
            batch.mean(self.example_loss(out, batch.y)).backward()  # type: ignore[no-untyped-call]
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

    def example_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Loss of each example, [B]; every example of a batch has the batch's where the loss is one of batches."""
        if self._own_loss is not None:
            return self._checked_loss(self._own_loss(output, y), len(y))
        if self.kind == "classification":
            return F.cross_entropy(output, y, reduction="none")
        if self.kind == "language":
            return self._token_loss(output, y) / (y != -100).sum(1).clamp_min(1)
        return (output.reshape(y.shape) - y).square().reshape(len(y), -1).mean(1)

    def _checked_loss(self, value: Tensor, examples: int) -> Tensor:
        """What the own loss gave, if it is what was declared. Shapes are known without looking at a number."""
        if not isinstance(value, Tensor):
            raise ConfigError(f"Task: the loss must return a tensor. Got {type(value).__name__}.")
        if self._loss_of == "batch":
            if value.numel() != 1:
                raise ConfigError(
                    "Task: a loss with loss_of='batch' must give one value for the whole batch. Got shape"
                    f" {tuple(value.shape)} for {examples} examples; leave loss_of out if it is one per example."
                )
            return value.reshape(()).expand(examples)
        if value.ndim == 0 or len(value) != examples or value.numel() != examples:
            raise ConfigError(
                f"Task: the loss must give one value per example, shape ({examples},) for {examples} examples. Got"
                f" {tuple(value.shape)}; {_LOSS_REMEDY if value.ndim < 2 else 'take the mean over the other axes'}."
            )
        return value.reshape(examples)

    def _token_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Loss of each row of tokens, summed over what is to be predicted, [B]."""
        return F.cross_entropy(output.transpose(1, 2), y, reduction="none", ignore_index=-100).sum(1)

    def output_gradient(self, output: Tensor, y: Tensor) -> Tensor:
        """∂(sum of the examples' losses)/∂output, in closed form where there is one."""
        if self._own_loss is None and self.kind == "classification":
            return output.softmax(1) - F.one_hot(y, output.shape[1]).to(output.dtype)
        if self._own_loss is None and self.kind == "regression":
            gap = 2 * (output - y.reshape(output.shape))
            return gap / max(1, gap[0].numel())
        result: Tensor = grad(lambda o: self.example_loss(o, y).sum())(output)
        return result

    @property
    def own_loss(self) -> bool:
        """Whether the loss is one of the user's own."""
        return self._own_loss is not None

    def curvature_bound(self) -> float | None:
        """A number c with ∂²loss/∂output² ≤ c·I for one example, whatever the output; None where none is known."""
        if self._own_loss is not None or self.kind == "language":
            return None
        return 0.5 if self.kind == "classification" else 2.0  # softmax: Böhning's bound

    def measures(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """What evaluation averages over the examples: loss, and accuracy or squared error, each [B].

        Of token rows with the usual loss there is also its sum over a row, `token_loss`, and how many `tokens` that is
        over: evaluation divides the sums, so that long answers count for more than short ones.
        """
        out = {"loss": self.example_loss(output, y)}
        if self.kind == "language" and self._own_loss is None:
            out |= {"token_loss": self._token_loss(output, y), "tokens": (y != -100).sum(1).to(output.dtype)}
        if self.kind == "classification":
            out["accuracy"] = (output.argmax(1) == y).to(output.dtype)
        elif self.kind == "regression":
            out["squared_error"] = (output.reshape(y.shape) - y).square().reshape(len(y), -1).mean(1)
        return out

    def features(self, params: Params, x: Tensor, train: bool = False) -> Tensor:
        """The head's input."""
        return self._with_features(self.module if train else self._eval, params, x)[0]

    def features_and_output(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """The head's input and the outputs in training mode, from one pass."""
        return self._with_features(self.module, params, batch.x, batch.key if self._dropouts else None)

    def _with_features(
        self, module: nn.Module, params: Params, x: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.need_head()
        output, seen = self._run(module, params, x, key, self._head_module)
        assert seen is not None
        return seen, output

    def from_features(self, params: Params, features: Tensor) -> Tensor:
        """Outputs of the head for given features; `params` needs only the head's entries."""
        self.need_head()
        prefix = self._head_module and self._head_module + "."
        own = {k[len(prefix) :]: v for k, v in params.items() if k.startswith(prefix)}
        result: Tensor = functional_call(self._eval.get_submodule(self._head_module), own, (features,))
        return result

    # ---------------------------------------------------------------- what the engine needs

    def unmappable(self) -> list[str]:
        """Why the model cannot be trained for many clients at once: one sentence per layer."""
        whole = "Task: a loss of a whole batch (loss_of='batch') cannot be computed for many clients at once, whose"
        whole += " batches are filled up to one length; run with train.mapping='loop'."
        return ([whole] if self._loss_of == "batch" else []) + [
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

    def _call(self, module: nn.Module, params: Params, x: Tensor, key: Tensor | None = None) -> Tensor:
        return self._run(module, params, x, key)[0]

    def _run(
        self, module: nn.Module, params: Params, x: Tensor, key: Tensor | None, layer: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs, and what goes into `layer` on the way."""
        if self.stats and module.training:
            # The forward pass writes running statistics in place: only into tensors the training loop owns.
            params = {k: v if k not in self.stats or hasattr(v, "owned") else v.clone() for k, v in params.items()}
        if key is not None and self._dropouts:
            params = params | {name: fold(key, i) for i, name in enumerate(self._dropouts)}
        if params and is_folding() and (folded := self._folded(module)) is not None:
            found = folded(params, x, layer)
            if found is not None:
                return found
        return run_watched(
            module, layer, lambda: _outputs(functional_call(module, params, (x,)) if params else module(x))
        )

    def _folded(self, module: nn.Module) -> Folded | None:
        """The module with a client axis in its layers, made when first asked for; None where there is no such form."""
        known = self._with_clients
        if id(module) not in known:
            known[id(module)] = None if self.stats else fold_clients(module, Dropout)
        return known[id(module)]

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
            module = copy.deepcopy(self.module)
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


def _check_own_loss(loss: OwnLoss | None, loss_of: LossOf) -> None:
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
            f" {_LOSS_REMEDY}."
        )


def _outputs(result: Any) -> Tensor:
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
