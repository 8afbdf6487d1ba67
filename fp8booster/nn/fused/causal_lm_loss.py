"""The loss of transformers' causal language models over chunks of logits, in place of their native forward.

Written for LLaMA, Mistral, Mixtral and Qwen2 as transformers 4.51.3 to 5.23 have them: body, head, loss
(`LlamaForCausalLM.forward`), and in a Mixtral the routers' loss (`MixtralForCausalLM.forward`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fp8booster import formats
from fp8booster.kernels.transpose import transposed
from fp8booster.nn.fused.loss import linear_cross_entropy
from fp8booster.nn.fused.vocabulary import VocabularyPart
from fp8booster.nn.linear.delivered_amax import deliver_amax, delivered_amax
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.linear.linear import FP8Linear
from fp8booster.nn.linear.speed_model import computes_in_fp8
from fp8booster.nn.modules import has_hooks
from fp8booster.nn.weights.freshness import reusable
from fp8booster.tensor import QuantizedMatrix

if TYPE_CHECKING:  # seconds to import, and there where there is a model
    from transformers import PretrainedConfig
    from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

MODELS = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}": f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Mixtral", "Qwen2")
}
"""Module and name of the classes whose forward this knows."""

HEADS: set[type[nn.Module]] = {nn.Linear, FP8Linear}
"""Classes of heads whose logits, up to padding at their end, are those of nn.Linear; engines add theirs."""


def use_fused_loss(model: nn.Module) -> bool:
    """Let a causal language model compute its loss over chunks of logits, which are then never whole.

    The model, or the one inside a wrapper such as PEFT's, keeps its class, parameters and hooks; its `forward` is
    replaced. In training mode, when labels are given, it returns the native output, whose `loss` is that of the native
    forward (shifted labels, `num_items_in_batch`, `shift_labels` and `ignore_index` included) and whose `logits`
    is None. The native forward runs, logits and all, in evaluation mode, without labels, when `logits_to_keep` asks for
    some of them (the sequence's length asks for all), for `return_dict=False`, with a loss function of one's own, and
    wherever `why_not_fused` finds a reason. `use_native_loss` undoes it. A pickle comes back with the native
    forward: call this again. Where an engine has replaced the forward, the one that it offered takes its place.

    Args:
        model: any module.

    Returns:
        Whether the loss will be computed so; if not, the model is as it was and `why_not_fused` says why.
    """
    if why_not_fused(model) is not None:
        return False
    language_model = language_model_in(model)
    engine = _engine_loss(language_model)
    if engine is None:
        forward = types.MethodType(_forward_like(type(language_model).forward), language_model)
    else:
        forward = engine.forward
    language_model.forward = forward
    return True


def use_native_loss(model: nn.Module) -> None:
    """Undo `use_fused_loss`."""
    for module in model.modules():
        if not _is_ours(module.__dict__.get("forward")):
            continue
        engine = _engine_loss(module)
        if engine is None:
            del module.forward
        else:
            module.forward = engine.native


def why_not_fused(model: nn.Module) -> str | None:
    """Why a model's loss cannot be computed over chunks of logits, or None if it can."""
    language_model = language_model_in(model)
    if language_model is None:
        return f"{type(model).__name__} is no {', '.join(MODELS.values())} of transformers"
    engine = _engine_loss(language_model)
    if engine is not None:
        return engine.why_not(language_model)
    forward = language_model.__dict__.get("forward")
    # a pickle leaves the class's own, bound, where ours was
    own = getattr(forward, "__func__", None) is type(language_model).forward
    if forward is not None and not own and not _is_ours(forward):
        return "its forward was replaced, as Colossal-AI does it for tensor, sequence or pipeline parallelism"
    return _why_not_through(language_model)


def language_model_in(model: nn.Module) -> nn.Module | None:
    """The module whose forward is one of those known."""
    for module in model.modules():
        for base in type(module).__mro__:
            if MODELS.get(base.__module__) == base.__name__:
                return module if type(module).forward is base.forward else None
    return None


def fused_head(model: nn.Module) -> nn.Module | None:
    """The head of a model whose loss is computed over chunks of logits, for an engine to mix `HeldHead` into it."""
    language_model = language_model_in(model)
    fused = language_model is not None and _is_ours(language_model.__dict__.get("forward"))
    return language_model.lm_head if fused else None


@dataclass(frozen=True)
class EngineLoss:
    """The loss over chunks of logits of a model whose forward an engine has replaced."""

    native: Callable
    """That forward, bound."""

    forward: Callable
    """The one with this loss, bound; made by `ours`."""

    why_not: Callable[[nn.Module], str | None]
    """Why a model's loss is not computed so, or None."""


def offer_loss(model: nn.Module, loss: EngineLoss) -> None:
    """Tell `use_fused_loss` of the loss of an engine, for a module that `language_model_in` gave."""
    model.__dict__[_ENGINE_LOSS] = loss


def ours(forward: Callable, native: Callable) -> Callable:
    """Mark a function as a forward with a loss over chunks, in place of a native one."""
    forward._fp8booster_native = native
    return forward


_ENGINE_LOSS = "_fp8booster_engine_loss"


def _engine_loss(model: nn.Module) -> EngineLoss | None:
    """What an engine offered, if the model has one of its two forwards."""
    loss = model.__dict__.get(_ENGINE_LOSS)
    return loss if loss is not None and model.__dict__.get("forward") in (loss.native, loss.forward) else None


class HeldHead(nn.Module):
    """Mixin of a head whose parameters an engine keeps apart from it: they are whole within `while_whole`."""

    head_class: ClassVar[type[nn.Module]]
    """The class that the head was."""

    def while_whole(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `compute` makes of the head's parameters, differentiable."""
        return compute()


def _why_not_through(language_model: nn.Module) -> str | None:
    """What stands against computing the loss from the head's weight, as it is now."""
    head = language_model.lm_head
    reason = why_not_bypassed(head, HEADS)
    if reason is None and tokens_of(head) != language_model.config.vocab_size:
        return (
            f"its lm_head makes {tokens_of(head)} logits and its config has a vocab_size of "
            f"{language_model.config.vocab_size}"
        )
    return reason


def tokens_of(head: nn.Module) -> int:
    """How many tokens a head makes logits of; padding, of which Colossal-AI's heads know, is none."""
    return getattr(head, "old_num_embeddings", head.weight.shape[0])


def why_not_bypassed(head: nn.Module, classes: Collection[type[nn.Module]]) -> str | None:
    """Why the weight of an lm_head cannot be read past its forward, or None if it can.

    Args:
        head: as it is now.
        classes: those of heads whose product is that of nn.Linear.
    """
    held = isinstance(head, HeldHead)
    if (head.head_class if held else type(head)) not in classes:
        return f"its lm_head is a {type(head).__name__}, whose product may be another than that of nn.Linear"
    if not held and type(head._parameters.get("weight")) is not nn.Parameter:
        kind = type(head.weight).__name__
        return f"the weight of its lm_head is a {kind}: sharded, or gathered when an operator of torch reads it"
    if has_hooks(head):
        return "its lm_head has hooks, which would not run"
    if head.weight.dtype not in formats.HIGH_PRECISION:
        return f"the weight of its lm_head is {head.weight.dtype}"
    if not held and isinstance(head, FP8Layer) and head.fp8_weight.is_transient:
        return "the weight of its lm_head is whole only while the layer runs"
    if "forward" in head.__dict__:
        return "the forward of its lm_head was replaced"
    return None


def _is_ours(forward: object) -> bool:
    return hasattr(forward, "_fp8booster_native")


@functools.cache
def _forward_like(native: Callable) -> Callable:
    """Our forward, with the signature of the native one, which trainers read."""
    signature = inspect.signature(native)

    @functools.wraps(native)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast | tuple:
        bound = signature.bind(self, *args, **kwargs)
        arguments = {**bound.arguments, **bound.kwargs}
        if not _computes_loss_alone(self, arguments):
            return native(self, *args, **kwargs)
        return _forward_to_loss(self, arguments)

    return ours(forward, native)


def _computes_loss_alone(model: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether this call trains and reads no logits, so far as its arguments tell."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    kept = arguments.get("logits_to_keep", 0), arguments.get("num_logits_to_keep", 0)
    return (
        model.training
        and arguments.get("labels") is not None
        and all(isinstance(number, int) and number == 0 for number in kept)
        and arguments.get("return_dict") is not False
        and returns_dict(model.config)
        and model.loss_function is ForCausalLMLoss
        and _why_not_through(model) is None
    )


def returns_dict(config: PretrainedConfig) -> bool:
    """Whether a model returns its outputs by name, unless a call asks otherwise."""
    # not `use_return_dict`, of which transformers 5 warns
    return config.return_dict and not getattr(config, "torchscript", False)


def _forward_to_loss(model: nn.Module, arguments: dict[str, Any]) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
    """Body and loss, as the native forward has them."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    not_for_body = ("self", "kwargs", "labels", "logits_to_keep", "num_logits_to_keep", "return_dict")
    for_body = {name: value for name, value in arguments.items() if name not in not_for_body}
    outputs = model.model(**for_body)
    targets = arguments.get("shift_labels")
    ignore_index = arguments.get("ignore_index", -100)
    if targets is None:
        targets = F.pad(arguments["labels"], (0, 1), value=ignore_index)[..., 1:]
    hidden = outputs.last_hidden_state
    items = arguments.get("num_items_in_batch")
    tokens = tokens_of(model.lm_head)
    loss = head_loss(
        model.lm_head,
        hidden,
        targets,
        vocabulary=VocabularyPart(tokens, columns=tokens),
        ignore_index=ignore_index,
        reduction="mean" if items is None else "sum",
    )
    loss = loss if items is None else loss / items
    also = {name: outputs[name] for name in ("past_key_values", "hidden_states", "attentions") if name in outputs}
    if not hasattr(outputs, "router_logits"):
        return CausalLMOutputWithPast(loss=loss, logits=None, **also)
    return _with_routers(model, loss, outputs.router_logits, arguments.get("attention_mask"), also)


def _with_routers(
    model: nn.Module,
    loss: torch.Tensor,
    router_logits: tuple[torch.Tensor, ...] | None,
    attention_mask: torch.Tensor | None,
    also: dict[str, Any],
) -> MoeCausalLMOutputWithPast:
    """The output of a mixture of experts, whose loss has that of its routers where their logits were asked for."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    of_routers = None
    if router_logits is not None:
        of_routers = load_balancing_loss_func(
            router_logits, model.num_experts, model.num_experts_per_tok, attention_mask
        )
        loss = loss + model.router_aux_loss_coef * of_routers.to(loss.device)
    return MoeCausalLMOutputWithPast(loss=loss, aux_loss=of_routers, logits=None, router_logits=router_logits, **also)


def head_loss(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, **how: Any) -> torch.Tensor:
    """The loss through a head, in FP8 where the head is an FP8 layer for which that pays.

    Args:
        head: of a class that `why_not_bypassed` was asked for.
        hidden: [..., K].
        targets: int64 [...].
        how: ignore_index, reduction and vocabulary of `linear_cross_entropy`.
    """
    compute = partial(_whole_head_loss, head, hidden, targets, **how)
    return head.while_whole(compute) if isinstance(head, HeldHead) else compute()


def _whole_head_loss(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, **how: Any) -> torch.Tensor:
    fp8 = {}
    if isinstance(head, FP8Layer) and hidden.numel():
        config, tokens = head.fp8_config, hidden.numel() // hidden.shape[-1]
        in_fp8 = computes_in_fp8(config, tokens, *head.product_features, hidden.device)
        head.in_fp8[tokens] = in_fp8
        if in_fp8:
            fp8["config"] = config
            if reusable(hidden, head.weight):
                fp8["quantized_weight"] = _with_transpose(head)
    return linear_cross_entropy(
        deliver_amax(hidden.flatten(0, -2), delivered_amax(hidden)),
        head.weight,
        targets.flatten().to(hidden.device),
        bias=head.bias,
        **how,
        **fp8,
    )


def _with_transpose(head: FP8Layer) -> QuantizedMatrix:
    """The head's FP8 weight in both layouts, wherever it keeps them."""
    weight, config = head.weight, head.fp8_config
    quantized = head.fp8_weight.forward([weight], config, transpose=True)
    backward_weight = head.fp8_weight.backward([weight], config)
    if quantized.transpose.numel():
        return quantized
    if backward_weight is None:
        return quantized._replace(transpose=transposed(quantized.data))
    transpose, inverse_scale = backward_weight()
    return QuantizedMatrix(quantized.data, transpose, quantized.inverse_scale, inverse_scale)
