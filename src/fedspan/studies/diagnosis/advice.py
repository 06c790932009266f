"""From statistics and probes to words: what kind of heterogeneity this is, and what to try first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedspan.data.federated import FederatedData
from fedspan.errors import ConfigError
from fedspan.learn.task import Task
from fedspan.method import Federation
from fedspan.methods import make
from fedspan.studies.diagnosis.fits import LinearFits, linear_fits
from fedspan.studies.diagnosis.probes import FirstSteps, steps
from fedspan.studies.diagnosis.statistics import Sample, Statistics, sample, statistics

# Shares of variance and distances above which clients are said to differ. On 21 federations of digits whose kind was
# known, those that differ were at 0.34 or more (labels), 0.12 or more (meaning) and 0.047 or more (inputs, labels
# alike); those that do not were below 0.02, 0.02 and 0.003.
LABELS = 0.1
MEANING = 0.06
INPUTS = 0.02
_EXPLAINED = 0.6  # times the label distance squared: what skewed labels alone do to the inputs (0.3 to 0.55 on digits)
_MOST = 20  # a rank to start from is not larger than this

# What linear fits must gain for personal models to be advised, and by how much fits of one's own must be ahead of those
# near the common one for training alone to be advised.
GAIN = 0.02
ALONE = 0.02
_MOSTLY = 0.5  # a gain of this share of what is explained at all: clients have little in common
PASSES = 10  # over a client's examples, in which a head is fitted, or a model fine-tuned, before use

# The order was settled on development seeds of experiments/diagnose/score.py; that the adaptive form stands first on
# groups, on those of experiments/adaptive/run.py.
SUITED: dict[str, tuple[str, ...]] = {
    "none": ("fedavg", "fedavg-ft", "apfl"),
    "label skew": ("fedavg-head", "pfl-mf-adaptive", "fedavg-ft"),
    "permuted labels": ("fedavg-head", "pfl-mf-adaptive", "fedara"),
    "clusters": ("pfl-mf-adaptive", "fedavg-head", "pfl-mf"),
    "domain shift": ("fedavg", "fedavg-ft", "ditto"),
    "own relations": ("pfl-mf", "local", "ditto"),
}
_GROUPED_DOMAINS = ("ifca", "pfl-mf", "fedavg-head")  # where few domains explain the shift
_ALONE = ("local", "apfl", "fedavg-head")
_HEADLESS = {"fedavg-head": "fedavg-ft", "fedper": "local", "fedara": "apfl"}  # where the head is all of the model
_WHY = {
    "fedavg": "one model for all, which labels that mean the same allow",
    "fedavg-ft": "one model for all, which every client trains on before it uses it",
    "fedavg-head": "one body for all, under a head that every client fits before use and throws away",
    "fedala": "starts from the common model and keeps what a client needs of its own",
    "ditto": "a personal model held near the common one",
    "apfl": "mixes a model of one's own with the common one, by a share that each client learns",
    "fedper": "a common body under a head of one's own, which holds what the labels mean or how often they come",
    "fedara": "a common body held to anchors that all share, under a head of one's own",
    "pfl-mf": "finds the directions in which clients differ, and gives each a few coefficients",
    "pfl-mf-adaptive": "finds by held-out losses how far clients' heads differ, and along which directions",
    "ifca": "one model per group, and each client finds its own",
    "local": "no exchange at all, as clients gain little from one another",
}


@dataclass(frozen=True)
class Diagnosis:
    """What was seen, what it is called, and what suits it."""

    kind: str
    also: tuple[str, ...]  # what else was seen
    groups: int | None  # groups of clients that agree among themselves, where there are such
    rank: int  # to start from
    methods: tuple[str, ...]  # the first is the first recommendation
    statistics: Statistics
    steps: FirstSteps
    sample: Sample
    fits: LinearFits | None = None

    def sentences(self) -> list[str]:
        """The diagnosis in words."""
        s, g = self.statistics, self.steps
        n = self.sample.clients
        out = [_KIND_SAYS[self.kind].format(n=n, k=self.groups)]
        out += [f"There is also {kind}." for kind in self.also]
        if self.kind == "domain shift" and self.groups is not None:
            out.append(f"{self.groups} groups of clients are alike among themselves.")
        if s.labels is not None and s.labels_by_chance is not None and s.classes_held is not None:
            out.append(
                f"Labels: their distributions lie {max(0.0, s.labels):.2f} apart beyond chance (0 alike, 1 disjoint); a"
                f" client holds {s.classes_held:.1f} classes on average."
            )
        out.append(f"Inputs: {max(0.0, s.inputs):.1%} of their variance is between clients.")
        if s.meaning is not None:
            text = f"Meaning: among examples of one label {max(0.0, s.meaning):.1%} of the variance is between clients"
            if s.groups is not None and s.within is not None:
                text += f"; inside {self.groups} groups found, {max(0.0, s.within):.1%}"
            out.append(text + ".")
        if self.fits is not None:
            out.append(self._said_of_fits(self.fits))
        out.append(
            f"One step: steps of different clients have a cosine of {g.apart:.2f}, two halves of one client's examples"
            f" {g.repeated:.2f}; together the steps span {g.rank} direction{'s' if g.rank > 1 else ''} above the noise."
        )
        return out

    def _said_of_fits(self, fits: LinearFits) -> str:
        real = self.sample.y is None
        common, own, near = (f"{max(0.0, v):.0%}" for v in (fits.common, fits.own, fits.near))
        what = f"explains {common} of the target's variance" if real else f"gets {common} of the labels right"
        return (
            f"Linear fits, judged on examples left out: one for all {what}, one for each client {own}, one near the"
            f" common one {near}."
        )

    def settings(self, method: str) -> dict[str, Any]:
        """The fields that the diagnosis proposes for a method, beside its defaults."""
        if method == "ifca" and self.groups is not None:
            return {"clusters": self.groups}
        if method in ("fedavg-head", "fedavg-ft"):
            return {"finetune_epochs": PASSES}
        return {"rank": self.rank} if method == "pfl-mf" else {}

    def comparison(self) -> str:
        """The options of a comparison of what is advised, with what is proposed to set, beside training alone."""
        names = ",".join(dict.fromkeys(["local", *self.methods]))
        fields = [f"methods.{m}.{k}={v}" for m in self.methods for k, v in self.settings(m).items()]
        return " ".join([f"--methods {names}", *fields])

    def advice(self) -> list[tuple[str, str]]:
        """(method, why), the first recommendation first."""
        return [(m, _WHY[m]) for m in self.methods]


_KIND_SAYS = {
    "none": "The {n} clients looked at are alike: same labels, same inputs, same meaning.",
    "label skew": "Label skew: the {n} clients hold different labels, but mean the same by them.",
    "permuted labels": "Permuted labels: inputs are alike, but every client means something else by its labels.",
    "clusters": "Clusters: inputs are alike, but {k} groups of clients mean different things by their labels.",
    "domain shift": "Domain shift: the inputs themselves differ from client to client, also those of one label.",
    "own relations": "Own relations: what the inputs say of the target differs from client to client.",
}


def diagnose(task: Task, data: FederatedData) -> Diagnosis:
    """Look at the clients' training parts, fit linear models, and let each client take one step; nothing is trained."""
    seen = sample(data)
    found, probe, fits = statistics(seen, data.classes), steps(task, data, seen.ids), linear_fits(seen)
    kind, also = _kind(found, fits)
    groups = None if found.groups is None else int(np.unique(found.groups).size)
    suited = _suited(kind, groups, fits, headed=bool(task.head and task.body))
    methods = tuple(m for m in suited if _possible(m, task, data))
    return Diagnosis(kind, also, groups, _rank(kind, groups, probe, seen), methods, found, probe, seen, fits)


def _possible(method: str, task: Task, data: FederatedData) -> bool:
    """Whether the method takes this model and loss, e.g. a head that is one linear layer."""
    try:
        make(method).init_server(task, Federation(data.clients, 0, (None,) * data.clients, data.groups))
    except ConfigError:
        return False
    return True


def _suited(kind: str, groups: int | None, fits: LinearFits | None, headed: bool) -> tuple[str, ...]:
    """What to try: by the kind, unless linear fits say that personal models gain nothing, or that clients gain nothing
    from one another."""
    suited = SUITED[kind]
    if kind == "domain shift" and groups is not None:
        suited = _GROUPED_DOMAINS
    elif kind in ("label skew", "domain shift", "none") and fits is not None:
        if fits.own > fits.near + ALONE and fits.gain > GAIN:
            suited = _ALONE
        elif fits.gain <= GAIN:
            suited = SUITED["none"]
        elif kind != "label skew":
            suited = SUITED["label skew"]
    if not headed:
        suited = tuple(dict.fromkeys(_HEADLESS.get(m, m) for m in suited))
    return suited


def _kind(s: Statistics, fits: LinearFits | None) -> tuple[str, tuple[str, ...]]:
    labels = 0.0 if s.labels is None else max(0.0, s.labels)
    skewed = labels > LABELS
    apart = s.inputs - (_EXPLAINED * labels**2 if skewed else 0.0) > INPUTS
    if s.meaning is None:
        shifted = ("domain shift",) if apart else ()
        if fits is not None and fits.gain > max(GAIN, _MOSTLY * max(fits.own, fits.near)):
            return "own relations", shifted
        return ("domain shift" if apart else "none"), ()
    if s.meaning <= MEANING:
        return ("label skew" if skewed else "none"), ()
    also = ("label skew",) if skewed else ()
    if apart:
        return "domain shift", also
    return ("permuted labels" if s.groups is None else "clusters"), also


def _rank(kind: str, groups: int | None, probe: FirstSteps, seen: Sample) -> int:
    """As many directions as groups where groups are found, otherwise as the clients' steps span."""
    if kind == "permuted labels":  # every client is a direction of its own, as far as it can be afforded
        return int(min(_MOST, max(2, seen.clients // 2)))
    return int(min(_MOST, groups if groups is not None else max(1, probe.rank)))
