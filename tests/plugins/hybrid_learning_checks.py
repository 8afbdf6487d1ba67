"""Every mode of `HybridParallelPlugin` learns in FP8 what one process learns in FP8."""

from __future__ import annotations

import functools
import statistics

from fp8booster.cli.train.schedule import Schedule
from tests.plugins.hybrid_runs import MODES, fp8, learn, learn_alone, start
from tests.plugins.registry import check_each

STEPS = 50
LAST = 5
"""Steps whose mean loss is compared."""

SCHEDULE = Schedule(peak=2e-3, floor=0.0, warmup=5, decay=STEPS)
"""Ends at zero: at a rate that stays high two runs part by more than FP8's rounding explains."""

WITHIN = 0.01


@functools.cache
def alone() -> list[float]:
    """The losses of one process."""
    return learn_alone(STEPS, SCHEDULE)


def assert_follows(losses: list[float]) -> None:
    """They fall as the losses of one process do, and end within 1 % of them."""
    expected = alone()
    assert expected[-1] < 0.75 * expected[0], expected
    end, expected_end = statistics.fmean(losses[-LAST:]), statistics.fmean(expected[-LAST:])
    assert abs(end / expected_end - 1) < WITHIN, (end, expected_end)
    apart = statistics.fmean(abs(one / other - 1) for one, other in zip(losses, expected, strict=True))
    assert apart < WITHIN, apart


@check_each(*MODES)
def the_loss_follows_one_process_in_fp8_over_50_steps(mode: str) -> None:
    assert_follows(learn(start(fp8(mode)), last=STEPS, schedule=SCHEDULE))
