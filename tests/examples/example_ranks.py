"""What the ranks of the tests of `examples/` do."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"

PRETRAINING = {
    "low_level_zero": ["--micro-batches", "2"],
    "gemini": ["--micro-batches", "2"],
    "hybrid, tensor parallel": ["--plugin", "hybrid", "--tp", "2", "--sp-mode", "split_gather"],
    "hybrid, sequence parallel": ["--plugin", "hybrid", "--sp", "2", "--sp-mode", "all_to_all"],
    "hybrid, pipeline": ["--plugin", "hybrid", "--pp", "2", "--micro-batches", "2"],
    "hybrid, interleaved": ["--pp", "2", "--micro-batches", "2", "--pp-style", "interleaved"],
    "hybrid, zero-bubble": ["--pp", "2", "--micro-batches", "2", "--pp-style", "zbv"],
    "moe": ["--ep", "2", "--experts", "4"],
    "ddp": ["--micro-batches", "2"],
    "fsdp": ["--micro-batches", "2"],
}
"""Name, of which the first word is the plugin's: the rest of the command."""

FINETUNING = {
    "low_level_zero": [],
    "gemini": [],
    "hybrid, tensor parallel": ["--plugin", "hybrid", "--tp", "2"],
    "hybrid, pipeline": ["--plugin", "hybrid", "--pp", "2", "--micro-batches", "2"],
    "ddp": [],
    "fsdp": [],
}


def shrink_models() -> None:
    """Let the size "tiny" be one for tests, with layers for a pipeline of four pieces."""
    from fp8booster.training.models import MODELS

    MODELS["tiny"] = replace(MODELS["micro"], feed_forward=128, layers=4)


Outcome = list[float] | str
"""The losses, or the traceback."""


def train_all(folder: str, text: str, instructions: str) -> dict[str, dict[str, Outcome]]:
    """Pre-train in every mode, then fine-tune what LowLevelZero pre-trained and what it saved go on."""
    import colossalai

    sys.path.insert(0, str(EXAMPLES))
    import finetune
    import minimal
    import pretrain

    colossalai.launch_from_torch(verbose=False)
    shrink_models()
    small = ["--batch", "2", "--sequence", "64", "--lr", "1e-2"]
    outcomes: dict[str, dict[str, Outcome]] = {"minimal": {}, "pretrain": {}, "resume": {}, "finetune": {}}
    os.chdir(folder)
    outcomes["minimal"]["low_level_zero"] = minimal.train(text)

    def run(script: object, kind: str, name: str, *arguments: str) -> None:
        args = script.parse(["--plugin", name.partition(",")[0], *small, *arguments])
        try:
            outcomes[kind][name] = script.train(args)
        except Exception:
            outcomes[kind][name] = traceback.format_exc()
        gc.collect()
        dist.barrier()

    for name, options in PRETRAINING.items():
        out = f"{folder}/{name}"
        common = [*options, "--data", text, "--out", out]
        run(pretrain, "pretrain", name, *common, "--steps", "4")
        run(pretrain, "resume", name, *common, "--steps", "5", "--resume")
    for name, options in FINETUNING.items():
        model = f"{folder}/pretrained"
        common = [*options, "--model", model, "--data", instructions, "--out", f"{folder}/tuned {name}"]
        run(finetune, "finetune", name, *common, "--steps", "3")
    return outcomes
