"""Optimizers over FP32 master weights. Needs no Colossal-AI and no compiled extension."""

from fp8booster.optim.adamw import AdamW
from fp8booster.optim.hybrid_adam import HybridAdam

__all__ = ["AdamW", "HybridAdam"]
