"""Patches of calls into torch.distributed."""

from __future__ import annotations

import os
import re
from types import ModuleType

import torch
import torch.distributed as dist

from fp8booster.colossal.compat.registry import patch
from fp8booster.colossal.compat.replacements import Replacements


@patch(
    "torch.distributed",
    "pipeline/p2p.py:159",
    needed_when="PyTorch has no is_hccl_available (all but Ascend's builds), and no NCCL or a gloo group beside it",
)
def hccl_is_unavailable(module: ModuleType, replacements: Replacements) -> None:
    """`is_hccl_available()` answers False and `Backend.HCCL` has its name where PyTorch was not built with HCCL.

    Without it pipeline communication on a CPU build raises AttributeError: module 'torch.distributed' has no
    attribute 'is_hccl_available'; on a CUDA build over gloo, type object 'Backend' has no attribute 'HCCL'.
    """
    if not hasattr(module, "is_hccl_available"):
        replacements.set(module, "is_hccl_available", lambda: False)
    if not hasattr(module.Backend, "HCCL"):
        replacements.set(module.Backend, "HCCL", "hccl")


@patch(
    "quantization.fp8",
    "40-44",
    needed_when="ranks were started by mpirun or srun, or LOCAL_WORLD_SIZE is not set and there is no GPU",
)
def ranks_of_a_node_are_counted(module: ModuleType, replacements: Replacements) -> None:
    """`process_group_is_intranode` reads the variable that is set, not LOCAL_WORLD_SIZE in its stead.

    Without it: KeyError: 'LOCAL_WORLD_SIZE' under Open MPI and SLURM, and ZeroDivisionError without a
    launcher and a GPU, as soon as fp8_communication is on.
    """

    def process_group_is_intranode(pg: dist.ProcessGroup | None) -> bool:
        ranks = dist.get_process_group_ranks(pg if pg is not None else dist.group.WORLD)
        size = local_world_size()
        return min(ranks) // size == max(ranks) // size

    if "LOCAL_WORLD_SIZE" in module.process_group_is_intranode.__code__.co_consts:
        replacements.set_function(module, "process_group_is_intranode", process_group_is_intranode)


def local_world_size() -> int:
    """The number of ranks on this node."""
    for variable in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_TASKS_PER_NODE"):
        if variable in os.environ:
            # SLURM writes "8(x2)" for two nodes of eight tasks and "8,4" for uneven ones.
            return int(re.match(r"\d+", os.environ[variable])[0])
    # No launcher: the ranks are the GPUs of this machine, or all ranks where there is none.
    return torch.cuda.device_count() or dist.get_world_size()
