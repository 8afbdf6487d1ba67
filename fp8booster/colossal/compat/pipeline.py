"""Patches of pipeline parallelism: what schedules send, wait for, and keep from batch to batch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from copy import copy
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from fp8booster.colossal.compat.registry import Replacements, by_name, patch, refuse, wrap

_ZERO_BUBBLE = "pipeline.schedule.zero_bubble_pp:ZeroBubbleVPipeScheduler"

_LOAD_BATCH = " ".join(
    f"{schedule}.load_batch"
    for schedule in ("OneForwardOneBackwardSchedule", "InterleavedSchedule", "ZeroBubbleVPipeScheduler")
)


@patch("pipeline.weight_grad_store", "31,39", "zero-bubble without apex")
def zero_bubble_adds_weight_gradients(module: ModuleType, replacements: Replacements) -> None:
    """Without it the gradients of products that do not add by themselves, as apex's do, are dropped after a weight's
    first micro-batch.
    """
    # tried out: no name or constant of upstream tells whether it adds
    store = module.WeightGradStore
    weight = SimpleNamespace(grad=torch.zeros((), dtype=torch.float32, device="cpu"))
    store.put(None, None, weight, lambda *_: torch.ones((), dtype=torch.float32, device="cpu"))
    store.flush()
    store.pop()
    if weight.grad == 0:
        replacements.set(store, "pop", classmethod(_pop))


def _pop(store: Any, chunk: int = 0) -> None:
    waiting = store.weight_grad_queue[chunk]
    if waiting.empty():
        raise RuntimeError(f"the schedule asks for weight gradients of chunk {chunk} before its backward pass")
    for total_input, grad_output, weight, func in waiting.get():
        # GPT-2's layers hold the parameter behind the view of it that they multiply by
        parameter = weight[1] if isinstance(weight, tuple) else weight
        if parameter.grad is None:
            parameter.grad = func(total_input, grad_output)
        else:
            gradient = func(total_input, grad_output, parameter.grad)
            if gradient is not None:
                parameter.grad.add_(gradient)


@patch(
    "shardformer.layer._operation",
    "130-961",
    "zero-bubble with gradient checkpointing (use_reentrant=False) or with frozen weights",
)
def zero_bubble_finds_the_parameter(module: ModuleType, replacements: Replacements) -> None:
    """Without it layers give the schedule the parameter that autograd saved. Under checkpointing that is another
    tensor, whose gradient nobody reads: the layer does not train. A frozen weight gets a gradient, and its product is
    computed for nothing.
    """
    store = module.WeightGradStore

    def forward(upstream: Callable, ctx: Any, *args: Any) -> Any:
        position = list(inspect.signature(upstream).parameters).index("weight")
        ctx.parameter = args[position - 1]  # the first is ctx
        return upstream(ctx, *args)

    def backward(upstream: Callable, ctx: Any, *gradients: torch.Tensor) -> Any:
        known, parameter = len(store.cache), ctx.parameter
        result = upstream(ctx, *gradients)
        new = store.cache[known:]
        # upstream has put them in with what autograd saved; they go in again with the parameter that trains
        del store.cache[known:]
        for total_input, grad_output, weight, func in new if parameter.requires_grad else ():
            held = (weight[0], parameter) if isinstance(weight, tuple) else parameter
            store.put(total_input, grad_output, held, func)
        return result

    for name, function in list(vars(module).items()):
        is_operation = isinstance(function, type) and issubclass(function, torch.autograd.Function)
        if is_operation and "use_zbv" in inspect.signature(function.forward).parameters:
            replacements.wrap(module, f"{name}.forward", forward)
            replacements.wrap(module, f"{name}.backward", backward)


@wrap(f"{_ZERO_BUBBLE}.run_forward_backward", "930", "zero-bubble takes a second step")
def zero_bubble_forgets_its_handles(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> dict:
    """Without it the second step waits a second time for the first one's messages, which with gloo never ends."""
    self.wait_handles = []
    try:
        return upstream(self, *args, **kwargs)
    finally:
        self.wait_handles = []


@wrap(f"{_ZERO_BUBBLE}.forward_step", "509", "zero-bubble with overlap_allgather=True")
@by_name
def zero_bubble_adds_up_the_loss(call: Callable[[], Any], given: dict[str, Any]) -> Any:
    """Without it `execute_pipeline` returns a loss of 0: with late gathers every output is a ColoTensor, which turns
    the `add_` that it is given to into an `add`.
    """
    total = given.pop("accum_loss", None)
    result = call()
    ends = given["model_chunk_id"] == 1 and given["self"].stage_manager.is_first_stage(ignore_chunk=True)
    if total is not None and ends:
        total.add_(result.data)  # a plain tensor, as in the other schedules
    return result


@wrap(
    "pipeline.schedule.interleaved_pp:InterleavedSchedule.send_forward_recv_forward "
    "InterleavedSchedule.send_backward_recv_backward",
    "247,276",
    "interleaved without cached metadata: enable_metadata_cache=False, or after an evaluation",
)
def interleaved_sends_metadata(
    upstream: Callable, self: Any, model_chunk_id_send: int, *args: Any, **kwargs: Any
) -> Any:
    """Without it metadata lack after each micro-batch that ends on this stage, while the receiver waits for them: the
    ranks hang.
    """
    is_forward = "forward" in upstream.__name__
    flag = "send_tensor_metadata" if is_forward else "send_grad_metadata"
    before = getattr(self, flag)
    result = upstream(self, model_chunk_id_send, *args, **kwargs)
    with self.stage_manager.switch_model_chunk_id(model_chunk_id_send):
        ends = self.stage_manager.is_last_stage() if is_forward else self.stage_manager.is_first_stage()
    setattr(self, flag, before if ends else not self.enable_metadata_cache)
    return result


@patch("pipeline.schedule.interleaved_pp", "343,494,561", "interleaved with overlap_p2p on gloo")
def interleaved_waits_for_what_it_sends(module: ModuleType, replacements: Replacements) -> None:
    """Without it the handles of the last ones are dropped, and with gloo a message may go with its handle: the receiver
    hangs.
    """

    def send(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> list:
        vars(self).setdefault("sent_handles", []).extend(upstream(self, *args, **kwargs))
        return []  # so that none is waited for twice

    def step(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> dict:
        self.sent_handles = []
        try:
            result = upstream(self, *args, **kwargs)
            for handle in self.sent_handles:
                handle.wait()
        finally:
            self.sent_handles = []
        return result

    for name in ("send_forward", "send_backward"):
        replacements.wrap(module, f"InterleavedSchedule.{name}", send)
    replacements.wrap(module, "InterleavedSchedule.forward_backward_step", step)


@wrap(
    "pipeline.schedule.one_f_one_b:OneForwardOneBackwardSchedule.backward_step",
    "323",
    'pp_style="1f1b" with a Mixtral whose config has output_router_logits',
)
def stages_return_gradients_in_tuples(
    upstream: Callable, self: Any, optimizer: Any, input_obj: Any, output_obj: Any, output_obj_grad: Any
) -> dict | None:
    """Without it a Mixtral's loss that balances its experts, which the last stage makes of all router logits, reaches
    the routers of the last stage alone.
    """
    return upstream(self, optimizer, _without_tuples(input_obj), _without_tuples(output_obj), output_obj_grad)


def _without_tuples(message: Any) -> Any:
    """Return a stage's message with "a.0", "a.1" for "a", where that is a tuple of tensors; a loss as it is."""
    if not isinstance(message, dict):
        return message
    flat = {}
    for name, value in message.items():
        if isinstance(value, (tuple, list)) and any(isinstance(each, torch.Tensor) for each in value):
            flat.update((f"{name}.{place}", each) for place, each in enumerate(value))
        else:
            flat[name] = value
    return flat


@wrap(
    "amp.naive_amp.mixed_precision_mixin.fp16:FP16MixedPrecisionMixin.pre_backward_by_grad",
    "72",
    'zero-bubble with precision="fp16"',
)
def zero_bubble_scales_the_loss(upstream: Callable, self: Any, tensor: Any, grad: Any) -> Any:
    """Without it the zero-bubble schedule, which gives the loss to `backward_by_grad`, leaves it as it is, and the
    gradients are divided by the scale all the same: they vanish.
    """
    grad = upstream(self, tensor, grad)
    if not isinstance(grad, (list, tuple)):
        return grad
    scale = self.grad_scaler.scale  # stays on the GPU, so that the host does not wait
    return [
        scale.to(one).view(one.shape) if given is None and one.numel() == 1 else given
        for one, given in zip(tensor, grad, strict=True)
    ]


_ZERO_BUBBLE_FAILS = ("bert", "command", "gpt2", "qwen2")
"""Policies, by their modules, that raise under the zero-bubble schedule where they shard no tensors."""


@refuse(
    "shardformer.shard.sharder:ModelSharder.shard",
    "shardformer/policies/opt.py:318, vit.py:281, t5.py:575, qwen2.py:183, command.py:188, gpt2.py:147, bert.py:195",
    'pp_style="interleaved" or "zbv" with OPT, T5, ViT or another model that is not cut into chunks; "zbv" '
    "with Qwen2, Command-R, GPT-2 or BERT without tensor parallelism",
)
def chunks_are_refused_where_there_are_none(given: dict[str, Any]) -> str | None:
    """Without it one stage raises AttributeError: 'PipelineStageManager' object has no attribute 'stage_indices', or an
    IndexError, and the others wait for ever; under zero-bubble the policies of Qwen2 and Command-R raise
    UnboundLocalError, those of GPT-2 and BERT RuntimeError: Failed to replace.
    """
    sharder = given["self"]
    config, policy, name = sharder.shard_config, sharder.policy, type(sharder.model).__name__
    stages = config.pipeline_stage_manager
    if stages is None or not stages.is_interleave:
        return None
    if not _makes_chunks(policy):
        return f"{name} is not cut into chunks, as pp_style='interleaved' and 'zbv' need; use pp_style='1f1b'"
    failing = {f"colossalai.shardformer.policies.{each}" for each in _ZERO_BUBBLE_FAILS}
    fails = any(kind.__module__ in failing for kind in type(policy).__mro__)
    if not (stages.use_zbv and not config.enable_tensor_parallelism and fails):
        return None
    return (
        f"colossalai cannot prepare {name} for pp_style='zbv' without tensor parallelism; use pp_style='interleaved' "
        "or '1f1b'"
    )


def _makes_chunks(policy: Any) -> bool:
    """Tell whether a policy tells the stage manager which layers each chunk has; one of the user's own is trusted."""
    exchanging = inspect.unwrap(getattr(type(policy), "set_pipeline_forward", _makes_chunks))
    if not exchanging.__module__.startswith("colossalai."):
        return True
    # most do where they exchange the forward, Mixtral's where it lists the layers that a stage holds
    listing = [
        inspect.unwrap(vars(kind)["get_held_layers"])
        for kind in type(policy).__mro__
        if "get_held_layers" in vars(kind)
    ]
    return any("stage_indices" in method.__code__.co_names for method in (exchanging, *listing))


@patch("pipeline.schedule.zero_bubble_pp", "850-866", "a model is evaluated under zero-bubble")
def zero_bubble_evaluates(module: ModuleType, replacements: Replacements) -> None:
    """Without it AttributeError: 'list' object has no attribute 'type': it takes the stages' schedules for one."""

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
        # handles are kept to the end: with gloo a message may go with its handle
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


_OF_MESSAGES = {
    "send_tensor_metadata": True,
    "send_grad_metadata": True,
    "tensor_metadata_recv": None,
    "grad_metadata_recv": None,
}
"""Attributes of schedules about the messages of a step, with their values before the first."""

_OF_TRAINING = (
    "batch_size",
    "last_batch_size",
    "microbatch_size",
    "num_microbatch",
    "num_microbatches",
    "enable_metadata_cache",
    *_OF_MESSAGES,
    "batch_layout",
)
"""Attributes that schedules keep from batch to batch."""


@wrap(
    "pipeline.schedule:OneForwardOneBackwardSchedule.run_forward_only InterleavedSchedule.run_forward_only",
    "pipeline/schedule/one_f_one_b.py:92-110, pipeline/schedule/interleaved_pp.py:92-111",
    "a pipeline is evaluated with batches of another size than it trains with",
)
def evaluation_leaves_training_as_it_was(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> dict:
    """Without it the next training step ends in an AssertionError, and if the sizes are equal metadata is sent with
    every message for good.
    """
    # copies, since zero-bubble keeps lists by chunk, which it changes in place
    before = {name: copy(vars(self)[name]) for name in _OF_TRAINING if name in vars(self)}
    try:
        return upstream(self, *args, **kwargs)
    finally:
        vars(self).update(before)


@patch(
    "pipeline.schedule",
    "pipeline/schedule/one_f_one_b.py:133,240, pipeline/p2p.py:196",
    "stages send each other more than tensors, as T5's do: its encoder or decoder lies on two or more",
)
def metadata_is_kept_of_tensors_alone(module: ModuleType, replacements: Replacements) -> None:
    """Without it AssertionError: Only support tensor for fast send, while the stage before waits for ever."""

    def create_send_metadata(upstream: Callable, message: Any) -> Any:
        metadata = upstream(message, strict=False)
        return None if metadata.non_tensor_obj_idx else metadata

    for schedule in (module.OneForwardOneBackwardSchedule, module.InterleavedSchedule, module.ZeroBubbleVPipeScheduler):
        replacements.wrap(sys.modules[schedule.__module__], "create_send_metadata", create_send_metadata)


@wrap(
    f"pipeline.schedule:{_LOAD_BATCH}",
    "pipeline/schedule/one_f_one_b.py:98-107, pipeline/schedule/interleaved_pp.py:99-108, "
    "pipeline/schedule/zero_bubble_pp.py:200-203",
    "enable_metadata_cache=True, and a batch is longer or shorter than the one before",
)
def metadata_is_kept_of_equal_batches_alone(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Without it a stage receives into tensors of the former shapes: it raises, or the ranks hang."""
    upstream(self, *args, **kwargs)
    # every stage loads the same batch, so all forget at once and none has to be told
    leaves, tree = tree_flatten(self.batch)
    # what does not depend on how many micro-batches there are
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
    "a pipeline trains with batches of several sizes, such as a last one that is smaller",
)
def training_batches_differ_in_size(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Without it AssertionError at the first batch of another size."""
    names = ("num_microbatch", "num_microbatches", "microbatch_size")
    sizes = {name: vars(self)[name] for name in names if name in vars(self)}
    given = vars(self).setdefault("given_sizes", sizes)  # before the first batch: the user's
    if not self.forward_only:
        vars(self).update(given, last_batch_size=None)
    upstream(self, *args, **kwargs)
    if not self.forward_only and hasattr(self, "schedules"):  # zero-bubble, whose nodes are for one number
        planned = _planned(self)
        if self.num_microbatch != planned:
            raise ValueError(
                f"scheduler_nodes are for {planned} micro-batches, and a batch of {self.batch_size} makes "
                f"{self.num_microbatch} of {self.microbatch_size}; train with batches of "
                f"{planned * self.microbatch_size}, or give num_microbatches instead of microbatch_size"
            )


def _planned(scheduler: Any) -> int:
    """Return the number of micro-batches that a zero-bubble schedule is for."""
    nodes = scheduler.schedules[scheduler.stage_manager.stage]
    return sum(node.type == "F" and node.chunk == 0 for node in nodes)
