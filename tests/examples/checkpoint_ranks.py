"""What the ranks of the tests of the examples' checkpoints do."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from tests.examples.example_ranks import EXAMPLES, shrink_models

SMALL = ["--batch", "2", "--sequence", "64", "--lr", "1e-2", "--save-every", "2"]


def train(plugin: list[str], text: str, runs: list[list[str]]) -> list[list[float] | str]:
    """Pre-train with each of these arguments, one after the other; the losses of each, or what it raised."""
    pretrain = _example()
    outcomes: list[list[float] | str] = []
    for arguments in runs:
        try:
            outcomes.append(pretrain.train(pretrain.parse([*plugin, *SMALL, "--data", text, *arguments])))
        except ValueError as error:
            outcomes.append(str(error))
        dist.barrier()
    return outcomes


def train_and_die(plugin: list[str], text: str, out: str) -> None:
    """Rank 0 is killed when it has written the model of step 4, and none of its optimizer."""
    pretrain = _example()
    from colossalai.booster import Booster

    save_optimizer = Booster.save_optimizer

    def save_or_die(self: Booster, optimizer: object, checkpoint: str, *args: object, **named: object) -> None:
        if dist.get_rank() == 0 and "00000004" in checkpoint:
            assert list(Path(checkpoint).with_name("model").glob("*.safetensors"))
            os.kill(os.getpid(), signal.SIGKILL)
        save_optimizer(self, optimizer, checkpoint, *args, **named)

    Booster.save_optimizer = save_or_die
    pretrain.train(pretrain.parse([*plugin, *SMALL, "--data", text, "--steps", "4", "--out", out]))


def train_until_told(plugin: list[str], text: str, out: str) -> tuple[list[float], list[float]]:
    """Rank 1 alone gets SIGTERM in step 3 of 8; the losses until then, and of the steps after `--resume`."""
    pretrain = _example()
    from fp8booster.training.boosted import BoostedModel

    update, taken = BoostedModel.update, []

    def update_and_signal(self: BoostedModel, max_norm: float) -> None:
        update(self, max_norm)
        taken.append(True)
        if len(taken) == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    BoostedModel.update = update_and_signal
    arguments = [*plugin, *SMALL, "--data", text, "--out", out, "--steps", "8"]
    before = pretrain.train(pretrain.parse(arguments))
    return before, pretrain.train(pretrain.parse([*arguments, "--resume"]))


def _example() -> object:
    import colossalai

    sys.path.insert(0, str(EXAMPLES))
    import pretrain

    colossalai.launch_from_torch(verbose=False)
    shrink_models()
    return pretrain
