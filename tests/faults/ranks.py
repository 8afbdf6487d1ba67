"""What a rank of the campaign does: train a subject as far as asked, with something that goes wrong on the way."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.subjects import SAVED, STEPS, Place, Subject, options_in

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Harm:
    """What goes wrong on one rank; without any, all ranks count their events."""

    kind: str
    """"file": SIGKILL at a file event; "kill", "term", "stop": that signal at a collective."""
    rank: int
    at: int


@dataclass
class Ended:
    """How a run on a rank ended."""

    losses: list[float]
    files: list[str]
    """Its events in the run's folder, from the save of step 4 on."""
    collectives: list[str]


class _Said:
    """Stands for the display."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def show(self, kind: str, **values: Any) -> None:
        if kind == "step":
            self.losses.append(values["loss"])


def train(place: Place, subject: Subject, out: str, until: int, harm: Harm | None) -> Ended:
    """Train to a step, from the newest checkpoint where there is one."""
    from tests.faults.collective_events import CollectiveEvents
    from tests.faults.file_events import FileEvents

    own = harm is not None and harm.rank == int(os.environ["RANK"])
    files = FileEvents(out, f"step-{2 * SAVED:08d}", fatal=harm.at if own and harm.kind == "file" else 0)
    signals = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
    number = signals.get(harm.kind) if own else None
    collectives = CollectiveEvents(harm.at if number else 0, lambda: os.kill(os.getpid(), number))
    run = _command if subject.options is not None else _example
    return Ended(run(place, subject, Path(out), until), files.seen, collectives.seen)


def _command(place: Place, subject: Subject, out: Path, until: int) -> list[float]:
    from fp8booster.cli.train.checkpoints import RUN_FILE, find_resume, write_run_file
    from fp8booster.cli.train.launch import Task
    from fp8booster.cli.train.loop import train as train_rank
    from fp8booster.training.ranks import StopRequest

    options = options_in(place, subject, out)
    begun = (out / RUN_FILE).is_file()
    checkpoint = find_resume(str(out)).checkpoints.get("fp8") if begun else None
    task = Task(options=options, precision="fp8", tokens=place.tokens, resume=checkpoint)
    if os.environ["RANK"] == "0" and not begun:
        task.folder.mkdir(parents=True)
        write_run_file(options, {"command": "fault campaign"})
    stop, said = StopRequest(), _Said()
    done = json.loads((Path(checkpoint) / "state.json").read_text())["step"] if checkpoint else 0
    asked = iter(range(done + 1, STEPS + 1))
    train_rank(task, said.show, lambda: next(asked) == until or stop.wanted)
    return said.losses


def _example(place: Place, subject: Subject, out: Path, until: int) -> list[float]:
    sys.path.insert(0, str(EXAMPLES))
    import colossalai
    import loop
    import pretrain

    from fp8booster.checkpoints import newest_checkpoint
    from tests.examples.example_ranks import shrink_models

    colossalai.launch_from_torch(verbose=False)
    shrink_models()
    begun = newest_checkpoint(out)
    done = int(begun.name[-8:]) if begun else 0
    asked, over_ranks = iter(range(done + 1, STEPS + 1)), loop.over_ranks
    loop.over_ranks = lambda loss, stop, device: over_ranks(loss, stop or next(asked) == until, device)
    loop.KEPT = 1
    arguments = ["--batch", "2", "--sequence", "32", "--lr", "1e-2", "--data", place.text, "--out", str(out)]
    steps = ["--steps", str(STEPS), "--save-every", str(SAVED)]
    again = ["--resume"] if begun else []
    return pretrain.train(pretrain.parse([*subject.example, *arguments, *steps, *again]))


def load_planted(place: Place, subject: Subject, folder: str) -> dict[str, str]:
    """Load each file in the folders of a folder by the call that its name tells; what each raised."""
    import fp8booster.colossal  # noqa: F401  isort: skip
    import colossalai
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fp8booster.cli.train.key_values import build_plugin
    from fp8booster.training.boosted import BoostedModel

    colossalai.launch_from_torch(verbose=False)
    options = options_in(place, subject, Path(folder))
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    boosted = BoostedModel(options.plugin, build_plugin(options, True, network), network, optimizer)
    loads = {
        "model": lambda path: boosted.booster.load_model(boosted.model, path),
        "optimizer": lambda path: boosted.booster.load_optimizer(boosted.optimizer, path),
        "scheduler": lambda path: boosted.booster.load_lr_scheduler(scheduler, path),
    }
    said = {}
    for path in sorted(Path(folder).glob("*/*.bin")):
        try:
            loads[path.stem](str(path))
        except Exception as error:  # noqa: PERF203  (whatever it is, the campaign judges it)
            said[f"{path.parent.name}/{path.name}"] = str(error)
    return said


def soak(place: Place, subject: Subject, out: str) -> list[tuple[int, int]]:
    """Train to the last step; (resident bytes, open descriptors) of this rank before each step."""
    import psutil

    from fp8booster.cli.train.launch import Task
    from fp8booster.cli.train.loop import train as train_rank

    options = options_in(place, subject, Path(out))
    task = Task(options=options, precision="fp8", tokens=place.tokens, resume=None)
    task.folder.mkdir(parents=True, exist_ok=True)
    process, samples = psutil.Process(), []

    def sample() -> bool:
        samples.append((process.memory_info().rss, process.num_fds()))
        return False

    train_rank(task, _Said().show, sample)
    return samples
