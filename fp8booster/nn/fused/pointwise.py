"""Norms, rotary embedding and activations around the products, differentiable.

Each delivers the amax of what it makes, forward and backward, to the cast that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8booster.config import FP8Config
from fp8booster.kernels import activation as activation_kernel
from fp8booster.kernels import rope as rope_kernel
from fp8booster.kernels import row_norm as row_norm_kernel
from fp8booster.kernels.group_codes import GroupCodes, values_of
from fp8booster.nn.autograd import once_differentiable
from fp8booster.nn.linear.delivered_amax import deliver_amax
from fp8booster.nn.linear.functional import unaliased, unsafe_view
from fp8booster.nn.linear.made_again import Make, Recipe, deliver_recipe

Observer = Callable[[torch.Tensor, GroupCodes], None]
"""Sees what is saved in 8 bits: the values, a matrix, and their codes."""

observers: list[Observer] = []
"""Called in each forward that saves some."""


class Saving(NamedTuple):
    """What a fused norm or activation keeps for backward."""

    in_8_bits: bool = False
    """What it read, in 8 bits."""

    again: bool = False
    """What it gives is made again by backward for the product that reads it, from what it read."""

    @classmethod
    def of_norm(cls, config: FP8Config | None) -> Saving:
        """Of the norms of a decoder layer."""
        return IN_16_BITS if config is None else cls(config.saves_in_8_bits, config.recomputes_norms)

    @classmethod
    def of_activation(cls, config: FP8Config | None) -> Saving:
        """Of the activation of a feed-forward block."""
        return IN_16_BITS if config is None else cls(config.saves_in_8_bits, config.recomputes_activations)


IN_16_BITS = Saving()


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        how: tuple[float, dict[str, bool], Saving],  # epsilon, kind: one argument, as autograd looks at each
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps, kind, saving = how
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        added = None if residual is None else residual.reshape(rows.shape).contiguous()
        y, h, inverse_rms, amax, codes = row_norm_kernel.row_norm(
            rows, weight, eps, added, bias, **kind, encoded=saving.in_8_bits
        )
        if codes is not None:
            for observe in observers:
                observe(h, codes)
        kept = (h,) if codes is None else tuple(codes)
        ctx.save_for_backward(weight, inverse_rms, *kept)
        ctx.set_materialize_grads(False)
        ctx.has_residual, ctx.kind = residual is not None, {**kind, "biased": bias is not None}
        y = unsafe_view(y, x.shape)
        if saving.again:
            # copies: where an engine gathers the norm's parameters, they are gone when the product's backward runs
            factors = [each.detach().clone() for each in (weight, bias) if each is not None]
            in_tiles = not kind["centered"] and weight.dim() == 1  # a value needs no more of its row than was saved
            transpose = partial(_normalized_transpose, kind["unit_offset"]) if in_tiles else None
            make = Make(partial(_normalized_again, eps, kind, len(factors)), transpose)
            deliver_recipe(y, Recipe(make, (amax, inverse_rms, *factors, *(each.detach() for each in kept))))
        h = x.view_as(x) if residual is None else h.view(x.shape)
        return deliver_amax(y, amax), h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dh: torch.Tensor | None) -> tuple:
        weight, inverse_rms, *saved = ctx.saved_tensors
        if dy is None:  # only the sum was used
            return dh, None, None, dh if ctx.has_residual else None, None
        h = GroupCodes(*saved) if len(saved) > 1 else saved[0]
        shape = dy.shape
        dx, dweight, dbias, amax = row_norm_kernel.row_norm_backward(
            dy.reshape(h.shape).contiguous(),
            h,
            weight,
            inverse_rms,
            None if dh is None else dh.reshape(h.shape).contiguous(),
            **ctx.kind,
        )
        dx = deliver_amax(dx.view(shape), amax)
        return dx, dweight, dbias, dx if ctx.has_residual else None, None


def _normalized_again(
    eps: float,
    kind: dict[str, bool],
    factors: int,
    amax: torch.Tensor,
    inverse_rms: torch.Tensor,
    weight: torch.Tensor,
    *others: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Make.matrix`: `others` are a bias, if there are two factors, and the rows or their codes."""
    bias, saved = others[0] if factors > 1 else None, others[factors - 1 :]
    rows = saved[0] if len(saved) == 1 else values_of(GroupCodes(*saved)).to(saved[1].dtype)
    y, _, _, amax, _ = row_norm_kernel.row_norm(rows, weight, eps, None, bias, **kind)
    return y, amax


def _normalized_transpose(
    unit_offset: bool,
    amax: torch.Tensor,
    inverse_rms: torch.Tensor,
    weight: torch.Tensor,
    *saved: torch.Tensor,
    **cast: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Make.transpose`, of an RMS norm."""
    h = saved[0] if len(saved) == 1 else GroupCodes(*saved)
    return row_norm_kernel.row_norm_transposed(h, weight, inverse_rms, unit_offset=unit_offset, amax=amax, **cast)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    unit_offset: bool = False,
    saving: Saving = IN_16_BITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of `h = x + residual`; see `kernels.row_norm`.

    Args:
        x: [..., K], BF16, FP16 or FP32.
        weight: [K]; or [G, K], for x [..., G, K].
        eps: added to the mean square.
        residual: of x's shape; None adds nothing.
        unit_offset: multiply by 1 + weight, as Gemma does.
        saving: how h is kept for backward; with `again` one product reads y.

    Returns:
        (y, h), of x's shape, and of the dtype that the sum has. A block that adds to h later should take this one, not
        x: then the gradients of both meet in one kernel.
    """
    if residual is not None and residual.dtype != x.dtype:
        x, residual = _of_one_dtype(x, residual)
    kind = {"centered": False, "unit_offset": unit_offset}
    return _RowNorm.apply(x, weight, None, residual, (eps, kind, saving if torch.is_grad_enabled() else IN_16_BITS))


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    saving: Saving = IN_16_BITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer norm of `h = x + residual`; arguments and results are those of `rms_norm`, and a bias [K] or None."""
    if residual is not None and residual.dtype != x.dtype:
        x, residual = _of_one_dtype(x, residual)
    kind = {"centered": True, "unit_offset": False}
    return _RowNorm.apply(x, weight, bias, residual, (eps, kind, saving if torch.is_grad_enabled() else IN_16_BITS))


def _of_one_dtype(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Under autocast a block's output has 16 bits, and what it is added to may have 32."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.to(dtype), residual.to(dtype)


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        query_heads: int,
        key_heads: int,
        groups: int,
        pairs: dict[str, bool],
    ) -> tuple[torch.Tensor, ...]:
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
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple:
        gradients = [gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in (dq, dk, dv)]
        dqkv, amax = rope_kernel.rotate_back(*gradients, *ctx.saved_tensors, **ctx.options)
        return deliver_amax(dqkv.flatten(2), amax), None, None, None, None, None, None


def split_and_rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    query_heads: int,
    key_heads: int,
    groups: int = 1,
    **pairs: bool,
) -> tuple[torch.Tensor, ...]:
    """q, k and v, after q and k were rotated in place: views, except where a group has several heads of one of them.

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


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: dict[str, bool]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        rotated = [unaliased(heads) for heads in (query, key)]
        for heads in rotated:  # in place, as in `split_and_rotate`
            rope_kernel.rotate(heads, cos, sin, heads.shape[2], **pairs)
        return rotated[0], rotated[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple:
        angles = ctx.saved_tensors  # once, as activation checkpointing asks for
        back = []
        for gradient in (dq, dk):
            gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
            none = gradient[:, :, :0]
            back.append(rope_kernel.rotate_back(gradient, none, none, *angles, **ctx.pairs)[0])
        return *back, None, None, None


def rotate_heads(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **pairs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, rotated in place where they lie apart, as their norms made them.

    Args:
        query, key: [B, S, H, D], contiguous and just computed: nothing else may read them.
        cos, sin, pairs: as in `split_and_rotate`.
    """
    return _RotateHeads.apply(query, key, cos.contiguous(), sin.contiguous(), pairs)


class _LatentHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        kv: torch.Tensor,
        k_rotated: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: int,
        pairs: dict[str, bool],
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        query = unaliased(q).view(*q.shape[:2], heads, -1)
        rope_kernel.rotate(query, cos, sin, heads, last=True, **pairs)  # in place, as in `split_and_rotate`
        shared = k_rotated.unsqueeze(2).clone(memory_format=torch.contiguous_format)
        rope_kernel.rotate(shared, cos, sin, 1, **pairs)
        own, value = unaliased(kv).view(*kv.shape[:2], heads, -1).tensor_split([query.shape[-1] - cos.shape[-1]], -1)
        return query, torch.cat([own, shared.expand(-1, -1, heads, -1)], -1), value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple:
        cos, sin = ctx.saved_tensors
        own, shared = dk.tensor_split([dk.shape[-1] - cos.shape[-1]], -1)
        dkv = torch.cat([own, dv], -1).flatten(2)
        none = dq[:, :, :0]
        dq = dq if dq.stride(-1) == 1 else dq.contiguous()
        dq, amax = rope_kernel.rotate_back(dq, none, none, cos, sin, last=True, **ctx.pairs)
        shared = shared.sum(2, keepdim=True)
        none = shared[:, :, :0]
        dk_rotated = rope_kernel.rotate_back(shared, none, none, cos, sin, **ctx.pairs)[0]
        return deliver_amax(dq.flatten(2), amax), dkv, dk_rotated.squeeze(2), None, None, None, None


def latent_heads(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_rotated: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    **pairs: bool,
) -> tuple[torch.Tensor, ...]:
    """q, k and v of attention with latents, whose keys share what is rotated of them.

    Args:
        q: [B, S, heads * D], contiguous and just computed: nothing else may read it. It is rotated in place.
        kv: [B, S, heads * (D - R + V)], likewise: of each head its part of the key, and its value.
        k_rotated: [B, S, R], the other part of all keys.
        cos, sin: [1 or B, S, R]; the last R places of D are rotated.
        heads: of q, k and v each.
        pairs: `interleaved` and `interleaved_angles` of `kernels.rope.rotate`.

    Returns:
        q and k [B, S, heads, D], v [B, S, heads, V].
    """
    return _LatentHeads.apply(q, kv, k_rotated, cos.contiguous(), sin.contiguous(), heads, pairs)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str, gated: bool, saving: Saving) -> torch.Tensor:
        parts = _parts(x, gated)
        made = activation_kernel.activate(*parts, kind=kind, encoded=saving.in_8_bits)
        for part, of_part in zip(parts, (made.x, made.up), strict=False):
            if of_part is not None:
                for observe in observers:
                    observe(part, of_part)
        codes = [tensor for each in (made.x, made.up) if each is not None for tensor in each]
        ctx.save_for_backward(*(codes or (x,)))
        ctx.kind, ctx.gated = kind, gated
        y = unsafe_view(made.y, (*x.shape[:-1], made.y.shape[1]))
        if saving.again:
            make = Make(partial(_activated_again, kind, gated), partial(_activated_transpose, kind, gated))
            deliver_recipe(y, Recipe(make, (made.amax, *(codes or (x.detach(),)))))
        return deliver_amax(y, made.amax)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        parts = _saved_parts(ctx.saved_tensors, ctx.gated)
        rows = dy.reshape(-1, dy.shape[-1]).contiguous()
        dx, amax = activation_kernel.activate_backward(rows, *parts, kind=ctx.kind)
        return deliver_amax(dx.view(*dy.shape[:-1], dx.shape[1]), amax), None, None, None


def _parts(x: torch.Tensor, gated: bool) -> tuple[torch.Tensor, ...]:
    """As matrices: gate and up, or what is activated alone."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.chunk(2, 1) if gated else (rows,)


def _saved_parts(saved: Sequence[torch.Tensor], gated: bool) -> Sequence[torch.Tensor | GroupCodes]:
    """The same, of what was saved: in 16 bits one tensor, in 8 bits codes and amaxes of each."""
    if len(saved) == 1:
        return _parts(saved[0], gated)
    return [GroupCodes(*pair) for pair in zip(saved[::2], saved[1::2], strict=True)]


def _activated_again(
    kind: str, gated: bool, amax: torch.Tensor, *saved: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Make.matrix`."""
    return activation_kernel.activate(*_saved_parts(saved, gated), kind=kind)[:2]


def _activated_transpose(
    kind: str, gated: bool, amax: torch.Tensor, *saved: torch.Tensor, **cast: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Make.transpose`."""
    return activation_kernel.activate_transposed(*_saved_parts(saved, gated), kind=kind, amax=amax, **cast)


def activate(x: torch.Tensor, kind: str, *, saving: Saving = IN_16_BITS) -> torch.Tensor:
    """`f(x)`; see `kernels.activation`.

    Args:
        x: [..., F], BF16, FP16 or FP32.
        kind: "silu", "gelu_tanh" or "gelu".
        saving: how x is kept for backward; with `again` the product that reads what is returned saves nothing of it.

    Returns:
        [..., F].
    """
    return _Activation.apply(x, kind, False, saving if torch.is_grad_enabled() else IN_16_BITS)


def activate_gated(gate_up: torch.Tensor, kind: str = "silu", *, saving: Saving = IN_16_BITS) -> torch.Tensor:
    """`f(gate) * up`, as `activate`.

    Args:
        gate_up: [..., 2 F], gate first.
        kind, saving: as there.

    Returns:
        [..., F].
    """
    return _Activation.apply(gate_up, kind, True, saving if torch.is_grad_enabled() else IN_16_BITS)
