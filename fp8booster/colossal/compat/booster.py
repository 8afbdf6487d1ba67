"""Patches of `Booster(mixed_precision=...)`, and of the plugins that leave the precision to it: DDP's and FSDP's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, _optim_utils
from torch.optim import AdamW, Optimizer

from fp8booster.colossal.compat.accelerator import patch_on_cpu
from fp8booster.colossal.compat.registry import Replacements, patch, wrap
from fp8booster.colossal.temporarily import temporarily

_FSDP = "booster.plugin.torch_fsdp_plugin"


@patch("booster.mixed_precision.bf16", "4", "always")
def bf16_autocasts(module: ModuleType, replacements: Replacements) -> None:
    """Without it: TypeError: Can't instantiate abstract class BF16MixedPrecision."""
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
    'Booster is given mixed_precision="fp8", "fp16_apex" or "fp16_naive"',
)
def empty_precisions_are_refused(module: ModuleType, replacements: Replacements) -> None:
    """Without it: TypeError: Can't instantiate abstract class FP8MixedPrecision."""
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


@patch("booster.mixed_precision.fp16_torch", "37", 'Booster is given mixed_precision="fp16"')
def fp16_optimizer_is_unwrapped_wholly(module: ModuleType, replacements: Replacements) -> None:
    """Without it a sharded optimizer does not load: 'OptimizerWrapper' object has no attribute 'state'."""

    def unwrap(self) -> torch.optim.Optimizer:
        return self.optim.unwrap() if isinstance(self.optim, module.OptimizerWrapper) else self.optim

    if "unwrap" not in vars(module.TorchAMPOptimizer):
        replacements.set(module.TorchAMPOptimizer, "unwrap", unwrap)


@wrap(
    "booster.plugin.torch_ddp_plugin:TorchDDPPlugin.no_sync",
    "308",
    "Booster is given a mixed_precision",
    only_if=lambda module: (
        "Model is not boosted by TorchDDPPlugin." in module.TorchDDPPlugin.no_sync.__code__.co_consts
    ),
)
def no_sync_reaches_ddp_under_mixed_precision(
    upstream: Callable, self: Any, model: nn.Module, optimizer: Any = None
) -> AbstractContextManager:
    """Without it: AssertionError: Model is not boosted by TorchDDPPlugin."""
    from colossalai.interface import ModelWrapper

    if isinstance(model, ModelWrapper) and isinstance(model.module, ModelWrapper):
        model = model.module
    return upstream(self, model, optimizer)


@patch_on_cpu(_FSDP, "100,533")
def fsdp_runs_on_cpu(module: ModuleType, replacements: Replacements) -> None:
    """Without it: AssertionError: Torch not compiled with CUDA enabled (or RuntimeError: no NVIDIA driver); and when it
    saves RuntimeError: setStorage: ... out of bounds, since FSDP frees what it took for the copy on the GPU. And of
    optimizers with several groups each moment is saved with the values of the last, since torch gathers all into one
    buffer, and takes a copy on the host for a copy.
    """

    def config(offload_to_cpu: bool, rank0_only: bool) -> FullStateDictConfig:
        return FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only)

    # configure asks torch.cuda.current_device() itself: this module alone sees another torch.cuda
    on_cpu = ModuleType("torch")
    vars(on_cpu).update(vars(torch), cuda=SimpleNamespace(current_device=lambda: torch.device("cpu")))
    replacements.set(module, "torch", on_cpu)
    replacements.set(module, "FullStateDictConfig", config)
    # without offloading it clones what it keeps
    keep = _optim_utils._unflatten_orig_param_states
    replacements.set(_optim_utils, keep.__name__, lambda *args: keep(*args[:-1], False))


def _unknown_defaults(optimizer: Optimizer) -> set[str]:
    """Return the defaults of an optimizer that its constructor does not take."""
    parameters = inspect.signature(type(optimizer)).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return set()
    return optimizer.defaults.keys() - parameters.keys()


@wrap(
    f"{_FSDP}:TorchFSDPPlugin.configure",
    "553",
    "an optimizer has defaults that its constructor does not take, as torch.optim.AdamW has",
    only_if=lambda module: bool(_unknown_defaults(AdamW([torch.zeros(1, dtype=torch.float32, device="cpu")]))),
)
def fsdp_makes_optimizers_anew(
    upstream: Callable, self: Any, model: nn.Module, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any
) -> tuple:
    """Without it: TypeError: AdamW.__init__() got an unexpected keyword argument 'decoupled_weight_decay'."""
    for name in () if optimizer is None else _unknown_defaults(optimizer):
        del optimizer.defaults[name]  # its constructor sets it again
    return upstream(self, model, optimizer, *args, **kwargs)


@wrap(
    f"{_FSDP}:TorchFSDPPlugin.configure",
    "553",
    "a parameter group has other options than its optimizer's defaults, as a warm-up of the learning rate "
    "makes it, or there are several, or one without all trainable parameters",
)
def fsdp_keeps_parameter_groups(
    upstream: Callable, self: Any, model: nn.Module, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any
) -> tuple:
    """Without it there is one group, of all parameters with the optimizer's defaults: the first step after a warm-up's
    start is taken at the full learning rate, what the optimizer was not given is trained, and a schedule of several
    groups raises ValueError: zip() argument 2 is longer than argument 1.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    options = self.fsdp_kwargs
    given = {parameter for group in groups for parameter in group["params"]}
    takes_all = all(parameter in given for parameter in model.parameters() if parameter.requires_grad)
    # FSDP flattens the parameters of a unit to one; several groups, and one of some parameters, need the original ones
    keeps_original = bool(groups) and (len(groups) > 1 or not takes_all)
    if keeps_original:
        # one group, for which upstream does not warn
        optimizer.param_groups = [{**groups[0], "params": list(model.parameters())}]
        options = options | {"use_orig_params": True}
    with temporarily(self, fsdp_kwargs=options):
        boosted = upstream(self, model, optimizer, *args, **kwargs)
    if keeps_original:
        # these hold the original parameters, which FSDP keeps with use_orig_params
        optimizer.param_groups = groups
    elif groups:
        boosted[1].param_groups[0].update({name: value for name, value in groups[0].items() if name != "params"})
    return boosted


@wrap(
    f"{_FSDP}:TorchFSDPCheckpointIO.load_unsharded_optimizer",
    "87",
    "states that are no tensors, as HybridAdam's count of steps, are loaded from one file",
)
def fsdp_loads_counts_of_steps(upstream: Callable, *args: Any, **kwargs: Any) -> None:
    """Without it: AttributeError: 'int' object has no attribute 'cpu'."""
    # every rank reads the file, so that none needs to be sent what rank 0 has
    fsdp = FullyShardedDataParallel
    shards = {"scatter_full_optim_state_dict": fsdp.shard_full_optim_state_dict}
    own = SimpleNamespace(full_optim_state_dict=fsdp.full_optim_state_dict, **shards)
    with temporarily(inspect.getmodule(upstream), FSDP=own):
        upstream(*args, **kwargs)


@patch(_FSDP, "414", "gradients are clipped by norm")
def fsdp_clips_by_the_whole_norm(module: ModuleType, replacements: Replacements) -> None:
    """Without it each rank clips its part of the gradient by that part's norm."""

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *_: Any, **__: Any
    ) -> torch.Tensor:
        # FSDP's own: it adds the squares of all ranks' parts before the root
        norm = self.model.module.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped by it")
        return norm

    if "clip_grad_by_norm" not in vars(module.FSDPOptimizerWrapper):
        replacements.set(module.FSDPOptimizerWrapper, "clip_grad_by_norm", clip_grad_by_norm)
