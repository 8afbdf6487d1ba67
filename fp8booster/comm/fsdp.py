"""Parameters and gradients of FSDP2 in FP8, through its own extension points.

    fully_shard(model)
    fp8booster.comm.compress_fsdp(model)

Those points, in torch.distributed.fsdp._fully_shard._fsdp_api, are an `AllGather` and a `ReduceScatter`, each of which
allocates its buffers and is called in place of the plain collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Work
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from fp8booster.comm.encoding import DEFAULT, Encoding
from fp8booster.comm.gathers import all_gather_into_tensor
from fp8booster.comm.reductions import reduce_scatter_tensor
from fp8booster.comm.threshold import Op


class _FP8Comm:
    """What gather and reduction share: settings, and buffers from the caching allocator."""

    def __init__(self, encoding: Encoding = DEFAULT, min_bytes: int | None = None) -> None:
        self.encoding = encoding
        self.min_bytes = min_bytes

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the plain values."""
        return torch.empty(*size, dtype=dtype, device=device)


class FP8AllGather(_FP8Comm, AllGather):
    """Gathers parameters in FP8: every rank computes with rounded ones, and updates the exact shard that it keeps."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Gather parameters by `all_gather_into_tensor` of `fp8booster.comm`."""
        return all_gather_into_tensor(
            output_tensor, input_tensor, group, async_op, encoding=self.encoding, min_bytes=self.min_bytes
        )


class FP8ReduceScatter(_FP8Comm, ReduceScatter):
    """Reduces gradients in FP8, each rounded once."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Op, async_op: bool = False
    ) -> Work | None:
        """Reduce gradients by `reduce_scatter_tensor` of `fp8booster.comm`."""
        return reduce_scatter_tensor(
            output_tensor, input_tensor, op, group, async_op, encoding=self.encoding, min_bytes=self.min_bytes
        )


def compress_fsdp(
    model: nn.Module,
    *,
    gather: bool = True,
    reduce: bool = True,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> None:
    """Let every module of `model` that `fully_shard` was called on communicate in FP8.

    Args:
        model: with `fully_shard` already applied.
        gather: send parameters in FP8. Parameters that need every bit, such as norms, are best given a
            `fully_shard` of their own and left out here.
        reduce: send gradients in FP8.
        encoding, min_bytes: as for the collectives.

    Raises:
        ValueError: `fully_shard` was called on no module of `model`.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError("no module of the model is sharded; call torch.distributed.fsdp.fully_shard on it first")
    for module in sharded:
        if gather:
            module.set_custom_all_gather(FP8AllGather(encoding, min_bytes))
        if reduce:
            module.set_custom_reduce_scatter(FP8ReduceScatter(encoding, min_bytes))
