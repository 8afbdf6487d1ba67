from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.harness.breakdown import NONE_SEEN, by_part, kernel_us, part_of, us_of_kernels


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


def test_kernels_are_told_from_what_the_host_does_whatever_object_has_their_type() -> None:
    # the profiler's events hold types that equal torch's without being the same object
    gpu, host = (DeviceType(int(kind)) for kind in (DeviceType.CUDA, DeviceType.CPU))
    events = [
        SimpleNamespace(key=key, device_type=kind, is_user_annotation=annotation, self_device_time_total=6.0)
        for key, kind, annotation in (
            ("cast_kernel", gpu, False),
            ("ProfilerStep*", gpu, True),
            ("aten::mm", host, False),
        )
    ]
    assert us_of_kernels(events, repeats=3) == {"cast_kernel": 2.0}


@pytest.mark.gpu
def test_kernels_of_a_product() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    kernels = kernel_us(lambda: x @ x, repeats=3)
    assert kernels, NONE_SEEN
    parts = by_part(kernels)
    assert parts["products"] > 0
    assert parts["casts"] == 0
