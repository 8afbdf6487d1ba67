"""Measure the errors of fast and exact sums in Hopper's FP8 products, compared with those of rounding to FP8.

    python -m benchmarks.accumulation --out results --json results/accumulation.json

Hopper's tensor cores add FP8 products in fewer bits than FP32 has. The exact kind moves its partial sums to FP32 every
so often, the fast kind at the end. Each product is compared, at some of its rows, with FP64 sums of the BF16 operands
and of their FP8 values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
import typer

from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table
from fp8booster import formats
from fp8booster.kernels.product import product
from fp8booster.scaling import INPUT, WEIGHT, RealTime
from fp8booster.tensor import QuantizedMatrix

SHAPES = {"q+k+v": (4096, 12288), "gate+up": (4096, 22016), "down": (11008, 4096)}
"""K and N of LLaMA-7B's layers."""

ROWS = 256
"""Rows of a product that are computed in FP64 too."""


class Data(NamedTuple):
    """A distribution of operands."""

    name: str
    draw: Callable[..., torch.Tensor]


def heavy_tailed(*shape: int, device: torch.device) -> torch.Tensor:
    """Normal values over a few powers of two, as activations and gradients have them."""
    return torch.randn(shape, device=device) * torch.exp(1.5 * torch.randn(shape, device=device))


DATA = (Data("normal", torch.randn), Data("heavy tails", heavy_tailed), Data("all of one sign", torch.rand))


def operands(
    kind: str, data: Data, shape: tuple[int, int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two matrices, in BF16, whose rows one of a layer's products multiplies; shape is (M, K, N)."""
    tokens, inputs, outputs = shape
    x, w, dy = (
        data.draw(*size, device=device).bfloat16() for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    pairs = {"fprop": (x, w), "dgrad": (dy, w.t()), "wgrad": (dy.t(), x.t())}
    return tuple(matrix.contiguous() for matrix in pairs[kind])


def errors(kind: str, a: torch.Tensor, b: torch.Tensor) -> Record:
    """Relative errors (of the Frobenius norm) of a @ b.T in FP8, and by which part fast sums shrink it.

    Args:
        kind: "fprop", "dgrad" or "wgrad", which says the formats.
        a, b: [R, K] and [C, K], BF16.
    """
    a8 = RealTime().cast(INPUT, a, formats.E4M3 if kind == "fprop" else formats.E5M2)
    b8 = RealTime().cast(WEIGHT, b, formats.E4M3)
    rows = torch.linspace(0, len(a) - 1, min(ROWS, len(a)), device=a.device).long()
    truth = a[rows].double() @ b.double().t()
    of_fp8 = _values(a8)[rows] @ _values(b8).t()
    found = {
        fast: product(
            a8.data, b8.data, a8.inverse_scale, b8.inverse_scale, out_dtype=torch.bfloat16, fast_accumulation=fast
        )[rows].double()
        for fast in (False, True)
    }
    return {
        "rounding": _error(of_fp8, truth),
        "exact": _error(found[False], truth),
        "fast": _error(found[True], truth),
        "exact_sums": _error(found[False], of_fp8),
        "fast_sums": _error(found[True], of_fp8),
        "shrinks": 1 - ((found[True] * of_fp8).sum() / of_fp8.square().sum()).item(),
    }


def _values(matrix: QuantizedMatrix) -> torch.Tensor:
    return matrix.data.double() * matrix.inverse_scale.double()


def _error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return ((found - truth).norm() / truth.norm()).item()


COLUMNS = (
    Column("operands", lambda r: r["data"]),
    Column("layer", lambda r: f"{r['layer']}: {r['tokens']} x {r['inputs']} -> {r['outputs']}"),
    Column("product", lambda r: r["kind"]),
    Column("rounding to FP8 alone", lambda r: f"{r['rounding']:.5f}"),
    Column("FP8, exact", lambda r: f"{r['exact']:.5f}"),
    Column("FP8, fast", lambda r: f"{r['fast']:.5f}"),
    Column("exact sums alone", lambda r: f"{r['exact_sums']:.5f}"),
    Column("fast sums alone", lambda r: f"{r['fast_sums']:.5f}"),
    Column("fast sums shrink by", lambda r: f"{r['shrinks']:.5f}"),
)
NOTE = (
    "Relative errors of the Frobenius norm. The first three are over FP64 sums of the BF16 operands, the next two "
    "over FP64 sums of the FP8 values; rounding the result to BF16 is in all but the first (0.0017)."
)


def main(
    tokens: Annotated[int, typer.Option(help="M, the tokens of a batch.")] = 8192,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
) -> None:
    """Measure what fast and exact accumulation lose."""
    device, gpu = command.measured_device("cuda")
    torch.manual_seed(0)
    records = [
        {
            "data": data.name,
            "layer": layer,
            "tokens": tokens,
            "inputs": inputs,
            "outputs": outputs,
            "kind": kind,
            **errors(kind, *operands(kind, data, (tokens, inputs, outputs), device)),
        }
        for data in DATA
        for layer, (inputs, outputs) in SHAPES.items()
        for kind in ("fprop", "dgrad", "wgrad")
    ]
    result = Result(
        "accumulation",
        "What fast accumulation loses",
        environment.head(gpu, commit=commit),
        [Table("products", "Errors of LLaMA-7B's products", COLUMNS, records, NOTE)],
    )
    command.deliver(result, folder=out, json_file=json)


if __name__ == "__main__":
    command.run_command(main)
