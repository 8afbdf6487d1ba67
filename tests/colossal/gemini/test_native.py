"""`use_fp8=False` is the native GeminiPlugin, bit for bit, with every argument that it has."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

from tests.colossal.gemini.runs import boost, native, ours, weights
from tests.distributed import ranks
from tests.plugins.training import assert_equal, train

FP16 = {"precision": "fp16", "initial_scale": 2.0**8}

CASES: dict[str, dict[str, Any]] = {
    "chunks": {"chunk_config_dict": {2: {"chunk_size": 8192, "keep_gathered": False}}, "verbose": True},
    "host": {
        "chunk_init_device": torch.device("cpu"),
        "offload_optim_frac": 1.0,
        "offload_param_frac": 1.0,
        "pin_memory": True,
    },
    "auto": {
        "placement_policy": "auto",
        "warmup_non_model_data_ratio": 0.5,
        "steady_cuda_cap_ratio": 0.8,
        "gpu_margin_mem_ratio": 0.5,
    },
    "accumulation": {"enable_gradient_accumulation": True, "max_prefetch": 1},
    "gathered": {"min_chunk_size_m": 32, "search_range_m": 1, "hidden_dim": 32, "strict_ddp_mode": True},
    "stage 2, no masters": {
        "shard_param_frac": 0.0,
        "enable_async_reduce": False,
        "force_outputs_fp32": True,
        "master_weights": False,
    },
    "fp16": FP16
    | {"growth_factor": 4.0, "growth_interval": 1, "max_scale": 2.0**12, "max_norm": 0.1, "norm_type": 2.0},
    "overflow": FP16 | {"initial_scale": 2.0**26, "hysteresis": 1, "backoff_factor": 0.25, "min_scale": 2.0**23},
    "extra data parallel": {"extra_dp_size": 2},
    "fp8 communication of native, shardformer's options without tensor parallelism": {
        "fp8_communication": True,
        "use_fp8": False,
        "tp_size": 1,
        "enable_all_optimization": False,
        "enable_fused_normalization": False,
        "enable_flash_attention": False,
        "enable_sequence_parallelism": True,
        "enable_jit_fused": False,
    },
    "tensor parallelism": {
        "tp_size": 2,
        "enable_all_optimization": True,
        "enable_fused_normalization": True,
        "enable_flash_attention": True,
        "enable_jit_fused": True,
        "max_norm": 0.1,
    },
}


def native_arguments() -> list[inspect.Parameter]:
    """Those of Colossal-AI's constructor, in order."""
    from colossalai.booster.plugin import GeminiPlugin

    return list(inspect.signature(GeminiPlugin.__init__).parameters.values())[1:]


@ranks(2)
def test_every_argument_of_the_native_plugin_is_tried() -> None:
    left = {argument.name for argument in native_arguments()} - {"memstats"}  # another run's, or None
    assert left == {name for case in CASES.values() for name in case}


@ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_without_fp8_it_trains_as_the_native_plugin(case: str) -> None:
    # Gemini takes the dictionary of chunk sizes apart
    theirs, mine = native(**copy.deepcopy(CASES[case])), ours(**copy.deepcopy(CASES[case]))
    for name, value in vars(theirs).items():
        if isinstance(value, (int, float, str, bool)):
            assert getattr(mine, name) == value, name
    for config in ("gemini_config", "zero_optim_config", "optim_kwargs"):
        assert getattr(theirs, config) == getattr(mine, config)
    expected, found = boost(theirs), boost(mine)
    assert type(found.model) is type(expected.model)
    micro_batches = 2 if case == "accumulation" else 1
    assert train(expected, micro_batches=micro_batches) == train(found, micro_batches=micro_batches)
    assert_equal(weights(expected), weights(found))


@ranks(2)
def test_positional_arguments_mean_what_they_mean_in_the_native_plugin() -> None:
    from fp8booster.plugins.gemini import GeminiPlugin

    changed = {"precision": "bf16", "min_chunk_size_m": 2**-7, "search_range_m": 0, "max_norm": 0.1, "hidden_dim": 64}
    values = [changed.get(argument.name, argument.default) for argument in native_arguments()]
    expected = boost(native(**changed))
    assert train(expected) == train(boost(GeminiPlugin(*values)))
