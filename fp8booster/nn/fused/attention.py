"""Attention of a fused layer: PyTorch's SDPA, as transformers calls it, or one kernel for packed sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8booster.nn.fused.packing import Sequences
from fp8booster.nn.linear.functional import once_differentiable

_READ_BY_SDPA = ("is_causal", "position_bias", "cache", "softcap", "head_mask")
"""What transformers' attentions read of the arguments that a model passes on, and `attend` does not."""


def why_unlike(implementation: str, arguments: Mapping[str, Any]) -> str | None:
    """Return why `attend` computes something else than transformers' attention of this name; None: it does not.

    Args:
        implementation: `attn_implementation`.
        arguments: of the layer, by name.
    """
    if implementation != "sdpa":
        return f"attn_implementation={implementation!r}"
    for name in _READ_BY_SDPA:
        if arguments.get(name) is not None:
            return f"it is given {name}"
    return "its weights are asked for" if arguments.get("output_attentions") else None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attend by PyTorch's SDPA, causally where no mask says more, and by a flash attention that was activated.

    Args:
        query: [B, Hq, S, D].
        key: [B, Hkv, S', D], Hkv a divisor of Hq: queries share heads of keys and values in their order.
        value: [B, Hkv, S', V].
        mask: [B, 1, S, at least S'], as transformers makes it.
        dropout: of the scores.
        scale: of the scores; None is D**-0.5.

    Returns:
        [B, Hq, S, V].
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is not None and not takes_mask_and_groups(query):
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        groups = 1
    with _preference(query.shape[-1], dropout):
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if mask is None else mask[..., : key.shape[2]],
            dropout_p=dropout,
            # a lone token behind a cache attends to all keys; SDPA's causal mask would leave it the first
            is_causal=mask is None and query.shape[2] > 1,
            scale=scale,
            enable_gqa=groups > 1,
        )


_PREFERRED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""SDPA's kernels, where a flash attention was activated: it comes first, before cuDNN's."""


def _preference(features: int, dropout: float) -> AbstractContextManager:
    """Let SDPA take the flash attention that was activated in place of PyTorch's, where it can.

    Args:
        features: of a head of queries.
        dropout: of the scores.
    """
    # FlashAttention 4 raises for dropout and for larger heads, which SDPA does not ask before it takes it
    if activated_flash() is None or dropout or features > _MOST_FEATURES:
        return nullcontext()
    allowed = _allowed()
    return sdpa_kernel(allowed, set_priority=True) if allowed[:1] == _PREFERRED[:1] else nullcontext()


@torch.compiler.assume_constant_result  # compiled code cannot ask
def _allowed() -> list[SDPBackend]:
    """Return those of `_PREFERRED` that the program has not switched off, as by an `sdpa_kernel` of its own."""
    backends = torch.backends.cuda
    is_on = {
        SDPBackend.FLASH_ATTENTION: backends.flash_sdp_enabled,
        SDPBackend.CUDNN_ATTENTION: backends.cudnn_sdp_enabled,
        SDPBackend.EFFICIENT_ATTENTION: backends.mem_efficient_sdp_enabled,
        SDPBackend.MATH: backends.math_sdp_enabled,
    }
    return [each for each in _PREFERRED if is_on[each]()]


_MOST_FEATURES = 128


def activated_flash() -> str | None:
    """Name the flash attention that the program has activated in place of PyTorch's; None: it has not."""
    return getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()


def takes_mask_and_groups(query: Tensor) -> bool:
    """Tell whether SDPA has a kernel for a mask and heads that share keys, but the one that holds all scores in memory.

    cuDNN's is, which PyTorch prefers on Hopper and Blackwell. Flash attention takes no mask, the memory-efficient
    kernel no shared keys.
    """
    return not query.is_cuda or torch.cuda.get_device_capability(query.device)[0] in (9, 10)


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attend causally within each sequence.

    Args:
        query: [B, Hq, S, D].
        key: [B, Hkv, S, D], Hkv a divisor of Hq.
        value: [B, Hkv, S, V], V at most D.
        sequences: of the B rows, one behind the other.
        window: how many tokens each attends to at most, itself among them; None is all before it.
        sinks: [Hq], a score for each head that takes its part of the softmax and gives nothing (gpt-oss, arXiv
            2508.10925); None is none.
        dropout, scale: of the scores.

    Returns:
        [B, Hq, S, V].
    """
    rows = query.shape[0]
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    how = _Scores(sequences, window, dropout, scale)
    if why_one_by_one(query) is not None:
        attended = _one_by_one(q, k, v, sinks, how)
    else:
        size = v.shape[-1]
        v = F.pad(v, (0, q.shape[-1] - size))  # the kernel's heads have one size
        if sinks is None:
            attended, *_ = _flash_forward(q, k, v, how)
        else:
            attended = _WithSinks.apply(q, k, v, sinks, how)
        attended = attended[..., :size]  # zeros attended to give zeros
    return attended.unflatten(0, (rows, -1)).transpose(1, 2)


def why_one_by_one(query: Tensor) -> str | None:
    """Return why no kernel attends within the sequences of a batch, but one call for each; None where one does.

    Args:
        query: [..., D].
    """
    if not query.is_cuda:
        return "there is no kernel for the CPU"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention does not compute in {query.dtype}"
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        return f"flash attention has no heads of {query.shape[-1]} features"
    if torch.cuda.get_device_capability(query.device) < (8, 0):
        return "flash attention needs an Ampere GPU or a later one"
    return None


class _Scores(NamedTuple):
    """Options of the scores in the attention within sequences."""

    sequences: Sequences
    window: int | None
    dropout: float
    scale: float | None

    def of_kernel(self) -> tuple:
        """Return boundaries and lengths of queries and of keys, dropout, and whether all before a token count."""
        boundaries, longest = self.sequences.boundaries, self.sequences.longest
        return boundaries, boundaries, longest, longest, self.dropout, self.window is None

    def named(self) -> dict[str, Any]:
        """Return the scale, and how many tokens on each side a token attends to, where not to all."""
        # FlashAttention 4 takes any number for a window, also that for none
        window = {} if self.window is None else {"window_size_left": self.window - 1, "window_size_right": 0}
        return {"scale": self.scale, **window}


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, how: _Scores) -> tuple[Tensor, ...]:
    """Attend by PyTorch's flash attention; q is [tokens, Hq, D], k and v are [tokens, Hkv, D].

    Returns:
        As q; the logarithm of the sum of the exponentials of each token's scores, FP32 [Hq, tokens]; the generator's
        state, in two tensors; and one for debugging.
    """
    # `torch.nn.attention.varlen.varlen_attn` calls the same, with arguments that each version of PyTorch has its own of
    return torch.ops.aten._flash_attention_forward(q, k, v, *how.of_kernel(), False, **how.named())


def _flash_backward(dy: Tensor, saved: Sequence[Tensor], state: Sequence[Tensor], how: _Scores) -> tuple[Tensor, ...]:
    """Return gradients of q, k and v, which `saved` has with what `_flash_forward` gave; `state` is the generator's."""
    return torch.ops.aten._flash_attention_backward(dy, *saved, *how.of_kernel(), *state, **how.named())


class _WithSinks(torch.autograd.Function):
    """Flash attention with a sink for each head.

    With the sum L of the exponentials of a token's scores, and that of the sink's, s, softmax and output are those
    without a sink times L / (L + s). Backward of flash attention makes the softmax again from the logarithm of its sum,
    and what all its rows lose from the output: given those with the sink, it computes the gradients with the sink.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, how: _Scores) -> Tensor:
        attended, sums, *state = _flash_forward(q, k, v, how)
        with_sinks = torch.logaddexp(sums, sinks.float()[:, None])
        y = (attended * (sums - with_sinks).exp().t()[..., None]).to(attended.dtype)
        ctx.save_for_backward(q, k, v, y, with_sinks, sinks, *state[:2])
        ctx.how = how
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        *saved, sinks, seed, offset = ctx.saved_tensors
        y, with_sinks = saved[3:]
        gradients = _flash_backward(dy, saved, (seed, offset), ctx.how)
        parts = (sinks.float()[:, None] - with_sinks).exp()  # of the softmax, [Hq, tokens]
        dsinks = -(parts * (dy.float() * y.float()).sum(-1).t()).sum(1).to(sinks.dtype)
        return *gradients, dsinks, None


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: _Scores) -> Tensor:
    """Attend by `attend`, which defines what the kernel computes, bit for bit as each sequence by itself."""
    options: dict[str, Any] = {"dropout": how.dropout, "scale": how.scale}
    attended = []
    for begin, end in pairwise(how.sequences.on_host):
        if begin == end:
            continue
        mask, length = None, end - begin
        if sinks is not None or (how.window is not None and length > how.window):
            before = length if how.window is None else how.window
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - before)
        query, key, value = (each[begin:end].transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        if sinks is None:
            one = attend(query, key, value, mask, **options)
        else:
            one = _attend_with_sinks(query, key, value, cast(Tensor, mask), sinks, **options)
        attended.append(one[0].transpose(0, 1))
    return torch.cat(attended)


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor, *, dropout: float, scale: float | None
) -> Tensor:
    """Attend as `attend` with a sink for each head, all scores in memory; `mask` is bool [S, S]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    # the softmax in FP32, as flash attention has it
    scores = scores.float().masked_fill(~mask, -torch.inf)
    of_sinks = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
    softmax = torch.cat([scores, of_sinks], -1).softmax(-1)[..., :-1]
    return F.dropout(softmax, dropout).to(value.dtype) @ value


def kernels(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    query_heads: int = 32,
    key_heads: int = 32,
    features: int = 128,
    value_features: int | None = None,
) -> str:
    """Name the kernels that attend on a device, and why not faster ones, in a phrase.

    Args:
        device: one with `attend`'s tensors.
        dtype: theirs.
        query_heads, key_heads: on this rank.
        features: of a head of queries and keys.
        value_features: of a head of values, where they are others.
    """
    query = torch.empty(1, query_heads, 128, features, device=device, dtype=dtype)
    key, value = query[:, :key_heads], query[:, :key_heads, :, :value_features]
    with _preference(features, dropout=0.0):
        choice = torch._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=query_heads > key_heads)
    flash, hint = _flash_version(device)
    names = {
        SDPBackend.CUDNN_ATTENTION: "cuDNN",
        SDPBackend.FLASH_ATTENTION: flash,
        SDPBackend.EFFICIENT_ATTENTION: "the memory-efficient kernel",
        SDPBackend.MATH: "products that hold all scores in memory",
    }
    reason = why_one_by_one(query)
    packed = flash if reason is None else f"one call for each ({reason})"
    return f"{names[SDPBackend(choice)]}, of packed sequences {packed}{hint}"


def _flash_version(device: torch.device) -> tuple[str, str]:
    """Name PyTorch's flash attention as it is now, and what stands against a faster one."""
    current = activated_flash()
    if current is not None:
        return f"flash attention ({current})", ""
    usual = "flash attention"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return usual, ""
    return usual, " (FlashAttention 4 is faster: docs/guide.md)"
