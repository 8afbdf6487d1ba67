"""Logits that a model's own forward handles before they are made: a loss has them chunk by chunk.

    logits = head(hidden)                  a `LazyLogits`
    logits = tanh(logits / c) * c          still one: it may be scaled and capped
    loss = cross_entropy(logits.float().view(-1, V), targets)     `nn.fused.linear_cross_entropy` of the hidden states

Whatever else is done to them is done to the logits, which are made then. So nothing is written down of what a model
does before its head and after its loss.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8booster.nn.fused.head import head_loss, vocabulary_size
from fp8booster.nn.fused.lazy import LazyTensor
from fp8booster.nn.fused.vocabulary import VocabularyPart
from fp8booster.nn.linear.delivered_amax import deliver_amax, delivered_amax


class LazyHead:
    """A head whose logits are lazy; it has all else that the head has."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> LazyLogits:
        return LazyLogits(self._head, hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


class LazyLogits(LazyTensor):
    """The logits of a head.

    Args:
        head: a linear layer, whose forward a loss bypasses.
        hidden: [..., K], what it reads.
    """

    def __init__(self, head: nn.Linear, hidden: Tensor) -> None:
        self._head, self._hidden = head, _with_amax(hidden)
        self._scale = 1.0
        self._outer: float | None = None  # these are outer * tanh(scale * what the head makes), or scale * that
        self._shape = torch.Size((*hidden.shape[:-1], vocabulary_size(head)))
        self._made: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    def float(self) -> LazyLogits:
        """Return these, which a loss reads in FP32."""
        return self

    def contiguous(self) -> LazyLogits:
        """Return these, which are made so."""
        return self

    def view(self, *shape: Any) -> Any:
        """Stay lazy as a matrix of all tokens."""
        if shape == (-1, self._shape[-1]):
            return self._changed(_shape=torch.Size((self._hidden.shape[:-1].numel(), self._shape[-1])))
        return self.made().view(*shape)

    def __mul__(self, other: Any) -> Any:
        return self._times(other) if _is_positive(other) else self.made() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._times(1 / other) if _is_positive(other) else self.made() / other

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.tanh and len(args) == 1 and not kwargs and args[0]._outer is None:
            return args[0]._changed(_outer=1.0)
        if function is F.cross_entropy and isinstance(args[0], LazyLogits):
            loss = args[0]._loss(*args[1:], **kwargs)
            if loss is not None:
                return loss
        return super().__torch_function__(function, types, args, kwargs)

    def made(self) -> Tensor:
        """Make them, as the head does."""
        if self._made is None:
            logits = self._head(self._hidden)
            logits = logits if self._scale == 1.0 else logits * self._scale
            logits = logits if self._outer is None else logits.tanh() * self._outer
            self._made = logits.float().view(self._shape)
        return self._made

    def _loss(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: builtins.float = 0.0,
    ) -> Tensor | None:
        """Compute `F.cross_entropy` from the hidden states; None: it is computed from the logits."""
        plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
        if not plain or reduction == "none" or len(self._shape) != 2 or target.shape != self._shape[:1]:
            return None
        tokens, outer = self._shape[-1], self._outer
        return head_loss(
            self._head,
            self._hidden,
            target,
            vocabulary=VocabularyPart(tokens, columns=tokens),
            ignore_index=ignore_index,
            reduction=reduction,
            scale=self._scale * (1.0 if outer is None else outer),
            cap=outer,
        )

    def _times(self, number: builtins.float) -> LazyLogits:
        if self._outer is None:
            return self._changed(_scale=self._scale * number)
        return self._changed(_outer=self._outer * number)

    def _changed(self, **fields: Any) -> LazyLogits:
        """Return a copy with other fields, and without what was made of these."""
        changed = object.__new__(LazyLogits)
        vars(changed).update(vars(self), **fields, _made=None)
        return changed


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _with_amax(hidden: Tensor) -> Tensor:
    """Give it the amax of what it is a view of, if that is as large: models take the last tokens, here all of them."""
    whole = hidden._base
    if whole is not None and whole.shape == hidden.shape and delivered_amax(hidden) is None:
        return deliver_amax(hidden, delivered_amax(whole))
    return hidden
