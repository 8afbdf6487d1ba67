"""What a quantized matrix holds comes back from either layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fp8booster.formats import E4M3
from tests.kernels.matrices import quantize


@pytest.mark.parametrize("scale_for", ["tensor", "row", "group", "block"])
@pytest.mark.parametrize(("plain", "transposed"), [(True, False), (False, True), (True, True)])
def test_values_come_back_from_the_layout_that_is_there(
    plain: bool, transposed: bool, scale_for: str, device: torch.device
) -> None:
    # rows and columns of very different magnitude, so that one scale cannot stand for another
    rows, columns = 140, 270
    matrix = torch.randn(rows, columns, device=device) * torch.logspace(-4, 4, rows, device=device)[:, None]
    matrix = matrix * torch.logspace(-2, 2, columns, device=device)
    found = quantize(matrix, E4M3, plain=plain, transposed=transposed, scale_for=scale_for)
    values = found.dequantize(rows, columns)
    assert values.shape == matrix.shape
    # half a step of the largest value under each scale
    tile = {"tensor": (rows, columns), "row": (1, columns), "group": (1, 128), "block": (128, 128)}[scale_for]
    if not plain and scale_for == "row":
        tile = (rows, 1)
    elif not plain:
        tile = tile if scale_for == "tensor" else tile[::-1]
    pooled = F.max_pool2d(matrix.abs()[None], tile, ceil_mode=True)[0]
    largest = pooled.repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]
    assert ((values - matrix).abs() <= torch.maximum(matrix.abs() * 2.0**-4, largest * 2.0**-17)).all()
