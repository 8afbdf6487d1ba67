"""Encodings of gradients: each trains, in both stages alike."""

from __future__ import annotations

import statistics

import pytest
import torch

from fp8booster import FP8Config, comm
from fp8booster.comm import Encoding
from fp8booster.monitor.traffic import bytes_sent
from tests.colossal.zero.runs import CLOSE, assert_same_on_all_ranks, batch, masters, wire
from tests.colossal.zero.test_traffic import traffic
from tests.distributed import ranks
from tests.plugins.test_low_level_zero_convergence import LAST, WITHIN, learn, learner, losses_of_16_bit_traffic
from tests.plugins.training import (
    STAGES,
    Boosted,
    assert_close,
    assert_equal,
    assert_trains_equally,
    boost,
    native,
    train,
)

ENCODINGS = (Encoding(block_size=None), Encoding(automatic_scaling=True))


def scaled(messages: Encoding, stage: int = 2) -> Boosted:
    """A run of `tiny_llama` with this scaling."""
    return boost(wire(stage=stage, fp8_config=FP8Config(messages=messages)))


@ranks(2)
@pytest.mark.parametrize("messages", ENCODINGS, ids=["tensor", "automatic"])
def test_both_stages_train_alike_near_16_bits_and_not_as_with_blocks(messages: Encoding) -> None:
    runs = [scaled(messages, stage) for stage in STAGES]
    assert_trains_equally(*runs)
    assert_equal(*map(masters, runs))
    losses = train(scaled(messages))
    assert_close(train(boost(native())), losses, CLOSE)
    assert losses != train(scaled(Encoding()))


@ranks(2)
@pytest.mark.parametrize("_", ["defaults"])
def test_blocks_are_the_default(_: str) -> None:
    assert_trains_equally(boost(wire(fp8_config=None)), scaled(Encoding()))


@ranks(2)
def test_mu_moves_once_a_step_and_is_the_same_on_all_ranks() -> None:
    run = scaled(ENCODINGS[1])
    scaling = run.optimizer.automatic_scaling
    assert scaling.mu.item() == 0.5
    run.step(batch())
    assert scaling.mu.item() in (0.25, torch.tensor(0.5 * comm.automatic_scaling.GROWTH).item())
    assert_same_on_all_ranks(scaling.mu.view(1))


@ranks(2)
def test_what_automatic_scaling_sends_is_in_the_statistics() -> None:
    counted = traffic(scaled(ENCODINGS[1]))
    rows = comm.statistics().rows
    assert sum(row.wire_bytes for row in rows.values()) == counted.sent - bytes_sent("all_reduce", 4, 2)
    assert rows["reduce_scatter_tensor"].ratio < 0.52


@ranks(2)
@pytest.mark.parametrize("messages", ENCODINGS, ids=["tensor", "automatic"])
def test_real_text_is_learned_as_with_gradients_in_16_bits(messages: Encoding) -> None:
    plugin = wire(stage=2, max_norm=1.0, fp8_config=FP8Config(messages=messages))
    losses = (losses_of_16_bit_traffic(), learn(learner(plugin)))
    plain, on_the_wire = (statistics.fmean(run[-LAST:]) for run in losses)
    assert abs(on_the_wire / plain - 1) < WITHIN, (plain, on_the_wire)
