"""Casts by amaxes of earlier steps, and what is written down of them."""

from __future__ import annotations

import math

import pytest
import torch

from fp8booster import formats
from fp8booster.kernels.cast import cast, cast_by, note_amax
from fp8booster.kernels.scales import amax_of
from tests.kernels.matrices import VIEWS, same, special, spread


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", formats.FORMATS)
@pytest.mark.parametrize("view", VIEWS)
def test_it_casts_as_by_a_given_amax_and_finds_the_true_one(view, dtype, power_of_two, device) -> None:
    matrix = VIEWS[view](spread((130, 70), torch.bfloat16)).to(device)
    past = torch.tensor([0.5, 2.0, 1.0], device=device)
    options = {"transposed": True, "power_of_two": power_of_two}
    *found, amaxes = cast_by(matrix, dtype, past, **options)
    for one, other in zip(found, cast.reference(matrix, dtype, amax=past, **options), strict=True):
        assert same(one, other)
    assert torch.equal(amaxes.max(), amax_of(matrix))


@pytest.mark.parametrize("source", formats.HIGH_PRECISION)
def test_the_amax_found_of_edge_values_is_exact(source, device) -> None:
    for name, matrix in special(source):
        matrix = matrix.to(device)
        amaxes = cast_by(matrix, formats.E4M3, torch.ones(1, device=device))[-1]
        assert same(amaxes.max(), amax_of(matrix)), name


@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_what_lies_beyond_the_past_saturates_and_nan_stays(dtype, device) -> None:
    matrix = torch.tensor([[0.5, -1.0, 8.0, -math.inf, math.nan]], device=device)
    data, _, inverse, _ = cast_by(matrix, dtype, torch.ones(2, device=device))
    values = (data[0, :5].float() * inverse).tolist()
    assert values[:4] == pytest.approx([0.5, -1.0, 1.0, -1.0])
    assert math.isnan(values[4])


@pytest.mark.parametrize(
    ("new_step", "amaxes", "expected"),
    [
        (True, [2.0, 5.0], [5.0, 4.0, 3.0]),
        (True, [2.0, 0.5], [2.0, 4.0, 3.0]),
        (False, [5.0], [5.0, 3.0, 2.0]),
        (False, [1.0, 2.0], [4.0, 3.0, 2.0]),  # the largest of a step
        (True, [0.0], [4.0, 4.0, 3.0]),  # nothing was learned: the last step stands for it
        (True, [1.0, math.nan], [4.0, 4.0, 3.0]),
        (False, [math.inf], [4.0, 3.0, 2.0]),
    ],
)
def test_the_largest_amax_of_each_step_is_noted(new_step, amaxes, expected, device) -> None:
    history, inverse = torch.tensor([4.0, 3.0, 2.0], device=device), torch.tensor(0.5, device=device)
    version = history._version
    note_amax(history, torch.tensor(amaxes, device=device), inverse, new_step=new_step)
    assert history.tolist() == expected
    assert history._version > version
    assert math.isnan(inverse) != math.isfinite(max(amaxes, key=lambda each: (math.isnan(each), each)))


def test_an_amax_is_noted_with_its_margin_if_that_is_finite(device) -> None:
    history, inverse = torch.zeros(2, device=device), torch.ones((), device=device)
    note_amax(history, torch.tensor([3.0], device=device), inverse, new_step=True, factor=4.0)
    note_amax(history, torch.tensor([2e38], device=device), inverse, new_step=True, factor=4.0)
    assert history.tolist() == [12.0, 12.0]
    assert inverse.item() == 1.0
