"""Time inputs that backward computes again and casts, in one pass and in two: recomputation and 8-bit saved
activations.

    python -m benchmarks.made_again --out results --json results/made-again.json

SwiGLU of gate and up, which lie side by side, and an RMS norm, from BF16 or from 8-bit codes. One pass writes the
transpose in FP8 by an amax that is known. Two write what is made in BF16 first. GPU times replay from CUDA graphs;
variants take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer

from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table, microseconds
from benchmarks.harness.roofline import CopyBandwidth
from benchmarks.harness.timing import Timing, Variant, input_sets, time_interleaved
from fp8booster import formats
from fp8booster.kernels.activation import Activated, activate, activate_transposed
from fp8booster.kernels.cast import cast
from fp8booster.kernels.group_codes import GroupCodes, encode_groups, values_of
from fp8booster.kernels.row_norm import Normalized, row_norm, row_norm_transposed

Ways = dict[str, list[Callable[[], object]]]
"""By "one pass" and "two", the work on each input set."""

EPS = 1e-5


def swiglu(tokens: int, features: int, coded: bool, sets: int, device: torch.device) -> Ways:
    """SwiGLU's output, [tokens, features]."""
    one, two = [], []
    for _ in range(sets):
        parts = torch.randn(tokens, 2 * features, device=device, dtype=torch.bfloat16).chunk(2, 1)
        amax = activate(*parts).amax
        given = [encode_groups(part) for part in parts] if coded else parts
        one.append(partial(activate_transposed, *given, amax=amax, dtype=formats.E4M3))
        two.append(partial(_cast_of, partial(activate, *given)))
    return {"one pass": one, "two": two}


def norm(tokens: int, features: int, coded: bool, sets: int, device: torch.device) -> Ways:
    """An RMS norm's output, [tokens, features]."""
    one, two = [], []
    weight = torch.ones(features, device=device, dtype=torch.bfloat16)
    for _ in range(sets):
        h = torch.randn(tokens, features, device=device, dtype=torch.bfloat16)
        made = row_norm(h, weight, EPS)
        given = encode_groups(h) if coded else h
        one.append(partial(row_norm_transposed, given, weight, made.inverse_rms, amax=made.amax, dtype=formats.E4M3))
        two.append(partial(_cast_of, partial(_normalized, given, weight)))
    return {"one pass": one, "two": two}


def _normalized(given: torch.Tensor | GroupCodes, weight: torch.Tensor) -> Normalized:
    rows = given if isinstance(given, torch.Tensor) else values_of(given).to(given.dtype)
    return row_norm(rows, weight, EPS)


def _cast_of(make: Callable[[], Activated | Normalized]) -> tuple[torch.Tensor, ...]:
    made = make()
    return cast(made.y, formats.E4M3, plain=False, transposed=True, amax=made.amax)


KINDS: dict[str, tuple[Callable[[int, int, bool, int, torch.device], Ways], int]] = {
    "SwiGLU": (swiglu, 2),
    "norm": (norm, 1),
}
"""What makes the work, and how many values it reads for one that it writes."""


def time_shape(
    kind: str, tokens: int, features: int, coded: bool, *, device: torch.device, rounds: int, sample_ms: float
) -> Record:
    """One and two passes over one shape, and a copy, interleaved."""
    make, read = KINDS[kind]
    copy = CopyBandwidth(device)
    moved = tokens * features * (read * (1 if coded else 2) + 1)
    sets = input_sets(moved, device)
    ways = make(tokens, features, coded, sets, device)
    variants = [copy.variant]
    for name, calls in ways.items():
        variants.append(Variant(name, lambda i, calls=calls: calls[i](), sets, graph=True))
    timings: dict[str, Timing] = time_interleaved(variants, device=device, rounds=rounds, sample_ms=sample_ms)
    bandwidth = copy.bytes_per_second(timings)
    return {
        "kind": kind,
        "shape": [tokens, features],
        "coded": coded,
        "bytes": moved,
        "ms": {name: timings[name].ms.as_record() for name in ways},
        "copy_bytes_per_second": bandwidth,
        "floor_ms": 1e3 * moved / bandwidth,
    }


COLUMNS = (
    Column("made again", lambda r: r["kind"]),
    Column("from", lambda r: "8-bit codes" if r["coded"] else "BF16"),
    Column("output", lambda r: "{} x {}".format(*r["shape"])),
    Column("one pass, us", lambda r: microseconds(r["ms"]["one pass"])),
    Column("two passes, us", lambda r: microseconds(r["ms"]["two"])),
    Column("two over one", lambda r: f"{r['ms']['two']['median'] / r['ms']['one pass']['median']:.2f}"),
    Column("floor us", lambda r: f"{1e3 * r['floor_ms']:.1f}"),
    Column("one pass over floor", lambda r: f"{r['ms']['one pass']['median'] / r['floor_ms']:.2f}"),
)
NOTE = (
    "Median [10th-90th percentile] of the rounds. The floor is what one pass reads and writes, but for codes' amaxes, "
    "at the bandwidth of a 1 GiB copy measured interleaved. From a norm's codes two passes decode by PyTorch first."
)
SHAPES = {"SwiGLU": (11008, 13824), "norm": (4096, 5120)}
"""Features of LLaMA 7B and 13B."""


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Rows of what is made.")] = 8192,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each piece of work.")] = 15,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds a sample lasts at least.")] = 4.0,
    quick: command.Quick = False,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Time SwiGLU and norms that are made again as a transpose in FP8, in one pass and in two."""
    target, gpu = command.measured_device(device)
    if quick:
        tokens, rounds = min(tokens, 64), 3
    torch.manual_seed(0)
    cases = [(kind, size, coded) for kind, sizes in SHAPES.items() for size in sizes for coded in (False, True)]
    records = [
        time_shape(kind, tokens, features, coded, device=target, rounds=rounds, sample_ms=sample_ms)
        for kind, features, coded in command.progress(cases)
    ]
    result = Result(
        "made-again",
        "What backward makes again, in one pass and in two",
        environment.head(gpu, commit=commit),
        [Table("made again", "Time", COLUMNS, records, NOTE)],
    )
    command.deliver(result, folder=out, json_file=json)


if __name__ == "__main__":
    command.run_command(main)
