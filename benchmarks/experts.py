"""Time the products of a mixture's experts: expert by expert or grouped, in BF16 or in FP8.

    python -m benchmarks.experts --out results --json results/experts.json

Tokens are routed unevenly. Each way is compared with FP32 before it is timed; implementations are interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated

import torch
import typer

from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table, spread
from benchmarks.harness.timing import Timing, Variant, time_interleaved
from benchmarks.routed.implementations import BASELINE, KINDS, Candidate, Implementation
from benchmarks.routed.whole import WHOLE_KINDS, WholeWork
from benchmarks.routed.work import LAYERS, Products, Work, relative_errors

MEASURED = ["mixtral", "deepseek"]
TOKENS = [8192, 16384]
PRODUCTS: dict[str, tuple[int, Callable[[Implementation], object]]] = {
    "fprop": (1, Implementation.forward),
    "fprop, dgrad, wgrad": (3, Implementation.step),
}
"""What is timed: how many products, and what computes them."""


def checked(kind: Candidate, work: Work | WholeWork, exact: Products) -> tuple[Implementation | None, Record]:
    """A way that has run once, or None, and its errors, or why it failed."""
    try:
        way = kind.make(work)
        errors = relative_errors(way.products(), exact)
    except Exception as error:  # a kernel that is not there, memory, a size that it does not take
        return None, {"failed": reason_of(error)}
    wrong = {product: error for product, error in errors.items() if not error <= kind.tolerance}
    if wrong:
        shown = ", ".join(f"{product} {error:.2g}" for product, error in wrong.items())
        return None, {"failed": f"largest errors over the largest values: {shown}", "errors": errors}
    return way, {"failed": None, "errors": errors}


def reason_of(error: Exception) -> str:
    """An error as one short line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:160]}"


def measure(
    work: Work | WholeWork, kinds: Mapping[str, Candidate], *, device: torch.device, rounds: int, sample_ms: float
) -> list[Record]:
    """A record for each way and for each of `PRODUCTS`."""
    exact = work.reference()
    found = {name: checked(kind, work, exact) for name, kind in kinds.items()}
    del exact
    implementations = {name: way for name, (way, _) in found.items() if way is not None}
    records = []
    for what, (count, call) in PRODUCTS.items():
        variants = [Variant(name, partial(_call, way, call)) for name, way in implementations.items()]
        timings, reason = _timings(variants, device, rounds, sample_ms)
        for name, (_, outcome) in found.items():
            record = {
                "layer": work.layer.label,
                "shape": work.layer.shape,
                "tokens": work.tokens,
                "loads": [min(work.loads), max(work.loads)],
                "products": what,
                "way": name,
                "label": kinds[name].label,
                **outcome,
            }
            if name in timings:
                record |= _rates(timings[name], timings.get(BASELINE), count * work.flops)
            elif record["failed"] is None:
                record["failed"] = reason
            records.append(record)
    return records


def _call(way: Implementation, call: Callable[[Implementation], object], _: int) -> object:
    return call(way)


def _timings(
    variants: list[Variant], device: torch.device, rounds: int, sample_ms: float
) -> tuple[dict[str, Timing], str | None]:
    """All, interleaved, or none and why."""
    try:
        return time_interleaved(variants, device=device, rounds=rounds, sample_ms=sample_ms), None
    except Exception as error:
        return {}, reason_of(error)


def _rates(timing: Timing, baseline: Timing | None, flops: int) -> Record:
    return {
        "ms": timing.ms.as_record(),
        "host_ms": timing.host_ms.as_record(),
        "tflops": flops / timing.ms.median / 1e9,
        "speed": None if baseline is None else baseline.ms.over(timing.ms).as_record(),
    }


def _errors(record: Record) -> str:
    errors = record.get("errors")
    return "-" if errors is None else ", ".join(f"{errors[name]:.1e}" for name in Products._fields)


COLUMNS = [
    Column("layer", lambda r: f"{r['layer']}, {r['shape']}"),
    Column("tokens (of an expert)", lambda r: "{} ({} to {})".format(r["tokens"], *r["loads"])),
    Column("products", lambda r: r["products"]),
    Column("way", lambda r: r["label"]),
    Column("ms", lambda r: f"failed: {r['failed']}" if r["failed"] else spread(r["ms"], 3)),
    Column("host ms", lambda r: f"{r['host_ms']['median']:.3f}" if "ms" in r else "-"),
    Column("TFLOP/s", lambda r: f"{r['tflops']:.0f}" if "ms" in r else "-"),
    Column("speed over BF16, one by one", lambda r: spread(r["speed"], 2) if r.get("speed") else "-"),
    Column("errors of y, dx, dw", _errors),
]
NOTE = (
    "One linear layer of all experts, called from Python through autograd: median [10th-90th percentile] of the "
    "rounds. Tokens lie sorted by expert; the grouped FP8 product lays them out with the zeros that it needs behind "
    "each expert's, and its results as the tokens were, while expert by expert puts the results together, as "
    "`nn.experts.run_experts` does. Casts of inputs and gradients are included, those of weights "
    "where it says so. Expert by expert, gradients are E5M2 and each expert's tensors have a scale; grouped, all "
    "is E4M3, for the kernel takes no other, and all experts share a scale. fprop is that of training, which "
    "keeps what backward needs. Errors: the largest difference from FP32 over the largest value. Rates count no "
    "padding."
)

WHOLE_NOTE = (
    "Gate, up, SwiGLU and down of all experts by `nn.experts.run_experts`, from tokens sorted by expert to results in "
    "the same order; weights are cast once. Grouped: for any number of tokens, where training chooses by "
    "`nn.grouped_experts.ONE_BY_ONE_FROM`. fprop, dgrad and wgrad are those of the three layers; dw is that of gate."
)


def main(
    layer: Annotated[list[str], typer.Option(help=f"{', '.join(LAYERS)}; repeat the option.")] = MEASURED,
    tokens: Annotated[list[int], typer.Option(help="Routed tokens; repeat the option.")] = TOKENS,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each way.")] = 7,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds a sample lasts at least.")] = 20.0,
    quick: command.Quick = False,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Time the products of experts, expert by expert and grouped."""
    unknown = sorted(set(layer) - set(LAYERS))
    if unknown:
        raise typer.BadParameter(f"no layer is called {unknown[0]!r}; use {', '.join(LAYERS)}")
    target, gpu = command.measured_device(device)
    if quick:
        tokens, rounds = tokens[:1], 3
    torch.manual_seed(0)
    records, whole = [], []
    how = {"device": target, "rounds": rounds, "sample_ms": sample_ms}
    for name, count in command.progress([(name, count) for name in layer for count in tokens]):
        records += measure(Work.random(LAYERS[name], count, target), KINDS, **how)
        whole += measure(WholeWork.random(LAYERS[name], count, target), WHOLE_KINDS, **how)
    result = Result(
        "experts",
        "The products of experts",
        environment.head(gpu, commit=commit),
        [
            Table("experts", "Expert by expert and grouped", COLUMNS, records, NOTE),
            Table("whole", "Whole experts", COLUMNS, whole, WHOLE_NOTE),
        ],
    )
    command.deliver(result, folder=out, json_file=json)


if __name__ == "__main__":
    command.run_command(main)
