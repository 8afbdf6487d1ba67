"""Checkpoints whose weights are in FP8: written for engines that serve a model, and read as a start of training."""

from fp8booster.serving.read import load_fp8
from fp8booster.serving.write import Exported, export

__all__ = ["Exported", "export", "load_fp8"]
