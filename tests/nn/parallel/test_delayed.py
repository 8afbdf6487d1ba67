"""Delayed scaling of what ranks gather: the bits of one process that casts the whole tensor."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from fp8booster import FP8Config
from fp8booster.comm.encoding import DEFAULT
from fp8booster.nn.parallel.tensor_parallel import SequenceColumn, SequenceRow
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT, Delayed
from fp8booster.scaling.steps import note_step
from tests.distributed import ranks
from tests.kernels.matrices import same

CONFIG = FP8Config(scaling=Delayed(history=2), emulate=True)


@ranks(2)
@pytest.mark.parametrize("communication", [True, False])
def test_ranks_that_gather_a_sequence_have_the_scales_of_one_process(communication: bool) -> None:
    of_rank, alone = Casts.of_layer(CONFIG), Casts.of_layer(CONFIG)
    layouts = {"plain": True, "transposed": True}
    for number, factors in enumerate(((1.0, 3.0), (8.0, 2.0), (1.0, 1.0), (1.0, 1.0), (1.0, 0.1))):
        torch.manual_seed(number)
        whole = torch.randn(1, 32, 48) * torch.tensor(factors).repeat_interleave(16).view(1, 32, 1)
        part = whole.chunk(2, 1)[dist.get_rank()].contiguous()
        for role in (INPUT, OUTPUT_GRADIENT):
            if role == INPUT:
                found = SequenceColumn(dist.group.WORLD, encoding=DEFAULT if communication else None).input(
                    part, of_rank, transposed=True
                )
            else:
                found = SequenceRow(dist.group.WORLD, encoding=DEFAULT if communication else None).output_gradient(
                    part, of_rank, **layouts
                )
            expected = alone.quantize(role, whole, transposed=True)
            assert all(same(one, other) for one, other in zip(found[:3], expected[:3], strict=True))
            assert torch.equal(*(each.state.by_role[role].amaxes for each in (of_rank, alone)))
        note_step()


@ranks(2)
def test_what_is_not_finite_on_one_rank_reaches_all() -> None:
    casts = Casts.of_layer(CONFIG)
    part = torch.ones(1, 16, 48)
    SequenceColumn(dist.group.WORLD).input(part, casts, transposed=False)
    note_step()
    if dist.get_rank() == 1:
        part[0, 3, 5] = math.nan
    made = SequenceColumn(dist.group.WORLD).input(part, casts, transposed=False)
    assert made.inverse_scale.isnan()
    assert casts.state.by_role[INPUT].amaxes.tolist() == [1.0, 1.0, 0.0]
