"""Weights of several sources that are pinned together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fp8booster import FP8Config
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.engine import EngineWeight, pin_all
from fp8booster.nn.weights.freshness import look_again
from fp8booster.nn.weights.pinned import Pinned, Use
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.tensor import QuantizedMatrix

COUNTS = (1, 3, 1)
"""Weights of each source."""

SOURCES = range(len(COUNTS))


def weight() -> nn.Parameter:
    """Return values that FP8 has, with the largest that it has: they are the same when they are decoded."""
    values = torch.randint(-7, 8, (32, 48)).float()
    values[0, 0] = torch.finfo(torch.float8_e4m3fn).max
    return nn.Parameter(values)


class Filled:
    """Sources that an engine has filled, pinned."""

    def __init__(self) -> None:
        self.weights = [[weight() for _ in range(count)] for count in COUNTS]
        self.sources = [EngineWeight() for _ in COUNTS]
        self.made = list(map(cast, self.weights))
        for source, weights, made in zip(self.sources, self.weights, self.made, strict=True):
            source.fill(weights, made)
        self.uses = [
            Use(source, tuple(weights), Casts(FP8Config()), True)
            for source, weights in zip(self.sources, self.weights, strict=True)
        ]
        pinned = pin_all(self.uses, record=_captures_nothing)
        assert pinned is not None
        self.pinned: list[Pinned] = pinned

    def refresh(self) -> bool:
        return all(each.refresh() for each in self.pinned)

    def versions(self) -> list[tuple[int, ...]]:
        return [each.version() for each in self.pinned]


def cast(weights: list[nn.Parameter]) -> QuantizedMatrix:
    return Casts(FP8Config()).quantize_weight(torch.cat([each.detach() for each in weights]), transposed=True)


def _captures_nothing(work: Callable[[], object]) -> tuple[Callable[[], None], object]:
    raise AssertionError


@pytest.mark.parametrize("number", SOURCES)
def test_one_look_is_at_all_and_sees_who_is_filled_elsewhere(number: int) -> None:
    filled = Filled()
    assert len(filled.pinned) == 1
    assert filled.refresh()
    source, weights, made = filled.sources[number], filled.weights[number], filled.made[number]
    source.fill(weights, QuantizedMatrix(*(each if each is None else each.view_as(each) for each in made)))
    assert filled.refresh()
    source.fill(weights, cast(weights))
    assert not filled.refresh()
    source.fill(weights, made)
    assert filled.refresh()
    source.drop()
    assert not filled.refresh()


@pytest.mark.parametrize("number", SOURCES)
def test_one_look_sees_whose_weights_were_written(number: int) -> None:
    filled = Filled()
    written = filled.weights[number][-1]
    look_again(written)  # it was not: its values are compared
    assert filled.refresh()
    with torch.no_grad():
        written.mul_(2)
    assert not filled.refresh()
    with torch.no_grad():
        written.div_(2)
    assert filled.refresh()
    written.data = torch.zeros_like(written)
    assert not filled.refresh()


@pytest.mark.parametrize("number", SOURCES)
def test_the_version_changes_with_each_filling(number: int) -> None:
    filled = Filled()
    before = filled.versions()
    assert filled.versions() == before
    filled.made[number].data.view(torch.uint8).add_(1)
    assert filled.versions() != before


def test_nothing_is_pinned_where_one_weight_has_no_place() -> None:
    filled = Filled()
    use = Use(ReshardedWeight(), tuple(filled.weights[0]), Casts(FP8Config()), True)
    assert pin_all([*filled.uses, use], record=_captures_nothing) is None
