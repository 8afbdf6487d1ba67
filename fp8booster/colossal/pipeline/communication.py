"""Pipeline stages send each other activations and gradients in FP8, with a scale for each block of values.

The scales are in the message, so a receiver decodes what was sent whatever its magnitude, and neither end waits for
a GPU. Colossal-AI casts in the scheduler instead and lets the format follow amax, which a receiver with cached metadata
does not learn (quantization/fp8.py:308-331, pipeline/schedule/one_f_one_b.py:131). Gradients are sent as activations
are: with a scale a block, E4M3 keeps what a gradient of small values needs.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from colossalai.pipeline.p2p import (
    P2PMetadata,
    PipelineP2PCommunication,
    _check_device,
    _create_recv_buffer,
    _send_recv_serialization_object,
    create_send_metadata,
)
from torch.distributed import Work, get_world_size
from torch.utils._pytree import tree_unflatten

from fp8booster import comm, formats
from fp8booster.comm.observer import observer

Received = tuple[Any, list[Work]]
"""The object that arrives, or None, and the handles to wait for before it is used."""

NOT_ROUNDED = ("mask", "bias", "router", "logits")
"""Parts of names of tensors that are sent as they are. Beside the least value of a mask, as T5's position bias holds
it, the others of a block would vanish; what a gate chose must not change on the way."""


class FP8PipelineCommunication(PipelineP2PCommunication):
    """The transport of every schedule's messages.

    BF16 and FP16 tensors are encoded, the others are sent as they are, with the reason in `comm.statistics`. Both ends
    decide by the message's metadata: names, shapes and dtypes.
    """

    def __init__(self, stage_manager: Any, overlap_p2p: bool, encoding: comm.Encoding = comm.encoding.DEFAULT) -> None:
        super().__init__(stage_manager, overlap_p2p)
        self.encoding = encoding

    # Colossal-AI's signatures. Activations go from the stage before to the next, and gradients the other way.

    def recv_forward(self, prev_rank: int | None = None, metadata_recv: P2PMetadata | None = None) -> Received:
        return self._exchange(source=self._previous(prev_rank), metadata=metadata_recv)

    def recv_backward(self, next_rank: int | None = None, metadata_recv: P2PMetadata | None = None) -> Received:
        return self._exchange(source=self._next(next_rank), metadata=metadata_recv)

    def send_forward(self, output_object: Any, next_rank: int | None = None, send_metadata: bool = True) -> list[Work]:
        return self._exchange(output_object, self._next(next_rank), send_metadata=send_metadata)[1]

    def send_backward(self, input_object: Any, prev_rank: int | None = None, send_metadata: bool = True) -> list[Work]:
        return self._exchange(input_object, self._previous(prev_rank), send_metadata=send_metadata)[1]

    def send_forward_recv_forward(
        self, output_object: Any, is_send: bool, is_recv: bool, *options: Any, **named: Any
    ) -> Received:
        to, source = self._next() if is_send else None, self._previous() if is_recv else None
        return self._pass_on(output_object, to, source, *options, **named)

    def send_backward_recv_backward(
        self, input_object: Any, is_send: bool, is_recv: bool, *options: Any, **named: Any
    ) -> Received:
        to, source = self._previous() if is_send else None, self._next() if is_recv else None
        return self._pass_on(input_object, to, source, *options, **named)

    def send_forward_recv_backward(self, input_object: Any, *options: Any, **named: Any) -> Received:
        return self._swap(input_object, self._next(), *options, **named)

    def send_backward_recv_forward(self, input_object: Any, *options: Any, **named: Any) -> Received:
        return self._swap(input_object, self._previous(), *options, **named)

    def _pass_on(
        self,
        sent: Any,
        to: int | None,
        source: int | None,
        send_first: bool,
        send_metadata: bool = True,
        metadata_recv: P2PMetadata | None = None,
    ) -> Received:
        """Send to one stage and receive from another."""
        return self._exchange(sent, to, source, send_metadata, metadata_recv, send_first)

    def _swap(
        self,
        sent: Any,
        peer: int,
        send_metadata: bool = True,
        metadata_recv: P2PMetadata | None = None,
        send_first: bool | None = None,
    ) -> Received:
        """Send to a stage and receive from it; Colossal-AI never overlaps that."""
        return self._exchange(sent, peer, peer, send_metadata, metadata_recv, send_first is not False, overlap=False)

    def _previous(self, rank: int | None = None) -> int:
        return self.stage_manager.get_prev_rank() if rank is None else rank

    def _next(self, rank: int | None = None) -> int:
        return self.stage_manager.get_next_rank() if rank is None else rank

    def _exchange(
        self,
        sent: Any = None,
        to: int | None = None,
        source: int | None = None,
        send_metadata: bool = False,
        metadata: P2PMetadata | None = None,
        send_first: bool = True,
        *,
        overlap: bool | None = None,
    ) -> Received:
        """Send an object, receive one, or both at once.

        Args:
            sent: nested containers of tensors and of what can be pickled, or None.
            to, source: global ranks; None sends or receives nothing.
            send_metadata: what is sent goes with its metadata; where not all of it is tensors, it does in any case.
            metadata: of what is received; None receives it first.
            send_first: the order in which the transfers are given to the backend.
            overlap: return without waiting; None is `overlap_p2p`.

        Returns:
            what was received or None, and the handles to wait for before it is used.
        """
        group = self.stage_manager.get_p2p_process_group()
        device, is_nccl = _check_device(group)
        sent_metadata, tensors = None, []
        if sent is not None and to is not None:
            # not strict: stages of T5, for one, send each other more than tensors
            sent_metadata, tensors = create_send_metadata(sent, strict=False, return_tensor=True)
        # a receiver that kept metadata has the tensors' shapes, and of other objects only former values
        send_metadata = sent_metadata is not None and (send_metadata or bool(sent_metadata.non_tensor_obj_idx))
        receive_metadata = source is not None and metadata is None
        if send_metadata:
            size = len(pickle.dumps(sent_metadata)) + torch.int64.itemsize
            observer.count_plain("send", get_world_size(group), size, "metadata")
        if send_metadata or receive_metadata:
            # both directions in one call: two stages that only sent, or only received, would wait for each other
            message, receiver = (sent_metadata, to) if send_metadata else (None, None)
            sender = source if receive_metadata else None
            received_metadata = _send_recv_serialization_object(
                message, receiver, sender, group, group, device, is_nccl, send_first
            )
            metadata = received_metadata if receive_metadata else metadata

        operations = []
        if sent_metadata is not None:
            operations = self._operations(comm.isend, tensors, to, sent_metadata)
        if source is not None:
            buffers = _create_recv_buffer(metadata.tensor_metadata, device)
            receipts = self._operations(comm.irecv, buffers, source, metadata)
            operations = operations + receipts if send_first else receipts + operations
        # one batch: with NCCL, sends and receives that are started one by one run in that order, and may deadlock
        works = comm.batch_isend_irecv(operations) if operations else []
        if not (self.overlap_p2p if overlap is None else overlap):
            for work in works:
                work.wait()
            works = []
        return None if source is None else _joined(buffers, metadata), works

    def _operations(
        self, op: Any, tensors: Sequence[torch.Tensor], peer: int, metadata: P2PMetadata
    ) -> list[comm.P2POp]:
        group = self.stage_manager.get_p2p_process_group()
        return [
            comm.P2POp(
                op,
                # a message is cast from values side by side; buffers to receive in are contiguous, and so stay
                # themselves
                tensor.contiguous(),
                peer,
                group,
                encoding=self.encoding,
                uncompressed=_uncompressed_reason(name, tensor.dtype),
            )
            for name, tensor in zip(_names(metadata), tensors, strict=True)
        ]


def _joined(tensors: list[torch.Tensor], metadata: P2PMetadata) -> Any:
    """Return the object that metadata describes, with these tensors."""
    others = dict(zip(metadata.non_tensor_obj_idx, metadata.non_tensor_objs, strict=True))
    coming = iter(tensors)
    leaves = [others[place] if place in others else next(coming) for place in range(metadata.tree_spec.num_leaves)]
    return tree_unflatten(leaves, metadata.tree_spec)


def _names(metadata: P2PMetadata) -> list[str]:
    """Return the place in the object of each of its tensors, such as ".past_router_logits.0"."""
    places = range(metadata.tree_spec.num_leaves)
    names = dict(_named(tree_unflatten(places, metadata.tree_spec)))
    others = set(metadata.non_tensor_obj_idx)
    return [names.get(place, "") for place in places if place not in others]


def _named(node: Any, name: str = "") -> Iterator[tuple[int, str]]:
    """Yield the leaves, each a number, of nested containers."""
    if isinstance(node, int):
        yield node, name
    elif isinstance(node, (Mapping, list, tuple)):
        for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _named(child, f"{name}.{key}")


def _uncompressed_reason(name: str, dtype: torch.dtype) -> str | None:
    """Return why a tensor is not to be rounded, or None."""
    if dtype == torch.float32:
        return "float32"  # where all else is in 16 bits, it is so for its precision
    if dtype in formats.HIGH_PRECISION:
        return next((f"a {part}" for part in NOT_ROUNDED if part in name), None)
    return None  # the count names its dtype


def compress_pipeline(plugin: Any, encoding: comm.Encoding = comm.encoding.DEFAULT) -> None:
    """Let the stages of a plugin's pipeline send each other FP8, whichever its schedule; without a pipeline, nothing.

    Args:
        plugin: a HybridParallelPlugin made by Colossal-AI's constructor.
        encoding: of the messages.
    """
    scheduler = plugin.scheduler
    if scheduler is not None:
        native = scheduler.comm
        scheduler.comm = FP8PipelineCommunication(native.stage_manager, native.overlap_p2p, encoding)
        scheduler.fp8_communication = False  # Colossal-AI's own casts, before and after the transport
