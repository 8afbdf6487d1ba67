"""Count the weights of a model, and the floating-point operations of a step."""

from __future__ import annotations

from fp8booster.training.models import Architecture

FORMULA = (
    "Model FLOPs of a token: 6 x (weights of linear layers, the head included, embeddings and norms not, of experts "
    "those that a token goes through) + 6 x "
    "layers x sequence x hidden for causal attention, which counts the half of its products that the mask leaves "
    "(scores and values, forward once and backward twice). Recomputation counts as nothing. Utilisation is that "
    "rate over the dense tensor-core peak at the highest clock. With --lora 4 in place of the first 6, as frozen "
    "weights have no gradients, and 6 x the adapters' weights. Colossal-AI's formula, for comparison with its "
    "published figures: batch x sequence x parameters x 2 x (3, or 4 with checkpointing), embeddings included and "
    "attention not."
)
"""For the tables."""


def layer_weights(model: Architecture, experts: int | None = None) -> int:
    """Weights of one layer's linear layers: q, k, v, o, gate, up, down, of so many experts; None: of all."""
    attention = 2 * model.hidden**2 + 2 * model.hidden * model.key_value
    router = model.hidden * model.experts if model.family == "mixtral" else 0
    return attention + (experts or model.experts) * 3 * model.hidden * model.feed_forward + router


def linear_weights(model: Architecture) -> int:
    """Weights of all linear layers, the head included, without embeddings and norms."""
    return model.layers * layer_weights(model) + model.hidden * model.vocabulary


def product_weights(model: Architecture) -> int:
    """Weights that a token is multiplied by: `linear_weights` without the experts that it does not go through."""
    return model.layers * layer_weights(model, model.experts_per_token) + model.hidden * model.vocabulary


def parameters(model: Architecture) -> int:
    """All of them, a shared one once."""
    norms = model.hidden * (model.layers * (1 if model.family == "cohere" else 2) + 1)
    biases = model.layers * (model.hidden + 2 * model.key_value) if model.family == "qwen2" else 0
    embeddings = 0 if model.tied else model.hidden * model.vocabulary
    return linear_weights(model) + embeddings + norms + biases


def adapter_weights(model: Architecture, rank: int) -> int:
    """Weights of adapters of a rank on all linear layers but the head, of a model without experts."""
    attention = 4 * model.hidden + 2 * (model.hidden + model.key_value)
    return model.layers * rank * (attention + 3 * (model.hidden + model.feed_forward))


def model_flops(model: Architecture, *, sequence: int, lora: int | None = None) -> int:
    """Floating-point operations that one token of a training step needs, by `FORMULA`; `lora` is the adapters' rank."""
    attention = 6 * model.layers * sequence * model.hidden
    if lora is None:
        return 6 * product_weights(model) + attention
    return 4 * product_weights(model) + 6 * adapter_weights(model, lora) + attention


def native_flops(model: Architecture, *, checkpointing: bool) -> int | None:
    """Count the operations of one token as Colossal-AI's benchmark does (examples/language/performance_evaluator.py,
    on_step_end).

    None for a mixture of experts, of which it would count those too that a token does not go through.
    """
    return None if model.experts > 1 else parameters(model) * 2 * (3 + int(checkpointing))
