"""`MoeHybridParallelPlugin` with `use_fp8` off is Colossal-AI's plugin, bit for bit, with every argument that it has;
its checkpoints and those of LowLevelZero hold the same.
"""

from __future__ import annotations

import functools
import inspect
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8booster.colossal.pipeline import zero_bubble_schedule
from tests.colossal.hybrid.runs import LOSS_SCALING, learn, start
from tests.colossal.moe.models import tiny_mixtral
from tests.distributed import ranks, shared_folder
from tests.plugins import training
from tests.plugins.test_moe_hybrid_parallel import EP2, MODES, boost, fp8, native, ours
from tests.plugins.training import assert_close, assert_equal

ON_EVERY_RANK = EP2 | {"ep_size": 1}
PP2 = ON_EVERY_RANK | {"pp_size": 2}
CHUNKS = PP2 | {"num_microbatches": 4, "num_model_chunks": 2, "overlap_p2p": False}

OPTIONS: dict[str, dict[str, Any]] = {
    "loss scaling": EP2 | LOSS_SCALING,
    "DDP": ON_EVERY_RANK
    | {
        "zero_stage": 0,
        "broadcast_buffers": False,
        "ddp_bucket_cap_mb": 1,
        "find_unused_parameters": True,
        "check_reduction": True,
        "gradient_as_bucket_view": True,
        "static_graph": False,
    },
    "ZeRO": EP2
    | {
        "zero_bucket_size_in_m": 1,
        "cpu_offload": True,
        "communication_dtype": torch.float32,
        "overlap_communication": True,
        "moe_dp_outside": False,
        "fp8_communication": True,
        "use_fp8": False,
    },
    "sharding": ON_EVERY_RANK
    | {
        "tp_size": 2,
        "sp_size": 1,
        "parallel_output": False,
        "make_vocab_size_divisible_by": 32,
        "enable_all_optimization": True,
        "enable_fused_normalization": True,
        "enable_flash_attention": True,
        "enable_jit_fused": True,
    },
    "pipeline": PP2
    | {"num_microbatches": None, "microbatch_size": 4, "num_layers_per_stage": [1, 2], "enable_metadata_cache": False},
    "interleaved": CHUNKS | {"pp_style": "interleaved"},
    "zero-bubble": CHUNKS | {"pp_style": "zbv", "scheduler_nodes": zero_bubble_schedule(2, 4)},
    "zero-bubble by size": CHUNKS
    | {
        "pp_style": "zbv",
        "scheduler_nodes": zero_bubble_schedule(2, 4),
        "num_microbatches": None,
        "microbatch_size": 2,
    },
}
"""Groups of Colossal-AI's plugin's arguments, each with another value where one is possible here."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "spread without ZeRO": (EP2 | {"zero_stage": 0}, "use zero_stage=1"),
    "sequence parallel": (
        ON_EVERY_RANK | {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
        "leave enable_sequence_parallelism out",
    ),
}
"""What Colossal-AI does not do with a Mixtral, and what is said of it."""


def assert_trains_as_native(**arguments: Any) -> None:
    """Losses, gradient norms and weights of some steps are equal, bit for bit."""
    layers = sum(arguments.get("num_layers_per_stage", (2 * arguments.get("num_model_chunks", 1),)))
    runs = [start(make(**arguments), tiny_mixtral(vocab_size=256, num_hidden_layers=layers)) for make in (native, ours)]
    losses = [learn(run, last=2, accumulate=1 if arguments["pp_size"] > 1 else 2) for run in runs]
    assert losses[0] == losses[1], losses
    norms = [run.optimizer.get_grad_norm() for run in runs]
    assert norms[0] == norms[1], norms
    assert_equal(*(run.parameters() for run in runs))


@ranks(2)
def test_moe_tries_every_argument_of_the_native_plugin() -> None:
    from colossalai.booster.plugin import MoeHybridParallelPlugin

    groups = (*MODES.values(), *OPTIONS.values(), *(arguments for arguments, _ in REFUSED.values()))
    tried = {name for arguments in groups for name in arguments}
    tried |= {"custom_policy", "gradient_checkpoint_config"}
    assert tried == set(inspect.signature(MoeHybridParallelPlugin.__init__).parameters) - {"self"}


@ranks(2)
@pytest.mark.parametrize("group", OPTIONS)
def test_moe_options_without_fp8_do_what_they_do_in_the_native_plugin(group: str) -> None:
    assert_trains_as_native(**OPTIONS[group])


def _learned(plugin: Any) -> list[float]:
    return learn(start(plugin, tiny_mixtral(vocab_size=256, num_hidden_layers=4), lr=1e-2))


@functools.cache
def _learned_whole() -> list[float]:
    return _learned(native(**ON_EVERY_RANK))


@ranks(2)
@pytest.mark.parametrize("style", ["interleaved", "zero-bubble", "zero-bubble by size"])
def test_moe_in_a_pipeline_of_chunks_learns_as_whole(style: str) -> None:
    for make, distance in ((native, 5e-3), (fp8, 2e-2)):
        assert_close(_learned_whole(), _learned(make(**OPTIONS[style])), distance, gradients=False)


@ranks(2)
def test_moe_takes_a_policy_and_checkpointing_as_the_native_plugin_does() -> None:
    from colossalai.shardformer import PipelineGradientCheckpointConfig
    from colossalai.shardformer.policies.mixtral import MixtralForCausalLMPolicy

    assert_trains_as_native(
        **PP2,
        num_microbatches=2,
        custom_policy=MixtralForCausalLMPolicy(),
        gradient_checkpoint_config=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5),
    )


@ranks(2)
@pytest.mark.parametrize("case", REFUSED)
def test_moe_refuses_what_colossalai_cannot_do_with_a_mixtral(case: str) -> None:
    arguments, says = REFUSED[case]
    for make in (native, ours, fp8):
        with pytest.raises(ValueError, match=says):
            start(make(**arguments), tiny_mixtral(num_hidden_layers=4))


def _low_level_zero() -> Any:
    return training.boost(training.ours(use_fp8=True), tiny_mixtral())


CROSSINGS = ["EP2 to EP2, in the background"]
if version("transformers").startswith("4."):  # later ones hold a part of one parameter
    CROSSINGS += ["EP2 to LowLevelZero", "LowLevelZero to EP2"]


@ranks(2)
@pytest.mark.parametrize("crossing", CROSSINGS)
def test_moe_checkpoints_cross_to_data_parallelism(crossing: str) -> None:
    source, _, target = crossing.partition(",")[0].partition(" to ")
    makers = {"EP2": lambda: boost(fp8()), "LowLevelZero": _low_level_zero}
    writer, reader = makers[source](), makers[target]()
    training.train(writer, steps=2)
    training.train(reader, steps=1)  # other weights
    folder = str(shared_folder(f"moe {crossing}"))
    late = "background" in crossing
    writer.booster.save_model(writer.model, folder, shard=True, use_safetensors=True, use_async=late)
    writer.booster.checkpoint_io._sync_io()
    dist.barrier()
    reader.booster.load_model(reader.model, folder)
    expected, found = writer.parameters(), reader.parameters()
    both = expected.keys() & found.keys()
    # of the first on each rank, or of one parameter of all of them
    of_experts = ("experts.0.", "experts.2.", "experts.down_proj")
    assert any(each in name for name in both for each in of_experts)
    assert_equal({name: expected[name] for name in both}, {name: found[name] for name in both})
