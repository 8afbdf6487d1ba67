"""Measure products where power limits the clock: time, clock and energy of each kind alone.

    python -m benchmarks.energy --models 13b --out results --json results/energy.json

Kinds that take turns share one clock, which hides that one of them draws more power. So each runs alone here, without a
pause, until power and clock have settled, and is counted then. In training, where the power limit holds for a whole
step, what a product adds to the step is its energy.
"""

from __future__ import annotations

import math
from typing import Annotated
from unittest.mock import patch

import torch
import typer

from benchmarks.harness import command, environment
from benchmarks.harness.products import BF16, Operands, ProductKind
from benchmarks.harness.results import Column, Record, Result, Table
from benchmarks.harness.shapes import DIRECTIONS, workloads
from benchmarks.harness.timing import Variant, input_sets, time_alone
from fp8booster import formats
from fp8booster.kernels import product
from fp8booster.monitor.power import PowerMeter

MODELS = ["7b", "13b"]
TOKENS = [8192]


KINDS = (
    BF16,
    ProductKind("E4M3 fast", "FP8", formats.E4M3, fast_accumulation=True),
    ProductKind("E4M3 fast by rows", "FP8", formats.E4M3, fast_accumulation=True, by_rows=True),
    ProductKind("E4M3", "FP8", formats.E4M3),
    ProductKind("E4M3 by rows", "FP8", formats.E4M3, by_rows=True),
    ProductKind("E5M2 fast", "FP8", formats.E5M2, fast_accumulation=True),
    ProductKind("E5M2", "FP8", formats.E5M2),
    ProductKind("E5M2 by rows", "FP8", formats.E5M2, by_rows=True),
)
"""The format is the first operand's, the second is E4M3. Without "fast", partial sums are promoted to FP32."""

NOTE = (
    "Milliseconds of one product that runs alone without a pause; the median clock of the processors and the "
    "mean power over that time, and energy, which is power times time: with the power limit reached it is "
    "what counts. As `torch._scaled_mm` takes them; by rows: the tensor's scale given once for each row, for "
    "which cuBLAS has other kernels."
)


def product_record(
    kind: ProductKind, rows: int, inner: int, columns: int, *, meter: PowerMeter, device: torch.device, seconds: float
) -> Record:
    """Measure one kind of product of one shape, or return the reason why it does not run."""
    sets = input_sets(inner * (rows + columns), device)
    operands = [Operands.random(rows, inner, columns, device) for _ in range(sets)]
    try:
        calls = [each.multiplication(kind) for each in operands]
        variant = Variant(kind.name, lambda i: calls[i](), sets, graph=True)
        with patch.object(product, "LARGE_PRODUCT", math.inf):  # else it gives rows the scale by itself
            alone = time_alone(variant, device=device, seconds=seconds)
    except (RuntimeError, ValueError) as error:
        return {"kind": kind.name, "failed": str(error).splitlines()[0]}
    draw = meter.draw(alone.begin, alone.end)
    record = {"kind": kind.name, "failed": None, "ms": alone.ms, "draw": None, "mj": None}
    return record if draw is None else record | {"draw": draw._asdict(), "mj": draw.watts * alone.ms}


def _shown(record: Record) -> str:
    if record["failed"] is not None:
        return "-"
    if record["draw"] is None:
        return f"{record['ms']:.3f}"
    draw = record["draw"]
    return f"{record['mj']:.0f} ({record['ms']:.3f}, {draw['mhz']:.0f}, {draw['watts']:.0f})"


def main(
    models: command.Models = MODELS,
    tokens: command.Tokens = TOKENS,
    seconds: Annotated[float, typer.Option(help="That each product runs before it is counted, and while it is.")] = 0.6,
    quick: command.Quick = False,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Measure time, clock and energy of BF16 and FP8 products, each alone."""
    target, gpu = command.measured_device(device)
    if quick:
        models, tokens, seconds = models[:1], tokens[:1], min(seconds, 0.2)
    torch.manual_seed(0)
    records, left_out = [], {}
    with PowerMeter(target) as meter:
        for work in command.progress(workloads(models, tokens, fused=True)):
            for direction in DIRECTIONS:
                found = [
                    product_record(kind, *work.product(direction), meter=meter, device=target, seconds=seconds)
                    for kind in KINDS
                ]
                left_out |= {
                    f"{each['kind']}, {direction} of {work.label}": each["failed"]
                    for each in found
                    if each["failed"] is not None
                }
                records.append(
                    {
                        "layer": work.label,
                        "shape": work.shape,
                        "direction": direction,
                        "kinds": {each["kind"]: each for each in found},
                    }
                )
    table = Table(
        "products",
        "mJ of a product (ms, MHz, W)",
        [
            Column("layer", lambda r: r["layer"]),
            Column("M x K -> N", lambda r: r["shape"]),
            Column("product", lambda r: r["direction"]),
            *(Column(kind.name, lambda r, name=kind.name: _shown(r["kinds"][name])) for kind in KINDS),
        ],
        records,
        NOTE,
    )
    head = environment.head(gpu, commit=commit)
    command.deliver(Result("energy", "Energy of products", head, [table], left_out), folder=out, json_file=json)


if __name__ == "__main__":
    command.run_command(main)
