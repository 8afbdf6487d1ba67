"""Patches by which Colossal-AI shards a Mixtral of transformers 5, whose experts are parameters and not modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from fp8booster.colossal.compat.registry import wrap
from fp8booster.colossal.sharding import is_transformers_5

_NEEDED = "transformers >= 5, and a Mixtral"


def _is_5(module: ModuleType) -> bool:
    return is_transformers_5()


def _with_split_experts(
    upstream: Callable, self: Any, model: nn.Module, optimizer: Any = None, *args: Any, **kwargs: Any
) -> tuple:
    """The experts of a Mixtral are modules before it is sharded, and the optimizer has their weights.

    Without it: AttributeError: 'MixtralDecoderLayer' object has no attribute 'block_sparse_moe'.
    """
    from fp8booster.colossal.moe.mixtral import split_experts

    split_experts(model, optimizer)
    return upstream(self, model, optimizer, *args, **kwargs)


for _name, _plugin in (
    ("hybrid_parallel_plugin", "HybridParallelPlugin"),
    ("moe_hybrid_parallel_plugin", "MoeHybridParallelPlugin"),
):
    wrap(
        f"booster.plugin.{_name}:{_plugin}.configure",
        "shardformer/policies/mixtral.py:133,214",
        needed_when=_NEEDED,
        only_if=_is_5,
        name=f"{_name}_splits_experts",
    )(_with_split_experts)


@wrap("shardformer.policies.mixtral:MixtralPolicy.module_policy", "133,182,214", needed_when=_NEEDED, only_if=_is_5)
def mixtral_policies_know_the_block(upstream: Callable, self: Any) -> dict:
    """Policies of Mixtral find the block where transformers 5 has it, and the body runs by the forward of all.

    Without it: AttributeError: 'MixtralDecoderLayer' object has no attribute 'block_sparse_moe'.
    """
    from transformers.models.mixtral.modeling_mixtral import MixtralModel

    from fp8booster.colossal.moe.mixtral import is_split

    if not is_split(self.model):
        raise ValueError(
            "a Mixtral of transformers 5 is sharded by HybridParallelPlugin and MoeHybridParallelPlugin alone; use one "
            "of these, or pip install transformers==4.51.3"
        )
    policy = upstream(self)
    for description in policy.values():
        for replacement in description.sub_module_replacement or ():
            replacement.suffix = replacement.suffix.replace("block_sparse_moe", "mlp")
    if self.pipeline_stage_manager is None:
        self.append_or_create_method_replacement(
            description={"forward": partial(_body_forward, shard_config=self.shard_config)},
            policy=policy,
            target_key=MixtralModel,
        )
    return policy


@functools.cache
def _unsharded() -> Any:
    from colossalai.shardformer.shard import ShardConfig

    return ShardConfig()


def _body_forward(*args: Any, shard_config: Any = None, **kwargs: Any) -> Any:
    from fp8booster.colossal.moe.body import mixtral_body_forward  # it imports modules that are patched

    # the policy gives none to a pipeline's stages, which have whole sequences
    return mixtral_body_forward(*args, shard_config=shard_config or _unsharded(), **kwargs)


@wrap(
    "shardformer.modeling.mixtral:MixtralPipelineForwards.mixtral_model_forward",
    "340,377",
    needed_when=_NEEDED,
    only_if=_is_5,
)
def mixtral_has_one_body(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """The stages of a Mixtral's pipeline run with transformers 5.

    Without it: TypeError: MixtralDecoderLayer.forward() takes fewer positional arguments.
    """
    return _body_forward(*args, **kwargs)


@wrap("shardformer.modeling.mixtral:EPMixtralSparseMoeBlock.forward", "214", needed_when=_NEEDED, only_if=_is_5)
def mixtral_blocks_return_their_output(upstream: Callable, self: Any, hidden_states: Any) -> Any:
    """A block whose experts are spread over ranks returns what a decoder layer of transformers 5 adds.

    Without it: TypeError: unsupported operand type(s) for +: 'Tensor' and 'tuple'.
    """
    output, logits = upstream(self, hidden_states)
    return (output, logits) if getattr(self, "returns_logits", True) else output
