"""The powers of two that channels of an input give to the weight, value by value."""

from __future__ import annotations

import math

import pytest
import torch

from fp8booster import FP8Config, formats
from fp8booster.nn.weights import casting
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT, WEIGHT
from fp8booster.scaling.smooth_swiglu import ChannelFactors, SmoothSwiGLU, _above_median, factors_of
from fp8booster.scaling.steps import note_step
from fp8booster.tensor import QuantizedMatrix
from tests.scaling.waiting import never_waiting

CONFIG = FP8Config(scaling="smooth-swiglu", emulate=True)
COLUMNS = 16


@pytest.mark.parametrize(
    ("inputs", "weights", "powers"),
    [
        ([1, 1, 1, 1024], [1, 1, 1, 1], [0, 0, 0, -5]),  # half of it, to the weight
        ([1, 1, 1, 1024], [1, 1, 1, 16], [0, 0, 0, -3]),  # but what the weight's column is larger itself
        ([1, 1, 1, 1], [1, 1, 1, 1024], [0, 0, 0, 5]),
        ([8, 8, 8, 8 / 1024], [3, 3, 3, 3], [0, 0, 0, 5]),
        ([1, 1, 1, 2.0**100], [1, 1, 1, 1], [0, 0, 0, -32]),
        ([1, 1, 1, 2.0**-100], [1, 1, 1, 1], [0, 0, 0, 32]),
        ([1, 1, 0, 64], [1, 1, 1, 1], [0, 0, 0, -3]),
        ([1, 1, math.inf, 64], [1, 1, 1, 1], [0, 0, 0, -3]),
        ([1, 1, math.nan, 64], [1, 1, 1, 1], [0, 0, 0, -3]),
        ([1, 1, 1, 64], [1, 1, 0, 1], [0, 0, 0, -3]),
        ([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_a_channel_gives_half_of_what_it_is_larger_than_the_median(inputs, weights, powers) -> None:
    found = factors_of(*(torch.tensor(each, dtype=torch.float32) for each in (inputs, weights)))
    assert found.tolist() == [2.0**power for power in powers]


def test_the_median_is_torchs_and_the_host_does_not_wait_for_it(device: torch.device) -> None:
    for channels in (1, 2, 7, 256):
        for bad in {0, 1, channels // 2, channels}:
            octaves = torch.randn(channels).round(decimals=1)
            octaves[:bad] = math.inf
            amaxes = octaves.exp2().to(device)
            with never_waiting(device):
                found = _above_median(amaxes)
            octaves = amaxes.log2()
            right = octaves - octaves.where(octaves.isfinite(), math.nan).nanmedian()
            assert torch.equal(found.nan_to_num(), right.nan_to_num())


def of_channels(largest: float, rows: int = 32) -> torch.Tensor:
    """A matrix whose fourth channel is so large, and the others 1."""
    matrix = torch.rand(rows, COLUMNS) + 1
    matrix[0] = 2.0
    matrix[:, 3] *= largest
    return matrix


def by_channel(config: FP8Config = CONFIG) -> Casts:
    """Casts as the down projection of a fused block has them."""
    return Casts(config, ChannelFactors)


def cast(casts: Casts, role: str, matrix: torch.Tensor, *, plain: bool = True) -> QuantizedMatrix:
    made = casts.quantize(role, matrix, plain=plain, transposed=True)
    rows = len(matrix)
    if plain:
        torch.testing.assert_close(made.dequantize(rows, COLUMNS), matrix, rtol=0.07, atol=0.0)
    alone = QuantizedMatrix(made.data.new_empty(0), made.transpose, *made[2:])
    torch.testing.assert_close(alone.dequantize(rows, COLUMNS), matrix, rtol=0.07, atol=0.0)
    return made


def test_the_powers_are_found_at_the_weights_cast_from_all_inputs_since_the_last() -> None:
    casts, weight = by_channel(), of_channels(1.0)
    assert not cast(casts, WEIGHT, weight).has_factors
    for largest in (2.0**6, 2.0**10, 2.0**2):
        assert not cast(casts, INPUT, of_channels(largest)).has_factors
    note_step()
    noted = casts.saved
    assert noted[INPUT].tolist() == [2.0 if channel != 3 else 2.0**11 for channel in range(COLUMNS)]
    made = cast(casts, WEIGHT, weight)
    assert casts.state.factors.tolist() == [1.0 if channel != 3 else 2.0**-5 for channel in range(COLUMNS)]
    assert casts.saved == noted  # which a run that resumes before this step has ended casts the weight by again
    # a product reads both: what is divided in one is multiplied in the other
    x = of_channels(2.0**10)
    inputs = cast(casts, INPUT, x)
    plain = [each.data[:32, :COLUMNS].float() * each.inverse_scale for each in (inputs, made)]
    torch.testing.assert_close(plain[0] @ plain[1].t(), x @ weight.t(), rtol=0.13, atol=0)
    torch.testing.assert_close(plain[0][:, 3], x[:, 3] * 2.0**-5, rtol=0.07, atol=0)
    torch.testing.assert_close(plain[1][:, 3], weight[:, 3] * 2.0**5, rtol=0.07, atol=0)
    cast(casts, INPUT, of_channels(1.0))
    casts.load({INPUT: torch.full((COLUMNS,), 2.0)})  # as after a resume
    cast(casts, WEIGHT, weight)
    assert casts.state.factors.tolist() == [1.0] * COLUMNS


def test_transposes_of_backward_and_gradients_change_nothing() -> None:
    casts, weight = by_channel(), of_channels(1.0)
    cast(casts, INPUT, of_channels(2.0**10))
    note_step()
    before = casts.saved[INPUT].clone()
    cast(casts, INPUT, of_channels(2.0**14), plain=False)
    made = casts.quantize(OUTPUT_GRADIENT, of_channels(2.0**14), transposed=True, dtype=formats.E4M3)
    assert made.transpose_inverse_scale is None
    assert torch.equal(casts.saved[INPUT], before)
    cast(casts, WEIGHT, weight, plain=False)
    assert casts.state.factors is None
    assert torch.equal(casts.saved[INPUT], before)


def test_amaxes_of_another_number_of_channels_are_left_out() -> None:
    casts = by_channel()
    casts.load({INPUT: torch.full((COLUMNS * 2,), 3.0)})
    assert not cast(casts, WEIGHT, of_channels(1.0)).has_factors
    assert casts.saved == {}


def test_a_step_that_is_forgotten_leaves_the_powers_and_what_the_last_one_noted() -> None:
    casts, weight = by_channel(), of_channels(1.0)
    cast(casts, INPUT, of_channels(2.0**10))
    note_step()
    noted = casts.saved
    casts.forget_step()  # of which nothing is cast yet
    assert casts.saved == noted
    cast(casts, WEIGHT, weight)
    factors = casts.state.factors
    casts.quantize(INPUT, torch.full((16, COLUMNS), math.nan))
    assert casts.saved == noted
    casts.forget_step()
    assert casts.saved == noted
    cast(casts, WEIGHT, weight)
    assert casts.state.factors is factors
    cast(casts, INPUT, of_channels(1.0))
    note_step()
    assert casts.saved[INPUT].tolist() == [2.0] * COLUMNS


@pytest.mark.parametrize("columns", [16, 20])
def test_scales_may_be_powers_of_two_and_columns_are_filled_up(columns: int) -> None:
    casts = by_channel(FP8Config(emulate=True, scaling=SmoothSwiGLU(power_of_two=True)))
    x, weight = torch.rand(20, columns) + 0.3, torch.rand(20, columns) + 0.3
    casts.quantize(INPUT, x, dtype=formats.E4M3)
    made = casts.quantize(WEIGHT, weight, transposed=True, dtype=formats.E4M3)
    assert made.has_factors
    assert made.inverse_scale.log2().frac() == 0
    assert made.scale_of_transpose().shape == (made.transpose.shape[0],)
    assert made.scale_of_transpose().isfinite().all()
    torch.testing.assert_close(made.dequantize(20, columns), weight, rtol=0.07, atol=0)


def test_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casting, "is_captured", lambda tensor: True)
    with pytest.raises(RuntimeError, match=r'scaling="smooth-swiglu"\) does not go into a CUDA graph'):
        by_channel().quantize(INPUT, torch.ones(16, 16))
