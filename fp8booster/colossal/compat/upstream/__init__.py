"""Defects of colossalai 0.5.0, and what it asks of packages that training does not need."""

from __future__ import annotations

from fp8booster.colossal.compat.upstream import (  # noqa: F401 (importing a file registers its patches)
    attention,
    bodies,
    checkpoints,
    connections,
    distributed,
    fsdp,
    gemini,
    hybrid,
    masks,
    missing_imports,
    mixtral,
    models,
    moe,
    pipeline,
    pipeline_batches,
    precision,
    ring_attention,
    tensor_parallel,
)
