"""Mends of OPT."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch


@mend(
    module="colossalai.shardformer.modeling.opt",
    place="shardformer/modeling/opt.py:548",
    needed_when="OPT with enable_flash_attention",
)
def opt_attention_takes_positions(module: ModuleType, patch: Patch) -> None:
    """OPT's flash attention takes the positions that transformers' layers give, and needs none.

    Without it: TypeError: forward() got an unexpected keyword argument 'position_ids', and then 'cache_position'. No
    longer needed when what `get_opt_flash_attention_forward` returns has these arguments.
    """
    upstream = module.get_opt_flash_attention_forward

    @functools.wraps(upstream)
    def get_opt_flash_attention_forward(shard_config: Any) -> Callable:
        attention = upstream(shard_config)

        @functools.wraps(attention)
        def forward(*args: Any, position_ids: Any = None, cache_position: Any = None, **kwargs: Any) -> Any:
            # positions were embedded before the first layer, and caches are for generation
            return attention(*args, **kwargs)

        return forward

    patch.set_function(module, "get_opt_flash_attention_forward", get_opt_flash_attention_forward)
