"""The tensors of a model as engines load them, one after the other: to files, or to an engine that is running.

The bytes are those that training multiplied by, where the format has the scales that training had: the same cast of the
same value.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.formats import E4M3, stored_fault
from fp8booster.serving.engines import require_loadable
from fp8booster.serving.formats import CHECKPOINT_FORMATS, IN_16_BITS, CheckpointFormat, require_finite
from fp8booster.serving.live import Live
from fp8booster.serving.source import Source, require_floating

FORMAT_NAMES = (*CHECKPOINT_FORMATS, IN_16_BITS)
"""Formats that `tensors` and `export` take."""


def tensors(
    model: nn.Module, format: str = "fine-grained", *, config: FP8Config | None = None, engine_ranks: int | None = 1
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a live model's tensors by their names in files, as `load_weights` of vLLM or SGLang takes them.

    Linear layers are in FP8 as `export` writes them: E4M3 `weight`, and next to it its float32 scale. One layer after
    the other is cast, and no copy of the model is made. A tensor may lie in the memory of the model, so copy or send it
    before the next optimizer step, and do not write to it. Adapters of peft are merged in what is yielded.

    Under tensor parallelism, and FSDP2, each tensor is gathered when its turn comes and is yielded whole on each rank,
    for engines divide tensors by themselves. All ranks iterate to the end then.

    Args:
        model: a causal language model of transformers, converted or not, boosted, wrapped or not.
        format: as in `export`. With the scales of training the bytes are those of training.
        config: as in `export`.
        engine_ranks: as in `export`.

    Raises:
        ValueError: the format is not known, the engine would refuse a shape, values are not finite, or the model cannot
            be handed over: a rank cannot gather what others hold, or adapters cannot be merged.
        TypeError: it is no model of transformers.
    """
    chosen = format_of(format)
    source = Live(model, config, in_fp8=chosen is not None)
    require_exportable(source, chosen, engine_ranks)
    return encoded(source, chosen)


def format_of(name: str) -> CheckpointFormat | None:
    """Return a format by its name; None: all in 16 bits. Raises ValueError for one that is not known."""
    if name not in FORMAT_NAMES:
        raise ValueError(f"there is no format {name!r}; use one of {', '.join(FORMAT_NAMES)}")
    return CHECKPOINT_FORMATS.get(name)


def require_exportable(source: Source, chosen: CheckpointFormat | None, engine_ranks: int | None) -> None:
    """Raise ValueError for weights that the format does not hold, or that an engine would refuse in it."""
    if chosen is None:
        return
    if (trained := source.fp8_config.weight_format) is not E4M3:
        raise ValueError(f"the weights train in {trained}, and engines load float8_e4m3fn; use the format bf16")
    require_loadable(source.layout, chosen, engine_ranks, source.record())


def encoded(source: Source, chosen: CheckpointFormat | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a source in a format, or in 16 bits, by their names in files.

    Raises:
        ValueError: values are not finite, or cannot be cast.
    """
    power_of_two = chosen is not None and chosen.power_of_two(source.fp8_config)
    layout = source.layout
    for name in source.names:
        if chosen is None or name not in layout.groups:
            yield (
                layout.first_name.get(name, name),
                _in_16_bits(source, name),
            )  # transformers 4 reads a tied one by that
            continue
        data, scale = _in_fp8(source, name, chosen, power_of_two)
        yield name, data
        yield name.removesuffix("weight") + chosen.scale_name, scale


def _in_16_bits(source: Source, name: str) -> torch.Tensor:
    layout, names = source.layout, source.layout.names
    tensor = source.tensor(name)
    # buffers, as a router's bias for the choice of experts, have the type that the model gives them
    half = tensor.dtype in (torch.float32, torch.float64) and name in layout.parameters
    written = tensor.to(source.dtype) if half else tensor
    if name in layout.parameters or names.dtypes[names.origin[name]].is_floating_point:
        require_floating(name, written)
    require_finite(name, written)
    return written.detach()


@torch.no_grad()
def _in_fp8(
    source: Source, name: str, chosen: CheckpointFormat, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scale of a weight, in the shapes that files have."""
    made = source.made(name, chosen, power_of_two)
    if made is None:
        # weights that training multiplies as one have one scale, and engines fuse them too
        amax = source.shared_amax(name) if chosen.granularity == "tensorwise" else None
        made = chosen.cast(source.castable(name), power_of_two=power_of_two, amax=amax)
    data, scale = made
    if fault := stored_fault(data, scale):
        raise ValueError(f"{name} cannot be exported: {fault}; export an earlier checkpoint")
    # whole: collectives and safetensors take no part of a matrix that is padded
    return data.contiguous(), scale.reshape(chosen.shape_of_one) if scale.dim() == 0 else scale
