"""Adam's step over a rank's shards of LLaMA-7B: in one pass, with 8-bit moments, and by the optimizers of others.

    python -m benchmarks.adamw --out results --json results/adamw.json

With FP32 moments every variant divides gradients by a number on the device, as clipping does, and ends with the amax of
each shard. With 8-bit moments weights and gradients are BF16, and torchao's optimizers, which keep no more of a weight
than that, are what they are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated

import torch
import typer
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table, spread
from benchmarks.harness.roofline import CopyBandwidth
from benchmarks.harness.timing import Variant, time_interleaved
from fp8booster import optim
from fp8booster.kernels.adamw import AdamRates, AdamShards, update

LAYER = (4 * [4096 * 4096]) + 3 * [4096 * 11008]
"""Values of the matrices of one layer of LLaMA-7B."""

FP32_BYTES = 28
"""Of a value in FP32 and its moments, read and written, and of its gradient in FP32, read."""

EIGHT_BIT_BYTES = 14
"""Of a BF16 value, 16 bits of its master and two 8-bit moments, read and written, and of its BF16 gradient, read."""

RATES = AdamRates(1e-4, (0.9, 0.999), 1e-8, 0.01, decoupled=True)


ONE_PASS, EIGHT_BIT = "one pass", "8-bit moments, BF16 weights with 16 bits more"


def shards_of(ranks: int, layers: int, device: torch.device) -> AdamShards:
    """Return one rank's shards of some layers, with gradients in FP32."""
    counts = [count // ranks for count in LAYER] * layers

    def drawn() -> list[torch.Tensor]:
        return [0.01 * torch.randn(count, device=device) for count in counts]

    squares = [value.square() for value in drawn()]
    steps = [torch.full((), 10.0, device=device) for _ in counts]
    return AdamShards(drawn(), drawn(), drawn(), squares, steps)


def optimizer_of(shards: AdamShards, **options: bool) -> AdamW:
    """AdamW of torch over the values of some shards, with their gradients."""
    parameters = [nn.Parameter(value) for value in shards.values]
    for parameter, gradient in zip(parameters, shards.gradients, strict=True):
        parameter.grad = gradient
    return AdamW(parameters, lr=RATES.lr, weight_decay=RATES.weight_decay, **options)


def variants_of(shards: AdamShards, divisor: torch.Tensor) -> list[Variant]:
    """The ways to step, by name."""
    narrow = shards._replace(gradients=[gradient.bfloat16() for gradient in shards.gradients])
    fused, foreach = optimizer_of(shards, fused=True), optimizer_of(shards, foreach=True)
    fused.grad_scale, fused.found_inf = divisor, None

    def by_fused(_: int) -> object:
        fused.step()
        return torch._foreach_norm(list(shards.values), math.inf)

    def by_foreach(_: int) -> object:
        torch._foreach_div_(list(shards.gradients), divisor)
        foreach.step()
        return torch._foreach_norm(list(shards.values), math.inf)

    return [
        Variant(ONE_PASS, lambda _: update(shards, RATES, divisor)),
        Variant(f"{ONE_PASS}, BF16 gradients", lambda _: update(narrow, RATES, divisor)),
        Variant("torch, fused=True", by_fused),
        Variant("torch, foreach=True, its default", by_foreach),
        *(Variant(name, lambda _, optimizer=optimizer: optimizer.step()) for name, optimizer in narrow_of(shards)),
    ]


def narrow_of(shards: AdamShards) -> Iterator[tuple[str, Optimizer]]:
    """Optimizers with 8-bit moments over BF16 weights: ours, and torchao's where it is installed and on a GPU."""
    kinds: dict[str, type[Optimizer]] = {EIGHT_BIT: optim.AdamW}
    if find_spec("torchao") and shards.values[0].is_cuda:
        from torchao.optim import AdamW8bit, AdamWFp8

        kinds |= {"torchao AdamW8bit, BF16 weights": AdamW8bit, "torchao AdamWFp8, BF16 weights": AdamWFp8}
    for name, kind in kinds.items():
        parameters = [nn.Parameter(value.bfloat16()) for value in shards.values]
        for parameter, gradient in zip(parameters, shards.gradients, strict=True):
            parameter.grad = gradient.bfloat16()
        yield name, kind(parameters, lr=RATES.lr, weight_decay=RATES.weight_decay)


def fewest_bytes(way: str) -> int:
    """Return the fewest bytes that a step reads and writes for a value."""
    return EIGHT_BIT_BYTES if way == EIGHT_BIT else FP32_BYTES


def measure(ranks: int, layers: int, device: torch.device, *, rounds: int, sample_ms: float) -> list[Record]:
    """A record for each way to step."""
    shards, copy = shards_of(ranks, layers, device), CopyBandwidth(device)
    variants = variants_of(shards, torch.ones((), device=device))
    timings = time_interleaved([copy.variant, *variants], device=device, rounds=rounds, sample_ms=sample_ms)
    values = sum(value.numel() for value in shards.values)
    return [
        {
            "ranks": ranks,
            "way": variant.name,
            "values": values,
            "ms": timings[variant.name].ms.as_record(),
            "host_ms": timings[variant.name].host_ms.as_record(),
            "bytes_per_second": values * fewest_bytes(variant.name) / (timings[variant.name].ms.median * 1e-3),
            "copy_bytes_per_second": copy.bytes_per_second(timings),
            "over_one_pass": timings[variant.name].ms.median / timings[ONE_PASS].ms.median,
        }
        for variant in variants
    ]


COLUMNS = (
    Column("ranks", lambda r: str(r["ranks"])),
    Column("way", lambda r: r["way"]),
    Column("million values", lambda r: f"{r['values'] / 1e6:.0f}"),
    Column("ms", lambda r: spread(r["ms"], 2)),
    Column("ms of the host", lambda r: f"{r['host_ms']['median']:.2f}"),
    Column("GB/s of the fewest bytes", lambda r: f"{r['bytes_per_second'] / 1e9:.0f}"),
    Column("GB/s of a copy", lambda r: f"{r['copy_bytes_per_second'] / 1e9:.0f}"),
    Column("times one pass", lambda r: f"{r['over_one_pass']:.2f}"),
)
NOTE = (
    "Median [10th-90th percentile] of the rounds. The fewest bytes are 28 a value: FP32 values and moments, read and "
    "written, and FP32 gradients, read (with BF16 gradients 26), and 14 of ours with 8-bit moments."
)


def main(
    ranks: Annotated[list[int], typer.Option(help="Ranks that share the weights; repeat the option.")] = (2, 8),
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of LLaMA-7B.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each way.")] = 15,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds a sample lasts at least.")] = 20.0,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Time Adam's step with the amax of what it writes, in one pass and by torch."""
    target, gpu = command.measured_device(device)
    torch.manual_seed(0)
    records = [
        record for count in ranks for record in measure(count, layers, target, rounds=rounds, sample_ms=sample_ms)
    ]
    result = Result(
        "adamw",
        "Adam's step and the amax of new values",
        environment.head(gpu, commit=commit),
        [Table("steps", f"A rank's shards of {layers} layers of LLaMA-7B", COLUMNS, records, NOTE)],
    )
    command.deliver(result, folder=out, json_file=json)


if __name__ == "__main__":
    command.run_command(main)
