"""Which parameters an engine cannot train, in a sentence before the model is boosted: Colossal-AI fails at them."""

from __future__ import annotations

from torch import nn

from fp8booster.listing import first_of


def require_parameters(model: nn.Module, *, in_buffers: bool, sparse: bool) -> None:
    """Raise ValueError where a model has parameters that cannot be trained, on every rank that has the same model.

    Without it one rank fails while it boosts, or all do in backward, and others wait for ever for what it would send.

    Args:
        model: not wrapped yet.
        in_buffers: the engine lays trainable parameters one after the other, and gives each rank a part of them.
        sparse: it reduces sparse gradients.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    _refuse(
        [name for name, each in model.named_parameters() if each.is_complex()],
        "are complex, and casts to 16 bits drop the imaginary part; hold their real and imaginary parts as one real "
        "parameter (torch.view_as_real)",
    )
    if in_buffers:
        _refuse(
            [name for name, each in trained.items() if not each.numel()],
            "have no values, of which no rank can hold a part; delete them, or freeze them by requires_grad_(False)",
        )
        _refuse(
            [name for name, each in trained.items() if each.numel() and not each.is_contiguous()],
            "are not contiguous, as channels-last weights are, and ZeRO and Gemini copy them into one buffer; call "
            "model.to(memory_format=torch.contiguous_format), or .contiguous() on what is transposed",
        )
    if not sparse:
        tables = [
            name
            for name, each in model.named_modules()
            if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse and each.weight.requires_grad
        ]
        _refuse(tables, "have sparse gradients, which are not reduced here; make them with sparse=False")


def _refuse(names: list[str], why: str) -> None:
    if names:
        raise ValueError(f"some of the model's parameters or tables {why}: {first_of(names)}")
