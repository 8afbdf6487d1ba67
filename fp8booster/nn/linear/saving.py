"""transformers' `save_pretrained` of a model whose weights are kept in FP8 alone, which it would write without a word.

The state dict of such a model has FP8 values and their scales. transformers writes them with a config that names no
quantization, and reads them back as if each scale were 1.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fp8booster.formats import FORMATS

_GUARDED = "_fp8booster_guarded"


def guard_save_pretrained(kept_in_fp8: Callable[[nn.Module], bool]) -> None:
    """Let `save_pretrained` of transformers refuse to write weights in FP8; nothing without transformers.

    Args:
        kept_in_fp8: tells whether a module's weight is.
    """
    models = sys.modules.get("transformers.modeling_utils")
    base: Any = getattr(models, "PreTrainedModel", None)
    if base is None or hasattr(base.save_pretrained, _GUARDED):
        return
    save = base.save_pretrained

    @functools.wraps(save)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict", args[2] if len(args) > 2 else None)
        in_fp8 = any(map(kept_in_fp8, self.modules())) if given is None else _holds_fp8(given)
        # of a model that transformers added adapters to, it writes these alone
        only_adapters = getattr(self, "_hf_peft_config_loaded", False) and kwargs.get("save_peft_format", True)
        if in_fp8 and not only_adapters:
            raise ValueError(
                "the model's weights are in FP8, which save_pretrained would write as if they had no scales; write it "
                'with fp8booster.export(model, folder), in FP8, or with format="bf16" in 16 bits'
            )
        return save(self, *args, **kwargs)

    setattr(guarded, _GUARDED, True)
    base.save_pretrained = guarded


def _holds_fp8(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.dtype in FORMATS for value in state.values())
