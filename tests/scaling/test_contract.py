"""What is refused of a strategy of one's own when it is given, and not deep in a step; and names with arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster import Encoding, FP8Config, convert_to_fp8, fuse, report
from fp8booster.nn import capture_layers
from fp8booster.scaling import RealTime, Scaling, State, named
from fp8booster.tensor import QuantizedMatrix

REAL_TIME = RealTime()


class Own(Scaling):
    """A strategy that casts in real time."""

    name = "own"

    def cast(self, role: str, matrix: torch.Tensor, dtype: torch.dtype, **given: Any) -> QuantizedMatrix:
        given.pop("state", None)
        return REAL_TIME.cast(role, matrix, dtype, **given)


class Stateful(Own):
    def new_state(self) -> State:
        return State()


class NoCast(Scaling):
    name = "none"


class Nameless(Own):
    name = ""


class Fine(Own):
    granularity = "channelwise"


class WrongState(Own):
    def new_state(self) -> Any:
        return {}


@dataclass(frozen=True)
class Listed(Own):
    values: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    ("scaling", "error", "reason"),
    [
        (NoCast(), TypeError, "NoCast does not override cast"),
        (Nameless(), TypeError, "has the name ''; give it one"),
        (Fine(), ValueError, "the granularity 'channelwise'; use tensorwise or rowwise or blockwise"),
        (WrongState(), TypeError, "new_state returns a dict; return an fp8booster.scaling.State"),
        (Stateful(), TypeError, "keeps a state and does not override without_state"),
        (Listed(), TypeError, "cannot be hashed; make it a dataclass with frozen=True"),
        (3, TypeError, "give a name such as 'delayed', or an fp8booster.scaling.Scaling"),
    ],
)
def test_what_does_not_keep_to_the_contract_is_refused(scaling: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        FP8Config(scaling=scaling)


def test_a_cast_that_gives_something_else_says_so() -> None:
    class Nothing(Own):
        def cast(self, *args: Any, **given: Any) -> Any:
            return None

    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32)), FP8Config(scaling=Nothing(), always=True))
    with pytest.raises(TypeError, match=r"Nothing\.cast returns a NoneType; return an fp8booster\.tensor\.Quantized"):
        model(torch.randn(16, 32))


def test_names_take_spaces_and_each_argument_once() -> None:
    assert named(" delayed (history=4)") == named("delayed(history=4)")
    with pytest.raises(ValueError, match=r"write delayed\(argument=value\)"):
        named("delayed(history=4, history=5)")


@pytest.mark.parametrize("size", ["a", [], 256.0, True])
def test_a_block_size_is_a_whole_number(size: Any) -> None:
    with pytest.raises(ValueError, match=r"^Encoding\.block_size is "):
        Encoding(block_size=size)


def test_names_of_products_are_texts() -> None:
    with pytest.raises(ValueError, match="give a tuple of names"):
        FP8Config(fast_accumulation=([],))  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [convert_to_fp8, fuse, report, capture_layers])
def test_a_model_is_a_module(function: Any) -> None:
    with pytest.raises(TypeError, match=r"^the model is a NoneType; give an nn\.Module$"):
        function(None)
