"""AdamW whose states take 4 bytes a parameter beside a BF16 weight, or 2 beside an FP32 one, in place of 12 and 8."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8booster.kernels.adam_step import AdamRates, require_rates
from fp8booster.kernels.adamw_8bit import (
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    in_blocks,
    master_of,
    split,
    step_rows,
    update_8bit,
)
from fp8booster.kernels.moments import Moments8bit

_MOMENTS = ("exp_avg", "exp_avg_amax", "exp_avg_sq", "exp_avg_sq_range")
"""Of a state, in the order of `Moments8bit`."""

_LOW = "master_low"


class AdamW(Optimizer):
    """`torch.optim.AdamW` with both moments in 8 bits, and exact FP32 master weights for BF16 parameters.

    A BF16 parameter is the upper half of its FP32 master, rounded half away from zero; the state holds the 16 bits that
    are missing. So updates too small for BF16 are not lost. Moments have a range for each 256 values
    (`kernels.adamw_8bit`). On a GPU a step is one launch a parameter.

    bytes a parameter         weight   master      moments      all
    torch.optim.AdamW, BF16   2        4 (FP32)    8            14
    this one, BF16            2        2           2.05         6.05
    this one, FP32            4        (weight)    2.05         6.05

    Where a gradient is not finite, its block of 256 values is left as it was, and `skipped_blocks` counts it.

    Args:
        params: parameters or parameter groups: contiguous, BF16 or FP32.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        update_in_backward: update each parameter as soon as backward has its gradient, and free that: no two gradients
            are there at once. `step()` has nothing left to do then, gradients cannot be clipped by their norm, nor
            added up over several backwards.

    Raises:
        ValueError: a rate, beta, eps or decay outside its range, or a parameter whose values lie apart.
        TypeError: a parameter of another dtype, or one that is sharded as a DTensor.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        update_in_backward: bool = False,
    ) -> None:
        require_rates(lr, betas, eps, weight_decay)
        self._numbers: dict[torch.nn.Parameter, int] = {}
        self._skipped: dict[torch.device, torch.Tensor] = {}
        self._update_in_backward = update_in_backward
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `torch.optim.Optimizer`; errors as in the class."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if isinstance(parameter, DTensor):
                raise TypeError("a parameter is a DTensor; this AdamW updates whole tensors: take torch.optim.AdamW")
            if parameter.dtype not in (torch.bfloat16, torch.float32):
                raise TypeError(f"a parameter is {parameter.dtype}; give BF16 or FP32 ones")
            if not parameter.is_contiguous():
                raise ValueError("a parameter's values lie apart in memory; give contiguous parameters")
            self._numbers[parameter] = len(self._numbers)
            if self._update_in_backward and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda each, group=group: self._update(group, [each]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss anew, and is what this returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group, [each for each in group["params"] if each.grad is not None])
        return loss

    @property
    def skipped_blocks(self) -> int:
        """Blocks of 256 values that were left as they were, over all steps; reading it waits for the device."""
        return sum(int(count) for count in self._skipped.values())

    @torch.no_grad()
    def _update(self, group: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
        """Take a step with some parameters of a group; updated in backward, they give up their gradients."""
        rates = AdamRates(float(group["lr"]), group["betas"], group["eps"], group["weight_decay"], decoupled=True)
        parameters = [parameter for parameter in parameters if parameter.numel() > 0]
        for device in dict.fromkeys(parameter.device for parameter in parameters):
            here = [parameter for parameter in parameters if parameter.device == device]
            states = [self._state_of(parameter) for parameter in here]
            for state in states:
                state["step"] += 1
            steps, numbers = [state["step"] for state in states], [self._numbers[each] for each in here]
            rows = step_rows(rates, steps, numbers, device)
            if device not in self._skipped:
                self._skipped[device] = torch.zeros((), dtype=torch.int32, device=device)
            for parameter, state, row in zip(here, states, rows, strict=True):
                assert parameter.grad is not None  # chosen by that
                gradient = parameter.grad.contiguous()
                update_8bit(parameter, state.get(_LOW), gradient, _moments_of(state), row, rates, self._skipped[device])
                if self._update_in_backward:
                    parameter.grad = None

    def _state_of(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state.update(zip(_MOMENTS, Moments8bit.zeros(parameter.numel(), parameter.device), strict=True))
            if parameter.dtype is torch.bfloat16:
                state[_LOW] = torch.zeros(parameter.numel(), dtype=torch.int16, device=parameter.device)
        return state

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict that `torch.optim.AdamW` would have: moments in FP32, and beside them `master`, in FP32."""
        full = self.state_dict()
        parameters = [each for group in self.param_groups for each in group["params"]]
        full["state"] = {number: self._in_fp32(parameters[number], state) for number, state in full["state"].items()}
        return full

    def _in_fp32(self, parameter: torch.nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        moments, value = _moments_of(state), parameter.detach()
        decoded = {
            "exp_avg": decode_first(moments.first, moments.amaxes),
            "exp_avg_sq": decode_second(moments.second, moments.ranges),
            "master": master_of(value, state[_LOW]) if _LOW in state else value.clone(),
        }
        shaped = {name: each.flatten()[: value.numel()].view_as(value) for name, each in decoded.items()}
        return {"step": torch.tensor(float(state["step"])), **shaped}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` or `full_state_dict` gave, or `torch.optim.AdamW`'s, which has no masters.

        Load the model's weights first: a `master` replaces the bits that BF16 weights lack, and the weights.

        Raises:
            ValueError: a state of another size than its parameter's, or one of another optimizer.
        """
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [each for group in self.param_groups for each in group["params"]]
        for number, state in state_dict["state"].items():
            self.state[parameters[number]] = self._loaded(parameters[number], state)

    def _loaded(self, parameter: torch.nn.Parameter, given: dict[str, Any]) -> dict[str, Any]:
        device, count = parameter.device, parameter.numel()
        state: dict[str, Any] = {"step": int(given["step"])}
        if missing := {"exp_avg", "exp_avg_sq"} - given.keys():
            raise ValueError(f"the state has no {' and '.join(sorted(missing))}; load the state dict of an AdamW")
        if any(given[name].numel() != count for name in ("exp_avg", "exp_avg_sq")):
            raise ValueError(f"a state has {given['exp_avg'].numel()} values and its parameter {count}")
        if given["exp_avg"].is_floating_point():
            first = encode_first(in_blocks(given["exp_avg"].to(device, torch.float32)))
            second = encode_second(in_blocks(given["exp_avg_sq"].to(device, torch.float32)), seed=None)
            codes = (first[0].flatten()[:count], first[1], second[0].flatten()[:count], second[1])
            state.update(zip(_MOMENTS, codes, strict=True))
        else:
            state.update({name: given[name].to(device, copy=True) for name in _MOMENTS})
        if parameter.dtype is torch.bfloat16:
            state[_LOW] = self._loaded_low(parameter, given)
        elif "master" in given:
            parameter.copy_(given["master"])
        return state

    def _loaded_low(self, parameter: torch.nn.Parameter, given: dict[str, Any]) -> torch.Tensor:
        if _LOW in given:
            return given[_LOW].to(parameter.device, copy=True)
        if "master" not in given:
            return torch.zeros(parameter.numel(), dtype=torch.int16, device=parameter.device)
        rounded, low = split(given["master"].to(parameter.device, torch.float32).flatten())
        parameter.copy_(rounded.view_as(parameter))
        return low


def _moments_of(state: dict[str, Any]) -> Moments8bit:
    return Moments8bit(*(state[name] for name in _MOMENTS))
