"""Cross entropy of rows of logits, and its gradient written over them.

    loss = log(sum(exp(logits))) - logits[target]            of a row, in FP32
    gradient = (softmax(logits) - onehot(target)) * factor   in FP32, rounded once to the logits' dtype

The logits may be scaled and capped on the way (Gemma 2, arXiv 2408.00118, section 2); then the gradient is that of what
lies in memory.

A row whose target is `ignore_index` has a loss and a gradient of zero, whatever its logits are. A row whose target is
no column has NaN in both: on a GPU nobody could be told otherwise without waiting for it. NaN in a row's logits makes
its loss and gradient NaN, and so does infinity.

Where a row is longer than what lies here, its sum of exponentials is known only after others were asked for theirs. So
there the two halves are apart: `logsumexp` of what lies here, then `write_gradient`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels.operators import operator


@operator()
def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    factor: Tensor | None = None,
    scale: float = 1.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of every row; with a factor, the gradient takes the place of the logits.

    Args:
        logits: [R, V], each row contiguous, BF16, FP16 or FP32.
        targets: int64 [R], the column of each row's right token.
        ignore_index: the target of rows that do not count.
        factor: float32, one value, that multiplies the gradient; None leaves the logits as they are.
        scale, cap: positive; the loss is that of scale * logits, or of cap * tanh(scale * logits / cap), in FP32.

    Returns:
        (losses, float32 [R]; the gradient's amax as float32 partial maxima, or None where it was not found on the
        way).
    """
    kept = targets != ignore_index
    # checked here and not on the host, which would wait for the device
    inside = (targets >= 0) & (targets < logits.shape[1])
    place = torch.where(inside, targets, 0)[:, None]
    adjusted = logits
    if cap is not None:
        adjusted = cap * (logits.float() * (scale / cap)).tanh()
    elif scale != 1.0:
        adjusted = logits.float() * scale
    values, largest, exponentials, total = _softmax_parts(adjusted)
    losses = total.log() + (largest - values.gather(1, place))
    losses = torch.where(kept, torch.where(inside, losses[:, 0], torch.nan), 0.0)
    if factor is not None:
        gradient = exponentials.div_(total)  # in place: logits of a large vocabulary are the largest tensor of a step
        gradient.scatter_(1, place, gradient.gather(1, place) - 1).mul_(factor)
        if cap is not None:
            gradient.mul_(scale * (1 - (values / cap).square()))
        elif scale != 1.0:
            gradient.mul_(scale)
        gradient.masked_fill_((kept & ~inside)[:, None], torch.nan).masked_fill_(~kept[:, None], 0.0)
        logits.copy_(gradient)
    return losses, None


@operator()
def logsumexp(logits: Tensor, targets: Tensor, *, ignore_index: int) -> Tensor:
    """Return the logarithm of the sum of exponentials of every row's part that lies here.

    Args:
        logits: [R, V], each row contiguous, BF16, FP16 or FP32; V is 1 or more.
        targets: int64 [R]; read only for which rows count.
        ignore_index: the target of rows that do not count; they get zero.

    Returns:
        float32 [R]; minus infinity where all of a row is.
    """
    _, largest, _, total = _softmax_parts(logits)
    return torch.where(targets == ignore_index, 0.0, (total.log() + largest)[:, 0])


@operator(writes=("logits",))
def write_gradient(
    logits: Tensor, targets: Tensor, logsumexp: Tensor, *, ignore_index: int, factor: Tensor
) -> Tensor | None:
    """Write the gradient of rows over the part of their logits that lies here.

        gradient = (exp(logits - logsumexp) - onehot(target)) * factor   in FP32, rounded once to the logits' dtype

    Args:
        logits: [R, V], each row contiguous, BF16, FP16 or FP32.
        targets: int64 [R], the column of each row's right token; any other number where that lies elsewhere.
        logsumexp: float32 [R], of whole rows; NaN makes a row's gradient NaN.
        ignore_index: the target of rows that do not count; their gradient is zero.
        factor: float32, one value.

    Returns:
        The gradient's amax as float32 partial maxima, or None where it was not found on the way.
    """
    if logits.shape[1] == 0:
        return None
    here = (targets >= 0) & (targets < logits.shape[1])
    gradient = (logits.float() - logsumexp[:, None]).exp_()
    gradient.scatter_add_(1, torch.where(here, targets, 0)[:, None], -here.float()[:, None])
    gradient.mul_(factor).masked_fill_((targets == ignore_index)[:, None], 0.0)
    logits.copy_(gradient)
    return None


def _softmax_parts(logits: Tensor) -> tuple[Tensor, ...]:
    """Return (logits in FP32, the largest of each row, exponentials relative to it, their sum)."""
    values = logits.float()
    largest = values.amax(1, keepdim=True)
    # a row of minus infinity alone has no largest value to subtract; its sum is zero and its softmax NaN
    exponentials = (values - torch.where(largest == -torch.inf, 0.0, largest)).exp_()
    return values, largest, exponentials, exponentials.sum(1, keepdim=True)


@operator(writes=("tensor",))
def multiply_(tensor: Tensor, factor: Tensor) -> Tensor:
    """Multiply a tensor in place, in FP32, rounded once: a gradient by that of its loss, at no cost where this is 1.

    Args:
        tensor: any shape, contiguous, BF16, FP16 or FP32.
        factor: float32, one value.

    Returns:
        The tensor.
    """
    return tensor.copy_(tensor.float() * factor)
