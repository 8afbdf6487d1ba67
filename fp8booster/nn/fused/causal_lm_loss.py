"""The loss of transformers' causal language models over chunks of logits, in place of their native forward.

The forward of a model runs as transformers wrote it, and finds in the place of its head one whose logits are lazy:

    logits = head(hidden)                  a `LazyLogits`
    logits = tanh(logits / c) * c          still one: it may be scaled and capped
    loss = cross_entropy(logits.float().view(-1, V), targets)     `nn.fused.linear_cross_entropy` of the hidden states

Whatever else is done to them is done to the logits, which are made then. So one mechanism serves the models of
`MODELS`, whatever versions of transformers call their parts, and those that add a loss of routers.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8booster.config import VOCABULARY_HEADS
from fp8booster.nn.fused.families import FAMILIES, MODELS
from fp8booster.nn.fused.head import HEADS, head_loss, vocabulary_size, why_not_bypassed
from fp8booster.nn.fused.lazy import LazyTensor
from fp8booster.nn.fused.vocabulary import VocabularyPart
from fp8booster.nn.modules import run_with
from fp8booster.nn.weights.delivered import deliver_amax, delivered_amax

if TYPE_CHECKING:  # seconds to import, and there where there is a model
    from transformers.modeling_outputs import ModelOutput


class LazyHead:
    """A head whose logits are lazy; it has all else that the head has."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> LazyLogits:
        return LazyLogits(self._head, hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


class LazyLogits(LazyTensor):
    """The logits of a head.

    Args:
        head: a linear layer, whose forward a loss bypasses.
        hidden: [..., K], what it reads.
    """

    def __init__(self, head: nn.Linear, hidden: Tensor) -> None:
        self._head, self._hidden = head, _with_amax(hidden)
        self._scale = 1.0
        self._outer: float | None = None  # these are outer * tanh(scale * what the head makes), or scale * that
        self._shape = torch.Size((*hidden.shape[:-1], vocabulary_size(head)))
        self._made: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    def float(self) -> LazyLogits:
        """Return these, which a loss reads in FP32."""
        return self

    def contiguous(self) -> LazyLogits:
        """Return these, which are made so."""
        return self

    def view(self, *shape: Any) -> Any:
        """Stay lazy as a matrix of all tokens."""
        if shape == (-1, self._shape[-1]):
            return self._changed(_shape=torch.Size((self._hidden.shape[:-1].numel(), self._shape[-1])))
        return self.made().view(*shape)

    def __mul__(self, other: Any) -> Any:
        return self._times(other) if _is_positive(other) else self.made() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._times(1 / other) if _is_positive(other) else self.made() / other

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.tanh and len(args) == 1 and not kwargs and args[0]._outer is None:
            return args[0]._changed(_outer=1.0)
        if function is F.cross_entropy and isinstance(args[0], LazyLogits):
            loss = args[0]._loss(*args[1:], **kwargs)
            if loss is not None:
                return loss
        return super().__torch_function__(function, types, args, kwargs)

    def made(self) -> Tensor:
        """Make them, as the head does."""
        if self._made is None:
            logits = self._head(self._hidden)
            logits = logits if self._scale == 1.0 else logits * self._scale
            logits = logits if self._outer is None else logits.tanh() * self._outer
            self._made = logits.float().view(self._shape)
        return self._made

    def _loss(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: builtins.float = 0.0,
    ) -> Tensor | None:
        """Compute `F.cross_entropy` from the hidden states; None: it is computed from the logits."""
        plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
        if not plain or reduction == "none" or len(self._shape) != 2 or target.shape != self._shape[:1]:
            return None
        tokens, outer = self._shape[-1], self._outer
        return head_loss(
            self._head,
            self._hidden,
            target,
            vocabulary=VocabularyPart(tokens, columns=tokens),
            ignore_index=ignore_index,
            reduction=reduction,
            scale=self._scale * (1.0 if outer is None else outer),
            cap=outer,
        )

    def _times(self, number: builtins.float) -> LazyLogits:
        if self._outer is None:
            return self._changed(_scale=self._scale * number)
        return self._changed(_outer=self._outer * number)

    def _changed(self, **fields: Any) -> LazyLogits:
        """Return a copy with other fields, and without what was made of these."""
        changed = object.__new__(LazyLogits)
        vars(changed).update(vars(self), **fields, _made=None)
        return changed


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _with_amax(hidden: Tensor) -> Tensor:
    """Give it the amax of what it is a view of, if that is as large: models take the last tokens, here all of them."""
    whole = hidden._base
    if whole is not None and whole.shape == hidden.shape and delivered_amax(hidden) is None:
        return deliver_amax(hidden, delivered_amax(whole))
    return hidden


class LanguageModel(nn.Module):
    """The attributes of the models of `MODELS`; transformers declares no types of them."""

    config: Any
    loss_function: Callable[..., Tensor]


def _head_name(model: nn.Module) -> str:
    """Return the name of the head among a model's parts."""
    return next((name for name in VOCABULARY_HEADS if name in model._modules), VOCABULARY_HEADS[0])


def use_fused_loss(model: nn.Module) -> bool:
    """Let a causal language model compute its loss over chunks of logits, which are then never whole.

    The model, or the one inside a wrapper such as PEFT's, keeps its class, parameters and hooks; its `forward` is
    replaced. In training mode, when labels are given, it returns the native output, whose `loss` is that of the native
    forward (shifted labels, `num_items_in_batch`, `shift_labels` and `ignore_index` included) and whose `logits`
    is None; no cache of keys and values is made unless the call gives `use_cache` or a cache. The native forward runs,
    logits and all, in evaluation mode, without labels, when `logits_to_keep` asks for some of them (the sequence's
    length asks for all), for `return_dict=False`, with a loss function of one's own, and wherever `why_not_fused` finds
    a reason. `use_native_loss` undoes it. A pickle comes back with the native forward: call this again. Where an engine
    has replaced the forward, the one that it offered takes its place.

    Args:
        model: any module.

    Returns:
        Whether the loss will be computed so; if not, the model is as it was and `why_not_fused` says why.
    """
    found = _fusable(model)
    if isinstance(found, str):
        return False
    language_model, loss = found
    language_model.forward = loss.forward
    return True


def use_native_loss(model: nn.Module) -> None:
    """Undo `use_fused_loss`."""
    for module in model.modules():
        loss = _available_loss(module) if _is_ours(module.__dict__.get("forward")) else None
        if loss is not None:
            del module.forward  # its class's shows again
            if loss.native is not None:
                module.forward = loss.native


def why_not_fused(model: nn.Module) -> str | None:
    """Return why a model's loss cannot be computed over chunks of logits, or None if it can."""
    found = _fusable(model)
    return found if isinstance(found, str) else None


def _fusable(model: nn.Module) -> tuple[LanguageModel, FusedLoss] | str:
    """Return the language model in a model and its loss over chunks of logits, or why there is none."""
    language_model = language_model_in(model)
    if language_model is None:
        return f"{type(model).__name__} is none of transformers' language models of {', '.join(FAMILIES.values())}"
    loss = _available_loss(language_model)
    if loss is None:
        return "its forward was replaced, as Colossal-AI does it for tensor, sequence or pipeline parallelism"
    return loss.why_not(language_model) or (language_model, loss)


def language_model_in(model: nn.Module) -> LanguageModel | None:
    """Return the module whose forward is one of those known."""
    for module in model.modules():
        for base in type(module).__mro__:
            if issubclass(base, nn.Module) and MODELS.get(base.__module__) == base.__name__:
                return cast(LanguageModel, module) if type(module).forward is base.forward else None
    return None


def fused_head(model: nn.Module) -> nn.Module | None:
    """Return the head of a model whose loss is computed over chunks of logits; an engine mixes `HeldHead` into it."""
    language_model = language_model_in(model)
    if language_model is None or not _is_ours(language_model.__dict__.get("forward")):
        return None
    return getattr(language_model, _head_name(language_model))


@dataclass(frozen=True)
class FusedLoss:
    """The loss of a model over chunks of logits."""

    native: Callable | None  # its forward without it, bound, where an engine has replaced that of its class
    forward: Callable  # the one with this loss, bound; made by `mark_fused`
    why_not: Callable[[LanguageModel], str | None]  # returns why a model's loss is not computed so, or None


def offer_loss(model: nn.Module, loss: FusedLoss) -> None:
    """Tell `use_fused_loss` of the loss of an engine, for a module that `language_model_in` gave."""
    model.__dict__[_ENGINE_LOSS] = loss


def mark_fused(forward: Callable, native: Callable) -> Callable:
    """Mark a function as a forward with a loss over chunks, in place of a native one."""
    vars(forward)[_NATIVE] = native
    return forward


_ENGINE_LOSS = "_fp8booster_engine_loss"
_NATIVE = "_fp8booster_native"


def _available_loss(model: nn.Module) -> FusedLoss | None:
    """Return what an engine offered for the forward that the model has now, or ours for that of its class."""
    forward, offered = model.__dict__.get("forward"), model.__dict__.get(_ENGINE_LOSS)
    if offered is not None and forward in (offered.native, offered.forward):
        return offered
    native = type(model).forward
    # a pickle leaves the class's own, bound, where ours was
    if forward is None or _is_ours(forward) or getattr(forward, "__func__", None) is native:
        return FusedLoss(None, types.MethodType(_forward_like(native), model), _why_not_through)
    return None


def _why_not_through(language_model: LanguageModel) -> str | None:
    """Return what stands against computing the loss from the head's weight, as it is now."""
    head = getattr(language_model, _head_name(language_model))
    reason = why_not_bypassed(head, HEADS)
    if reason is None and vocabulary_size(head) != language_model.config.vocab_size:
        return (
            f"its lm_head makes {vocabulary_size(head)} logits and its config has a vocab_size of "
            f"{language_model.config.vocab_size}"
        )
    return reason


def _is_ours(forward: object) -> bool:
    return hasattr(forward, _NATIVE)


@functools.cache
def _forward_like(native: Callable) -> Callable:
    """Return our forward, with the signature of the native one, which trainers read."""
    signature = inspect.signature(native)

    @functools.wraps(native)
    def forward(self: LanguageModel, *args: Any, **kwargs: Any) -> ModelOutput | tuple:
        of_class = type(self).forward
        if of_class is not native:  # it was replaced for all modules of the class
            return of_class(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        arguments = {**bound.arguments, **bound.kwargs}
        from transformers.loss.loss_utils import ForCausalLMLoss

        is_native = self.loss_function is ForCausalLMLoss
        if not (wants_loss(self, arguments) and is_native and _why_not_through(self) is None):
            return native(self, *args, **kwargs)
        name = _head_name(self)
        # a call that trains reads no keys and values, which `config.use_cache`, on by default, would keep of each layer
        if "use_cache" in signature.parameters and not {"use_cache", "past_key_values"} & arguments.keys():
            kwargs = {**kwargs, "use_cache": False}
        # for this call alone: a head that is put into the model would be saved with it, and seen by other threads
        outputs = run_with(native, self, {name: LazyHead(getattr(self, name))}, *args, **kwargs)
        return type(outputs)(**{**outputs, "logits": None})

    return mark_fused(forward, native)


def wants_loss(model: LanguageModel, arguments: dict[str, Any]) -> bool:
    """Tell whether a call of a model's forward trains and reads no logits, so far as its arguments, by name, tell."""
    kept = arguments.get("logits_to_keep", 0), arguments.get("num_logits_to_keep", 0)
    return (
        model.training
        and arguments.get("labels") is not None
        and all(isinstance(number, int) and number == 0 for number in kept)
        and arguments.get("return_dict") is not False
        # not `use_return_dict`, of which transformers 5 warns
        and model.config.return_dict
        and not getattr(model.config, "torchscript", False)
    )
