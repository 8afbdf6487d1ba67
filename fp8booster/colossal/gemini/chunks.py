"""Gemini's chunks with FP8 on the wire: 16-bit chunks whose gradients are reduced in FP8, and chunks of FP8 weights.

A chunk of FP8 weights holds bytes. Its shard is cast from the FP32 masters after each optimizer step, and what is
gathered is what the products read: one byte a value in memory and on the wire, and no 16-bit copy. Its gradients have a
16-bit chunk of their own (`Chunk.init_grad_chunk`), made by backward and dropped by the step.

Methods whose names begin with `_Chunk__` take the place of Chunk's private ones (zero/gemini/chunk/chunk.py:514-563).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from colossalai.zero.gemini.chunk import Chunk, TensorState
from torch.distributed import ReduceOp

from fp8booster import comm
from fp8booster.colossal.temporarily import temporarily
from fp8booster.comm import Encoding
from fp8booster.comm.observer import observer
from fp8booster.comm.transport import gather_bytes
from fp8booster.nn.modules import change_class
from fp8booster.nn.sharding import ScaleGroup
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.tensor import QuantizedMatrix

NAME = "chunk gather"
"""The row of `fp8booster.comm.statistics` for the gathers of chunks."""

_GATHER = "all_gather_into_tensor"


def take_memory(tensor: torch.Tensor) -> None:
    """Free a tensor's values, while the tensor object stays.

    Colossal-AI's functions (zero/gemini/chunk/chunk.py:45) look at typed storage, which torch deprecates: each look
    formats a warning's place anew, and a step takes some dozens of looks a layer.
    """
    storage = tensor.untyped_storage()
    if storage.size():
        storage.resize_(0)


def give_memory(tensor: torch.Tensor) -> None:
    """Give a tensor that has the whole of its storage memory for its values again, unless it has it."""
    storage = tensor.untyped_storage()
    if not storage.size():
        storage.resize_(tensor.nbytes)


class ReducedChunk(Chunk):
    """A 16-bit chunk whose gradients, in its own memory or in its gradient chunk's, are averaged in FP8."""

    encoding: Encoding
    """Of the gradients."""

    why_in_16_bits: str
    """The reason why its values are gathered in 16 bits."""

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
            # memory of its own, since that of the whole chunk is freed at once, and most of it is other ranks'
            own = torch.empty(self.shard_size, dtype=self.dtype, device=gradients.device)
            if self.pg_size > 1:
                comm.reduce_scatter_tensor(own, gradients, ReduceOp.AVG, self.torch_pg, encoding=self.encoding)
            else:
                own.copy_(gradients)
            # replicas average the shard alone, which is all that they keep
            self._average(own, self.extra_dp_group)
            if gradients.is_cuda:  # made on another stream, which must not overwrite it yet
                gradients.record_stream(torch.cuda.current_stream(gradients.device))
            take_memory(gradients)
            self.cuda_shard, self.is_gathered = own, False
        if self.earlier is not None:
            # behind the reduction: with the sum in the message, earlier micro-batches would be rounded to FP8 once more
            # each time
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
        # in FP32: squares leave FP16's range, and a sum of many in BF16 soon grows no more
        self.l2_norm = torch.linalg.vector_norm(own[:end], dtype=torch.float32).square()

    def init_grad_chunk(self) -> Chunk:
        """Make the memory for gradients beside the weights, gathered and empty."""
        # Colossal-AI makes the chunk once and gives it memory again in later steps
        is_first = self.grad_chunk is None
        gradients = super().init_grad_chunk()
        if is_first:
            ReducedChunk.convert_in_place(gradients, self.encoding, "gradients")
        return gradients

    def _Chunk__gather(self, async_op: bool = False) -> dist.Work | None:
        if not self.is_gathered:
            observer.count_plain(NAME, self.pg_size, self.cuda_shard.nbytes, self.why_in_16_bits, _GATHER)
        return super()._Chunk__gather(async_op)


class FP8Chunk(ReducedChunk):
    """A chunk of weights that exist in FP8 alone, beside their masters.

    Each parameter's own memory is one NaN, seen through its shape: whatever reads it past the hooks shows.
    """

    gradient_dtype: torch.dtype
    weight_format: torch.dtype

    changes: int
    """How often the weights were cast anew."""

    matrices: dict[torch.nn.Parameter, QuantizedMatrix]
    """Each weight as it lies, without its transpose; there while the chunk is gathered."""

    _decoded: dict[torch.nn.Parameter, torch.Tensor]
    _nothing: torch.Tensor

    @classmethod
    def convert_in_place(cls, chunk: Chunk, encoding: Encoding, weight_format: torch.dtype) -> None:
        """Turn a closed chunk into this class in place; its values are lost until the first cast.

        Args:
            chunk: of weights of FP8 layers.
            encoding: of their gradients.
            weight_format: of the cast.
        """
        ReducedChunk.convert_in_place(chunk, encoding, "")
        change_class(chunk, cls)
        chunk.gradient_dtype, chunk.weight_format, chunk.changes = chunk.dtype, weight_format, 0
        device, dtype = chunk.cuda_global_chunk.device, torch.uint8
        # Gemini plans by these numbers what it moves to the host: one byte a value
        chunk.dtype, chunk.chunk_mem, chunk.shard_mem = dtype, chunk.chunk_size, chunk.shard_size
        take_memory(chunk.cuda_global_chunk)
        chunk.cuda_global_chunk = torch.zeros(chunk.chunk_size, dtype=dtype, device=device)
        if chunk.cuda_shard is not None:
            chunk.cuda_shard = torch.zeros(chunk.shard_size, dtype=dtype, device=device)
        if chunk.cpu_shard is not None:
            chunk.cpu_shard = torch.zeros(chunk.shard_size, dtype=dtype, device="cpu", pin_memory=chunk.pin_memory)
        chunk.matrices, chunk._decoded = {}, {}
        # an expanded NaN, for autograd and torch's checks read the shape of a parameter
        chunk._nothing = torch.full((), torch.nan, dtype=chunk.gradient_dtype, device=device)
        for parameter in chunk.tensors_info:
            parameter.data = chunk._nothing.expand(parameter.shape)
        if not chunk.is_gathered:
            take_memory(chunk.cuda_global_chunk)

    def are_side_by_side(self, weights: Sequence[torch.nn.Parameter]) -> bool:
        """Tell whether weights lie in the chunk one behind the other, so that they are rows of one matrix."""
        infos = [self.tensors_info.get(weight) for weight in weights]
        return None not in infos and all(one.end == other.offset for one, other in pairwise(infos))

    def lay(self, group: ScaleGroup, inverse_scale: torch.Tensor) -> None:
        """Let the weights of a group be parts of a matrix in the chunk, and their layers read it there."""
        weights = [layer.held_weight for layer in group.layers]
        for layer in group.layers:
            layer.fp8_weight = ChunkWeight(self, layer.weight_is_transposed)
        if group.merged is not None:
            group.merged.fp8_weight = ChunkWeight(self)
        give_memory(self.cuda_global_chunk)  # torch makes no views of what has none
        begin, end = self.tensors_info[weights[0]].offset, self.tensors_info[weights[-1]].end
        data = self.cuda_global_chunk[begin:end].view(self.weight_format).view(-1, weights[0].shape[-1])
        group.lie_in(QuantizedMatrix(data, data.new_empty(0), inverse_scale, None))
        if not self.is_gathered:
            take_memory(self.cuda_global_chunk)
        group.fill()
        self.matrices.update(zip(weights, group.parts, strict=True))

    def own_values(self) -> torch.Tensor:
        """Return the bytes that this rank casts: its shard, or all where the chunk is kept gathered."""
        if self.keep_gathered:
            return self.cuda_global_chunk
        return self.cpu_shard if self.cuda_shard is None else self.cuda_shard

    def own_range(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """Return begin and end of the part of `own_values` that belongs to a weight."""
        info = self.tensors_info[parameter]
        if self.keep_gathered:
            return info.offset, info.end
        begin = max(0, info.offset - self.shard_begin)
        return begin, max(begin, min(self.shard_size, info.end - self.shard_begin))

    def publish(self) -> None:
        """Make what `own_values` now holds the weights; every rank calls it."""
        self.changes += 1
        # Colossal-AI reuses the host's copy of a shard while this is set, which is stale once the GPU's was cast anew
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
        # pinning takes long, and the next step needs as much
        if not gradients.pin_memory:
            gradients.cpu_shard = None

    def decode(self, parameter: torch.nn.Parameter) -> None:
        """Give a parameter its values in 16 bits until the chunk is released, for what reads it outside its layer."""
        # decoded already, or given other data by somebody, which must not be overwritten
        if parameter.data.data_ptr() != self._nothing.data_ptr():
            return
        matrix = self.matrices[parameter]
        if parameter not in self._decoded:
            self._decoded[parameter] = torch.empty(
                parameter.shape, dtype=self.gradient_dtype, device=matrix.data.device
            )
        else:
            # into the same storage: what autograd saved of it in forward is read in backward
            give_memory(self._decoded[parameter])
        # multiplied in FP32, and rounded once, by the copy
        self._decoded[parameter].copy_((matrix.data.float() * matrix.inverse_scale).view(parameter.shape))
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
        """Do nothing: `Masters.publish` casts the weights of all chunks at once."""

    def init_grad_chunk(self) -> Chunk:
        """Make the 16-bit memory for gradients, gathered and empty."""
        # Colossal-AI makes the gradient chunk in the dtype of the weights' one, which is of bytes here
        with temporarily(self, dtype=self.gradient_dtype):
            return super().init_grad_chunk()

    def _gather_bytes(self, async_op: bool = False) -> dist.Work | None:
        observer.count_encoded(
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


class ChunkWeight(ReshardedWeight):
    """Weights of an FP8 chunk, read as they were gathered; several lie stacked by rows there, under one scale.

    Nothing of them outlives the chunk between forward and backward: backward makes the layout that dgrad reads from the
    chunk that was gathered for it. A copy or a pickle of it is an empty `ReshardedWeight`.

    Args:
        chunk: gathered whenever the layers compute.
        is_transposed: as in `WeightSource`.
    """

    def __init__(self, chunk: FP8Chunk, is_transposed: bool = False) -> None:
        super().__init__(is_transposed)
        self._chunk = chunk

    def fill(
        self, weights: Sequence[torch.Tensor], quantized: QuantizedMatrix, ready: torch.cuda.Event | None = None
    ) -> None:
        super().fill(weights, quantized, ready)
        self._parameters = weights  # those that layers give are nodes of a graph

    def forward(self, weights: Sequence[torch.Tensor], casts: Casts, *, transpose: bool) -> QuantizedMatrix:
        """As `WeightSource.forward`, without the transpose.

        Raises:
            RuntimeError: a weight was given other data, which the chunk would not multiply by.
        """
        # asked at each forward: averages of weights are written through `.data`, unnoticed by torch
        if not all(map(self._chunk.owns_values_of, self._parameters)):
            raise RuntimeError(
                "the .data of a weight was replaced, and under Gemini its values lie in a chunk; write them with "
                "booster.load_model or the model's load_state_dict"
            )
        return super().forward(weights, casts, transpose=transpose)

    def held_in_backward(self) -> Callable[[], QuantizedMatrix | None]:
        """Return a getter of `held` for backward, which raises RuntimeError where weights have changed since."""
        changes = self._chunk.changes

        def held() -> QuantizedMatrix | None:
            # torch's own check misses it: autograd saved no tensor of these bytes
            if self._chunk.changes != changes:
                raise RuntimeError(
                    "a weight needed for gradient computation has been modified by an inplace operation: it was set "
                    "between this forward and its backward; run backward before the optimizer steps or a checkpoint "
                    "is loaded"
                )
            return self.held

        return held

    def keep_values(self) -> None:
        """Raise RuntimeError: what computes reads the weights past Gemini's hooks, which would decode them."""
        raise RuntimeError(
            "the weights of experts lie in FP8 alone under Gemini, and their own code, which reads them in 16 bits, is "
            "to run; call them with tokens [T, H], their experts and these' weights [T, k], or give the plugin "
            "fp8_communication=False"
        )

    def forget(self) -> None:
        """Do nothing: the chunk holds all that there is of the weights."""

    def __reduce__(self) -> tuple:
        return ReshardedWeight, (self.is_transposed,)
