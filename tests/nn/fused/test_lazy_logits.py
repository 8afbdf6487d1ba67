"""Lazy logits compute what logits do, whatever is done to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8booster.kernels.scales import amax_of
from fp8booster.nn.fused import causal_lm_loss
from fp8booster.nn.fused.causal_lm_loss import LazyLogits
from fp8booster.nn.weights.delivered import deliver_amax, delivered_amax

ROWS, TOKENS, FEATURES, VOCABULARY = 2, 5, 16, 12

Use = Callable[[Any, torch.Tensor], torch.Tensor]
"""Makes a loss of logits, [ROWS, TOKENS, VOCABULARY], and targets, [ROWS, TOKENS]."""


def flat(logits: Any) -> Any:
    return logits.float().view(-1, VOCABULARY)


def loss_with(change: Callable[[Any], Any] = lambda logits: logits, **options: Any) -> Use:
    return lambda logits, targets: F.cross_entropy(flat(change(logits)), targets.flatten(), **options)


IN_CHUNKS: dict[str, Use] = {
    "mean": loss_with(),
    "sum": loss_with(reduction="sum"),
    "another ignored target": lambda logits, targets: F.cross_entropy(
        flat(logits), targets.flatten().clamp(min=0), ignore_index=3
    ),
    "as a matrix before it is in FP32": lambda logits, targets: F.cross_entropy(
        logits.view(-1, VOCABULARY).float().contiguous(), targets.view(-1)
    ),
    "scaled": loss_with(lambda logits: logits * 0.3),
    "scaled from the left": loss_with(lambda logits: 0.3 * logits),
    "scaled by an integer": loss_with(lambda logits: logits * 3),
    "divided": loss_with(lambda logits: logits / 3.0),
    "scaled twice": loss_with(lambda logits: logits * 2 / 5.0),
    "capped": loss_with(lambda logits: torch.tanh(logits / 2.0) * 2.0),
    "scaled and capped": loss_with(lambda logits: torch.tanh(logits * 0.7) * 3.0),
    "capped and divided": loss_with(lambda logits: torch.tanh(logits) * 3.0 / 2),
}
"""What is computed from hidden states, chunk by chunk."""

MADE: dict[str, Use] = {
    "smoothed": loss_with(label_smoothing=0.2),
    "weighted": loss_with(weight=torch.linspace(0.5, 2.0, VOCABULARY)),
    "not reduced": lambda logits, targets: (
        F.cross_entropy(flat(logits), targets.flatten(), reduction="none").square().sum()
    ),
    "not averaged": loss_with(size_average=False),
    "not reduced, as of old": lambda logits, targets: (
        F.cross_entropy(flat(logits), targets.flatten(), reduce=False).square().sum()
    ),
    "of distributions": lambda logits, targets: F.cross_entropy(
        flat(logits), F.one_hot(targets.flatten().clamp(min=0), VOCABULARY).float()
    ),
    "of a tensor with tokens last": lambda logits, targets: F.cross_entropy(logits.transpose(1, 2), targets),
    "scaled by a number below zero": loss_with(lambda logits: logits * -0.3),
    "scaled by zero": loss_with(lambda logits: logits * 0),
    "divided by a number below zero": loss_with(lambda logits: logits / -2.0),
    "scaled by a tensor": loss_with(lambda logits: logits * torch.linspace(0.5, 2.0, VOCABULARY)),
    "divided by a tensor": loss_with(lambda logits: logits / torch.linspace(0.5, 2.0, VOCABULARY)),
    "shifted by a number": loss_with(lambda logits: logits - 0.5),
    "cut by a slice": lambda logits, targets: F.cross_entropy(
        flat(logits[:, :-1].contiguous()), targets[:, 1:].flatten()
    ),
    "negated": loss_with(lambda logits: -logits),
    "shifted": loss_with(lambda logits: logits + torch.linspace(-1.0, 1.0, VOCABULARY)),
    "capped twice": loss_with(lambda logits: torch.tanh(torch.tanh(logits * 2) * 3) * 0.5),
    "capped below zero": loss_with(lambda logits: torch.tanh(logits) * -3.0),
    "cut": lambda logits, targets: F.cross_entropy(
        flat(logits.narrow(1, 0, TOKENS - 1).contiguous()), targets[:, 1:].flatten()
    ),
    "viewed otherwise": lambda logits, targets: logits.view(ROWS * TOKENS * VOCABULARY // 6, 6).square().sum(),
    "another function": lambda logits, targets: F.log_softmax(logits, -1)[..., 0].sum(),
    "another loss": lambda logits, targets: F.nll_loss(flat(logits).log_softmax(-1), targets.flatten()),
}
"""What is computed from logits."""


def outcome(logits_of: Callable, use: Use, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss, and the gradients of hidden states, weight and bias."""
    torch.manual_seed(0)
    head = nn.Linear(FEATURES, VOCABULARY, dtype=dtype)
    hidden = torch.randn(ROWS, TOKENS, FEATURES, dtype=torch.float32).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (ROWS, TOKENS))
    targets[0, 1], targets[1, 3] = -100, 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arguments that torch has new names for
        loss = use(logits_of(head, hidden), targets)
    return loss.detach(), list(torch.autograd.grad(3 * loss, [hidden, head.weight, head.bias]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*IN_CHUNKS, *MADE])
def test_a_loss_of_lazy_logits_is_that_of_logits(name, dtype, monkeypatch) -> None:
    calls: list[int] = []
    right_loss = causal_lm_loss.head_loss
    monkeypatch.setattr(causal_lm_loss, "head_loss", lambda *args, **how: calls.append(1) or right_loss(*args, **how))
    use = IN_CHUNKS.get(name) or MADE[name]
    right, expected = outcome(lambda head, hidden: head(hidden).float(), use, dtype)
    loss, found = outcome(LazyLogits, use, dtype)
    assert len(calls) == (name in IN_CHUNKS)
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.03}
    assert loss.dtype is right.dtype
    torch.testing.assert_close(loss, right, **near)
    for gradient, other in zip(found, expected, strict=True):
        assert gradient.dtype is dtype
        torch.testing.assert_close(gradient, other, **near)


def test_what_torch_refuses_of_logits_it_refuses_of_lazy_ones() -> None:
    lazy = LazyLogits(nn.Linear(FEATURES, VOCABULARY), torch.randn(ROWS, TOKENS, FEATURES))
    for logits, targets in ((lazy, torch.zeros(ROWS)), (flat(lazy), torch.zeros(ROWS * TOKENS - 1))):
        with pytest.raises((ValueError, RuntimeError)):
            F.cross_entropy(logits, targets.long())


def test_logits_that_were_made_are_not_those_of_what_is_made_of_them_later() -> None:
    head, hidden = nn.Linear(FEATURES, VOCABULARY), torch.randn(ROWS, TOKENS, FEATURES)
    lazy, right = LazyLogits(head, hidden), head(hidden)
    torch.testing.assert_close(lazy.made(), right)
    assert lazy.made() is lazy.made()
    torch.testing.assert_close((lazy * 2).made(), right * 2)
    torch.testing.assert_close((torch.tanh(lazy) * 2).made(), right.tanh() * 2)
    torch.testing.assert_close(lazy.view(-1, VOCABULARY).made(), right.view(-1, VOCABULARY))
    torch.testing.assert_close(lazy.made(), right)


def test_they_tell_their_shape_and_are_made_in_fp32() -> None:
    head, hidden = nn.Linear(FEATURES, VOCABULARY, dtype=torch.bfloat16), torch.randn(ROWS, TOKENS, FEATURES).bfloat16()
    lazy = LazyLogits(head, hidden)
    assert lazy.shape == (ROWS, TOKENS, VOCABULARY)
    assert lazy.view(-1, VOCABULARY).shape == (ROWS * TOKENS, VOCABULARY)
    assert lazy.device == hidden.device
    assert lazy.made().dtype is torch.float32
    assert torch.equal(lazy.argmax(-1), head(hidden).argmax(-1))
    lazy = LazyLogits(head, hidden)
    head.old_num_embeddings = 10  # Colossal-AI's name for how many of its rows are tokens
    assert LazyLogits(head, hidden).shape == (ROWS, TOKENS, 10)


def test_every_operator_is_that_of_the_logits() -> None:
    """Also those that Python looks up in a class alone."""
    head, hidden = nn.Linear(FEATURES, VOCABULARY), torch.randn(ROWS, TOKENS, FEATURES)
    lazy, right = LazyLogits(head, hidden), head(hidden)
    for use in OPERATORS:
        torch.testing.assert_close(use(lazy), use(right))
    assert len(lazy) == ROWS
    assert len({lazy, lazy}) == 1
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(lazy)


OPERATORS: list[Callable[[Any], Any]] = [
    lambda x: x[1, :3],
    lambda x: torch.stack(list(x)),
    lambda x: -x,
    lambda x: abs(x),
    lambda x: x + 1,
    lambda x: 1 - x,
    lambda x: x - x,
    lambda x: x**2,
    lambda x: 2**x,
    lambda x: 1 / x,
    lambda x: x @ torch.ones(x.shape[-1], 2),
    lambda x: x == 0,
    lambda x: x != 0,
    lambda x: x > 0,
    lambda x: x <= 0,
    lambda x: torch.ones(x.shape[-1]) - x,
    lambda x: torch.ones(x.shape[-1]) < x,
]
"""Of a tensor, or what stands for one."""


def test_an_amax_is_that_of_all_hidden_states_or_of_none() -> None:
    head, whole = nn.Linear(FEATURES, VOCABULARY), torch.randn(ROWS, TOKENS, FEATURES)
    whole[:, 0] *= 8
    amax = amax_of(whole)
    deliver_amax(whole, amax)
    assert delivered_amax(LazyLogits(head, whole)._hidden) is amax
    assert delivered_amax(LazyLogits(head, whole[:, :])._hidden) is amax
    assert delivered_amax(LazyLogits(head, whole[:, 1:])._hidden) is None
    assert delivered_amax(LazyLogits(head, whole[:, -1:])._hidden) is None
    own = deliver_amax(whole[:, :], torch.tensor(7.0))
    assert delivered_amax(LazyLogits(head, own)._hidden) == 7
