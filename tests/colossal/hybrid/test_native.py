"""`HybridParallelPlugin` with `use_fp8` off is Colossal-AI's plugin, bit for bit; what its constructor refuses."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from fp8booster import FP8Config
from tests.colossal.hybrid.runs import LOSS_SCALING, MODES, arguments_of, fp8, learn, native, ours, sizes, start
from tests.colossal.models import tiny_llama
from tests.distributed import ranks
from tests.plugins.training import assert_equal

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "loss scaling": ("DP2", LOSS_SCALING | {"max_norm": 0.1}),
    "full precision": ("TP2", {"precision": "fp32", "max_norm": 0.1}),
    "DDP": (
        "DP2",
        {
            "broadcast_buffers": False,
            "ddp_bucket_cap_mb": 1,
            "find_unused_parameters": True,
            "check_reduction": False,
            "gradient_as_bucket_view": True,
            "static_graph": False,
        },
    ),
    "ZeRO": (
        "DP2 ZeRO 1",
        {
            "zero_bucket_size_in_m": 1,
            "cpu_offload": True,
            "communication_dtype": torch.float32,
            "overlap_communication": False,
            "max_norm": 0.1,
            "fp8_communication": True,
        },
    ),
    "late gathers": ("DP2 ZeRO 2", {"overlap_allgather": True, "precision": "fp16"}),
    "sharding": (
        "TP2",
        {"parallel_output": False, "make_vocab_size_divisible_by": 32, "dp_outside": False, "use_fp8": False},
    ),
    "optimizations": (
        "TP2 split_gather",
        {
            "enable_all_optimization": True,
            "enable_fused_normalization": True,
            "enable_flash_attention": True,
            "enable_jit_fused": True,
            "inner_ring_size": None,
        },
    ),
    "pipeline": (
        "PP2 1f1b",
        {
            "num_microbatches": None,
            "microbatch_size": 2,
            "num_layers_per_stage": [1, 2],
            "enable_metadata_cache": False,
        },
    ),
    "interleaved pipeline": ("PP2 interleaved", {"overlap_p2p": False}),
}
"""Groups of Colossal-AI's plugin's arguments, each with another value where one is possible here, and a mode to try
them in. Those that `arguments_of` sets for the modes are not among them."""


@ranks(2)
def test_every_native_argument_is_tried() -> None:
    from colossalai.booster.plugin import HybridParallelPlugin

    tried = {name for _, arguments in OPTIONS.values() for name in arguments}
    tried |= {name for mode in MODES for name in arguments_of(mode)}
    tried |= {"custom_policy", "gradient_checkpoint_config"}
    assert tried == set(inspect.signature(HybridParallelPlugin.__init__).parameters) - {"self"}


def assert_trains_as_native(mode: str, **arguments: Any) -> None:
    """Losses, gradient norms and weights of some steps are equal, bit for bit."""
    layers = sum(arguments.get("num_layers_per_stage", ()))
    models = [tiny_llama(**sizes(num_hidden_layers=layers)) if layers else None for _ in range(2)]
    runs = [start(plugin(mode, **arguments), model) for plugin, model in zip((native, ours), models, strict=True)]
    losses = [learn(run, last=2, accumulate=2) for run in runs]
    assert losses[0] == losses[1], losses
    norms = [run.optimizer.get_grad_norm() for run in runs]
    assert norms[0] == norms[1], norms
    assert_equal(*(run.parameters() for run in runs))


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_without_fp8_a_mode_trains_as_in_the_native_plugin(mode: str) -> None:
    assert_trains_as_native(mode)


@ranks(2)
@pytest.mark.parametrize("group", OPTIONS)
def test_without_fp8_options_do_what_they_do_in_the_native_plugin(group: str) -> None:
    mode, arguments = OPTIONS[group]
    assert_trains_as_native(mode, **arguments)


@ranks(2)
def test_a_policy_and_checkpointing_do_what_they_do_in_the_native_plugin() -> None:
    from colossalai.shardformer import PipelineGradientCheckpointConfig
    from colossalai.shardformer.policies.llama import LlamaForCausalLMPolicy

    losses = []
    for plugin in (native, ours):
        model = tiny_llama(**sizes())
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        run = start(
            plugin(
                "PP2 1f1b",
                custom_policy=LlamaForCausalLMPolicy(),
                gradient_checkpoint_config=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5),
            ),
            model,
        )
        losses.append(learn(run))
    assert losses[0] == losses[1]


@ranks(2)
def test_wrong_arguments_are_refused_with_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"'tp_sizes'; did you mean tp_size"):
        ours("DP2", tp_sizes=2)
    with pytest.raises(TypeError, match=r"did you mean fp8_config"):
        ours("DP2", fp8_confg=FP8Config())
    with pytest.raises(TypeError, match=r"give an fp8booster.FP8Config"):
        fp8("DP2", fp8_config={"scaling": "amax"})
    with pytest.raises(ValueError, match=r"'bf16' or 'fp16', not 'fp32'"):
        fp8("DP2", precision="fp32")
