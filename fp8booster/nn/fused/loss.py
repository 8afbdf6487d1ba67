"""Cross entropy of a language model over chunks of tokens: the logits are never whole, and never in FP32.

For each chunk: the head's product makes logits in 16 bits; one kernel finds their losses in FP32 and writes their
gradient over them; two products take that to the hidden states' gradient and add it to the weight's. So forward makes
the gradients too, and backward only multiplies them by the gradient of the loss. Between the two live the gradients of
hidden states and weight, which backward would have made anyway.

In 16 bits the logits' gradient is rounded once, as where torch computes the loss in FP32 and casts its gradient. BF16
gradients carry the 1 / count of a mean from the start. FP16 could not hold them so small without the loss scale, which
only backward knows: there the gradients are those of the sum, the weight's in FP32, and backward brings in the rest.

Where a head's rows are spread over ranks, each rank r has the logits of its own tokens:

    L_r = log(sum(exp(logits of r)))           L = log(sum(exp(L_r) over r))
    loss = L - logits[target]
    gradient of r = exp(logits of r - L) - onehot(target), where r has the target

Each rank makes L_r by `kernels.cross_entropy.logsumexp`. One gather of two FP32 values a row from each rank makes L and
the target's logit; then the gradient is written over the logits, which are read once more.

Shape legend of the three products: m tokens of the chunk, K features, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fp8booster.comm.observer import observer
from fp8booster.comm.transport import gather_bytes
from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.cross_entropy import cross_entropy, logsumexp, multiply_, write_gradient
from fp8booster.kernels.device import require_fp8
from fp8booster.kernels.product import product
from fp8booster.nn.linear.functional import check_operands, once_differentiable, output_dtype
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import delivered_amax
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT
from fp8booster.tensor import QuantizedMatrix

CHUNK_BYTES = 2**30
"""Logits of a chunk by default: 16384 tokens of 32000 in 16 bits are one chunk, of 128256 four."""

ROWS = 128
"""Chunks are multiples of this many tokens, whole tiles of the products."""

MOST_CHUNKS_IN_BF16 = 8
"""The weight's gradient of more chunks is added up in FP32, in memory of its own. In BF16 each chunk after the first
rounds the sum once more: of 8192 tokens, 0.19 % of the gradient's norm in one chunk (as natively) or in FP32, and in
BF16 0.22 % in 2, 0.28 % in 4, 0.35 % in 8 and 0.49 % in 16 chunks."""

SPREAD_LOSS = "loss over a spread vocabulary"
"""The row of `comm.statistics()`."""

SPREAD_LOSS_REASON = "FP32, two for each token"
"""A loss that FP8 rounded could not be followed, and the gradient takes from it how sure the model is."""

_IGNORED, _ELSEWHERE = -1, -2
"""For the kernels: the target of rows that do not count, and of those whose target other ranks have."""

SPENT = (
    "the gradients of this loss were given away by its first backward pass; add up all losses before one backward "
    "pass, or compute the loss again for each"
)


def default_chunk(tokens: int, vocabulary: int, features: int, bytes_each: int) -> int:
    """Return tokens a chunk: chunks of one size whose logits stay within `CHUNK_BYTES`, or half of the head's weight.

    Each chunk reads and writes the weight's gradient. Of Command-R's head, 256000 x 8192, 1024 tokens a chunk made
    that product take 61 ms for 8192 tokens, in place of 44 (benchmarks/results/h200/one-gpu.md).

    Args:
        tokens: in all.
        vocabulary: logits a token.
        features: of a hidden state.
        bytes_each: of a logit.
    """
    most = max(ROWS, features // 2 // ROWS * ROWS, CHUNK_BYTES // (aligned(vocabulary) * bytes_each) // ROWS * ROWS)
    chunks = max(1, -(-tokens // most))
    return -(-tokens // (chunks * ROWS)) * ROWS


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens that the rows of a head stand for."""

    tokens: int  # in the whole vocabulary
    columns: int  # the first so many of this rank's logits are tokens; the others are padding, which counts for nothing
    first: int = 0  # the token of the first column
    group: dist.ProcessGroup | None = None  # over which the vocabulary is spread; None: this rank has all of it

    def cross_entropy(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        ignore_index: int,
        factor: Tensor | None = None,
        scale: float = 1.0,
        cap: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `kernels.cross_entropy.cross_entropy` of whole rows.

        Args:
            logits: [R, this rank's columns and padding]; with a factor their gradient takes their place.
            targets: int64 [R], tokens of the whole vocabulary, the same on all ranks of the group.
            ignore_index: the target of rows that do not count.
            factor: float32, one value.
            scale, cap: as there, where no other ranks hold a part.

        Returns:
            (losses, float32 [R], the same on all ranks; the gradient's amax, or None where it was not found).
        """
        own = logits[:, : self.columns]
        if factor is not None:
            logits[:, self.columns :].zero_()
        if self.group is None:
            return cross_entropy(own, targets, ignore_index=ignore_index, factor=factor, scale=scale, cap=cap)
        if scale != 1.0 or cap is not None:
            raise ValueError(
                "logits that are spread over ranks are neither scaled nor capped here; compute them, and their loss, "
                "as Colossal-AI does (fused=False)"
            )
        return self._spread(own, targets, targets != ignore_index, factor)

    def _spread(
        self, logits: Tensor, targets: Tensor, kept: Tensor, factor: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        place = targets - self.first
        here = (place >= 0) & (place < self.columns)
        if self.columns:
            column = torch.where(here, place, 0)
            at_column = logits.gather(1, column[:, None])[:, 0].float()
            own = logsumexp(logits, torch.where(kept, column, _IGNORED), ignore_index=_IGNORED)
        else:
            at_column = torch.zeros(len(targets), dtype=torch.float32, device=logits.device)
            own = torch.full_like(at_column, -torch.inf)
        values, ranks = torch.stack((own, torch.where(here, at_column, 0.0))), dist.get_world_size(self.group)
        gathered = values.new_empty((ranks, *values.shape))
        observer.count_plain(SPREAD_LOSS, ranks, values.nbytes, SPREAD_LOSS_REASON, "all_gather_into_tensor")
        gather_bytes(gathered.view(-1), values.view(-1), self.group)
        # FP32 and in the ranks' order on all of them, so that each has the same loss, bit for bit
        known = (targets >= 0) & (targets < self.tokens)
        # a row whose target is no token is NaN, as the kernel has it
        whole = torch.where(known, gathered[:, 0].logsumexp(0), torch.nan)
        losses = torch.where(kept, whole - gathered[:, 1].sum(0), 0.0)
        if factor is None or not self.columns:
            return losses, None
        columns = torch.where(kept, torch.where(here, place, _ELSEWHERE), _IGNORED)
        return losses, write_gradient(logits, columns, whole, ignore_index=_IGNORED, factor=factor)


@dataclass(eq=False)
class HeadProducts:
    """Products in the dtype of hidden states and weight."""

    weight: Tensor  # [V, K]
    bias: Tensor | None  # [V]
    wanted: tuple[bool, bool, bool]  # which of hidden states, weight and bias need gradients
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
        for_hidden, for_weight, _ = self.wanted
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
    wanted: tuple[bool, bool, bool]
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
        for_hidden, for_weight, _ = self.wanted
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


class _Options(NamedTuple):
    """Everything that the loss of one call is computed by, besides its operands."""

    products: HeadProducts | FP8HeadProducts
    vocabulary: VocabularyPart
    dtype: torch.dtype
    ignore_index: int
    chunk: int
    mean: bool
    scale: float
    cap: float | None


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss, float32 []."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [M, K]
        weight: Tensor,  # [V, K]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [M]
        how: _Options,
    ) -> Tensor:
        in_fp16, wanted = how.dtype is torch.float16, how.products.wanted
        one = torch.ones((), dtype=torch.float32, device=hidden.device)
        counted = (targets != how.ignore_index).sum()
        count = counted if how.mean else one
        share = one / count.clamp(min=1)
        factor = (one if in_fp16 else share) if any(wanted) else None
        losses: list[Tensor] = []
        hidden_gradients: list[Tensor] = []
        weight_gradient = bias_gradient = None
        for part, part_targets in zip(hidden.split(how.chunk), targets.split(how.chunk), strict=True):
            part = part.to(how.dtype)
            logits = how.products.logits(part)
            loss, amax = how.vocabulary.cross_entropy(
                logits, part_targets, ignore_index=how.ignore_index, factor=factor, scale=how.scale, cap=how.cap
            )
            losses.append(loss)
            if wanted[2]:
                part_of_bias = logits.sum(0, dtype=torch.float32)
                bias_gradient = part_of_bias if bias_gradient is None else bias_gradient.add_(part_of_bias)
            if wanted[0] or wanted[1]:
                part_of_hidden, weight_gradient = how.products.gradients(part, logits, amax, weight_gradient)
                if part_of_hidden is not None:
                    hidden_gradients.append(part_of_hidden)
            del logits  # before the next chunk's are made
        gradients = [None, weight_gradient, bias_gradient]
        if hidden_gradients:
            one_piece = len(hidden_gradients) == 1
            gradients[0] = hidden_gradients[0].contiguous() if one_piece else torch.cat(hidden_gradients)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        if not in_fp16:
            gradients = [each if each is None else each.to(of) for each, of in zip(gradients, ctx.dtypes, strict=True)]
        # an attribute, not saved tensors: what is given away must have no other holder, or autograd would copy it
        ctx.gradients, ctx.share, ctx.counted = gradients, share if in_fp16 else None, counted
        total = torch.cat(losses).sum()
        return total / count if how.mean else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        if ctx.gradients is None:
            raise RuntimeError(SPENT)
        gradients, ctx.gradients = ctx.gradients, None
        factor = gradient.float() if ctx.share is None else gradient.float() * ctx.share
        # of no token the gradients are zeros, natively also where the loss is divided by how many there are
        factor = torch.where(ctx.counted > 0, factor, 0.0)
        for index, (each, dtype) in enumerate(zip(gradients, ctx.dtypes, strict=True)):
            if each is not None:
                gradients[index] = multiply_(each, factor).to(dtype)
        return *gradients, None, None


def _check_targets(hidden: Tensor, targets: Tensor, ignore_index: int, tokens: int) -> None:
    if hidden.dim() != 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; give a matrix of [tokens, features]")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets has shape {tuple(targets.shape)}; give {hidden.shape[0]} values, one for each token")
    if targets.dtype is not torch.int64:
        raise TypeError(f"targets is {targets.dtype}; cast it to int64")
    if targets.device.type == "cpu" and not isinstance(targets, FakeTensor):  # which has no values
        wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= tokens))]
        if wrong.numel():
            raise ValueError(
                f"targets holds {wrong[0].item()}, which is no token of a vocabulary of {tokens}; tokens that do not "
                f"count are {ignore_index}"
            )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
    reduction: str = "mean",
    scale: float = 1.0,
    cap: float | None = None,
    casts: Casts | None = None,
    quantized_weight: QuantizedMatrix | None = None,
    vocabulary: VocabularyPart | None = None,
) -> Tensor:
    """Compute `F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)` with one chunk of logits at a time.

    Memory: the logits of `chunk_tokens` tokens in the dtype of `hidden` (or autocast's), with `casts` as much again
    for the FP8 copies of their gradient; then, from forward to backward, the gradients of hidden states, weight and
    bias. Where gradients are not recorded, the logits alone. The first backward pass gives the gradients away; a second
    one over the same loss is refused. Compiled code leaves its graph for it.

    Args:
        hidden: [M, K], BF16, FP16 or FP32.
        weight: [V, K] of the same dtype, or any of the three under autocast.
        targets: int64 [M]: the token that each hidden state is to predict. On a GPU one that is neither in [0, V) nor
            `ignore_index` makes the loss NaN; on the CPU it is refused.
        bias: [V] or None.
        ignore_index: the target of tokens that do not count.
        chunk_tokens: tokens a chunk; None takes `default_chunk`. More than `MOST_CHUNKS_IN_BF16` chunks add the
            weight's gradient up in FP32, in memory of its own.
        reduction: "mean" over the tokens that count (NaN where there are none, as in torch), or "sum".
        scale, cap: positive; what the loss reads is scale * logits, or cap * tanh(scale * logits / cap).
        casts: compute the head's three products in FP8 with these; None computes them in the dtype of `hidden`.
        quantized_weight: with `casts`, the FP8 weight and its transpose, if they are there already.
        vocabulary: which tokens the weight's rows are, where some are padding or other ranks hold the rest; None where
            each is a token. The ranks of its group call this with the same hidden states and targets. Each gets the
            whole loss, the gradients of its own rows, and its own part of the hidden states' gradient, which is the sum
            over the ranks.

    Returns:
        float32, shape [].

    Raises:
        ValueError: sizes or values that do not fit, or FP8 on a device without FP8 products.
        TypeError: dtypes that do not fit.
        RuntimeError: in a second backward pass over one loss.
    """
    if torch.compiler.is_compiling():  # no decorator: the compiler takes seconds to import
        options: dict[str, Any] = {"bias": bias, "ignore_index": ignore_index, "chunk_tokens": chunk_tokens}
        options |= {"reduction": reduction, "scale": scale, "cap": cap, "casts": casts}
        options |= {"quantized_weight": quantized_weight, "vocabulary": vocabulary}
        return torch.compiler.disable(linear_cross_entropy)(hidden, weight, targets, **options)
    if vocabulary is None:
        vocabulary = VocabularyPart(tokens=weight.shape[0], columns=weight.shape[0])
    check_operands(hidden, weight, bias)
    _check_targets(hidden, targets, ignore_index, vocabulary.tokens)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; use 'mean' or 'sum'")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; give 1 or more, or None for the default")
    if scale <= 0 or (cap is not None and cap <= 0):
        raise ValueError(f"scale is {scale} and cap is {cap}; give positive numbers, or leave them out")
    device, dtype = hidden.device.type, output_dtype(hidden)
    tokens, (rows, features) = hidden.shape[0], weight.shape
    chunk = default_chunk(tokens, rows, features, dtype.itemsize) if chunk_tokens is None else chunk_tokens
    gradients = torch.is_grad_enabled()
    wanted = (
        gradients and hidden.requires_grad,
        gradients and weight.requires_grad,
        gradients and bias is not None and bias.requires_grad,
    )
    if tokens == 0:  # torch's result for no tokens, with gradients of zero
        operands = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
        nothing = torch.stack([tensor.flatten()[:0].float().sum() for tensor in operands]).sum()
        return nothing + torch.nan if reduction == "mean" else nothing
    few_chunks = dtype is not torch.float16 and -(-tokens // chunk) <= MOST_CHUNKS_IN_BF16
    sum_dtype = weight.dtype if few_chunks else torch.float32
    with torch.no_grad(), torch.autocast(device, enabled=False):
        head_bias = None if bias is None else bias.to(dtype)
        products: HeadProducts | FP8HeadProducts
        if casts is None:
            products = HeadProducts(weight.to(dtype), head_bias, wanted, sum_dtype)
        else:
            require_fp8(hidden.device, casts.config.emulate, casts.scaling.granularity)
            if quantized_weight is None:
                quantized_weight = casts.quantize_weight(weight, transposed=wanted[0])
            elif wanted[0] and not quantized_weight.transpose.numel():
                raise ValueError("quantized_weight has no transpose, which the gradient of hidden needs")
            amax, shape = delivered_amax(hidden), (rows, features)
            products = FP8HeadProducts(quantized_weight, head_bias, wanted, sum_dtype, shape, casts, amax)
    how = _Options(products, vocabulary, dtype, ignore_index, chunk, reduction == "mean", scale, cap)
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, how)
