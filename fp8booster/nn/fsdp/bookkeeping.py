"""FSDP2's bookkeeping of a parameter, `FSDPParam`, where its unit gathers weights in FP8.

FSDP2 lets the local tensor of a parameter say what it sends and what is made of it: `fsdp_pre_all_gather` and
`fsdp_post_all_gather`. The bookkeeping asks the tensor whether it has them; a subclass, put in place by class, answers
for it here, as tensors change when a state is loaded. It gathers by itself after that: FSDP2 looks at the signature of
these methods at each gather of each parameter, which took a tenth of the host's time.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from fp8booster.kernels.shard_cast import unpack
from fp8booster.nn.modules import change_class
from fp8booster.tensor import QuantizedMatrix


class Unit(Protocol):
    """Tells what the bookkeeping asks of `fsdp.units.FP8Unit`, where each method says what it does."""

    def message_of(self, param: FP8FSDPParam) -> Tensor: ...
    def memory_of(self, param: FP8FSDPParam) -> Tensor: ...
    def allocate(self, param: FP8FSDPParam) -> None: ...
    def fill(self) -> None: ...
    def gathered_of(self, param: FP8FSDPParam) -> QuantizedMatrix | None: ...
    def forget(self, param: FP8FSDPParam) -> bool: ...


class MovingFSDPParam(FSDPParam):
    """The bookkeeping of a parameter that may lie elsewhere in backward than in forward."""

    stays = False

    def init_unsharded_param(self) -> None:
        """Make the parameter, and note on it whether CUDA graphs find it."""
        super().init_unsharded_param()
        vars(self._unsharded_param)["stays"] = self.stays


class FP8FSDPParam(MovingFSDPParam):
    """The bookkeeping of an FP8 layer's weight that is gathered in FP8."""

    stays = True
    """It has no values: what its layer multiplies by tells of itself whether that stays."""

    fp8_unit: Unit
    fp8_message: _Message

    @classmethod
    def convert_in_place(cls, param: FSDPParam, unit: Unit) -> None:
        """Turn the bookkeeping of a parameter into this class in place."""
        converted = change_class(param, cls)
        converted.fp8_unit, converted.fp8_message = unit, _Message(converted)
        converted._init_extensions()

    @property
    def shard(self) -> Tensor:
        """This rank's rows of the weight, [rows, K], in the dtype of the masters."""
        local: Any = FSDPParam._sharded_local_tensor
        return local.fget(self).detach()

    @property
    def _sharded_local_tensor(self) -> Any:
        return self.fp8_message

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """This rank's rows in FP8, with rows of zeros for FSDP2's padding, of one dimension."""
        return [self.fp8_unit.message_of(self)]

    def init_all_gather_outputs(self, *arguments: Any, **named: Any) -> None:
        """Gather into rows of the matrix of all weights that are multiplied as one."""
        if not self.all_gather_outputs:
            self.all_gather_outputs = [self.fp8_unit.memory_of(self)]

    def alloc_all_gather_outputs(self) -> None:
        """Take memory for it again, with that of the others."""
        if self.all_gather_outputs:
            self.fp8_unit.allocate(self)

    def init_unsharded_param(self) -> None:
        """Hand the layers of the unit what was gathered; at first make the parameter.

        Its memory is one value, seen through its shape.
        """
        if not hasattr(self, "_unsharded_param"):
            self._extensions_data.all_gather_input_sizes = [self.padded_sharded_param_size]
            super().init_unsharded_param()
            self._drop_values()
        self.fp8_unit.fill()

    def free_unsharded_param(self) -> None:
        if not self.fp8_unit.forget(self):
            super().free_unsharded_param()
        if hasattr(self, "_unsharded_param"):
            self._drop_values()  # where somebody has read them

    def restore_values(self) -> None:
        """Give the parameter values in 16 bits, as long as it is gathered."""
        quantized = self.fp8_unit.gathered_of(self)
        if quantized is None:
            return
        if not any(self._unsharded_param.stride()):
            values = torch.empty(self._orig_size, dtype=self._unsharded_param.dtype, device=self.device)
            unpack([quantized.data], [quantized.inverse_scale], [None], [values.view(quantized.data.shape)])
            self._unsharded_param.data = values

    def _drop_values(self) -> None:
        if any(self._unsharded_param.stride()):
            # NaN, so that who reads it all the same does not compute on
            nothing = torch.full((), torch.nan, dtype=self._unsharded_param.dtype, device=self.device)
            self._unsharded_param.data = nothing.expand(self._orig_size)


class StayingFSDPParam(MovingFSDPParam):
    """The bookkeeping of a small parameter beside weights that are gathered in FP8, whose memory stays."""

    stays = True

    def free_unsharded_param(self) -> None:
        """Keep the memory, where CUDA graphs find what is gathered next."""


class _Message:
    """Stands for the local tensor of a parameter where FSDP2 asks it whether it gathers what it likes.

    Args:
        param: the bookkeeping of the parameter.
    """

    fsdp_pre_all_gather = None
    """FSDP2 asks whether it is there, and `FP8FSDPParam.all_gather_inputs` what it would give."""

    def __init__(self, param: FP8FSDPParam) -> None:
        self._param = param

    def size(self) -> torch.Size:
        """Return the shape of the rows."""
        return self._param.shard.size()

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype) -> tuple[Tensor, tuple]:
        """Return what the parameter is made of at first, which is freed then."""
        return torch.empty(self._param._orig_size, dtype=dtype, device=self._param.device), ()
