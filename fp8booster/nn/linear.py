"""`nn.Linear` in FP8: the same parameters, names and state dict, another product."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.kernels.cast import ALIGNMENT, aligned
from fp8booster.kernels.device import require_fp8
from fp8booster.nn.choice import fp8_pays
from fp8booster.nn.functional import check_operands, fp8_linear, linear_from_quantized, quantize_weight
from fp8booster.nn.shared_input import share_input
from fp8booster.nn.weight_cache import WeightCache, reusable


class FP8Linear(nn.Linear):
    """A linear layer whose three products run in FP8.

    In training mode the FP8 weight and its transpose are made once per optimizer step, whatever the number of
    micro-batches, and layers that read one input share its cast. In evaluation mode the weight is cast at every call.
    Where `nn.choice` finds BF16 faster for the number of tokens, the layer computes in that, unless `config.always`.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`.
        config: formats and accumulation; None is `FP8Config()`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        config: FP8Config | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._start_fp8(FP8Config() if config is None else config)

    @classmethod
    def take_over(cls, module: nn.Linear, config: FP8Config) -> None:
        """Turn a linear layer into this class in place: its parameters, hooks and identity stay."""
        module.__class__ = cls
        module._start_fp8(config)

    def give_back(self) -> None:
        """Turn the layer into an `nn.Linear` again, in place."""
        del self.fp8_config, self.fp8_weight, self.in_fp8
        self.__class__ = nn.Linear

    def _start_fp8(self, config: FP8Config) -> None:
        self.fp8_config = config
        self.fp8_weight = WeightCache()
        self.in_fp8: dict[int, bool] = {}
        """For each token count seen so far, whether the products run in FP8."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]; errors as in `fp8_linear`."""
        weight, bias = self.weight, self.bias
        if input.numel() == 0:
            return F.linear(input, weight, bias)
        config = self.fp8_config
        rows = input.numel() // input.shape[-1]
        if not reusable(input, weight):
            if self._pays(rows, input.device):
                return fp8_linear(input, weight, bias, config)
            return F.linear(input, weight, bias)
        if rows not in self.in_fp8:
            self.in_fp8[rows] = self._pays(rows, input.device)
        if not self.in_fp8[rows]:
            return F.linear(input, weight, bias)
        check_operands(input, weight, bias)
        require_fp8(input.device, config.emulate)
        gradients = torch.is_grad_enabled()
        x = share_input(input, config, transposed=gradients and weight.requires_grad)
        if self.training or self.fp8_weight.is_kept_by_engine(weight):
            # a checkpointed forward runs without gradients first: with the transpose now, it is not cast twice
            w = self.fp8_weight.get(weight, config, transposed=True)
        else:
            self.fp8_weight.clear()
            w = quantize_weight(weight, config, transposed=gradients and input.requires_grad)
        return linear_from_quantized(input, weight, bias, x, w, config)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FP8Linear:
        # the parameters move to another device or dtype: the copy goes, and what was found to pay there
        self.fp8_weight.clear()
        self.in_fp8.clear()
        return super()._apply(fn, recurse)

    def _pays(self, rows: int, device: torch.device) -> bool:
        config = self.fp8_config
        return config.always or config.emulate or fp8_pays(rows, self.in_features, self.out_features, device)

    def fp8_notes(self) -> str:
        """What the report says beside the precision: emulation, sizes padded as "from->to", token counts in BF16."""
        padded = [
            f"{what} {size}->{aligned(size)}"
            for what, sizes in (
                ("in", [self.in_features]),
                ("out", [self.out_features]),
                ("tokens", sorted(rows for rows, in_fp8 in self.in_fp8.items() if in_fp8)),
            )
            for size in sizes
            if size % ALIGNMENT
        ]
        notes = ["emulated in FP32"] if self.fp8_config.emulate else []
        if padded:
            notes.append("padded: " + ", ".join(padded))
        slower = sorted(rows for rows, in_fp8 in self.in_fp8.items() if not in_fp8)
        if slower:
            counts = ", ".join(map(str, slower))
            notes.append(
                f"not in FP8 for {counts} tokens, where it would take longer; FP8Config(always=True) does it"
            )
        return "; ".join(notes)


def forget_weights(model: nn.Module) -> None:
    """Drop every FP8 weight copy of a model, so that the next forward casts anew.

    Needed only after a change through `.data` that no optimizer step follows.
    """
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.fp8_weight.clear()
