"""What gradients are divided by, against Colossal-AI's arithmetic on the host."""

from __future__ import annotations

import math

import pytest
import torch

from fp8booster.optim.steps import clipping_divisor


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16])
@pytest.mark.parametrize(
    ("norm", "divisor"),
    [(0.0, 1.0), (0.5, 1.0), (2.0 - 2e-6, 1.0), (3.0, (3.0 + 1e-6) / 2.0), (2e4, (2e4 + 1e-6) / 2.0)],
)
def test_gradients_are_divided_by_the_loss_scale_and_by_what_the_norm_is_over_the_limit(
    norm: float, divisor: float, loss_scale: float
) -> None:
    total = torch.tensor(norm * loss_scale, dtype=torch.float64)
    found = clipping_divisor(total, loss_scale, 2.0)
    assert found.shape == ()
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(loss_scale * divisor, rel=1e-12)


@pytest.mark.parametrize(("norm", "divisor"), [(math.nan, 4.0), (math.inf, math.inf)])
def test_a_norm_that_is_not_finite_divides_as_on_the_host(norm: float, divisor: float) -> None:
    found = clipping_divisor(torch.tensor(norm), 4.0, 1.0)
    assert found.dtype == torch.float32
    assert float(found) == divisor
