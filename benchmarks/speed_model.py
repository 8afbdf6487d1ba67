"""From which size on FP8 pays for a linear layer on this GPU, compared with `fp8booster.nn.linear.speed_model`.

    python -m benchmarks.speed_model --out results --json results/speed-model.json

Forward and backward of one layer in BF16 and in FP8, the weight cast already, timed on the GPU alone: it sleeps first,
so that the host has issued a whole burst before the GPU begins.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import product
from typing import Annotated

import torch
import typer
from torch import nn

from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table
from fp8booster import FP8Config, FP8Linear
from fp8booster.nn.linear.speed_model import MEASURED, speedup

TOKENS = [1024, 4096, 8192, 16384]
HIDDEN = [512, 1024, 1536, 2048, 3072, 4096]
BURST = 8
SLEEP_CYCLES = 40_000_000
"""About 20 ms at Hopper's clock: longer than a slow host takes to issue a burst."""


def step_of(layer: nn.Linear, rows: int) -> Callable[[], None]:
    """One forward and backward; a new tensor object each time, so that no cast is shared between steps."""
    options = {"device": layer.weight.device, "dtype": torch.bfloat16}
    x = torch.randn(rows, layer.in_features, **options)
    gradient = torch.randn(rows, layer.out_features, **options)

    def step() -> None:
        layer.weight.grad = None
        layer(x.detach().requires_grad_()).backward(gradient)

    return step


def gpu_us(step: Callable[[], None], device: torch.device, rounds: int) -> float:
    """Median microseconds that a step keeps the GPU busy."""
    step()
    samples = []
    for _ in range(rounds):
        first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
        if device.type == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES)
        first.record()
        for _ in range(BURST):
            step()
        last.record()
        last.synchronize()
        samples.append(1e3 * first.elapsed_time(last) / BURST)
    return statistics.median(samples)


def measure(rows: int, inputs: int, outputs: int, device: torch.device, rounds: int) -> Record:
    """Both layers at one size, and the model's ratio where this GPU's rates are known."""
    options = {"bias": False, "device": device, "dtype": torch.bfloat16}
    bf16 = gpu_us(step_of(nn.Linear(inputs, outputs, **options), rows), device, rounds)
    fp8_layer = FP8Linear(inputs, outputs, config=FP8Config(always=True), **options)
    fp8 = gpu_us(step_of(fp8_layer, rows), device, rounds)
    rates = MEASURED.get(torch.cuda.get_device_capability(device))
    model = None if rates is None else speedup(rows, inputs, outputs, rates)
    return record_of(rows, inputs, outputs, bf16, fp8, model)


def record_of(rows: int, inputs: int, outputs: int, bf16_us: float, fp8_us: float, model: float | None) -> Record:
    """Return the table's values of one size."""
    return {
        "rows": rows,
        "inputs": inputs,
        "outputs": outputs,
        "bf16_us": bf16_us,
        "fp8_us": fp8_us,
        "speedup": bf16_us / fp8_us,
        "model": model,
    }


COLUMNS = (
    Column("M x K -> N", lambda r: f"{r['rows']} x {r['inputs']} -> {r['outputs']}"),
    Column("BF16 us", lambda r: f"{r['bf16_us']:.1f}"),
    Column("FP8 us", lambda r: f"{r['fp8_us']:.1f}"),
    Column("measured speed-up", lambda r: f"{r['speedup']:.2f}"),
    Column("model", lambda r: "" if r["model"] is None else f"{r['model']:.2f}"),
    Column("chosen", lambda r: "FP8" if r["model"] is None or r["model"] > 1 else "BF16"),
)
NOTE = "Median of the rounds; forward and backward, casts of x and dy included, the host's time left out."


def main(
    tokens: Annotated[list[int], typer.Option(help="M; repeat the option.")] = TOKENS,
    hidden: Annotated[list[int], typer.Option(help="h of the layers h -> h, h -> 4h and 4h -> h; repeat it.")] = HIDDEN,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each layer.")] = 5,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
) -> None:
    """Find from which size on FP8 pays, and compare the model that chooses."""
    device, gpu = command.measured_device("cuda")
    torch.manual_seed(0)
    sizes = [
        (rows, inputs, outputs)
        for rows, size in product(tokens, hidden)
        for inputs, outputs in ((size, size), (size, 4 * size), (4 * size, size))
    ]
    records = [measure(*size, device, rounds) for size in command.progress(sizes)]
    result = Result(
        "speed-model",
        "From which size on FP8 pays",
        environment.head(gpu, commit=commit),
        [Table("layers", "Time on the GPU", COLUMNS, records, NOTE)],
    )
    command.deliver(result, folder=out, json_file=json)


if __name__ == "__main__":
    command.run_command(main)
