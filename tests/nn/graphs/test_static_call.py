"""What tells calls of a layer apart: each field by itself, and that tensors come back where they were."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fp8booster.nn.graphs.breaks import noted_breaks, run_eagerly
from fp8booster.nn.graphs.static_call import StaticCall
from fp8booster.nn.graphs.values import Places, Unsupported, flatten, maker_of


class Mode(Enum):
    FAST, SLOW = 1, 2


class Named(NamedTuple):
    x: torch.Tensor


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", trained: bool = False) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=trained)


ONE, OTHER = x(4), x(4)


def kind(value: Any) -> Any:
    return flatten(value, [])


ONLY_THIS_DIFFERS: dict[str, tuple[Any, Any]] = {
    "shape": (x(4, 2), x(2, 4)),
    "dtype": (x(4), x(4, dtype=torch.bfloat16)),
    "device": (x(4), x(4, device="meta")),
    "gradient": (x(4), x(4, trained=True)),
    "number": (1.0, 2.0),
    "integer or float": (1, 1.0),
    "truth or number": (True, 1),
    "nothing or false": (None, False),
    "text": ("sum", "mean"),
    "dtype by itself": (torch.float16, torch.bfloat16),
    "device by itself": (torch.device("cpu"), torch.device("meta")),
    "member": (Mode.FAST, Mode.SLOW),
    "tuple or list": ((x(4),), [x(4)]),
    "count": ((x(4),), (x(4), x(4))),
    "one twice": ([x(4)] * 2, [x(4), x(4)]),
    "which twice": ((ONE, ONE, OTHER), (ONE, OTHER, ONE)),
    "place": ((x(4), None), (None, x(4))),
    "depth": ((x(4), (x(4),)), ((x(4), x(4)),)),
    "name": ({"one": x(4)}, {"other": x(4)}),
    "value of a name": ({"one": 1}, {"one": 2}),
    "order of names": ({"one": x(4), "other": x(4)}, {"other": x(4), "one": x(4)}),
}


@pytest.mark.parametrize("what", ONLY_THIS_DIFFERS)
def test_values_that_differ_in_one_thing_are_of_two_kinds(what: str) -> None:
    one, other = ONLY_THIS_DIFFERS[what]
    assert kind(one) == kind(one)
    assert kind(one) != kind(other)
    assert len({kind(one), kind(other)}) == 2


def test_tensors_of_other_values_are_of_one_kind() -> None:
    assert kind([x(4), {"one": x(2, 2)}]) == kind([x(4) + 1, {"one": x(2, 2) - 1}])
    with torch.no_grad():  # where nobody asks for a gradient
        assert kind(x(4)) == kind(x(4, trained=True))


def test_a_tensor_that_is_there_twice_is_found_once_and_put_back_twice() -> None:
    found = [x(1)]
    flatten({"one": ONE, "other": OTHER, "again": [ONE]}, found)
    assert found[1] is ONE
    assert found[2] is OTHER
    assert len(found) == 3
    made = maker_of({"one": ONE, "other": OTHER, "again": [ONE]})([x(2), x(3)])
    assert made["again"][0] is made["one"]
    assert made["other"].shape == (3,)


def test_what_is_rebuilt_is_free_when_its_last_user_is() -> None:
    gc.disable()
    try:
        made = maker_of([ONE, (OTHER,)])([x(2), x(3)])
        held = [weakref.ref(made[0]), weakref.ref(made[1][0])]
        del made
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def test_tensors_are_found_and_put_back_in_their_places() -> None:
    value = (x(1), [x(2), "text", (x(3), None)], {"one": x(4), "two": 2.0})
    found: list[torch.Tensor] = []
    flatten(value, found)
    assert [each.shape[0] for each in found] == [1, 2, 3, 4]
    others = [torch.full_like(each, number) for number, each in enumerate(found)]
    made = maker_of(value)(others)
    assert made[0] is others[0]
    assert type(made[1]) is list
    assert made[1][0] is others[1]
    assert made[1][1:2] == ["text"]
    assert type(made[1][2]) is tuple
    assert made[1][2][0] is others[2]
    assert made[1][2][1] is None
    assert list(made[2]) == ["one", "two"]
    assert made[2]["one"] is others[3]
    assert made[2]["two"] == 2.0


@pytest.mark.parametrize("value", [Named(x(4)), {1, 2}, object(), torch.Size([1])])
def test_what_a_graph_cannot_be_given_is_named_by_its_class(value: object) -> None:
    with pytest.raises(Unsupported, match=f"^{type(value).__name__}$"):
        flatten((x(4), {"deep": [value]}), [])


def given(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of several types and layouts; some are no whole number of words of eight bytes."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.rand(96, generator=draw)
    numbers = torch.randint(-5, 5, (40,), generator=draw)
    return {
        "hidden": values[:32].view(2, 4, 4).requires_grad_(),
        "angles": values[:12].bfloat16().view(1, 3, 4),
        "places": numbers[:9],
        "mask": numbers[:7] > 0,
        "transposed": values[:24].view(4, 6).t(),
        "expanded": values[:4].expand(3, 4),
        "behind": numbers.int()[1:5],
        "lone": values[0].double(),
        "odd": values[:3].bfloat16(),
        "none": values[:0],
    }


def test_what_a_call_is_given_is_copied_whole_and_in_one_launch_where_it_is_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = torch.nn.Linear(1, 1)
    call = StaticCall(lambda **each: None, (), given(0), [layer], recompute=False)
    copied: list[list[torch.dtype]] = []
    copy = torch._foreach_copy_

    def noted(places: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        copied.append([each.dtype for each in tensors])
        copy(places, tensors)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    others = given(1)
    with torch.no_grad():
        call.lay_in(list(others.values()))
    for place, each in zip(call.inputs, others.values(), strict=True):
        assert torch.equal(place, each)
    words, rest = copied
    assert set(words) == {torch.int64}
    assert len(words) == 5  # hidden, angles, places, lone, none
    assert len(rest) == 5


def test_what_has_other_strides_than_at_the_capture_is_copied_too() -> None:
    tensors = list(given(0).values())
    places = Places([torch.empty_like(each) for each in tensors], tensors)
    others = list(given(1).values())
    with torch.no_grad():
        others[0] = others[0].transpose(1, 2).contiguous().transpose(1, 2)
        others[1] = torch.cat([others[1].view(-1)[:1], others[1].view(-1)])[1:].view(1, 3, 4)  # words begin elsewhere
        places.lay(others)
    for place, each in zip(places.tensors, others, strict=True):
        assert torch.equal(place, each)


def test_a_call_that_has_ended_holds_nobody_who_cuts() -> None:
    class Cut:
        def __call__(self, made: Sequence[torch.Tensor | None]) -> None:
            pass

    linear, x = nn.Linear(4, 4), torch.ones(2, 4)
    with noted_breaks(lambda: (0, 0), x.device) as noted:
        linear(run_eagerly(linear, x))
    call = StaticCall(
        lambda x: linear(run_eagerly(linear, x)), (x,), {}, [linear], recompute=False, results=noted.results
    )
    cuts = Cut(), Cut()
    held = list(map(weakref.ref, cuts))
    (made,) = call.forward(cuts[0])
    call.breaks[0].gradients_in = []
    call.backward([torch.ones_like(made)], cuts[1])
    call.end()
    del cuts
    gc.collect()
    assert [each() for each in held] == [None, None]


class _Holding(torch.autograd.Function):
    """Holds tensors for backward wherever a function can."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        made = [x.detach() + number for number in range(6)]
        held += made
        ctx.save_for_backward(made[0])
        ctx.attribute, ctx.named, ctx.listed = made[1], Named(made[2]), {"one": [made[3]]}
        ctx.function, ctx.partial = (lambda: made[4]), partial(torch.add, made[5])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def test_tensors_that_functions_hold_and_did_not_save_are_found() -> None:
    made: list[torch.Tensor] = []
    call = StaticCall(lambda x: _Holding.apply(x, made), (x(4, trained=True),), {}, [], recompute=False)
    call.forward()
    # the last is in the closure with all of the list
    assert {id(each) for each in call.held()} >= {id(each) for each in made[1:]}
    assert [each.data_ptr() for each in call.saved] == [made[0].data_ptr()]
    call.end()
    assert list(call.held()) == []
