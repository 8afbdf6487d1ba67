"""The step of a user's Adam in one pass over memory (`kernels.adamw`), which tells the amax of each new value.

The optimizer, torch's Adam or AdamW or one of `fp8booster.optim`, stays what it is: its states, their format, its
parameter groups and its schedule are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from fp8booster.kernels.adamw import AdamShards, update
from fp8booster.optim.adamw import AdamW as AdamW8bit
from fp8booster.optim.hybrid_adam import HybridAdam
from fp8booster.optim.steps import rates_of, update_by_device

OURS = (HybridAdam, AdamW8bit)
"""Optimizers that find the amaxes of what they write."""

_IS_CUDA = attrgetter("is_cuda")

COUNTS_STEPS = "fp8_counts_steps"
"""Attribute of a hook that looks at no values of parameters."""


def why_not(optimizer: Optimizer) -> str | None:
    """Return why an optimizer has to step by itself; None where `step_group` computes the same but for rounding order.

    Not where somebody asked for another implementation, or has hooks that may want to see the parameters.
    """
    if type(optimizer) not in (Adam, AdamW, *OURS):
        return f"{type(optimizer).__name__} is not torch's Adam or AdamW, nor fp8booster's HybridAdam or AdamW"
    # hooks expect the optimizer's own `step` to run, with gradients in `.grad`
    if has_hooks(optimizer):
        return "hooks are called before or after its step"
    for group in optimizer.param_groups:
        if type(optimizer) not in OURS and not (group["fused"] or _left_to_torch(group)):
            return "it was not made with fused=True"
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option, False):
                return f"it was made with {option}=True"
        if not all(map(torch.Tensor.is_contiguous, group["params"])):
            return "the values of a parameter lie apart"
        # the kernel takes betas as numbers, and the host would have to wait for a tensor
        if any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
            return "its betas are tensors"
    return None


def _left_to_torch(group: dict[str, Any]) -> bool:
    """Tell whether torch chooses the implementation, for parameters on a GPU: it then takes many passes."""
    chosen = group["fused"] is not None or group["foreach"] is not None
    return not chosen and all(map(_IS_CUDA, group["params"]))


def has_hooks(optimizer: Optimizer) -> bool:
    """Tell whether a step has hooks, besides those that only count steps."""
    hooks = chain.from_iterable(
        registered.values()
        for registered in (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
    )
    return not all(
        # torch.profiler registers a hook for all optimizers when it is imported, which counts steps for its traces
        hasattr(hook, COUNTS_STEPS) or getattr(hook, "__module__", None) == "torch.profiler"
        for hook in hooks
    )


@torch.no_grad()
def step_group(
    optimizer: Adam | HybridAdam | AdamW8bit,
    group: dict[str, Any],
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[torch.Tensor],
    divisor: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Take a step with parameters of a group, whose gradients need not have their dtype.

    Args:
        optimizer: one for which `why_not` finds no reason.
        group: one of its parameter groups.
        parameters: of this group.
        gradients: of each, on its device: BF16, FP16 or FP32. What `.grad` holds is not read.
        divisor: gradients are divided by it first: float32 []. None: they are not.

    Returns:
        Of each parameter the largest magnitude among its new values: float32 [], on its device.
    """
    update_shards = optimizer.update_shards if isinstance(optimizer, OURS) else partial(_update_shards, optimizer)
    return update_by_device(update_shards, group, parameters, gradients, divisor)


def step_of_nothing(optimizer: Optimizer) -> None:
    """Let an optimizer whose parameters `step_group` has updated step over none: schedules count its calls."""
    held = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = []
        optimizer.step()
    finally:
        for group, parameters in zip(optimizer.param_groups, held, strict=True):
            group["params"] = parameters


def _update_shards(
    optimizer: Adam,
    group: dict[str, Any],
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[torch.Tensor],
    divisor: torch.Tensor | None,
) -> torch.Tensor:
    """As `AdamW8bit.update_shards`; torch makes the states where there are none."""
    states = [optimizer.state[each] for each in parameters]
    _make_states(optimizer, group, [each for each, state in zip(parameters, states, strict=True) if not state])
    exp_avgs, exp_avg_sqs, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    # torch counts steps in tensors, and its own step goes on from them
    torch._foreach_add_(steps, 1)
    shards = AdamShards(parameters, gradients, exp_avgs, exp_avg_sqs, steps)
    return update(shards, rates_of(group, optimizer.defaults["decoupled_weight_decay"]), divisor)


def _make_states(optimizer: Adam, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
    """Let torch make the states of parameters."""
    if not parameters:
        return
    # torch makes them for parameters with a gradient of their own dtype, which an engine's need not have; it reads no
    # more of it, so the values stand in
    held = [each.grad for each in parameters]
    for each in parameters:
        each.grad = each.detach()
    # the lists are those that torch's step would read, and this one reads the states
    optimizer._init_group(group | {"params": parameters}, *([] for _ in range(6)))
    for each, gradient in zip(parameters, held, strict=True):
        each.grad = gradient
