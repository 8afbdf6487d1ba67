"""Checkpoints from which a run continues: bit for bit, but under Gemini, DDP in FP8, and with dropout under --tp.

Gemini's masters come back from the BF16 weights. DDP fills its buckets in another order after its first step, so that
gradients meet in other FP8 blocks.

A folder `step-<step>` holds
    model/       weights, config and tokenizer in Hugging Face's format (BF16; FP32 under DDP and FSDP)
    optimizer/   the optimizer's states, as Colossal-AI's Booster saves them; with --save-codes instead
    moments/     the codes of moments in 8 bits, one file a rank
    masters/     FP32 master weights, one file a rank (empty under Gemini, DDP and FSDP)
    random/      random states of torch and of Colossal-AI's dropouts, and amaxes that casts remember, one file a rank
    state.json   step, position in the data, options
It appears when it is whole (`fp8booster.checkpoints`), so a kill leaves the former one as it was.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from fp8booster.checkpoints import named_step, new_checkpoint, newest_checkpoint
from fp8booster.nn.held_casts import remember_amaxes, remembered_amaxes
from fp8booster.reading import COPY_AGAIN, faults_named, read_index, read_record, require_known

from .options import TrainOptions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fp8booster.training.boosted import BoostedModel

_STATE = "state.json"
_FIELDS = {"step": int, "position": int, "world_size": int, "precision": str, "tokens": str, "options": dict}
_COUNTS = ("step", "position", "world_size")
_MODEL_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands."""

    step: int
    """Optimizer steps done."""
    position: int
    """Sequences that all ranks have taken from the data."""
    world_size: int
    precision: str
    tokens: str
    """Identity of the token file."""
    options: TrainOptions


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one checkpoint."""
    return (folder / _STATE).is_file()


def read_state(checkpoint: Path) -> RunState:
    """Where the run stood when the checkpoint was written. Raises ValueError for a file that does not say so."""
    file = checkpoint / _STATE
    values = read_record(file, _FIELDS, COPY_AGAIN)
    require_known(values, str(file), _FIELDS)
    named = named_step(checkpoint)
    if named not in (None, values["step"]):
        raise ValueError(f"{file} is of step {values['step']}, and its folder of step {named}; {COPY_AGAIN}.")
    if values["precision"] not in ("bf16", "fp8") or min(values[name] for name in _COUNTS) < 0:
        raise ValueError(f"{file} tells of no run ({json.dumps({**values, 'options': '...'})}); {COPY_AGAIN}.")
    options = TrainOptions.from_file(values["options"], file, COPY_AGAIN)
    return RunState(**{**values, "options": options})


def save_checkpoint(
    root: Path, state: RunState, boosted: BoostedModel, config: PretrainedConfig, tokenizer: Path, finite: bool
) -> Path:
    """Write the checkpoint of a step; every rank calls it.

    Args:
        root: on a disk that all ranks share.
        finite: as `BoostedModel.is_finite` tells.
    """
    rank = dist.get_rank()
    with new_checkpoint(root, state.step, keep=state.options.keep, finite=finite) as folder:
        if rank == 0:
            (folder / "random").mkdir()
        boosted.save(folder, codes=state.options.saves_codes(state.precision))
        torch.save(_random_state(boosted.model), folder / "random" / f"rank-{rank:05d}.pt")
        if rank == 0:
            _save_config(config, folder / "model")
            shutil.copytree(tokenizer, folder / "model", dirs_exist_ok=True)
            (folder / _STATE).write_text(json.dumps(dataclasses.asdict(state), indent=1) + "\n")
    return newest_checkpoint(root)


def _save_config(config: PretrainedConfig, folder: Path) -> None:
    """Write a model's config; the number of experts also by the name by which transformers before 5 reads it."""
    config.save_pretrained(folder)
    file = folder / "config.json"
    record = json.loads(file.read_text())
    if "num_local_experts" in record and getattr(config, "num_experts", None) is not None:
        record.setdefault("num_experts", record["num_local_experts"])
        file.write_text(json.dumps(record, indent=2) + "\n")


def load_checkpoint(
    checkpoint: Path, tokens: str, boosted: BoostedModel, shapes: dict[str, list[int]], tied: Collection[str]
) -> RunState:
    """Set model, masters, optimizer and random state to a checkpoint's; every rank calls it, and returns when all have.

    `shapes` are those of the whole model's state dict, `tied` the further names of a parameter in it. With another
    number of ranks than wrote it, weights and optimizer are spread anew and random states start from the seed. Raises
    ValueError for a checkpoint of another model or of other data.
    """
    state = read_state(checkpoint)
    if state.tokens != tokens:
        raise ValueError(
            f"The checkpoint {checkpoint} was trained on other text or with another tokenizer; "
            "resume with the --data, --text-column and --vocabulary it was started with."
        )
    if state.options.lora is None:  # else `load_adapters` does
        _check_shapes(checkpoint, shapes, tied)
    boosted.load(checkpoint)
    if state.world_size == dist.get_world_size():
        with faults_named():
            state_of_rank = torch.load(checkpoint / "random" / f"rank-{dist.get_rank():05d}.pt", weights_only=True)
        _set_random_state(state_of_rank, boosted.model)
    dist.barrier()  # the run's folder may change after this: no rank reads it any more, and none has failed to
    return state


def _check_shapes(checkpoint: Path, here: dict[str, list[int]], tied: Collection[str]) -> None:
    folder = checkpoint / "model"
    files = set(read_index(folder / _MODEL_INDEX, COPY_AGAIN)["weight_map"].values())
    saved: dict[str, list[int]] = {}
    for file in files:
        with faults_named(folder / file), safe_open(folder / file, framework="pt") as tensors:
            saved.update({name: tensors.get_slice(name).get_shape() for name in tensors.keys()})  # noqa: SIM118
    absent = set(tied) - set(saved)  # plugins that shard models save a tied weight under one name
    for name in sorted({*saved, *here} - absent):
        if saved.get(name) != here.get(name):
            raise ValueError(
                f"The checkpoint {checkpoint} is of another shape: {name} is {saved.get(name, 'missing')} there and "
                f"{here.get(name, 'missing')} here; resume with the --model it was started with."
            )


def _random_state(model: nn.Module) -> dict[str, Any]:
    state = {
        "torch": torch.get_rng_state(),
        "dropouts": {name: dropout.device_rng_state for name, dropout in _dropouts(model).items()},
        "amaxes": remembered_amaxes(model),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any], model: nn.Module) -> None:
    """Raise ValueError for what `_random_state` does not give."""
    if not isinstance(state, dict) or not isinstance(state.get("torch"), torch.Tensor):
        raise ValueError(f"A file in random/ of the checkpoint holds no random state; {COPY_AGAIN}.")
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    dropouts = _dropouts(model)
    for name, value in state.get("dropouts", {}).items():
        dropouts[name].device_rng_state = value
    remember_amaxes(model, state.get("amaxes", {}))


def _dropouts(model: nn.Module) -> dict[str, Any]:
    """The generators of dropouts among tensor parallel ranks, which Colossal-AI keeps beside torch's."""
    return {
        name: module.randomizer
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and hasattr(module, "randomizer")
    }
