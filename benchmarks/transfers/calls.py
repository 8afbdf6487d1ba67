"""The variants of collectives that are compared: those of `doctor --nodes`, and a gather that stays in FP8."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.cli.doctor.calls import COLLECTIVES, ENCODED, PLAIN, Bench, Call
from fp8booster.comm.transport import one_tensor

KEPT = "FP8, not decoded"


def gather_without_decoding(bench: Bench, count: int) -> Call:
    """Encode and gather, as where the gathered values stay in FP8: weights, for instance."""
    values = bench.values(count // bench.ranks, torch.bfloat16)
    layout = bench.encoding.layout(values.numel())
    own = torch.empty(layout.bytes, dtype=torch.uint8, device=bench.device)
    gathered = torch.empty(bench.ranks * layout.bytes, dtype=torch.uint8, device=bench.device)
    gather = one_tensor("all_gather")

    def call() -> torch.Tensor:
        bench.encoding.encode(values, own, layout)
        gather(gathered, own)
        return gathered

    return call


def calls(collective: str, bench: Bench, count: int) -> dict[str, Call]:
    """Every variant of a collective over `count` values on the larger side."""
    build = COLLECTIVES[collective]
    variants = {PLAIN: build(dist, bench, count, torch.bfloat16), ENCODED: build(comm, bench, count, torch.bfloat16)}
    if collective == "all_gather_into_tensor":
        variants[KEPT] = gather_without_decoding(bench, count)
    return variants


def errors(collective: str, bench: Bench, count: int) -> dict[str, float]:
    """Root mean square error over that of the result, each variant against the plain collective of FP32 values."""
    build = COLLECTIVES[collective]
    exact = build(dist, bench, count, torch.float32)()
    found = {}
    for name, module in ((PLAIN, dist), (ENCODED, comm)):
        found[name] = relative_error(build(module, bench, count, torch.bfloat16)(), exact)
    return found


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the root mean square error over that of the exact values."""
    return ((result.float() - exact).square().mean() / exact.square().mean()).sqrt().item()
