"""Measure the errors of each way to send gradients in FP8, on the gradients of a real run.

    python -m benchmarks.gradient_formats --device cpu --out results --curves 100

Trains the model of `fp8booster train` on the sources of Python's standard library, with FP8 products, and at the steps
given sends the gradients of all parameters, of as many ranks as given, in every way. With `--curves` it also trains
with each value of `FP8Config(gradient_scaling=...)` on real processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from benchmarks.gradients.collect import collect, training_options
from benchmarks.gradients.curves import SETTINGS, learn
from benchmarks.gradients.errors import measure, name_of, schemes
from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table
from fp8booster.cli.train.data import prepare_tokens
from fp8booster.comm import Encoding


def main(
    model: Annotated[str, typer.Option(help="A size that `fp8booster train --model` knows.")] = "tiny",
    step: Annotated[list[int], typer.Option(help="Step whose gradients are measured; repeat it.")] = [  # noqa: B006
        1,
        20,
        60,
    ],
    ranks: Annotated[int, typer.Option(help="Ranks whose gradients are added.")] = 8,
    batch: Annotated[int, typer.Option(help="Sequences of a rank in a step.")] = 2,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    curves: Annotated[int, typer.Option(help="Steps of each run for the loss curves; 0: none.")] = 0,
    quick: command.Quick = False,
    folder: command.Folder = None,
    json_file: command.JsonFile = None,
    commit: command.Commit = None,
    device_name: Annotated[str, typer.Option("--device", help="cuda or cpu.")] = "cuda",
) -> None:
    """Measure the error of gradient formats."""
    device, gpu = command.measured_device(device_name)
    if quick:
        step, ranks, batch, sequence, curves = [1, 2], 2, 1, 32, 0
    options = training_options(model, max(*step, 2), batch, sequence)
    tokens = prepare_tokens(options, lambda text: typer.echo(text, err=True))
    records, losses = [], {}
    for bucket in collect(options, tokens, device, step, ranks):
        losses[bucket.step] = bucket.loss
        records += [measure(scheme, bucket) for scheme in schemes(ranks)]
    tables = [_step_table(at, loss, records) for at, loss in losses.items()]
    if curves:
        curve_options = training_options(model, curves, batch, sequence)
        runs = [learn(setting, curve_options) for setting in command.progress(list(SETTINGS))]
        tables.append(_curve_table(runs, curve_options.nproc))
    head = environment.head(gpu, commit=commit) | {
        "model": f"{model}, {sum(bucket.sizes) * ranks:,} parameters, FP8 products",
        "data": f"{tokens.name}, {tokens.count:,} tokens; {ranks} ranks x {batch} x {sequence} tokens a step",
        "found": _finding(records),
    }
    title = f"Gradients in FP8: error on {model}"
    command.deliver(Result("gradient-formats", title, head, tables), folder=folder, json_file=json_file)


def _finding(records: list[Record]) -> str:
    """Name the way with the least error and the place of the default, by the mean over steps of the error that
    arrives.
    """
    default = name_of(Encoding())
    names = list(dict.fromkeys(record["way"] for record in records))

    def over_steps(key: str, name: str) -> float:
        values = [record[key] for record in records if record["way"] == name]
        return sum(values) / len(values)

    sentences = []
    for key, what in (("mean", "all values"), ("worst", "the worst parameter")):
        best = max(names, key=lambda name: over_steps(key, name))
        sentences.append(
            f"least noise in {what}: {best}, {over_steps(key, best):.1f} dB; the default ({default}) has "
            f"{over_steps(key, default):.1f} dB"
        )
    return "; ".join(sentences)


def _step_table(step: int, loss: float, records: list[Record]) -> Table:
    return Table(
        name=f"step {step}",
        title=f"Step {step}, loss {loss:.3f}",
        columns=(
            Column("sent as", lambda record: record["way"]),
            Column("cast, dB", _number("cast", ".1f")),
            Column("mean over ranks, dB", _number("mean", ".1f")),
            Column("median parameter, dB", _number("median", ".1f")),
            Column("worst parameter, dB", _number("worst", ".1f")),
            Column("worst is", lambda record: f"`{record['worst parameter']}`"),
            Column("flushed to zero", _number("flushed", ".3%")),
            Column("clipped", _number("clipped", ".4%")),
            Column("sums at the largest", _number("sums at largest", ".4%")),
            Column("bytes a value", _number("bytes", ".4f")),
        ),
        records=[record for record in records if record["step"] == step],
        note=(
            "Signal over noise, of the casts and of the mean that arrives; the parameters' is the mean's. Scales are "
            "real-time; decoded values are added in FP32, those of FP8-LM in FP8 (one scale for each parameter, shared "
            "by all ranks). Flushed: values other than zero that a cast makes zero. Clipped: values beyond the range "
            "that the scale leaves."
        ),
    )


def _curve_table(runs: list[Record], processes: int) -> Table:
    reference = runs[0]["final"]
    steps = len(runs[0]["losses"])
    return Table(
        name="curves",
        title=f"Loss after {steps} steps on {processes} processes",
        columns=(
            Column("gradients in", lambda record: record["setting"]),
            *(
                Column(f"step {at}", lambda record, at=at: f"{record['losses'][at - 1]:.4f}")
                for at in (steps // 4, steps // 2, steps)
            ),
            Column("mean of the last tenth", _number("final", ".4f")),
            Column("against 16 bits", lambda record: f"{record['final'] / reference - 1:+.2%}"),
        ),
        records=runs,
        note="`fp8booster train --precision fp8`; in the first row weights are sent in 16 bits too, then in FP8.",
    )


def _number(key: str, form: str) -> Callable[[Record], str]:
    return lambda record: "-" if record[key] is None else format(record[key], form)


if __name__ == "__main__":
    command.run_command(main)
