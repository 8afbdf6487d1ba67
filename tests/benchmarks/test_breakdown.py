from __future__ import annotations

import pytest
import torch

from benchmarks.harness.breakdown import by_part, kernel_us, part_of


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


@pytest.mark.gpu
def test_kernels_of_a_product() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    parts = by_part(kernel_us(lambda: x @ x, repeats=3))
    assert parts["products"] > 0
    assert parts["casts"] == 0
