"""Products by oneDNN are those of torch, for every layout of their arguments."""

from __future__ import annotations

import pytest
import torch

from fedspan.learn import products
from fedspan.learn.products import subtract_product, times


@pytest.mark.parametrize("clients", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_products(clients: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    first = () if clients is None else (clients,)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*first, *shape, generator=g, dtype=torch.float64).to(dtype)

    x, w, slope, start = draw(56, 64), draw(48, 64), draw(56, 48), draw(48, 64)
    for large in (0, 10**12):
        monkeypatch.setattr(products, "LARGE", large)
        out, before, stepped = draw(56, 48), draw(56, 64), start.clone()
        times(x, w.mT, out)
        times(slope, w, before)
        subtract_product(stepped, slope.mT, x, 0.1)
        tolerance = 1e-4 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(out, x @ w.mT, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(before, slope @ w, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(stepped, start - 0.1 * slope.mT @ x, rtol=tolerance, atol=tolerance)


def test_large_products_of_single_precision_ask_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ours = products._LINEAR
    if ours is None:
        pytest.skip("torch was built without oneDNN")

    def counted(*args: object) -> torch.Tensor:
        asked.append(1)
        return ours(*args)

    monkeypatch.setattr(products, "_LINEAR", counted)
    for rows, dtype in ((256, torch.float32), (8, torch.float32), (256, torch.float64)):
        a, b = torch.ones(rows, 784, dtype=dtype), torch.ones(784, 200, dtype=dtype)
        times(a, b, torch.empty(rows, 200, dtype=dtype))
    assert len(asked) == 1
