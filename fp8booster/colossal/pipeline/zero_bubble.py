"""The zero-bubble schedule that Colossal-AI's plugin leaves to its user to make, and its passes for weight gradients.

Backward of a micro-batch (B) makes the gradients of activations alone, and the scheduler fills its bubbles with the
weight gradients (W): each layer puts its work into colossalai's `WeightGradStore`, `schedule_b` closes the list of a
micro-batch and `schedule_w` works off the oldest (pipeline/weight_grad_store.py, pipeline/schedule/zero_bubble_pp.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from colossalai.pipeline.schedule.v_schedule import PipelineGraph, ScheduledNode
from colossalai.pipeline.weight_grad_store import WeightGradStore
from torch import nn

from fp8booster.nn.linear.functional import Defer

ACTIVATIONS, KEPT_FOR_WEIGHTS = 34, 32
"""Bytes for each token and hidden feature that a transformer layer holds after its forward pass, and of these after B:
the inputs and gradients that W multiplies. Without dropout masks and attention scores (Korthikanti et al., arXiv
2205.05198; Qi et al., arXiv 2401.10241, table 1)."""


def zero_bubble_schedule(stages: int, micro_batches: int, *, communication: float = 1.0) -> list[list[ScheduledNode]]:
    """Return the passes of each stage, in order, for a zero-bubble pipeline in the form of a V (arXiv 2401.10241).

    F, B and W passes are taken to last equally long, as those of a linear layer do.

    Args:
        stages: `pp_size` of the plugin.
        micro_batches: `num_microbatches`, a multiple of `stages`.
        communication: how long a message takes, in passes.

    Returns:
        one list for each stage, for `HybridParallelPlugin(pp_style="zbv", num_model_chunks=2, scheduler_nodes=...)`.

    Raises:
        ValueError: fewer than two stages, or micro-batches that do not divide by them.
    """
    if stages < 2:
        raise ValueError(f"stages is {stages}; a pipeline has two or more")
    if micro_batches < stages or micro_batches % stages:
        raise ValueError(f"micro_batches is {micro_batches}; zero-bubble takes a multiple of its {stages} stages")
    graph = PipelineGraph(
        stages,
        micro_batches,
        f_cost=1,
        b_cost=1,
        w_cost=1,
        c_cost=communication,
        f_mem=ACTIVATIONS,
        b_mem=KEPT_FOR_WEIGHTS - ACTIVATIONS,
        w_mem=-KEPT_FOR_WEIGHTS,
    )
    return graph.get_v_schedule()


def defer_weight_gradient(weight: nn.Parameter | tuple[torch.Tensor, nn.Parameter]) -> Defer:
    """Return the `defer` of `nn.linear.functional.linear_from_quantized` for a layer under the zero-bubble schedule.

    Each gradient is added to `weight.grad`, in place where there is one, when the scheduler comes to it. Autograd
    returns none, so hooks that wait for this gradient do not run.

    Args:
        weight: the parameter, or as Colossal-AI's GPT-2 layers have it (view used in the product, parameter); its
            gradient has its shape. Where the layer holds the weight transposed, wrap what computes it first.
    """

    def defer(compute: Callable[[], torch.Tensor]) -> None:
        def add(_: None, __: None, accumulated: torch.Tensor | None = None) -> torch.Tensor | None:
            gradient = compute()
            if accumulated is None:
                return gradient
            accumulated.add_(gradient)
            return None

        # Colossal-AI's products get their operands from the store; `compute` holds FP8 copies of its own
        WeightGradStore.put(None, None, weight, add)

    return defer
