"""FP8 in Colossal-AI's pipelines: messages between stages, and weight gradients that are computed later."""

from __future__ import annotations

from fp8booster.colossal.pipeline.communication import FP8PipelineCommunication, compress_pipeline
from fp8booster.colossal.pipeline.zero_bubble import defer_weight_gradient, zero_bubble_schedule

__all__ = ["FP8PipelineCommunication", "compress_pipeline", "defer_weight_gradient", "zero_bubble_schedule"]
