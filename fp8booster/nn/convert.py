"""Which linear layers of a model compute in FP8, and why the others do not."""

from __future__ import annotations

from torch import nn

from fp8booster.config import FP8Config
from fp8booster.kernels.cast import aligned
from fp8booster.nn.linear import FP8Linear

PADDING_LIMIT = 1.125
"""A layer whose features, rounded up to multiples of 16, make its products larger than this stays in BF16."""

_KEPT = "_fp8booster_kept"
"""Attribute that says, on a linear layer left alone, why."""


def convert_to_fp8(model: nn.Module, config: FP8Config | None = None) -> nn.Module:
    """Turn a model's linear layers into FP8 layers, in place.

    Parameters, their names, state dict keys and module identities stay as they are. Layers that stay in high precision
    are remembered with the reason, which `report` shows. Calling it again applies the new configuration.

    Args:
        model: any module.
        config: which layers, and how; None is `FP8Config()`.

    Returns:
        The model.

    Raises:
        ValueError: no linear layer is left to compute in FP8.
    """
    config = FP8Config() if config is None else config
    linears = list(linear_layers(model))
    for name, module in linears:
        reason = why_kept(name, module, config)
        if reason is None:
            module.__dict__.pop(_KEPT, None)
            FP8Linear.take_over(module, config)
        else:
            if type(module) is FP8Linear:
                module.give_back()
            module.__dict__[_KEPT] = reason
    if not any(isinstance(module, FP8Linear) for _, module in linears):
        reasons = sorted({kept_reason(module) for _, module in linears})
        raise ValueError(
            "no layer of the model would compute in FP8: "
            + ("; ".join(reasons) if reasons else "it has no linear layers")
            + ". Train it without use_fp8, or choose layers with FP8Config(layers=...)"
        )
    return model


def linear_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Every linear layer once, with its path in the model."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def why_kept(name: str, module: nn.Linear, config: FP8Config) -> str | None:
    """Why a linear layer stays in high precision under a configuration, or None if it computes in FP8."""
    if type(module) not in (nn.Linear, FP8Linear):
        return f"{type(module).__name__} is a subclass of nn.Linear that may compute its product otherwise"
    if not config.layers(name, module):
        return "FP8Config.layers leaves it out"
    inputs, outputs = module.in_features, module.out_features
    if inputs * outputs == 0:
        return "it has no weights"
    growth = aligned(inputs) * aligned(outputs) / (inputs * outputs)
    if growth > PADDING_LIMIT:
        return (
            f"{inputs} x {outputs} features, rounded up to multiples of 16, would make its products {growth:.2f} times "
            "larger"
        )
    return None


def kept_reason(module: nn.Linear) -> str:
    """Why a linear layer of a converted or unconverted model is not in FP8."""
    return module.__dict__.get(_KEPT, "use_fp8 is off")
