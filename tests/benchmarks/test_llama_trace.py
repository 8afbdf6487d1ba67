from __future__ import annotations

import gzip
import json

import pytest

from benchmarks.training.trace import EXPOSED, IDLE, ROWS, Kernel, attribute, breakdown, kernels_of, part_of, within

NCCL = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float>>"


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT", "products"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        (NCCL, "communication"),
        ("cast_kernel", "casts"),
        ("row_and_column_amax_kernel", "casts"),
        ("cast_shard_kernel", "casts"),
        ("encode_kernel", "casts"),
        ("sum_kernel", "casts"),
        ("unpack_kernel", "casts"),
        ("triton_red_fused_abs_amax_0", "casts"),
        ("triton_poi_fused__to_copy_clamp_mul_reciprocal_2", "casts"),
        ("triton_red_fused_abs_add_amax_mean_mul_pow_rsqrt_3", "norms and pointwise"),
        ("triton_poi_fused_mul_silu_1", "norms and pointwise"),
        ("row_norm_backward_kernel", "norms and pointwise"),
        ("activation_kernel", "norms and pointwise"),
        # a conversion of types, not to FP8
        (
            "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, "
            "at::native::memory::LoadWithCast<2>, at::native::memory::StoreWithCast<1>>",
            "norms and pointwise",
        ),
        ("void at::native::reduce_kernel<512, at::native::ReduceOp<float, sum_functor>>", "norms and pointwise"),
        ("void (anonymous namespace)::softmax_warp_forward<float>", "loss"),
        ("void at::native::nll_loss_backward_reduce_cuda_kernel_2d<float>", "loss"),
        ("cross_entropy_kernel", "loss"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::bfloat16_copy_kernel_cuda", "copies"),
    ],
)  # fmt: skip
def test_kernels_are_told_apart_by_name(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_what_the_optimizer_launches_is_its_unless_it_has_a_part_of_its_own() -> None:
    assert part_of(POINTWISE, in_optimizer=True) == "optimizer"
    assert part_of("Memset (Device)", in_optimizer=True) == "optimizer"
    assert part_of("cast_shard_kernel", in_optimizer=True) == "casts"
    assert part_of(NCCL, in_optimizer=True) == "communication"


def test_every_moment_belongs_to_one_part() -> None:
    found = attribute(
        [
            Kernel("nvjet_a", 100, 140),  # alone to 110, beside communication to 130, alone to 140
            Kernel(NCCL, 110, 130),
            Kernel(NCCL, 150, 180),  # nothing runs from 140 to 150; exposed to 160 and from 170
            Kernel("cast_kernel", 160, 170),
            Kernel("nvjet_b", 200, 220),  # shares 210 to 220 with the norm
            Kernel("row_norm_kernel", 210, 240),
        ]
    )
    assert found == dict.fromkeys(ROWS, 0.0) | {
        "products": 40 + 10 + 5,
        "casts": 10,
        "norms and pointwise": 5 + 20,
        EXPOSED: 20,
        IDLE: 10 + 20,
        "step": 140,
        "hidden communication": 20 + 10,
    }


def test_nothing_is_attributed_twice_or_lost_where_kernels_overlap() -> None:
    names = ("nvjet", "cast_kernel", NCCL, "flash_fwd", POINTWISE)
    kernels = [Kernel(names[i % 5], 7 * i % 53, 7 * i % 53 + 1 + 11 * i % 17) for i in range(60)]
    found = attribute(kernels)
    span = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)
    assert found["step"] == pytest.approx(span)
    assert sum(found[row] for row in ROWS) == pytest.approx(span)


def test_a_span_counts_from_its_beginning_to_its_end() -> None:
    kernels = [
        Kernel("nvjet_a", 10, 30),  # begins before the span
        Kernel(NCCL, 25, 60),  # what the step before has left travels until 60
        Kernel("cast_kernel", 70, 120),  # ends after it
        Kernel("nvjet_b", 120, 130),
    ]
    span = (20.0, 100.0)
    inside = within(kernels, span)
    assert [kernel.name for kernel in inside] == ["nvjet_a", NCCL, "cast_kernel"]
    assert attribute(inside, span) == dict.fromkeys(ROWS, 0.0) | {
        "products": 10,
        EXPOSED: 30,
        IDLE: 10,
        "casts": 30,
        "step": 80,
        "hidden communication": 5,
    }


def test_a_span_ends_idle_where_nothing_runs() -> None:
    assert attribute([Kernel("nvjet", 5, 6)], (0.0, 10.0))[IDLE] == 9


def test_a_trace_without_kernels() -> None:
    assert set(attribute([]).values()) == {0.0}


def test_the_kernels_of_a_trace(tmp_path) -> None:
    def launch(correlation: int, ts: float) -> dict:
        return {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": ts,
            "dur": 1,
            "args": {"correlation": correlation},
        }

    def kernel(name: str, correlation: int, ts: float, category: str = "kernel") -> dict:
        return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": 10, "args": {"correlation": correlation}}

    events = [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 3},
        # ranges show on the GPU's side too, and are no work
        {"ph": "X", "cat": "gpu_user_annotation", "name": "optimizer step", "ts": 30, "dur": 40},
        {"ph": "X", "cat": "user_annotation", "name": "optimizer step", "ts": 10, "dur": 10},
        launch(1, 5),
        launch(2, 12),
        launch(3, 25),
        kernel("nvjet", 1, 20),
        kernel(POINTWISE, 2, 30),  # launched within the range, run after it
        kernel(POINTWISE, 3, 40),
        kernel("Memset (Device)", 4, 50, "gpu_memset"),  # its launch was not recorded
    ]
    assert [kernel.in_optimizer for kernel in kernels_of(events)] == [False, True, False, False]
    trace = tmp_path / "trace.json.gz"
    with gzip.open(trace, "wt") as stream:
        json.dump({"traceEvents": events}, stream)
    found = breakdown(trace)
    assert found["kernels"] == 4
    assert found["ms"]["products"] == found["ms"]["optimizer"] == pytest.approx(0.01)
    assert found["ms"]["norms and pointwise"] == found["ms"]["copies"] == pytest.approx(0.01)
    with gzip.open(trace, "wt") as stream:
        of_step = {"ph": "X", "cat": "user_annotation", "name": "measured step", "ts": 35, "dur": 20}
        json.dump({"traceEvents": [*events, of_step]}, stream)
    of_step = breakdown(trace)
    assert of_step["kernels"] == 3
    assert of_step["ms"]["step"] == pytest.approx(0.02)
    assert of_step["ms"]["products"] == 0.0
    assert found["longest"][0] == {"kernel": POINTWISE, "ms": pytest.approx(0.02), "part": "norms and pointwise"}
