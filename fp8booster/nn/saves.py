"""Refuse saves by `save_pretrained` of transformers that would be read back as another model."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from fp8booster.formats import FORMATS

IN_FP8 = (
    "the model's weights are in FP8, which save_pretrained would write as if they had no scales; write it "
    'with fp8booster.export(model, folder), in FP8, or with format="bf16" in 16 bits'
)
"""It would write them with a config that names no quantization, and read them back as if each scale were 1."""

_REASON = "why_not_saved"
"""Attribute of a module, or of its class: a sentence why a model with it is not saved."""

_GUARDED = "_fp8booster_guarded"


def refuse_saves(module: nn.Module, reason: str) -> None:
    """Let `save_pretrained` of a model with this module raise ValueError with the reason.

    It writes what it is given as `state_dict` all the same.
    """
    vars(module)[_REASON] = reason
    guard_saves()


def guard_saves() -> None:
    """Let `save_pretrained` ask the modules of a model; nothing without transformers."""
    models = sys.modules.get("transformers.modeling_utils")
    base: Any = getattr(models, "PreTrainedModel", None)
    if base is None or hasattr(base.save_pretrained, _GUARDED):
        return
    save = base.save_pretrained

    @functools.wraps(save)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        reason = _why_not(self, kwargs.get("state_dict", args[2] if len(args) > 2 else None))
        # of a model that transformers added adapters to, it writes these alone
        only_adapters = getattr(self, "_hf_peft_config_loaded", False) and kwargs.get("save_peft_format", True)
        if reason is not None and not only_adapters:
            raise ValueError(reason)
        return save(self, *args, **kwargs)

    setattr(guarded, _GUARDED, True)
    base.save_pretrained = guarded


def _why_not(model: nn.Module, given: dict[str, Any] | None) -> str | None:
    if given is None:
        reasons = (vars(module).get(_REASON) or getattr(type(module), _REASON, None) for module in model.modules())
        return next(filter(None, reasons), None)
    in_fp8 = any(isinstance(value, torch.Tensor) and value.dtype in FORMATS for value in given.values())
    return IN_FP8 if in_fp8 else None


guard_saves()  # for a model that is unpickled, none of whose layers is made
