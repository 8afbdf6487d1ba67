"""The loss of language models that shardformer has sharded, over chunks of logits which are never whole.

Shardformer's forwards all end alike: body, `logits = self.lm_head(hidden_states)`, and
`dist_cross_entropy(labels, logits, ...)` (shardformer/layer/loss.py:145), which picks the tokens of this rank and adds
up their losses. So they run as they are. While one runs, its head hands the hidden states on, and `dist_cross_entropy`,
where it is given these, has their loss by `nn.fused.linear_cross_entropy`. A head whose vocabulary is spread over the
ranks of tensor parallelism computes it from each rank's part of the logits (`nn.fused.loss`).

Against Colossal-AI's: logits are in FP32 wherever a loss reads them, where without tensor parallelism Colossal-AI may
leave them in 16 bits; and nothing of the size of all logits is in memory.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossalai.shardformer.layer import Linear1D_Col, PaddingLMHead, VocabParallelLMHead1D
from colossalai.shardformer.layer._operation import reduce_backward, reduce_forward
from colossalai.shardformer.layer.utils import is_share_sp_tp
from colossalai.shardformer.shard import ShardConfig
from torch import nn

from fp8booster.colossal.tensor.layers import FP8Linear1DCol, FP8PaddingLMHead, FP8VocabParallelLMHead1D
from fp8booster.nn.fused.causal_lm_loss import (
    FusedLoss,
    head_loss,
    language_model_in,
    mark_fused,
    offer_loss,
    use_fused_loss,
    wants_loss,
    why_not_bypassed,
)
from fp8booster.nn.fused.loss import VocabularyPart
from fp8booster.nn.linear.layer import FP8Linear
from fp8booster.nn.weights.delivered import deliver_amax, delivered_amax

_FORWARDS = (
    "LlamaPipelineForwards.llama_for_causal_lm_forward",
    "MistralForwards.mistral_for_causal_lm_forward",
    "Qwen2PipelineForwards.qwen2_for_causal_lm_forward",
    "get_lm_forward_with_dist_cross_entropy.<locals>.forward",
)
"""Names of shardformer/modeling/llama.py:266, mistral.py:187 and :557, qwen2.py:270 and :769."""

_SPREAD = (Linear1D_Col, FP8Linear1DCol, VocabParallelLMHead1D, FP8VocabParallelLMHead1D)
"""Heads whose vocabulary is spread over ranks."""

_WHOLE = (nn.Linear, FP8Linear, PaddingLMHead, FP8PaddingLMHead)

_IGNORED = -100
"""The target of tokens that do not count, in shardformer/layer/loss.py:13."""


def use_sharded_loss(model: nn.Module, config: ShardConfig) -> None:
    """Let a LLaMA, Mistral or Qwen2 whose forward shardformer replaced compute its loss over chunks of logits.

    In training with labels its output has `loss` and no `logits`, as with `nn.fused.use_fused_loss`, and the forward of
    shardformer runs as it is in evaluation mode, without labels and for `return_dict=False`. Other models are left
    alone. `nn.fused.use_native_loss` undoes it, `why_not_fused` says why a model's loss stays as it was.

    Args:
        model: this rank's part of it.
        config: by which it was sharded.
    """
    language_model = language_model_in(model)
    native = None if language_model is None else language_model.__dict__.get("forward")
    if type(native) is not types.MethodType or not _is_known(_written(native)):
        return
    forward = types.MethodType(_forward_with(native.__func__, config), language_model)
    offer_loss(language_model, FusedLoss(native, forward, lambda model: _why_not(model, config)))
    use_fused_loss(language_model)


def _is_known(forward: Callable) -> bool:
    # command.py:573 has the name of Qwen2's and scales its logits
    return forward.__qualname__ in _FORWARDS and not forward.__module__.endswith(".command")


def _written(forward: Callable) -> Callable:
    """Return the function behind bound methods, partial functions and what wraps it."""
    while True:
        inner = getattr(forward, "__func__", None) or getattr(forward, "func", None)
        inner = inner or getattr(forward, "__wrapped__", None)
        if inner is None:
            return forward
        forward = inner


def _why_not(model: nn.Module, config: ShardConfig) -> str | None:
    """Return why a model's loss is not computed over chunks, as it is now; None where it is."""
    head = model.lm_head
    if getattr(head, "weight", None) is None:  # another stage of the pipeline has it
        return None
    spread = config.enable_tensor_parallelism
    if getattr(head, "gather_output", False) or (spread and not config.parallel_output):
        return "parallel_output=False gathers its logits"
    if getattr(head, "skip_bias_add", False):
        return "its lm_head has skip_bias_add"
    if getattr(head, "use_zbv", False):
        return "the zero-bubble schedule computes the weight gradient of its lm_head in a pass of its own"
    if is_share_sp_tp(getattr(head, "seq_parallel_mode", None)):
        return "its lm_head reads a sequence that is spread over ranks"
    return why_not_bypassed(head, _SPREAD if spread else _WHOLE)


def _forward_with(native: Callable, config: ShardConfig) -> Callable:
    """Return a forward that computes the loss over chunks where it trains, around Colossal-AI's."""
    signature = inspect.signature(native)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        arguments = {**bound.arguments, **bound.kwargs}
        # asked at each forward: hooks and adapters may have come to the head since
        if not wants_loss(self, arguments) or arguments["labels"].dim() != 2 or _why_not(self, config) is not None:
            return native(self, *args, **kwargs)
        with _lazy_logits(self.lm_head, config):
            outputs = native(self, *args, **kwargs)
        lazy = {name for name, value in outputs.items() if isinstance(value, _LazyLogits)}
        if not lazy:  # not the last stage of a pipeline
            return outputs
        return type(outputs)(**{name: value for name, value in outputs.items() if name not in lazy})

    # what looks at signatures, as transformers' Trainer does, sees what the model takes
    forward.__signature__ = signature
    return mark_fused(forward, native)


class _LazyLogits:
    """Hidden states that shardformer's forwards take for logits, which the loss makes of them.

    `compat/layers.py` has `dist_cross_entropy` call `loss_of`.
    """

    def __init__(self, head: nn.Module, hidden: torch.Tensor, config: ShardConfig) -> None:
        self.head, self.hidden, self.config = head, hidden, config

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def float(self) -> _LazyLogits:
        """Return these, which the loss reads in FP32."""
        return self

    def loss_of(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over all tokens that count, float32 [], as `dist_cross_entropy`.

        Args:
            labels: [batch, tokens], of all tokens, or under ring attention of this rank's, shifted.
        """
        config = self.config
        group, ranks = config.sequence_parallel_process_group, config.sequence_parallel_size
        mode = config.sequence_parallelism_mode
        length = self.hidden.shape[1]
        # a ring splits and shifts labels with the tokens, since its parts are not contiguous; others leave that to us
        if mode == "ring_attn" and labels.shape[1] == length:
            targets, spread = labels, True
        else:
            # shifted while they are whole: the target of a part's last token is in the next rank's part
            targets = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
            spread = ranks > 1 and not is_share_sp_tp(mode) and targets.shape[1] // ranks == length
            if spread:
                targets = targets.split(length, dim=1)[dist.get_rank(group)]
        # a sum, and not a mean: ranks hold different numbers of tokens that count
        count = (targets != _IGNORED).sum()
        loss = self._sum(targets)
        if spread:
            # gradients are averaged over the ranks of sequence parallelism later, as in Colossal-AI
            # both numbers in one reduction: of so few bytes its latency is what counts
            loss, count = reduce_forward(torch.stack((loss, count.float())), group, grad_scale=ranks)
            count = count.detach()
        return loss / count

    def _sum(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of targets, of the tokens of these logits."""
        head, hidden = self.head, self.hidden
        rows = head.weight.shape[0]
        tokens = getattr(head, "old_num_embeddings", head.out_features)
        if not isinstance(head, Linear1D_Col):
            part = VocabularyPart(tokens, columns=tokens)
        else:
            group = head.process_group
            first = dist.get_rank(group) * rows
            part = VocabularyPart(tokens, min(max(tokens - first, 0), rows), first, group)
            # autograd's function returns another tensor object, which would lose the amax that the norm found
            amax = delivered_amax(hidden)
            # each rank's gradient of the hidden states is that of its part of the vocabulary
            hidden = deliver_amax(reduce_backward(hidden, group, head.fp8_communication), amax)
        return head_loss(head, hidden, targets, ignore_index=_IGNORED, reduction="sum", vocabulary=part)


@contextmanager
def _lazy_logits(head: nn.Module, config: ShardConfig) -> Iterator[None]:
    """Let a head hand its hidden states on to the loss, for the length of one forward."""
    # on the instance, so that its hooks run
    head.forward = lambda hidden: _LazyLogits(head, hidden, config)
    try:
        yield
    finally:
        del head.forward
