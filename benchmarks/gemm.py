"""Time BF16 and FP8 products, over the layers of models and over squares.

    python -m benchmarks.gemm --out results --json results/gemm.json

Operands are normally distributed (products of zeros run faster), products replay from CUDA graphs, variants take turns.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.harness import command, environment, plots
from benchmarks.harness.products import BF16, EXACT, FAST, KINDS, Operands
from benchmarks.harness.results import Column, Record, Result, Table, spread
from benchmarks.harness.roofline import CopyBandwidth, ProductFloor
from benchmarks.harness.shapes import DIRECTIONS, workloads
from benchmarks.harness.timing import Timing, Variant, input_sets, time_interleaved

MODELS = ["7b", "13b", "70b", "35b", "te"]
TOKENS = [8192, 16384]
SQUARES = [1024, 2048, 4096, 8192, 16384]


def time_products(
    rows: int, inner: int, columns: int, *, device: torch.device, rounds: int, sample_ms: float, copy: CopyBandwidth
) -> dict[str, Timing]:
    """Every kind of product of one shape, and the copy that measures bandwidth, interleaved."""
    sets = input_sets(inner * (rows + columns), device)
    operands = [Operands.random(rows, inner, columns, device) for _ in range(sets)]
    variants = []
    for kind in KINDS:
        calls = [each.multiplication(kind) for each in operands]
        variants.append(Variant(kind.name, lambda i, calls=calls: calls[i](), sets, graph=True))
    return time_interleaved([*variants, copy.variant], device=device, rounds=rounds, sample_ms=sample_ms)


def product_record(timings: dict[str, Timing], rows: int, inner: int, columns: int, floor: ProductFloor) -> Record:
    """Time the products of one shape; return times, rates and the roofline."""
    flops = 2 * rows * inner * columns
    record: Record = {"rows": rows, "inner": inner, "columns": columns, "copy_bytes_per_second": floor.bytes_per_second}
    for kind in KINDS:
        ms = timings[kind.name].ms
        floor_ms = floor.ms(rows, inner, columns, kind.precision)
        record[kind.name] = {
            "ms": ms.as_record(),
            "tflops": flops / ms.median / 1e9,
            "ratio": timings[BF16.name].ms.over(ms).as_record(),
            "roofline_tflops": flops / floor_ms / 1e9,
            "fraction": floor_ms / ms.median,
        }
    return record


def _columns(*first: Column) -> list[Column]:
    fp8 = [kind for kind in KINDS if kind.precision == "FP8"]
    return [
        *first,
        Column("BF16 ms", lambda r: spread(r[BF16.name]["ms"], 3)),
        Column("BF16 TFLOP/s", lambda r: f"{r[BF16.name]['tflops']:.0f}"),
        *(
            Column(
                f"{kind.name}: TFLOP/s (x BF16)",
                lambda r, name=kind.name: f"{r[name]['tflops']:.0f} ({r[name]['ratio']['median']:.2f})",
            )
            for kind in fp8
        ),
        Column("fast ms", lambda r: spread(r[FAST.name]["ms"], 3)),
        Column(
            "roofline TFLOP/s BF16, FP8",
            lambda r: f"{r[BF16.name]['roofline_tflops']:.0f}, {r[EXACT.name]['roofline_tflops']:.0f}",
        ),
        Column(
            "of it BF16, fast", lambda r: f"{r[BF16.name]['fraction']:.2f}, {r['E4M3 x E4M3 fast']['fraction']:.2f}"
        ),
    ]


NOTE = (
    "Median [10th-90th percentile] of the rounds; ratios are medians of ratios round by round. The roofline is the "
    "larger of the arithmetic at the tensor cores' peak (processors x highest clock x operations a cycle; power keeps "
    "long products below it) and the bytes at the copy bandwidth measured interleaved with the products."
)


def plot_squares(result: Result, squares: list[Record], folder: Path) -> str:
    """Draw rates over sizes into `folder`; return the file's name."""
    name = f"{result.stem}.png"
    lines = {kind.name: [record[kind.name]["tflops"] for record in squares] for kind in KINDS}
    for kind in (BF16, FAST):
        lines[f"roofline {kind.precision}"] = [record[kind.name]["roofline_tflops"] for record in squares]
    plots.plot_lines(
        folder / name,
        title=f"Square products, {result.head['GPU']}, torch {result.head['torch']}",
        x_label="M = N = K",
        y_label="TFLOP/s",
        x=[record["rows"] for record in squares],
        lines=lines,
    )
    return name


def main(
    models: command.Models = MODELS,
    tokens: command.Tokens = TOKENS,
    square: Annotated[list[int], typer.Option(help="Sizes of squares; repeat the option.")] = SQUARES,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each product.")] = 7,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds a sample lasts at least.")] = 3.0,
    quick: command.Quick = False,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Time BF16 and FP8 products: the three of every linear layer, and squares, with a plot."""
    target, gpu = command.measured_device(device)
    if quick:
        models, tokens, square, rounds = models[:1], tokens[:1], square[:2], 3
    torch.manual_seed(0)
    copy = CopyBandwidth(target)

    def measure(rows: int, inner: int, columns: int) -> Record:
        timings = time_products(rows, inner, columns, device=target, rounds=rounds, sample_ms=sample_ms, copy=copy)
        floor = ProductFloor(gpu, copy.bytes_per_second(timings))
        return product_record(timings, rows, inner, columns, floor)

    layers = [
        {"layer": work.label, "shape": work.shape, "direction": direction, **measure(*work.product(direction))}
        for work in command.progress(workloads(models, tokens, fused=True))
        for direction in DIRECTIONS
    ]
    squares = [measure(size, size, size) for size in command.progress(square)]
    result = Result(
        "gemm",
        "BF16 and FP8 products",
        environment.head(gpu, commit=commit),
        [
            Table(
                "layers",
                "The three products of linear layers",
                _columns(
                    Column("layer", lambda r: r["layer"]),
                    Column("M x K -> N", lambda r: r["shape"]),
                    Column("product", lambda r: r["direction"]),
                ),
                layers,
                NOTE,
            ),
            Table("squares", "Squares", _columns(Column("M = N = K", lambda r: str(r["rows"]))), squares, NOTE),
        ],
    )
    if out is not None:
        result = replace(result, plots=[plot_squares(result, squares, out)])
    command.deliver(result, folder=out, json_file=json)


if __name__ == "__main__":
    command.run_command(main)
