from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import pytest
import torch

from fp8booster.argument_types import is_of, require_types, types_of, wrong_type


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (True, {bool}),
        (1, {int, float}),
        (2**70, {int, float}),
        (1.0, {float}),
        (np.float32(1), {float}),
        (np.int64(1), {int, float}),
        ("no", {str}),
        (None, {type(None)}),
        (torch.bfloat16, {torch.dtype}),
        ((0.9, 1), {tuple[float, float]}),
        ([0.9, 1], {tuple[float, float]}),
        ([1, 2], {list[int], tuple[float, float]}),
        ((1, 2, 3), {list[int]}),
        ([1, True], set()),
        ((0.9,), set()),
    ],
    ids=lambda each: None if isinstance(each, set) else str(each),  # a set has another order in each process
)
def test_a_value_is_of_these_types_alone(value, kinds):
    known = (bool, int, float, str, type(None), torch.dtype, list[int], tuple[float, float])
    assert {kind for kind in known if is_of(value, kind)} == kinds


def test_types_are_those_of_a_union_and_of_a_default_of_none():
    assert types_of(int | None) == types_of(Optional[int]) == types_of(int, None) == [int, type(None)]  # noqa: UP045
    assert types_of(Callable[..., Any]) == types_of(Callable[..., Any] | None) == []


def test_an_annotation_with_another_type_is_not_looked_at():
    assert wrong_type(3, str | Callable[..., Any]) is None
    assert wrong_type(3, str) == "text"
    assert wrong_type(3, str, None) == "text or None"
    assert wrong_type(None, str, None) is None


def test_the_argument_is_named():
    def takes(self: object, count: int = 1, share: float | None = None, rest: Any = None) -> None:
        require_types(takes, locals(), "it.")

    takes(None, 2, 1, "anything")
    with pytest.raises(TypeError, match=r"^it\.count is True; it must be a whole number$"):
        takes(None, True)
    with pytest.raises(TypeError, match=r"^it\.share is 'x'; it must be a number or None$"):
        takes(None, 2, "x")
