"""Models that `fp8booster export`, `eval` and `generate` name, found, and loaded for inference in BF16 or in FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8booster.cli.train.checkpoints import RUN_FILE, find_resume, is_checkpoint, read_state, require_whole
from fp8booster.cli.train.data import folder_has_tokenizer
from fp8booster.cli.train.key_values import fp8_config, inference_fp8_config, parse_pairs
from fp8booster.cli.train.model_folder import build_model, folder_config, has_weights, is_folder
from fp8booster.config import FP8Config
from fp8booster.kernels.device import require_fp8
from fp8booster.kernels.instructions import fit_products_to_cpu
from fp8booster.nn.experts.fp8_experts import are_experts
from fp8booster.nn.linear.frozen import FrozenFP8Linear
from fp8booster.nn.quantize import quantize
from fp8booster.serving.folder import Folder
from fp8booster.serving.stored import is_in_fp8
from fp8booster.training.adapters import ADAPTER_CONFIG

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PRECISIONS = ("bf16", "fp8")


@dataclass(frozen=True)
class FoundModel:
    """A model, and how it was trained."""

    model: Path  # in Hugging Face's format, or adapters of peft's
    config: FP8Config
    masters: Path | None  # folder of the FP32 master weights that its FP8 weights were cast from in training
    sequence: int | None = None  # tokens of a sequence in training; None: not known


def find_source(folder: Path) -> FoundModel:
    """Find a model: of a run its newest checkpoint, in FP8 where it was trained in both; a checkpoint; or a model.

    Raises:
        ValueError: the folder is none of them, or holds no checkpoint, or a damaged one.
    """
    if not is_checkpoint(folder) and not (folder / RUN_FILE).is_file():
        if not (folder / ADAPTER_CONFIG).is_file():
            if not (folder / "config.json").is_file():
                raise ValueError(
                    f"{folder} is neither a run, nor a checkpoint (step-...), nor a model with a config.json, nor "
                    "adapters of one; give one of these."
                )
            folder_config(str(folder))
        return FoundModel(folder, FP8Config(), None)
    found = find_resume(str(folder))
    if not found.checkpoints:
        raise ValueError(f"{folder} has saved no checkpoint yet; give a run that has, or train it with --save.")
    precision = "fp8" if "fp8" in found.checkpoints else "bf16"
    checkpoint = Path(found.checkpoints[precision])
    require_whole(checkpoint)  # its weights must be finite too, which is seen as they are read
    options = read_state(checkpoint).options
    if precision == "bf16":
        return FoundModel(checkpoint / "model", FP8Config(), None, options.sequence)
    config = fp8_config(options.fp8_options, options.level)
    asked = parse_pairs(options.plugin_options, "--plugin-option").get("fp8_communication")
    sent_in_fp8 = config.messages is not None if asked is None else asked
    cast_from_masters = sent_in_fp8 and options.lora is None  # adapters are merged as they computed
    return FoundModel(
        checkpoint / "model", config, checkpoint / "masters" if cast_from_masters else None, options.sequence
    )


def find_model(checkpoint: Path) -> FoundModel:
    """Find a model as `find_source` does, which must have weights and a tokenizer.

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


def require_one_of(value: str, allowed: Iterable[str], flag: str) -> None:
    """Raise ValueError for a value that a flag does not take."""
    if value not in (names := list(allowed)):
        raise ValueError(f"{flag} is {value!r}; use one of {', '.join(names)}.")


def inference_device(tell: Callable[[str], None]) -> torch.device:
    """Return the GPU, or the CPU where there is none; `tell` hears what had to be done for its products."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    for sentence in fit_products_to_cpu():
        tell(sentence)
    return torch.device("cpu")


def inference_config(source: FoundModel, options: Sequence[str]) -> FP8Config:
    """Return the configuration of `--fp8-option`, `key=value` pairs; without any, that of training where it applies."""
    if options:
        return inference_fp8_config(tuple(options))
    scaling = source.config.scaling
    return replace(source.config, scaling=scaling.without_state if scaling.for_inference is None else scaling)


def load_model(
    source: FoundModel,
    precision: str,
    config: FP8Config,
    device: torch.device,
    batches: Sequence[torch.Tensor] | None = None,
) -> tuple[PreTrainedModel, int]:
    """Load a model for inference, and count the layers that were cast from FP32 master weights.

    FP8 weights in the folder are decoded for "bf16", and kept with their scales for "fp8", all others in 16 bits.
    Weights that training cast from master weights are cast from these for "fp8" where they are there.

    Args:
        precision: "bf16" or "fp8".
        config: of the FP8 layers.
        batches: for "fp8", token ids, [batch, sequence] each, to calibrate with; None: real-time scales.

    Raises:
        ValueError: the weights cannot be read, or not be quantized so.
    """
    require_one_of(precision, PRECISIONS, "--precision")
    folder, in_fp8 = str(source.model), precision == "fp8"
    if in_fp8:
        require_fp8(device, config.emulate, config.granularity)
    frozen = config if in_fp8 and is_in_fp8(source.model) else None
    if frozen is not None:  # the folder has decided which layers are in FP8
        config = replace(config, layers=lambda name, module: False, vocabulary_head=False)
    about = folder_config(folder)
    if getattr(about, "output_router_logits", False):
        about.output_router_logits = False  # the balance of experts is of training, and no part of the text's loss
    model = build_model(folder, about, device, checkpointing=False, frozen=frozen)
    if batches is not None:
        scales = (each.fp8_config.finer_scales for each in model.modules() if isinstance(each, FrozenFP8Linear))
        if finer := next(filter(None, scales), None):
            raise ValueError(
                f"{folder} has {finer}, and --calibrated scales each input by one amax; leave --calibrated out, or "
                "export the model with --format tensorwise."
            )
    from_masters = 0
    if in_fp8:
        quantize(model, config)  # layers that were frozen from the folder stay as they are
        from_masters = _cast_from_masters(model, source)
        if batches is not None:
            quantize(model, config, batches=batches)
    return model.eval(), from_masters


def _cast_from_masters(model: nn.Module, source: FoundModel) -> int:
    """Cast weights again that training cast from master weights, under the scales that it shared; return their number.

    None where experts lie in one parameter or no layer is an nn.Linear, and where ranks divided layers.
    """
    layers = {f"{path}.weight": each for path, each in model.named_modules() if isinstance(each, FrozenFP8Linear)}
    if source.masters is None or not layers or any(map(are_experts, model.modules())):
        return 0
    folder = Folder(source.model, source.config, source.masters)
    cast = 0
    for name in filter(folder.is_cast_from_master, folder.layout.groups):
        layer = layers.get(folder.layout.names.origin[name])
        if layer is not None:  # else --fp8-option leaves it out
            device = layer.fp8_data.device
            layer.hold_cast_of(folder.weight(name).to(device), folder.shared_amax(name).to(device))
            cast += 1
    return cast
