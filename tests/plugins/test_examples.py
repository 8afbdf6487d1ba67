"""The plugins take the arguments that Colossal-AI's own examples give theirs, with `use_fp8=True` added.

The cases are what the scripts of `examples/language` and `applications/Colossal-LLaMA` give at the defaults of their
options, but for the sizes of parallel groups, which are those of the ranks here.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, MixedPrecision

from fp8booster import plugins
from tests.distributed import ranks

FP16 = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
SWITCHES = {"use_fp8": False, "fp8_communication": False}
NO_MESSAGES = {"fp8_communication": False}
CHUNKS = {"precision": "bf16", "shard_param_frac": 1.0, "offload_optim_frac": 0.0, "offload_param_frac": 0.0}
AUTO = {"placement_policy": "auto", "precision": "bf16", "warmup_non_model_data_ratio": 0.8}
GROUPS = {"tp_size": 1, "extra_dp_size": 1}
KERNELS = {"enable_fused_normalization": False, "enable_flash_attention": False}
PREFETCH = {"max_prefetch": 0, "enable_async_reduce": True}
LOSS_SCALE = {"initial_scale": 2**5}
LLAMA_3D: dict[str, Any] = {
    "tp_size": 2,
    "pp_size": 1,
    "pp_style": "1f1b",
    "num_model_chunks": 1,
    "zero_stage": 0,
    "sp_size": 1,
    "sequence_parallelism_mode": "all_to_all",
    "enable_sequence_parallelism": False,
    **KERNELS,
    "microbatch_size": 1,
    "precision": "bf16",
    "enable_metadata_cache": True,
    "overlap_allgather": False,
    **SWITCHES,
    "scheduler_nodes": None,
}
FINETUNED: dict[str, Any] = {
    "tp_size": 1,
    "pp_size": 2,
    "num_microbatches": None,
    "enable_all_optimization": True,
    "zero_stage": 1,
    "precision": "fp16",
    "initial_scale": 1,
    "fp8_communication": False,
}
TRAINER: dict[str, Any] = {"precision": "fp16", "initial_scale": 2**16, "max_norm": 1.0}
TRAINER_CHUNKS: dict[str, Any] = {**TRAINER, "enable_gradient_accumulation": False, **KERNELS}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama gemini": ("GeminiPlugin", {**CHUNKS, **GROUPS, **KERNELS, **PREFETCH, **SWITCHES}),
    "llama gemini_auto": ("GeminiPlugin", {**AUTO, **GROUPS, **KERNELS, **PREFETCH, **SWITCHES}),
    "llama fsdp": ("TorchFSDPPlugin", {"mixed_precision": FP16, "param_init_fn": None, **NO_MESSAGES}),
    "llama fsdp_cpu": (
        "TorchFSDPPlugin",
        {"mixed_precision": FP16, "cpu_offload": CPUOffload(offload_params=True), "param_init_fn": None, **NO_MESSAGES},
    ),
    "llama 3d": ("HybridParallelPlugin", LLAMA_3D),
    "llama 3d interleaved": (
        "HybridParallelPlugin",
        {**LLAMA_3D, "tp_size": 1, "pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2},
    ),
    "llama 3d sequence parallel": (
        "HybridParallelPlugin",
        {**LLAMA_3D, "tp_size": 1, "sp_size": 2, "enable_sequence_parallelism": True},
    ),
    "llama 3d_cpu": (
        "HybridParallelPlugin",
        {
            "tp_size": 2,
            "pp_size": 1,
            "pp_style": "1f1b",
            "num_model_chunks": 1,
            "zero_stage": 0,
            "cpu_offload": True,
            **KERNELS,
            "microbatch_size": 1,
            "initial_scale": 2**8,
            "precision": "bf16",
            "overlap_p2p": True,
            **SWITCHES,
        },
    ),
    "mixtral": (
        "MoeHybridParallelPlugin",
        {**LLAMA_3D, "ep_size": 2, "tp_size": 1, "zero_stage": 1, "num_microbatches": 2},
    ),
    "bert torch_ddp": ("TorchDDPPlugin", NO_MESSAGES),
    "bert gemini": ("GeminiPlugin", {**LOSS_SCALE, **NO_MESSAGES}),
    "bert low_level_zero": ("LowLevelZeroPlugin", LOSS_SCALE),
    "bert hybrid_parallel": (
        "HybridParallelPlugin",
        {**FINETUNED, "pp_style": "interleaved", "num_model_chunks": 2, "microbatch_size": 16},
    ),
    "bert torch_fsdp": ("TorchFSDPPlugin", {"mixed_precision": FP16, **NO_MESSAGES}),
    "bert benchmark gemini": ("GeminiPlugin", {"placement_policy": "cuda", "strict_ddp_mode": True, **LOSS_SCALE}),
    "gpt gemini": ("GeminiPlugin", {**CHUNKS, **GROUPS}),
    "gpt gemini_auto": ("GeminiPlugin", {**AUTO, **GROUPS}),
    "gpt fsdp": ("TorchFSDPPlugin", {"mixed_precision": FP16, "param_init_fn": None}),
    "gpt 3d": (
        "HybridParallelPlugin",
        {
            "tp_size": 1,
            "pp_size": 1,
            "pp_style": "1f1b",
            "sp_size": 2,
            "sequence_parallelism_mode": "ring_attn",
            "enable_sequence_parallelism": True,
            "zero_stage": 0,
            "num_model_chunks": 2,
            "precision": "bf16",
            "enable_all_optimization": True,
            "num_microbatches": 1,
            "cpu_offload": False,
        },
    ),
    "gpt 3d_cpu": (
        "HybridParallelPlugin",
        {
            "tp_size": 2,
            "pp_size": 1,
            "zero_stage": 0,
            "cpu_offload": True,
            "enable_fused_normalization": False,
            "num_microbatches": 1,
            "initial_scale": 2**8,
            "precision": "bf16",
        },
    ),
    "gpt finetune hybrid_parallel": ("HybridParallelPlugin", {**FINETUNED, "microbatch_size": 1}),
    "gpt demo zero": (
        "LowLevelZeroPlugin",
        {"stage": 2, "reduce_bucket_size_in_m": 12, "overlap_communication": True, "verbose": True},
    ),
    "gpt demo gemini": ("GeminiPlugin", {"search_range_m": 128, "hidden_dim": 768}),
    "opt gemini": ("GeminiPlugin", {"offload_optim_frac": 1.0, "pin_memory": True, **LOSS_SCALE}),
    "palm gemini": ("GeminiPlugin", {"offload_optim_frac": 1.0, **LOSS_SCALE}),
    "colossal-llama ddp": ("TorchDDPPlugin", {"find_unused_parameters": True}),
    "colossal-llama gemini": ("GeminiPlugin", TRAINER_CHUNKS),
    "colossal-llama gemini_auto": ("GeminiPlugin", {**TRAINER_CHUNKS, "placement_policy": "auto"}),
    "colossal-llama zero2": ("LowLevelZeroPlugin", {"stage": 2, **TRAINER}),
    "colossal-llama zero2_cpu": ("LowLevelZeroPlugin", {"stage": 2, **TRAINER, "cpu_offload": True}),
    "colossal-llama 3d": (
        "HybridParallelPlugin",
        {
            "tp_size": 2,
            "pp_size": 1,
            "sp_size": 1,
            "sequence_parallelism_mode": "split_gather",
            "zero_stage": 0,
            **KERNELS,
            "enable_sequence_parallelism": False,
            "cpu_offload": False,
            "max_norm": 1.0,
            "precision": "fp16",
            "microbatch_size": 1,
        },
    ),
}


def settings(plugin: Any) -> dict[str, Any]:
    """What a plugin keeps of its arguments, those of Booster's parts inside it too."""
    kept = {name: value for name, value in vars(plugin).items() if not name.startswith("_")}
    return {
        name: value
        for name, value in kept.items()
        if isinstance(value, (bool, int, float, str, torch.dtype, MixedPrecision, CPUOffload))
        or (isinstance(value, dict) and all(isinstance(each, (bool, int, float, str)) for each in value.values()))
    }


def assert_taken(name: str, arguments: Mapping[str, Any]) -> None:
    """A plugin has with the arguments what Colossal-AI's has, and has FP8 where that is asked for besides."""
    from colossalai.booster import plugin

    kind, native = getattr(plugins, name), settings(getattr(plugin, name)(**arguments))
    assert len(native) > 1
    ours = settings(kind(**arguments))
    assert {key: ours[key] for key in native} == native
    in_fp8 = kind(**dict(arguments) | {"use_fp8": True})
    assert in_fp8.use_fp8
    # a script that names the option decides about messages, and `use_fp8` where it does not
    assert in_fp8.sends_fp8 == ("fp8_communication" not in arguments)
    gc.collect()  # and with them their process groups


@ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_arguments_of_an_example_are_taken(case: str) -> None:
    assert_taken(*CASES[case])


@ranks(2)
@pytest.mark.parametrize("case", ["HybridParallelPlugin", "MoeHybridParallelPlugin"])
def test_arguments_of_a_zero_bubble_pipeline_are_taken(case: str) -> None:
    from colossalai.pipeline.schedule.v_schedule import PipelineGraph

    costs = {"f_cost": 1000, "b_cost": 1000, "w_cost": 1000, "c_cost": 1}
    graph = PipelineGraph(n_stage=2, n_micro=4, **costs, f_mem=96, b_mem=-64, w_mem=-32)
    schedule = {"pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2, "scheduler_nodes": graph.get_v_schedule()}
    moe = {"ep_size": 1, "zero_stage": 1, "num_microbatches": 4} if case.startswith("Moe") else {}
    assert_taken(case, {**LLAMA_3D, "tp_size": 1, **schedule, **moe})


@ranks(4)
def test_arguments_of_opt_on_four_ranks_are_taken() -> None:
    given = {name: value for name, value in FINETUNED.items() if name != "fp8_communication"}
    assert_taken("HybridParallelPlugin", {**given, "tp_size": 2, "num_microbatches": 2, "zero_stage": 0})
