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
