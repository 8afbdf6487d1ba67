"""The chunk manager that lets only parameters of one kind share chunks.

    weights     weights of FP8 layers that are sent in FP8: chunks of bytes
    resident    vectors: norms' weights and biases. Every layer reads some, and together they are small, so they stay
                gathered; else each would drive the chunk of weights beside it out and in again
    others      matrices in 16 bits: embeddings, the head, layers that are not in FP8

With tensor parallelism parameters that are sharded over its ranks have chunks of their own, so that a norm over all
gradients can count each value once.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import torch
from colossalai.tensor.d_tensor import is_customized_distributed_tensor, is_distributed_tensor
from colossalai.utils import is_ddp_ignored
from colossalai.zero.gemini.chunk import ChunkManager
from torch import nn

from fp8booster.colossal.gemini.chunks import FP8Chunk, ReducedChunk
from fp8booster.comm import Encoding
from fp8booster.config import FP8Config
from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.nn.experts.fp8_experts import why_not_in
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.modules import change_class, count_readers
from fp8booster.nn.sharding import NOT_FP8, why_not_cast
from fp8booster.nn.weights.holder import WeightHolder, weight_holders

RESIDENT = "resident"
WEIGHTS = "weights"
OTHERS = "others"


class Group(NamedTuple):
    """The properties that parameters of one chunk have in common."""

    kind: str
    tensor_parallel: bool
    """Sharded over the ranks of tensor parallelism."""


class Plan:
    """The group of each parameter of a model.

    Args:
        model: converted to FP8 layers, and sharded where it shall be.
        config: of the FP8 layers.
        master_weights: there are FP32 masters to cast from.
        dtype: that the model computes in besides.
    """

    def __init__(self, model: nn.Module, config: FP8Config, master_weights: bool, dtype: torch.dtype) -> None:
        self.config = config
        self.reasons: dict[nn.Parameter, str] = {}
        """The reason why the weight of an FP8 layer is gathered in 16 bits."""

        self.layers: dict[nn.Parameter, WeightHolder] = {}
        """The layer, or the experts, of each weight that is gathered in FP8."""

        readers = count_readers(model)
        # without masters a weight is its own: it must not be rounded to FP8
        of_engine = None if master_weights else "no master weights"
        for module in model.modules():
            for name, layer in weight_holders(module).items():
                weight = module._parameters.get(name)
                if weight is None or not weight.requires_grad:
                    continue
                reason = why_not_cast(layer, readers=readers[weight], of_engine=of_engine or why_not_in(dtype, layer))
                if reason is None:
                    self.layers[weight] = layer
                else:
                    self.reasons[weight] = reason
        self.groups = {
            parameter: Group(self._kind(parameter), _is_tensor_parallel(parameter))
            for parameter in model.parameters()
            if parameter.requires_grad and not is_ddp_ignored(parameter)
        }
        self.sizes: Counter[Group] = Counter()
        """Values in each group."""

        for parameter, group in self.groups.items():
            self.sizes[group] += parameter.numel()
        self.merged = merged_layers(model)
        self.together = {
            weight: merged.weights
            for merged in self.merged
            if len({self.groups.get(weight) for weight in merged.weights}) == 1
            and all(weight in self.layers and weight in self.groups for weight in merged.weights)
            for weight in merged.weights
        }
        """By weight, those that are multiplied as one with it and shall be in one chunk, in the order of rows."""

    def _kind(self, parameter: nn.Parameter) -> str:
        if parameter in self.layers:
            return WEIGHTS
        return OTHERS if parameter.dim() > 1 else RESIDENT

    def chunk_sizes(self, group: Group, size: int, multiple: int) -> list[int]:
        """Return the sizes of a group's chunks, one after the other; what comes behind the list has the last one's.

        Chunks of FP8 weights end where weights that are multiplied as one would not fit any more, and are no larger
        than what they hold.

        Args:
            group: one of `sizes`.
            size: that of a chunk, but where weights that are multiplied as one are larger.
            multiple: what sizes are multiples of.
        """
        parts: list[int] = []
        for parameter, of in self.groups.items():
            merged = self.together.get(parameter, [parameter])
            if of == group and merged[0] is parameter:
                parts.append(sum(weight.numel() for weight in merged))
        # only weights in FP8 that are multiplied as one have to lie in one chunk
        if group.kind != WEIGHTS or not self.together:
            return [math.ceil(min(size, self.sizes[group]) / multiple) * multiple]
        # those that are multiplied as one are never parted, so the largest of them sets the least size
        size = max(size, *parts)
        sizes = [0]
        for part in parts:
            if sizes[-1] + part > size:
                sizes.append(0)
            sizes[-1] += part
        return [math.ceil(each / multiple) * multiple for each in sizes]


def _is_tensor_parallel(parameter: nn.Parameter) -> bool:
    return is_distributed_tensor(parameter) or is_customized_distributed_tensor(parameter)


class GroupedChunkManager(ChunkManager):
    """Gemini's chunk manager, where only parameters of one group share a chunk."""

    _plan: Plan
    _encoding: Encoding
    _sizes: dict[Group, list[int]]
    _newest: Group
    """Of the parameter that was registered last; its master comes next."""

    @classmethod
    def convert_in_place(cls, manager: ChunkManager, plan: Plan, encoding: Encoding, ranks: int) -> None:
        """Turn a manager that has no chunks yet into this class in place.

        Args:
            manager: of a model.
            plan: for the model.
            encoding: of gradients.
            ranks: that chunks are sharded over.
        """
        change_class(manager, cls)
        manager._plan, manager._encoding, manager._sizes = plan, encoding, {}
        size, arguments = manager.dp_degree_chunk_size_dict[ranks], manager.kwargs_config[ranks]
        for group, values in plan.sizes.items():
            gathered = group.kind == RESIDENT or arguments.get("keep_gathered", False)
            # Colossal-AI looks chunks' options up by the number of ranks, for which the group stands in from here on
            manager.kwargs_config[group] = arguments | {"keep_gathered": gathered}
            # so that shards begin at multiples of 16 bytes
            manager._sizes[group] = plan.chunk_sizes(group, values if gathered else size, ranks * ALIGNMENT)

    def register_tensor(
        self, tensor: torch.Tensor, group_type: str, config_key: int, *args: Any, **kwargs: Any
    ) -> None:
        """Append a parameter, or the master of the parameter that came before it, to a chunk of its group."""
        # a master is no parameter of the model, and so of no group by itself: it follows the one that came before
        if group_type != "fp32_param":
            self._newest = self._plan.groups[tensor]
        chunks, sizes = self.chunk_groups.get(f"{group_type}_{self._newest}", ()), self._sizes[self._newest]
        # of the chunk that is begun if the tensor does not fit into the last one
        self.dp_degree_chunk_size_dict[self._newest] = sizes[min(len(chunks), len(sizes) - 1)]
        super().register_tensor(tensor, group_type, self._newest, *args, **kwargs)

    def close_all_groups(self) -> None:
        """Close all chunks, and make those of FP8 weights chunks of bytes."""
        super().close_all_groups()
        for group in self._plan.sizes:
            for chunk in self.chunk_groups.get(f"fp16_param_{group}", ()):
                chunk.tensor_parallel = group.tensor_parallel
                if group.kind != WEIGHTS:
                    ReducedChunk.convert_in_place(chunk, self._encoding, self._why_in_16_bits(chunk))
                    continue
                # the manager counted 16 bits a value when the chunk was closed
                self._ChunkManager__sub_memory_usage(chunk.memory_usage)
                FP8Chunk.convert_in_place(chunk, self._encoding, self._plan.config.weight_format)
                self._ChunkManager__add_memory_usage(chunk.memory_usage)

    def _why_in_16_bits(self, chunk: ReducedChunk) -> str:
        reasons = {self._plan.reasons.get(parameter, NOT_FP8) for parameter in chunk.tensors_info}
        return ", ".join(sorted(reasons))

    def takes_the_weights_place(self, chunk: ReducedChunk) -> bool:
        """Tell whether a chunk's gradients are written over its weights."""
        return self.reuse_fp16_chunk and not isinstance(chunk, FP8Chunk)

    def gradient_chunk(self, chunk: ReducedChunk) -> ReducedChunk | None:
        """Return the chunk that holds the gradients of a chunk of weights; None before the first."""
        return chunk if self.takes_the_weights_place(chunk) else chunk.grad_chunk

    def drop_weight_gradients(self, chunks: list[FP8Chunk]) -> None:
        """Free the gradients of FP8 weights after a step."""
        for chunk in chunks:
            if chunk.grad_chunk is not None:
                self._ChunkManager__sub_memory_usage(chunk.grad_chunk.memory_usage)
                chunk.drop_gradients()
                self._ChunkManager__add_memory_usage(chunk.grad_chunk.memory_usage)
