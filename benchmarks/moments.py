"""Measure the error of each code of Adam's moments, on the moments of a real run.

    python -m benchmarks.moments --device cpu --out results

Trains the model of `fp8booster train` on the sources of Python's standard library, in FP32, and at the steps given
rounds both moments of all matrices by each code. The error is that of the update's direction, m / sqrt(v).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated

import torch
import typer

from benchmarks.gradients.collect import training_options
from benchmarks.gradients.steps import steps_in_fp32
from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table
from fp8booster.cli.train.data import TokenFile, prepare_tokens
from fp8booster.cli.train.options import TrainOptions
from fp8booster.formats import E4M3
from fp8booster.kernels.adamw_8bit import decode_first, decode_second, encode_second, in_blocks
from fp8booster.kernels.group_codes import encode_roots

Code = Callable[[torch.Tensor], torch.Tensor]
"""Rounds moments, FP32 of any shape, to what their code holds: FP32 [values]."""

SEED = torch.tensor(1, dtype=torch.int32)


def exact(moments: torch.Tensor) -> torch.Tensor:
    """FP32."""
    return moments.flatten()


def e4m3(moments: torch.Tensor) -> torch.Tensor:
    """E4M3 with a scale for each 128 values."""
    groups = _groups(moments)
    scale = groups.abs().amax(1, keepdim=True) / 448
    return ((groups / scale.clamp(min=1e-38)).to(E4M3).float() * scale).flatten()[: moments.numel()]


def expanded(moments: torch.Tensor) -> torch.Tensor:
    """E4M3 with dynamic range expansion, COAT's (arXiv 2410.19313, section 4.1), the minimum taken over nonzeros."""
    groups = _groups(moments)
    size = groups.abs()
    largest = size.amax(1, keepdim=True).clamp(min=1e-38)
    least = torch.where(size > 0, size, torch.inf).amin(1, keepdim=True).minimum(largest)
    octaves = (largest / least).log2().clamp(min=1e-3)
    power = ((16 * math.log2(448**2 / 2) / octaves).floor() / 16).clamp(1, 16)
    center = (largest.double() * least).sqrt()
    wide = groups.sign() * (size / center) ** power
    scale = (largest / center) ** power / 448
    found = (wide / scale).float().to(E4M3).double()
    return (found.sign() * (found.abs() * scale) ** (1 / power) * center).float().flatten()[: moments.numel()]


def first_8bit(moments: torch.Tensor) -> torch.Tensor:
    """Square roots in int8 with a range for each 256 values: `kernels.adamw_8bit`."""
    code, amaxes = encode_roots(in_blocks(moments))
    return decode_first(code.flatten(), amaxes).flatten()[: moments.numel()]


def second_8bit(moments: torch.Tensor) -> torch.Tensor:
    """Bits of floats in uint8 with a range for each 256 values, rounded by chance: `kernels.adamw_8bit`."""
    code, ranges = encode_second(in_blocks(moments), SEED)
    return decode_second(code.flatten(), ranges).flatten()[: moments.numel()]


CODES: tuple[tuple[str, Code, Code, float], ...] = (
    ("E4M3, both", e4m3, e4m3, 1 + 4 / 128),
    ("E4M3 with range expansion, both (COAT)", expanded, expanded, 1 + 12 / 128),
    ("E4M3 first, 8-bit second", e4m3, second_8bit, 1 + 6 / 128),
    ("8-bit first, FP32 second", first_8bit, exact, 2.5),
    ("FP32 first, 8-bit second", exact, second_8bit, 2.5),
    ("8-bit, both (fp8booster.optim.AdamW)", first_8bit, second_8bit, 1 + 6 / 256),
)
"""What they are called, the codes of both moments, and bytes for each value of a moment."""


def _groups(moments: torch.Tensor, size: int = 128) -> torch.Tensor:
    flat = moments.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def moments_of(
    options: TrainOptions, tokens: TokenFile, device: torch.device, steps: list[int]
) -> Iterator[tuple[int, float, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Train in FP32 up to the last step; (step, loss, both moments of each matrix) at each of `steps`."""
    for step, loss, model, optimizer in steps_in_fp32(options, tokens, device, max(steps)):
        if step in steps:
            states = [optimizer.state[each] for each in model.parameters() if each.dim() == 2]
            yield step, loss, [(state["exp_avg"].cpu(), state["exp_avg_sq"].cpu()) for state in states]


def measure(step: int, moments: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Record]:
    """A record for each code: errors of m / (sqrt(v) + 1e-8) over all values whose first moment is not 0."""
    for name, first, second, size in CODES:
        error = norm = relative = 0.0
        count = 0
        for m, v in moments:
            expected = m.flatten() / (v.flatten().sqrt() + 1e-8)
            off = (first(m) / (second(v).sqrt() + 1e-8) - expected).double()
            moved = expected != 0
            error += off.square().sum().item()
            norm += expected.double().square().sum().item()
            relative += (off.abs() / expected.abs())[moved].sum().item()
            count += int(moved.sum())
        yield {
            "step": step,
            "code": name,
            "bytes": size,
            "error": math.sqrt(error / norm),
            "relative": relative / count,
        }


COLUMNS = (
    Column("step", lambda r: str(r["step"])),
    Column("code", lambda r: r["code"]),
    Column("bytes for a value of a moment", lambda r: f"{r['bytes']:.2f}"),
    Column("error of m / sqrt(v)", lambda r: f"{100 * r['error']:.2f} %"),
    Column("mean relative error of a value", lambda r: f"{100 * r['relative']:.2f} %"),
)
NOTE = "The error is the norm of the difference over the norm of m / sqrt(v), over all matrices."


def main(
    model: Annotated[str, typer.Option(help="A size that `fp8booster train --model` knows.")] = "tiny",
    step: Annotated[list[int], typer.Option(help="Step whose moments are measured; repeat it.")] = [20, 100],  # noqa: B006
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 8,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    quick: command.Quick = False,
    folder: command.Folder = None,
    json_file: command.JsonFile = None,
    commit: command.Commit = None,
    device_name: Annotated[str, typer.Option("--device", help="cuda or cpu.")] = "cuda",
) -> None:
    """Measure the error of codes of Adam's moments."""
    device, gpu = command.measured_device(device_name)
    if quick:
        step, batch, sequence = [2], 1, 32
    options = training_options(model, max(*step, 2), batch, sequence)
    tokens = prepare_tokens(options, lambda text: typer.echo(text, err=True))
    records, losses = [], {}
    for at, loss, moments in moments_of(options, tokens, device, step):
        records += measure(at, moments)
        losses[at] = loss
    head = environment.head(gpu, commit=commit) | {
        "model": f"{model}, FP32, {batch} x {sequence} tokens a step of {tokens.name}",
        "loss": ", ".join(f"{loss:.3f} at step {at}" for at, loss in losses.items()),
    }
    table = Table("codes", "Codes of Adam's moments", COLUMNS, records, NOTE)
    command.deliver(Result("moments", "Adam's moments in 8 bits", head, [table]), folder=folder, json_file=json_file)


if __name__ == "__main__":
    command.run_command(main)
