"""The norm that an optimizer of hybrid parallelism finds, beside Colossal-AI's of the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.colossal.hybrid.runs import HybridRun


class HostReads(TorchDispatchMode):
    """Counts how often the host reads a value of a tensor, as `item` does: on a GPU it waits there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def native_norm(optimizer: Any) -> float:
    """By Colossal-AI, of the gradients as they are now."""
    from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelAMPOptimizer
    from colossalai.zero.low_level._utils import calculate_global_norm_from_list

    if isinstance(optimizer, HybridParallelAMPOptimizer):
        masters = [master for group in optimizer.param_groups for master in group["params"]]
        pairs = [(optimizer.master_to_working_map[master], master.grad) for master in masters]
        return HybridParallelAMPOptimizer._compute_grad_norm(optimizer, pairs)
    _keep_what_is_attached(optimizer)
    return calculate_global_norm_from_list(
        [
            sum(
                optimizer._compute_grad_norm(group, store.get_working_grads_by_group_id(group_id))
                for group, store in optimizer.pg_to_grad_store.items()
            )
            for group_id in range(optimizer.num_param_groups)
        ]
    )


def _keep_what_is_attached(optimizer: Any) -> None:
    """Let the store hold the gradients that the masters have: divided ones, which may be copies in FP32."""
    for group_id, workings in optimizer._working_param_groups.items():
        masters = optimizer._master_param_groups_of_current_rank[group_id]
        for working, master in zip(workings, masters, strict=True):
            store = optimizer.pid_to_grad_store[id(working)]
            kept = store.get_partitioned_gradients_by_param_id(group_id, id(working))
            if kept and kept[store._working_index] is not master.grad:
                kept[store._working_index] = master.grad
                store.grad_to_param_mapping[id(master.grad)] = id(working)


def set_max_norm(optimizer: Any, limit: float) -> None:
    name = "max_norm" if hasattr(optimizer, "max_norm") else "_clip_grad_norm"
    assert hasattr(optimizer, name)
    setattr(optimizer, name, limit)


def steps_of(
    run: HybridRun, *batches: torch.Tensor, limit: float, norm_of: Callable[[Any], float] = native_norm
) -> tuple[float, float, int]:
    """Take a step over micro-batches.

    Returns:
        (the norm by which gradients were clipped, that of the clipped ones, what the host read until then).
    """
    set_max_norm(run.optimizer, limit)
    seen = []
    hook = run.optimizer.unwrap().register_step_pre_hook(lambda *_: seen.extend((reads.count, norm_of(run.optimizer))))
    for tokens in batches:
        run.backward(tokens, len(batches))
    with HostReads() as reads:
        run.optimizer.step()
    run.optimizer.zero_grad()
    hook.remove()
    count, norm = seen
    return run.optimizer.get_grad_norm(), norm, count


def assert_clips_by_one_norm(
    run: HybridRun, *batches: torch.Tensor, scale: float = 1.0, norm_of: Callable[[Any], float] = native_norm
) -> None:
    """Norms are as expected, and gradients are clipped by them, while the host reads nothing.

    Args:
        scale: of the loss; the host reads whether gradients overflowed if it is another than 1.
        norm_of: what is expected of an optimizer's gradients as they are; Colossal-AI's unless given.
    """
    norm, exact, reads = steps_of(run, *batches, limit=1e6, norm_of=norm_of)
    assert norm / scale == pytest.approx(exact, rel=1e-5)
    assert scale != 1 or reads == 0
    limit = exact / 8
    norm, clipped, _ = steps_of(run, *batches, limit=limit, norm_of=norm_of)
    assert norm / scale > 2 * limit
    assert clipped == pytest.approx(limit, rel=1e-4)
