"""Layers whose weight is composed of smaller tensors, and `convert`, which puts them in the place of plain ones.

A structured layer is a module like any other: `functional_call` and `vmap` go through it, `reset_parameters` draws it
anew, bias, stride, padding and groups are those of the layer it replaces. A new kind of structure is a subclass of
`Structured` that says how its weight is composed (and may override `forward` where that can be had for less).
"""

from fedspan.layers.adapter import Adapter, AdapterKind, AdapterStart
from fedspan.layers.base import Structured
from fedspan.layers.conversion import (
    Chosen,
    Which,
    candidates,
    choose,
    convert,
    in_head,
    part,
    parts,
    plain_weights,
    structured,
)
from fedspan.layers.dictionary import Dictionary
from fedspan.layers.factorized import Factorized, MuStart
from fedspan.layers.hadamard import Hadamard
from fedspan.layers.pair import LowRank
from fedspan.layers.principal import Principal, triples
from fedspan.layers.views import LAYOUTS, Layout, Plain, View, matrix_dims

__all__ = [
    "LAYOUTS",
    "Adapter",
    "AdapterKind",
    "AdapterStart",
    "Chosen",
    "Dictionary",
    "Factorized",
    "Hadamard",
    "Layout",
    "LowRank",
    "MuStart",
    "Plain",
    "Principal",
    "Structured",
    "View",
    "Which",
    "candidates",
    "choose",
    "convert",
    "in_head",
    "matrix_dims",
    "part",
    "parts",
    "plain_weights",
    "structured",
    "triples",
]
