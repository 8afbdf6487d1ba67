"""Reads checkpoints whose weights are in FP8, in the formats of `CHECKPOINT_FORMATS`, into 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fp8booster.config import FP8Config
from fp8booster.formats import FORMATS
from fp8booster.reading import read_record
from fp8booster.serving.formats import block_of, decode
from fp8booster.serving.frozen import as_loaded, load_frozen
from fp8booster.serving.loading import load_tensors, weights_among, whole_shards
from fp8booster.serving.shards import Shards

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def require_loadable(folder: Path) -> bool:
    """Whether the weights of a folder are in FP8, by its config.json.

    Raises:
        ValueError: they are quantized otherwise, or in a form that is not known, or in FP8 and it does not say so.
    """
    file = folder / "config.json"
    record = read_record(file, {}, "give the folder of a model")
    if record.get("transformers_weights") is not None:
        raise ValueError(
            f"{file} names its weights itself (transformers_weights); call them model.safetensors and leave that out."
        )
    settings = record.get("quantization_config")
    if settings is None:
        if _holds_fp8(folder):
            raise ValueError(
                f"{folder} holds weights in FP8, and its config.json has no quantization_config; write the model with "
                "fp8booster.export in place of save_pretrained."
            )
        return False
    block_of(settings, str(file))
    return True


def _holds_fp8(folder: Path) -> bool:
    try:
        shards = Shards(folder)
        return any(shards.dtype(name) in FORMATS for name in shards.names)
    except ValueError:  # of none, or damaged ones, who reads them tells
        return False


def dequantized(folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a folder one by one, by name, FP8 weights as their values, rounded once to `dtype`.

    Tensors that have no scale are given as they are.

    Raises:
        ValueError: a scale is missing, or does not fit its weight, or a file is damaged.
    """
    folder = Path(folder)
    file = folder / "config.json"
    settings = read_record(file, {"quantization_config": dict}, "give a model in FP8")["quantization_config"]
    yield from _values(Shards(folder), block_of(settings, str(file)), dtype)


def _values(
    shards: Shards, block: tuple[int, int] | None, dtype: torch.dtype, *, in_fp8: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder, as `dequantized` does; raise ValueError also for values that are not finite."""
    scale_of = shards.scales() if in_fp8 else {}
    for name in weights_among(shards, scale_of):
        tensor, scale = shards.tensor(name), scale_of.get(name)
        if scale is not None:
            tensor = decode(tensor, shards.tensor(scale), block, name).to(dtype)
        elif tensor.dtype in FORMATS:
            raise ValueError(
                f"{name} in {shards.folder} is in FP8 and has no scale; copy the model again, or give another."
            )
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} in {shards.folder} holds values that are not finite; give an earlier checkpoint.")
        yield name, tensor


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
    if not require_loadable(Path(folder)):
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
    from transformers import AutoConfig

    folder = Path(folder)
    in_fp8 = require_loadable(folder)
    if config is None:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    file = folder / "config.json"
    block = block_of(read_record(file, {}, "")["quantization_config"], str(file)) if in_fp8 else None
    forget_quantization(config)
    shards = whole_shards(folder, config, in_fp8=in_fp8)
    tensors = dict(_values(shards, block, dtype, in_fp8=in_fp8))
    return as_loaded(load_tensors(config, tensors, dtype, folder), folder)


def forget_quantization(config: PretrainedConfig) -> None:
    """Make it the config of the model in 16 bits."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
