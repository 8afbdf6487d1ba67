"""Parts of a tensor add up to the whole one's line."""

from __future__ import annotations

import math

import pytest

from fp8booster.monitor.scales import Totals, merged, row_of

KEY = "layers.0.up_proj", "input", "e4m3"


def totals(amax: float = 2.0, inverse_scale: float = 0.25, **others: float) -> Totals:
    sums = {"values": 10, "nonzero": 8, "flushed": 2, "saturated": 1, "non_finite": 0}
    powers = {"signal": 40.0, "noise": 0.4, "fourth": 640.0}
    return Totals(amax, inverse_scale, **sums | powers | others)


def test_a_line_has_shares_and_decibels() -> None:
    row = row_of(50, KEY, totals())
    assert (row.step, row.layer, row.role, row.format) == (50, *KEY)
    assert (row.amax, row.scale, row.flushed, row.saturated) == (2.0, 4.0, 0.25, 0.1)
    assert row.snr_db == pytest.approx(20.0)
    assert row.outlier == pytest.approx(2.0 / math.sqrt(4.0))
    assert row.kurtosis == pytest.approx((640.0 / 10) / (40.0 / 10) ** 2)
    assert (row.non_finite, row.ranks) == (0, 1)


def test_shares_and_outliers_are_of_the_values_that_count() -> None:
    row = row_of(1, KEY, totals(values=12, nonzero=4, flushed=1, saturated=3, non_finite=2, signal=40.0))
    assert (row.flushed, row.saturated, row.non_finite) == (0.25, 0.25, 2)
    assert row.outlier == pytest.approx(2.0 / math.sqrt(40.0 / 10))  # what is not finite has no part in the root
    assert row.kurtosis == pytest.approx((640.0 / 10) / (40.0 / 10) ** 2)


def test_ranks_add_up_and_the_largest_amax_has_the_scale() -> None:
    other = totals(8.0, 1.0, signal=20.0, noise=0.1, non_finite=3)
    (whole,) = merged([{KEY: totals()}, {KEY: other}]).values()
    assert whole == Totals(8.0, 1.0, 20, 16, 4, 2, 3, 60.0, 0.5, 1280.0, ranks=2)


def test_a_tensor_of_some_ranks_alone_counts_these() -> None:
    whole = merged([{KEY: totals()}, {}, {KEY: totals(), ("head", "weight", "e4m3"): totals()}])
    assert [each.ranks for each in whole.values()] == [2, 1]


def test_micro_batches_add_up_on_one_rank() -> None:
    assert totals().merged(totals()).ranks == 1
    assert totals().merged(totals()).values == 20


def test_what_is_no_number_is_none() -> None:
    broken = row_of(1, KEY, totals().merged(totals(inverse_scale=math.nan, noise=math.nan, non_finite=1)))
    assert (broken.scale, broken.snr_db, broken.non_finite) == (None, None, 1)
    nothing = row_of(1, KEY, totals(0.0, 1.0, nonzero=0, flushed=0, saturated=0, signal=0.0, noise=0.0, fourth=0.0))
    assert (nothing.scale, nothing.flushed, nothing.snr_db, nothing.outlier) == (1.0, 0.0, None, None)
    assert nothing.kurtosis is None
    assert row_of(1, KEY, totals(noise=0.0)).snr_db is None
