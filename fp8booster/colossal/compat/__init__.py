"""All that colossalai 0.5.0 needs to import and train on today's PyTorch, on CUDA and on CPU.

Each mend is one small function in the file of its role. Its docstring says what goes wrong without it and how
to see that it is no longer needed. `apply()` puts all in, `mends()` lists them.
"""

from __future__ import annotations

from fp8booster.colossal.compat import (  # noqa: F401 (importing a file registers its mends)
    attention,
    checkpoints,
    connections,
    cpu,
    distributed,
    fsdp,
    gemini,
    huggingface,
    hybrid,
    masks,
    missing_packages,
    moe,
    opt,
    pipeline,
    pipeline_batches,
    precision,
    ring_attention,
    t5,
    tensor_parallel,
    untrusted,
)
from fp8booster.colossal.compat.registry import Mend, State, apply, mends, taken_out

__all__ = ["Mend", "State", "apply", "mends", "taken_out"]
