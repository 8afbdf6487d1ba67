"""Patches of `Booster(mixed_precision=...)`, which the plugins that leave the precision to it need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements


@patch("booster.mixed_precision.bf16", "4", needed_when="always")
def bf16_autocasts(module: ModuleType, replacements: Replacements) -> None:
    """`Booster(mixed_precision="bf16")` runs model and criterion under autocast to BF16.

    Without it: TypeError: Can't instantiate abstract class BF16MixedPrecision.
    """
    if not module.BF16MixedPrecision.__abstractmethods__:
        return
    from colossalai.accelerator import get_accelerator
    from colossalai.interface import ModelWrapper

    class BF16Module(ModelWrapper):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with get_accelerator().autocast(dtype=torch.bfloat16):
                return self.module(*args, **kwargs)

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Callable | None = None) -> tuple:
        return BF16Module(model), optimizer, criterion if criterion is None else BF16Module(criterion)

    replacements.set(module.BF16MixedPrecision, "configure", configure)
    replacements.set(module.BF16MixedPrecision, "__abstractmethods__", frozenset())


@patch(
    "booster.mixed_precision",
    "booster/mixed_precision/__init__.py:37",
    needed_when='Booster is given mixed_precision="fp8", "fp16_apex" or "fp16_naive"',
)
def empty_precisions_are_refused(module: ModuleType, replacements: Replacements) -> None:
    """`Booster(mixed_precision=...)` says what to give instead of a precision that colossalai names and does not have.

    Without it: TypeError: Can't instantiate abstract class FP8MixedPrecision.
    """
    mapping = module._mixed_precision_mapping
    empty = {name for name, precision in mapping.items() if precision.__abstractmethods__}

    def mixed_precision_factory(upstream: Callable, mixed_precision_type: str) -> Any:
        if mixed_precision_type in empty:
            rest = " and ".join(repr(name) for name in mapping if name not in empty)
            raise ValueError(
                f"colossalai has nothing behind mixed_precision={mixed_precision_type!r}; there are {rest}, and FP8 "
                "beside either by use_fp8=True of the plugins of fp8booster.plugins"
            )
        return upstream(mixed_precision_type)

    if empty:
        replacements.wrap(module, "mixed_precision_factory", mixed_precision_factory)


@wrap(
    "booster.plugin.torch_ddp_plugin:TorchDDPPlugin.no_sync",
    "308",
    needed_when="Booster is given a mixed_precision",
    only_if=lambda module: (
        "Model is not boosted by TorchDDPPlugin." in module.TorchDDPPlugin.no_sync.__code__.co_consts
    ),
)
def no_sync_reaches_ddp_under_mixed_precision(
    upstream: Callable, self: Any, model: nn.Module, optimizer: Any = None
) -> AbstractContextManager:
    """`Booster.no_sync` takes a model that the mixed precision has wrapped.

    Without it: AssertionError: Model is not boosted by TorchDDPPlugin.
    """
    from colossalai.interface import ModelWrapper

    if isinstance(model, ModelWrapper) and isinstance(model.module, ModelWrapper):
        model = model.module
    return upstream(self, model, optimizer)


@patch("booster.mixed_precision.fp16_torch", "37", needed_when='Booster is given mixed_precision="fp16"')
def fp16_optimizer_is_unwrapped_wholly(module: ModuleType, replacements: Replacements) -> None:
    """The torch optimizer is found beneath both wrappers: the plugin's, and that of the mixed precision.

    Without it loading a sharded optimizer raises AttributeError: 'OptimizerWrapper' object has no attribute 'state'.
    """

    def unwrap(self) -> torch.optim.Optimizer:
        return self.optim.unwrap() if isinstance(self.optim, module.OptimizerWrapper) else self.optim

    if "unwrap" not in vars(module.TorchAMPOptimizer):
        replacements.set(module.TorchAMPOptimizer, "unwrap", unwrap)
