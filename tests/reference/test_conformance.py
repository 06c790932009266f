"""Every method against its page: the same minibatches, float64, differences of at most 1e-10."""

from __future__ import annotations

from typing import Any

import pytest
from harness import TOLERANCE, differences
from plain import PAGES

CASES = [(name, k) for name, page in PAGES.items() for k in range(len(page.cases))]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{k}" for name, k in CASES])
def test_method_equals_its_page(name: str, case: int) -> None:
    fields: dict[str, Any] = PAGES[name].cases[case]
    far = {path: d for path, d in differences(name, fields).items() if not d <= TOLERANCE}
    assert not far, f"{name} {fields} differs: " + ", ".join(f"{path} {d:.1e}" for path, d in far.items())


# A page that would agree with anything shows nothing: it must see another value of a field, in one of them at least.
FAULTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fedprox", {"mu": 0.7}, {"mu": 0.69}),
    ("pfl-mf-paper", {"rank": 3, "v_scale": "1", "u_update": "gradient"}, {"v_scale": "1/n"}),
    ("pfl-mf", {"rank": 3, "lr": 0.1}, {"ridge": 0.02}),
    ("factorized-fl-alpha", {"m_min": 1, "tau": 0.9985}, {"tau": -1.0}),
    ("fedloru", {"rank": 3, "tau": 2}, {"tau": 3}),
    ("fedara", {"ratio": [1.0, 0.5], "lam": 3.0}, {"lam": 0.0}),
    ("apfl", {}, {"alpha_every": "step"}),
    ("fedavg", {}, {"weighting": "uniform"}),
]


@pytest.mark.parametrize(("name", "fields", "other"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_a_page_with_another_field_is_seen_to_differ(name: str, fields: dict[str, Any], other: dict[str, Any]) -> None:
    assert max(differences(name, fields, other).values()) > 1e5 * TOLERANCE
