"""Mends of pipeline parallelism."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fp8booster.colossal.compat.registry import Patch, mend


@mend(
    module="colossalai.pipeline.weight_grad_store",
    place="pipeline/weight_grad_store.py:31,39",
    needed_when="zero-bubble without apex",
)
def zero_bubble_adds_weight_gradients(module: ModuleType, patch: Patch) -> None:
    """`WeightGradStore.pop` adds the gradient that a product returns to the one that is there.

    Without it only apex's products, which add by themselves, count after a weight's first micro-batch; the gradients
    that others return are dropped. No longer needed when the second of two micro-batches changes `weight.grad`.
    """
    store = module.WeightGradStore
    weight = SimpleNamespace(grad=torch.zeros(()))
    store.put(None, None, weight, lambda *_: torch.ones(()))
    store.flush()
    store.pop()
    if weight.grad == 0:
        patch.set(store, "pop", classmethod(_pop))


def _pop(store: Any, chunk: int = 0) -> None:
    waiting = store.weight_grad_queue[chunk]
    if waiting.empty():
        raise RuntimeError(
            f"the schedule asks for weight gradients of chunk {chunk} before its backward pass"
        )
    for total_input, grad_output, weight, func in waiting.get():
        # GPT-2's layers hold the parameter behind the view of it that they multiply by
        parameter = weight[1] if isinstance(weight, tuple) else weight
        if parameter.grad is None:
            parameter.grad = func(total_input, grad_output)
        else:
            gradient = func(total_input, grad_output, parameter.grad)
            if gradient is not None:
                parameter.grad.add_(gradient)
