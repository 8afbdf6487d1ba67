"""The loss through the head of a language model, from its weight, in FP8 where the head is an FP8 layer.

A head's forward does not run for it, and so neither do its hooks: `why_not_bypassed` tells where that is not right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fp8booster import formats
from fp8booster.kernels.transpose import transposed
from fp8booster.nn.fused.loss import linear_cross_entropy
from fp8booster.nn.linear.layer import FP8Layer, FP8Linear, held_weight
from fp8booster.nn.linear.speed_model import computes_in_fp8
from fp8booster.nn.modules import has_hooks
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import deliver_amax, delivered_amax
from fp8booster.nn.weights.freshness import reusable
from fp8booster.tensor import QuantizedMatrix

HEADS: set[type[nn.Module]] = {nn.Linear, FP8Linear}
"""Classes of heads whose logits, up to padding at their end, are those of nn.Linear; engines add theirs."""


class HeldHead(nn.Module):
    """Mixin of a head whose parameters an engine keeps apart from it: they are whole within `while_whole`."""

    head_class: ClassVar[type[nn.Module]]  # that it was

    @classmethod
    def members_before(cls, original: type[nn.Module]) -> dict[str, Any]:
        """As `mixed_class` asks."""
        return {"head_class": original}

    def while_whole(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute` makes of the head's parameters, differentiable."""
        return compute()


def vocabulary_size(head: nn.Linear) -> int:
    """Return how many tokens a head makes logits of; padding, of which Colossal-AI's heads know, is none."""
    return getattr(head, "old_num_embeddings", held_weight(head).shape[0])


def why_not_bypassed(head: nn.Module, classes: Collection[type[nn.Module]]) -> str | None:
    """Return why the weight of an lm_head cannot be read past its forward, or None if it can.

    Args:
        head: as it is now.
        classes: those of heads whose product is that of nn.Linear.
    """
    held = isinstance(head, HeldHead)
    if (head.head_class if held else type(head)) not in classes:
        return f"its lm_head is a {type(head).__name__}, whose product may be another than that of nn.Linear"
    if not held and type(head._parameters.get("weight")) not in (nn.Parameter, FakeTensor):
        kind = type(held_weight(head)).__name__
        return f"the weight of its lm_head is a {kind}: sharded, or gathered when an operator of torch reads it"
    if has_hooks(head):
        return "its lm_head has hooks, which would not run"
    if (dtype := held_weight(head).dtype) not in formats.HIGH_PRECISION:
        return f"the weight of its lm_head is {dtype}"
    if not held and isinstance(head, FP8Layer) and head.fp8_weight.is_transient:
        return "the weight of its lm_head is whole only while the layer runs"
    if "forward" in head.__dict__:
        return "the forward of its lm_head was replaced"
    return None


def head_loss(head: nn.Linear, hidden: Tensor, targets: Tensor, **how: Any) -> Tensor:
    """Compute the loss through a head, in FP8 where the head is an FP8 layer for which that pays.

    Args:
        head: of a class that `why_not_bypassed` was asked for.
        hidden: [..., K].
        targets: int64 [...].
        how: ignore_index, reduction and vocabulary of `linear_cross_entropy`.
    """
    # gradients are made in forward, so the weight need be whole for forward alone
    compute = partial(_whole_head_loss, head, hidden, targets, **how)
    return head.while_whole(compute) if isinstance(head, HeldHead) else compute()


def _whole_head_loss(head: nn.Linear, hidden: Tensor, targets: Tensor, **how: Any) -> Tensor:
    fp8: dict[str, Any] = {}
    if isinstance(head, FP8Layer) and hidden.numel():
        config, tokens = head.fp8_config, hidden.numel() // hidden.shape[-1]
        always = head.fp8_weight.always
        in_fp8 = always or computes_in_fp8(config, tokens, *head.product_features, hidden.device)
        head.in_fp8[tokens] = in_fp8
        if in_fp8:
            casts = head.fp8_casts if head.training else head.fp8_casts.evaluation
            fp8["casts"] = casts
            if reusable(hidden, held_weight(head)):
                fp8["quantized_weight"] = _with_transpose(head, casts)
    return linear_cross_entropy(
        deliver_amax(hidden.flatten(0, -2), delivered_amax(hidden)),
        held_weight(head),
        targets.flatten().to(hidden.device),
        bias=head.bias,
        **how,
        **fp8,
    )


def _with_transpose(head: FP8Layer, casts: Casts) -> QuantizedMatrix:
    """Return the head's FP8 weight in both layouts, wherever it keeps them."""
    weight = head.held_weight
    quantized = head.fp8_weight.forward([weight], casts, transpose=True)
    backward_weight = head.fp8_weight.backward([weight], casts)
    if quantized.transpose.numel():
        return quantized
    if backward_weight is None:
        return quantized._replace(transpose=transposed(quantized.data))
    transpose, inverse_scale = backward_weight()
    return QuantizedMatrix(quantized.data, transpose, quantized.inverse_scale, inverse_scale)
