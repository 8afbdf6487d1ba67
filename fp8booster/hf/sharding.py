"""FSDP2 as accelerate calls it: by names of classes, which fused layers no longer have, and after the conversion."""

from __future__ import annotations

from typing import Any

from torch import nn

from fp8booster.comm import Encoding
from fp8booster.comm.ddp import AtForward, at_forward
from fp8booster.comm.fsdp import fsdp_units
from fp8booster.nn.distributed import follow_fsdp2
from fp8booster.nn.linear.frozen import FrozenLayer


def why_not_sharded(plugin: Any, model: nn.Module) -> str | None:
    """Return why a `FullyShardedDataParallelPlugin` of accelerate does not shard a model in FP8; None if it does."""
    if plugin.fsdp_version == 1:
        return (
            "FSDP1 flattens the parameters that FP8 layers cast; choose FSDP2: fsdp_version=2 of Accelerate's plugin, "
            'fsdp_config={"version": 2} of TrainingArguments, or with transformers 4 FSDP_VERSION=2 in the environment'
        )
    if any(isinstance(module, FrozenLayer) for module in model.modules()):
        return (
            "weights that are frozen in FP8 would be whole on each rank under FSDP2, and its checkpoints do not hold "
            "them; train adapters on them with DDP"
        )
    return None


def name_units(plugin: Any) -> None:
    """Let a plugin of accelerate name the units of each model by the names that their classes have then.

    An accelerator has one plugin for all its models, and some are not converted, as a reference that is not trained.

    Args:
        plugin: that names the classes to shard one by one, or leaves it to the model's `_no_split_modules`.
    """
    if not isinstance(plugin.set_auto_wrap_policy, _NamesUnits):
        plugin.set_auto_wrap_policy = _NamesUnits(plugin)


class _NamesUnits:
    """Stands before a plugin's method of this name, which is given each model before it is sharded."""

    def __init__(self, plugin: Any) -> None:
        self._plugin, self._original = plugin, plugin.set_auto_wrap_policy
        self._names = plugin.transformer_cls_names_to_wrap

    def __call__(self, model: nn.Module) -> None:
        names = set(self._names or getattr(model, "_no_split_modules", None) or ())
        kinds = {type(module) for module in model.modules()}
        found = sorted({kind.__name__ for kind in kinds if names & {base.__name__ for base in kind.__mro__}})
        self._plugin.transformer_cls_names_to_wrap = found or self._names
        self._original(model)


def follow_sharding(model: nn.Module, messages: Encoding | None) -> None:
    """Let FP8 layers keep no weight of a model that FSDP2 will shard, and weights and gradients be sent in FP8.

    Args:
        model: not sharded yet; it is found at its first forward after that.
        messages: how gradients are sent; None: nothing is sent in FP8.
    """
    at_forward(model, _AtForward(model, messages))


class _AtForward(AtForward):
    """Finds at a forward that FSDP2 has sharded the model."""

    def __init__(self, model: nn.Module, messages: Encoding | None) -> None:
        self.model, self.messages = model, messages
        self.is_done = False

    def __call__(self, _: nn.Module, __: object) -> None:
        # the root may be around it, as adapters that came later
        if self.is_done or not fsdp_units(self.model):
            return
        self.is_done = True
        follow_fsdp2(self.model, self.messages)
