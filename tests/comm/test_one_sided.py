"""What `use_one_sided` refuses; what it does is checked on GPUs, by `test_gpu.py`."""

from __future__ import annotations

import pytest
import torch

from fp8booster import comm
from fp8booster.comm.one_sided import mailbox_of
from tests.distributed import run_ranks

SENTENCES = ("capacity is 0; give", "is for GPUs, and torch sees none", "groups inside one node")


def refusals() -> None:
    for sentence, capacity, visible in zip(SENTENCES, (0, 2**20, 2**20), (True, False, True), strict=True):
        torch.cuda.is_available = lambda visible=visible: visible
        torch.cuda.current_device = lambda: 0
        with pytest.raises(ValueError, match=sentence):
            comm.use_one_sided(capacity=capacity)
        assert mailbox_of(None, torch.ones(4), 4) is None
    comm.stop_one_sided()  # of what was never begun: nothing
    values = torch.ones(4096)
    comm.all_reduce(values)
    assert values.unique().tolist() == [2.0]


def test_refuses_what_it_is_not_for() -> None:
    run_ranks(refusals, 2, environment={"LOCAL_WORLD_SIZE": "1"})
