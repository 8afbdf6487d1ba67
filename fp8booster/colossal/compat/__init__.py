"""All that colossalai 0.5.0 needs to import and train on today's PyTorch, on CUDA and on CPU, and in FP8.

A file for each part of Colossal-AI that is patched. A patch is one small function, whose name says what holds with it,
and whose docstring what goes wrong without it; a test takes it out, and fails when that does not go wrong any more.
`apply()` applies all, `patches()` lists them.
"""

from __future__ import annotations

from fp8booster.colossal.compat import (  # noqa: F401 (importing a file registers its patches)
    accelerator,
    attention,
    booster,
    checkpoints,
    environment,
    hybrid,
    layers,
    models,
    pipeline,
    zero,
)
from fp8booster.colossal.compat.registry import Kind, Patch, State, apply, patches, taken_out

__all__ = ["Kind", "Patch", "State", "apply", "patches", "taken_out"]
