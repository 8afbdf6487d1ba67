"""The collectives that are measured, each in BF16 by `torch.distributed` and in FP8 by `fp8booster.comm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

from fp8booster.comm.encoding import DEFAULT, Encoding
from fp8booster.comm.transport import one_tensor

PLAIN = "BF16"
ENCODED = "FP8"
ENCODED_BY_NODES = "FP8 by nodes"

Call = Callable[[], torch.Tensor]
"""Runs the collective once and returns what it wrote."""


@dataclass(frozen=True)
class Bench:
    """The group and the device on which the calls run."""

    group: dist.ProcessGroup
    device: torch.device
    encoding: Encoding = DEFAULT
    min_bytes: int | None = 0
    """Smallest payload of calls in FP8: 0 exchanges FP8 among all ranks; None follows the thresholds of `use_links`."""

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        """This one's number in the group."""
        return self.group.rank()

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
        """Return the group, and of `fp8booster.comm` what it takes beyond torch's arguments."""
        fp8 = {} if module is dist else {"encoding": self.encoding, "min_bytes": self.min_bytes}
        return {"group": self.group, **fp8}


def _all_reduce(module: ModuleType, bench: Bench, count: int, dtype: torch.dtype) -> Call:
    values, options = bench.values(count, dtype), bench.options(module)

    def call() -> torch.Tensor:
        module.all_reduce(values, bench.mean, **options)
        return values

    return call


def _reduce_scatter(module: ModuleType, bench: Bench, count: int, dtype: torch.dtype) -> Call:
    values, options = bench.values(count, dtype), bench.options(module)
    output = torch.empty(count // bench.ranks, device=bench.device, dtype=dtype)
    reduce = one_tensor("reduce_scatter", module)

    def call() -> torch.Tensor:
        reduce(output, values, bench.mean, **options)
        return output

    return call


def _all_gather(module: ModuleType, bench: Bench, count: int, dtype: torch.dtype) -> Call:
    values, options = bench.values(count // bench.ranks, dtype), bench.options(module)
    output = torch.empty(count, device=bench.device, dtype=dtype)
    gather = one_tensor("all_gather", module)

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
        module.broadcast(values, group_src=0, **options)
        return values

    return call


def _ring(module: ModuleType, bench: Bench, count: int, dtype: torch.dtype) -> Call:
    values, options = bench.values(count, dtype), bench.options(module)
    output = torch.empty_like(values)
    to, source = (dist.get_global_rank(bench.group, (bench.rank + step) % bench.ranks) for step in (1, -1))

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
