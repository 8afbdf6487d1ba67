"""What Colossal-AI sends over the groups given to `compress_groups` goes through `fp8booster.comm`, in FP8.

For all other groups its functions stay what they are, so that one of its plugins with `fp8_communication=True` is not
changed.

In Colossal-AI a model's policy or a mode of sequence parallelism may not pass `fp8_communication` on: GPT-2 splits its
input without it, and linear layers along a sequence send BF16 in every case (shardformer/layer/_operation.py:585,770).
The layers that compute in FP8 do not come here; these are the operations of the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fp8booster.colossal.compat.registry import wrap
from fp8booster.colossal.compat.upstream.attention import no_flash_attn
from fp8booster.colossal.compressed_groups import is_compressed


def _in_compressed_group(args: tuple, kwargs: dict) -> bool:
    group = kwargs.get("group") or kwargs.get("process_group")
    if group is None:
        group = next((argument for argument in args if isinstance(argument, dist.ProcessGroup)), None)
    return is_compressed(group)


@wrap(
    "quantization.fp8:all_reduce_fp8 reduce_scatter_fp8 all_gather_fp8 all_to_all_fp8 all_to_all_single_fp8",
    "187,258,401,648,680",
    needed_when="ranks of tensor, sequence or expert parallelism send FP8",
)
def collectives_send_fp8(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Colossal-AI's `*_fp8` collectives over compressed groups are those of `colossal/tensor/collectives.py`.

    Without it the sums are never compressed, and the rest is only between nodes, with one scale for all of a message.
    No longer needed when shardformer takes its collectives from an argument.
    """
    if not _in_compressed_group(args, kwargs):
        return upstream(*args, **kwargs)
    from fp8booster.colossal.tensor import collectives

    return getattr(collectives, upstream.__name__)(*args, **kwargs)


@wrap(
    "shardformer.layer._operation:_reduce _gather _all_to_all _all_to_all_single",
    "1179,1211,1253,1263",
    needed_when="a policy or a mode of sequence parallelism does not pass fp8_communication on",
)
def operations_ask_for_fp8(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Shardformer's operations over compressed groups take their `*_fp8` collectives.

    Without it activations are sent in 16 bits where their caller leaves `fp8_communication` out. No longer needed when
    every model's policy passes it on.
    """
    if _in_compressed_group(args, kwargs):
        bound = inspect.signature(upstream).bind(*args, **kwargs)
        bound.arguments["fp8_communication"] = True
        args, kwargs = bound.args, bound.kwargs
    return upstream(*args, **kwargs)


@wrap(
    "shardformer.layer._operation:gather_forward_split_backward linear_gather_forward_reducescatter_backward "
    "linear_reducescatter_forward_gather_backward matmul_gather_forward_reducescatter_backward",
    "585,770,1358",
    needed_when="layers along a sequence stay in 16 bits, or a head gathers its logits",
)
def sequences_are_sent_in_fp8(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Layers in 16 bits over compressed groups send a sequence in FP8, and features such as logits as they are.

    Without it linear layers along a sequence send 16 bits, and logits that a head gathers are rounded. No longer needed
    when `linear_gather_forward_reducescatter_backward` takes `fp8_communication`.
    """
    if not _in_compressed_group(args, kwargs):
        return upstream(*args, **kwargs)
    from fp8booster.colossal.tensor import operations

    return getattr(operations, upstream.__name__)(*args, **kwargs)


@wrap(
    "shardformer.layer.attn:RingAttention.attention",
    "496",
    needed_when='sequence_parallelism_mode="ring_attn" over a compressed group, and flash-attn is installed',
    only_if=lambda module: not no_flash_attn(module),
)
def rings_send_fp8(
    upstream: Callable, q: Any, k: Any, v: Any, sp_axis: int, *args: Any, pg_mesh: Any = None, **kwargs: Any
) -> Any:
    """Ring attention over compressed groups is that of `colossal/tensor/ring.py`, as it is without flash-attn.

    Without it keys and values go round in 16 bits. No longer needed when `RingAttention.attention` can be given its
    transport.
    """
    attention = upstream
    if is_compressed(pg_mesh.get_group_along_axis(sp_axis)):
        from fp8booster.colossal.tensor import ring

        attention = ring.attention
    return attention(q, k, v, sp_axis, *args, pg_mesh=pg_mesh, **kwargs)
