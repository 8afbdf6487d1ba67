"""Runs of small models that are made to diverge late, and what the watchdog says of them."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.harness.results import Record
from benchmarks.training.data import batches, held_out, tokens_of
from benchmarks.training.job import Job
from fp8booster import FP8Config, Watchdog, convert_to_fp8, record
from fp8booster.monitor.scales import ScaleRow
from fp8booster.monitor.sinks import read_scales
from fp8booster.monitor.watchdog import Course, Warnings
from fp8booster.training.batches import Replica
from fp8booster.training.models import Architecture, build
from fp8booster.training.optimizers import WarmupCosine

MOVED = 0.1
"""In nats, over the loss of the undisturbed copy at the same step: then a run's loss has moved."""

TEXT = "python"
"""As `benchmarks.convergence --data`."""

EVALUATED = 10
"""Steps between evaluations."""

OFTEN = (10, 50)
"""Steps between samples. The first is what is recorded; of others the watchdog is given the samples that they share."""

EVERY = (*OFTEN, 600)
"""The last gives so few samples that long runs alone are judged by them."""

RATE = 0.015
"""By which a disturbance grows in a step."""

MODELS = {
    "micro": Architecture("LLaMA of 2 layers", 64, 96, 2, 4, 2, vocabulary=512, sequence=128),
    "wide": Architecture("LLaMA of 2 wide layers", 96, 384, 2, 4, 4, vocabulary=512, sequence=128),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run."""

    seed: int
    model: str = "micro"
    lr: float = 3e-3
    weight_decay: float = 0.1
    warm_up: float = 0.1
    """Share of the steps."""
    zeros: bool = False
    """The projections that write to the residual begin as zeros."""
    steps: int = 600
    start: int = 200
    """Step after which it is disturbed."""

    def __str__(self) -> str:
        others = [f"lr {self.lr:g}", f"weight decay {self.weight_decay:g}", f"warm-up {self.warm_up:.0%}"]
        return ", ".join([self.model, *others, *["projections of zeros"] * self.zeros, f"seed {self.seed}"])


DIVERGING = (Setting(seed=100), Setting(seed=101), Setting(seed=102, model="wide", lr=2e-3), Setting(seed=108))
"""Each runs undisturbed too, which is a normal run."""

NORMAL = (
    Setting(seed=103, lr=1e-2),
    Setting(seed=104, lr=3e-4, weight_decay=0.0),
    Setting(seed=105, warm_up=0.5),
    Setting(seed=106, zeros=True),
    Setting(seed=107, zeros=True, warm_up=0.5, model="wide"),
)

LONG = (
    Setting(seed=109, steps=12_000),
    Setting(seed=110, steps=12_000, model="wide", lr=1e-3, weight_decay=0.0, zeros=True),
)
"""Normal ones in which weights have time to learn late."""


class Learner:
    """A model that learns, with what a disturbance reaches.

    Args:
        fp8: its layers compute in FP8; else all is in FP32.
    """

    def __init__(self, setting: Setting, fp8: bool, device: torch.device) -> None:
        self.setting, architecture = setting, MODELS[setting.model]
        job = Job(model="micro", sequence=64, micro_batch=8, held_out=0.01, seed=setting.seed, device=device.type)
        job = replace(job, tokens=tokens_of(TEXT, "text", job))
        torch.manual_seed(setting.seed)
        self.model: nn.Module = build(architecture.config(64), device=device, dtype=torch.float32)
        if setting.zeros:
            for name, parameter in self.model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    nn.init.zeros_(parameter)
        if fp8:
            convert_to_fp8(self.model, FP8Config(always=True))
        self.weights = dict(self.model.named_parameters())
        self.logits = [each for name, each in self.weights.items() if name.endswith(("q_proj.weight", "k_proj.weight"))]
        chosen = {id(each) for each in self.logits}
        rest = [each for each in self.weights.values() if id(each) not in chosen]
        groups = [{"params": rest}, {"params": self.logits}]
        decay = setting.weight_decay
        self.optimizer = torch.optim.AdamW(groups, lr=setting.lr, betas=(0.9, 0.95), weight_decay=decay, fused=True)
        self.middle = f"model.layers.{architecture.layers // 2}.mlp"
        warm_up = max(1, round(setting.warm_up * setting.steps))
        self._schedule = WarmupCosine(peak=setting.lr, floor=setting.lr / 10, warmup=warm_up, decay=setting.steps)
        self._feed = batches(job, Replica(0, 1), device)
        self._held_out = torch.cat([each for each, _ in zip(held_out(job, device), range(3), strict=False)])

    def train(self, first: int, last: int, disturb: Disturbance | None = None) -> Iterator[tuple[int, float]]:
        """Take steps; give the loss on held-out text after each that `EVALUATED` divides."""
        for step in range(first, last + 1):
            for group in self.optimizer.param_groups:
                group["lr"], group["weight_decay"] = self._schedule.rate(step), self.setting.weight_decay
            factor = (1 + RATE) ** (step - self.setting.start)
            finish = None if disturb is None else disturb(self, factor)
            ids = self._feed(step - 1)
            self.model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if finish is not None:
                with torch.no_grad():
                    finish()
            if step % EVALUATED == 0:
                yield step, self.loss()

    @torch.no_grad()
    def loss(self) -> float:
        """On held-out text."""
        self.model.eval()
        loss = float(self.model(input_ids=self._held_out, labels=self._held_out).loss)
        self.model.train()
        return loss

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """What `restore` takes."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def restore(self, state: tuple[dict[str, Tensor], dict[str, object]]) -> None:
        """Go back."""
        weights, moments = copy.deepcopy(state)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(moments)


Disturbance = Callable[[Learner, float], Callable[[], None] | None]
"""Called before a step with a factor, which grows; returns what to do after the step."""


def align(learner: Learner, factor: float) -> Callable[[], None]:
    """Let a row of the middle layer's gate and one of its up turn to each other and grow (arXiv 2409.12517)."""

    def finish() -> None:
        rows = [learner.weights[f"{learner.middle}.{name}_proj.weight"][5] for name in ("gate", "up")]
        direction = sum((row / row.norm() for row in rows), torch.zeros_like(rows[0]))
        direction = direction / direction.norm()
        for row in rows:
            row.copy_((1 + RATE) * ((1 - RATE) * row + RATE * row.norm() * direction))

    return finish


def align_and_add(learner: Learner, factor: float) -> Callable[[], None]:
    """Let the channel's column of down grow as well, which otherwise learns to become small."""
    align_rows = align(learner, factor)

    def finish() -> None:
        align_rows()
        learner.weights[f"{learner.middle}.down_proj.weight"][:, 5].mul_(1 + RATE)

    return finish


def grow_logits(learner: Learner, factor: float) -> Callable[[], None]:
    """Let the weights of q and k grow, and so the logits by the square."""

    def finish() -> None:
        for weight in learner.logits:
            weight.mul_(1 + RATE)

    return finish


def raise_rate_of_logits(learner: Learner, factor: float) -> None:
    """Let the learning rate of q and k grow."""
    learner.optimizer.param_groups[1]["lr"] *= factor


def raise_rate(learner: Learner, factor: float) -> None:
    """Let the learning rate grow, without weight decay."""
    for group in learner.optimizer.param_groups:
        group["lr"] *= factor
        group["weight_decay"] = 0.0


KINDS: dict[str, Disturbance] = {
    "a channel of SwiGLU aligns and grows": align,
    "a channel of SwiGLU aligns and grows, its column of down too": align_and_add,
    "attention logits grow": grow_logits,
    "learning rate of q and k grows": raise_rate_of_logits,
    "learning rate grows, no weight decay": raise_rate,
}


def run_setting(setting: Setting, kinds: Sequence[str], fp8: bool, device: torch.device) -> list[Record]:
    """Run a setting undisturbed, and from its start on with each kind; a record for each run."""
    learner = Learner(setting, fp8, device)
    with tempfile.TemporaryDirectory() as folder:
        before, file = Path(folder) / "before.jsonl", Path(folder) / "scales.jsonl"
        with _recorded(learner, before, fp8):
            course = dict(learner.train(1, setting.start))
        state = learner.state()
        records: list[Record] = []
        normal: Mapping[int, float] = {}
        for kind in (None, *kinds):
            learner.restore(state)
            if fp8:
                shutil.copy(before, file)
            losses = dict(course)
            with _recorded(learner, file, fp8, setting.start):
                for step, loss in learner.train(setting.start + 1, setting.steps, KINDS[kind] if kind else None):
                    losses[step] = loss
                    if kind is not None and moved(losses, normal) is not None:
                        break
            normal = normal or losses
            found = {"kind": kind, "setting": str(setting), "start": setting.start, "fp8": fp8}
            found |= {"steps": max(losses), "losses": losses, "moved": moved(losses, normal)}
            records.append(found | (_watched(read_scales(file)[1]) if fp8 else {}))
    return records


def _recorded(learner: Learner, file: Path, fp8: bool, done: int = 0) -> AbstractContextManager[object]:
    # the warnings are those of what is written, which `_watched` reads again at each of `EVERY`
    return record(learner.model, every=EVERY[0], sink=file, done=done, on_warning=id) if fp8 else nullcontext()


def moved(losses: Mapping[int, float], normal: Mapping[int, float]) -> int | None:
    """Return the first step at which a loss is `MOVED` above the normal one, or no number."""
    above = (step for step, loss in losses.items() if not loss <= normal[step] + MOVED)
    return next(above, None)


def _watched(rows: Sequence[ScaleRow]) -> Record:
    """Return what the watchdog says of the samples, and how figures grow."""
    warned = {str(every): warnings_of(rows, every) for every in EVERY}
    first = {(row.layer, row.role): row.outlier for row in reversed(rows) if row.outlier}
    former = [row.step for row in rows if row.outlier and row.outlier > 8 * first[row.layer, row.role]]
    return {"warned": warned, "former": min(former, default=None), "growths": growths(rows)}


def warnings_of(rows: Iterable[ScaleRow], every: int) -> list[tuple[int, str]]:
    """Return the watchdog's sentences, with default thresholds, and the step in which each is given."""
    warnings, by_step = Warnings(Watchdog()), defaultdict(list)
    for row in rows:
        by_step[row.step].append(row)
    sampled = {step: by_step[step] for step in by_step if step == 1 or step % every == 0}
    # a sample is on the host when the next step ends
    return [(step + 1, sentence) for step in sampled for sentence in warnings.of(sampled[step])]


FIGURES = ("amax", "outlier", "kurtosis")


def growths(rows: Iterable[ScaleRow]) -> dict[str, dict[int, float]]:
    """Return, by role and figure, the largest growth of a tensor over its course in each sampled step."""
    courses: defaultdict[tuple[str, str, str], Course] = defaultdict(Course)
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        for figure in FIGURES:
            value = getattr(row, figure)
            growth = courses[row.layer, row.role, figure].growth(row.step, value) if value else None
            if growth is not None:
                largest = found[f"{figure} of {row.role}s"]
                largest[row.step] = max(growth, largest.get(row.step, 0.0))
    return dict(found)


def lead(found: Record, every: int) -> int | None:
    """Return the steps from the first warning to the loss's move; None without either."""
    warned = found["warned"][str(every)]
    return found["moved"] - warned[0][0] if warned and found["moved"] is not None else None
