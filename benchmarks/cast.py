"""Measure the share of the memory's bandwidth that casts to FP8 reach, compared with torch.compile's.

    python -m benchmarks.cast --out results --json results/cast.json

Matrices are normally distributed BF16. GPU times replay from CUDA graphs; "called" times are of the same work called
from Python over and over, host included. Variants take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import typer

from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table, microseconds
from benchmarks.harness.roofline import CopyBandwidth, cast_bytes
from benchmarks.harness.timing import Timing, Variant, input_sets, time_interleaved
from fp8booster import formats
from fp8booster.kernels.blockwise_cast import blockwise_cast
from fp8booster.kernels.cast import cast, cast_by, note_amax
from fp8booster.kernels.scales import amax_of

Work = Callable[[torch.Tensor, torch.Tensor], object]
"""What is done to (matrix, amax)."""


@dataclass(frozen=True)
class CastKind:
    """One piece of work, and the fewest bytes that it moves."""

    name: str
    amax_given: bool
    layouts: int
    compiled: bool = False
    blockwise: bool = False
    """With a scale for each 128 values, which needs no pass for the amax."""
    delayed: bool = False
    """By an earlier amax, which leaves one pass that finds the matrix's own."""


KINDS = (
    CastKind("amax", amax_given=False, layouts=0),
    CastKind("cast", amax_given=False, layouts=1),
    CastKind("cast + transpose", amax_given=False, layouts=2),
    CastKind("cast, amax given", amax_given=True, layouts=1),
    CastKind("cast + transpose, amax given", amax_given=True, layouts=2),
    CastKind("blockwise: cast", amax_given=True, layouts=1, blockwise=True),
    CastKind("blockwise: cast + transpose", amax_given=True, layouts=2, blockwise=True),
    CastKind("delayed cast", amax_given=True, layouts=1, delayed=True),
    CastKind("delayed cast + transpose", amax_given=True, layouts=2, delayed=True),
    CastKind("torch.compile: cast", amax_given=False, layouts=1, compiled=True),
    CastKind("torch.compile: cast + transpose", amax_given=False, layouts=2, compiled=True),
)
SHAPES = ["8192x4096", "8192x11008", "16384x8192", "8192x5120", "8192x28672"]
CALLED = ": called"


def work_of(kind: CastKind, device: torch.device) -> Work:
    """The function that does a kind of work."""
    if kind.compiled:
        return torch.compile(_compiled_cast(transposed=kind.layouts == 2), dynamic=False)
    if kind.layouts == 0:
        return _amax(device)
    transposed = kind.layouts == 2
    if kind.blockwise:
        return lambda matrix, amax: blockwise_cast(matrix, formats.E4M3, square=False, transposed=transposed)
    if kind.delayed:
        return _delayed(device, transposed=transposed)
    if kind.amax_given:
        return lambda matrix, amax: cast(matrix, formats.E4M3, transposed=transposed, amax=amax)
    return lambda matrix, amax: cast(matrix, formats.E4M3, transposed=transposed)


def _amax(device: torch.device) -> Work:
    if device.type == "cuda":
        from fp8booster.kernels.cast_triton import partial_amaxes_triton

        return lambda matrix, amax: partial_amaxes_triton(matrix)
    return lambda matrix, amax: amax_of(matrix)


def _delayed(device: torch.device, *, transposed: bool) -> Work:
    """As `FP8Config(scaling="delayed")`, within a step."""
    history = torch.zeros(17, device=device)

    def cast_and_note(matrix: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, ...]:
        data, transpose, inverse_scale, amaxes = cast_by(matrix, formats.E4M3, amax, transposed=transposed)
        note_amax(history, amaxes, inverse_scale, new_step=False)
        return data, transpose, inverse_scale

    return cast_and_note


def _compiled_cast(*, transposed: bool) -> Work:
    """Cast as one writes it in torch, for the compiler to fuse."""

    def amax_and_cast(matrix: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = formats.MAX[formats.E4M3] / matrix.abs().amax().float().clamp(min=1e-12)
        data = (matrix.float() * scale).to(formats.E4M3)
        return (data, data.t().contiguous(), scale) if transposed else (data, scale)

    return amax_and_cast


def time_casts(
    rows: int, columns: int, *, device: torch.device, rounds: int, sample_ms: float, copy: CopyBandwidth
) -> dict[str, Timing]:
    """Every kind of work on one shape, replayed and called, and the copy, interleaved."""
    torch._dynamo.reset()
    sets = input_sets(2 * rows * columns, device)
    matrices = [torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(sets)]
    maxima = [amax_of(matrix) for matrix in matrices]
    variants = [copy.variant]
    for kind in KINDS:
        work = work_of(kind, device)

        def call(i: int, work: Work = work) -> object:
            return work(matrices[i], maxima[i])

        variants.append(Variant(kind.name, call, sets, graph=True))
        variants.append(Variant(kind.name + CALLED, call, sets))
    return time_interleaved(variants, device=device, rounds=rounds, sample_ms=sample_ms)


def cast_records(timings: dict[str, Timing], rows: int, columns: int, bytes_per_second: float) -> list[Record]:
    """One record for each kind of work: time, bandwidth reached, floor and how far above it the time lies."""
    records = []
    for kind in KINDS:
        ms, called = timings[kind.name].ms, timings[kind.name + CALLED]
        moved = cast_bytes(rows * columns, amax_given=kind.amax_given, layouts=kind.layouts)
        floor_ms = 1e3 * moved / bytes_per_second
        records.append(
            {
                "shape": [rows, columns],
                "work": kind.name,
                "bytes": moved,
                "ms": ms.as_record(),
                "called_ms": called.ms.as_record(),
                "host_ms": called.host_ms.as_record(),
                "bytes_per_second": moved / (ms.median * 1e-3),
                "copy_bytes_per_second": bytes_per_second,
                "floor_ms": floor_ms,
                "over_floor": ms.median / floor_ms,
            }
        )
    return records


COLUMNS = (
    Column("work", lambda r: r["work"]),
    Column("matrix", lambda r: "{} x {}".format(*r["shape"])),
    Column("us on the GPU", lambda r: microseconds(r["ms"])),
    Column("us called", lambda r: microseconds(r["called_ms"])),
    Column("us of the host", lambda r: f"{1e3 * r['host_ms']['median']:.0f}"),
    Column("GB/s", lambda r: f"{r['bytes_per_second'] / 1e9:.0f}"),
    Column("roofline GB/s (copy)", lambda r: f"{r['copy_bytes_per_second'] / 1e9:.0f}"),
    Column("floor us", lambda r: f"{1e3 * r['floor_ms']:.1f}"),
    Column("time over floor", lambda r: f"{r['over_floor']:.2f}"),
)
NOTE = (
    "Median [10th-90th percentile] of the rounds. The floor is the fewest bytes at the bandwidth of a 1 GiB copy "
    "measured interleaved: BF16 read once for the amax unless it is given, once for the cast, one byte written for "
    "each layout. A cache that keeps part of a matrix from the first read to the second can beat it."
)


def parse_shape(text: str) -> tuple[int, int]:
    """Rows and columns from "8192x4096".

    Raises:
        typer.BadParameter: it is written otherwise.
    """
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal()):
        raise typer.BadParameter(f"{text!r} is no shape; write rows and columns as 8192x4096")
    return int(rows), int(columns)


def main(
    shape: Annotated[list[str], typer.Option(help="Matrix as ROWSxCOLUMNS; repeat the option.")] = SHAPES,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each piece of work.")] = 15,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds a sample lasts at least.")] = 4.0,
    quick: command.Quick = False,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Time amax, cast and cast + transpose, with and without the amax given, delayed casts, and torch.compile's."""
    shapes = [parse_shape(text) for text in shape]
    target, gpu = command.measured_device(device)
    if quick:
        shapes, rounds = shapes[:2], 5
    torch.manual_seed(0)
    copy = CopyBandwidth(target)
    records = []
    for rows, columns in command.progress(shapes):
        timings = time_casts(rows, columns, device=target, rounds=rounds, sample_ms=sample_ms, copy=copy)
        records += cast_records(timings, rows, columns, copy.bytes_per_second(timings))
    result = Result(
        "cast",
        "Casts from BF16 to FP8",
        environment.head(gpu, commit=commit),
        [Table("casts", "Time and bandwidth", COLUMNS, records, NOTE)],
    )
    command.deliver(result, folder=out, json_file=json)


if __name__ == "__main__":
    command.run_command(main)
