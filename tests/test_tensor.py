"""What a quantized matrix holds comes back from either layout."""

from __future__ import annotations

import pytest
import torch

from fp8booster.formats import E4M3
from fp8booster.tensor import quantize


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize(("plain", "transposed"), [(True, False), (False, True), (True, True)])
def test_values_come_back_from_the_layout_that_is_there(
    plain: bool, transposed: bool, rowwise: bool, device: torch.device
) -> None:
    # rows and columns of very different magnitude, so that one scale cannot stand for another
    matrix = torch.randn(20, 40, device=device) * torch.logspace(-4, 4, 20, device=device)[:, None]
    matrix = matrix * torch.logspace(-2, 2, 40, device=device)
    found = quantize(matrix, E4M3, plain=plain, transposed=transposed, rowwise=rowwise)
    values = found.dequantize(20, 40)
    assert values.shape == matrix.shape
    # half a step of the largest value under each scale
    largest = matrix.abs().amax() if not rowwise else matrix.abs().amax(1 if plain else 0, keepdim=True)
    assert ((values - matrix).abs() <= torch.maximum(matrix.abs() * 2.0**-4, largest * 2.0**-17)).all()
