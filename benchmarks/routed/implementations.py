"""Implementations of the products of all experts: expert by expert, or in one grouped product, in BF16 or in FP8.

Grouped products: `torch._grouped_mm` and `torch._scaled_grouped_mm` (`kernels.grouped_product`) take rows sorted by
expert and where each expert's rows end; the FP8 one lays them out padded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from benchmarks.harness.timing import let_weights_stay
from benchmarks.routed.work import Products, Work
from fp8booster import FP8Config, convert_to_fp8
from fp8booster.nn.experts import grouped_linear
from fp8booster.nn.experts.grouped_linear import GroupedWeight, cast_experts
from fp8booster.nn.experts.one_by_one import run_experts
from fp8booster.nn.weights.casting import Casts

CONFIG = FP8Config(layers=lambda *_: True, always=True)


class Implementation(ABC):
    """One way, on one piece of work; `forward` and `step` are what is timed."""

    def __init__(self, work: Work) -> None:
        self.work, self.x, self.dy = work, work.x, work.dy

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """Those that get gradients."""

    @abstractmethod
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Differentiable: rows by expert, [T, K] to [T, N]."""

    def forward(self) -> torch.Tensor:
        """As in training: what backward needs is made and kept."""
        # a new tensor object each time, so that no layer can keep a cast of it
        return self.compute(self.x.detach().requires_grad_())

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """fprop, dgrad and wgrad."""
        for parameter in self.parameters():
            parameter.grad = None
        x = self.x.detach().requires_grad_()
        y = self.compute(x)
        y.backward(self.dy)
        return y.detach(), x.grad

    def products(self) -> Products:
        """Return the products of a step, to be compared with the reference."""
        y, dx = self.step()
        gradients = [parameter.grad for parameter in self.parameters()]
        dw = torch.stack(gradients) if len(gradients) > 1 else gradients[0].view(self.work.weight.shape)
        return Products(y, dx, dw)


class ExpertByExpert(Implementation):
    """`nn.experts.run_experts` over one nn.Linear for each expert."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.experts = nn.ModuleList()
        for weight in work.weight:
            expert = nn.Linear(work.layer.inputs, work.layer.outputs, bias=False, device="meta")
            expert.weight = nn.Parameter(weight)
            self.experts.append(expert)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.experts.parameters())

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return run_experts(self.work.routed(x), self.experts)


class FP8ExpertByExpert(ExpertByExpert):
    """The same over FP8 layers, whose casts pad the rows; weights are cast once."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        convert_to_fp8(self.experts, CONFIG)
        let_weights_stay(self.experts.parameters())


class FP8ExpertByExpertCold(FP8ExpertByExpert):
    """The same with the weights cast each time, as after an optimizer's step."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        # the step of any optimizer ends the life of all FP8 weights
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.step()
        return super().compute(x)


class Grouped(Implementation):
    """`torch._grouped_mm` in BF16."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.weight = nn.Parameter(work.weight)
        self.ends = work.ends()

    def parameters(self) -> list[nn.Parameter]:
        return [self.weight]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return _Grouped.apply(x, self.weight, self.ends)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, ends)
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor) -> tuple:
        x, weight, ends = ctx.saved_tensors
        return torch._grouped_mm(dy, weight, offs=ends), torch._grouped_mm(dy.t(), x, offs=ends), None


class FP8Grouped(Implementation):
    """`nn.experts.grouped_linear`: one cast and one scale for all experts' tokens, and for all weights, cast once."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.weights = [nn.Parameter(weight) for weight in work.weight]
        layout = work.layout()
        self.how = grouped_linear.Products(layout.groups, Casts(CONFIG), reads=layout, sums=layout)
        self.cast = self.cast_weights()

    def cast_weights(self) -> GroupedWeight:
        """The FP8 weights of all experts."""
        weight = self.work.weight
        return cast_experts([weight.view(-1, weight.shape[2])], Casts(CONFIG))

    def parameters(self) -> list[nn.Parameter]:
        return self.weights

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return grouped_linear.grouped_linear(x, self.weights, self.cast, self.how)


class FP8GroupedCold(FP8Grouped):
    """The same with the weights cast each time."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.cast = self.cast_weights()
        return super().compute(x)


@dataclass(frozen=True)
class Candidate:
    """A way by its name in tables, and how far it may be from FP32."""

    label: str
    make: Callable[[Work], Implementation]
    tolerance: float


BASELINE = "bf16"
KINDS = {
    BASELINE: Candidate("BF16, expert by expert", ExpertByExpert, 0.01),
    "bf16-grouped": Candidate("BF16, torch._grouped_mm", Grouped, 0.01),
    "fp8": Candidate("FP8, expert by expert", FP8ExpertByExpert, 0.12),
    "fp8-cold": Candidate("FP8, expert by expert, weights cast each time", FP8ExpertByExpertCold, 0.12),
    "fp8-grouped": Candidate("FP8, torch._scaled_grouped_mm", FP8Grouped, 0.12),
    "fp8-grouped-cold": Candidate("FP8, torch._scaled_grouped_mm, weights cast each time", FP8GroupedCold, 0.12),
}
