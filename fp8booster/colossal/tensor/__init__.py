"""Tensor and sequence parallelism in FP8: shardformer's layers and what they exchange."""

from __future__ import annotations

from fp8booster.colossal.compressed_groups import compress_groups
from fp8booster.colossal.tensor.attention import fuse_sharded
from fp8booster.colossal.tensor.layers import convert_sharded_to_fp8

__all__ = ["compress_groups", "convert_sharded_to_fp8", "fuse_sharded"]
