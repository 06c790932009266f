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
    both_ways: tuple[str, ...] = ()  # charged each way with a client's own model and with all it receives

    def said_of(self, method: str) -> str:
        """How a method's bytes are counted, in words."""
        if method not in self.both_ways:
            return self.words
        return f"{self.words}, both ways are charged with the client's own model and all that it receives"


RULES: dict[str, ByteRule] = {
    "factorized-fl": ByteRule(
        "Jeong and Hwang, NeurIPS 2022",
        (
            *("factorized-fl-alpha", "factorized-fl-beta", "factorized-fedavg", "factorized-local"),
            *("fedavg", "fedprox", "pfedpara", "fedfomo", "local"),
        ),
        "buffers of batch normalisation count with every transfer, the first download is free, indices are free",
        # With the first download free, no other whole numbers of models up and down give the printed 122.33 GB.
        both_ways=("fedfomo",),
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
