"""Measure the errors of other channels beside a large channel of SwiGLU's output, by the scales of the down projection.

    python -m benchmarks.outliers --device cpu --out results

One row of the weights of gate and of up is so many times as large as the others, as training aligns them (Fishman et
al., arXiv 2409.12517). Then SwiGLU's output has a channel that is larger by nearly the square.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
import typer

from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table
from fp8booster import FP8Config
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT, WEIGHT
from fp8booster.scaling.smooth_swiglu import ChannelFactors

SMOOTH = "tensorwise, smooth SwiGLU"
RECIPES = {
    "tensorwise": FP8Config(),
    SMOOTH: FP8Config(scaling="smooth-swiglu"),
    "rowwise": FP8Config(scaling="rowwise"),
    "blockwise": FP8Config(scaling="blockwise"),
}
FACTORS = (1, 20, 200, 2000)
PLANTED = 5
"""The channel."""


def operands(factor: float, tokens: int, hidden: int, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The down projection's input [M, F] and weight [K, F], in BF16; a row of gate and up is `factor` times larger."""
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden)
    gate, up = (torch.randn(features, hidden) * hidden**-0.5 for _ in range(2))
    for weight in (gate, up):
        weight[PLANTED] *= factor
    down = torch.randn(hidden, features) * features**-0.5
    return (F.silu(x @ gate.t()) * (x @ up.t())).bfloat16(), down.bfloat16()


def record_of(recipe: str, factor: float, tokens: int, hidden: int, features: int, device: torch.device) -> Record:
    """Signal over noise, in dB, of all channels but the large one."""
    config = RECIPES[recipe]
    casts = Casts(config, ChannelFactors if recipe == SMOOTH else None)
    y, w = (each.to(device) for each in operands(factor, tokens, hidden, features))
    for _ in range(2):  # the first step has no factors
        weight = casts.quantize(WEIGHT, w, transposed=True)
        input = casts.quantize(INPUT, y, transposed=True)
    values = {
        "fprop": (y, input.dequantize(*y.shape)),
        "wgrad": (y, input._replace(data=input.data.new_empty(0)).dequantize(*y.shape)),
        "weight": (w, weight.dequantize(*w.shape)),
    }
    others = torch.arange(features, device=device) != PLANTED
    return {
        "recipe": recipe,
        "factor": factor,
        "larger": (y[:, PLANTED].abs().max() / y[:, others].abs().amax(0).median()).item(),
        **{name: _signal_to_noise(exact[:, others], found[:, others]) for name, (exact, found) in values.items()},
    }


def _signal_to_noise(exact: torch.Tensor, found: torch.Tensor) -> float:
    exact = exact.double()
    return 10 * math.log10(exact.square().sum() / (found.double() - exact).square().sum())


COLUMNS = (
    Column("rows of gate and up", lambda r: f"{r['factor']} x"),
    Column("amax of the channel over others'", lambda r: f"{r['larger']:,.0f}"),
    Column("scales", lambda r: r["recipe"]),
    Column("input in fprop, dB", lambda r: f"{r['fprop']:.1f}"),
    Column("input in wgrad, dB", lambda r: f"{r['wgrad']:.1f}"),
    Column("weight, dB", lambda r: f"{r['weight']:.1f}"),
)


def main(
    tokens: Annotated[int, typer.Option(help="Rows of the input.")] = 2048,
    hidden: Annotated[int, typer.Option(help="Of the model.")] = 512,
    features: Annotated[int, typer.Option(help="Of the feed-forward block.")] = 1408,
    quick: command.Quick = False,
    folder: command.Folder = None,
    json_file: command.JsonFile = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Measure what a large channel of the down projection's input leaves of the others."""
    target, gpu = command.measured_device(device)
    if quick:
        tokens, hidden, features = 128, 128, 256
    records = [record_of(recipe, factor, tokens, hidden, features, target) for factor in FACTORS for recipe in RECIPES]
    sizes = f"{tokens} tokens, {features} -> {hidden} features"
    note = f"Signal over noise of all channels but the large one, of BF16 operands; {sizes}."
    table = Table("outliers", "What FP8 keeps of the other channels", COLUMNS, records, note)
    result = Result("outliers", "A large channel of SwiGLU", environment.head(gpu, commit=commit), [table])
    command.deliver(result, folder=folder, json_file=json_file)


if __name__ == "__main__":
    command.run_command(main)
