"""Mends of hybrid parallelism."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from fp8booster.colossal.compat.registry import Patch, mend


@mend(
    module="colossalai.amp.naive_amp.mixed_precision_optimizer",
    place="amp/naive_amp/mixed_precision_optimizer.py:84; tensor/colo_tensor.py:6",
    needed_when="an optimizer that computes in place, as torch.optim.AdamW does, trains ColoParameters without ZeRO",
)
def masters_are_plain_tensors(module: ModuleType, patch: Patch) -> None:
    """The FP32 masters of HybridParallelPlugin with zero_stage=0 are plain tensors, which change in place.

    Without it those of ColoParameters (made by native use_fp8) are ColoTensors, whose `mul_` is a `mul`: AdamW's moments
    never decay, and the loss is NaN by the third step. No longer needed when
    `MixedPrecisionOptimizer(AdamW([ColoParameter(torch.zeros(1).bfloat16())]), "bf16").parameters` holds no ColoTensor.
    """
    from colossalai.tensor.colo_tensor import INPALCE_MAPPING

    if torch.Tensor.mul_ not in INPALCE_MAPPING:
        return
    optimizer_class = module.MixedPrecisionOptimizer
    upstream = optimizer_class.__init__

    @functools.wraps(upstream)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        for master, working in self.master_to_working_map.items():
            if master is not working:
                master.__class__ = torch.Tensor

    patch.set(optimizer_class, "__init__", __init__)
