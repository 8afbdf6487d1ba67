"""What `export`, `eval` and `generate` name: a run, whose newest checkpoint is taken, a checkpoint, or a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fp8booster.cli.train.checkpoint import is_checkpoint, read_state
from fp8booster.cli.train.key_values import fp8_config, parse_pairs
from fp8booster.cli.train.model_folder import folder_config
from fp8booster.cli.train.resume import RUN_FILE, find_resume, require_whole
from fp8booster.config import FP8Config
from fp8booster.training.adapters import ADAPTER_CONFIG


@dataclass(frozen=True)
class FoundModel:
    """A model, and how it was trained."""

    model: Path
    """In Hugging Face's format, or adapters of peft's."""
    config: FP8Config
    masters: Path | None
    """Of the FP32 master weights that its FP8 weights were cast from in training."""
    sequence: int | None = None
    """Tokens of a sequence in training; None: not known."""


def find_source(folder: Path) -> FoundModel:
    """Of a run in both precisions, the model that was trained in FP8.

    Raises:
        ValueError: the folder is none of them, or holds no checkpoint, or a damaged one.
    """
    if not is_checkpoint(folder) and not (folder / RUN_FILE).is_file():
        if (folder / ADAPTER_CONFIG).is_file():
            return FoundModel(folder, FP8Config(), None)
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} is neither a run, nor a checkpoint (step-...), nor a model with a config.json, nor adapters "
                "of one; give one of these."
            )
        folder_config(str(folder))
        return FoundModel(folder, FP8Config(), None)
    found = find_resume(str(folder))
    if not found.checkpoints:
        raise ValueError(f"{folder} has saved no checkpoint yet; give a run that has, or train it with --save.")
    precision = "fp8" if "fp8" in found.checkpoints else "bf16"
    checkpoint = Path(found.checkpoints[precision])
    require_whole(checkpoint)  # whose weights must be finite as they are read
    options = read_state(checkpoint).options
    if precision == "bf16":
        return FoundModel(checkpoint / "model", FP8Config(), None, options.sequence)
    config = fp8_config(options.fp8_options, options.level)
    asked = parse_pairs(options.plugin_options, "--plugin-option").get("fp8_communication")
    sent_in_fp8 = config.communication if asked is None else asked
    cast_from_masters = sent_in_fp8 and options.lora is None  # adapters are merged as they computed
    return FoundModel(
        checkpoint / "model", config, checkpoint / "masters" if cast_from_masters else None, options.sequence
    )
