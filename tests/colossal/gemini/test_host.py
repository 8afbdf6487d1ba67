"""What a step of Gemini costs the host: no wait for the device in BF16, and no look for messages that nobody sees."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch

from tests.colossal.gemini.observations import FP16
from tests.colossal.gemini.runs import Run, boost, native, wire
from tests.colossal.zero.runs import batch
from tests.distributed import ranks
from tests.plugins.norms import HostReads


def _reads_of_a_step(run: Run) -> int:
    """How often the host reads a tensor in forward, backward and the optimizer's step; not in the first."""
    tokens = batch()
    run.step(tokens)
    with HostReads() as reads:
        loss = run.loss(tokens)
        with torch._C.DisableTorchFunction():  # Gemini's own class of tensors cannot go backward under a mode
            loss = loss.as_subclass(torch.Tensor)
        run.booster.backward(loss, run.optimizer)
        run.optimizer.step()
    return reads.count


@ranks(2)
@pytest.mark.parametrize(
    "options", [{}, {"max_norm": 1e-3}, {"max_norm": 1e-3, "min_chunk_size_m": 32}, {"max_prefetch": 2}], ids=str
)
def test_the_host_reads_nothing_in_bf16(options: Any) -> None:
    assert _reads_of_a_step(boost(wire(**options))) == 0


@ranks(2)
def test_the_host_reads_the_norm_natively_and_the_loss_scale_in_fp16() -> None:
    assert _reads_of_a_step(boost(native(max_norm=1e-3))) > 0
    assert _reads_of_a_step(boost(wire(**FP16))) > 0


@ranks(2)
def test_a_step_of_colossal_ais_own_optimizer_gets_numbers() -> None:
    run = boost(wire(max_norm=1e-3))
    step = run.optimizer.optim.step
    with (
        mock.patch("fp8booster.colossal.gemini.optimizer.OURS", ()),
        mock.patch.object(run.optimizer.optim, "step", side_effect=step) as stepped,
    ):
        run.step(batch())
        clipped = stepped.call_args.kwargs["div_scale"]
        assert type(clipped) is float
        assert clipped == pytest.approx((run.optimizer.get_grad_norm() + 1e-6) / 1e-3)
        run.optimizer.max_norm = 1e6
        run.step(batch())
        assert stepped.call_args.kwargs["div_scale"] == -1


@ranks(2)
def test_the_logger_is_asked_for_messages_that_are_shown_alone() -> None:
    from colossalai.logging import DistributedLogger

    run, logger = boost(wire()), logging.getLogger("colossalai")
    level, disabled = logger.level, logging.root.manager.disable
    with mock.patch.object(DistributedLogger, "debug") as asked:
        run.step(batch())
        assert not asked.called
        logger.setLevel(logging.DEBUG)
        logging.disable(logging.NOTSET)
        try:
            run.step(batch())
        finally:
            logger.setLevel(level)
            logging.disable(disabled)
    assert "comp cuda demand time" in asked.call_args.args[0]
