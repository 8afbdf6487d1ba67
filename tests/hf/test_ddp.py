"""The Trainer and Accelerate under DDP on two ranks: gradients are sent in FP8."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from tests.distributed import ranks, shared_folder
from tests.hf.ways import ALWAYS, LIBRARIES, run

CLOSE = 0.01


@ranks(2)
@pytest.mark.parametrize("way", LIBRARIES)
def test_gradients_are_sent_in_fp8(way: str) -> None:
    folder = shared_folder(way)
    native = run(way, folder / "bf16", None)
    assert comm.statistics()["all_reduce"].calls == 0
    ours = run(way, folder / "fp8", ALWAYS)
    sent = comm.statistics()["all_reduce"]
    steps = len(ours.losses)
    parameters = sum(each.numel() for each in ours.model.parameters())
    assert sent.raw_bytes == steps * parameters * 4
    assert sent.ratio < 0.27
    assert not sent.uncompressed
    # all of the model is in one bucket; DDP's first, of 1 MiB, is as large as all of it
    assert sent.calls == steps
    assert ours.losses == pytest.approx(native.losses, rel=CLOSE)
    for each in ours.model.parameters():
        other = each.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(each, other)
