"""The check of bytes that claims are decided by: rows by rules of their own, and what a printed figure implies."""

from __future__ import annotations

import pytest

from fedspan.cli.checks import implied_zeros, perform_check
from fedspan.errors import ConfigError
from fedspan.studies.claims import parse_claim
from fedspan.studies.claims.fair_play import config_of

CLAIM = """
sentence = "β costs so much."
place = "Table 1"
[check]
name = "bytes"
options = { rule = "published", rules = { "really" = "own" }, printed = PRINTED }
[experiment]
rounds = 4
[experiment.data]
source = "digits"
[experiment.partition]
kind = "iid"
clients = 5
[experiment.model]
kind = "mlp"
hidden = [8]
[[rows]]
name = "β"
method = "factorized-fl-beta"
[[rows]]
name = "FedAvg"
method = "fedavg"
[[rows]]
name = "really"
method = "fedavg"
[[tests]]
row = "FedAvg"
above = 0.0
"""
MU = 64 * 8  # of the hidden layer; the head is private
REST = 64 + 8 + 8  # u, v and the biases


def gigabytes(up: float, down: float) -> float:
    """By the rule: the first download and indices are free."""
    return 5 * 4 * (4 * (REST + up * MU) + 3 * (REST + down * MU)) / 1e9


def test_a_printed_figure_implies_how_many_entries_are_not_zero() -> None:
    claim = parse_claim(CLAIM.replace("PRINTED", repr(gigabytes(0.25, 1))).encode(), "paper", "made-up")
    found = perform_check(claim)
    beta = found["β"]
    assert beta["none"]["gigabytes"] == pytest.approx(gigabytes(0, 0))
    assert beta["all"]["gigabytes"] == pytest.approx(gigabytes(1, 1))
    assert beta["share_up"] == pytest.approx(0.25) and beta["share"] == pytest.approx((4 * 0.25 + 3) / 7)
    assert beta["millions_up"] == pytest.approx((REST + 0.25 * MU) / 1e6)
    # As they travel the first download counts, and beside the values a bitmap of where they are.
    assert beta["travels"]["together"] == 5 * 4 * (4 * (2 * REST + 1.25 * MU) + 2 * MU // 8)
    model = 4 * (64 * 8 + 8 + 8 * 10 + 10)
    assert found["FedAvg"]["together"] == 5 * 7 * model and found["really"]["together"] == 5 * 8 * model


def test_a_printed_figure_must_be_possible() -> None:
    claim = parse_claim(CLAIM.replace("PRINTED", "1.0").encode(), "paper", "made-up")
    with pytest.raises(ConfigError, match="printed must lie between"):
        implied_zeros(config_of(claim, claim.rows[0], {}, 200), None, gigabytes(0, 0.5))
