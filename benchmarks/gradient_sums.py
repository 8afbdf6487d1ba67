"""Measure the errors of sums of gradients over micro-batches in 16 and in 8 bits, on the gradients of a real run.

    python -m benchmarks.gradient_sums --device cpu --out results

Trains the model of `fp8booster train` on the sources of Python's standard library, with FP8 products, and at the steps
given adds up the BF16 gradients of each parameter over micro-batches, in each way. The error is that of what the
optimizer reads, compared with the exact sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import torch
import typer

from benchmarks.gradients.collect import Bucket, collect, training_options
from benchmarks.gradients.errors import decibels
from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table
from benchmarks.moments import e4m3
from fp8booster.cli.train.data import prepare_tokens
from fp8booster.optim.gradient_sums import GradientSum, added, value_of

Gradients = torch.Tensor
"""BF16 [micro-batches, values] of one parameter."""


def summed(kind: str, gradients: Gradients, *, last_in_fp32: bool) -> torch.Tensor:
    """Return the sum that the optimizer reads: AdamW adds the last gradient in FP32, ZeRO adds it as those before."""
    total: GradientSum | None = None
    for gradient in gradients[:-1] if last_in_fp32 else gradients:
        total = added(total, gradient.clone(), kind)  # of which the first is changed in place
    assert total is not None  # there are two gradients at least
    return value_of(total, gradients[-1]) if last_in_fp32 else value_of(total, dtype=torch.bfloat16)


def summed_in_e4m3(gradients: Gradients) -> torch.Tensor:
    """With a scale for each 128 values; the last gradient is added in FP32."""
    total = gradients[0].new_zeros(gradients.shape[1], dtype=torch.float32)
    for gradient in gradients[:-1]:
        total = e4m3(total + gradient)
    return total + gradients[-1]


WAYS: tuple[tuple[str, float, Callable[[Gradients], torch.Tensor]], ...] = (
    ("FP32", 4, lambda gradients: summed("32-bit", gradients, last_in_fp32=True)),
    ("BF16, `AdamW`", 2, lambda gradients: summed("16-bit", gradients, last_in_fp32=True)),
    ("BF16, ZeRO", 2, lambda gradients: summed("16-bit", gradients, last_in_fp32=False)),
    ("8-bit, `AdamW`", 1 + 4 / 128, lambda gradients: summed("8-bit", gradients, last_in_fp32=True)),
    ("8-bit, ZeRO", 1 + 4 / 128, lambda gradients: summed("8-bit", gradients, last_in_fp32=False)),
    ("E4M3, a scale for 128 values", 1 + 4 / 128, summed_in_e4m3),
)
"""What they are called, bytes for each value between micro-batches, and what they add up."""


def measure(bucket: Bucket, micro_batches: int) -> Iterator[Record]:
    """A record for each way: the error over all parameters, and of the worst."""
    pieces = bucket.values[:micro_batches].split(list(bucket.sizes), dim=2)
    parameters = [piece.flatten(1) for piece in pieces]  # the pieces of a parameter are its values in their order
    exact = [gradients.double().sum(0) for gradients in parameters]
    for name, size, way in WAYS:
        found = [way(gradients) for gradients in parameters]
        yield {
            "step": bucket.step,
            "micro_batches": micro_batches,
            "way": name,
            "bytes": size,
            "all": decibels(torch.cat(exact), torch.cat(found)),
            "worst": min(map(decibels, exact, found)),
        }


COLUMNS = (
    Column("step", lambda r: str(r["step"])),
    Column("micro-batches", lambda r: str(r["micro_batches"])),
    Column("summed in", lambda r: r["way"]),
    Column("bytes a value", lambda r: f"{r['bytes']:.2f}"),
    Column("all values, dB", lambda r: f"{r['all']:.1f}"),
    Column("worst parameter, dB", lambda r: f"{r['worst']:.1f}"),
)
NOTE = (
    "Signal over noise of the sum that the optimizer reads. `AdamW` with updates in backward adds the last gradient in "
    "FP32; ZeRO adds it as those before, and decodes to BF16."
)


def main(
    model: Annotated[str, typer.Option(help="A size that `fp8booster train --model` knows.")] = "tiny",
    step: Annotated[list[int], typer.Option(help="Step whose gradients are added up; repeat it.")] = [1, 20],  # noqa: B006
    micro_batches: Annotated[list[int], typer.Option(help="Gradients that are added up; repeat it.")] = [4, 16],  # noqa: B006
    batch: Annotated[int, typer.Option(help="Sequences of a micro-batch.")] = 2,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    quick: command.Quick = False,
    folder: command.Folder = None,
    json_file: command.JsonFile = None,
    commit: command.Commit = None,
    device_name: Annotated[str, typer.Option("--device", help="cuda or cpu.")] = "cuda",
) -> None:
    """Measure the error of sums of gradients."""
    device, gpu = command.measured_device(device_name)
    if quick:
        step, micro_batches, batch, sequence = [2], [2], 1, 32
    options = training_options(model, max(*step, 2), batch, sequence)
    tokens = prepare_tokens(options, lambda text: typer.echo(text, err=True))
    records, losses = [], {}
    for bucket in collect(options, tokens, device, step, max(micro_batches)):
        losses[bucket.step] = bucket.loss
        records += [record for count in micro_batches for record in measure(bucket, count)]
    head = environment.head(gpu, commit=commit) | {
        "model": f"{model}, FP8 products, {max(micro_batches)} x {batch} x {sequence} tokens a step of {tokens.name}",
        "loss": ", ".join(f"{loss:.3f} at step {at}" for at, loss in losses.items()),
    }
    table = Table("sums", "Sums of gradients over micro-batches", COLUMNS, records, NOTE)
    result = Result("gradient-sums", "Sums of gradients in 16 and in 8 bits", head, [table])
    command.deliver(result, folder=folder, json_file=json_file)


if __name__ == "__main__":
    command.run_command(main)
