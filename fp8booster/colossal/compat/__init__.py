"""All that colossalai 0.5.0 needs to import and train on today's PyTorch, on CUDA and on CPU, and in FP8.

    upstream/   its defects, and what it asks of packages that training does not need
    cpu/        what it lacks for ranks without CUDA
    fp8/        what FP8 needs of it where no argument, subclass or attribute serves

Each patch is one small function in the file of its role. Its docstring says what goes wrong without it; a test takes
it out, and fails when that does not go wrong any more. `apply()` applies all, `patches()` lists them.
"""

from __future__ import annotations

from fp8booster.colossal.compat import cpu, fp8, upstream  # noqa: F401 (importing a file registers its patches)
from fp8booster.colossal.compat.registry import Kind, Patch, State, apply, patches, taken_out

__all__ = ["Kind", "Patch", "State", "apply", "patches", "taken_out"]
