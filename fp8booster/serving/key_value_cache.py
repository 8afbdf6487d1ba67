"""Keys and values of earlier tokens in FP8: half the memory of a cache in 16 bits.

The cache keeps what transformers' own keeps, [batch, heads, tokens, ...], so that cropping it, reordering it for beams
and selecting from it are transformers'. Its last dimension holds the FP8 values of a token in a head, and behind them
the bytes of their inverse scale.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers.cache_utils

from fp8booster.formats import E4M3
from fp8booster.scaling import INPUT, RealTime

cache_utils: Any = transformers.cache_utils  # its classes are others in another version

_SCALE_BYTES = torch.float32.itemsize


def pack(states: torch.Tensor) -> torch.Tensor:
    """Pack keys or values in E4M3 with a scale for each token and head, by its own amax.

    Args:
        states: [B, H, S, D], BF16, FP16 or FP32.

    Returns:
        uint8 [B, H, S, D + 4]: the values' bytes, and those of the inverse scale, float32.
    """
    rows = states.reshape(-1, states.shape[-1])  # a row is a token in a head, whose amax others do not change
    if not len(rows):
        return states.new_empty((*states.shape[:-1], states.shape[-1] + _SCALE_BYTES), dtype=torch.uint8)
    # exact scales: nothing but this file reads them, and powers of two would lose range
    quantized = RealTime("rowwise", power_of_two=False).cast(INPUT, rows.detach(), E4M3)
    data = quantized.data[: len(rows), : rows.shape[1]].view(torch.uint8)
    scales = quantized.inverse_scale[: len(rows), None].view(torch.uint8)
    # in one tensor, so that transformers crops, reorders and selects tokens together with their scales
    return torch.cat([data, scales], -1).view(*states.shape[:-1], -1)


def unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that were packed, [B, H, S, D] of `dtype`."""
    data, scales = packed[..., :-_SCALE_BYTES].view(E4M3), packed[..., -_SCALE_BYTES:]
    # torch reads bytes as numbers of four only where they lie together
    return (data.float() * scales.contiguous().view(torch.float32)).to(dtype)


class _Packs:
    """Mixin before a class of transformers' that appends keys and values: they are appended packed."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, [B, H, S, D]; return all, in their dtype, rounded as they are kept."""
        parts: Any = super()
        keys, values = parts.update(pack(key_states), pack(value_states), *args, **kwargs)
        return unpack(keys, key_states.dtype), unpack(values, value_states.dtype)


if hasattr(cache_utils, "DynamicLayer"):  # transformers 5

    class _FP8CacheLayer(_Packs, cache_utils.DynamicLayer):
        pass

    class FP8Cache(cache_utils.Cache):
        """A cache of keys and values in FP8: `model.generate(..., past_key_values=FP8Cache())`.

        It takes what transformers' `DynamicCache` takes in models whose layers all attend to keys and values of heads,
        and keeps all tokens where a layer attends to a window of them. One layer's are in 16 bits at a time. Keys and
        values are rounded in the call that appends them too, so a token sees the same ones however the text before it
        came.
        """

        def __init__(self) -> None:
            super().__init__(layer_class_to_replicate=_FP8CacheLayer)

else:

    class FP8Cache(_Packs, cache_utils.DynamicCache):  # type: ignore[no-redef]
        """As above; transformers 4's takes what its `DynamicCache` takes."""


def cache_bytes(cache: Any) -> int:
    """Count the bytes of keys and values in a cache of transformers', in FP8 or not, or in a tuple of each layer's.

    There are none in None, which models give that keep states, nor in layers that do so among others.
    """
    if cache is None:
        return 0
    if isinstance(cache, tuple):
        return sum(each.nbytes for layer in cache for each in layer)
    if hasattr(cache, "layers"):
        kept = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
        return sum(each.nbytes for each in kept if each is not None)
    return sum(each.nbytes for each in (*cache.key_cache, *cache.value_cache))
