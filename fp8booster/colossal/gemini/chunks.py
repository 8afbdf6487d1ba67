"""Gemini's chunks with FP8 on the wire: 16-bit chunks whose gradients are reduced in FP8, and chunks of FP8 weights.

A chunk of FP8 weights holds bytes. Its shard is cast from the FP32 masters after each optimizer step, and what is
gathered is what the products read: one byte a value in memory and on the wire, and no 16-bit copy. Its gradients have a
16-bit chunk of their own (`Chunk.init_grad_chunk`), made by backward and dropped by the step.

Methods whose names begin with `_Chunk__` take the place of Chunk's private ones (zero/gemini/chunk/chunk.py:514-563).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from colossalai.zero.gemini.chunk import Chunk, TensorState
from torch.distributed import ReduceOp

from fp8booster import comm
from fp8booster.colossal.gemini.memory import give_memory, take_memory
from fp8booster.colossal.temporarily import temporarily
from fp8booster.comm import Encoding
from fp8booster.comm.statistics import count_encoded, count_plain
from fp8booster.comm.transport import gather_bytes
from fp8booster.kernels.scales import new_inverse_scales
from fp8booster.kernels.transpose import transposed
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import change_class
from fp8booster.tensor import QuantizedMatrix

NAME = "chunk gather"
"""The row of `fp8booster.comm.statistics` for the gathers of chunks."""

_GATHER = "all_gather_into_tensor"


class ReducedChunk(Chunk):
    """A 16-bit chunk whose gradients, in its own memory or in its gradient chunk's, are averaged in FP8."""

    encoding: Encoding
    """Of the gradients."""

    why_in_16_bits: str
    """Why its values are gathered in 16 bits."""

    tensor_parallel: bool = False
    """Its parameters are sharded over the ranks of tensor parallelism."""

    earlier: torch.Tensor | None = None
    """This rank's part of what earlier micro-batches gave, for a gradient chunk that accumulates."""

    @classmethod
    def convert_in_place(cls, chunk: Chunk, encoding: Encoding, why_in_16_bits: str) -> None:
        """Turn a chunk into this class in place."""
        change_class(chunk, cls)
        chunk.encoding, chunk.why_in_16_bits = encoding, why_in_16_bits

    def set_state(self, parameter: torch.nn.Parameter, state: TensorState) -> None:
        """Set the state of a parameter, whatever it was: what several `tensor_trans_state` in a row end in."""
        self._Chunk__update_one_tensor_info(self.tensors_info[parameter], state)

    def reduce(self, async_op: bool = False) -> None:
        """Average the gradients over all ranks; each rank keeps its shard, or all where the chunk is kept gathered.

        Runs in the order of the current stream. The sum is divided before it is rounded, so callers divide by nothing.
        """
        gradients = self.cuda_global_chunk
        gradients[self.utilized_size :].zero_()  # what lies there shares a scale with the last values
        if self.keep_gathered:
            for group in (self.torch_pg, self.extra_dp_group):
                self._average(gradients, group)
            own = gradients
        else:
            own = torch.empty(self.shard_size, dtype=self.dtype, device=gradients.device)
            if self.pg_size > 1:
                comm.reduce_scatter_tensor(own, gradients, ReduceOp.AVG, self.torch_pg, encoding=self.encoding)
            else:
                own.copy_(gradients)
            self._average(own, self.extra_dp_group)
            if gradients.is_cuda:  # made on another stream, which must not overwrite it yet
                gradients.record_stream(torch.cuda.current_stream(gradients.device))
            take_memory(gradients)
            self.cuda_shard, self.is_gathered = own, False
        if self.earlier is not None:
            own.add_(self.earlier.to(own.device))
            if self.earlier.is_cuda:  # made on another stream, too
                self.earlier.record_stream(torch.cuda.current_stream(own.device))
            self.earlier = None
        self._Chunk__update_tensors_state(TensorState.HOLD)

    def _average(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        if group is not None and dist.get_world_size(group) > 1:
            comm.all_reduce(values, ReduceOp.AVG, group, encoding=self.encoding)

    def set_l2_norm(self) -> None:
        """Note the square of the norm of this rank's gradients, on the device."""
        own, end = (
            (self.cuda_global_chunk, self.utilized_size) if self.is_gathered else (self.cuda_shard, self.valid_end)
        )
        self.l2_norm = torch.linalg.vector_norm(own[:end], dtype=torch.float32).square()

    def init_grad_chunk(self) -> Chunk:
        """The memory for gradients beside the weights, gathered and empty."""
        is_first = self.grad_chunk is None
        gradients = super().init_grad_chunk()
        if is_first:
            ReducedChunk.convert_in_place(gradients, self.encoding, "gradients")
        return gradients

    def _Chunk__gather(self, async_op: bool = False) -> dist.Work | None:
        if not self.is_gathered:
            count_plain(NAME, self.pg_size, self.cuda_shard.nbytes, self.why_in_16_bits, _GATHER)
        return super()._Chunk__gather(async_op)


class FP8Chunk(ReducedChunk):
    """A chunk of weights that exist in FP8 alone, beside their masters.

    Each parameter's own memory is one NaN, seen through its shape: whatever reads it past the hooks shows.
    """

    gradient_dtype: torch.dtype
    weight_format: torch.dtype
    power_of_two: bool

    changes: int
    """How often the weights were cast anew."""

    inverse_scales: torch.Tensor
    """float32 [tensors], in the order of `tensors_info`."""

    scale_of: list[int]
    """For each tensor, in the order of `tensors_info`, the place of the first of those that share its scale."""

    layers: dict[torch.nn.Parameter, FP8Layer]
    """By weight, who multiplies by it, as far as they told."""

    _quantized: dict[tuple[torch.nn.Parameter, ...], QuantizedMatrix]
    _decoded: dict[torch.nn.Parameter, torch.Tensor]
    _nothing: torch.Tensor

    @classmethod
    def convert_in_place(
        cls,
        chunk: Chunk,
        encoding: Encoding,
        weight_format: torch.dtype,
        power_of_two: bool,
        merged: Sequence[Sequence[torch.nn.Parameter]] = (),
    ) -> None:
        """Turn a closed chunk into this class in place; its values are lost until the first cast.

        Args:
            chunk: of weights of FP8 layers.
            encoding: of their gradients.
            weight_format, power_of_two: of the cast.
            merged: weights that are multiplied as one, in the order of their rows. Where they lie so in the chunk, they
                get one scale, and can be read as one matrix.
        """
        ReducedChunk.convert_in_place(chunk, encoding, "")
        change_class(chunk, cls)
        chunk.gradient_dtype, chunk.weight_format, chunk.power_of_two = (chunk.dtype, weight_format, power_of_two)
        chunk.changes = 0
        device, dtype = chunk.cuda_global_chunk.device, torch.uint8
        chunk.dtype, chunk.chunk_mem, chunk.shard_mem = dtype, chunk.chunk_size, chunk.shard_size
        take_memory(chunk.cuda_global_chunk)
        chunk.cuda_global_chunk = torch.zeros(chunk.chunk_size, dtype=dtype, device=device)
        if chunk.cuda_shard is not None:
            chunk.cuda_shard = torch.zeros(chunk.shard_size, dtype=dtype, device=device)
        if chunk.cpu_shard is not None:
            chunk.cpu_shard = torch.zeros(chunk.shard_size, dtype=dtype, pin_memory=chunk.pin_memory)
        chunk.inverse_scales = new_inverse_scales(len(chunk.tensors_info), device).fill_(1.0)
        nothing = torch.full((), torch.nan, dtype=chunk.gradient_dtype, device=device)
        chunk._quantized, chunk._decoded, chunk.layers = {}, {}, {}
        parameters = list(chunk.tensors_info)
        scale_of = list(range(len(parameters)))
        for number, parameter in enumerate(parameters):
            chunk._add_matrix([parameter], number)
            for weights in merged:
                group = parameters[number : number + len(weights)]
                if list(map(id, group)) == list(map(id, weights)):
                    chunk._add_matrix(weights, number)
                    scale_of[number : number + len(group)] = [number] * len(group)
        chunk.scale_of = scale_of
        for parameter in parameters:
            parameter.data = nothing.expand(parameter.shape)
        chunk._nothing = nothing
        if not chunk.is_gathered:
            take_memory(chunk.cuda_global_chunk)

    def _add_matrix(self, parameters: Sequence[torch.nn.Parameter], number: int) -> None:
        """Know weights that lie stacked by rows from the place `number` on as one."""
        begin, end = self.tensors_info[parameters[0]].offset, self.tensors_info[parameters[-1]].end
        data = self.cuda_global_chunk[begin:end].view(self.weight_format).view(-1, parameters[0].shape[1])
        self._quantized[tuple(parameters)] = QuantizedMatrix(data, data.new_empty(0), self.inverse_scales[number], None)

    def shares_scale(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether weights are cast by one scale, and known as one matrix."""
        return tuple(parameters) in self._quantized

    def quantized(self, parameters: Sequence[torch.nn.Parameter]) -> QuantizedMatrix:
        """A weight, or those that share a scale, as they lie, without transpose; there while the chunk is gathered."""
        return self._quantized[tuple(parameters)]

    def transpose(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """The FP8 transpose of what `quantized` gives, made now from the gathered chunk."""
        return transposed(self._quantized[tuple(parameters)].data)

    def own_values(self) -> torch.Tensor:
        """The bytes that this rank casts: its shard, or all where the chunk is kept gathered."""
        if self.keep_gathered:
            return self.cuda_global_chunk
        return self.cpu_shard if self.cuda_shard is None else self.cuda_shard

    def own_range(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """The part of `own_values` that belongs to a weight; empty where the end is not behind the begin."""
        info = self.tensors_info[parameter]
        if self.keep_gathered:
            return info.offset, info.end
        return max(0, info.offset - self.shard_begin), min(self.shard_size, info.end - self.shard_begin)

    def publish(self) -> None:
        """Make what `own_values` and `inverse_scales` now hold the weights; every rank calls it."""
        self.changes += 1
        self.cpu_vis_flag = self.cuda_shard is None
        self.forget_decoded()
        if self.is_gathered and not self.keep_gathered:
            self._gather_bytes()

    def drop_gradients(self) -> None:
        """Free the gradients after a step; memory of the host that is pinned stays."""
        gradients = self.grad_chunk
        if gradients is None:
            return
        if gradients.is_gathered:
            take_memory(gradients.cuda_global_chunk)
        gradients.is_gathered, gradients.cuda_shard = False, None
        if not gradients.pin_memory:
            gradients.cpu_shard = None

    def decode(self, parameter: torch.nn.Parameter) -> None:
        """Give a parameter its values in 16 bits until the chunk is released, for what reads it outside its layer."""
        if parameter.data.data_ptr() != self._nothing.data_ptr():
            return
        matrix = self.quantized([parameter])
        if parameter not in self._decoded:
            self._decoded[parameter] = torch.empty(
                parameter.shape, dtype=self.gradient_dtype, device=matrix.data.device
            )
        else:
            give_memory(self._decoded[parameter])
        self._decoded[parameter].copy_(matrix.data.float() * matrix.inverse_scale)
        parameter.data = self._decoded[parameter]

    def owns_values_of(self, parameter: torch.nn.Parameter) -> bool:
        """Tell whether a parameter shows nothing, or what `decode` made: nobody gave it other data."""
        place = parameter.data_ptr()
        decoded = self._decoded.get(parameter)
        return place == self._nothing.data_ptr() or (decoded is not None and place == decoded.data_ptr())

    def forget_decoded(self) -> None:
        """Free what `decode` made."""
        for parameter, decoded in self._decoded.items():
            take_memory(decoded)
            parameter.data = self._nothing.expand(parameter.shape)

    def optim_update(self) -> None:
        """Nothing: `Masters.publish` casts the weights of all chunks at once."""

    def init_grad_chunk(self) -> Chunk:
        """The 16-bit memory for gradients, gathered and empty."""
        with temporarily(self, dtype=self.gradient_dtype):
            return super().init_grad_chunk()

    def _gather_bytes(self, async_op: bool = False) -> dist.Work | None:
        count_encoded(
            NAME, self.pg_size, self.shard_size * self.gradient_dtype.itemsize, {_GATHER: self.shard_size}, _GATHER
        )
        return gather_bytes(self.cuda_global_chunk, self.cuda_shard, self.torch_pg, async_op)

    def _Chunk__gather(self, async_op: bool = False) -> dist.Work | None:
        if self.is_gathered:
            return None
        give_memory(self.cuda_global_chunk)
        self.is_gathered = True
        return self._gather_bytes(async_op)  # the shard stays: it is what the chunk is released to

    def _Chunk__scatter(self) -> None:
        self.forget_decoded()
        if self.is_gathered and not self.keep_gathered:
            take_memory(self.cuda_global_chunk)
            self.is_gathered = False

    def _Chunk__update_tensors_ptr(self) -> None:
        pass  # parameters have no 16-bit values to point to
