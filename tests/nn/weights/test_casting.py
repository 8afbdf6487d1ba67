"""The scales that an operand gets by its role, and when a history begins anew."""

from __future__ import annotations

import copy

import pytest
import torch

from fp8booster import FP8Config, formats
from fp8booster.config import Activations, Formats
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT, WEIGHT, Delayed, RealTime, Scaling
from fp8booster.scaling.smooth_swiglu import ChannelFactors
from fp8booster.scaling.steps import note_step
from fp8booster.tensor import QuantizedMatrix
from tests.kernels.matrices import quantize, same

DELAYED = FP8Config(scaling=Delayed(history=2), emulate=True)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("role", [WEIGHT, INPUT, OUTPUT_GRADIENT])
def test_a_role_has_the_format_and_the_scales_of_its_granularity(
    role: str, granularity: str, power_of_two: bool
) -> None:
    config = FP8Config(scaling=RealTime(granularity, power_of_two=power_of_two), emulate=True)
    tensor = torch.randn(3, 128, 256).requires_grad_() * torch.logspace(-2, 2, 128).view(1, -1, 1)
    found = Casts(config).quantize(role, tensor, transposed=True)
    expected = quantize(
        tensor.detach().view(-1, 256),
        config.gradient_format if role == OUTPUT_GRADIENT else formats.E4M3,
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


def test_formats_may_be_given_for_each_role_and_for_a_cast() -> None:
    casts = Casts(FP8Config(formats=Formats(input=formats.E5M2, gradient=formats.E4M3)))
    found = {role: casts.quantize(role, torch.ones(16, 16)).data.dtype for role in (WEIGHT, INPUT, OUTPUT_GRADIENT)}
    assert found == {WEIGHT: formats.E4M3, INPUT: formats.E5M2, OUTPUT_GRADIENT: formats.E4M3}
    assert casts.quantize(INPUT, torch.ones(16, 16), dtype=formats.E4M3).data.dtype is formats.E4M3


@pytest.mark.parametrize("what", ["nothing", "device", "dtype"])
def test_a_history_goes_on_for_the_same_casts_alone(what: str) -> None:
    casts, ones = Casts.of_layer(DELAYED), torch.ones(16, 16)
    casts.quantize(INPUT, 8 * ones)
    note_step()
    dtype = formats.E5M2 if what == "dtype" else formats.E4M3
    if what == "device":  # as after a move
        history = casts.state.by_role[INPUT]
        history.made_for = torch.device("meta"), dtype
    scale = casts.quantize(INPUT, ones, dtype=dtype).inverse_scale
    amax = 8.0 if what == "nothing" else 1.0
    torch.testing.assert_close(scale, torch.tensor(amax / formats.MAX[dtype]))
    other = casts.quantize(WEIGHT, ones)  # of another role
    torch.testing.assert_close(other.inverse_scale, torch.tensor(1 / formats.MAX[formats.E4M3]))


def test_casts_under_another_configuration_begin_anew_where_scaling_or_formats_differ() -> None:
    casts = Casts.of_layer(DELAYED)
    casts.observers.append(lambda *_: None)
    state = casts.state
    assert casts.under(DELAYED) is casts
    saved = FP8Config(scaling=Delayed(history=2), emulate=True, activations=Activations(saved="8-bit"))
    assert casts.under(saved) is casts
    assert casts.config is saved
    assert casts.state is state
    for other in (
        FP8Config(scaling=Delayed(history=3)),
        FP8Config(scaling=Delayed(history=2), formats=Formats(gradient=formats.E4M3)),
    ):
        anew = casts.under(other)
        assert anew.config is other
        assert anew.state is not state
        assert anew.observers is casts.observers


def test_what_is_saved_is_kept_until_it_is_used_and_used_once() -> None:
    casts, ones = Casts.of_layer(DELAYED), torch.ones(16, 16)
    kept = {INPUT: torch.tensor([4.0, 4.0, 4.0]), WEIGHT: torch.tensor([2.0, 2.0, 2.0])}
    casts.load(kept)
    assert casts.saved.keys() == kept.keys()
    found = casts.quantize(INPUT, ones)
    torch.testing.assert_close(found.inverse_scale, torch.tensor(4 / 448))
    assert casts.saved.keys() == kept.keys()
    assert casts.saved[WEIGHT] is kept[WEIGHT]
    note_step()
    assert casts.saved[INPUT].tolist() == [1.0, 4.0, 4.0]
    casts.quantize(INPUT, ones, dtype=formats.E5M2)
    note_step()
    assert casts.saved[INPUT].tolist() == [1.0, 0.0, 0.0]
    casts.load({INPUT: torch.tensor([4.0, 4.0])})  # of another length
    casts.quantize(INPUT, 2 * ones)
    note_step()
    assert casts.saved[INPUT].tolist() == [2.0, 0.0, 0.0]


def test_a_constant_scale_saves_nothing() -> None:
    casts = Casts.of_layer(FP8Config(scaling="constant", emulate=True))
    casts.quantize(INPUT, torch.ones(16, 16))
    assert casts.saved == {}


class Own(Scaling):
    """A strategy of a caller's, without a state."""

    name = "own"

    def cast(self, role, matrix, dtype, *, plain=True, transposed=False, amax=None, state=None) -> QuantizedMatrix:
        """Scale all by an amax of 2."""
        return RealTime().cast(role, matrix, dtype, plain=plain, transposed=transposed, amax=torch.tensor(2.0))


@pytest.mark.parametrize(
    ("casts", "found"),
    [
        (Casts.of_layer(FP8Config()), True),
        (Casts.of_layer(FP8Config(scaling="amax")), True),
        (Casts.of_layer(FP8Config(scaling="rowwise")), False),
        (Casts.of_layer(DELAYED), False),
        (Casts.of_layer(DELAYED).evaluation, True),
        (Casts(DELAYED), True),
        (Casts(FP8Config(scaling="smooth-swiglu"), ChannelFactors), False),
        (Casts.of_layer(FP8Config(scaling="smooth-swiglu")), True),
        (Casts.of_layer(FP8Config(scaling=Own())), False),
        (Casts(FP8Config(scaling=Own())), False),
    ],
)
def test_inputs_are_scaled_by_their_amax_alone(casts: Casts, found: bool) -> None:
    assert casts.inputs_have_their_own_scale is found


def test_engines_cast_by_real_time_scales_alone_and_say_why_not() -> None:
    reasons = {
        "tensorwise": None,
        "amax": None,
        "delayed": None,
        "constant": None,
        "smooth-swiglu": None,
        "rowwise": "rowwise scales",
        "blockwise": "blockwise scales",
    }
    for name, reason in reasons.items():
        assert Casts.of_layer(FP8Config(scaling=name)).why_not_by_engines == reason
    assert Casts(FP8Config(scaling="smooth-swiglu"), ChannelFactors).why_not_by_engines == "scales by channel"
    assert Casts(FP8Config(scaling=Own())).why_not_by_engines == "own scales"


def test_casts_are_observed_and_copies_of_them_are_not() -> None:
    casts, seen = Casts.of_layer(FP8Config()), []
    casts.observers.append(lambda *what: seen.append(what))
    x = torch.ones(2, 16)
    made = casts.quantize(INPUT, x)
    ((role, tensor, observed),) = seen
    assert (role, tensor is x, observed is made) == (INPUT, True, True)
    copy.deepcopy(casts).quantize(INPUT, x)
    casts.evaluation.quantize(INPUT, x)
    assert len(seen) == 1


def test_an_amax_that_is_known_scales_the_first_step_and_is_what_later_ones_remember() -> None:
    """As that of a whole of which this is a part."""
    casts, ones = Casts.of_layer(DELAYED), torch.ones(16, 16)
    made = casts.quantize(INPUT, ones, amax=torch.tensor(16.0))
    torch.testing.assert_close(made.inverse_scale, torch.tensor(16 / 448))
    note_step()
    made = casts.quantize(INPUT, ones)
    torch.testing.assert_close(made.inverse_scale, torch.tensor(16 / 448))


def test_delayed_scales_may_be_powers_of_two() -> None:
    config = FP8Config(scaling=Delayed(power_of_two=True), emulate=True)
    casts, values = Casts.of_layer(config), torch.full((16, 16), 1.7)
    for amax in (None, torch.tensor(1.7)):
        made = casts.quantize(INPUT, values, amax=amax)
        assert made.inverse_scale.log2().frac() == 0
        note_step()
        made = casts.quantize(INPUT, values, amax=amax)
        assert made.inverse_scale.log2().frac() == 0


def test_evaluation_follows_a_configuration_that_changes_no_cast() -> None:
    casts = Casts.of_layer(FP8Config(emulate=False))
    assert not casts.evaluation.config.emulate
    assert casts.under(FP8Config(emulate=True)) is casts
    assert casts.evaluation.config.emulate
