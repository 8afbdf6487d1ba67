"""Checkpoints of a run, and what `--resume` names: a run's folder, or one checkpoint.

A run resumes bit for bit except under Gemini, DDP in FP8, and with dropout under --tp. Gemini's masters come back from
the BF16 weights. DDP fills its buckets in another order after its first step, so that gradients meet in other FP8
blocks.

A folder `step-<step>` holds
    model/       weights, config and tokenizer in Hugging Face's format (BF16; FP32 under DDP and FSDP)
    optimizer/   the optimizer's states, as Colossal-AI's Booster saves them; with --save-codes instead
    moments/     the codes of moments in 8 bits, one file a rank
    masters/     FP32 master weights, one file a rank (empty under Gemini, DDP and FSDP)
    random/      random states of torch and of Colossal-AI's dropouts, and what scaling remembers, one file a rank
    state.json   step, position in the data, options
It appears when it is whole (`fp8booster.checkpoints`), so a kill leaves the former one as it was.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fp8booster.checkpoints import (
    checkpoints_in,
    is_finite,
    last_finite,
    named_step,
    new_checkpoint,
    newest_checkpoint,
    what_is_broken,
)
from fp8booster.files import write_whole
from fp8booster.nn.held_casts import remember_amaxes, remembered_amaxes
from fp8booster.reading import COPY_AGAIN, faults_named, read_record, require_known
from fp8booster.serving.shards import Shards

from .options import PRECISIONS, TrainOptions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fp8booster.comm import AutomaticScaling
    from fp8booster.training.boosted import BoostedModel

RUN_FILE = "run.json"
"""Beside a run's results: its options, its command and what it resumed from."""

_ORIGINS = "resumed"
"""In it: the checkpoint that each precision resumed from, which may be another run's."""

_STATE = "state.json"
_FIELDS = {"step": int, "position": int, "world_size": int, "precision": str, "tokens": str, "options": dict}
_COUNTS = ("step", "position", "world_size")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The place where a run stands."""

    step: int
    """Optimizer steps done."""
    position: int
    """Sequences that all ranks have taken from the data."""
    world_size: int
    precision: str
    tokens: str
    """Identity of the token file."""
    options: TrainOptions


@dataclass(frozen=True)
class Resume:
    """A run to resume."""

    options: TrainOptions
    """The options of the run, before the command line changes some."""
    checkpoints: dict[str, str]
    """The checkpoint for each precision that has one."""


def is_checkpoint(folder: Path) -> bool:
    """Tell whether a folder is one checkpoint."""
    return (folder / _STATE).is_file()


def read_state(checkpoint: Path) -> RunState:
    """Return where the run stood when the checkpoint was written. Raises ValueError for a file that does not say so."""
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


def find_resume(folder: str) -> Resume:
    """Return what a run's folder or a checkpoint says.

    Raises ValueError when the folder is neither, or has saved nothing and what it resumed from is gone.
    """
    path = Path(folder)
    if is_checkpoint(path):
        state = read_state(path)
        run = path.absolute().parent.parent.parent
        out = str(run) if (run / RUN_FILE).is_file() else None
        options = dataclasses.replace(state.options.of_precision(state.precision), out=out)
        return Resume(options, {state.precision: folder})
    if not (path / RUN_FILE).is_file():
        raise ValueError(
            f"{folder} is neither a run nor a checkpoint; --resume takes a run's folder (with {RUN_FILE}) or one of "
            "its checkpoints (step-...)."
        )
    file = path / RUN_FILE
    remedy = "put it right, or --resume one of the run's checkpoints (step-...) with another --out"
    about = read_record(file, {"options": dict}, remedy)
    began = about.get(_ORIGINS, {})
    if not isinstance(began, dict) or not all(isinstance(origin, str) for origin in began.values()):
        raise ValueError(f"{_ORIGINS!r} in {file} is no object of paths; {remedy}.")
    options = TrainOptions.from_file(about["options"], file, remedy)
    checkpoints = {}
    for precision in PRECISIONS[options.precision]:
        newest = newest_checkpoint(path / precision / "checkpoints")
        if newest is not None:
            checkpoints[precision] = str(newest)
        elif origin := began.get(precision):
            if not is_checkpoint(Path(origin)):
                raise ValueError(
                    f"{folder} resumed from {origin}, which is gone, and has saved nothing since; start a new run "
                    "with another --out."
                )
            checkpoints[precision] = origin
    return Resume(dataclasses.replace(options, out=folder), checkpoints)


def require_whole(checkpoint: Path) -> None:
    """Raise ValueError where a file of a checkpoint is not the one that was saved; it names the one before to take."""
    if (fault := what_is_broken(checkpoint)) is not None:
        before = _last_sound_before(checkpoint)
        remedy = f", as the one before: --resume {shlex.quote(str(before))} with another --out" if before else ""
        raise ValueError(f"{fault}; {COPY_AGAIN}{remedy}.")


def require_resumable(checkpoint: Path, folder: Path, on_nonfinite: str) -> None:
    """Raise ValueError for a checkpoint from which a run cannot go on.

    Args:
        folder: of the run's precision, which may hold no step that does not lead to the checkpoint or come from it.
        on_nonfinite: with "warn" values need not be finite.
    """
    require_whole(checkpoint)
    if on_nonfinite != "warn" and not is_finite(checkpoint):
        raise ValueError(why_not_resumed(checkpoint))
    step = read_state(checkpoint).step if is_own(checkpoint, folder) else -1
    if others := [each for each in checkpoints_in(folder / "checkpoints") if named_step(each) > step]:
        raise ValueError(
            f"{folder} holds {others[-1].name}, which a run that resumes from {checkpoint} would not lead to; give "
            "another --out, or move later checkpoints away."
        )


def is_own(checkpoint: Path, folder: Path) -> bool:
    """Tell whether a checkpoint is of the run that keeps one precision's files in `folder`."""
    checkpoints = folder / "checkpoints"
    return checkpoints.exists() and checkpoints.samefile(checkpoint.absolute().parent)


def why_not_resumed(checkpoint: Path) -> str:
    """Return the sentence about a checkpoint whose values are not finite, which names the one before to take."""
    before = _last_sound_before(checkpoint)
    remedy = (
        f"resume from the last one of finite values: --resume {shlex.quote(str(before))}, with a lower --lr or another "
        "--seed, and another --out"
        if before
        else "no checkpoint before it has finite ones: train anew, with a lower --lr and another --out"
    )
    return (
        f"{checkpoint} has weights or optimizer states that are NaN or infinite; {remedy}. With --on-nonfinite warn it "
        "is resumed all the same."
    )


def _last_sound_before(checkpoint: Path) -> Path | None:
    """Return the last checkpoint of an earlier step, beside this one, that a run can resume from."""
    step, others = named_step(checkpoint), checkpoints_in(checkpoint.parent)
    before = [other for other in others if step is not None and named_step(other) < step]
    return last_finite([other for other in before if what_is_broken(other) is None])


def origins(checkpoints: dict[str, str]) -> dict[str, Any]:
    """Return what a run's file says of the checkpoints that its precisions resume from."""
    # absolute, for --resume may be called from another folder
    paths = {precision: str(Path(checkpoint).absolute()) for precision, checkpoint in checkpoints.items()}
    return {_ORIGINS: paths} if paths else {}


def write_run_file(options: TrainOptions, about: dict[str, Any]) -> None:
    """Keep a run's options, and what else is to be known of it, in its folder."""
    document = {**about, "options": dataclasses.asdict(options)}
    # whole: --resume reads it, also after a kill in the midst of this write
    write_whole(Path(options.out) / RUN_FILE, json.dumps(document, indent=1) + "\n")


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
        # options decide on all ranks alike, for a save gathers from each of them
        boosted.save(folder, codes=state.options.saves_codes(state.precision))
        save_random_state(boosted, folder)
        if rank == 0:
            _save_config(config, folder / "model")
            shutil.copytree(tokenizer, folder / "model", dirs_exist_ok=True)
            (folder / _STATE).write_text(json.dumps(dataclasses.asdict(state), indent=1) + "\n")
    return newest_checkpoint(root)


def _save_config(config: PretrainedConfig, folder: Path) -> None:
    config.save_pretrained(folder)
    file = folder / "config.json"
    record = json.loads(file.read_text())
    # transformers 5 reads the number of experts by one name, those before by the other
    if "num_local_experts" in record and getattr(config, "num_experts", None) is not None:
        record.setdefault("num_experts", record["num_local_experts"])
        file.write_text(json.dumps(record, indent=2) + "\n")


def load_checkpoint(
    checkpoint: Path, tokens: str, boosted: BoostedModel, shapes: dict[str, list[int]], tied: Collection[str]
) -> RunState:
    """Set model, masters, optimizer and random state to a checkpoint's; every rank calls it, and returns when all have.

    With another number of ranks than wrote it, weights and optimizer are spread anew and random states start from the
    seed. Raises ValueError for a checkpoint of another model or of other data.

    Args:
        shapes: of the whole model's state dict.
        tied: the further names of a parameter in it.
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
    # states of ranks cannot be divided among others
    if state.world_size == dist.get_world_size():
        load_random_state(boosted, checkpoint)
    dist.barrier()  # the run's folder may change after this: no rank reads it any more, and none has failed to
    return state


def _check_shapes(checkpoint: Path, here: dict[str, list[int]], tied: Collection[str]) -> None:
    shards = Shards(checkpoint / "model")
    saved = {name: list(shards.shape(name)) for name in shards.names}
    absent = set(tied) - set(saved)  # plugins that shard models save a tied weight under one name
    for name in sorted({*saved, *here} - absent):
        if saved.get(name) != here.get(name):
            raise ValueError(
                f"The checkpoint {checkpoint} is of another shape: {name} is {saved.get(name, 'missing')} there and "
                f"{here.get(name, 'missing')} here; resume with the --model it was started with."
            )


def save_random_state(boosted: BoostedModel, folder: Path) -> None:
    """Write `random/` of a checkpoint: this rank's random states, and what scaling remembers of earlier steps.

    Every rank calls it, for dropout draws on each by itself.
    """
    (folder / "random").mkdir(exist_ok=True)
    torch.save(_random_state(boosted), _random_file(folder))


def load_random_state(boosted: BoostedModel, checkpoint: Path) -> None:
    """Set this rank's random states, and what scaling remembers, to what `save_random_state` wrote on as many ranks.

    Raises:
        ValueError: the file holds no such state.
    """
    with faults_named():
        state = torch.load(_random_file(checkpoint), weights_only=True)
    _set_random_state(state, boosted)


def _random_file(checkpoint: Path) -> Path:
    return checkpoint / "random" / f"rank-{dist.get_rank():05d}.pt"


def _random_state(boosted: BoostedModel) -> dict[str, Any]:
    state = {
        "torch": torch.get_rng_state(),
        "dropouts": {name: dropout.device_rng_state for name, dropout in _dropouts(boosted.model).items()},
        "amaxes": remembered_amaxes(boosted.model),
    }
    if (scaling := _gradient_scaling(boosted)) is not None:
        state["gradient scaling"] = scaling.saved
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any], boosted: BoostedModel) -> None:
    if not isinstance(state, dict) or not isinstance(state.get("torch"), torch.Tensor):
        raise ValueError(f"A file in random/ of the checkpoint holds no random state; {COPY_AGAIN}.")
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    dropouts = _dropouts(boosted.model)
    for name, value in state.get("dropouts", {}).items():
        dropouts[name].device_rng_state = value
    remember_amaxes(boosted.model, state.get("amaxes", {}))
    scaling = _gradient_scaling(boosted)
    # a checkpoint of an older version, or of a run with another encoding, has none
    if scaling is not None and "gradient scaling" in state:
        scaling.load(state["gradient scaling"])


def _gradient_scaling(boosted: BoostedModel) -> AutomaticScaling | None:
    """Return what ZeRO's gradients are scaled by, where that depends on earlier steps."""
    return getattr(boosted.optimizer, "automatic_scaling", None)


def _dropouts(model: nn.Module) -> dict[str, Any]:
    """Return the generators of dropouts among tensor parallel ranks, which Colossal-AI keeps beside torch's."""
    return {
        name: module.randomizer
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and hasattr(module, "randomizer")
    }
