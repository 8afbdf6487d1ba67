"""Which layers make a model's logits, as far as the model says so itself.

Names tell little: the head is `cls.predictions.decoder` in BERT, `lm_head.decoder` in RoBERTa, `proj_out` in Whisper.
"""

from __future__ import annotations

from torch import nn


def vocabulary_heads(model: nn.Module) -> set[int]:
    """The identities of what `get_output_embeddings()` gives, which models of transformers have, and of all inside it.

    Args:
        model: wrapped or not, sharded or not.
    """
    return {
        id(layer)
        for module in model.modules()
        if isinstance(head := _head(module), nn.Module)
        for layer in head.modules()  # adapters wrap a head, and some models have several
    }


def _head(module: nn.Module) -> object:
    """What a module says to be its head, if anything."""
    ask = getattr(module, "get_output_embeddings", None)
    try:
        return None if ask is None else ask()
    # the head was taken out of the model; or a method of another meaning has the name, or none of its own
    except (AttributeError, TypeError, NotImplementedError):
        return None
