"""LLaMA 4's mixtures, whose experts get tokens times their scores, in grouped FP8 products.

    scores = sigmoid of the k largest of router(token), and 0 for other experts
    y = shared_expert(token) + sum over all experts of expert(score * token)

transformers multiplies all tokens for every expert, those with a score of 0 too, of which an expert without biases
makes zeros. Here a token goes to its own k experts alone: for one of 16, a sixteenth of the products. What the classes
compute is tried out (`nn.fused.trials`), the experts and the block around them each by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8booster.nn.experts.fp8_experts import FP8Experts
from fp8booster.nn.experts.loads import note_choice
from fp8booster.nn.experts.own_code import OWN_FORWARD
from fp8booster.nn.experts.row_layout import RowLayout
from fp8booster.nn.fused.activations import fused_kind
from fp8booster.nn.fused.trials import STAND_INS, computes, numbers, on_numbers
from fp8booster.nn.modules import cached_by_class, change_class, class_without, mixed_class, must_be_called, unmixed
from fp8booster.nn.weights.delivered import as_rows


class BatchedExperts(FP8Experts):
    """A mixin before the class of experts that are given as many rows each: [G R, H], sorted by expert."""

    is_transposed: ClassVar[bool] = True  # type: ignore[misc]
    has_bias: ClassVar[bool] = False  # type: ignore[misc]
    gate_up_proj: Tensor
    act_fn: Callable[[Tensor], Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the module, or as `on_rows` with its layouts: an engine gathers parameters around a forward alone."""
        if len(args) == 3 and isinstance(args[1], RowLayout):
            return self.on_rows(*args)
        return super().forward(*args, **kwargs)

    def _why_not_called_so(self, args: tuple, kwargs: dict[str, Any]) -> str | None:
        rows = args[0] if len(args) == 1 and not kwargs else None
        if torch.is_tensor(rows) and rows.dim() == 2 and len(rows) % len(self.gate_up_proj) == 0:
            return None
        return "called otherwise than with rows for each expert"

    def _why_own_code(self) -> str | None:
        original = unmixed(type(self))
        return None if _is_batched(original, original.forward) else OWN_FORWARD

    def _rows_of(self, args: tuple) -> int:
        return len(args[0])

    def _in_grouped_products(self, *args: Tensor) -> Tensor:
        (rows,) = args
        experts = len(self.gate_up_proj)
        chosen = torch.arange(experts, dtype=torch.int64, device=rows.device).repeat_interleave(len(rows) // experts)
        layout = RowLayout.of_choices(chosen.unsqueeze(1), experts)
        return self.on_rows(rows, layout, layout).to(rows.dtype)

    @property
    def _fused_kind(self) -> str | None:
        return fused_kind(self.act_fn) if self.fp8_config.fused else None

    @property
    def _own_activation(self) -> Any:
        return self._gate

    def _gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return up * self.act_fn(gate)


class ScaledMixture(nn.Module):
    """Mixin of the block around such experts."""

    tried: ClassVar[tuple[type[Any], Callable]]  # the class that the block was, and what it computed then
    returns_scores: ClassVar[bool]
    router: Callable[[Tensor], Any]
    shared_expert: Callable[[Tensor], Tensor]
    top_k: int

    @classmethod
    def members_before(cls, original: type[nn.Module]) -> dict[str, Any]:
        """As `mixed_class` asks."""
        return {"tried": (original, original.forward), "returns_scores": _form(original, original.forward)}

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return [B S, H] of [B, S, H]; and the router's logits, [B S, experts], or its scores, [experts, B S]."""
        original, forward = self.tried
        given = (*args, *kwargs.values()) if kwargs.keys() <= {"hidden_states"} else ()
        if len(given) != 1 or original.forward is not forward or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        experts: Any = self.experts
        tokens = as_rows(given[0])
        # who looks at the experts sees them called
        if not isinstance(experts, BatchedExperts) or must_be_called(experts):
            return super().forward(*args, **kwargs)
        if not experts.runs_on(tokens, len(tokens) * self.top_k):
            return super().forward(*args, **kwargs)
        found = self.router(tokens)
        if isinstance(found, tuple):
            scores, logits = found
            factors, chosen = scores.topk(self.top_k)
            told = logits
        else:
            likeliest, chosen = found.topk(self.top_k)
            factors = likeliest.float().sigmoid().to(tokens.dtype)
            told = factors.new_zeros(found.shape).scatter(1, chosen, factors).t()
        note_choice(experts, chosen, len(experts.gate_up_proj))
        layout = RowLayout.of_choices(chosen, len(experts.gate_up_proj))
        scaled = (tokens.unsqueeze(1) * factors.unsqueeze(2)).view(-1, tokens.shape[1])
        mixed = experts(scaled, layout.by_choice(), layout).to(tokens.dtype)
        return self.shared_expert(tokens) + mixed, told


_EXPERTS, _FEATURES = 3, 8


@cached_by_class
@on_numbers
def _is_batched(cls: type[nn.Module], forward: Callable) -> bool:
    """Tell whether a class's forward gives `down(up * act(gate))` of each expert's rows, gate first."""
    gate_up, down = numbers(_EXPERTS, _FEATURES, 12), numbers(_EXPERTS, 6, _FEATURES)
    for activation in STAND_INS:
        for size in (1.0, 0.0, 1e3):
            x = size * numbers(_EXPERTS * 5, _FEATURES)
            gate, up = (x.view(_EXPERTS, 5, _FEATURES) @ gate_up).chunk(2, -1)
            right = ((up * activation(gate)) @ down).view(-1, _FEATURES)
            held = {"gate_up_proj": gate_up, "down_proj": down, "act_fn": activation}
            held |= {"num_experts": _EXPERTS, "hidden_size": _FEATURES, "expert_dim": 6}
            if not computes(cls, forward, held, right, x):
                return False
    return True


def are_batched(module: nn.Module) -> bool:
    """Tell whether a module holds experts as LLaMA 4 does."""
    held = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if any(each is None or each.dim() != 3 for each in held) or "forward" in vars(module):
        return False
    original = unmixed(type(module))
    return _is_batched(original, original.forward)


@cached_by_class
@on_numbers
def _form(cls: type[nn.Module], forward: Callable) -> bool | None:
    """Tell whether a class of blocks returns scores in place of logits; None: it computes something else."""
    for returns_scores in (True, False):
        if all(_is_of_form(cls, forward, returns_scores, *each) for each in product((1, 2), (1.0, 1e-3, 30.0))):
            return returns_scores
    return None


def _is_of_form(cls: type[nn.Module], forward: Callable, returns_scores: bool, top_k: int, size: float) -> bool:
    weight, x = numbers(_EXPERTS, _FEATURES), size * numbers(3, 7, _FEATURES)
    tokens = x.flatten(0, 1)
    logits = tokens @ weight.t()
    likeliest, chosen = logits.topk(top_k)
    scores = torch.zeros_like(logits).scatter(1, chosen, likeliest.sigmoid())
    factors = torch.arange(1.0, _EXPERTS + 1, dtype=torch.float32, device=x.device).view(-1, 1, 1)

    def experts(rows: Tensor) -> Tensor:
        each = rows.view(_EXPERTS, -1, _FEATURES)
        return (factors * each * each.abs()).view(-1, _FEATURES)

    scaled = tokens * scores.t().unsqueeze(2)  # [experts, tokens, features]
    right = 7 * tokens + (factors * scaled * scaled.abs()).sum(0)
    held: dict[str, Any] = {"experts": experts, "num_experts": _EXPERTS, "top_k": top_k, "hidden_dim": _FEATURES}
    held["shared_expert"] = lambda x: 7 * x
    held["router"] = (lambda x: x @ weight.t()) if returns_scores else (lambda x: (scores, x @ weight.t()))
    return all(
        computes(cls, lambda self, x, n=n: forward(self, x)[n], held, each, x)
        for n, each in enumerate((right, scores.t() if returns_scores else logits))
    )


def skip_scores_of_zero(model: nn.Module, skip: bool = True) -> None:
    """Let blocks around batched FP8 experts send a token to its own experts alone, in place.

    Blocks that an earlier call changed, and whose experts are no longer so, are what they were.

    Args:
        model: converted before.
        skip: whether any block is to compute so.
    """
    for block in list(model.modules()):
        wanted = skip and isinstance(block._modules.get("experts"), BatchedExperts)
        cls: type[Any] = type(block)
        if isinstance(block, ScaledMixture):
            if not wanted:
                change_class(block, class_without(ScaledMixture, cls))
        elif wanted and "forward" not in vars(block) and _form(cls, cls.forward) is not None:
            change_class(block, mixed_class(ScaledMixture, cls))
