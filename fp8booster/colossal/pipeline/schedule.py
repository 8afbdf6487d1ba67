"""The zero-bubble schedule that Colossal-AI's plugin asks for as `scheduler_nodes` and leaves to its user to make."""

from __future__ import annotations

from colossalai.pipeline.schedule.v_schedule import PipelineGraph, ScheduledNode

ACTIVATIONS, KEPT_FOR_WEIGHTS = 34, 32
"""Bytes for each token and hidden feature that a transformer layer holds after its forward pass, and of these after B:
the inputs and gradients that W multiplies. Without dropout masks and attention scores (Korthikanti et al., arXiv
2205.05198; Qi et al., arXiv 2401.10241, table 1)."""


def zero_bubble_schedule(stages: int, micro_batches: int, *, communication: float = 1.0) -> list[list[ScheduledNode]]:
    """What each stage does, in order, under the zero-bubble schedule in the form of a V (Qi et al., arXiv 2401.10241).

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
