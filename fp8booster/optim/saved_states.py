"""States of AdamW with 8-bit moments in the form of state dicts, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from fp8booster.kernels.adamw_8bit import master_of, split
from fp8booster.optim.own_part import as_part_of, own_part
from fp8booster.optim.states_8bit import LOW, State, as_tensor


def whole(parameter: torch.Tensor, state: State) -> dict[str, Any]:
    """Return a state as `torch.optim.AdamW` has it, in FP32, with the master; DTensors of a DTensor."""
    # BF16 values alone lack the lower half of the master
    value, low = own_part(parameter).detach(), state.codes.get(LOW)
    tensors = {
        "exp_avg": state["exp_avg"],
        "exp_avg_sq": state["exp_avg_sq"],
        # a copy: the next step writes to the weight, which is its own master
        "master": value.clone() if low is None else master_of(value, low).view_as(value),
    }
    if isinstance(parameter, DTensor):
        tensors = {name: as_part_of(parameter, each) for name, each in tensors.items()}
    return {"step": as_tensor(state.codes["step"]), **tensors}


def spread(parameter: DTensor, state: State) -> dict[str, Any]:
    """Return a DTensor's state in FP32, of DTensors, with the names that `state` itself has: torch asks it for them."""
    # FP32 for `master_low` too: NCCL and gloo gather no int16
    tensors = {name: as_part_of(parameter, value.float()) for name, value in state.items() if name != "step"}
    return {"step": as_tensor(state.codes["step"]), **tensors}


def loaded(parameter: torch.Tensor, given: Mapping[str, Any]) -> State:
    """Return the state of a parameter from what was saved; a `master` is written to the parameter too.

    Raises:
        ValueError: it is another parameter's, or another optimizer's.
    """
    own, given = own_part(parameter), {name: _part_of(parameter, each) for name, each in given.items()}
    moved = {
        # copied even on the same device: a step changes codes in place, and a caller may load the state again
        name: value.to(own.device, copy=True) if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
        if name not in ("master", "step")
    }
    # `step` may be a tensor on a GPU there, and the host counts steps here
    state = State({"step": int(given.get("step", 0)), **moved})
    state.fit(own)
    if "master" in given:
        master = given["master"].to(own.device, torch.float32)
        if own.dtype is torch.bfloat16:
            rounded, state.codes[LOW] = split(master.flatten())
            own.copy_(rounded.view_as(own))
        else:
            own.copy_(master)
    return state


def _part_of(parameter: torch.Tensor, value: Any) -> Any:
    """Return this rank's part of an entry of a parameter's state: of a DTensor, or of what is as large as the whole."""
    if isinstance(value, DTensor):
        return own_part(value)
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape or value.shape == own_part(parameter).shape:
        return value
    # every rank has the whole: none sends
    return own_part(distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None))
