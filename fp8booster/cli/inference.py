"""What a CHECKPOINT of `fp8booster eval` and `fp8booster generate` is, in BF16 and in FP8."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from fp8booster.cli.export.source import FoundModel, find_source
from fp8booster.cli.instructions import avoid_trapping_instructions
from fp8booster.cli.train.key_values import inference_fp8_config
from fp8booster.cli.train.model_folder import build_model, folder_config, has_weights, is_folder
from fp8booster.cli.train.tokenizer import folder_has_tokenizer
from fp8booster.config import FP8Config
from fp8booster.kernels.device import require_fp8
from fp8booster.kernels.scales import amax_of
from fp8booster.nn.experts.held_as_one import are_experts
from fp8booster.nn.linear.frozen import FrozenFP8Linear
from fp8booster.nn.quantize import quantize
from fp8booster.serving.read import require_loadable
from fp8booster.serving.sources import Folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PRECISIONS = ("bf16", "fp8")


def inference_device() -> tuple[torch.device, str | None]:
    """The GPU, or the CPU where there is none, and what had to be done for its products."""
    if torch.cuda.is_available():
        return torch.device("cuda"), None
    return torch.device("cpu"), avoid_trapping_instructions()


def find_model(checkpoint: Path) -> FoundModel:
    """As `find_source`, of a model that has weights and a tokenizer.

    Raises:
        ValueError: it has none, or holds adapters alone.
    """
    found = find_source(checkpoint)
    folder = str(found.model)
    is_folder(folder)  # refuses adapters
    if not has_weights(folder):
        raise ValueError(f"{folder} holds no weights; give a model that has them (save_pretrained).")
    if not folder_has_tokenizer(folder):
        raise ValueError(f"{folder} holds no tokenizer; save the model's there (tokenizer.save_pretrained).")
    return found


def inference_config(source: FoundModel, options: Sequence[str]) -> FP8Config:
    """What `--fp8-option` asks for; without it, how the model was trained, as far as inference has it.

    Args:
        source: of the checkpoint.
        options: `key=value` pairs.
    """
    if options:
        return inference_fp8_config(tuple(options))
    scaling = "real-time" if source.config.scaling == "delayed" else source.config.scaling
    return replace(source.config, scaling=scaling, smooth_swiglu=False)


def require_one_of(value: str, allowed: Iterable[str], flag: str) -> None:
    """Raise ValueError for a value that a flag does not take."""
    if value not in (names := list(allowed)):
        raise ValueError(f"{flag} is {value!r}; use one of {', '.join(names)}.")


class LoadedModel(NamedTuple):
    """A model for inference."""

    model: PreTrainedModel
    from_masters: int
    """Layers whose FP8 weights were cast from FP32 master weights, as in training; others from the model's values."""


def load_model(
    source: FoundModel,
    precision: str,
    config: FP8Config,
    device: torch.device,
    batches: Sequence[torch.Tensor] | None = None,
) -> LoadedModel:
    """A model for inference.

    Args:
        source: of the checkpoint. What is in FP8 there is decoded for "bf16", and for "fp8" kept with its scales, the
            rest in 16 bits. What training cast from master weights that are there is cast from them for "fp8".
        precision: "bf16" or "fp8".
        config: of the FP8 layers.
        device: where it goes.
        batches: for "fp8", token ids, [batch, sequence] each, to calibrate with; None: real-time scales.

    Raises:
        ValueError: the weights cannot be read, or not be quantized so.
    """
    require_one_of(precision, PRECISIONS, "--precision")
    folder, in_fp8 = str(source.model), precision == "fp8"
    if in_fp8:
        require_fp8(device, config.emulate, config.granularity)
    frozen = config if in_fp8 and require_loadable(source.model) else None
    if frozen is not None:
        config = replace(config, layers=_no_more, vocabulary_head=False)
    model = build_model(folder, folder_config(folder), device, checkpointing=False, frozen=frozen)
    if batches is not None and (finer := _finer_scales(model)):
        raise ValueError(
            f"{folder} has {finer}, and --calibrated scales each input by one amax; leave --calibrated out, or export "
            "the model with --format tensorwise."
        )
    from_masters = 0
    if in_fp8:
        quantize(model, config)
        from_masters = _cast_from_masters(model, source)
        if batches is not None:
            quantize(model, config, batches=batches)
    return LoadedModel(model.eval(), from_masters)


def _finer_scales(model: nn.Module) -> str | None:
    """Name the scales of the FP8 weights that a model was loaded with, where they are finer than one a tensor."""
    scales = (each.fp8_config.finer_scales for each in model.modules() if isinstance(each, FrozenFP8Linear))
    return next(filter(None, scales), None)


def _no_more(name: str, module: nn.Module) -> bool:
    """`FP8Config.layers` of a folder in FP8, which says itself what is in FP8."""
    return False


def _cast_from_masters(model: nn.Module, source: FoundModel) -> int:
    """Cast weights again that training cast from master weights, under the scales that it shared; gives their number.

    None where experts are held as one parameter or no layer is an nn.Linear, and where ranks divided layers.
    """
    modules = list(model.modules())
    has_layout = any(isinstance(each, FrozenFP8Linear) for each in modules) and not any(map(are_experts, modules))
    if source.masters is None or not has_layout:
        return 0
    folder = Folder(source.model, source.config, source.masters)
    amaxes: dict[tuple[str, ...], torch.Tensor] = {}
    cast = 0
    chosen = filter(folder.is_cast_from_master, folder.layout.groups)
    layers = {f"{path}.weight": each for path, each in model.named_modules() if isinstance(each, FrozenFP8Linear)}
    for name in chosen:
        layer = layers.get(folder.layout.names.origin[name])
        if layer is None:  # trained in FP8, and --fp8-option leaves it out
            continue
        group = folder.scale_group(name)
        if group not in amaxes:
            amaxes[group] = torch.stack([amax_of(folder.weight(each)) for each in group]).max()
        device = layer.fp8_data.device
        layer.hold_cast_of(folder.weight(name).to(device), amaxes[group].to(device))
        cast += 1
    return cast
