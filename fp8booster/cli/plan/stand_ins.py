"""Stand-ins for GPUs, for values and for other ranks, with which a training step runs and only counts.

Tensors have shapes and no values (`FakeTensorMode`); process groups answer at once and send nothing (torch's backend
"fake"). Code that reads values all the same, or is C++ that needs them, is replaced here.
"""

from __future__ import annotations

import fp8booster.colossal  # noqa: F401  isort: skip  (patches colossalai before it is imported)
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from colossalai.device.device_mesh import DeviceMesh
from colossalai.pipeline import p2p
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8booster.colossal.pipeline import communication
from fp8booster.colossal.temporarily import temporarily
from fp8booster.kernels import adamw_8bit, device, grouped_product
from fp8booster.kernels.operators import Operator
from fp8booster.monitor.memory import MemoryTracker
from fp8booster.nn.weights import memory

try:
    from transformers import masking_utils  # of transformers 5, which takes position ids without values for packed ones
except ImportError:
    masking_utils = None


@contextmanager
def instead_of_gpus(tracker: MemoryTracker, ranks: int, gpu_memory: int) -> Iterator[None]:
    """Make this process rank 0 of so many, on a GPU of so many bytes, under a tracker.

    Raises:
        RuntimeError: this process is a rank already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of a run; count its memory in another process")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    logging.disable(logging.WARNING)
    metadata = _metadata_of_what_was_sent()
    replaced = (
        temporarily(memory, gpu_memory=lambda: gpu_memory),
        # a plan is of a GPU with FP8 products, whatever this machine has
        temporarily(device, why_no_fp8=lambda _: None, why_no_blockwise=lambda _: None),
        temporarily(Operator, run=_as_a_kernel(tracker)),
        temporarily(torch.UntypedStorage, resize_=_resize_seen_by(tracker)),
        temporarily(
            adamw_8bit,
            # NumPy writes them
            step_rows=lambda shards, *_: torch.empty(len(shards.steps), 8, dtype=torch.float32, device="cpu"),
            _update_shard=lambda *_: None,  # in place, by a kernel; its definition takes thousands of operations
        ),
        temporarily(grouped_product, _runs_kernel=lambda *_: True),
        temporarily(communication, _send_recv_serialization_object=metadata),
        temporarily(p2p, _send_recv_serialization_object=metadata),
        temporarily(DeviceMesh, _DIST_BACKEND={"cpu": "fake"}, from_process_group=staticmethod(_mesh_with_values())),
        temporarily(
            DistributedDataParallel,
            __init__=_replicate,
            forward=lambda self, *args, **kwargs: self.module(*args, **kwargs),
            no_sync=lambda self: nullcontext(),
            register_comm_hook=lambda *_, **__: None,
        ),
    )
    if masking_utils is not None:
        replaced += (temporarily(masking_utils, find_packed_sequence_indices=lambda _: None),)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.callback(logging.disable, logging.NOTSET)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for each in (*replaced, FakeTensorMode(allow_non_fake_inputs=True), _Guesses(), tracker):
            stack.enter_context(each)
        yield


class _Guesses(TorchDispatchMode):
    """Answers Python's questions about values that are not there: numbers are 1, none is true, all are equal."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], FakeTensor):
            if function is torch.ops.aten._local_scalar_dense.default:
                dtype = args[0].dtype
                return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
            if function is torch.ops.aten.equal.default:
                return True
        if function is torch.ops.aten._scaled_mm.out:  # which torch would run on zeros, for want of its shapes
            return (kwargs or {})["out"]
        return function(*args, **(kwargs or {}))


def _as_a_kernel(tracker: MemoryTracker) -> Any:
    """Return an `Operator.run` of which the tracker sees the results alone, as of a kernel on a GPU."""
    run = Operator.run

    def call(self: Operator, *args: Any, **kwargs: Any) -> Any:
        # it gives nothing, writes to its arguments, and takes no memory
        is_written_to = self.reference.__annotations__["return"] == "None"
        if is_written_to and any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs))):
            return None
        with tracker.as_one():
            return run(self, *args, **kwargs)

    return call


def _resize_seen_by(tracker: MemoryTracker) -> Any:
    """Return a storage's `resize_` that the tracker sees: FSDP frees by it, and no operator tells."""
    resize = torch.UntypedStorage.resize_

    def call(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resized = resize(self, size)
        tracker.resized(self)
        return resized

    return call


def _metadata_of_what_was_sent() -> Any:
    """Return the exchange of metadata of a pipeline's first stage, which receives gradients of what it sent."""
    sent: list[Any] = []

    def call(object: Any, send_dst: int | None = None, recv_src: int | None = None, *_: Any, **__: Any) -> Any:
        sent.extend([object] if object is not None else [])
        return None if recv_src is None else sent[-1]

    return call


def _mesh_with_values() -> Any:
    """Return a maker of Colossal-AI's mesh of ranks, which reads values of the tensors that it makes."""
    make = DeviceMesh.from_process_group

    def call(group: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return make(group)

    return call


def _replicate(self: DistributedDataParallel, module: nn.Module, *_: Any, **options: Any) -> None:
    """Take the place of DDP's constructor: keep buckets as large as all gradients; its reducer in C++ reads values."""
    nn.Module.__init__(self)
    self.module = module
    apart = not options.get("gradient_as_bucket_view", False)
    self.buckets = [torch.empty_like(each) for each in module.parameters() if each.requires_grad and apart]
