"""Mends of pipeline parallelism."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from copy import copy
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from fp8booster.colossal.compat.registry import Patch, mend


@mend(
    module="colossalai.pipeline.weight_grad_store",
    place="pipeline/weight_grad_store.py:31,39",
    needed_when="zero-bubble without apex",
)
def zero_bubble_adds_weight_gradients(module: ModuleType, patch: Patch) -> None:
    """`WeightGradStore.pop` adds the gradient that a product returns to the one that is there.

    Without it only apex's products, which add by themselves, count after a weight's first micro-batch; the gradients
    that others return are dropped. No longer needed when the second of two micro-batches changes `weight.grad`.
    """
    store = module.WeightGradStore
    weight = SimpleNamespace(grad=torch.zeros(()))
    store.put(None, None, weight, lambda *_: torch.ones(()))
    store.flush()
    store.pop()
    if weight.grad == 0:
        patch.set(store, "pop", classmethod(_pop))


def _pop(store: Any, chunk: int = 0) -> None:
    waiting = store.weight_grad_queue[chunk]
    if waiting.empty():
        raise RuntimeError(
            f"the schedule asks for weight gradients of chunk {chunk} before its backward pass"
        )
    for total_input, grad_output, weight, func in waiting.get():
        # GPT-2's layers hold the parameter behind the view of it that they multiply by
        parameter = weight[1] if isinstance(weight, tuple) else weight
        if parameter.grad is None:
            parameter.grad = func(total_input, grad_output)
        else:
            gradient = func(total_input, grad_output, parameter.grad)
            if gradient is not None:
                parameter.grad.add_(gradient)


@mend(
    module="colossalai.shardformer.layer._operation",
    place="shardformer/layer/_operation.py:130-961",
    needed_when="zero-bubble with gradient checkpointing (use_reentrant=False) or with frozen weights",
)
def zero_bubble_finds_the_parameter(module: ModuleType, patch: Patch) -> None:
    """Layers give the zero-bubble schedule the parameter that they were called with, if it is trained.

    Without it they give the one that autograd saved. Under checkpointing, of the kind that native's plugin asks for,
    that is another tensor, whose gradient nobody reads: the layer does not train. A frozen weight gets a gradient, and
    its product is computed for nothing. No longer needed when `weight.grad` is there after a checkpointed pass.
    """
    store = module.WeightGradStore
    for function in vars(module).values():
        if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
            continue
        names = list(inspect.signature(function.forward).parameters)
        if "use_zbv" in names:
            position = names.index("weight")
            patch.set(function, "forward", staticmethod(_remembering(function.forward, position)))
            patch.set(function, "backward", staticmethod(_recalling(function.backward, store)))


def _remembering(forward: Callable[..., Any], position: int) -> Callable[..., Any]:
    @wraps(forward)
    def remember(*arguments: Any) -> Any:  # of which the first is ctx
        arguments[0].parameter = arguments[position]
        return forward(*arguments)

    return remember


def _recalling(backward: Callable[..., Any], store: Any) -> Callable[..., Any]:
    @wraps(backward)
    def recall(ctx: Any, *gradients: torch.Tensor) -> Any:
        known, parameter = len(store.cache), ctx.parameter
        result = backward(ctx, *gradients)
        new = store.cache[known:]
        del store.cache[known:]
        if parameter.requires_grad:
            for total_input, grad_output, weight, func in new:
                held = (weight[0], parameter) if isinstance(weight, tuple) else parameter
                store.put(total_input, grad_output, held, func)
        return result

    return recall


@mend(
    module="colossalai.pipeline.schedule.zero_bubble_pp",
    place="pipeline/schedule/zero_bubble_pp.py:930",
    needed_when="zero-bubble takes a second step",
)
def zero_bubble_forgets_its_handles(module: ModuleType, patch: Patch) -> None:
    """A step of the zero-bubble schedule waits for its own messages, not for those of all steps before.

    Without it every handle is kept for good, and the second step waits a second time for the first one's messages,
    which with gloo never ends. No longer needed when `scheduler.wait_handles` is empty after a step.
    """
    scheduler = module.ZeroBubbleVPipeScheduler
    native = scheduler.run_forward_backward

    @wraps(native)
    def run_forward_backward(self: Any, *args: Any, **kwargs: Any) -> dict:
        self.wait_handles = []
        try:
            return native(self, *args, **kwargs)
        finally:
            self.wait_handles = []

    patch.set(scheduler, "run_forward_backward", run_forward_backward)


@mend(
    module="colossalai.pipeline.schedule.zero_bubble_pp",
    place="pipeline/schedule/zero_bubble_pp.py:850-866",
    needed_when="a model is evaluated under zero-bubble",
)
def zero_bubble_evaluates(module: ModuleType, patch: Patch) -> None:
    """The zero-bubble schedule runs forward alone, for as many micro-batches as it trains with.

    Without it AttributeError: 'list' object has no attribute 'type': it takes the stages' schedules for one. No longer
    needed when `execute_pipeline` returns a loss under `torch.no_grad`.
    """
    scheduler = module.ZeroBubbleVPipeScheduler

    def run_forward_only(
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
        loss = torch.scalar_tensor(0, device=module.get_accelerator().get_current_device())
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

    if "self.schedules[it]" in inspect.getsource(scheduler.run_forward_only):
        patch.set(scheduler, "run_forward_only", _restoring(run_forward_only))


@mend(
    module="colossalai.pipeline.schedule.zero_bubble_pp",
    place="pipeline/schedule/zero_bubble_pp.py:509",
    needed_when="zero-bubble with overlap_allgather=True",
)
def zero_bubble_adds_up_the_loss(module: ModuleType, patch: Patch) -> None:
    """The zero-bubble schedule adds up losses that are ColoTensors too.

    Without it `execute_pipeline` returns a loss of 0: with late gathers every output is a ColoTensor, which turns the
    `add_` that it is given to into an `add`. No longer needed when `forward_step` of a model's last chunk changes
    `accum_loss` where the criterion returns a ColoTensor.
    """
    scheduler = module.ZeroBubbleVPipeScheduler
    native = scheduler.forward_step

    @wraps(native)
    def forward_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(native).bind(self, *args, **kwargs)
        total = given.arguments.pop("accum_loss", None)
        result = native(*given.args, **given.kwargs)
        ends = given.arguments["model_chunk_id"] == 1 and self.stage_manager.is_first_stage(ignore_chunk=True)
        if total is not None and ends:
            total.add_(result.data)  # a plain tensor, as in the other schedules
        return result

    patch.set(scheduler, "forward_step", forward_step)


@mend(
    module="colossalai.pipeline.schedule",
    place="pipeline/schedule/one_f_one_b.py:92-110, pipeline/schedule/interleaved_pp.py:92-111",
    needed_when="a pipeline is evaluated with batches of another size than it trains with",
)
def evaluation_leaves_training_as_it_was(module: ModuleType, patch: Patch) -> None:
    """Schedules forget the size of an evaluation's batch, and what they changed for it.

    Without it the next training step ends in an AssertionError, and if the sizes are equal metadata travels with every
    message for good. No longer needed when a schedule trains on after `load_batch` saw another size.
    """
    for schedule in (module.OneForwardOneBackwardSchedule, module.InterleavedSchedule):
        patch.set(schedule, "run_forward_only", _restoring(schedule.run_forward_only))


@mend(
    module="colossalai.pipeline.schedule",
    place="pipeline/schedule/one_f_one_b.py:133,240, pipeline/p2p.py:196",
    needed_when="stages send each other more than tensors, as T5's do: its encoder or decoder lies on two or more",
)
def metadata_is_kept_of_tensors_alone(module: ModuleType, patch: Patch) -> None:
    """A stage keeps the metadata of messages that are all tensors, and receives that of others with each.

    Without it AssertionError: Only support tensor for fast send, while the stage before waits for ever: the sender
    gives the metadata of such messages every time, the receiver looks for it once. No longer needed when
    `recv_forward` of a message that holds None leaves `tensor_metadata_recv` empty.
    """
    for schedule in (
        module.OneForwardOneBackwardSchedule,
        module.InterleavedSchedule,
        module.ZeroBubbleVPipeScheduler,
    ):
        home = sys.modules[schedule.__module__]
        patch.set(home, "create_send_metadata", _only_of_tensors(home.create_send_metadata))


def _only_of_tensors(native: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(native)
    def create_send_metadata(message: Any) -> Any:
        metadata = native(message, strict=False)
        return None if metadata.non_tensor_obj_idx else metadata

    return create_send_metadata


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


def _restoring(native: Callable[..., dict]) -> Callable[..., dict]:
    @wraps(native)
    def run_forward_only(self: Any, *args: Any, **kwargs: Any) -> dict:
        before = {name: copy(vars(self)[name]) for name in _OF_TRAINING if name in vars(self)}
        try:
            return native(self, *args, **kwargs)
        finally:
            vars(self).update(before)

    return run_forward_only


@mend(
    module="colossalai.pipeline.schedule",
    place="pipeline/schedule/one_f_one_b.py:98-107, pipeline/schedule/interleaved_pp.py:99-108, "
    "pipeline/schedule/zero_bubble_pp.py:200-203",
    needed_when="enable_metadata_cache=True, and a batch is longer or shorter than the one before",
)
def metadata_is_kept_of_equal_batches_alone(module: ModuleType, patch: Patch) -> None:
    """Schedules forget the metadata of messages when a batch has other shapes than the one before.

    Without it a stage receives into tensors of the former shapes: it raises, or the ranks hang. Every stage loads the
    same batch, so all forget at once and none has to be told. No longer needed when `load_batch` of longer sequences
    leaves `tensor_metadata_recv` empty.
    """
    for schedule in (
        module.OneForwardOneBackwardSchedule,
        module.InterleavedSchedule,
        module.ZeroBubbleVPipeScheduler,
    ):
        patch.set(schedule, "load_batch", _forgetting(schedule.load_batch))


def _forgetting(native: Callable[..., None]) -> Callable[..., None]:
    @wraps(native)
    def load_batch(self: Any, *args: Any, **kwargs: Any) -> None:
        native(self, *args, **kwargs)
        leaves, tree = tree_flatten(self.batch)
        # What does not depend on how many micro-batches there are.
        shapes = [(leaf.shape[1:], leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        before = vars(self).get("batch_layout")
        self.batch_layout = (self.microbatch_size, tree, shapes)
        if before not in (None, self.batch_layout):
            for name, forgotten in _OF_MESSAGES.items():
                kept = getattr(self, name)  # by zero-bubble for each chunk
                setattr(self, name, [forgotten] * len(kept) if isinstance(kept, list) else forgotten)

    return load_batch


_OF_MESSAGES = {
    "send_tensor_metadata": True,
    "send_grad_metadata": True,
    "tensor_metadata_recv": None,
    "grad_metadata_recv": None,
}
"""What schedules keep of the messages of a step, as it is before the first."""


@mend(
    module="colossalai.pipeline.schedule",
    place="pipeline/schedule/one_f_one_b.py:92, pipeline/schedule/interleaved_pp.py:92, "
    "pipeline/schedule/zero_bubble_pp.py:193",
    needed_when="a pipeline trains with batches of several sizes, such as a last one that is smaller",
)
def training_batches_differ_in_size(module: ModuleType, patch: Patch) -> None:
    """Schedules cut each training batch anew, by the number or the size of micro-batches that the user gave.

    Without it AssertionError at the first batch of another size. Zero-bubble refuses as many micro-batches as its
    nodes are not for. No longer needed when `load_batch` in training takes 4 rows, then 6.
    """
    for schedule in (
        module.OneForwardOneBackwardSchedule,
        module.InterleavedSchedule,
        module.ZeroBubbleVPipeScheduler,
    ):
        patch.set(schedule, "load_batch", _cutting_anew(schedule.load_batch))


def _cutting_anew(native: Callable[..., None]) -> Callable[..., None]:
    @wraps(native)
    def load_batch(self: Any, *args: Any, **kwargs: Any) -> None:
        names = ("num_microbatch", "num_microbatches", "microbatch_size")
        sizes = {name: vars(self)[name] for name in names if name in vars(self)}
        given = vars(self).setdefault("given_sizes", sizes)  # before the first batch: the user's
        if not self.forward_only:
            vars(self).update(given, last_batch_size=None)
        native(self, *args, **kwargs)
        if not self.forward_only and hasattr(self, "schedules"):
            planned = _planned(self)
            if self.num_microbatch != planned:
                raise ValueError(
                    f"scheduler_nodes are for {planned} micro-batches, and a batch of {self.batch_size} makes "
                    f"{self.num_microbatch} of {self.microbatch_size}; train with batches of "
                    f"{planned * self.microbatch_size}, or give num_microbatches instead of microbatch_size"
                )

    return load_batch


def _planned(scheduler: Any) -> int:
    """How many micro-batches a zero-bubble schedule is for."""
    nodes = scheduler.schedules[scheduler.stage_manager.stage]
    return sum(node.type == "F" and node.chunk == 0 for node in nodes)


@mend(
    module="colossalai.pipeline.schedule.interleaved_pp",
    place="pipeline/schedule/interleaved_pp.py:247,276",
    needed_when="interleaved without cached metadata: enable_metadata_cache=False, or after an evaluation",
)
def interleaved_sends_metadata(module: ModuleType, patch: Patch) -> None:
    """Without a metadata cache the interleaved schedule sends metadata with every message.

    Without it they lack after each micro-batch that ends on this stage, while the receiver waits for them: the ranks
    hang. No longer needed when `send_forward_recv_forward` on a model's last chunk leaves `send_tensor_metadata` as it
    was.
    """
    schedule = module.InterleavedSchedule
    for name, flag, ends in (
        ("send_forward_recv_forward", "send_tensor_metadata", "is_last_stage"),
        ("send_backward_recv_backward", "send_grad_metadata", "is_first_stage"),
    ):
        patch.set(schedule, name, _keeping_flag(getattr(schedule, name), flag, ends))


def _keeping_flag(native: Callable[..., Any], flag: str, ends: str) -> Callable[..., Any]:
    @wraps(native)
    def exchange(self: Any, model_chunk_id_send: int, *args: Any, **kwargs: Any) -> Any:
        before = getattr(self, flag)
        result = native(self, model_chunk_id_send, *args, **kwargs)
        with self.stage_manager.switch_model_chunk_id(model_chunk_id_send):
            sent = not getattr(self.stage_manager, ends)()
        setattr(self, flag, not self.enable_metadata_cache if sent else before)
        return result

    return exchange


@mend(
    module="colossalai.pipeline.schedule.interleaved_pp",
    place="pipeline/schedule/interleaved_pp.py:343,494,561",
    needed_when="interleaved with overlap_p2p on gloo",
)
def interleaved_waits_for_what_it_sends(module: ModuleType, patch: Patch) -> None:
    """A step of the interleaved schedule ends when its messages have left.

    Without it the handles of the last ones are dropped, and with gloo a message may go with its handle: the receiver
    hangs. No longer needed when a handle that `send_backward` returned has been waited for after the step.
    """
    schedule = module.InterleavedSchedule
    for name in ("send_forward", "send_backward"):
        patch.set(schedule, name, _collecting(getattr(schedule, name)))
    native = schedule.forward_backward_step

    @wraps(native)
    def forward_backward_step(self: Any, *args: Any, **kwargs: Any) -> dict:
        self.sent_handles = []
        try:
            result = native(self, *args, **kwargs)
            for handle in self.sent_handles:
                handle.wait()
        finally:
            self.sent_handles = []
        return result

    patch.set(schedule, "forward_backward_step", forward_backward_step)


def _collecting(native: Callable[..., list]) -> Callable[..., list]:
    @wraps(native)
    def send(self: Any, *args: Any, **kwargs: Any) -> list:
        handles = native(self, *args, **kwargs)
        vars(self).setdefault("sent_handles", []).extend(handles)
        return []  # so that none is waited for twice

    return send


@mend(
    module="colossalai.amp.naive_amp.mixed_precision_mixin.fp16",
    place="amp/naive_amp/mixed_precision_mixin/fp16.py:72",
    needed_when='zero-bubble with precision="fp16"',
)
def zero_bubble_scales_the_loss(module: ModuleType, patch: Patch) -> None:
    """In FP16 a loss that goes backward without a gradient of its own is scaled, as `backward` scales it.

    Without it the zero-bubble schedule, which gives the loss to `backward_by_grad`, leaves it as it is, and the
    gradients are divided by the scale all the same: they vanish. No longer needed when
    `pre_backward_by_grad([loss], [None])` gives it.
    """
    mixin = module.FP16MixedPrecisionMixin
    native = mixin.pre_backward_by_grad

    @wraps(native)
    def pre_backward_by_grad(self: Any, tensor: Any, grad: Any) -> Any:
        grad = native(self, tensor, grad)
        if not isinstance(grad, (list, tuple)):
            return grad
        scale = self.grad_scaler.scale  # stays on the GPU
        return [
            scale.to(one).view(one.shape) if given is None and one.numel() == 1 else given
            for one, given in zip(tensor, grad, strict=True)
        ]

    patch.set(mixin, "pre_backward_by_grad", pre_backward_by_grad)


_ZERO_BUBBLE_FAILS = ("bert", "command", "gpt2", "qwen2")
"""Policies, by their modules, that raise under the zero-bubble schedule where they shard no tensors."""


@mend(
    module="colossalai.shardformer.shard.sharder",
    place="shardformer/policies/opt.py:318, vit.py:281, t5.py:575, qwen2.py:183, command.py:188, gpt2.py:147, "
    "bert.py:195",
    needed_when='pp_style="interleaved" or "zbv" with OPT, T5, ViT or another model that is not cut into chunks; "zbv" '
    "with Qwen2, Command-R, GPT-2 or BERT without tensor parallelism",
)
def chunks_are_refused_where_there_are_none(module: ModuleType, patch: Patch) -> None:
    """A pipeline of several chunks a stage is refused for models whose policy makes none, or none for zero-bubble.

    Without it one stage raises AttributeError: 'PipelineStageManager' object has no attribute 'stage_indices', or an
    IndexError, and the others wait for ever; under zero-bubble the policies of Qwen2 and Command-R raise
    UnboundLocalError, those of GPT-2 and BERT RuntimeError: Failed to replace. No longer needed when the policies of
    OPT, T5 and ViT set `stage_indices`, and the others shard their models with pp_style="zbv" and tp_size=1.
    """
    upstream = module.ModelSharder.shard

    @wraps(upstream)
    def shard(self: Any) -> Any:
        stages = self.shard_config.pipeline_stage_manager
        if stages is not None and stages.is_interleave:
            name = type(self.model).__name__
            if not _makes_chunks(self.policy):
                raise ValueError(
                    f"{name} is not cut into chunks, as pp_style='interleaved' and 'zbv' need; use pp_style='1f1b'"
                )
            if stages.use_zbv and not self.shard_config.enable_tensor_parallelism and _fails(self.policy):
                raise ValueError(
                    f"colossalai cannot prepare {name} for pp_style='zbv' without tensor parallelism; use "
                    "pp_style='interleaved' or '1f1b'"
                )
        return upstream(self)

    patch.set(module.ModelSharder, "shard", shard)


def _fails(policy: Any) -> bool:
    package, _, name = type(policy).__module__.rpartition(".")
    return package == "colossalai.shardformer.policies" and name in _ZERO_BUBBLE_FAILS


def _makes_chunks(policy: Any) -> bool:
    """Whether a policy tells the stage manager which layers each chunk has; one of the user's own is trusted."""
    method = inspect.unwrap(getattr(type(policy), "set_pipeline_forward", _makes_chunks))
    return not method.__module__.startswith("colossalai.") or "stage_indices" in method.__code__.co_names
