"""The number of steps of a run on a CPU, by a trial: of two processors one may take ten times as long."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from statistics import fmean

import torch

from fp8booster.cli.metrics import read_metrics

from .data import TokenFile
from .launch import Task, is_launched, run_ranks, serve_store
from .options import PRECISIONS, TrainOptions
from .progress import make_display

SECONDS = 150.0
"""The time that the steps of all precisions may take: a first run ends within 6 minutes, its set-up included."""

_TRIED = 6  # steps, of which the first has more to do than others
_FEWEST = 20  # after which a loss says something


def is_sized_by_trial(options: TrainOptions) -> bool:
    """Tell whether options, not resolved, leave the steps of a run to the time that one takes here."""
    return options.steps is None and not torch.cuda.is_available() and not is_launched()


def steps_in_time(options: TrainOptions, tokens: TokenFile) -> int | None:
    """Return the number of steps that take `SECONDS` here, at most that of the options; None after a signal.

    Args:
        options: resolved; the trial's files lie in their `out`, and stay there where it fails.
    """
    folder = Path(options.out) / "trial"
    tried = dataclasses.replace(options, out=str(folder), steps=_TRIED, progress="none", record=0)
    seconds = {}
    with make_display(options.progress, "time") as display:
        display.show("status", text="taking a few steps, to see how many fit into a few minutes")
        for precision in PRECISIONS[options.precision]:
            task = Task(options=tried, precision=precision, tokens=tokens, resume=None, trial=True)
            if not run_ranks(task, serve_store()):
                shutil.rmtree(folder)
                return None
            # the mean, for the run takes their sum: others may use the processor in some steps and not in others
            seconds[precision] = fmean(step.seconds for step in read_metrics(task.folder / "metrics.jsonl")[1:])
        shutil.rmtree(folder)
        steps = min(options.steps, max(_FEWEST, int(SECONDS / sum(seconds.values()))))
        times = " and ".join(f"{time:.2g} s in {precision.upper()}" for precision, time in seconds.items())
        text = f"A step takes {times} here. The run takes {steps} steps; --steps sets another number."
        display.show("notice", text=text)
    return steps
