"""FP8 in Colossal-AI's pipelines: what stages send each other, and weight gradients that are computed later."""

from __future__ import annotations

from fp8booster.colossal.pipeline.weight_gradients import defer_weight_gradient

__all__ = ["defer_weight_gradient"]
