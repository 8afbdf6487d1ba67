"""Kernels that write into a tensor of the caller raise its version, as torch's own operations do."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from fp8booster import formats
from fp8booster.kernels import cross_entropy, rope, shard_cast
from fp8booster.kernels.adamw import AdamRates
from fp8booster.kernels.adamw_8bit import Moments8bit, Shards8bit, update_8bit
from fp8booster.kernels.operators import Operator

pytest.importorskip("triton")

from fp8booster.kernels import adamw_8bit_triton, cross_entropy_triton, rope_triton, shard_cast_triton

RATES = AdamRates(1e-3, (0.9, 0.95), 1e-8, 0.1, decoupled=True)


def silent(*arguments: object, **options: object) -> None:
    """A launch, which torch does not see."""


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=formats.E4M3)


def calls() -> dict[str, tuple[Callable[[], object], list[torch.Tensor]]]:
    """Each entry with what it writes."""
    master, eight_bit = torch.zeros(16), Moments8bit.zeros(16, torch.device("cpu"))
    x, one, angles = torch.ones(16, 32), torch.ones(()), torch.ones(1, 2, 4)
    qkv, out, transpose = torch.ones(1, 2, 3, 4), fp8(16 * 32), fp8(32, 16)
    return {
        "multiply_": (lambda: cross_entropy.multiply_(x, one), [x]),
        "rotate": (lambda: rope.rotate(qkv, angles, angles, 2), [qkv]),
        "cast_shards": (lambda: shard_cast.cast_shards([x.view(-1)], one.view(1), [out], [one]), [out, one]),
        "cast_shards by name": (
            lambda: shard_cast.cast_shards([x.view(-1)], one.view(1), outs=[out], inverse_scales=[one]),
            [out, one],
        ),
        "update_8bit": (
            lambda: update_8bit(Shards8bit([master], [None], [master], [eight_bit], [1], [0]), RATES, one),
            [master],
        ),
        "unpack": (lambda: shard_cast.unpack([fp8(16, 32)], [one], [transpose], [x]), [transpose, x]),
        "unpack, values alone": (lambda: shard_cast.unpack([fp8(16, 32)], [one], [None], [x]), [x]),
    }


@pytest.mark.parametrize("name", calls())
def test_what_a_kernel_writes_has_a_new_version(name) -> None:
    run, written = calls()[name]
    before = [tensor._version for tensor in written]
    with (
        patch.object(Operator, "uses_triton", lambda self, tensor: True),
        patch.object(cross_entropy_triton, "launch", silent),
        patch.object(rope_triton, "launch", silent),
        patch.object(shard_cast_triton, "launch_over", silent),
        patch.object(adamw_8bit_triton, "launch_over", silent),
    ):
        run()
    assert all(tensor._version > version for tensor, version in zip(written, before, strict=True))


def test_nothing_asked_for_is_nothing_written() -> None:
    with patch.object(Operator, "uses_triton", lambda self, tensor: True):
        shard_cast.unpack([fp8(16, 32)], [torch.ones(())], [None], [None])
