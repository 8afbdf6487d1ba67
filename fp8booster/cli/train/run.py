"""One call of `fp8booster train`: prepare, train in each precision, sum up."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from fp8booster.checkpoints import newest_checkpoint
from fp8booster.cli.metrics import REMOVE, read_figures, read_metrics
from fp8booster.cli.plot.run import PAGE, read_run, scales_file
from fp8booster.kernels.instructions import fit_products_to_cpu
from fp8booster.reading import read_record

from .checkpoints import RUN_FILE, find_resume, is_own, origins, read_state, require_resumable, write_run_file
from .data import TokenFile, folder_has_tokenizer, prepare_tokens
from .defaults import resolve
from .errors import describe
from .key_values import check_plugin, require_fp8_here
from .launch import Task, is_launched, is_main, ranks, run_ranks, serve_store
from .model_folder import is_folder, load_config, require_model, require_shareable
from .options import PRECISIONS, TrainOptions
from .progress import make_display, plain_console
from .summary import layer_lines, machine, render, write_summary
from .trial import is_sized_by_trial, steps_in_time

_CHANGED_AT_ANY_TIME = {"steps", "out", "save", "keep", "progress", "cache", "nproc", "save_codes", "record"}
"""Options that change nothing in steps already taken."""

_OF_ADAPTERS = ("lora", "lora_alpha", "lora_targets")

_WRITTEN = ("summary.md", "summary.json", "loss.png", PAGE, "bf16", "fp8")
"""In a run's folder, beside `RUN_FILE`, which is there first."""

INTERRUPTED = 130
"""Exit status of a run that was stopped by a signal."""


def run(given: dict[str, Any], resume: str | None, command: str) -> int:
    """Train as the options `given` on the command line say; returns the exit status.

    With `resume` the options of that run hold where none is given. Raises ValueError, TypeError or OSError with a
    sentence for what the user can correct.
    """
    checkpoints: dict[str, str] = {}
    if resume is None:
        options = TrainOptions(**given)
    else:
        resumed = find_resume(resume)
        options, checkpoints = _changed(resumed.options, given), resumed.checkpoints
    for sentence in [] if torch.cuda.is_available() else fit_products_to_cpu():
        if is_main():
            plain_console(sys.stderr).print(sentence)
    # all checks come before the data, whose preparation may take long
    _require_effect(given, options)
    check_plugin(options)
    require_fp8_here(options)
    require_model(options.model, options.checkpointed_layers)
    asked, options = options, resolve(options, is_launched())
    if is_main() and resume is None:
        _require_free(Path(options.out))
    asked = dataclasses.replace(asked, out=options.out)
    return _run(asked, options, checkpoints, command, sorted(given.keys() - _CHANGED_AT_ANY_TIME))


def _require_effect(given: dict[str, Any], options: TrainOptions) -> None:
    """Raise ValueError for an option that is given and changes nothing where the command runs, or for its model."""
    if is_launched() and given.get("nproc", ranks(options)) != ranks(options):
        raise ValueError(
            f"--nproc is {given['nproc']}, and the launcher has started {ranks(options)} processes; leave it out."
        )
    if "vocabulary" in given and is_folder(options.model) and folder_has_tokenizer(options.model):
        raise ValueError(
            f"--vocabulary is of a tokenizer that is trained, and the folder {options.model} brings its own; leave it "
            "out."
        )


def _require_free(out: Path) -> None:
    """Raise ValueError for a folder in which a new run would write over something."""
    if any(out.glob("*/metrics.jsonl")):
        raise ValueError(f"{out} already holds a run; continue it with --resume {out}, or give another --out.")
    if not (out / RUN_FILE).exists() and (taken := [name for name in _WRITTEN if _is_taken(out / name)]):
        raise ValueError(
            f"{out} is no run's folder and has {', '.join(taken)}, which a run would write; give another --out."
        )
    file = next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None)
    if file is not None:
        raise ValueError(f"--out is {out}, and {file} is a file; give a folder.")


def _is_taken(path: Path) -> bool:
    """Tell whether something is there already, other than logs that ranks of this launcher have begun."""
    if is_launched() and path.is_dir() and {each.name for each in path.iterdir()} <= {"logs"}:
        return False
    return path.exists()


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keep other commands out of a run's folder. Raises ValueError when one is in it."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        # who waited for the other would train over its checkpoints afterwards
        with FileLock(out / ".lock", blocking=False):
            yield
    except Timeout:
        raise ValueError(f"Another process is training in {out}; wait for it, or give another --out.") from None


def _run(
    asked: TrainOptions, options: TrainOptions, checkpoints: dict[str, str], command: str, given: list[str]
) -> int:
    """Train with `options`, which are resolved from those that were `asked` for; return the exit status."""
    out = Path(options.out)
    done = _finished(checkpoints, options, given)
    if is_main():
        for precision in checkpoints.keys() - done:
            # one process reads the files, or each rank would hash all of a checkpoint
            require_resumable(Path(checkpoints[precision]), out / precision, options.on_nonfinite)
    with make_display(options.progress if is_main() else "none", "data") as display:
        tokens = prepare_tokens(options, lambda text: display.show("status", text=text))
    options.global_batch(ranks(options)).require(tokens.count)
    vocabulary = tokens.vocabulary if is_folder(options.model) else options.vocabulary
    require_shareable(load_config(options.model, vocabulary, options.sequence), options.parallel)
    with _locked(out) if is_main() else nullcontext():  # nothing is written there before all is checked
        about = {"command": command, **machine(), **origins(checkpoints)}
        sized = is_sized_by_trial(asked)
        if is_main() and not (out / RUN_FILE).exists():
            write_run_file(asked if sized else options, about)
        if sized:
            steps = steps_in_time(options, tokens)
            if steps is None:
                _tell_interrupted(Task(options=options, precision="bf16", tokens=tokens, resume=None))
                return INTERRUPTED
            options = resolve(dataclasses.replace(asked, steps=steps), launched=False)
        # after the checks: ranks wait at it for each other
        store = serve_store()
        for precision in PRECISIONS[options.precision]:
            if precision in done:
                continue
            resume = checkpoints.get(precision)
            task = Task(options=options, precision=precision, tokens=tokens, resume=resume, about=about)
            # processes of its own for each precision: no memory or state of the first is left
            if not run_ranks(task, store):
                if is_main():
                    _tell_interrupted(task)
                return INTERRUPTED
        if is_main():
            # from the files alone: a resumed run has trained one of the precisions earlier
            _sum_up(options, command, tokens)
    return 0


def _changed(options: TrainOptions, given: dict[str, Any]) -> TrainOptions:
    """Return the options of a resumed run with those given anew."""
    for name in ("model", "precision", "plugin", *_OF_ADAPTERS):
        value, flag = getattr(options, name), "--" + name.replace("_", "-")
        if given.get(name, value) == value:
            continue
        trained = f"without {flag}" if value is None else f"with {flag} {value}"
        what = f"What --resume names was trained {trained}; resume it without another {flag}."
        if name not in _OF_ADAPTERS and options.lora is None:
            what += " To begin anew from its weights, give the checkpoint's model folder as --model, without --resume."
        raise ValueError(what)
    # a decay that ended with the run's steps goes on ending with them
    if "steps" in given and "decay" not in given and options.decay == options.steps:
        given = {**given, "decay": None}
    return dataclasses.replace(options, **given)


def _finished(checkpoints: dict[str, str], options: TrainOptions, given: list[str]) -> set[str]:
    """Return the precisions that a resumed run has no step left for.

    Raises ValueError where that is all of them, and options are given that would change their training.
    """
    precisions = PRECISIONS[options.precision]
    done = {
        precision
        for precision in precisions
        if precision in checkpoints
        and _is_finished(checkpoints[precision], Path(options.out) / precision, options.steps)
    }
    if given and len(done) == len(precisions):
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(
            f"The run in {options.out} has taken all its {options.steps} steps, so {flags} changes nothing; give more "
            "--steps to go on."
        )
    return done


def _is_finished(checkpoint: str, folder: Path, steps: int) -> bool:
    """Tell whether a run's folder already holds the result of its last step.

    Raises ValueError when the checkpoint leaves no step to do and the folder has no steps to sum up.
    """
    path, result = Path(checkpoint), folder / "result.json"
    step = read_state(path).step
    summable = is_own(path, folder) and (folder / "metrics.jsonl").exists()
    if step > steps or (step == steps and not summable):
        raise ValueError(f"{checkpoint} has done {step} steps and --steps is {steps}; give more --steps to go on.")
    return step == steps and result.exists() and read_record(result, {"step": int}, REMOVE)["step"] == step


def _tell_interrupted(task: Task) -> None:
    """Say in which checkpoint the run is, and how many steps after it are lost."""
    metrics = task.folder / "metrics.jsonl"
    step = max((line.step for line in read_metrics(metrics)), default=0) if metrics.exists() else 0
    checkpoint = newest_checkpoint(task.checkpoints) or (Path(task.resume) if task.resume else None)
    unsaved = step - (read_state(checkpoint).step if checkpoint else 0)
    console = plain_console(sys.stderr)
    if unsaved > 0:
        since = f"the state before is in {checkpoint}" if checkpoint else "no step was saved"
        console.print(f"Stopped at step {step} without saving its last {unsaved} steps; {since}.")
    elif checkpoint is None:
        console.print("Stopped before the first step; nothing was saved.")
    else:
        console.print(f"Stopped. The state is in {checkpoint}.")
    console.print(f"Continue with: fp8booster train --resume {shlex.quote(task.options.out)}")


def _sum_up(options: TrainOptions, command: str, tokens: TokenFile) -> None:
    out = Path(options.out)
    read = [read_figures(out, precision) for precision in PRECISIONS[options.precision]]
    columns = [column for column, _ in read]
    title = f"{options.model}, {columns[0].parameters / 1e6:,.1f} M parameters, {columns[0].steps} steps"
    from fp8booster.cli.plot.pictures import save_losses  # imports matplotlib

    losses = {column.precision.upper(): {step.step: step.loss for step in metrics} for column, metrics in read}
    save_losses(out / "loss.png", losses, title)
    write_summary(out, options, command, columns, f"{tokens.name}, {tokens.count:,} tokens")
    console = plain_console(sys.stdout)
    console.print(render(columns, title))
    for line in layer_lines(columns):
        console.print(line)
    if scales_file(out) is not None:
        console.print(drawn_page(out))
    console.print(f"Kept in {out}: summary.md, summary.json, loss.png, metrics, TensorBoard logs and checkpoints.")


def drawn_page(out: Path) -> str:
    """Draw the page of scales; return the advice on it, and where the page is or why there is none."""
    # here, for drawing must not delay or break a run
    from fp8booster.cli.plot.page import write_page

    try:
        found = read_run(out)
        write_page(out / PAGE, found)
    except Exception as error:  # the run has ended well, whatever a picture lacks
        return f"The page of scales was not drawn ({describe(error)}); try `fp8booster plot {shlex.quote(str(out))}`."
    return "\n".join([*(each.line for each in found.advice), f"What FP8 did to each tensor: {out / PAGE}."])
