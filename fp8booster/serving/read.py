"""Models read from folders in 16 bits or in FP8: into 16 bits, or frozen, with FP8 weights from the first.

Of a frozen model no more than one weight is ever in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fp8booster.config import FP8Config
from fp8booster.formats import E4M3, FORMATS
from fp8booster.kernels.alignment import BLOCK
from fp8booster.nn.linear.frozen import SCALE, FrozenFP8Linear
from fp8booster.nn.quantize import freeze
from fp8booster.nn.sharing import share_inputs
from fp8booster.scaling import RealTime
from fp8booster.serving.formats import granularity_of, require_finite
from fp8booster.serving.layout import StoredNames, names_of_each
from fp8booster.serving.stored import StoredModel, as_loaded, is_in_fp8
from fp8booster.training.models import model_of_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def load_fp8(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    config: PretrainedConfig | None = None,
    frozen: bool = False,
    fp8_config: FP8Config | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Return a causal language model in `dtype`, of the values that a folder's FP8 weights have: a start of training.

    Args:
        folder: as `export` writes it, or another engine: with `quant_method` "fp8" (DeepSeek-V3, Qwen3-FP8) or
            "compressed-tensors" of the form `float-quantized`.
        dtype: of the model's parameters.
        config: in place of the folder's.
        frozen: keep the FP8 weights as they are, one byte a value, for adapters to train on; they do not train.
        fp8_config: with `frozen`, how layers compute; the granularity is the folder's. None is `FP8Config()`.
        device: of the model.

    Raises:
        ValueError: the folder's weights are not in FP8, not those of the model or not finite, or, with `frozen`, in a
            form that products cannot read.
    """
    if not is_in_fp8(Path(folder)):
        raise ValueError(f"{folder} has no quantization_config; load it with transformers' from_pretrained.")
    if frozen:
        return load_frozen(folder, fp8_config or FP8Config(), dtype=dtype, device=device, config=config)
    model: Any = load_model(folder, dtype=dtype, config=config)
    return model.to(device)


def load_model(
    folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """Return a causal language model in `dtype`, in evaluation mode, of a folder's weights in 16 bits or in FP8.

    Args:
        folder: in Hugging Face's format; of FP8 as in `load_fp8`.
        dtype: of the model's parameters.
        config: in place of the folder's.

    Raises:
        ValueError: the folder's weights are damaged, not all of the model, others, or not finite.
    """
    is_in_fp8(Path(folder))  # refuses other forms
    return StoredModel(Path(folder), config).load(dtype)


Read = Callable[[str, nn.Module], torch.Tensor | None]
"""Reads a tensor by its name in the state dict and the module that holds it; None leaves the constructor's."""


def load_frozen(
    folder: str | Path,
    fp8_config: FP8Config,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    config: PretrainedConfig | None = None,
) -> PreTrainedModel:
    """Return a causal language model from a folder, whose frozen weights take one byte a value.

    Args:
        folder: in Hugging Face's format: in FP8, whose bytes and scales stay as they are, or in 16 bits, which are cast
            one by one.
        fp8_config: which layers of a model in 16 bits, and how all layers compute. An FP8 checkpoint has its own
            layers and granularity.
        dtype: of all other weights.
        device: where they are made.
        config: in place of the folder's.

    Raises:
        ValueError: tensors are missing or damaged, or in a form that products cannot read.
    """
    stored = StoredModel(Path(folder), config)
    model = model_of_config(stored.config, _MatricesOnMeta(), torch_dtype=dtype)
    names = StoredNames(model)
    stored.rename({in_files: name for name, in_files in names.renamed.items()})
    shards, scale_of = stored.shards, stored.scale_of
    names_of = {name: each for each in names_of_each(model) for name in each}
    if stored.in_fp8:
        _freeze_as_stored(model, stored, fp8_config)
    else:
        freeze(model, fp8_config)

    def read(name: str, module: nn.Module) -> torch.Tensor | None:
        end = name.rpartition(".")[2]
        if end == SCALE:
            scale = scale_of.get(name.removesuffix(SCALE) + "weight")
            return None if scale is None else shards.tensor(scale)
        there = next((each for each in names_of.get(name, [name]) if each in shards), None)
        if there is None:
            if any(part in shards for part in names.of.get(name, ())):
                raise ValueError(
                    f"{folder} holds the experts of {name} one by one, and this version of transformers as one "
                    "parameter, which cannot be frozen; load it without frozen (--precision bf16), or with "
                    "transformers 4.51."
                )
            raise ValueError(f"{folder} lacks {name}; copy the model again.")
        tensor = shards.tensor(there)
        if tensor.dtype in FORMATS:
            if not isinstance(module, FrozenFP8Linear):
                return stored.value(there)  # raises: there is no scale
            if tensor.dtype is not E4M3:
                raise ValueError(f"{name} in {folder} is {tensor.dtype}; load it without frozen, which decodes it.")
            return tensor
        return require_finite(f"{name} in {folder}", tensor).to(dtype)

    fill(model, read, device)
    return as_loaded(model, stored.folder)


def _freeze_as_stored(model: nn.Module, stored: StoredModel, fp8_config: FP8Config) -> None:
    """Let the layers that a folder has in FP8 take its values and scales."""
    for name, module in model.named_modules():
        scale = stored.scale_of.get(f"{name}.weight")
        if scale is None:
            continue
        if type(module) is not nn.Linear:
            raise ValueError(f"{name} is a {type(module).__name__}, which cannot be frozen; load it without frozen.")
        shape, scales = stored.shards.shape(f"{name}.weight"), stored.shards.shape(scale)
        granularity = granularity_of(shape, scales, stored.block)
        if granularity is None:
            raise ValueError(
                f"{name}.weight has scales of {list(scales)}, for blocks of {stored.block}; products read one scale "
                f"for a weight, a row or a block of {BLOCK} x {BLOCK}: load it without frozen, which decodes it."
            )
        # a scale's shape cannot change, so the folder's granularity wins, with the defaults that go with it
        own = fp8_config.granularity == granularity
        FrozenFP8Linear.convert_in_place(
            module, fp8_config if own else replace(fp8_config, scaling=RealTime(granularity))
        )
    share_inputs(model)


def random_frozen(
    config: PretrainedConfig, fp8_config: FP8Config | None, *, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Return a model of random weights by torch's seed on that kind of device: matrices normal, as transformers' are.

    With None in place of `fp8_config` it has the values before their casts, all in `dtype`.
    """
    width = getattr(config, "initializer_range", 0.02)
    model: Any = model_of_config(config, _MatricesOnMeta(), torch_dtype=dtype)
    if fp8_config is not None:
        freeze(model, fp8_config)

    def read(name: str, module: nn.Module) -> torch.Tensor | None:
        end = name.rpartition(".")[2]
        if end == SCALE:
            return None
        frozen = isinstance(module, FrozenFP8Linear) and end == "weight"
        shape: Any = module.fp8_shape if frozen else module.state_dict()[end].shape
        # norms and biases begin with the constructor's ones and zeros
        if len(shape) < 2:
            return None
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, width)

    fill(model, read, device)
    return model


def fill(model: Any, read: Read, device: torch.device | str) -> None:
    """Give a model of transformers its tensors one by one.

    Args:
        model: its matrices may have no memory.
        read: gives them.
        device: of the model.

    Raises:
        ValueError: one does not fit.
    """
    for path, module in model.named_modules():
        # other buffers are in no checkpoint: their constructors have filled them
        kept = {name for name in module._buffers if name not in module._non_persistent_buffers_set}
        own = {**module._parameters, **{name: module._buffers[name] for name in kept}}
        names = [name for name, tensor in own.items() if tensor is not None]
        if isinstance(module, FrozenFP8Linear):
            # a frozen weight is two tensors in files, whatever the module holds now
            names = ["weight", SCALE, *(name for name in names if name == "bias")]
        prefix = f"{path}." if path else ""
        state = {name: tensor.to(device) for name in names if (tensor := read(prefix + name, module)) is not None}
        if not state:
            continue
        try:
            module.load_state_dict(state, strict=False, assign=True)  # in place of tensors without memory
        except RuntimeError as error:
            faults = " ".join(str(error).split())
            raise ValueError(f"{path or 'the model'} cannot take what the folder holds: {faults}") from None
    # a tied weight was read under one of its names: the other is without memory
    model.tie_weights()
    model.to(device)


class _MatricesOnMeta(TorchFunctionMode):
    """Takes the memory from tensors of two or more dimensions that constructors allocate, and leaves what they fill.

    On "meta" altogether rotary frequencies would be lost, which no checkpoint holds.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.empty and args and isinstance(args[0], (tuple, torch.Size)) and len(args[0]) > 1:
            named["device"] = "meta"
        return func(*args, **named)
