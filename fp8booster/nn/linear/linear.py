"""`nn.Linear` in FP8: the same parameters, names and state dict, another product."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.nn.linear.inputs import is_plain, output_of
from fp8booster.nn.linear.layer import FP8Layer


class FP8Linear(FP8Layer, nn.Linear):
    """A linear layer whose three products run in FP8; see `FP8Layer`.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`.
        config: formats and accumulation; None is `FP8Config()`.
    """

    original = nn.Linear

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

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]; errors as in `fp8_linear`."""
        if not is_plain(input):
            return output_of(self, input)
        output = self.fp8_product(input, self.bias)
        return F.linear(input, self.held_weight, self.bias) if output is None else output

    def fp8_merges_by(self) -> Hashable | None:
        """Its class, unless it is a subclass, whose forward may be another."""
        return FP8Linear if type(self) is FP8Linear else None
