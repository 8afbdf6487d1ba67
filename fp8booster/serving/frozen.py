"""Models whose linear layers keep their weights in FP8 from the first: no more than one is ever in 16 bits."""

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
from fp8booster.nn.convert import convert_to_fp8
from fp8booster.nn.linear.frozen import SCALE, FrozenFP8Linear
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import held_by_several
from fp8booster.nn.sharing import share_inputs
from fp8booster.reading import read_record
from fp8booster.serving.formats import block_of, granularity_of
from fp8booster.serving.loading import whole_shards
from fp8booster.serving.names import StoredNames
from fp8booster.training.models import attention_of, building, causal_lm

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Read = Callable[[str, nn.Module], torch.Tensor | None]
"""Gives a tensor by its name in the state dict, and the module that holds it; None leaves what its constructor made."""


def freeze(model: nn.Module, config: FP8Config) -> nn.Module:
    """Keep the weights of the layers that `convert_to_fp8` chooses in FP8 alone, in place; returns the model.

    Of layers without memory, the matrices have none either. Layers of other classes than nn.Linear keep 16-bit weights,
    and so do those whose weight another module has too.
    """
    convert_to_fp8(model, config)
    tied = held_by_several(model)
    for module in model.modules():
        if not isinstance(module, FP8Layer) or isinstance(module, FrozenFP8Linear):
            continue
        if module.original is nn.Linear and id(module._parameters.get("weight")) not in tied:
            FrozenFP8Linear.convert_in_place(module, module.fp8_config)
    return model


def load_frozen(
    folder: str | Path,
    fp8_config: FP8Config,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    config: PretrainedConfig | None = None,
) -> PreTrainedModel:
    """A causal language model from a folder, whose frozen weights take one byte a value.

    Args:
        folder: in Hugging Face's format, as safetensors: in FP8, whose bytes and scales stay as they are, or in 16
            bits, which are cast one by one.
        fp8_config: which layers of a model in 16 bits, and how all layers compute. An FP8 checkpoint has its own
            layers and granularity.
        dtype: of all other weights.
        device: where they are made.
        config: in place of the folder's.

    Raises:
        ValueError: tensors are missing or damaged, or in a form that products cannot read.
    """
    folder = Path(folder)
    block = None
    record = read_record(folder / "config.json", {}, "give the folder of a model")
    if (settings := record.get("quantization_config")) is not None:
        block = block_of(settings, str(folder / "config.json"))
    if config is None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    shards = whole_shards(folder, config, in_fp8=settings is not None)
    model = _skeleton(config, dtype)
    names = StoredNames(model)
    shards.rename({stored: name for name, stored in names.renamed.items()})
    scale_of = {} if settings is None else shards.scales()
    names_of = _names_of_tied(model)
    if settings is None:
        freeze(model, fp8_config)
    else:
        for name, module in model.named_modules():
            scale = scale_of.get(f"{name}.weight")
            if scale is None:
                continue
            shapes = shards.shape(f"{name}.weight"), shards.shape(scale)
            if type(module) is not nn.Linear:
                raise ValueError(f"{name} is a {type(module).__name__}, which has no frozen form; load without frozen.")
            granularity = granularity_of(*shapes, block)
            if granularity is None:
                raise ValueError(
                    f"{name}.weight has scales of {list(shapes[1])}, for blocks of {block}; products read one scale "
                    f"for a weight, a row or a block of {BLOCK} x {BLOCK}: load it without frozen, which decodes it."
                )
            FrozenFP8Linear.convert_in_place(module, _with_granularity(fp8_config, granularity))
        share_inputs(model)

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
                    "parameter, which has no frozen form; load it without frozen, or with transformers 4.51."
                )
            raise ValueError(f"{folder} lacks {name}; copy the model again.")
        tensor = shards.tensor(there)
        if tensor.dtype in FORMATS:
            if not isinstance(module, FrozenFP8Linear):
                raise ValueError(f"{name} in {folder} is in FP8 and has no scale; copy the model again.")
            if tensor.dtype is not E4M3:
                raise ValueError(f"{name} in {folder} is {tensor.dtype}; load it without frozen, which decodes it.")
            return tensor
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} in {folder} holds values that are not finite; give an earlier checkpoint.")
        return tensor.to(dtype)

    fill(model, read, device)
    return as_loaded(model, folder)


def as_loaded(model: Any, folder: Path) -> PreTrainedModel:
    """Give a model what transformers' `from_pretrained` gives it besides weights; returns the model."""
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if file.is_file():
        read_record(file, {}, "copy the model again")
        model.generation_config = GenerationConfig.from_pretrained(str(folder))  # with the hash that generate() reads
    model.name_or_path = model.config.name_or_path = str(folder)
    return model.eval()


def random_frozen(
    config: PretrainedConfig, fp8_config: FP8Config | None, *, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """A model with random weights by torch's seed on that kind of device: matrices normal, as wide as transformers'.

    With None in place of `fp8_config` it has the values before their casts, all in `dtype`.
    """
    width = getattr(config, "initializer_range", 0.02)
    model: Any = _skeleton(config, dtype)
    if fp8_config is not None:
        freeze(model, fp8_config)

    def read(name: str, module: nn.Module) -> torch.Tensor | None:
        end = name.rpartition(".")[2]
        if end == SCALE:
            return None
        frozen = isinstance(module, FrozenFP8Linear) and end == "weight"
        shape: Any = module.fp8_shape if frozen else module.state_dict()[end].shape
        if len(shape) < 2:
            return None
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, width)

    fill(model, read, device)
    return model


def fill(model: Any, read: Read, device: torch.device | str) -> None:
    """Give a model of transformers its tensors one by one.

    Args:
        model: its matrices may have no memory.
        read: where they come from.
        device: where they go.

    Raises:
        ValueError: one does not fit.
    """
    for path, module in model.named_modules():
        kept = {name for name in module._buffers if name not in module._non_persistent_buffers_set}
        own = {**module._parameters, **{name: module._buffers[name] for name in kept}}
        names = [name for name, tensor in own.items() if tensor is not None]
        if isinstance(module, FrozenFP8Linear):
            names = ["weight", SCALE, *(name for name in names if name == "bias")]
        prefix = f"{path}." if path else ""
        state = {name: tensor.to(device) for name in names if (tensor := read(prefix + name, module)) is not None}
        if not state:
            continue
        try:
            module.load_state_dict(state, strict=False, assign=True)
        except RuntimeError as error:
            faults = " ".join(str(error).split())
            raise ValueError(f"{path or 'the model'} cannot take what the folder holds: {faults}") from None
    model.tie_weights()
    model.to(device)


def _names_of_tied(model: nn.Module) -> dict[str, list[str]]:
    """By each name of a parameter that has several, all of them: a checkpoint has one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: each for each in names.values() for name in each if len(each) > 1}


def _skeleton(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """A causal language model whose matrices have no memory."""
    kind, attention = causal_lm(config), attention_of(config)
    with building(config), _MatricesOnMeta():
        model = kind._from_config(config, torch_dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    return model


class _MatricesOnMeta(TorchFunctionMode):
    """What constructors allocate of two or more dimensions is without memory; what they fill themselves has values.

    On "meta" altogether rotary frequencies would be lost, which no checkpoint holds.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.empty and args and isinstance(args[0], (tuple, torch.Size)) and len(args[0]) > 1:
            named["device"] = "meta"
        return func(*args, **named)


def _with_granularity(config: FP8Config, granularity: str) -> FP8Config:
    """The configuration with other scales, and what is the default with them."""
    if config.granularity == granularity:
        return config
    defaults: dict[str, Any] = {"gradient_format": None, "power_of_two": None}
    return replace(config, granularity=granularity, **defaults)
