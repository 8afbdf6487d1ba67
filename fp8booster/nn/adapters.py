"""peft's adapters on FP8 layers: their changes of base weights unseen, and base weights that are kept in FP8 alone.

peft adds an adapter's product to the base weight through `.data`, which torch does not count as a change, and so it
takes out the part that some adapters begin as. It reads the adapter's weights itself, which may have no values in 16
bits between two steps (`WeightCopies.high_precision`). A weight of `FrozenLayer` is decoded at each look, so that what
is added to it would be lost.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8booster.nn.experts.spread import spread_of
from fp8booster.nn.linear.frozen import FrozenLayer, before_decoding
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.linear.low_rank import low_rank_product
from fp8booster.nn.modules import unmixed
from fp8booster.nn.weights.holder import FP8Module

_CHANGES = ("merge", "unmerge")
_TAKEN_OUT = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` for adapters that peft takes out of the base weight, which it changes."""

_FOLLOWED = "_fp8booster_followed"

_UNMERGED = "_fp8booster_unmerged"
"""Attribute of adapters that are merged into a frozen weight: its FP8 matrix before."""


def follow_merges() -> None:
    """Let FP8 layers know of merges and unmerges by every class of adapters that peft has now; none without peft.

    The classes refuse experts that are spread over ranks, too.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return
    for adapters in set(_subclasses(tuners.BaseTunerLayer)):
        for name in _CHANGES:
            _replace(adapters, name, _followed)
        _replace(adapters, "update_layer", _not_of_spread)
        for name in _TAKEN_OUT:
            _replace(adapters, f"{name}_init", _not_of_frozen)
    if (dora := sys.modules.get("peft.tuners.lora.dora")) is not None:
        _replace(dora.DoraLinearLayer, "forward", _with_frozen_base)
    if (lora := sys.modules.get("peft.tuners.lora.layer")) is not None:
        _replace(lora.Linear, "forward", _with_frozen_product)


before_decoding.append(follow_merges)  # peft may be imported later than this, and looks at a weight when it adapts it


def is_adapted(module: nn.Module) -> bool:
    """Tell whether a module is peft's around a layer."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def changes_base(init_lora_weights: object) -> bool:
    """Tell whether peft begins LoRA by a change of the weight that it is on."""
    return isinstance(init_lora_weights, str) and init_lora_weights.lower().startswith(_TAKEN_OUT)


def merged_weight(adapters: nn.Module) -> Tensor:
    """Return a layer's weight with its active adapters, FP32, as it lies; model and adapters stay as they are.

    Args:
        adapters: for which `is_adapted`.

    Raises:
        ValueError: the value is not finite.
    """
    # a merge and an unmerge of the layer itself would leave rounding errors in it
    alone: Any = copy.deepcopy(adapters)
    base = alone.get_base_layer()
    alone.float()  # for one rounding, by who casts the value
    if isinstance(base, FP8Layer):
        base.revert()
    if not alone.merged:
        alone.merge(safe_merge=True)
    return base.weight.detach()


def _replace(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Let a class call a replacement in the place of its own method, which the replacement is given first."""
    method = vars(owner).get(name)
    if method is None or hasattr(method, _FOLLOWED):
        return

    @functools.wraps(method)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(method, *args, **kwargs)

    setattr(replaced, _FOLLOWED, True)
    setattr(owner, name, replaced)


def _subclasses(base: type[Any]) -> Iterator[type]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)


def _followed(change: Callable[..., None], adapters: Any, *args: Any, **kwargs: Any) -> None:
    """Change the base weight, as adapters do: before it weights get values, after it a new cast."""
    base = adapters.get_base_layer()
    if isinstance(base, FrozenLayer):
        with _thawed(base, adapters):
            change(adapters, *args, **kwargs)
        return
    for module in adapters.modules():
        if isinstance(module, FP8Module):
            # adapters that are FP8 layers too may have no 16-bit values now
            module.restore_weights()
    try:
        change(adapters, *args, **kwargs)
    finally:
        if isinstance(base, FP8Module):
            base.forget_weights()


def _not_of_spread(add: Callable[..., Any], adapters: Any, *args: Any, **kwargs: Any) -> Any:
    """Add an adapter to a layer, unless that is of experts which are spread over ranks."""
    held = adapters.get_base_layer()._parameters
    groups = [spread_of(each) for each in held.values() if each is not None]
    # the weight of an expert on another rank is None
    if held.get("weight", adapters) is None or any(spread is not None and spread.sends for spread in groups):
        raise ValueError(
            "adapters cannot be added to experts that are spread over ranks; add them before the plugin boosts the "
            "model, use ep_size=1, or adapt other layers, as attention's"
        )
    return add(adapters, *args, **kwargs)


def _not_of_frozen(begin: Callable[..., None], adapters: Any, *args: Any, **kwargs: Any) -> None:
    """Take adapters out of the base weight, unless that is kept in FP8 alone."""
    if isinstance(adapters.get_base_layer(), FrozenLayer):
        raise ValueError(
            f"{begin.__name__} of peft changes the weight that it takes an adapter from, and this one is kept in "
            "FP8 alone; use init_lora_weights=True, or add the adapters first and quantize the model with them"
        )
    begin(adapters, *args, **kwargs)


@contextmanager
def _thawed(base: FrozenLayer, adapters: Any) -> Iterator[None]:
    """Make a frozen layer one with an FP32 weight, in the block; the cast of what that is then is its weight after it.

    The bytes before the first merge are kept, and come back when all is unmerged: to cast a decoded weight again may
    round it again.
    """
    kind, config, dtype, shape = unmixed(type(base)), base.fp8_config, base.weight_dtype, base.fp8_shape
    # of several merges the first alone has the bytes without an adapter
    before = vars(adapters).get(_UNMERGED) or base.quantized
    input_amax = base.input_amax
    # in FP32 the sum is rounded once, to FP8
    base.weight_dtype = torch.float32
    base.revert()
    try:
        yield
    finally:
        kind.convert_in_place(base, config)
        base.weight_dtype = dtype
        if input_amax is not None:
            base.scale_inputs_by(input_amax.detach())
        if adapters.merged:
            vars(adapters)[_UNMERGED] = before
        else:
            vars(adapters).pop(_UNMERGED, None)
            base.hold(before, shape)


def _with_frozen_product(forward: Callable[..., Tensor], adapters: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a LoRA layer: for a frozen weight in FP8 it is one function with the base's product."""
    product = None if args or kwargs else low_rank_product(x, [adapters])
    return forward(adapters, x, *args, **kwargs) if product is None else product


def _with_frozen_base(
    forward: Callable[..., Tensor],
    adapters: Any,
    x: Tensor,  # [..., K]
    *,
    lora_A: Any,
    lora_B: Any,
    scaling: float,
    base_layer: nn.Module,
    base_result: Tensor | None = None,  # [..., N], bias included; newer versions of peft give it
    **more: Any,
) -> Tensor:
    """Run a DoRA layer (Liu et al., arXiv 2402.09353), and multiply by a frozen weight in FP8.

    peft multiplies by `weight` itself, which autograd would keep decoded.
    """
    if not isinstance(base_layer, FrozenLayer):
        if base_result is not None:
            more["base_result"] = base_result
        return forward(adapters, x, lora_A=lora_A, lora_B=lora_B, scaling=scaling, base_layer=base_layer, **more)
    if base_result is None:
        product = base_layer.fp8_product(x, None)
    else:
        product = base_result if (bias := base_layer._parameters["bias"]) is None else base_result - bias
    delta = lora_B(lora_A(x)) * scaling
    if product is None:  # no tokens
        return delta
    # the norm is a constant in backward, as in section 4.3 of the paper: it saves memory, at no loss of accuracy
    with torch.no_grad():
        update = lora_B.weight.float() @ lora_A.weight.float()
        norm = adapters.get_weight_norm(base_layer.weight.float(), update, scaling)
    factor = (adapters.weight / norm).to(delta.dtype)
    return (factor - 1) * product + factor * delta
