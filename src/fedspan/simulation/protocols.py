"""What an evaluation looks at: which metrics, which of a client's models, read by which rule; the section `[evaluate]`.

Everything is measured in one run and named by what it is: `accuracy` of the model as received, `accuracy_own`,
`accuracy_after` (trained once more), `accuracy_head` (with a head fitted first), `accuracy_by_prototype`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

from annotated_types import MinLen

from fedspan.errors import ConfigError
from fedspan.learn.metrics import Metric, known_metric, own_metric
from fedspan.method.fields import AtLeast1, Positive, build, check
from fedspan.method.named_code import is_spec, named_function

ModelJudged: TypeAlias = Literal["received", "own", "trained", "head"]
PredictionRule: TypeAlias = Literal["head", "prototype"]
MODELS_JUDGED: tuple[ModelJudged, ...] = get_args(ModelJudged)

_SUFFIXES: dict[str, str] = {"received": "", "own": "_own", "trained": "_after", "head": "_head"}


class JudgedModel(NamedTuple):
    """One way to judge a client: by which of its models, and by which rule it predicts (None: the method's own)."""

    model: ModelJudged = "received"
    rule: PredictionRule | None = None

    @property
    def suffix(self) -> str:
        """What names of measures end in."""
        return _SUFFIXES[self.model] + (f"_by_{self.rule}" if self.rule else "")

    @property
    def words(self) -> str:
        """What it is, for headings."""
        said = {"received": "as received", "own": "own last", "trained": "trained once more", "head": "head fitted"}
        return said[self.model] + (f", by {self.rule}" if self.rule else "")


RECEIVED = JudgedModel()
WAYS: tuple[JudgedModel, ...] = tuple(
    JudgedModel(model, rule) for rule in (None, *get_args(PredictionRule)) for model in MODELS_JUDGED
)
"""Every way there is, in the order of tables."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What evaluations measure: the `[evaluate]` section of an experiment file. It changes nothing of the training."""

    metrics: tuple[str | Metric | Callable[..., float], ...] = ()
    """Metrics by scikit-learn's names, or `package.module:function` of an allowed package; the first one leads."""
    models: Annotated[tuple[ModelJudged, ...], MinLen(1)] = ("received",)
    """Which models of a client are judged: as `received`, its `own` after its last training, `trained` once more
    (`train.evaluate_after`), or with a `head` fitted first."""
    predict_by: tuple[PredictionRule, ...] = ()
    """Rules by which methods with prototypes predict, beside their own: `head`, `prototype`."""
    head_epochs: AtLeast1 = 5
    """Passes over a client's training data in which the head of `models = ["head"]` is fitted."""
    head_lr: Positive = 0.1
    """Learning rate of that fit."""

    def __post_init__(self) -> None:
        check(self, "Evaluate")
        names = [m.name for m in self.found()]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"Evaluate: every metric must have a name of its own. Got '{name}' twice.")
            for way in WAYS[1:]:
                if name.endswith(way.suffix):
                    raise ConfigError(
                        f"Evaluate: the name of a metric must not end in '{way.suffix}', which says how a model is"
                        f" judged. Got '{name}'."
                    )
        if self.models[0] != "received":
            raise ConfigError(f"Evaluate: models must begin with 'received'. Got {list(self.models)}.")

    @property
    def asked(self) -> bool:
        """Whether anything beyond the usual is asked for."""
        return self != EvaluationSettings()

    def found(self) -> tuple[Metric, ...]:
        """The metrics.

        Raises:
            ConfigError: for an unknown name, and code that is not allowed or not there.
        """
        return tuple(_metric(m) for m in self.metrics)

    def ways(self, own: PredictionRule | None, rules: Sequence[PredictionRule], after: bool) -> list[JudgedModel]:
        """How every client is judged, the model as received first.

        Args:
            own: the rule by which the method predicts by itself, if it has several.
            rules: all rules that it has.
            after: whether `train.evaluate_after` asks for the trained model.
        """
        models = dict.fromkeys([*self.models, *(["trained"] if after else [])])
        others = [r for r in dict.fromkeys(self.predict_by) if r in rules and r != own]
        return [JudgedModel(m, r) for r in (None, *others) for m in models]  # type: ignore[arg-type]


def _metric(given: str | Metric | Callable[..., float]) -> Metric:
    if isinstance(given, Metric):
        return given
    if not isinstance(given, str):
        return own_metric(given)
    if is_spec(given):
        return own_metric(named_function(given, "Evaluate: metrics"))
    return known_metric(given)


def evaluation_settings(given: EvaluationSettings | Mapping[str, Any] | None) -> EvaluationSettings:
    """Settings as they are, or from keys of the section.

    Raises:
        ConfigError: for what is neither.
    """
    if given is None:
        return EvaluationSettings()
    if isinstance(given, EvaluationSettings):
        return given
    if not isinstance(given, Mapping):
        known = ", ".join(f.name for f in fields(EvaluationSettings))
        raise ConfigError(f"Evaluate: must be EvaluationSettings or a dict with {known}. Got {type(given).__name__}.")
    return build(EvaluationSettings, given, "Evaluate")
