"""Time the training of a linear layer: forward and backward with casts, compared with BF16, the peers and the roofline.

    python -m benchmarks.linear --out results --json results/linear.json

A step is one forward and one backward through autograd, called from Python with nothing that waits for the GPU: the
host's time counts where it is the longer. The layers of one shape take turns with its three products and a copy, of
which the roofline is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
import typer
from torch import nn

from benchmarks.harness import command, environment
from benchmarks.harness.breakdown import NONE_SEEN, kernel_us
from benchmarks.harness.products import FAST, GRADIENT, Operands, ProductKind
from benchmarks.harness.results import Result
from benchmarks.harness.roofline import CopyBandwidth
from benchmarks.harness.shapes import DIRECTIONS, Workload, workloads
from benchmarks.harness.timing import Timing, Variant, input_sets, time_interleaved
from benchmarks.layers import LAYERS
from benchmarks.layers.layer import Inputs, Layer, step
from benchmarks.layers.peers import BASELINE
from benchmarks.layers.records import breakdown_records, layer_record
from benchmarks.layers.tables import BREAKDOWN, tables

MEASURED = [name for name in LAYERS if name != "bf16-compiled"]
MODELS = ["7b", "13b", "70b", "te"]
TOKENS = [8192, 16384]
NOT_PROFILED: list[str] = []
PROFILED_STEPS = 5
PRODUCTS: dict[str, ProductKind] = {"fprop": FAST, "dgrad": GRADIENT, "wgrad": GRADIENT}
"""What `FP8Config()` chooses for each direction."""


def product_variant(work: Workload, direction: str, device: torch.device) -> Variant:
    """One of a layer's products by itself."""
    rows, inner, columns = work.product(direction)
    sets = input_sets(inner * (rows + columns), device)
    kind = PRODUCTS[direction]
    calls = [Operands.random(rows, inner, columns, device).multiplication(kind) for _ in range(sets)]
    return Variant(direction, lambda i: calls[i](), sets, graph=True)


def layer_variant(name: str, layer: Layer, weight: nn.Parameter, inputs: Sequence[Inputs]) -> Variant:
    """Steps of one layer; the first has run, which compiles what compiles."""
    forward = layer.build(weight)
    step(forward, weight, inputs[0])
    return Variant(name, lambda i: step(forward, weight, inputs[i]), len(inputs))


def time_layers(
    work: Workload,
    names: Sequence[str],
    *,
    device: torch.device,
    rounds: int,
    sample_ms: float,
    copy: CopyBandwidth,
    left_out: dict[str, str],
    profiled: Sequence[str],
) -> tuple[dict[str, Timing], dict[str, dict[str, float]]]:
    """Every layer, its three products and the copy, interleaved; a peer that fails is noted in `left_out`.

    Returns:
        timings, and for each name in `profiled` the microseconds of the kernels of a step, measured after them.
    """
    torch._dynamo.reset()  # else the ninth shape of a function would run uncompiled
    weight = nn.Parameter(torch.randn(work.n, work.k, device=device, dtype=torch.bfloat16) * work.k**-0.5)
    sets = input_sets(2 * (work.m * (work.k + work.n) + work.n * work.k), device)
    inputs = [Inputs.random(work.m, work.k, work.n, device) for _ in range(sets)]
    variants = []
    for name in names:
        layer = LAYERS[name]
        try:
            variants.append(layer_variant(name, layer, weight, inputs))
        except Exception as error:
            if not layer.is_peer:
                raise
            reason = str(error).strip().partition("\n")[0]
            left_out[f"{layer.name}, {work.shape}"] = f"it failed: {type(error).__name__}: {reason}"
    variants += [product_variant(work, direction, device) for direction in DIRECTIONS]
    timings = time_interleaved([*variants, copy.variant], device=device, rounds=rounds, sample_ms=sample_ms)
    steps = {variant.name: variant.call for variant in variants if variant.name in profiled}
    kernels = {name: kernel_us(lambda step=step: step(0), PROFILED_STEPS) for name, step in steps.items()}
    left_out |= {f"kernels of {name}, {work.shape}": NONE_SEEN for name in kernels if not kernels[name]}
    return timings, {name: found for name, found in kernels.items() if found}


def main(
    layer: Annotated[
        list[str], typer.Option(help=f"What to measure in addition to bf16: {', '.join(LAYERS)}; repeat the option.")
    ] = MEASURED,
    models: command.Models = MODELS,
    tokens: command.Tokens = TOKENS,
    fused: Annotated[bool, typer.Option(help="q, k, v as one layer and gate, up as one, too.")] = False,
    profile: Annotated[
        list[str], typer.Option(help="Layers to break down into kernels; repeat the option.")
    ] = NOT_PROFILED,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each layer.")] = 9,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds a sample lasts at least.")] = 10.0,
    quick: command.Quick = False,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Time forward and backward of linear layers, compared with BF16, the peers and the roofline."""
    unknown = sorted({*layer, *profile} - set(LAYERS))
    if unknown:
        raise typer.BadParameter(f"no layer is called {unknown[0]!r}; use {', '.join(LAYERS)}")
    target, gpu = command.measured_device(device)
    if quick:
        models, tokens, rounds = models[:1], tokens[:1], 3
    torch.manual_seed(0)
    wanted = [name for name in LAYERS if name in (*layer, *profile, BASELINE)]
    missing = {name: LAYERS[name].why_missing() for name in wanted}
    names = [name for name in wanted if missing[name] is None]
    left_out = {LAYERS[name].name: reason for name, reason in missing.items() if reason is not None}
    copy = CopyBandwidth(target)
    records = []
    for work in command.progress(workloads(models, tokens, fused=fused)):
        timings, kernels = time_layers(
            work,
            names,
            device=target,
            rounds=rounds,
            sample_ms=sample_ms,
            copy=copy,
            left_out=left_out,
            profiled=profile,
        )
        records.append(layer_record(work, timings, kernels, copy.bytes_per_second(timings)))
    result = Result(
        "linear",
        "Forward and backward of a linear layer",
        environment.head(gpu, commit=commit),
        tables(records, names) + ([replace(BREAKDOWN, records=breakdown_records(records))] if profile else []),
        left_out,
    )
    command.deliver(result, folder=out, json_file=json)


if __name__ == "__main__":
    command.run_command(main)
