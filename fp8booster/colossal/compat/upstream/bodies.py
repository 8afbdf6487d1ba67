"""The forwards of bodies in sharded models, in whole and in stages, for one that runs with transformers 4.51 and 5."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements
from fp8booster.colossal.sharding import why_model_is_not_sharded


def _body_forward(*args: Any, **kwargs: Any) -> Any:
    from fp8booster.colossal.tensor.body import body_forward  # it imports modules that are patched

    for name in ("force_sp_gather", "force_sp_output_gather"):  # LLaMA's, and Qwen2's
        if name in kwargs:
            kwargs["gathers_sequence"] = kwargs.pop(name)
    return body_forward(*args, **kwargs)


def _put_in(module: ModuleType, replacements: Replacements, forward: str, maker: str | None = None) -> None:
    """Replace a family's forward, which a policy gives a stage, and what makes one that it gives a whole body."""

    def run(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
        return _body_forward(*args, **kwargs)

    def make(upstream: Callable, shard_config: Any, *_: Any, **__: Any) -> Callable:
        return partial(_body_forward, shard_config=shard_config)

    replacements.wrap(module, forward, run)
    if maker is not None:
        replacements.wrap(module, maker, make)


@patch(
    "shardformer.modeling.llama",
    "101,127,178",
    needed_when='transformers >= 5, and sequence_parallelism_mode="ring_attn" in a pipeline',
)
def llama_has_one_body(module: ModuleType, replacements: Replacements) -> None:
    """A sharded LLaMA runs with transformers 5, and rings in its pipelines know the places of their tokens.

    Without it AttributeError: 'LlamaModel' object has no attribute '_update_causal_mask', or layers that take the first
    sequence of their input for all of it; and each rank of a ring takes its tokens for the first of the sequence in
    later stages, so that distances between tokens of different ranks are wrong.
    """
    _put_in(module, replacements, "LlamaPipelineForwards.llama_model_forward")


@patch(
    "shardformer.modeling.mistral",
    "62,104,371",
    needed_when="transformers >= 5, inputs_embeds in a pipeline, and gradient checkpointing of flash attention",
)
def mistral_has_one_body(module: ModuleType, replacements: Replacements) -> None:
    """A sharded Mistral runs with transformers 5, takes inputs_embeds in pipelines, and is checkpointed as it is asked.

    Without it AttributeError: 'MistralModel' object has no attribute '_update_causal_mask'; TypeError where
    a pipeline is given inputs_embeds; and no layer is checkpointed with enable_flash_attention and no pipeline.
    """
    _put_in(module, replacements, "MistralForwards.mistral_model_forward", "get_mistral_model_forward_for_flash_attn")


@patch(
    "shardformer.modeling.qwen2",
    "148,211,236,688",
    needed_when="transformers >= 5, and a pipeline with sequences longer than a window that the config leaves out",
)
def qwen2_has_one_body(module: ModuleType, replacements: Replacements) -> None:
    """A sharded Qwen2 runs with transformers 5, and attends in its window where the config has one.

    Without it layers take the first sequence of their input for all of it; and in pipelines tokens attend in a window
    with use_sliding_window=False.
    """
    _put_in(module, replacements, "Qwen2PipelineForwards.qwen2_model_forward", "get_qwen2_model_forward_for_flash_attn")


@wrap(
    "shardformer.shard.shardformer:ShardFormer.optimize",
    "shardformer/shard/sharder.py:27; shardformer/modeling/command.py:12, vit.py:6, ...",
    needed_when="transformers >= 5, and a model of a family that is not sharded with it",
    only_if=lambda module: why_model_is_not_sharded("", "") is not None,
)
def models_that_are_not_sharded_are_refused(
    upstream: Callable, self: Any, model: Any, policy: Any = None
) -> tuple[Any, list]:
    """With transformers 5 a model that is not sharded is refused before anything of it is, but with a policy of yours.

    Without it forwards that were written for transformers 4.51 fail, or take the first sequence for all.
    """
    from colossalai.shardformer.policies.auto_policy import _fullname

    module, _, name = _fullname(model).rpartition(".")
    reason = None if policy is not None else why_model_is_not_sharded(module, name)
    if reason is not None:
        raise ImportError(reason)
    return upstream(self, model, policy)


@wrap(
    "shardformer.policies.auto_policy:get_autopolicy",
    "258",
    needed_when="a Qwen3",
    only_if=lambda module: not any("qwen3" in name for name in module._POLICY_LIST),
)
def qwen3_has_a_policy(upstream: Callable, model: Any) -> Any:
    """A Qwen3 is sharded, by a policy that follows Qwen2's.

    Without it: NotImplementedError: Auto policy for Qwen3ForCausalLM is not implemented.
    """
    from colossalai.shardformer.policies.auto_policy import _fullname

    module, _, name = _fullname(model).rpartition(".")
    if module == "transformers.models.qwen3.modeling_qwen3":
        from fp8booster.colossal.tensor.qwen3 import POLICIES  # it imports modules that are patched

        if name in POLICIES:
            return POLICIES[name]()
    return upstream(model)
