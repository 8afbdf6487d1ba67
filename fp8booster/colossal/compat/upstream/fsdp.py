"""Patches of Colossal-AI's TorchFSDPPlugin."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements
from fp8booster.colossal.temporarily import temporarily

_PLUGIN = "booster.plugin.torch_fsdp_plugin"


@wrap(
    f"{_PLUGIN}:TorchFSDPPlugin.configure",
    "553",
    needed_when="an optimizer has defaults that its constructor does not take, as torch.optim.AdamW has",
    only_if=lambda module: bool(_unknown_defaults(AdamW([torch.zeros(1, dtype=torch.float32)]))),
)
def fsdp_makes_optimizers_anew(
    upstream: Callable, self: Any, model: nn.Module, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any
) -> tuple:
    """TorchFSDPPlugin makes the optimizer anew from those of its defaults that its constructor takes.

    Without it: TypeError: AdamW.__init__() got an unexpected keyword argument 'decoupled_weight_decay'.
    """
    for name in () if optimizer is None else _unknown_defaults(optimizer):
        del optimizer.defaults[name]  # its constructor sets it again
    return upstream(self, model, optimizer, *args, **kwargs)


@wrap(
    f"{_PLUGIN}:TorchFSDPPlugin.configure",
    "553",
    needed_when="a parameter group has other options than its optimizer's defaults, as a warm-up of the learning rate "
    "makes it, or there are several, or one without all trainable parameters",
)
def fsdp_keeps_parameter_groups(
    upstream: Callable, self: Any, model: nn.Module, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any
) -> tuple:
    """TorchFSDPPlugin keeps the optimizer's parameter groups with their options: rates, decay, `initial_lr`.

    Without it there is one group, of all parameters with the optimizer's defaults: the first step after a warm-up's
    start is taken at the full learning rate, what the optimizer was not given is trained, and a schedule of several
    groups raises ValueError: zip() argument 2 is longer than argument 1 (PyTorch 2.13). FSDP flattens the parameters of
    a unit to one unless it is told to keep the original ones; several groups, and one of some parameters, need these.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    options = self.fsdp_kwargs
    given = {parameter for group in groups for parameter in group["params"]}
    takes_all = all(parameter in given for parameter in model.parameters() if parameter.requires_grad)
    keeps_original = bool(groups) and (len(groups) > 1 or not takes_all)
    if keeps_original:
        # one group, for which upstream does not warn
        optimizer.param_groups = [{**groups[0], "params": list(model.parameters())}]
        options = options | {"use_orig_params": True}
    with temporarily(self, fsdp_kwargs=options):
        boosted = upstream(self, model, optimizer, *args, **kwargs)
    if keeps_original:
        optimizer.param_groups = groups
    elif groups:
        boosted[1].param_groups[0].update({name: value for name, value in groups[0].items() if name != "params"})
    return boosted


def _unknown_defaults(optimizer: Optimizer) -> set[str]:
    """The defaults of an optimizer that its constructor does not take."""
    parameters = inspect.signature(type(optimizer)).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return set()
    return optimizer.defaults.keys() - parameters.keys()


@patch(_PLUGIN, "414", needed_when="gradients are clipped by norm")
def fsdp_clips_by_the_whole_norm(module: ModuleType, replacements: Replacements) -> None:
    """FSDP's optimizer clips by the norm of the whole gradient, the same on every rank.

    Without it each rank clips its part of the gradient by that part's norm.
    """

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *_: Any, **__: Any
    ) -> torch.Tensor:
        norm = self.model.module.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped by it")
        return norm

    if "clip_grad_by_norm" not in vars(module.FSDPOptimizerWrapper):
        replacements.set(module.FSDPOptimizerWrapper, "clip_grad_by_norm", clip_grad_by_norm)
