"""Gemini in FP8 learns as LowLevelZero in FP8 does: the same model, text and schedule."""

from __future__ import annotations

from tests.colossal.models import tiny_llama
from tests.plugins import training
from tests.plugins.convergence_checks import STEPS, learn
from tests.plugins.gemini_runs import boost, config, wire
from tests.plugins.registry import check

WITHIN = 0.01
BYTES = {"vocab_size": 256}


@check
def over_50_steps_the_loss_follows_that_of_low_level_zero_within_1_percent() -> None:
    zero = training.ours(stage=2, max_norm=1.0, use_fp8=True, fp8_config=config())
    expected = learn(training.boost(zero, tiny_llama(**BYTES)))
    losses = learn(boost(wire(max_norm=1.0), tiny_llama(**BYTES)))
    assert len(losses) == STEPS
    assert expected[-1] < 0.8 * expected[0]
    for number, (one, other) in enumerate(zip(expected, losses, strict=True)):
        assert abs(other / one - 1) < WITHIN, (number, one, other)
