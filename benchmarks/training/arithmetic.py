"""How many floating-point operations a step is worth."""

from __future__ import annotations

from benchmarks.training.models import Architecture

FORMULA = (
    "Model FLOPs of a token: 6 x (weights of linear layers, the head included, embeddings and norms not, of experts "
    "those that a token goes through) + 6 x "
    "layers x sequence x hidden for causal attention, which counts the half of its products that the mask leaves "
    "(scores and values, forward once and backward twice). Recomputation counts as nothing. Utilisation is that "
    "rate over the dense tensor-core peak at the highest clock. Native's formula, for comparison with its "
    "published figures: batch x sequence x parameters x 2 x (3, or 4 with checkpointing), embeddings included and "
    "attention not."
)
"""For the tables."""


def model_flops(model: Architecture, *, sequence: int) -> int:
    """Floating-point operations that one token of a training step needs, by `FORMULA`."""
    attention = 6 * model.size.layers * sequence * model.size.hidden
    return 6 * model.product_weights + attention


def native_flops(model: Architecture, *, checkpointing: bool) -> int | None:
    """What Colossal-AI's benchmark counts for one token (examples/language/performance_evaluator.py, on_step_end).

    None for a mixture of experts, of which it would count those too that a token does not go through.
    """
    if model.experts > 1:
        return None
    return model.parameters * 2 * (3 + int(checkpointing))
