"""The state around a call: random numbers, autocast, who sees its operators, and who takes what autograd saves."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


def random_state(device: torch.device) -> Hashable:
    """Return a state that changes when random numbers are drawn on a device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index].get_offset()
    return torch.get_rng_state().numpy().tobytes()


def host_random_state(device: torch.device) -> Hashable:
    """Return a state that changes when random numbers are drawn on the host, for work on a device."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state(legacy=False)["state"]
    return (
        random.getstate(),
        None if of_numpy is None else (of_numpy["key"].tobytes(), of_numpy["pos"]),
        None if device.type == "cpu" else torch.get_rng_state().numpy().tobytes(),
    )


def is_generator(value: object) -> bool:
    """Tell whether an object draws random numbers: of Python's, NumPy's or torch's."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (random.Random, torch.Generator, *of_numpy))


def generator_state(generator: Any) -> Hashable:
    """Return a state that changes when a generator draws; one that has none, as the system's, seems to do so always."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        try:
            return generator.getstate()
        except NotImplementedError:
            return object()
    has_state = hasattr(generator, "bit_generator")
    return pickle.dumps(generator.bit_generator.state if has_state else generator.get_state(legacy=False))


def who_looks() -> str | None:
    """Return who must see or change what is done inside a call, as a replay lets nobody; None: nobody."""
    if torch._C._len_torch_dispatch_stack():  # as torch's counter of FLOPs
        return "a TorchDispatchMode must see its operators"
    # a default device is one too, and changes nothing but where new tensors lie
    if torch._C._len_torch_function_stack() and not all(
        isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
    ):
        return "a TorchFunctionMode must see its functions"
    if _has_any_global_hook():
        return "hooks of all modules must run"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit traces it"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func transforms it"
    return None


CHECKPOINTING = "checkpointing"
"""What `who_saves` returns within a layer that activation checkpointing computes again."""


def who_saves() -> str | None:
    """Return who takes what autograd saves for backward here; None: nobody."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None
    # torch.utils.checkpoint without reentrant backwards: it keeps nothing, and computes the forward again
    return CHECKPOINTING if "_checkpoint_hook" in hooks[0].__qualname__ else "another"


def is_checkpointed_alone(layer: nn.Module) -> bool:
    """Tell whether the checkpointed function around this call is the layer's own call, as far as can be seen.

    torch keeps the function in closures: of the hook that packs, and of what computes it again.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    frame = _in_closure(hooks[0], "frame") if hooks else None
    called = _in_closure(getattr(frame, "recompute_fn", None), "fn")
    while isinstance(called, partial):
        # transformers 5 checkpoints within the layer's forward, and gives the layer to what that was before
        if called.args and called.args[0] is layer and _is_forward_of(type(layer), called.func):
            return True
        called = called.func
    return called is layer or getattr(called, "__self__", None) is layer


def _is_forward_of(cls: type[nn.Module], function: Any) -> bool:
    """Tell whether a function is the forward of a class or a base, or what one of them wraps."""
    forwards = [vars(each)["forward"] for each in cls.__mro__ if "forward" in vars(each)]
    return any(function is each or function is getattr(each, "__wrapped__", None) for each in forwards)


def _in_closure(function: Any, name: str) -> Any:
    """Return a variable of a function around another; None: there is none."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None or name not in code.co_freevars:
        return None
    cell = cells[code.co_freevars.index(name)]
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None


def autocast_dtype(given: list[Tensor]) -> Hashable:
    """Return the type that autocast computes in on the device of a call's tensors; None: it does not."""
    device = given[0].device.type if given else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
