"""Make runs diverge late, and measure how long before the watchdog warns, and whether it warns of runs that do not.

    python -m benchmarks.divergence --device cpu --at-once 3 --out results

A small LLaMA learns text in FP8. Later a copy of it goes on undisturbed, and others with one of `KINDS` of
disturbances, which grow by a factor a step. The loss has moved when it is `MOVED` above that of the undisturbed copy,
on text that neither trains on. The watchdog is that of `fp8booster.record`, with its defaults, in a run that is resumed
from the recorded file. Without FP8 the same runs show whether FP8 is what makes them diverge.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table
from benchmarks.training.disturbed import (
    DIVERGING,
    EVALUATED,
    EVERY,
    KINDS,
    LONG,
    MOVED,
    NORMAL,
    OFTEN,
    RATE,
    Setting,
    lead,
    run_setting,
)
from fp8booster.reading import read_record


def read_records(files: Iterable[Path]) -> list[Record]:
    """Return the runs that `--json` wrote into files, each once.

    Raises:
        ValueError: a file is missing, no such result or of another version, or two differ in what they found of one
            run.
    """
    found: dict[tuple[str, int, bool, str | None], Record] = {}
    for file in files:
        remedy = "give --before a file that --json of this benchmark wrote"
        tables = read_record(file, {"tables": dict}, remedy)["tables"]
        if not {"disturbed", "undisturbed", "without"} <= tables.keys():
            raise ValueError(f"{file} is a result of another benchmark; {remedy}.")
        for each in itertools.chain(tables["disturbed"], tables["undisturbed"], tables["without"]):
            made = _with_steps(each)
            if made["fp8"] and made["warned"].keys() != {*map(str, EVERY)}:
                raise ValueError(f"{file} has samples of other steps than this version judges; run it again")
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
        *(Column(f"warned of, every {each}", lambda r, each=each: first(r, each)) for each in OFTEN),
        Column("the loss moved", lambda r: _or(r["moved"], f"not by {r['steps']}")),
        *(Column(f"lead, every {each}", lambda r, each=each: _or(lead(r, each), "-")) for each in OFTEN),
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


def _largest(found: Mapping[str, Mapping[int, float]], figure: str) -> str:
    return f"{max(found[figure].values()):.2f}" if figure in found else "-"


def _or(number: int | None, otherwise: str) -> str:
    return otherwise if number is None else str(number)


def planned(
    kinds: Sequence[str], earlier: Sequence[Record], *, quick: bool, seeds: Collection[int], fp8: bool | None
) -> list[tuple[Setting, tuple[str, ...], bool]]:
    """Return the settings to run, the kinds of each that no earlier record has, and whether in FP8."""
    settings = [(each, tuple(kinds), True) for each in DIVERGING]
    settings += [(each, (), True) for each in (*NORMAL, *LONG)]
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
    seeds = {each.seed for each in (*DIVERGING, *NORMAL, *LONG)}
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
