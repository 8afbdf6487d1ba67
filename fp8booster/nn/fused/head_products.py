"""The three products of a vocabulary head over one chunk of tokens, in high precision or in FP8.

Shape legend: m tokens of the chunk, K features, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.product import product
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT
from fp8booster.tensor import QuantizedMatrix


@dataclass(eq=False)
class HeadProducts:
    """Products in the dtype of hidden states and weight."""

    weight: Tensor  # [V, K]
    bias: Tensor | None  # [V]
    wanted: tuple[bool, bool]  # hidden states and weight need gradients
    sum_dtype: torch.dtype  # in which the weight's gradient is added up over chunks: the weight's, or FP32
    _memory: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Make the chunk's logits, [m, V], in the place of the last chunk's."""
        tokens, vocabulary = hidden.shape[0], self.weight.shape[0]
        if self._memory is None:  # rows that begin where whole vectors do
            self._memory = hidden.new_empty((tokens, aligned(vocabulary)))
            # oneDNN's product for AMX reads what lies between rows, and multiplies it by zero: NaN stays NaN
            self._memory[:, vocabulary:] = 0
        logits = self._memory[:tokens, :vocabulary]  # those of the last chunk are used up
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=logits)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=logits)

    def gradients(
        self, hidden: Tensor, gradient: Tensor, amax: Tensor | None, total: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the chunk's hidden states and of the weight, the latter added up over chunks.

        Args:
            hidden: [m, K], of the last `logits`.
            gradient: [m, V], of the logits.
            amax: that of the gradient, as `kernels.cast.cast` takes it, if it is known.
            total: the weight's gradient from the chunks before, [V, K], which this adds to; None before the first.

        Returns:
            ([m, K] or None, [V, K] of `sum_dtype` or None).
        """
        for_hidden, for_weight = self.wanted
        if for_weight:
            total = self._to_weight(gradient.t(), hidden, total)
        return torch.mm(gradient, self.weight) if for_hidden else None, total

    def _to_weight(self, gradient: Tensor, hidden: Tensor, total: Tensor | None) -> Tensor:
        if gradient.dtype is self.sum_dtype:
            if total is None:
                return torch.mm(gradient, hidden)
            return torch.addmm(total, gradient, hidden, out=total)  # adds its FP32 sums before it rounds
        if gradient.is_cuda:
            part = torch.mm(gradient, hidden, out_dtype=self.sum_dtype)
        else:  # the CPU has no product of 16-bit matrices in FP32
            part = torch.mm(gradient.to(self.sum_dtype), hidden.to(self.sum_dtype))
        return part if total is None else total.add_(part)


@dataclass(eq=False)
class FP8HeadProducts:
    """The same products in FP8: the chunk's hidden states and the logits' gradient are cast once each."""

    weight: QuantizedMatrix  # with its transpose
    bias: Tensor | None
    wanted: tuple[bool, bool]
    sum_dtype: torch.dtype
    shape: tuple[int, int]  # (V, K)
    casts: Casts  # the head's, with its configuration
    hidden_amax: Tensor | None  # of all hidden states, if it is known; None: each chunk's is found

    def logits(self, hidden: Tensor) -> Tensor:
        """Make the chunk's logits, [m, V]."""
        w, bias = self.weight, self.bias
        x = self._x = self.casts.quantize(INPUT, hidden, transposed=self.wanted[1], amax=self.hidden_amax)
        logits = product(
            x.data,
            w.data,
            x.inverse_scale,
            w.inverse_scale,
            out_dtype=hidden.dtype,
            bias=None if bias is None else F.pad(bias, (0, w.data.shape[0] - self.shape[0])),
            **self.casts.config.product_options["fprop"],
        )
        return logits[: hidden.shape[0], : self.shape[0]]

    def gradients(
        self, hidden: Tensor, gradient: Tensor, amax: Tensor | None, total: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """As `HeadProducts.gradients`."""
        for_hidden, for_weight = self.wanted
        x, w, options = self._x, self.weight, self.casts.config.product_options
        dy = self.casts.quantize(OUTPUT_GRADIENT, gradient, plain=for_hidden, transposed=for_weight, amax=amax)
        dx = None
        if for_weight:
            dw = product(
                dy.transpose,
                x.transpose,
                dy.scale_of_transpose(),
                x.scale_of_transpose(),
                out_dtype=self.sum_dtype,
                **options["wgrad"],
            )
            dw = dw[: self.shape[0], : self.shape[1]]
            total = dw.contiguous() if total is None else total.add_(dw)
        if for_hidden:
            dx = product(
                dy.data,
                w.transpose,
                dy.inverse_scale,
                w.scale_of_transpose(),
                out_dtype=hidden.dtype,
                **options["dgrad"],
            )
            dx = dx[: hidden.shape[0], : self.shape[1]]
        return dx, total
