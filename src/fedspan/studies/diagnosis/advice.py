"""From statistics and probes to words: what kind of heterogeneity this is, and what to try first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedspan.data.federated import FederatedData
from fedspan.learn.task import Task
from fedspan.methods import METHODS
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

# The order was settled on few of those federations (a perceptron, 60 rounds, defaults, not all candidates). Best among
# those tried, in the order of the kinds: fedavg 93 %, ditto 97 (fedper 96; clients held 5 of 10 classes), fedper 88,
# ifca 96 (fedper 93), ifca 93 (fedavg 90). Where clients held 2.6 of 10 classes fedper reached 97 %, ditto 95.
SUITED: dict[str, tuple[str, ...]] = {
    "none": ("fedavg", "ditto", "fedala"),
    "label skew": ("ditto", "fedper", "fedrep"),
    "permuted labels": ("fedper", "fedrep", "pfl-mf"),
    "clusters": ("ifca", "fedper", "pfl-mf"),
    "domain shift": ("fedavg", "ditto", "fedala"),
}
_GROUPED_DOMAINS = ("ifca", "fedavg", "ditto")  # where few domains explain the shift
_FEW_CLASSES = ("fedper", "ditto", "fedrep")  # where a client holds less than this share of the classes
_FEW = 0.4
_WHY = {
    "fedavg": "one model for all, which labels that mean the same allow",
    "fedala": "starts from the common model and keeps what a client needs of its own",
    "ditto": "a personal model held near the common one",
    "fedper": "a common body under a head of one's own, which holds what the labels mean or how often they come",
    "fedrep": "as fedper, with the head fitted first",
    "pfl-mf": "finds the directions in which clients differ, and gives each a few coefficients",
    "ifca": "one model per group, and each client finds its own",
    "factorized-fl-beta": "matches clients that learn alike",
    "local": "no exchange at all",
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
        out.append(
            f"One step: steps of different clients have a cosine of {g.apart:.2f}, two halves of one client's examples"
            f" {g.repeated:.2f}; together the steps span {g.rank} direction{'s' if g.rank > 1 else ''} above the noise."
        )
        return out

    def settings(self, method: str) -> dict[str, Any]:
        """The fields that the diagnosis proposes for a method, beside its defaults."""
        if method == "ifca" and self.groups is not None:
            return {"clusters": self.groups}
        return {"rank": self.rank} if method == "pfl-mf" else {}

    def advice(self) -> list[tuple[str, str]]:
        """(method, why), the first recommendation first."""
        return [(m, _WHY[m]) for m in self.methods]


_KIND_SAYS = {
    "none": "The {n} clients looked at are alike: same labels, same inputs, same meaning.",
    "label skew": "Label skew: the {n} clients hold different labels, but mean the same by them.",
    "permuted labels": "Permuted labels: inputs are alike, but every client means something else by its labels.",
    "clusters": "Clusters: inputs are alike, but {k} groups of clients mean different things by their labels.",
    "domain shift": "Domain shift: the inputs themselves differ from client to client, also those of one label.",
}


def diagnose(task: Task, data: FederatedData) -> Diagnosis:
    """Look at the clients' training parts, and let each take one step; nothing is trained."""
    seen = sample(data)
    found, probe = statistics(seen, data.classes), steps(task, data, seen.ids)
    kind, also = _kind(found)
    groups = None if found.groups is None else int(np.unique(found.groups).size)
    suited = SUITED[kind]
    if kind == "domain shift" and groups is not None:
        suited = _GROUPED_DOMAINS
    if kind == "label skew" and (found.classes_held or 0.0) < _FEW * (data.classes or 1):
        suited = _FEW_CLASSES
    methods = tuple(m for m in suited if m in METHODS)
    return Diagnosis(kind, also, groups, _rank(kind, groups, probe, seen), methods, found, probe, seen)


def _kind(s: Statistics) -> tuple[str, tuple[str, ...]]:
    labels = 0.0 if s.labels is None else max(0.0, s.labels)
    skewed = labels > LABELS
    apart = s.inputs - (_EXPLAINED * labels**2 if skewed else 0.0) > INPUTS
    if s.meaning is None:
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
