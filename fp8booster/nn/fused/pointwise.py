"""Norms, rotary embedding and activations around the products, differentiable.

Each kernel knows the amax of what it wrote, and delivers it to the cast that follows, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8booster.config import FP8Config
from fp8booster.kernels import activation as activation_kernel
from fp8booster.kernels import rope as rope_kernel
from fp8booster.kernels import row_norm as row_norm_kernel
from fp8booster.kernels.activation import RowWeights
from fp8booster.kernels.group_codes import GroupCodes, values_of
from fp8booster.nn.linear.functional import once_differentiable, unaliased, unsafe_view
from fp8booster.nn.weights.delivered import Recipe, deliver_amax, deliver_recipe

Observer = Callable[[Tensor, GroupCodes], None]
"""Is shown what is saved in 8 bits: the values, a matrix, and their codes."""

observers: list[Observer] = []
"""Called by each forward that saves codes."""


class Saving(NamedTuple):
    """Tensors that a fused norm or activation keeps for backward."""

    in_8_bits: bool = False  # what it read is saved as 8-bit codes
    recompute: bool = False
    """Backward computes the output again for the product that reads it, which then saves nothing of its input."""

    @classmethod
    def of_norm(cls, config: FP8Config | None) -> Saving:
        """Return what the norms of a decoder layer save."""
        return PLAIN if config is None else cls(config.saves_in_8_bits, config.recomputes_norms)

    @classmethod
    def of_activation(cls, config: FP8Config | None) -> Saving:
        """Return what the activation of a feed-forward block saves."""
        return PLAIN if config is None else cls(config.saves_in_8_bits, config.recomputes_activations)


PLAIN = Saving()
"""What was read is saved in its own dtype, and so is what the product reads."""


def _saved(values: Iterable[Tensor], codes: Iterable[GroupCodes | None]) -> tuple[Tensor, ...]:
    """Return the tensors of codes, which observers are shown; none where the values are saved themselves."""
    flat: list[Tensor] = []
    for each, encoded in zip(values, codes, strict=True):
        if encoded is not None:
            flat += encoded
            for observe in observers:
                observe(each, encoded)
    return tuple(flat)


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        how: tuple[float, dict[str, bool], Saving],  # epsilon, kind: one argument, as autograd looks at each
    ) -> tuple[Tensor, Tensor]:
        eps, kind, saving = how
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        added = None if residual is None else residual.reshape(rows.shape).contiguous()
        y, h, inverse_rms, amax, codes = row_norm_kernel.row_norm(
            rows, weight, eps, added, bias, **kind, encoded=saving.in_8_bits
        )
        kept = (h,) if codes is None else _saved([h], [codes])
        ctx.save_for_backward(weight, inverse_rms, *kept)
        ctx.set_materialize_grads(False)  # a sum that nobody read would get zeros, to be read and added
        ctx.has_residual, ctx.kind = residual is not None, {**kind, "biased": bias is not None}
        y = unsafe_view(y, x.shape)
        if saving.recompute:
            # copies: where an engine gathers the norm's parameters, they are gone when the product's backward runs
            factors = [each.detach().clone() for each in (weight, bias) if each is not None]
            saved = amax, inverse_rms, *factors, *(each.detach() for each in kept)
            in_tiles = not kind["centered"] and weight.dim() == 1  # a value needs no more of its row than was saved
            transpose = partial(_normalized_transpose, kind["unit_offset"]) if in_tiles else None
            deliver_recipe(y, Recipe(partial(_normalized_again, eps, kind, len(factors)), saved, transpose))
        return deliver_amax(y, amax), x.view_as(x) if residual is None else h.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple:
        weight, inverse_rms, *saved = ctx.saved_tensors
        if dy is None:  # only the sum was used
            return dh, None, None, dh if ctx.has_residual else None, None
        h = _values_or_codes(saved)
        dx, dweight, dbias, amax = row_norm_kernel.row_norm_backward(
            dy.reshape(h.shape).contiguous(),
            h,
            weight,
            inverse_rms,
            # the kernel adds the gradient of the residual stream: autograd would read and write all of it once more
            None if dh is None else dh.reshape(h.shape).contiguous(),
            **ctx.kind,
        )
        dx = deliver_amax(dx.view(dy.shape), amax)
        return dx, dweight, dbias, dx if ctx.has_residual else None, None


def _values_or_codes(saved: Sequence[Tensor]) -> Tensor | GroupCodes:
    return saved[0] if len(saved) == 1 else GroupCodes(*saved)


def _normalized_again(
    eps: float,
    kind: dict[str, bool],
    factors: int,
    amax: Tensor,
    inverse_rms: Tensor,
    weight: Tensor,
    *others: Tensor,  # a bias, if there are two factors, and the rows or their codes
) -> tuple[Tensor, Tensor]:
    """As `Recipe.matrix`."""
    bias, h = others[0] if factors > 1 else None, _values_or_codes(others[factors - 1 :])
    rows = values_of(h).to(h.dtype) if isinstance(h, GroupCodes) else h
    y, _, _, amax, _ = row_norm_kernel.row_norm(rows, weight, eps, None, bias, **kind)
    return y, amax


def _normalized_transpose(
    unit_offset: bool, amax: Tensor, inverse_rms: Tensor, weight: Tensor, *saved: Tensor, **cast: Any
) -> tuple[Tensor, Tensor]:
    """As `Recipe.transpose`, of an RMS norm."""
    h = _values_or_codes(saved)
    return row_norm_kernel.row_norm_transposed(h, weight, inverse_rms, unit_offset=unit_offset, amax=amax, **cast)


def row_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    centered: bool = False,
    unit_offset: bool = False,
    saving: Saving = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Normalise the rows of `h = x + residual`: RMS norm or, centered, layer norm; see `kernels.row_norm`.

    Args:
        x: [..., K], BF16, FP16 or FP32.
        weight: [K]; or [G, K], for x [..., G, K].
        eps: added to the mean square.
        residual: of x's shape; None adds nothing.
        bias: as the weight, or None.
        centered: subtract each row's mean first.
        unit_offset: multiply by 1 + weight, as Gemma does.
        saving: how h is kept for backward; with `recompute` one product reads y.

    Returns:
        (y, h), of x's shape, and of the dtype that the sum has. A block that adds to h later should take this one, not
        x: then the gradients of both meet in one kernel.
    """
    if residual is not None and residual.dtype != x.dtype:
        # under autocast a block's output has 16 bits, and what it is added to may have 32
        dtype = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(dtype), residual.to(dtype)
    kind = {"centered": centered, "unit_offset": unit_offset}
    return _RowNorm.apply(x, weight, bias, residual, (eps, kind, saving if torch.is_grad_enabled() else PLAIN))


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        query_heads: int,
        key_heads: int,
        groups: int,
        pairs: dict[str, bool],
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.options = {**pairs, "groups": groups}
        heads = unaliased(qkv).view(*qkv.shape[:2], query_heads + 2 * key_heads, -1)
        # in place: nothing that made qkv reads it again
        rope_kernel.rotate(heads, cos, sin, query_heads + key_heads, **ctx.options)
        if groups == 1:
            return heads.split([query_heads, key_heads, key_heads], 2)
        of_group = [each // groups for each in (query_heads, key_heads, key_heads)]
        return tuple(each.flatten(2, 3) for each in heads.unflatten(2, (groups, -1)).split(of_group, 3))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple:
        gradients = [gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in (dq, dk, dv)]
        dqkv, amax = rope_kernel.rotate_back(*gradients, *ctx.saved_tensors, **ctx.options)
        # the kernel that rotates back has seen all that the product's backward casts
        return deliver_amax(dqkv.flatten(2), amax), None, None, None, None, None, None


def split_and_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, query_heads: int, key_heads: int, groups: int = 1, **pairs: bool
) -> tuple[Tensor, ...]:
    """Rotate q and k in place, and return q, k and v: views, unless a group has several heads of one of them.

    Args:
        qkv: [B, S, (query_heads + 2 key_heads) * D], just computed: nothing else may read it.
        cos, sin: [1 or B, S, R]; the first R places of D are rotated.
        query_heads, key_heads: heads of q, and of k and v each.
        groups: of heads, each of which has its q, k and v side by side.
        pairs: `interleaved` and `interleaved_angles` of `kernels.rope.rotate`.

    Returns:
        q [B, S, query_heads, D], k and v [B, S, key_heads, D].
    """
    return _SplitAndRotate.apply(qkv, cos.contiguous(), sin.contiguous(), query_heads, key_heads, groups, pairs)


class _Rotate(torch.autograd.Function):
    """Rotates tensors in place, [B, S, ...] into [B, S, H, D], each with its number of heads and options."""

    @staticmethod
    def forward(
        ctx: Any, cos: Tensor, sin: Tensor, how: list[tuple[int, dict[str, bool]]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.how, ctx.shapes = how, [each.shape for each in tensors]
        rotated = []
        for each, (heads, options) in zip(tensors, how, strict=True):
            rotated.append(unaliased(each).view(*each.shape[:2], heads, -1))
            rope_kernel.rotate(rotated[-1], cos, sin, heads, **options)
        return tuple(rotated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        angles = ctx.saved_tensors  # once, as activation checkpointing asks for
        back = []
        for gradient, shape, (_, options) in zip(gradients, ctx.shapes, ctx.how, strict=True):
            gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
            none = gradient[:, :, :0]
            dx, amax = rope_kernel.rotate_back(gradient, none, none, *angles, **options)
            back.append(deliver_amax(dx.view(shape), amax))
        return None, None, None, *back


def rotate_heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **pairs: bool) -> tuple[Tensor, ...]:
    """Return queries and keys, rotated in place where they lie apart, as their norms made them.

    Args:
        query, key: [B, S, H, D], contiguous and just computed: nothing else may read them.
        cos, sin, pairs: as in `split_and_rotate`.
    """
    how = [(query.shape[2], pairs), (key.shape[2], pairs)]
    return _Rotate.apply(cos.contiguous(), sin.contiguous(), how, query, key)


def latent_heads(
    q: Tensor, kv: Tensor, k_rotated: Tensor, cos: Tensor, sin: Tensor, *, heads: int, **pairs: bool
) -> tuple[Tensor, ...]:
    """Return q, k and v of attention with latents, whose keys share what is rotated of them.

    Args:
        q: [B, S, heads * D], contiguous and just computed: nothing else may read it. It is rotated in place.
        kv: [B, S, heads * (D - R + V)]: of each head its part of the key, and its value.
        k_rotated: [B, S, R], the other part of all keys.
        cos, sin: [1 or B, S, R]; the last R places of D are rotated.
        heads: of q, k and v each.
        pairs: `interleaved` and `interleaved_angles` of `kernels.rope.rotate`.

    Returns:
        q and k [B, S, heads, D], v [B, S, heads, V].
    """
    # it is rotated in place, and a slice of the product has gaps between its rows
    shared = k_rotated.clone(memory_format=torch.contiguous_format)
    how = [(heads, {**pairs, "last": True}), (1, pairs)]
    query, shared = _Rotate.apply(cos.contiguous(), sin.contiguous(), how, q, shared)
    of_heads = kv.view(*kv.shape[:2], heads, -1)
    own = query.shape[-1] - cos.shape[-1]
    key, value = of_heads.split([own, of_heads.shape[-1] - own], -1)
    return query, torch.cat([key, shared.expand(-1, -1, heads, -1)], -1), value


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor | None, choices: Tensor | None, kind: str, gated: bool, saving: Saving
    ) -> Tensor:
        parts = _parts((x,), gated)
        weights = None if values is None or choices is None else RowWeights(values, choices)
        made = activation_kernel.activate(*parts, kind=kind, encoded=saving.in_8_bits, weights=weights)
        kept = (x,) if made.x is None else _saved(parts, (made.x, made.up)[: len(parts)])
        ctx.save_for_backward(values, choices, *kept)
        ctx.kind, ctx.gated = kind, gated
        y = unsafe_view(made.y, (*x.shape[:-1], made.y.shape[1]))
        if saving.recompute:
            saved = made.amax, *(each.detach() for each in kept)
            again, transpose = partial(_activated_again, kind, gated), partial(_activated_transpose, kind, gated)
            deliver_recipe(y, Recipe(again, saved, transpose))
        return deliver_amax(y, made.amax)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        rows = dy.reshape(-1, dy.shape[-1]).contiguous()
        values, choices, *kept = ctx.saved_tensors
        weights = None if values is None else RowWeights(values, choices)
        parts = _parts(kept, ctx.gated)
        dx, amax, dvalues = activation_kernel.activate_backward(rows, *parts, kind=ctx.kind, weights=weights)
        return deliver_amax(dx.view(*dy.shape[:-1], dx.shape[1]), amax), dvalues, None, None, None, None


def _parts(saved: Sequence[Tensor], gated: bool) -> Sequence[Any]:
    """Return gate and up, or what is activated alone, as matrices, of the tensor with both or of the codes of each."""
    if len(saved) == 1:
        rows = saved[0].reshape(-1, saved[0].shape[-1])
        return rows.chunk(2, 1) if gated else (rows,)
    return [GroupCodes(*pair) for pair in zip(saved[::2], saved[1::2], strict=True)]


def _activated_again(kind: str, gated: bool, amax: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor]:
    """As `Recipe.matrix`."""
    return activation_kernel.activate(*_parts(saved, gated), kind=kind)[:2]


def _activated_transpose(kind: str, gated: bool, amax: Tensor, *saved: Tensor, **cast: Any) -> tuple[Tensor, Tensor]:
    """As `Recipe.transpose`."""
    return activation_kernel.activate_transposed(*_parts(saved, gated), kind=kind, amax=amax, **cast)


def activate(
    x: Tensor, kind: str = "silu", *, gated: bool = False, saving: Saving = PLAIN, weights: RowWeights | None = None
) -> Tensor:
    """Return `f(x)` or, gated, `f(gate) * up`, [..., F]; see `kernels.activation`.

    Args:
        x: [..., F], or gated [..., 2 F], gate first; BF16, FP16 or FP32.
        kind: "silu", "gelu_tanh" or "gelu".
        gated: x has gate and up.
        saving: how x is kept for backward; with `recompute` the product that reads what is returned saves none of it.
        weights: multiply the rows of a matrix x, and get gradients; not with `recompute`. None: they are 1.
    """
    values, choices = (None, None) if weights is None else weights
    return _Activation.apply(x, values, choices, kind, gated, saving if torch.is_grad_enabled() else PLAIN)
