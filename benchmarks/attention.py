"""Time attention, forward and backward, by each kernel that PyTorch has for it, and of packed sequences.

    python -m benchmarks.attention --out results --json results/attention.json

The kernels of SDPA, of which PyTorch chooses one, take turns over rows of one sequence each. Packed, the same tokens
are sequences of uneven lengths: in one kernel, and under a mask of tokens by tokens, as transformers makes it for SDPA.
`--flash FA3` activates FlashAttention 3, from its own wheel, as PyTorch's flash attention.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated

import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table, spread
from benchmarks.harness.timing import Variant, time_interleaved
from fp8booster.nn.fused.attention import attend, attend_packed, kernels
from fp8booster.nn.fused.packing import Sequences

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

CHOSEN, PACKED, MASKED = "as PyTorch chooses", "packed, one kernel", "packed, under a mask"
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash attention": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HEADS = ["32x32", "32x8"]
FORWARD = ": forward"


def uneven(tokens: int, mean: int) -> list[int]:
    """Return where sequences begin and end whose lengths alternate between half, once and one and a half times a
    mean.
    """
    boundaries = [0]
    while boundaries[-1] < tokens:
        length = mean * (1 + len(boundaries) % 3) // 2
        boundaries.append(min(tokens, boundaries[-1] + length))
    return boundaries


def mask_of(boundaries: list[int], device: torch.device) -> torch.Tensor:
    """Return the mask of tokens that attend to each other, [1, 1, tokens, tokens], bool."""
    lengths = torch.tensor([end - begin for begin, end in pairwise(boundaries)], device=device)
    sequence = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    return (sequence[:, None] == sequence).tril()[None, None]


def attentions(rows: int, tokens: int, mean: int, device: torch.device) -> dict[str, tuple[Attention, int, float]]:
    """By name: what attends, to how many rows, and the pairs of tokens of all of them."""
    boundaries = uneven(rows * tokens, mean)
    longest = max(end - begin for begin, end in pairwise(boundaries))
    sequences = Sequences(torch.tensor(boundaries, dtype=torch.int32, device=device), longest)
    mask = mask_of(boundaries, device)
    pairs, packed_pairs = rows * tokens**2 / 2, sum((end - begin) ** 2 for begin, end in pairwise(boundaries)) / 2

    def by(backend: SDPBackend) -> Attention:
        def attend_by(*heads: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return attend(*heads)

        return attend_by

    return {
        CHOSEN: (attend, rows, pairs),
        **{name: (by(backend), rows, pairs) for name, backend in BACKENDS.items()},
        PACKED: (lambda *heads: attend_packed(*heads, sequences), 1, packed_pairs),
        MASKED: (lambda *heads: attend(*heads, mask), 1, packed_pairs),
    }


def measure(
    heads: tuple[int, int],
    *,
    features: int,
    rows: int,
    tokens: int,
    mean: int,
    device: torch.device,
    rounds: int,
    sample_ms: float,
    left_out: dict[str, str],
) -> list[Record]:
    """A record for each kernel that runs; `left_out` gets the others, with the reason."""
    variants, pairs_of = [], {}
    for name, (attention, batch, pairs) in attentions(rows, tokens, mean, device).items():
        # as layers have them: heads side by side
        qkv = torch.randn(batch, rows * tokens // batch, sum(heads) + heads[1], features, device=device).bfloat16()
        inputs = [each.transpose(1, 2).requires_grad_() for each in qkv.split([heads[0], heads[1], heads[1]], 2)]

        def forward(_: int, attention: Attention = attention, inputs: list[torch.Tensor] = inputs) -> torch.Tensor:
            with torch.no_grad():
                return attention(*inputs)

        def both(_: int, attention: Attention = attention, inputs: list[torch.Tensor] = inputs) -> object:
            y = attention(*inputs)
            return torch.autograd.grad(y, inputs, inputs[0])

        try:
            both(0)
        except RuntimeError as error:
            left_out[f"{name}, {heads[0]} x {heads[1]} heads"] = str(error).strip().partition("\n")[0]
            continue
        variants += [Variant(name + FORWARD, forward), Variant(name, both)]
        pairs_of[name] = pairs
    timings = time_interleaved(variants, device=device, rounds=rounds, sample_ms=sample_ms)
    return [
        {
            "heads": list(heads),
            "features": features,
            "tokens": rows * tokens,
            "kernel": name,
            "forward_ms": timings[name + FORWARD].ms.as_record(),
            "ms": timings[name].ms.as_record(),
            # two products forward and five backward, of two operations each
            "tflops": 14 * pairs * heads[0] * features / timings[name].ms.median / 1e9,
        }
        for name, pairs in pairs_of.items()
    ]


COLUMNS = (
    Column("kernel", lambda r: r["kernel"]),
    Column("heads of queries x keys", lambda r: "{} x {}".format(*r["heads"])),
    Column("tokens", lambda r: str(r["tokens"])),
    Column("ms forward", lambda r: spread(r["forward_ms"], 3)),
    Column("ms forward and backward", lambda r: spread(r["ms"], 3)),
    Column("TFLOP/s", lambda r: f"{r['tflops']:.3g}"),
)


def main(
    heads: Annotated[list[str], typer.Option(help="Heads as QUERIESxKEYS; repeat the option.")] = HEADS,
    features: Annotated[int, typer.Option(min=8, help="Of a head.")] = 128,
    rows: Annotated[int, typer.Option(min=1, help="Rows of one sequence each.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Of a row.")] = 4096,
    mean: Annotated[int, typer.Option(min=2, help="Mean tokens of a packed sequence.")] = 1024,
    flash: Annotated[
        str | None, typer.Option(help="Implementation to activate as PyTorch's flash attention, as FA3.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each kernel.")] = 15,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds a sample lasts at least.")] = 20.0,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Time forward and backward of causal attention by each kernel, and of packed sequences."""
    shapes = [tuple(map(int, text.split("x"))) for text in heads if text.replace("x", "").isdecimal()]
    if len(shapes) < len(heads) or any(len(shape) != 2 or shape[0] % shape[1] for shape in shapes):
        raise typer.BadParameter(f"{', '.join(heads)}: write heads of queries and of keys as 32x8")
    target, gpu = command.measured_device(device)
    if flash is not None:
        try:
            torch.nn.attention.activate_flash_attention_impl(flash)
        except (ImportError, RuntimeError, ValueError) as error:
            command.refuse(f"{flash} cannot be activated: {error}")
    torch.manual_seed(0)
    records, left_out = [], {}
    sizes = {"features": features, "rows": rows, "tokens": tokens, "mean": mean}
    for shape in command.progress(shapes):
        records += measure(shape, **sizes, device=target, rounds=rounds, sample_ms=sample_ms, left_out=left_out)
    note = (
        f"Median [10th-90th percentile] of the rounds, BF16, causal. {rows} rows of {tokens} tokens; packed, a row of "
        f"sequences of {mean // 2} to {mean * 3 // 2} tokens. TFLOP/s count the pairs of tokens that attend, forward "
        f"and backward. PyTorch chooses {kernels(target, features=features)}."
    )
    result = Result(
        "attention",
        "Attention, forward and backward",
        environment.head(gpu, commit=commit),
        [Table("kernels", "By kernel", COLUMNS, records, note)],
        left_out,
    )
    command.deliver(result, folder=out, json_file=json)


if __name__ == "__main__":
    command.run_command(main)
