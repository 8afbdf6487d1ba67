"""Tokens that a router has shared out among experts, and what each expert's linear layer makes of them in FP32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8booster.nn.experts.host_copy import HostCopy
from fp8booster.nn.experts.routing import Routed
from fp8booster.nn.experts.row_layout import RowLayout


@dataclass(frozen=True)
class ExpertLayer:
    """The first linear layer of a block's experts."""

    label: str
    experts: int
    inputs: int
    outputs: int

    @property
    def shape(self) -> str:
        """For tables."""
        return f"{self.experts} x {self.inputs} -> {self.outputs}"


LAYERS = {
    "mixtral": ExpertLayer("Mixtral-8x7B", 8, 4096, 14336),
    "deepseek": ExpertLayer("DeepSeek-style", 64, 2048, 1408),
    "tiny": ExpertLayer("tiny", 4, 64, 96),
}
"""Mixtral: Jiang et al., arXiv 2401.04088, table 1. 64 experts of 1408 over 2048 features are those of DeepSeekMoE-16B:
Dai et al., arXiv 2401.06066. "tiny" is for tests."""

SPREAD = 0.5
"""Standard deviation of the logarithm of the experts' shares."""


def uneven_loads(tokens: int, experts: int) -> list[int]:
    """Tokens of each expert, the same at every call: shares are log-normal, tokens drawn by them."""
    generator = torch.Generator().manual_seed(experts)
    shares = (SPREAD * torch.randn(experts, generator=generator)).softmax(0)
    chosen = shares.multinomial(tokens, replacement=True, generator=generator)
    return chosen.bincount(minlength=experts).tolist()


class ByExpert(Routed):
    """Tokens, [T, K], that are sorted by expert, with one expert each and weights of one, as the host knows."""

    def __init__(self, x: torch.Tensor, loads: Sequence[int]) -> None:
        numbers = torch.tensor(loads, device=x.device)
        chosen = torch.arange(len(loads), device=x.device).repeat_interleave(numbers, output_size=len(x)).unsqueeze(1)
        super().__init__(x, chosen, x.new_ones(chosen.shape))
        self._counts = HostCopy(torch.tensor([loads]))

    def counts(self, experts: int) -> HostCopy:
        """Return what `Routed` does, which the host knows."""
        return self._counts


class Products(NamedTuple):
    """The three products of all experts."""

    y: torch.Tensor
    """[T, N]"""
    dx: torch.Tensor
    """[T, K]"""
    dw: torch.Tensor
    """[E, N, K]"""


@dataclass(frozen=True)
class Work:
    """T tokens, sorted by expert, for E experts of K input and N output features."""

    layer: ExpertLayer
    loads: tuple[int, ...]
    """Tokens of each expert."""
    x: torch.Tensor
    """[T, K] BF16."""
    dy: torch.Tensor
    """[T, N] BF16."""
    weight: torch.Tensor
    """[E, N, K] BF16."""

    @classmethod
    def random(cls, layer: ExpertLayer, tokens: int, device: torch.device) -> Work:
        """Normally distributed, with `uneven_loads`."""
        how = {"device": device, "dtype": torch.bfloat16}
        return cls(
            layer,
            tuple(uneven_loads(tokens, layer.experts)),
            torch.randn(tokens, layer.inputs, **how),
            torch.randn(tokens, layer.outputs, **how),
            torch.randn(layer.experts, layer.outputs, layer.inputs, **how).mul_(layer.inputs**-0.5),
        )

    @property
    def tokens(self) -> int:
        return len(self.x)

    @property
    def flops(self) -> int:
        """Floating-point operations of one of the three products, without padding."""
        return 2 * self.tokens * self.layer.inputs * self.layer.outputs

    def routed(self, x: torch.Tensor) -> Routed:
        """Return the tokens with their experts, of which each has one."""
        return ByExpert(x, self.loads)

    def ends(self) -> torch.Tensor:
        """int32 [E]: where each expert's tokens end."""
        return torch.tensor(self.loads, device=self.x.device).cumsum(0).to(torch.int32)

    def layout(self) -> RowLayout:
        """Where grouped FP8 products have the tokens."""
        return self.routed(self.x).layout(self.layer.experts)

    def reference(self) -> Products:
        """In FP32, expert by expert."""
        parts = []
        for x, dy, w in zip(self.x.split(self.loads), self.dy.split(self.loads), self.weight, strict=True):
            x, dy, w = x.float(), dy.float(), w.float()
            parts.append((x @ w.t(), dy @ w, dy.t() @ x))
        y, dx, dw = zip(*parts, strict=True)
        return Products(torch.cat(y), torch.cat(dx), torch.stack(dw))


def relative_errors(found: Products, exact: Products) -> dict[str, float]:
    """For each product the largest difference over the largest magnitude; infinite where something is not finite."""
    errors = {}
    for name, values, right in zip(Products._fields, found, exact, strict=True):
        if values.shape != right.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, not {tuple(right.shape)}")
        error = ((values.float() - right).abs().amax() / right.abs().amax()).item()
        errors[name] = error if error == error else float("inf")
    return errors
