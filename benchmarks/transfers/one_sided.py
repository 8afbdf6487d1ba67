"""Rows that ranks read from each other's memory by NVSHMEM, without NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from benchmarks.transfers.tokens import COMBINE, DISPATCH, Way, Ways, Work
from fp8booster.nn.experts.routing import weighted_sum

ONE_SIDED = "BF16, one-sided"


def add_one_sided(ways: Ways, work: Work) -> str | None:
    """Add dispatch and combine by NVSHMEM; return why they are left out, on all ranks, or None."""
    reason = None
    try:
        dispatch, combine = _one_sided(work)
        for way in (dispatch, combine):
            way.call().sum().item()  # errors of kernels come later than their launches
    except Exception as error:  # no NVSHMEM, or one that does not start here
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:160]}"
    reasons: list[str | None] = [None] * work.bench.ranks
    dist.all_gather_object(reasons, reason, work.bench.group)
    found = next((each for each in reasons if each is not None), None)
    if found is None:
        ways[DISPATCH][ONE_SIDED], ways[COMBINE][ONE_SIDED] = dispatch, combine
    return found


@cache
def _use_nvshmem() -> None:
    """Take symmetric memory from NVSHMEM, which cannot be changed once some is taken."""
    if not (torch.cuda.is_available() and symmetric.is_nvshmem_available()):
        raise RuntimeError("torch finds no NVSHMEM")
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # NVLink multicast, which these reads do not need
    symmetric.set_backend("NVSHMEM")


def _one_sided(work: Work) -> tuple[Way, Way]:
    _use_nvshmem()
    group, tokens, routes = work.bench.group.group_name, work.tokens, work.routes
    symmetric.enable_symm_mem_for_group(group)

    def shared(*shape: int, dtype: torch.dtype = tokens.dtype) -> torch.Tensor:
        tensor = symmetric.empty(*shape, dtype=dtype, device=tokens.device)
        symmetric.rendezvous(tensor, group)
        return tensor

    def exchange(given: torch.Tensor, arrived: torch.Tensor, sent: list[int]) -> Callable[[], None]:
        sizes, found = shared(len(sent), dtype=torch.int64), shared(2, len(sent), dtype=torch.int64)
        sizes.copy_(torch.tensor(sent))
        return lambda: torch.ops.symm_mem.all_to_all_vdev(given, arrived, sizes, found, group)

    # all ranks must take as much: `there` is for the rows of the busiest rank's experts
    own, most = len(routes.choices), int(work.loads.sum(0).max())
    given, there, back = (shared(rows, tokens.shape[1]) for rows in (own, most, own))
    send, send_back = exchange(given, there, work.sent), exchange(there, back, work.received)

    def dispatch() -> torch.Tensor:
        # another rank may still read rows of the call before, which are the same
        torch.index_select(tokens, 0, routes.tokens, out=given)
        send()
        return there[: sum(work.received)]

    def combine() -> torch.Tensor:
        send_back()  # of what dispatch brought: experts would write their results there
        return weighted_sum(back, work.weights, routes)

    def values(rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, work.by_expert).float()

    return Way(dispatch, tokens[0].nbytes, work.loads, values), Way(combine, tokens[0].nbytes, work.loads)
