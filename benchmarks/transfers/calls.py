"""The collectives that are measured, each in BF16 by `torch.distributed` and in FP8 by `fp8booster.comm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.comm import Encoding

PLAIN = "BF16"
ENCODED = "FP8"
KEPT = "FP8, not decoded"

Call = Callable[[], torch.Tensor]
"""Runs the collective once and returns what it wrote."""


@dataclass(frozen=True)
class Bench:
    """The group and the device on which the calls run."""

    ranks: int
    rank: int
    device: torch.device
    encoding: Encoding

    @property
    def mean(self) -> dist.ReduceOp.RedOpType:
        """The reduction: a mean, so that repeated calls stay finite. gloo has none and sums."""
        return dist.ReduceOp.SUM if self.device.type == "cpu" else dist.ReduceOp.AVG

    def values(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Normally distributed, other ones on every rank, the same in every dtype."""
        generator = torch.Generator(self.device).manual_seed(self.rank)
        values = torch.randn(count, device=self.device, dtype=torch.bfloat16, generator=generator)
        return values.to(dtype)

    def options(self, module: ModuleType) -> dict[str, object]:
        """Return the arguments of `fp8booster.comm` beyond torch's: FP8 at any size."""
        if module is dist:
            return {}
        return {"encoding": self.encoding, "min_bytes": 0}


def _all_reduce(module: ModuleType, bench: Bench, count: int, dtype: torch.dtype) -> Call:
    values, options = bench.values(count, dtype), bench.options(module)

    def call() -> torch.Tensor:
        module.all_reduce(values, bench.mean, **options)
        return values

    return call


def _reduce_scatter(module: ModuleType, bench: Bench, count: int, dtype: torch.dtype) -> Call:
    values, options = bench.values(count, dtype), bench.options(module)
    output = torch.empty(count // bench.ranks, device=bench.device, dtype=dtype)
    reduce = _newest(module, "reduce_scatter_single", "reduce_scatter_tensor")

    def call() -> torch.Tensor:
        reduce(output, values, bench.mean, **options)
        return output

    return call


def _all_gather(module: ModuleType, bench: Bench, count: int, dtype: torch.dtype) -> Call:
    values, options = bench.values(count // bench.ranks, dtype), bench.options(module)
    output = torch.empty(count, device=bench.device, dtype=dtype)
    gather = _newest(module, "all_gather_single", "all_gather_into_tensor")

    def call() -> torch.Tensor:
        gather(output, values, **options)
        return output

    return call


def _all_to_all(module: ModuleType, bench: Bench, count: int, dtype: torch.dtype) -> Call:
    values, options = bench.values(count, dtype), bench.options(module)
    output = torch.empty_like(values)

    def call() -> torch.Tensor:
        module.all_to_all_single(output, values, **options)
        return output

    return call


def _broadcast(module: ModuleType, bench: Bench, count: int, dtype: torch.dtype) -> Call:
    values, options = bench.values(count, dtype), bench.options(module)

    def call() -> torch.Tensor:
        module.broadcast(values, 0, **options)
        return values

    return call


def _ring(module: ModuleType, bench: Bench, count: int, dtype: torch.dtype) -> Call:
    values, options = bench.values(count, dtype), bench.options(module)
    output = torch.empty_like(values)
    to, source = (bench.rank + 1) % bench.ranks, (bench.rank - 1) % bench.ranks

    def call() -> torch.Tensor:
        works = module.batch_isend_irecv(
            [module.P2POp(module.isend, values, to, **options), module.P2POp(module.irecv, output, source, **options)]
        )
        for work in works:
            work.wait()
        return output

    return call


COLLECTIVES: dict[str, Callable[[ModuleType, Bench, int, torch.dtype], Call]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_gather_into_tensor": _all_gather,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "send": _ring,
}
"""By the name under which `fp8booster.comm.statistics` counts them; "send" is a ring of batched sends and receives."""


def gather_without_decoding(bench: Bench, count: int) -> Call:
    """Encode and gather, as where the gathered values stay in FP8: weights, for instance."""
    values = bench.values(count // bench.ranks, torch.bfloat16)
    layout = bench.encoding.even(values.numel())
    own = torch.empty(layout.bytes, dtype=torch.uint8, device=bench.device)
    gathered = torch.empty(bench.ranks * layout.bytes, dtype=torch.uint8, device=bench.device)
    gather = _newest(dist, "all_gather_single", "all_gather_into_tensor")

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
        result = build(module, bench, count, torch.bfloat16)()
        found[name] = ((result.float() - exact).square().mean() / exact.square().mean()).sqrt().item()
    return found


def _newest(module: ModuleType, name: str, older: str) -> Callable[..., object]:
    """A function by its name since torch 2.13, or before."""
    return getattr(module, name, None) or getattr(module, older)
