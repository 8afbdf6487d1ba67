"""Make runs diverge late, and measure how long before the watchdog warns, and whether it warns of runs that do not.

    python -m benchmarks.divergence --device cpu --at-once 3 --out results

A small LLaMA learns text in FP8. Later a copy of it goes on undisturbed, and others with one of `KINDS` of
disturbances, which grow by a factor a step. The loss has moved when it is `MOVED` above that of the undisturbed copy,
on text that neither trains on. The watchdog is that of `fp8booster.record`, with its defaults, in a run that is resumed
from the recorded file. Without FP8 the same runs show whether FP8 is what makes them diverge.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import multiprocessing
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table
from benchmarks.training.data import batches, held_out, tokens_of
from benchmarks.training.job import Job
from fp8booster import FP8Config, Watchdog, convert_to_fp8, record
from fp8booster.monitor.scales import ScaleRow
from fp8booster.monitor.sinks import read_scales
from fp8booster.monitor.watchdog import Course, Warnings
from fp8booster.reading import read_record
from fp8booster.training.batches import Replica
from fp8booster.training.models import Architecture, build
from fp8booster.training.optimizers import WarmupCosine

MOVED = 0.1
"""In nats, over the loss of the undisturbed copy at the same step: then a run's loss has moved."""

TEXT = "python"
"""As `benchmarks.convergence --data`."""

EVALUATED = 10
"""Steps between evaluations."""

EVERY = (10, 50)
"""Steps between samples. The first is what is recorded; of the second the watchdog is given the samples it has."""

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


def read_records(files: Iterable[Path]) -> list[Record]:
    """Return the runs that `--json` wrote into files, each once.

    Raises:
        ValueError: a file is missing or no such result, or two differ in what they found of one run.
    """
    found: dict[tuple[str, int, bool, str | None], Record] = {}
    for file in files:
        remedy = "give --before a file that --json of this benchmark wrote"
        tables = read_record(file, {"tables": dict}, remedy)["tables"]
        if not {"disturbed", "undisturbed", "without"} <= tables.keys():
            raise ValueError(f"{file} is a result of another benchmark; {remedy}.")
        for each in itertools.chain(tables["disturbed"], tables["undisturbed"], tables["without"]):
            made = _with_steps(each)
            # as text, for a loss may be NaN, which equals nothing
            if json.dumps(made) != json.dumps(found.setdefault(run_of(made), made)):
                name = f"{made['setting']}, {made['kind'] or 'undisturbed'}"
                raise ValueError(f"{file} and another file differ in the run {name}; give one of them")
    return [*found.values()]


def run_of(found: Record) -> tuple[str, int, bool, str | None]:
    """Return the setting of a record, its start, whether it is in FP8, and its kind: two of a run have the same."""
    return found["setting"], found["start"], found["fp8"], found["kind"]


def _with_steps(found: Record) -> Record:
    """Return a record whose steps are numbers again, which JSON has as text."""
    found["losses"] = {int(step): loss for step, loss in found["losses"].items()}
    if found["fp8"]:
        grown = found["growths"].items()
        found["growths"] = {name: {int(step): growth for step, growth in each.items()} for name, each in grown}
    return found


def figure_records(records: Sequence[Record]) -> list[Record]:
    """Return, for each figure, its growth in normal runs, and the leads if the threshold were a fifth above that."""
    ours = [each for each in records if each["fp8"]]
    found = []
    for figure in dict.fromkeys(name for each in ours for name in each["growths"]):
        normal = [each["growths"].get(figure, {}).values() for each in ours if each["kind"] is None]
        largest = max(itertools.chain.from_iterable(normal), default=math.inf)
        leads: dict[str, list[int | None]] = {kind: [] for kind in KINDS}
        for each in ours:
            if each["kind"] is not None and each["moved"] is not None:
                passed = [step for step, growth in each["growths"].get(figure, {}).items() if growth > 1.2 * largest]
                leads[each["kind"]].append(each["moved"] - passed[0] - 1 if passed else None)
        found.append({"figure": figure, "normal": largest, "leads": leads})
    return found


def tables(records: Sequence[Record]) -> list[Table]:
    """Show the runs that were disturbed, those that were not, and the figures."""
    ours = [each for each in records if each["fp8"]]

    def first(found: Record, every: int) -> str:
        warned = found["warned"][str(every)]
        return str(warned[0][0]) if warned else "never"

    diverging = [
        Column("disturbance", lambda r: r["kind"]),
        Column("run", lambda r: r["setting"]),
        Column("begins after step", lambda r: str(r["start"])),
        *(Column(f"warned of, every {each}", lambda r, each=each: first(r, each)) for each in EVERY),
        Column("the loss moved", lambda r: _or(r["moved"], f"not by {r['steps']}")),
        *(Column(f"lead, every {each}", lambda r, each=each: _or(lead(r, each), "-")) for each in EVERY),
        Column("first warning", lambda r: _shown(r["warned"][str(EVERY[0])])),
    ]
    normal = [
        Column("run", lambda r: r["setting"]),
        Column("steps", lambda r: str(r["steps"])),
        *(Column(f"warnings, every {each}", lambda r, each=each: str(len(r["warned"][str(each)]))) for each in EVERY),
        Column("an outlier over 8 times its first, at step", lambda r: _or(r["former"], "never")),
        Column("largest growth of a weight", lambda r: _largest(r["growths"], "amax of weights")),
        Column("held-out loss", lambda r: f"{r['losses'][max(r['losses'])]:.3f}"),
    ]
    without = [
        Column("disturbance", lambda r: r["kind"] or "none"),
        Column("run", lambda r: r["setting"]),
        Column("the loss moved", lambda r: _or(r["moved"], f"not by {r['steps']}")),
    ]
    figures = [
        Column("figure", lambda r: r["figure"]),
        Column("largest growth in normal runs", lambda r: f"{r['normal']:.2f}"),
        *(
            Column(kind, lambda r, kind=kind: ", ".join(_or(each, "none") for each in r["leads"][kind]))
            for kind in KINDS
        ),
    ]
    disturbed = [each for each in ours if each["kind"] is not None]
    undisturbed = [each for each in ours if each["kind"] is None]
    return [
        Table("disturbed", "Runs that diverge", diverging, disturbed, f"A disturbance grows by {RATE:.1%} a step."),
        Table("undisturbed", "Normal runs", normal, undisturbed),
        Table("without", "The same runs without FP8", without, [each for each in records if not each["fp8"]]),
        Table("figures", "Figures", figures, figure_records(ours), _FIGURES),
    ]


_FIGURES = (
    "The leads, in steps and a number for each run that diverges, if the watchdog looked at the growth of this figure "
    f"over its course, every {EVERY[0]} steps, with a threshold 20 % above the largest growth in the normal runs."
)


def _shown(warned: Sequence[tuple[int, str]]) -> str:
    return warned[0][1].partition(";")[0] if warned else "-"


def _leads(found: Sequence[int | None]) -> str:
    return ", ".join(_or(each, "none") for each in found)


def _largest(found: Mapping[str, Mapping[int, float]], figure: str) -> str:
    return f"{max(found[figure].values()):.2f}" if figure in found else "-"


def _or(number: int | None, otherwise: str) -> str:
    return otherwise if number is None else str(number)


def planned(
    kinds: Sequence[str], earlier: Sequence[Record], *, quick: bool, seeds: Collection[int], fp8: bool | None
) -> list[tuple[Setting, tuple[str, ...], bool]]:
    """Return the settings to run, the kinds of each that no earlier record has, and whether in FP8."""
    settings = [(each, tuple(kinds), True) for each in DIVERGING]
    settings += [(each, (), True) for each in NORMAL]
    settings += [(each, tuple(kinds), False) for each in DIVERGING]
    if quick:
        settings = [(replace(DIVERGING[0], steps=40, start=20), tuple(kinds), each) for each in (True, False)]
    done = {run_of(each) for each in earlier}
    work = []
    for setting, disturbances, in_fp8 in settings:
        if setting.seed not in seeds or fp8 not in (None, in_fp8):
            continue
        runs = [kind for kind in (None, *disturbances) if (str(setting), setting.start, in_fp8, kind) not in done]
        if runs:
            work.append((setting, tuple(kind for kind in runs if kind is not None), in_fp8))
    return work


def main(
    seed: Annotated[list[int], typer.Option(help="Of the settings to run (default: all); repeat it.")] = [],  # noqa: B006
    kind: Annotated[list[str], typer.Option(help="Of the disturbances (default: all); repeat it.")] = [],  # noqa: B006
    fp8: Annotated[
        bool | None, typer.Option("--fp8/--no-fp8", help="The runs in FP8 alone, or those without (default: both).")
    ] = None,
    before: Annotated[
        list[Path], typer.Option(help="What --json wrote: these runs are shown, and not run again; repeat it.")
    ] = [],  # noqa: B006
    at_once: Annotated[int, typer.Option(min=1, help="Settings that run at the same time.")] = 1,
    quick: command.Quick = False,
    folder: command.Folder = None,
    json_file: command.JsonFile = None,
    commit: command.Commit = None,
    device_name: command.DeviceName = "cuda",
) -> None:
    """Measure how long before the loss the watchdog warns of runs that diverge, and how often of others."""
    device, gpu = command.measured_device(device_name)
    if unknown := sorted({*kind} - {*KINDS}):
        command.refuse(f"--kind is {unknown[0]!r}; use {' or '.join(map(repr, KINDS))}")
    seeds = {each.seed for each in (*DIVERGING, *NORMAL)}
    if others := sorted({*seed} - seeds):
        command.refuse(f"--seed is {others[0]}; use {', '.join(map(str, sorted(seeds)))}")
    try:
        earlier = read_records(before)
    except (ValueError, OSError) as error:
        command.refuse(str(error))
    work = planned([*dict.fromkeys(kind or KINDS)], earlier, quick=quick, seeds=seed or seeds, fp8=fp8)
    if not work and not earlier:
        command.refuse("no run has these --seed and --fp8; without FP8 the settings that diverge alone are run")
    head = environment.head(gpu, commit=commit) | {
        "training": "8 x 64 tokens a step of the sources of Python's standard library, AdamW, cosine learning rate; "
        "linear layers in FP8, all else in FP32",
        "the loss has moved": f"held-out loss {MOVED} nats over the undisturbed run's, every {EVALUATED} steps",
        "watchdog": "its defaults",
    }
    found: dict[int, list[Record]] = {}
    shown = {run_of(each) for each in earlier}

    def result() -> Result:
        made = (each for number in sorted(found) for each in found[number])
        # a setting that runs again for further kinds is undisturbed again
        records = [*earlier, *(each for each in made if run_of(each) not in shown)]
        waiting = [each for number, each in enumerate(work) if number not in found]
        left_out = {f"{each[0]}, {'in' if each[2] else 'without'} FP8": "not ended" for each in waiting}
        return Result("divergence", "Warnings before a run diverges", head, tables(records), left_out)

    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        numbers = {pool.submit(run_setting, *each, device): number for number, each in enumerate(work)}
        for future in as_completed(numbers):
            found[numbers[future]] = future.result()
            # what has ended is kept, whatever happens to the others
            result().write(folder=folder, json_file=json_file)
            typer.echo(f"{len(found)} of {len(work)} settings have ended", err=True)
    command.deliver(result(), folder=folder, json_file=json_file)


if __name__ == "__main__":
    command.run_command(main)
