from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import breakdown, profiler
from benchmarks.harness.breakdown import NONE_SEEN, by_part, kernel_us, part_of
from benchmarks.harness.profiler import profiler_turn


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT", "products"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32", "products"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, ...>", "products"),
        ("amax_kernel", "casts"),
        ("cast_kernel", "casts"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "other"),
    ],
)
def test_kernels_are_told_apart(kernel, part) -> None:
    assert part_of(kernel) == part


def test_parts_are_summed_and_nothing_is_lost() -> None:
    kernels = {"amax_kernel": 1.0, "cast_kernel": 2.0, "nvjet_x": 4.0, "memset": 8.0}
    assert by_part(kernels) == {"products": 4.0, "casts": 3.0, "other": 8.0}


@pytest.fixture
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "lock_file", lambda: tmp_path / "lock")


def test_a_second_profile_waits_for_the_first_and_reports_it(own_lock, capsys) -> None:
    order: list[str] = []

    def second() -> None:
        with profiler_turn():
            order.append("second")

    thread = threading.Thread(target=second)
    with profiler_turn():
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert capsys.readouterr().err.count("which another process holds") == 1


@pytest.mark.parametrize("empty", range(breakdown.ATTEMPTS + 1))
def test_a_profile_without_kernels_is_taken_again(empty, own_lock, monkeypatch) -> None:
    profiles = [{}] * empty + [{"cast_kernel": 1.0}] * breakdown.ATTEMPTS
    monkeypatch.setattr(breakdown, "_profiled", lambda run, repeats: profiles.pop(0))
    assert kernel_us(lambda: None, 1) == ({"cast_kernel": 1.0} if empty < breakdown.ATTEMPTS else {})


@pytest.mark.gpu
def test_kernels_of_a_product() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    kernels = kernel_us(lambda: x @ x, repeats=3)
    if not kernels:
        with profiler_turn(), profile(activities=[ProfilerActivity.CUDA]) as plain:
            x @ x
            torch.cuda.synchronize()
        assert not any(event.device_type is DeviceType.CUDA for event in plain.key_averages())
        pytest.skip(NONE_SEEN)  # by torch's plain profile neither
    parts = by_part(kernels)
    assert parts["products"] > 0
    assert parts["casts"] == 0
