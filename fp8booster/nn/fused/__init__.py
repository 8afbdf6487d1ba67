"""Decoder layers with their pointwise parts fused around the FP8 products."""

from fp8booster.nn.fused.decoder import fuse_blocks

__all__ = ["fuse_blocks"]
