"""How papers count bytes, where that is not what travels: a rule is for a paper's methods and its tables' baselines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ByteRule:
    """How a paper counts: which methods, in which words."""

    paper: str
    methods: tuple[str, ...]
    words: str
    trained_only: bool = False  # what is trained, twice, whoever was really asked; otherwise buffers are added


RULES: dict[str, ByteRule] = {
    "factorized-fl": ByteRule(
        "Jeong and Hwang, NeurIPS 2022",
        (
            *("factorized-fl-alpha", "factorized-fl-beta", "factorized-fedavg", "factorized-local"),
            *("fedavg", "fedprox", "pfedpara", "local"),
        ),
        "buffers of batch normalisation count with every transfer, the first download is free, indices are free",
    ),
    "fedloru": ByteRule(
        "Park and Klabjan, 2024",
        ("fedloru", "fedlora", "pfedloru", "mfedloru", "pfedlora1", "pfedlora2", "fedhm", "fedavg"),
        "2 x clients x participation x parameters that a client uploads x their size x rounds; running statistics and"
        " what is announced to all are free",
        trained_only=True,
    ),
}
"""By the paper's family; where two speak of a method, `published` is the first."""
