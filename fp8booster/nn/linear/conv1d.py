"""transformers' `Conv1D`, the linear layers of GPT-2, in FP8.

It is `nn.Linear` but that its weight lies as [input features, output features]. The weight is cast in both layouts
anyway, so the products read the one where they read the other of an `nn.Linear`, and nothing is transposed for it.

Importing this file imports transformers; `nn.convert` does so only where a model may hold such layers.
"""

from __future__ import annotations

import torch
from transformers.pytorch_utils import Conv1D

from fp8booster.nn.linear.frozen import FrozenLayer
from fp8booster.nn.linear.inputs import is_plain, output_of
from fp8booster.nn.linear.layer import FP8Layer


class FP8Conv1D(FP8Layer, Conv1D):  # type: ignore[misc]
    """A Conv1D whose three products run in FP8; see `FP8Layer`."""

    original = Conv1D
    weight_is_transposed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., input features] to [..., output features]; errors as in `fp8_linear`."""
        if not is_plain(x):
            return output_of(self, x)
        output = self.fp8_product(x, self.bias)
        if output is not None:
            return output
        # as transformers does, which would look at the weight as somebody else
        product = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.held_weight)
        return product.view((*x.size()[:-1], self.nf))


class FrozenFP8Conv1D(FrozenLayer, FP8Conv1D):  # type: ignore[misc]
    """A Conv1D whose weight is kept in FP8 alone, as [output, input features], also in the state dict."""

    original = Conv1D
