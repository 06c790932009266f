"""Domains made of classes: a list of texts, each naming the classes or superclasses of one domain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedspan.data.federated import Index
from fedspan.data.sources.assemble import Source
from fedspan.errors import ConfigError, nearest


def domains_of_classes(source: Source, lists: Sequence[str]) -> Source:
    """The source with domains of its classes: `"0-3"`, `"4 + 7"`, `"cat + dog"`, `"trees + flowers"` (superclasses).

    The lists may differ in length, so domains may have different numbers of classes; classes in none are left out.

    Raises:
        ConfigError: for a class that is not there, or that stands in two lists.
    """
    y = source.y.numpy()
    domain_of = np.full(source.classes, -1, np.int64)
    for d, text in enumerate(lists):
        for name in text.split("+"):
            for label in _labels(source, y, name.strip()):
                if domain_of[label] >= 0:
                    raise ConfigError(
                        f"Partition: a class must belong to one domain. Got {source.class_names[label]} in"
                        f" '{lists[domain_of[label]][:60]}' and in '{text[:60]}'."
                    )
                domain_of[label] = d
    return replace(source, domain=domain_of[y], domain_names=[" ".join(text.split())[:40] for text in lists])


def _labels(source: Source, y: Index, name: str) -> list[int]:
    """The classes that one name stands for: a range of numbers, a number, a class or a superclass."""
    held = set(np.unique(y).tolist())
    # A name comes first: the classes of some sources are called by digits.
    if name in source.class_names:
        labels = [source.class_names.index(name)]
    elif name in source.coarse_names and source.coarse is not None:
        labels = np.unique(y[source.coarse == source.coarse_names.index(name)]).tolist()
    elif match := re.fullmatch(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", name):
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < source.classes:
            raise ConfigError(
                f"Partition: classes in domains must lie in 0..{source.classes - 1}, the smaller first. Got '{name}'."
            )
        labels = list(range(first, last + 1))
    else:
        known = [*source.class_names, *source.coarse_names]
        raise ConfigError(
            f"Partition: '{source.name}' has no class or superclass '{name[:60]}'.{nearest(name[:60], known)}"
        )
    if not labels or not held.issuperset(labels):
        raise ConfigError(f"Partition: every class in domains must have examples. Got none of '{name[:60]}'.")
    return labels
