"""The loss of transformers' causal language models over chunks of logits, in place of their native forward.

The forward of a model runs as transformers wrote it, and finds in the place of its head one whose logits are lazy:

    logits = head(hidden)                  a `LazyLogits`
    logits = tanh(logits / c) * c          still one: it may be scaled and capped
    loss = cross_entropy(logits.float().view(-1, V), targets)     `nn.fused.linear_cross_entropy` of the hidden states

Whatever else is done to them is done to the logits, which are made then. So one mechanism serves the models of
`MODELS`, whatever versions of transformers call their parts, and those that add a loss of routers.

The loss reads the head's weight, in FP8 where the head is an FP8 layer. The head's forward does not run for it, and so
neither do its hooks: `why_not_bypassed` tells where that is not right.
"""

from __future__ import annotations

import builtins
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fp8booster import formats
from fp8booster.config import VOCABULARY_HEADS
from fp8booster.kernels.transpose import transposed
from fp8booster.nn.fused.families import FAMILIES, MODELS
from fp8booster.nn.fused.lazy import LazyTensor
from fp8booster.nn.fused.loss import VocabularyPart, linear_cross_entropy
from fp8booster.nn.linear.layer import FP8Layer, FP8Linear, held_weight
from fp8booster.nn.linear.speed_model import computes_in_fp8
from fp8booster.nn.modules import has_hooks, run_with, unmixed
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import as_rows, deliver_amax, delivered_amax
from fp8booster.nn.weights.freshness import reusable
from fp8booster.tensor import QuantizedMatrix

if TYPE_CHECKING:  # seconds to import, and there where there is a model
    from transformers.modeling_outputs import ModelOutput


HEADS: set[type[nn.Module]] = {nn.Linear, FP8Linear}
"""Classes of heads whose logits, up to padding at their end, are those of nn.Linear; engines add theirs."""


class HeldHead(nn.Module):
    """Mixin of a head whose parameters an engine keeps apart from it: they are whole within `while_whole`."""

    def while_whole(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute` makes of the head's parameters, differentiable."""
        return compute()


def vocabulary_size(head: nn.Linear) -> int:
    """Return how many tokens a head makes logits of; padding, of which Colossal-AI's heads know, is none."""
    return getattr(head, "old_num_embeddings", held_weight(head).shape[0])


def why_not_bypassed(head: nn.Module, classes: Collection[type[nn.Module]]) -> str | None:
    """Return why the weight of an lm_head cannot be read past its forward, or None if it can.

    Args:
        head: as it is now.
        classes: those of heads whose product is that of nn.Linear.
    """
    held = isinstance(head, HeldHead)
    if type(head) not in classes and unmixed(type(head)) not in classes:
        return f"its lm_head is a {type(head).__name__}, whose product may be another than that of nn.Linear"
    if not held and type(head._parameters.get("weight")) not in (nn.Parameter, FakeTensor):
        kind = type(held_weight(head)).__name__
        return f"the weight of its lm_head is a {kind}: sharded, or gathered when an operator of torch reads it"
    if has_hooks(head):
        return "its lm_head has hooks, which would not run"
    if (dtype := held_weight(head).dtype) not in formats.HIGH_PRECISION:
        return f"the weight of its lm_head is {dtype}"
    if not held and isinstance(head, FP8Layer) and head.fp8_weight.is_transient:
        return "the weight of its lm_head is whole only while the layer runs"
    if "forward" in head.__dict__:
        return "the forward of its lm_head was replaced"
    return None


def head_loss(head: nn.Linear, hidden: Tensor, targets: Tensor, **how: Any) -> Tensor:
    """Compute the loss through a head, in FP8 where the head is an FP8 layer for which that pays.

    Args:
        head: of a class that `why_not_bypassed` was asked for.
        hidden: [..., K].
        targets: int64 [...].
        how: ignore_index, reduction and vocabulary of `linear_cross_entropy`.
    """
    # gradients are made in forward, so the weight need be whole for forward alone
    compute = functools.partial(_whole_head_loss, head, hidden, targets, **how)
    return head.while_whole(compute) if isinstance(head, HeldHead) else compute()


def _whole_head_loss(head: nn.Linear, hidden: Tensor, targets: Tensor, **how: Any) -> Tensor:
    fp8: dict[str, Any] = {}
    if isinstance(head, FP8Layer) and hidden.numel():
        config, tokens = head.fp8_config, hidden.numel() // hidden.shape[-1]
        always = head.fp8_weight.always
        in_fp8 = always or computes_in_fp8(config, tokens, *head.product_features, hidden.device)
        head.in_fp8[tokens] = in_fp8
        if in_fp8:
            casts = head.fp8_casts if head.training else head.fp8_casts.evaluation
            fp8["casts"] = casts
            # where no copy stays fresh, the loss casts the weight itself
            if reusable(hidden, held_weight(head)):
                fp8["quantized_weight"] = _with_transpose(head, casts)
    return linear_cross_entropy(
        as_rows(hidden), held_weight(head), targets.flatten().to(hidden.device), bias=head.bias, **how, **fp8
    )


def _with_transpose(head: FP8Layer, casts: Casts) -> QuantizedMatrix:
    """Return the head's FP8 weight in both layouts, wherever it keeps them."""
    weight = head.held_weight
    quantized = head.fp8_weight.forward([weight], casts, transpose=True)
    backward_weight = head.fp8_weight.backward([weight], casts)
    if quantized.transpose.numel():
        return quantized
    if backward_weight is None:
        return quantized._replace(transpose=transposed(quantized.data))
    transpose, inverse_scale = backward_weight()
    return QuantizedMatrix(quantized.data, transpose, quantized.inverse_scale, inverse_scale)


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
            # `float` was called, or will be: it gave this object back
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
            # outer * tanh(scale * x) is cap * tanh(scale * cap * x / cap), the words of the loss
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
    is None. The native forward runs, logits and all, in evaluation mode, without labels, when `logits_to_keep` asks for
    some of them (the sequence's length asks for all), for `return_dict=False`, with a loss function of one's own, and
    wherever `why_not_fused` finds a reason. `use_native_loss` undoes it. Copies and pickles keep it. Where an engine
    has replaced the forward, the one that it offered takes its place; what a library has wrapped around ours stays.

    Args:
        model: any module.

    Returns:
        Whether the loss will be computed so; if not, the model is as it was and `why_not_fused` says why.
    """
    found = _fusable(model)
    if isinstance(found, str):
        return False
    language_model, loss = found
    vars(language_model).pop(_SWITCHED_OFF, None)
    if not _wraps_ours(language_model):
        language_model.forward = loss.forward
    return True


def use_native_loss(model: nn.Module) -> None:
    """Undo `use_fused_loss`."""
    for module in model.modules():
        if _wraps_ours(module):  # as accelerate's autocast does, which would go with it
            vars(module)[_SWITCHED_OFF] = True
            continue
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
    if _SWITCHED_OFF in vars(language_model):
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

_SWITCHED_OFF = "_fp8booster_loss_switched_off"
"""Attribute of a model whose forward is around ours, and computes the native loss."""


class _BoundForward:
    """Our forward, bound to a model: a method, but that a pickle of it is not the forward of the model's class.

    Args:
        model: whose class's forward it takes the place of.
    """

    def __init__(self, model: nn.Module) -> None:
        # libraries that wrap a model's forward look for both
        self.__self__, self.__func__ = model, _forward_like(type(model).forward)
        self.__name__, self.__doc__ = self.__func__.__name__, self.__func__.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> ModelOutput | tuple:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "__func__"), name)

    def __reduce__(self) -> tuple:
        return _BoundForward, (self.__self__,)

    @property
    def __signature__(self) -> inspect.Signature:
        of_class = inspect.signature(self.__func__)
        return of_class.replace(parameters=list(of_class.parameters.values())[1:])


def _available_loss(model: nn.Module) -> FusedLoss | None:
    """Return what an engine offered for the forward that the model has now, or ours for that of its class."""
    forward, offered = model.__dict__.get("forward"), model.__dict__.get(_ENGINE_LOSS)
    if offered is not None and forward in (offered.native, offered.forward):
        return offered
    if forward is None or _is_ours(forward) or getattr(forward, "__func__", None) is type(model).forward:
        return FusedLoss(None, _BoundForward(model), _why_not_through)
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


def _is_ours(forward: Any) -> bool:
    """Tell whether a forward is ours, or one that a library has made around ours."""
    while forward is not None and not hasattr(forward, _NATIVE):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def _wraps_ours(model: nn.Module) -> bool:
    """Tell whether the forward of a model is one that a library has made around ours."""
    forward, offered = model.__dict__.get("forward"), model.__dict__.get(_ENGINE_LOSS)
    if not _is_ours(forward) or isinstance(forward, _BoundForward):
        return False
    return offered is None or forward != offered.forward


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

        is_usual = self.loss_function is ForCausalLMLoss and _SWITCHED_OFF not in vars(self)
        if not (is_usual and wants_loss(self, arguments) and _why_not_through(self) is None):
            return native(self, *args, **kwargs)
        name = _head_name(self)
        # for this call alone: a head that is put into the model would be saved with it, and seen by other threads
        outputs = run_with(native, self, {name: LazyHead(getattr(self, name))}, *args, **kwargs)
        return type(outputs)(**{**outputs, "logits": None})

    # accelerate takes off all that is wrapped when it takes off its own
    del vars(forward)["__wrapped__"]
    vars(forward)["__signature__"] = signature
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
