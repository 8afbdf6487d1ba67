"""The policy by which shardformer spreads the experts of any model whose experts are known (`nn.experts.parallel`).

Colossal-AI has policies for Mixtral and for DeepSeek's own code alone. This one needs no word on a family: attention
and all else stays whole, on every rank.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from colossalai.lazy import LazyInitContext
from colossalai.shardformer.policies.base_policy import Policy
from colossalai.tensor.d_tensor.api import init_tensor_as_customization_distributed
from colossalai.tensor.moe_tensor.api import set_moe_tensor_ep_group
from torch import nn

from fp8booster.colossal.moe.adapters import refuse_adapters_of_all
from fp8booster.nn.adapters import follow_merges
from fp8booster.nn.experts.parallel import SpreadExperts, blocks_to_spread, spread_experts
from fp8booster.nn.experts.spread import spread_of


class MixturePolicy(Policy):
    """For models that have `blocks_to_spread`."""

    def config_sanity_check(self) -> None:
        """Refuse what would shard the rest of the model.

        Raises:
            ValueError: it would be.
        """
        config = self.shard_config
        asked = {
            "tensor parallelism (tp_size above 1)": config.enable_tensor_parallelism,
            "pipelines (pp_size above 1)": config.pipeline_stage_manager is not None,
            "sequence parallelism": config.enable_sequence_parallelism,
        }
        refused = [what for what, on in asked.items() if on]
        if refused:
            raise ValueError(
                f"{type(self.model).__name__} is spread over ranks by its experts alone, without {refused[0]}; use "
                "MoeHybridParallelPlugin (--plugin moe) with ep_size, tp_size=1, pp_size=1 and zero_stage=1"
            )

    def preprocess(self) -> nn.Module:
        """Spread the experts, where the plugin has expert parallelism.

        Raises:
            ValueError: adapters cannot be spread with them.
        """
        config: Any = self.shard_config
        if config.ep_group is None:
            return self.model
        if dist.get_world_size(config.ep_group) > 1:
            refuse_adapters_of_all(self.model)
        for block in blocks_to_spread(self.model):
            LazyInitContext.materialize(block)  # lazy parameters have no values to divide
        follow_merges()
        spread_experts(self.model, config.ep_group)
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                spread = spread_of(parameter)
                if spread is not None:
                    set_moe_tensor_ep_group(parameter, config.ep_group)
                    if isinstance(module, SpreadExperts) and spread.sends:  # checkpoints have all experts in it
                        init_tensor_as_customization_distributed(parameter, spread.own, spread.gathered)
        return self.model

    def module_policy(self) -> dict:
        """Return no replacement: none depends on the family."""
        return {}

    def postprocess(self) -> nn.Module:
        """Return the model."""
        return self.model
