"""FSDP1 (`FullyShardedDataParallel`) whose parameters are gathered in FP8, straight for the products of FP8 layers.

    convert_to_fp8(model)
    model = FullyShardedDataParallel(model, auto_wrap_policy=...)
    compress_flat_fsdp(model)

FSDP1 lays the parameters of a unit one after the other and gives each rank an even part. Before a unit runs its ranks
agree on the amax of each FP8 layer's weight, cast their parts of them, and gather these bytes together with the 16-bit
values of the unit's other parameters. The gathered bytes are what the layers multiply by; they and their transposes go
with the unit's other memory when it is resharded. The 16-bit weight holds the value of its bytes, for whoever reads it;
the optimizer updates the exact shard, and a checkpoint gathers that.

FSDP1 has an extension point for gradients only (`comm.fsdp`). The gather is a method of the unit's handle,
`FlatParamHandle._all_gather_flat_param`, which a subclass overrides here, put in place by class.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._flat_param import FlatParamHandle

from fp8booster.comm.encoding import DEFAULT, Encoding
from fp8booster.comm.fsdp import reduce_flat_fsdp
from fp8booster.comm.observer import observer
from fp8booster.nn.fsdp.flat_weights import NAME, FlatWeights
from fp8booster.nn.fsdp.resharding import follow_units
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.modules import change_class

_OVERRIDDEN = ("_all_gather_flat_param", "_free_unsharded_flat_param", "unshard")


class FP8FlatParamHandle(FlatParamHandle):
    """The handle of a unit that gathers the weights of FP8 layers in FP8."""

    fp8_weights: FlatWeights
    is_rounded: bool
    """The unsharded parameter, if there is one, holds values that were rounded to FP8."""

    @classmethod
    def convert_in_place(cls, handle: FlatParamHandle, merged: Sequence[MergedLayers] = ()) -> None:
        """Turn a handle into this class in place; `merged` are layers of its unit that are multiplied as one."""
        converted = change_class(handle, cls)
        dtype = handle._fwd_bwd_param_dtype or handle.flat_param.dtype
        converted.fp8_weights = FlatWeights(handle.flat_param, handle.rank, handle.world_size, merged, dtype)
        converted.is_rounded = False

    def unshard(self) -> None:
        """Gather the parameter unless it is there; for a checkpoint, again where what is there was rounded."""
        if self._wants_exact_values() and self.is_rounded:
            self._free_unsharded_flat_param()
        super().unshard()

    def _all_gather_flat_param(self, padded_unsharded_flat_param: torch.Tensor) -> torch.Tensor:
        shard = self.flat_param.data
        reason = self._uncompressed_reason(shard)
        if reason is not None:
            observer.count_plain(NAME, self.world_size, shard.nbytes, reason, "all_gather_into_tensor")
            return super()._all_gather_flat_param(padded_unsharded_flat_param)
        self.fp8_weights.gather(shard, padded_unsharded_flat_param, self.process_group)
        self.is_rounded = True
        if self._offload_params and shard.is_cuda:  # made on another stream than that which read it
            shard.record_stream(torch.cuda.current_stream(shard.device))
        return padded_unsharded_flat_param

    def _free_unsharded_flat_param(self) -> None:
        # before the memory goes: layers would multiply by bytes of a weight that is gathered no more
        self.fp8_weights.drop()
        self.is_rounded = False
        super()._free_unsharded_flat_param()

    def _wants_exact_values(self) -> bool:
        return self._force_full_precision or self._training_state is HandleTrainingState.SUMMON_FULL_PARAMS

    def _uncompressed_reason(self, shard: torch.Tensor) -> str | None:
        if self._wants_exact_values():
            return "for a checkpoint, or summoned"
        if getattr(self, "_use_fake_all_gather", False):
            return "a rehearsal that gathers nothing"
        return self.fp8_weights.uncompressed_reason(shard)


def compress_flat_fsdp(
    model: nn.Module, *, gather: bool = True, reduce: bool = True, encoding: Encoding = DEFAULT
) -> None:
    """Let a model that FSDP1 wrapped compute and communicate in FP8; before its first forward.

    Its FP8 layers keep no FP8 weight between forward and backward. Wrap each block in a unit of its own
    (`auto_wrap_policy`): a unit that holds all of a model is gathered whole, and where 16-bit parameters fill a rank's
    part, such as an embedding's, every rank's message grows to the size of that one's.

    Args:
        model: converted to FP8 layers, and wrapped in FullyShardedDataParallel.
        gather: send the weights of FP8 layers in FP8.
        reduce: send gradients in FP8.
        encoding: of the gradients, as for the collectives.

    Raises:
        ValueError: no module is wrapped.
    """
    if reduce:
        reduce_flat_fsdp(model, encoding=encoding)
    units = FullyShardedDataParallel.fsdp_modules(model)
    handles = {unit: unit._handle for unit in units if unit._handle is not None}
    unit_of = {
        module: unit
        for unit, handle in handles.items()
        for module in (
            *(info.module for info in handle.flat_param._param_infos),
            *(info.module for info in handle.flat_param._shared_param_infos),
        )
    }
    # also where nothing is gathered in FP8: layers that keep FP8 copies would hold the whole model on every rank
    merged_in = follow_units(model, unit_of)
    for unit, handle in handles.items():
        if gather and handle.uses_sharded_strategy and why_not_gathered() is None:
            FP8FlatParamHandle.convert_in_place(handle, merged_in.get(unit, ()))


def why_not_gathered() -> str | None:
    """Return why this PyTorch's FSDP1 cannot gather in FP8, or None where it can."""
    missing = [name for name in _OVERRIDDEN if not hasattr(FlatParamHandle, name)]
    return f"this PyTorch's FSDP has no {missing[0]}" if missing else None
