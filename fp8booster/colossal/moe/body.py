"""The forward of a sharded Mixtral's body, with transformers 5: that of all, and the logits of its routers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from colossalai.shardformer.shard import ShardConfig
from transformers.modeling_outputs import MoeModelOutputWithPast

from fp8booster.colossal.tensor.body import body_forward


def mixtral_body_forward(
    self: Any,
    *args: Any,
    shard_config: ShardConfig,
    output_router_logits: bool | None = None,
    past_router_logits: tuple[torch.Tensor, ...] | None = None,
    stage_index: list[int] | None = None,
    **kwargs: Any,
) -> MoeModelOutputWithPast | dict[str, Any]:
    """`body_forward`, of a Mixtral.

    Args:
        self: the body.
        args, shard_config, stage_index, kwargs: as in `body_forward`.
        output_router_logits: give the logits of each layer's router, [B S, experts]; None: as the config says.
        past_router_logits: of the layers of stages before.
    """
    if output_router_logits is None:
        output_router_logits = self.config.output_router_logits
    logits = list(past_router_logits or ())
    first, last = stage_index or (0, len(self.layers))
    with ExitStack() as hooks:
        for layer in self.layers[first:last] if output_router_logits else ():
            handle = layer.mlp.gate.register_forward_hook(lambda _, __, output: logits.append(output))
            hooks.callback(handle.remove)
        made = body_forward(self, *args, shard_config=shard_config, stage_index=stage_index, **kwargs)
    if isinstance(made, dict) and not hasattr(made, "last_hidden_state"):
        return made | {"past_router_logits": tuple(logits)} if output_router_logits else made
    return MoeModelOutputWithPast(**made, router_logits=tuple(logits) if output_router_logits else None)
