"""Mends of `Booster(mixed_precision=...)`, which the plugins that leave the precision to it need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch


@mend(module="colossalai.booster.mixed_precision.bf16", place="booster/mixed_precision/bf16.py:4", needed_when="always")
def bf16_autocasts(module: ModuleType, patch: Patch) -> None:
    """`Booster(mixed_precision="bf16")` runs model and criterion under autocast to BF16.

    Without it: TypeError: Can't instantiate abstract class BF16MixedPrecision. No longer needed when that class
    has a `configure`.
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

    patch.set(module.BF16MixedPrecision, "configure", configure)
    patch.set(module.BF16MixedPrecision, "__abstractmethods__", frozenset())


@mend(
    module="colossalai.booster.mixed_precision",
    place="booster/mixed_precision/__init__.py:37",
    needed_when='Booster is given mixed_precision="fp8", "fp16_apex" or "fp16_naive"',
)
def empty_precisions_are_refused(module: ModuleType, patch: Patch) -> None:
    """`Booster(mixed_precision=...)` says what to give instead of a precision that colossalai names and does not have.

    Without it: TypeError: Can't instantiate abstract class FP8MixedPrecision. No longer needed when no class in
    `mixed_precision._mixed_precision_mapping` is abstract.
    """
    mapping = module._mixed_precision_mapping
    empty = {name for name, precision in mapping.items() if precision.__abstractmethods__}
    if not empty:
        return
    upstream = module.mixed_precision_factory

    def mixed_precision_factory(mixed_precision_type: str) -> Any:
        if mixed_precision_type in empty:
            rest = " and ".join(repr(name) for name in mapping if name not in empty)
            raise ValueError(
                f"colossalai has nothing behind mixed_precision={mixed_precision_type!r}; there are {rest}, and FP8 "
                "beside either by use_fp8=True of the plugins of fp8booster.plugins"
            )
        return upstream(mixed_precision_type)

    patch.set_function(module, "mixed_precision_factory", mixed_precision_factory)


@mend(
    module="colossalai.accelerator.cpu_accelerator",
    place="accelerator/cpu_accelerator.py:283",
    needed_when="no CUDA or NPU device",
)
def cpu_autocasts(module: ModuleType, patch: Patch) -> None:
    """CpuAccelerator's autocast is PyTorch's.

    Without it `Booster(mixed_precision="fp16")` raises TypeError: 'ABCMeta' object does not support the context
    manager protocol. No longer needed when CpuAccelerator().autocast() can be entered.
    """
    if not isinstance(module.CpuAccelerator().autocast(), type):
        return

    def autocast(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> AbstractContextManager:
        return torch.autocast("cpu", dtype, enabled, cache_enabled)

    patch.set(module.CpuAccelerator, "autocast", autocast)


@mend(
    module="colossalai.booster.plugin.torch_ddp_plugin",
    place="booster/plugin/torch_ddp_plugin.py:308",
    needed_when="Booster is given a mixed_precision",
)
def no_sync_reaches_ddp_under_mixed_precision(module: ModuleType, patch: Patch) -> None:
    """`Booster.no_sync` takes a model that the mixed precision has wrapped.

    Without it: AssertionError: Model is not boosted by TorchDDPPlugin. No longer needed when
    `booster.no_sync(model)` returns with mixed_precision="fp16".
    """
    upstream = module.TorchDDPPlugin.no_sync
    if "Model is not boosted by TorchDDPPlugin." not in upstream.__code__.co_consts:
        return

    def no_sync(self, model: nn.Module, optimizer: Any = None) -> AbstractContextManager:
        if isinstance(model, module.ModelWrapper) and isinstance(model.module, module.ModelWrapper):
            model = model.module
        return upstream(self, model, optimizer)

    patch.set(module.TorchDDPPlugin, "no_sync", no_sync)


@mend(
    module="colossalai.booster.mixed_precision.fp16_torch",
    place="booster/mixed_precision/fp16_torch.py:37",
    needed_when='Booster is given mixed_precision="fp16"',
)
def fp16_optimizer_is_unwrapped_wholly(module: ModuleType, patch: Patch) -> None:
    """The torch optimizer is found beneath both wrappers: the plugin's, and that of the mixed precision.

    Without it loading a sharded optimizer raises AttributeError: 'OptimizerWrapper' object has no attribute 'state'.
    No longer needed when `optimizer.unwrap()` of a boosted optimizer is a torch.optim.Optimizer.
    """
    if "unwrap" in vars(module.TorchAMPOptimizer):
        return

    def unwrap(self) -> torch.optim.Optimizer:
        return self.optim.unwrap() if isinstance(self.optim, module.OptimizerWrapper) else self.optim

    patch.set(module.TorchAMPOptimizer, "unwrap", unwrap)
