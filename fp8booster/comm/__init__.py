"""FP8 on the wire: the collectives of `torch.distributed`, and hooks for DDP and FSDP. Needs no Colossal-AI.

    import fp8booster.comm as dist_fp8
    dist_fp8.all_reduce(gradients, op=dist.ReduceOp.AVG)
    print(dist_fp8.statistics())

Collectives and sends take two more arguments, `encoding` and `min_bytes` (`encoding.Options`), and reductions also `of`
(`ReductionOptions`). All ranks of a call must give them alike. `statistics` shows which calls went uncompressed, and
why.

Every value is rounded once on its way, and in `all_reduce` twice whatever the number of ranks: pieces are exchanged,
added in FP32 from the first rank to the last, cast again and gathered. A rank decodes its own piece from the message as
the others do, so all ranks hold the same bits, at every run. By nodes (`by_nodes`) those of a node are added first, in
their dtype. An infinity or a NaN arrives as NaN, with the block that shares its scale.
"""

from fp8booster.comm.automatic_scaling import AutomaticScaling
from fp8booster.comm.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    broadcast,
    reduce_scatter,
    reduce_scatter_coalesced,
    reduce_scatter_single,
    reduce_scatter_tensor,
)
from fp8booster.comm.ddp import DDPState, average_in_fp8, ddp_hook
from fp8booster.comm.encoding import Encoding
from fp8booster.comm.fsdp import FlatFSDPState, compress_fsdp, flat_fsdp_hook, reduce_flat_fsdp
from fp8booster.comm.observer import Statistics, reset_statistics, statistics
from fp8booster.comm.point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send

__all__ = [
    "AutomaticScaling",
    "DDPState",
    "Encoding",
    "FlatFSDPState",
    "P2POp",
    "Statistics",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "average_in_fp8",
    "batch_isend_irecv",
    "broadcast",
    "compress_fsdp",
    "ddp_hook",
    "flat_fsdp_hook",
    "irecv",
    "isend",
    "recv",
    "reduce_flat_fsdp",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reset_statistics",
    "send",
    "statistics",
]
