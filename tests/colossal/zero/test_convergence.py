"""FP8 on the wire changes hardly what a model learns from real text."""

from __future__ import annotations

import statistics

from tests.colossal.zero.runs import wire
from tests.distributed import ranks
from tests.plugins.test_low_level_zero_convergence import LAST, learn, learner, losses_of_16_bit_traffic

WITHIN = 0.003


@ranks(2)
def test_the_loss_ends_within_0_3_percent_of_gradients_and_weights_in_16_bits() -> None:
    losses = [losses_of_16_bit_traffic(), learn(learner(wire(stage=2, max_norm=1.0)))]
    plain, on_the_wire = (statistics.fmean(run[-LAST:]) for run in losses)
    assert plain < 0.65 * losses[0][0]
    assert losses[0] != losses[1]
    assert abs(on_the_wire / plain - 1) < WITHIN, (plain, on_the_wire)
