"""CUDA graphs that hold collectives, at the end of their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8booster.colossal.compat.registry import wrap
from fp8booster.nn.graphs import free_graphs


@wrap(
    "torch.distributed:destroy_process_group",
    "cluster/process_group_mesh.py:68",
    needed_when="FP8Config(cuda_graphs=True) with tensor or sequence parallelism, whose layers communicate, over NCCL",
)
def graphs_end_before_groups(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Captured layers give up their CUDA graphs before a process group is destroyed.

    Without it the program hangs where it ends, in HybridParallelPlugin's destructor or in the user's call: NCCL waits
    until no graph is left that holds one of the group's collectives. No longer needed when PyTorch frees them.
    """
    free_graphs()
    return upstream(*args, **kwargs)
