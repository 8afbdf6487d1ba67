"""The Trainer and Accelerate under DDP on two ranks: gradients are sent in FP8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fp8booster import comm
from fp8booster.hf import prepare
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks, shared_folder
from tests.hf.ways import ALWAYS, LIBRARIES, run

CLOSE = 0.01


@ranks(2)
def test_each_call_says_whether_gradients_are_sent_in_fp8() -> None:
    model = prepare(tiny_llama().bfloat16(), ALWAYS)
    for config in (replace(ALWAYS, messages=None), ALWAYS, replace(ALWAYS, messages=None)):
        prepare(model, config)
        comm.reset_statistics()
        wrapped = DistributedDataParallel(model)
        wrapped(input_ids=token_batch(0), labels=token_batch(0)).loss.backward()
        assert (comm.statistics()["all_reduce"].calls > 0) == (config.messages is not None)


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
