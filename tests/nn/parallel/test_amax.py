"""What ranks reduce to a maximum holds no NaN, which the maximum of NCCL and of gloo may drop."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fp8booster import FP8Config
from fp8booster.comm.transport import agree_on_amax
from fp8booster.nn.parallel.tensor_parallel import SequenceColumn, SequenceRow
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import deliver_amax


class Reduced(Exception):
    """Ends a call where it reduces."""


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("delivered", [False, True])
@pytest.mark.parametrize("place", ["input", "gradient", "weight"])
def test_the_amax_of_what_is_not_finite_is_infinite(monkeypatch, place, delivered, value) -> None:
    reduced = []

    def reduce(amax: torch.Tensor, op: object, group: object) -> None:
        assert op == dist.ReduceOp.MAX
        reduced.append(amax.clone())
        raise Reduced

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    part = torch.ones(1, 16, 64, dtype=torch.bfloat16)
    part[0, 3, 5] = value
    known = torch.tensor([abs(value)]) if delivered else None
    calls = {
        "input": lambda: SequenceColumn("group").input(deliver_amax(part, known), Casts(FP8Config()), transposed=True),
        "gradient": lambda: SequenceRow("group").output_gradient(
            deliver_amax(part, known), Casts(FP8Config()), plain=True, transposed=True
        ),
        "weight": lambda: agree_on_amax([part], "group", None if known is None else [known[0]]),
    }
    with pytest.raises(Reduced):
        calls[place]()
    assert reduced[0].isposinf().all()
