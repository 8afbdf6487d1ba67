"""Patches of pipeline parallelism."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements

_ZERO_BUBBLE = "pipeline.schedule.zero_bubble_pp:ZeroBubbleVPipeScheduler"


@patch("pipeline.weight_grad_store", "31,39", needed_when="zero-bubble without apex")
def zero_bubble_adds_weight_gradients(module: ModuleType, replacements: Replacements) -> None:
    """`WeightGradStore.pop` adds the gradient that a product returns to the one that is there.

    Without it only apex's products, which add by themselves, count after a weight's first micro-batch; the gradients
    that others return are dropped.
    """
    store = module.WeightGradStore
    weight = SimpleNamespace(grad=torch.zeros((), dtype=torch.float32))
    store.put(None, None, weight, lambda *_: torch.ones((), dtype=torch.float32))
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
    needed_when="zero-bubble with gradient checkpointing (use_reentrant=False) or with frozen weights",
)
def zero_bubble_finds_the_parameter(module: ModuleType, replacements: Replacements) -> None:
    """Layers give the zero-bubble schedule the parameter that they were called with, if it is trained.

    Without it they give the one that autograd saved. Under checkpointing, of the kind that Colossal-AI's plugin asks
    for, that is another tensor, whose gradient nobody reads: the layer does not train. A frozen weight gets a gradient,
    and its product is computed for nothing.
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


@wrap(f"{_ZERO_BUBBLE}.run_forward_backward", "930", needed_when="zero-bubble takes a second step")
def zero_bubble_forgets_its_handles(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> dict:
    """A step of the zero-bubble schedule waits for its own messages, not for those of all steps before.

    Without it every handle is kept for good, and the second step waits a second time for the first one's messages,
    which with gloo never ends.
    """
    self.wait_handles = []
    try:
        return upstream(self, *args, **kwargs)
    finally:
        self.wait_handles = []


@wrap(f"{_ZERO_BUBBLE}.forward_step", "509", needed_when="zero-bubble with overlap_allgather=True")
def zero_bubble_adds_up_the_loss(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The zero-bubble schedule adds up losses that are ColoTensors too.

    Without it `execute_pipeline` returns a loss of 0: with late gathers every output is a ColoTensor, which turns the
    `add_` that it is given to into an `add`.
    """
    given = inspect.signature(upstream).bind(self, *args, **kwargs)
    total = given.arguments.pop("accum_loss", None)
    result = upstream(*given.args, **given.kwargs)
    ends = given.arguments["model_chunk_id"] == 1 and self.stage_manager.is_first_stage(ignore_chunk=True)
    if total is not None and ends:
        total.add_(result.data)  # a plain tensor, as in the other schedules
    return result


@wrap(
    "pipeline.schedule.interleaved_pp:InterleavedSchedule.send_forward_recv_forward "
    "InterleavedSchedule.send_backward_recv_backward",
    "247,276",
    needed_when="interleaved without cached metadata: enable_metadata_cache=False, or after an evaluation",
)
def interleaved_sends_metadata(
    upstream: Callable, self: Any, model_chunk_id_send: int, *args: Any, **kwargs: Any
) -> Any:
    """Without a metadata cache the interleaved schedule sends metadata with every message.

    Without it they lack after each micro-batch that ends on this stage, while the receiver waits for them: the ranks
    hang.
    """
    is_forward = "forward" in upstream.__name__
    flag = "send_tensor_metadata" if is_forward else "send_grad_metadata"
    before = getattr(self, flag)
    result = upstream(self, model_chunk_id_send, *args, **kwargs)
    with self.stage_manager.switch_model_chunk_id(model_chunk_id_send):
        ends = self.stage_manager.is_last_stage() if is_forward else self.stage_manager.is_first_stage()
    setattr(self, flag, before if ends else not self.enable_metadata_cache)
    return result


@patch("pipeline.schedule.interleaved_pp", "343,494,561", needed_when="interleaved with overlap_p2p on gloo")
def interleaved_waits_for_what_it_sends(module: ModuleType, replacements: Replacements) -> None:
    """A step of the interleaved schedule ends when its messages have left.

    Without it the handles of the last ones are dropped, and with gloo a message may go with its handle: the receiver
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
    needed_when='pp_style="1f1b" with a Mixtral whose config has output_router_logits',
)
def stages_return_gradients_in_tuples(
    upstream: Callable, self: Any, optimizer: Any, input_obj: Any, output_obj: Any, output_obj_grad: Any
) -> dict | None:
    """Stages of 1F1B pipelines send back the gradients of tensors that came in a tuple, too.

    Without it a Mixtral's loss that balances its experts, which the last stage makes of all router logits, reaches the
    routers of the last stage alone.
    """
    return upstream(self, optimizer, _without_tuples(input_obj), _without_tuples(output_obj), output_obj_grad)


def _without_tuples(message: Any) -> Any:
    """A stage's message with "a.0", "a.1" in place of "a", where "a" is a tuple of tensors; a loss as it is."""
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
    needed_when='zero-bubble with precision="fp16"',
)
def zero_bubble_scales_the_loss(upstream: Callable, self: Any, tensor: Any, grad: Any) -> Any:
    """In FP16 a loss that goes backward without a gradient of its own is scaled, as `backward` scales it.

    Without it the zero-bubble schedule, which gives the loss to `backward_by_grad`, leaves it as it is, and the
    gradients are divided by the scale all the same: they vanish.
    """
    grad = upstream(self, tensor, grad)
    if not isinstance(grad, (list, tuple)):
        return grad
    scale = self.grad_scaler.scale  # stays on the GPU
    return [
        scale.to(one).view(one.shape) if given is None and one.numel() == 1 else given
        for one, given in zip(tensor, grad, strict=True)
    ]


_ZERO_BUBBLE_FAILS = ("bert", "command", "gpt2", "qwen2")
"""Policies, by their modules, that raise under the zero-bubble schedule where they shard no tensors."""


@wrap(
    "shardformer.shard.sharder:ModelSharder.shard",
    "shardformer/policies/opt.py:318, vit.py:281, t5.py:575, qwen2.py:183, command.py:188, gpt2.py:147, bert.py:195",
    needed_when='pp_style="interleaved" or "zbv" with OPT, T5, ViT or another model that is not cut into chunks; "zbv" '
    "with Qwen2, Command-R, GPT-2 or BERT without tensor parallelism",
)
def chunks_are_refused_where_there_are_none(upstream: Callable, self: Any) -> Any:
    """A pipeline of several chunks a stage is refused for models whose policy makes none, or none for zero-bubble.

    Without it one stage raises AttributeError: 'PipelineStageManager' object has no attribute 'stage_indices', or an
    IndexError, and the others wait for ever; under zero-bubble the policies of Qwen2 and Command-R raise
    UnboundLocalError, those of GPT-2 and BERT RuntimeError: Failed to replace.
    """
    stages = self.shard_config.pipeline_stage_manager
    if stages is not None and stages.is_interleave:
        name = type(self.model).__name__
        if not _makes_chunks(self.policy):
            raise ValueError(
                f"{name} is not cut into chunks, as pp_style='interleaved' and 'zbv' need; use pp_style='1f1b'"
            )
        failing = {f"colossalai.shardformer.policies.{policy}" for policy in _ZERO_BUBBLE_FAILS}
        fails = any(kind.__module__ in failing for kind in type(self.policy).__mro__)
        if stages.use_zbv and not self.shard_config.enable_tensor_parallelism and fails:
            raise ValueError(
                f"colossalai cannot prepare {name} for pp_style='zbv' without tensor parallelism; use "
                "pp_style='interleaved' or '1f1b'"
            )
    return upstream(self)


def _makes_chunks(policy: Any) -> bool:
    """Whether a policy tells the stage manager which layers each chunk has; one of the user's own is trusted.

    Most do where they exchange the forward, Mixtral's where it lists the layers that a stage holds.
    """
    exchanging = inspect.unwrap(getattr(type(policy), "set_pipeline_forward", _makes_chunks))
    if not exchanging.__module__.startswith("colossalai."):
        return True
    listing = [
        inspect.unwrap(vars(kind)["get_held_layers"])
        for kind in type(policy).__mro__
        if "get_held_layers" in vars(kind)
    ]
    return any("stage_indices" in method.__code__.co_names for method in (exchanging, *listing))
