"""Weights in FP8 for engines that serve a model: in checkpoints, which training can start from, or from memory."""

from fp8booster.serving.handover import tensors
from fp8booster.serving.read import load_fp8
from fp8booster.serving.write import Exported, export

__all__ = ["Exported", "export", "load_fp8", "tensors"]
