"""Patches of what pipelines keep from batch to batch, for batches of several sizes and for evaluation."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from copy import copy
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements

_LOAD_BATCH = " ".join(
    f"{schedule}.load_batch"
    for schedule in ("OneForwardOneBackwardSchedule", "InterleavedSchedule", "ZeroBubbleVPipeScheduler")
)


@patch("pipeline.schedule.zero_bubble_pp", "850-866", needed_when="a model is evaluated under zero-bubble")
def zero_bubble_evaluates(module: ModuleType, replacements: Replacements) -> None:
    """The zero-bubble schedule runs forward alone, for as many micro-batches as it trains with.

    Without it AttributeError: 'list' object has no attribute 'type': it takes the stages' schedules for one.
    """

    def run_forward_only(
        upstream: Callable,
        self: Any,
        model_chunk: torch.nn.Module,
        data_iter: Any,
        criterion: Callable[..., Any],
        return_loss: bool = False,
        return_outputs: bool = False,
    ) -> dict:
        self.load_batch(data_iter)
        nodes = self.schedules[self.stage_manager.stage]
        planned = _planned(self)
        if self.batch_size != planned * self.microbatch_size:
            raise ValueError(
                f"scheduler_nodes are for {planned} micro-batches of {self.microbatch_size}; evaluate with batches of "
                f"{planned * self.microbatch_size}, not {self.batch_size}"
            )
        ends_here = self.stage_manager.is_first_stage(ignore_chunk=True)
        loss = torch.zeros((), dtype=torch.float32, device=module.get_accelerator().get_current_device())
        accumulated = loss if return_loss and ends_here else None
        outputs = [] if return_outputs and ends_here else None
        sent = []
        for node in nodes:
            if node.type == "F":
                self.schedule_f(node, model_chunk, node.chunk, criterion, accumulated, outputs)
            elif node.type == "RECV_FORWARD":
                self.recv_forward(node.chunk)
            elif node.type == "SEND_FORWARD":
                sent += self.send_forward(node.chunk)
        for handle in sent:
            handle.wait()
        self.input_tensors, self.output_tensors = [[], []], [[], []]  # what a backward pass would need
        return {"loss": accumulated, "outputs": None if outputs is None else module.merge_batch(outputs)}

    if "self.schedules[it]" in inspect.getsource(module.ZeroBubbleVPipeScheduler.run_forward_only):
        for function in (run_forward_only, evaluation_leaves_training_as_it_was):
            replacements.wrap(module, "ZeroBubbleVPipeScheduler.run_forward_only", function)


_OF_TRAINING = (
    "batch_size",
    "last_batch_size",
    "microbatch_size",
    "num_microbatch",
    "num_microbatches",
    "enable_metadata_cache",
    "send_tensor_metadata",
    "send_grad_metadata",
    "tensor_metadata_recv",
    "grad_metadata_recv",
    "batch_layout",
)
"""What schedules keep from batch to batch."""


@wrap(
    "pipeline.schedule:OneForwardOneBackwardSchedule.run_forward_only InterleavedSchedule.run_forward_only",
    "pipeline/schedule/one_f_one_b.py:92-110, pipeline/schedule/interleaved_pp.py:92-111",
    needed_when="a pipeline is evaluated with batches of another size than it trains with",
)
def evaluation_leaves_training_as_it_was(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> dict:
    """Schedules forget the size of an evaluation's batch, and what they changed for it.

    Without it the next training step ends in an AssertionError, and if the sizes are equal metadata is sent with every
    message for good.
    """
    before = {name: copy(vars(self)[name]) for name in _OF_TRAINING if name in vars(self)}
    try:
        return upstream(self, *args, **kwargs)
    finally:
        vars(self).update(before)


@patch(
    "pipeline.schedule",
    "pipeline/schedule/one_f_one_b.py:133,240, pipeline/p2p.py:196",
    needed_when="stages send each other more than tensors, as T5's do: its encoder or decoder lies on two or more",
)
def metadata_is_kept_of_tensors_alone(module: ModuleType, replacements: Replacements) -> None:
    """A stage keeps the metadata of messages that are all tensors, and receives that of others with each.

    Without it AssertionError: Only support tensor for fast send, while the stage before waits for ever: the sender
    gives the metadata of such messages every time, the receiver looks for it once.
    """

    def create_send_metadata(upstream: Callable, message: Any) -> Any:
        metadata = upstream(message, strict=False)
        return None if metadata.non_tensor_obj_idx else metadata

    for schedule in (module.OneForwardOneBackwardSchedule, module.InterleavedSchedule, module.ZeroBubbleVPipeScheduler):
        replacements.wrap(sys.modules[schedule.__module__], "create_send_metadata", create_send_metadata)


_OF_MESSAGES = {
    "send_tensor_metadata": True,
    "send_grad_metadata": True,
    "tensor_metadata_recv": None,
    "grad_metadata_recv": None,
}
"""What schedules keep of the messages of a step, as it is before the first."""


@wrap(
    f"pipeline.schedule:{_LOAD_BATCH}",
    "pipeline/schedule/one_f_one_b.py:98-107, pipeline/schedule/interleaved_pp.py:99-108, "
    "pipeline/schedule/zero_bubble_pp.py:200-203",
    needed_when="enable_metadata_cache=True, and a batch is longer or shorter than the one before",
)
def metadata_is_kept_of_equal_batches_alone(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Schedules forget the metadata of messages when a batch has other shapes than the one before.

    Without it a stage receives into tensors of the former shapes: it raises, or the ranks hang. Every stage loads the
    same batch, so all forget at once and none has to be told.
    """
    upstream(self, *args, **kwargs)
    leaves, tree = tree_flatten(self.batch)
    # What does not depend on how many micro-batches there are.
    shapes = [(leaf.shape[1:], leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    before = vars(self).get("batch_layout")
    self.batch_layout = (self.microbatch_size, tree, shapes)
    if before not in (None, self.batch_layout):
        for name, forgotten in _OF_MESSAGES.items():
            kept = getattr(self, name)  # by zero-bubble for each chunk
            setattr(self, name, [forgotten] * len(kept) if isinstance(kept, list) else forgotten)


@wrap(
    f"pipeline.schedule:{_LOAD_BATCH}",
    "pipeline/schedule/one_f_one_b.py:92, pipeline/schedule/interleaved_pp.py:92, "
    "pipeline/schedule/zero_bubble_pp.py:193",
    needed_when="a pipeline trains with batches of several sizes, such as a last one that is smaller",
)
def training_batches_differ_in_size(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Schedules cut each training batch anew, by the number or the size of micro-batches that the user gave.

    Without it AssertionError at the first batch of another size. Zero-bubble refuses as many micro-batches as its
    nodes are not for.
    """
    names = ("num_microbatch", "num_microbatches", "microbatch_size")
    sizes = {name: vars(self)[name] for name in names if name in vars(self)}
    given = vars(self).setdefault("given_sizes", sizes)  # before the first batch: the user's
    if not self.forward_only:
        vars(self).update(given, last_batch_size=None)
    upstream(self, *args, **kwargs)
    if not self.forward_only and hasattr(self, "schedules"):
        planned = _planned(self)
        if self.num_microbatch != planned:
            raise ValueError(
                f"scheduler_nodes are for {planned} micro-batches, and a batch of {self.batch_size} makes "
                f"{self.num_microbatch} of {self.microbatch_size}; train with batches of "
                f"{planned * self.microbatch_size}, or give num_microbatches instead of microbatch_size"
            )


def _planned(scheduler: Any) -> int:
    """How many micro-batches a zero-bubble schedule is for."""
    nodes = scheduler.schedules[scheduler.stage_manager.stage]
    return sum(node.type == "F" and node.chunk == 0 for node in nodes)
