"""The three products of a vocabulary head over one chunk of tokens, in high precision or in FP8.

Shape legend: m tokens of the chunk, K features, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.product import product
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT
from fp8booster.tensor import QuantizedMatrix


class HeadProducts:
    """Products in the dtype of hidden states and weight.

    Args:
        weight: [V, K].
        bias: [V] or None.
        wanted: whether hidden states and weight need gradients.
        sum_dtype: in which the weight's gradient is added up over chunks: the weight's, or FP32.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, wanted: tuple[bool, bool], sum_dtype: torch.dtype
    ) -> None:
        self._weight, self._bias, self._wanted, self._sum_dtype = weight, bias, wanted, sum_dtype
        self._memory: torch.Tensor | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The chunk's logits, [m, V], in the place of the last chunk's."""
        tokens, vocabulary = hidden.shape[0], self._weight.shape[0]
        if self._memory is None:  # rows that begin where whole vectors do
            self._memory = hidden.new_empty((tokens, aligned(vocabulary)))
            # oneDNN's product for AMX reads what lies between rows, and multiplies it by zero: NaN stays NaN
            self._memory[:, vocabulary:] = 0
        logits = self._memory[:tokens, :vocabulary]
        if self._bias is None:
            return torch.mm(hidden, self._weight.t(), out=logits)
        return torch.addmm(self._bias, hidden, self._weight.t(), out=logits)

    def gradients(
        self, hidden: torch.Tensor, gradient: torch.Tensor, amax: torch.Tensor | None, total: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients of the chunk's hidden states and of the weight, the latter added up over chunks.

        Args:
            hidden: [m, K], of the last `logits`.
            gradient: [m, V], of the logits.
            amax: that of the gradient, as `kernels.cast.cast` takes it, if it is known.
            total: the weight's gradient from the chunks before, [V, K], which this adds to; None before the first.

        Returns:
            ([m, K] or None, [V, K] of `sum_dtype` or None).
        """
        for_hidden, for_weight = self._wanted
        if for_weight:
            total = self._to_weight(gradient.t(), hidden, total)
        return torch.mm(gradient, self._weight) if for_hidden else None, total

    def _to_weight(self, gradient: torch.Tensor, hidden: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        if gradient.dtype is self._sum_dtype:
            if total is None:
                return torch.mm(gradient, hidden)
            return torch.addmm(total, gradient, hidden, out=total)  # adds its FP32 sums before it rounds
        if gradient.is_cuda:
            part = torch.mm(gradient, hidden, out_dtype=self._sum_dtype)
        else:  # the CPU has no product of 16-bit matrices in FP32
            part = torch.mm(gradient.to(self._sum_dtype), hidden.to(self._sum_dtype))
        return part if total is None else total.add_(part)


class FP8HeadProducts:
    """The same products in FP8: the chunk's hidden states and the logits' gradient are cast once each, in both layouts.

    Args:
        weight: the FP8 weight with its transpose.
        shape: (V, K).
        bias, wanted, sum_dtype: as in `HeadProducts`.
        casts: the head's, with its configuration.
        hidden_amax: of all hidden states, if it is known, as `kernels.cast.cast` takes it; None finds each chunk's.
    """

    def __init__(
        self,
        weight: QuantizedMatrix,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
        wanted: tuple[bool, bool],
        sum_dtype: torch.dtype,
        casts: Casts,
        hidden_amax: torch.Tensor | None = None,
    ) -> None:
        self._w, self._shape, self._wanted, self._sum_dtype = weight, shape, wanted, sum_dtype
        self._casts, self._hidden_amax = casts, hidden_amax
        padding = weight.data.shape[0] - shape[0]
        self._bias = None if bias is None else F.pad(bias, (0, padding))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The chunk's logits, [m, V]."""
        x = self._x = self._casts.quantize(INPUT, hidden, transposed=self._wanted[1], amax=self._hidden_amax)
        logits = product(
            x.data,
            self._w.data,
            x.inverse_scale,
            self._w.inverse_scale,
            out_dtype=hidden.dtype,
            bias=self._bias,
            **self._casts.config.product_options["fprop"],
        )
        return logits[: hidden.shape[0], : self._shape[0]]

    def gradients(
        self, hidden: torch.Tensor, gradient: torch.Tensor, amax: torch.Tensor | None, total: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As `HeadProducts.gradients`."""
        for_hidden, for_weight = self._wanted
        x, w, options = self._x, self._w, self._casts.config.product_options
        dy = self._casts.quantize(OUTPUT_GRADIENT, gradient, plain=for_hidden, transposed=for_weight, amax=amax)
        dx = None
        if for_weight:
            dw = product(
                dy.transpose,
                x.transpose,
                dy.scale_of_transpose(),
                x.scale_of_transpose(),
                out_dtype=self._sum_dtype,
                **options["wgrad"],
            )
            dw = dw[: self._shape[0], : self._shape[1]]
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
            dx = dx[: hidden.shape[0], : self._shape[1]]
        return dx, total
