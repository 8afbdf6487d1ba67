"""Adam and AdamW over FP32 shards with 16-bit gradients: on a GPU in one pass (`kernels.adamw`), else in PyTorch's own
fused operators.

It stands where Colossal-AI's HybridAdam does (nn/optimizer/hybrid_adam.py), which needs compiled extensions: the same
arguments, `step(div_scale=...)`, the same states. Where gradients are widened to FP32, it is a bounded number of values
at a time.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from fp8booster.argument_types import require_types
from fp8booster.kernels.adamw import AdamShards, require_rates, update, update_by_torch
from fp8booster.kernels.device import runs_triton
from fp8booster.optim.steps import divisor_on, rates_of

VALUES_AT_ONCE = 2**26
"""How many gradient values are held in FP32 at a time; a shard is never split."""


class HybridAdam(Optimizer):
    """Adam over parameters that hold FP32 values, wherever they lie, with gradients of 16 or 32 bits.

    The arithmetic is that of `torch.optim.AdamW(fused=True)`, in FP32. `state["step"]` is an int, and every other state
    has the parameter's size, as Colossal-AI's Gemini needs it.

    Args:
        model_params: parameters or parameter groups.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in `torch.optim.Adam`.
        bias_correction: correct the moments for their start at 0.
        adamw_mode: decay the weights themselves (AdamW), not by way of the gradient (Adam with L2).
        nvme_offload_fraction, nvme_offload_dir: as in Colossal-AI's, at their defaults: states on a disk are refused.
        initial_scale, simd_log: as in Colossal-AI's, without effect: the loss scale is the plugin's.

    Raises:
        ValueError: a rate, beta, eps or decay outside its range, or states on a disk.
        TypeError: an argument of another type.
    """

    num_fp32_shards_per_param = 4
    """Weight, gradient and two moments; Gemini decides by it whether masters fit on the GPU."""

    amaxes: Mapping[torch.nn.Parameter, torch.Tensor] = MappingProxyType({})
    """The largest magnitude of each parameter that the last step updated in one pass: float32 []."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        initial_scale: float | None = None,
        simd_log: bool = False,
    ) -> None:
        require_types(HybridAdam.__init__, locals())
        require_rates(float(lr), betas, eps, weight_decay)
        for name, value in (("fraction", nvme_offload_fraction), ("dir", nvme_offload_dir)):
            if value not in (0, None):
                raise ValueError(
                    f"nvme_offload_{name} is {value!r}, and this optimizer keeps no states on a disk; leave it out, "
                    "and use GeminiPlugin(offload_optim_frac=...) to keep states on the host"
                )
        remedies = {"initial_scale": (initial_scale, "give it to the plugin"), "simd_log": (simd_log, "leave it out")}
        for name, (value, remedy) in remedies.items():
            if value not in (None, False):
                warnings.warn(f"{name} has no effect on an optimizer, as in Colossal-AI; {remedy}", stacklevel=2)
        super().__init__(
            model_params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "bias_correction": bias_correction,
                "decoupled_weight_decay": adamw_mode,
                "amsgrad": amsgrad,
                "maximize": maximize,
            },
        )

    @classmethod
    def convert_in_place(cls, optimizer: Optimizer) -> None:
        """Turn a `torch.optim.Adam` or `AdamW` into this class in place, with its hyperparameters.

        Its parameter groups stay the same objects, so that a learning rate schedule made for it goes on reaching them.

        Raises:
            TypeError: another optimizer, or a subclass of these.
            ValueError: it is differentiable, or has taken steps.
        """
        if type(optimizer) not in (Adam, AdamW):
            raise TypeError(
                f"{type(optimizer).__name__} cannot train shards of master weights; give torch.optim.AdamW, "
                "torch.optim.Adam or fp8booster.optim.HybridAdam"
            )
        if optimizer.state:
            raise ValueError("the optimizer has taken steps; boost it before it takes the first")
        if any(group["differentiable"] for group in optimizer.param_groups):
            raise ValueError("the optimizer is differentiable; make it with differentiable=False")
        # a schedule has put a wrapper of the former class's step on the object
        scheduled = optimizer.__dict__.pop("step", None)
        optimizer.__class__ = cls
        optimizer._patch_step_function()  # for hooks, as torch does for a new class
        if scheduled is not None:
            vars(optimizer)["step"] = _tell_schedule(optimizer)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, div_scale: float | torch.Tensor = -1) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss anew, and is what this returns.
            div_scale: gradients are divided by it, a number or float32 []; the number -1 divides by nothing. Gradients
                of FP32 may be divided in place.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # those of the last step would pass for amaxes of parameters that get no gradient in this one
        self.amaxes = amaxes = {}
        for group in self.param_groups:
            for parameters in self._batches(group):
                amaxes.update(self._update(parameters, group, div_scale))
        return loss

    def _batches(self, group: dict[str, Any]) -> Iterator[list[torch.nn.Parameter]]:
        """Yield the parameters with a gradient, those that one call can update together."""
        kinds: dict[tuple[torch.device, torch.dtype, torch.dtype], list[torch.nn.Parameter]] = {}
        for parameter in group["params"]:
            # a rank may hold nothing of a parameter, and nothing has no largest magnitude
            if parameter.grad is not None and parameter.numel() > 0:
                # torch's fused operator takes one device and one type in a call
                kind = parameter.device, parameter.dtype, parameter.grad.dtype
                kinds.setdefault(kind, []).append(parameter)
        for parameters in kinds.values():
            batch: list[torch.nn.Parameter] = []
            values = 0
            # the kernel reads 16-bit gradients as they are; torch's operator needs them widened, in memory of its own
            at_once = math.inf if _in_one_pass(group, parameters[0]) else VALUES_AT_ONCE
            for parameter in parameters:
                if batch and values + parameter.numel() > at_once:
                    yield batch
                    batch, values = [], 0
                batch.append(parameter)
                values += parameter.numel()
            yield batch

    @torch.no_grad()
    def update_shards(
        self,
        group: dict[str, Any],
        parameters: Sequence[torch.nn.Parameter],
        gradients: Sequence[torch.Tensor],
        divisor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take a step with parameters of one device in one pass; arguments and result as in `AdamW.update_shards`."""
        rates = rates_of(group, self.defaults["decoupled_weight_decay"])
        return update(self.next_shards(group, parameters, gradients), rates, divisor)

    def next_shards(
        self, group: dict[str, Any], parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]
    ) -> AdamShards:
        """Count a step, and return the tensors that it reads and writes; arguments as in `update_shards`."""
        device = parameters[0].device
        states = [self._state_of(parameter, group.get("amsgrad", False)) for parameter in parameters]
        # a correction for infinitely many steps is none
        corrected = group.get("bias_correction", True)
        steps = {
            step: torch.full((), step if corrected else math.inf, dtype=torch.float32, device=device)
            for step in {state["step"] for state in states}
        }
        return AdamShards(
            [parameter.data for parameter in parameters],
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [steps[state["step"]] for state in states],
        )

    def _state_of(self, parameter: torch.nn.Parameter, amsgrad: bool) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
                state[name] = torch.zeros_like(parameter.data)
        # a checkpoint's moments are FP32 even where the values are not
        if state["exp_avg"].dtype != parameter.dtype:
            moments = [name for name in state if name != "step"]
            state.update({name: state[name].to(parameter.dtype) for name in moments})
        state["step"] = int(state["step"]) + 1  # torch's count of steps is a tensor
        return state

    def _update(
        self, parameters: list[torch.nn.Parameter], group: dict[str, Any], div_scale: float | torch.Tensor
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Update parameters of one device and dtype; return the amaxes of their new values, where these are known."""
        device = parameters[0].device
        divisor = divisor_on(device, div_scale)
        gradients = [each.grad.data for each in parameters if each.grad is not None]
        if _in_one_pass(group, parameters[0]):
            amaxes = self.update_shards(group, parameters, gradients, divisor)
            return dict(zip(parameters, amaxes.unbind(), strict=True))
        shards = self.next_shards(group, parameters, gradients)
        rates = rates_of(group, self.defaults["decoupled_weight_decay"])
        amsgrad = group.get("amsgrad", False)
        largest = [self.state[each]["max_exp_avg_sq"] for each in parameters] if amsgrad else []
        update_by_torch(shards, rates, divisor, largest, group.get("maximize", False))
        return {}


def _in_one_pass(group: dict[str, Any], parameter: torch.nn.Parameter) -> bool:
    """Tell whether a parameter of a group is updated by the kernel of `kernels.adamw`."""
    return runs_triton(parameter) and not (group.get("amsgrad", False) or group.get("maximize", False))


def _tell_schedule(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the optimizer's `step` with the marks that a learning rate schedule left on the one it had.

    A schedule warns unless it finds its mark on `step`, and `_opt_called` set by it
    (torch/optim/lr_scheduler.py: patch_track_step_called).
    """
    step = type(optimizer).step

    @functools.wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True
        return step(self, *args, **kwargs)

    vars(call)["_wrapped_by_lr_sched"] = True
    return MethodType(call, optimizer)
