from __future__ import annotations

import pytest

from benchmarks.harness.statistics import Samples


def test_median_and_spread() -> None:
    samples = Samples.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert (samples.low, samples.median, samples.high) == (2.0, 6.0, 10.0)
    assert samples.as_record() == {"median": 6.0, "p10": 2.0, "p90": 10.0, "values": list(samples.values)}


def test_one_slow_round_leaves_the_median() -> None:
    assert Samples.of([1.0, 1.0, 100.0]).median == 1.0


def test_ratios_are_taken_round_by_round() -> None:
    # clocks that halve after the first round change both times and not their ratio
    slow, fast = Samples.of([2.0, 4.0, 4.0]), Samples.of([1.0, 2.0, 2.0])
    assert slow.over(fast).values == (2.0, 2.0, 2.0)


def test_ratios_need_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Samples.of([1.0, 2.0]).over(Samples.of([1.0]))


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        Samples.of([])
