"""The seam to Colossal-AI's mixtures of experts."""

from __future__ import annotations

from fp8booster.colossal.moe.blocks import convert_blocks

__all__ = ["convert_blocks"]
