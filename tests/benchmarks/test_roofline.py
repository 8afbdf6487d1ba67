from __future__ import annotations

import pytest
import torch

from benchmarks.harness.environment import Gpu
from benchmarks.harness.roofline import CopyBandwidth, ProductFloor, cast_bytes
from benchmarks.harness.timing import time_interleaved

H100 = Gpu("H100 SXM", (9, 0), 132, "", 1.83e9, "700 W")
UNLISTED = Gpu("other", (0, 0), 1, "", 1e9, "")


@pytest.mark.parametrize(
    ("amax_given", "layouts", "bytes_each"), [(False, 0, 2), (False, 1, 5), (False, 2, 6), (True, 1, 3), (True, 2, 4)]
)
def test_bytes_of_a_cast(amax_given, layouts, bytes_each) -> None:
    assert cast_bytes(1000, amax_given=amax_given, layouts=layouts) == 1000 * bytes_each


def test_peaks_are_the_data_sheet_s() -> None:
    # H100 SXM at its boost clock: 989.4 and 1978.9 TFLOP/s without sparsity
    assert H100.peak_flops("BF16") == pytest.approx(989.4e12, rel=1e-3)
    assert H100.peak_flops("FP8") == pytest.approx(1978.9e12, rel=1e-3)
    assert UNLISTED.peak_flops("FP8") is None


def test_a_large_product_is_bound_by_arithmetic_and_a_thin_one_by_bytes() -> None:
    floor = ProductFloor(H100, bytes_per_second=3e12)
    large = floor.ms(8192, 8192, 8192, "BF16")
    assert large == pytest.approx(1e3 * 2 * 8192**3 / H100.peak_flops("BF16"))
    thin = floor.ms(16, 8192, 8192, "FP8")
    assert thin == pytest.approx(1e3 * (16 * 8192 + 8192 * 8192 + 2 * 16 * 8192) / 3e12)


def test_without_a_known_peak_bytes_are_the_floor() -> None:
    floor = ProductFloor(UNLISTED, bytes_per_second=1e9)
    assert floor.ms(1000, 1000, 1000, "BF16") == pytest.approx(6.0)


def test_bandwidth_counts_bytes_read_and_written() -> None:
    device = torch.device("cpu")
    copy = CopyBandwidth(device)
    timings = time_interleaved([copy.variant], device=device, rounds=3, sample_ms=0.1)
    assert copy.bytes_per_second(timings) == pytest.approx(2 * 2**20 / (timings["copy"].ms.median * 1e-3))
