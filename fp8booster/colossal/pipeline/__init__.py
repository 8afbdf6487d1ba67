"""FP8 in Colossal-AI's pipelines: what stages send each other, and weight gradients that are computed later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8booster.colossal.pipeline.communication import FP8PipelineCommunication
from fp8booster.colossal.pipeline.schedule import zero_bubble_schedule
from fp8booster.colossal.pipeline.weight_gradients import defer_weight_gradient

if TYPE_CHECKING:
    from colossalai.booster.plugin import HybridParallelPlugin

__all__ = ["FP8PipelineCommunication", "compress_pipeline", "defer_weight_gradient", "zero_bubble_schedule"]


def compress_pipeline(plugin: HybridParallelPlugin) -> None:
    """Let the stages of a plugin's pipeline send each other FP8, whichever its schedule; without a pipeline, nothing.

    Args:
        plugin: made by Colossal-AI's constructor.
    """
    scheduler = plugin.scheduler
    if scheduler is not None:
        native = scheduler.comm
        scheduler.comm = FP8PipelineCommunication(native.stage_manager, native.overlap_p2p)
        scheduler.fp8_communication = False  # Colossal-AI's own casts, before and after the transport
