"""Which scale an operand gets by its role, and when a history begins anew."""

from __future__ import annotations

import pytest
import torch

from fp8booster import FP8Config, formats
from fp8booster.nn.weights.casting import INPUT, OUTPUT_GRADIENT, REAL_TIME, WEIGHT, Casts
from fp8booster.nn.weights.channels import ChannelCasts
from fp8booster.nn.weights.steps import note_step
from fp8booster.tensor import quantize
from tests.kernels.matrices import same

DELAYED = FP8Config(scaling="delayed", delayed_history=2, emulate=True)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("role", [WEIGHT, INPUT, OUTPUT_GRADIENT])
def test_a_role_has_the_scales_of_its_granularity(role: str, granularity: str, power_of_two: bool) -> None:
    config = FP8Config(granularity=granularity, power_of_two=power_of_two, emulate=True)
    tensor = torch.randn(3, 128, 256).requires_grad_() * torch.logspace(-2, 2, 128).view(1, -1, 1)
    found = Casts().quantize(role, config, tensor, formats.E4M3, transposed=True)
    expected = quantize(
        tensor.detach().view(-1, 256),
        formats.E4M3,
        transposed=True,
        scale_for={"tensorwise": "tensor", "rowwise": "row", "blockwise": "block" if role == WEIGHT else "group"}[
            granularity
        ],
        power_of_two=power_of_two,
    )
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or same(one, other)
        assert one is None or not one.requires_grad


@pytest.mark.parametrize("what", ["nothing", "configuration", "dtype"])
def test_a_history_goes_on_for_the_same_casts_alone(what: str) -> None:
    casts, ones = Casts(), torch.ones(16, 16)
    casts.quantize(INPUT, DELAYED, 8 * ones, formats.E4M3)
    note_step()
    config = FP8Config(scaling="delayed", delayed_history=3, emulate=True) if what == "configuration" else DELAYED
    dtype = formats.E5M2 if what == "dtype" else formats.E4M3
    scale = casts.quantize(INPUT, config, ones, dtype).inverse_scale
    amax = 8.0 if what == "nothing" else 1.0
    torch.testing.assert_close(scale, torch.tensor(amax / formats.MAX[dtype]))
    other = casts.quantize(WEIGHT, DELAYED, ones, formats.E4M3)  # of another role
    torch.testing.assert_close(other.inverse_scale, torch.tensor(1 / formats.MAX[formats.E4M3]))


def test_what_is_remembered_is_kept_until_it_is_used_and_used_once() -> None:
    casts, ones = Casts(), torch.ones(16, 16)
    kept = {INPUT: torch.tensor([4.0, 4.0, 4.0]), WEIGHT: torch.tensor([2.0, 2.0, 2.0])}
    casts.remember(kept)
    assert casts.remembered.keys() == kept.keys()
    found = casts.quantize(INPUT, DELAYED, ones, formats.E4M3)
    torch.testing.assert_close(found.inverse_scale, torch.tensor(4 / 448))
    assert casts.remembered.keys() == kept.keys()
    assert casts.remembered[WEIGHT] is kept[WEIGHT]
    assert casts.remembered[INPUT].tolist() == [1.0, 4.0, 4.0]
    casts.quantize(INPUT, DELAYED, ones, formats.E5M2)
    assert casts.remembered[INPUT].tolist() == [1.0, 0.0, 0.0]
    casts.remember({INPUT: torch.tensor([4.0, 4.0])})  # of another length
    casts.quantize(INPUT, DELAYED, 2 * ones, formats.E4M3)
    assert casts.remembered[INPUT].tolist() == [2.0, 0.0, 0.0]


def test_a_constant_scale_remembers_nothing() -> None:
    casts = Casts()
    casts.quantize(INPUT, FP8Config(scaling="constant", emulate=True), torch.ones(16, 16), formats.E4M3)
    assert casts.remembered == {}


@pytest.mark.parametrize(
    ("casts", "config", "found"),
    [
        (Casts(), FP8Config(), True),
        (Casts(), FP8Config(power_of_two=True), True),
        (Casts(), FP8Config(granularity="rowwise"), False),
        (Casts(), DELAYED, False),
        (REAL_TIME, DELAYED, True),
        (ChannelCasts(), FP8Config(), False),
    ],
)
def test_inputs_are_scaled_by_their_amax_alone(casts: Casts, config: FP8Config, found: bool) -> None:
    assert casts.scales_inputs_by_their_amax(config) is found


def test_an_amax_that_is_known_scales_the_first_step_and_is_what_later_ones_remember() -> None:
    """As that of a whole of which this is a part."""
    casts, ones = Casts(), torch.ones(16, 16)
    made = casts.quantize(INPUT, DELAYED, ones, formats.E4M3, amax=torch.tensor(16.0))
    torch.testing.assert_close(made.inverse_scale, torch.tensor(16 / 448))
    note_step()
    made = casts.quantize(INPUT, DELAYED, ones, formats.E4M3)
    torch.testing.assert_close(made.inverse_scale, torch.tensor(16 / 448))


def test_delayed_scales_may_be_powers_of_two() -> None:
    config = FP8Config(scaling="delayed", power_of_two=True, emulate=True)
    casts, values = Casts(), torch.full((16, 16), 1.7)
    for amax in (None, torch.tensor(1.7)):
        made = casts.quantize(INPUT, config, values, formats.E4M3, amax=amax)
        assert made.inverse_scale.log2().frac() == 0
        note_step()
        made = casts.quantize(INPUT, config, values, formats.E4M3, amax=amax)
        assert made.inverse_scale.log2().frac() == 0
