"""Whole experts (gate and up, SwiGLU, down) by `nn.experts.run_experts`, one by one or grouped, as plugins run them."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.harness.timing import let_weights_stay
from benchmarks.routed.implementations import BASELINE, CONFIG, Candidate, Implementation
from benchmarks.routed.work import ByExpert, ExpertLayer, Products, uneven_loads
from fp8booster import convert_to_fp8
from fp8booster.nn.experts.grouped import GroupedExperts
from fp8booster.nn.experts.one_by_one import run_experts
from fp8booster.nn.fused import fuse_blocks


@dataclass(frozen=True)
class WholeWork:
    """T tokens, sorted by expert, for E experts of K features that are N inside."""

    layer: ExpertLayer
    loads: tuple[int, ...]
    """Tokens of each expert."""
    x: torch.Tensor
    """[T, K] BF16."""
    dy: torch.Tensor
    """[T, K] BF16."""
    experts: nn.ModuleList
    """Mixtral's, in BF16."""

    @classmethod
    def random(cls, layer: ExpertLayer, tokens: int, device: torch.device) -> WholeWork:
        """Normally distributed, with `uneven_loads`."""
        # transformers takes seconds to import, and only this needs it
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralBlockSparseTop2MLP

        sizes = MixtralConfig(hidden_size=layer.inputs, intermediate_size=layer.outputs)
        with device:
            experts = nn.ModuleList(MixtralBlockSparseTop2MLP(sizes) for _ in range(layer.experts)).bfloat16()
        for weight in experts.parameters():
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        shape = {"size": (tokens, layer.inputs), "device": device, "dtype": torch.bfloat16}
        loads = tuple(uneven_loads(tokens, layer.experts))
        return cls(layer, loads, torch.randn(**shape), torch.randn(**shape), experts)

    @property
    def tokens(self) -> int:
        return len(self.x)

    @property
    def flops(self) -> int:
        """Floating-point operations of fprop, dgrad or wgrad of the three layers, without padding."""
        return 3 * 2 * self.tokens * self.layer.inputs * self.layer.outputs

    def reference(self) -> Products:
        """In FP32, expert by expert."""
        exact = copy.deepcopy(self.experts).float()
        x = self.x.float().requires_grad_()
        y = run_experts(ByExpert(x, self.loads), exact)
        y.backward(self.dy.float())
        return Products(y.detach(), x.grad, _gradients(exact))


def _gradients(experts: nn.ModuleList) -> torch.Tensor:
    """Those of w1, behind which all other products lie: [E, N, K]."""
    return torch.stack([expert.w1.weight.grad for expert in experts])


class OneByOne(Implementation):
    """As transformers has them."""

    grouped: GroupedExperts | None = None

    def __init__(self, work: WholeWork) -> None:
        super().__init__(work)
        self.experts = copy.deepcopy(work.experts)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.experts.parameters())

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        routed = ByExpert(x, self.work.loads)
        made = None if self.grouped is None else self.grouped.prepared(x, len(x))(routed, 1.0)
        return run_experts(routed, self.experts) if made is None else made

    def products(self) -> Products:
        y, dx = self.step()
        return Products(y, dx, _gradients(self.experts))


class FP8OneByOne(OneByOne):
    """FP8 layers, gate and up as one product."""

    def __init__(self, work: WholeWork) -> None:
        super().__init__(work)
        convert_to_fp8(self.experts, CONFIG)
        let_weights_stay(self.experts.parameters())
        fuse_blocks(self.experts)


class FP8GroupedWhole(FP8OneByOne):
    """The same by grouped products, for any number of tokens, as there is a backward."""

    def __init__(self, work: WholeWork) -> None:
        super().__init__(work)
        self.grouped = GroupedExperts(self.experts)

    def products(self) -> Products:
        found = super().products()
        if self.grouped.why_one_by_one is not None:
            raise RuntimeError(f"not grouped: {self.grouped.why_one_by_one}")
        return found


WHOLE_KINDS = {
    BASELINE: Candidate("BF16, one by one", OneByOne, 0.05),
    "fp8": Candidate("FP8, one by one, gate and up merged", FP8OneByOne, 0.25),
    "fp8-grouped": Candidate("FP8, grouped", FP8GroupedWhole, 0.25),
}
