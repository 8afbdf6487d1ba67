"""A model for inference, its linear layers' weights kept in FP8 alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fp8booster.config import FP8Config, config_or_default
from fp8booster.kernels.scales import amax_of
from fp8booster.nn.convert import Kinds, convert_to_fp8, is_linear
from fp8booster.nn.experts.fp8_experts import are_experts
from fp8booster.nn.linear.frozen import FrozenFP8Linear, FrozenLayer
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import count_readers
from fp8booster.scaling import INPUT

Batch = torch.Tensor | tuple | list | Mapping[str, Any]


def quantize(model: nn.Module, config: FP8Config | None = None, *, batches: Iterable[Batch] | None = None) -> nn.Module:
    """Cast the weights of a model's linear layers to FP8, once, in place; their 16-bit values are freed.

    The layers compute in FP8 in every mode, and pass gradients to their inputs. What stays in 16 bits is in `report`,
    with the reason: vocabulary heads unless `config.vocabulary_head`, weights that are tied to others, experts that a
    module holds as one parameter. Layers that are quantized already stay as they are.

    Args:
        model: any module, of transformers or not, of one process.
        config: which layers, their formats and scales; `scaling="amax"` and "constant" are
            FP8-AMAX and FP8-CSCALE of Perez et al. (arXiv 2309.17224) for inference. None is `FP8Config()`.
        batches: what the model is run on, without gradients, to calibrate: from then on inputs of each layer are scaled
            by the largest amax that it met, and what is larger saturates. Each is a mapping of the model's named
            arguments, a tuple or list of arguments, or one. None: an input is scaled by its own amax.

    Returns:
        The model.

    Raises:
        ValueError: a scaling that only training has, calibration for finer scales than one a tensor, of no batch or of
            values that are not finite, or no layer that could be quantized.
        TypeError: the configuration is none.
    """
    config = config_or_default(config)
    _check(config, calibrates=batches is not None)
    convert_to_fp8(model, config, kinds=_kinds(), kept=_kept(model))
    if batches is not None:
        _calibrate(model, batches)
    return model


def freeze(model: nn.Module, config: FP8Config) -> nn.Module:
    """Keep the weights of the nn.Linear that `convert_to_fp8` chooses in FP8 alone, in place, for adapters to train on.

    The other layers that it chooses keep 16-bit weights and compute in FP8 from them, as those whose weight another
    module has too. Of layers without memory, the matrices have none either.

    Returns:
        The model.
    """
    convert_to_fp8(model, config, kinds={nn.Linear: FrozenFP8Linear}, kept=_kept(model))
    # once more for those that were kept; frozen layers stay as they are
    return convert_to_fp8(model, config)


def _check(config: FP8Config, calibrates: bool) -> None:
    if config.scaling.for_inference is None:
        raise ValueError(
            f'FP8Config.scaling is "{config.scaling.name}", which learns from training steps, of which inference has '
            'none; use "tensorwise", with batches to calibrate with, or "rowwise"'
        )
    if not calibrates:
        return
    if config.finer_scales:
        raise ValueError(
            f"inputs with {config.finer_scales} have no one amax to calibrate; leave out batches, or use "
            'scaling="tensorwise"'
        )
    if config.scaling.fixed_amax(INPUT, config.input_format) is not None:
        raise ValueError(f'FP8Config.scaling is "{config.scaling.name}", which needs no calibration; leave out batches')


def _kinds() -> Kinds:
    """Return what layers turn into; transformers need not be installed."""
    kinds: dict[type[nn.Module], type[FP8Layer]] = {nn.Linear: FrozenFP8Linear}
    if "transformers.pytorch_utils" in sys.modules:
        from fp8booster.nn.linear.conv1d import FrozenFP8Conv1D

        kinds[FrozenFP8Conv1D.original] = FrozenFP8Conv1D
    return kinds


def _kept(model: nn.Module) -> dict[int, str]:
    """By the identities of modules, why their weights stay in 16 bits."""
    # a frozen layer gives its parameter up, which another reader would still need in 16 bits
    readers, kept = count_readers(model), {}
    for module in model.modules():
        if (weight := module._parameters.get("weight")) is not None and readers[weight] > 1:
            kept[id(module)] = "its weight is that of another module too"
        if is_linear(module) and "weight" not in module._parameters:
            kept[id(module)] = "its weight is computed for each forward"
        if are_experts(module):
            kept[id(module)] = "experts in one parameter are not kept in FP8"
    return kept


@torch.no_grad()
def _calibrate(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Let the frozen layers of a model scale inputs by the largest amax that they met; those that met none do not."""
    amaxes: dict[FrozenLayer, torch.Tensor] = {}

    def note(layer: FrozenLayer, _: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
        input = (*inputs, *named.values())[0]  # a layer takes one, which a model may give by name
        if input.numel() == 0:  # as of experts that no token chose
            return
        amax = amax_of(input)
        amaxes[layer] = torch.maximum(amaxes[layer], amax) if layer in amaxes else amax

    layers = [module for module in model.modules() if isinstance(module, FrozenLayer) and module.input_amax is None]
    hooks = [layer.register_forward_pre_hook(partial(note, layer), with_kwargs=True) for layer in layers]
    if not layers:
        raise ValueError("the inputs of all layers have given scales already; leave out batches")
    # module by module: some may have been put into evaluation alone, as frozen parts of a model are
    training = [module for module in model.modules() if module.training]
    # dropout would give amaxes that inference never meets
    model.eval()
    try:
        for batch in batches:
            _run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    # all checks before any layer changes, so that a call that failed can be made again
    if not amaxes:
        raise ValueError("batches reached no layer to calibrate; give at least one batch that the model takes")
    for name, module in model.named_modules():
        if module in amaxes and not amaxes[module].isfinite():
            raise ValueError(f"batches gave {name or 'the layer'} inputs that are not finite; leave out those that do")
    for layer, amax in amaxes.items():
        layer.scale_inputs_by(amax)


def _run(model: Callable[..., Any], batch: Batch) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)
