"""Inputs of linear layers that are no plain tensors: those of torch.fx, and nested ones."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.fx import Proxy


def is_plain(input: torch.Tensor | Proxy) -> bool:
    """Tell whether an input is one tensor with values of its own."""
    return not isinstance(input, Proxy) and not input.is_nested


def output_of(layer: nn.Module, input: torch.Tensor | Proxy) -> torch.Tensor:
    """Return what a layer makes of an input that is not plain.

    torch.fx records a call of the layer, which stays whole in the graph. All rows of a nested tensor are one product.

    Args:
        layer: maps [rows, K] to [rows, N], row by row.
        input: a proxy, or nested: [B, ragged, ..., K].
    """
    if isinstance(input, Proxy):
        path = cast(torch.fx.Tracer, input.tracer).path_of_module(layer)
        return cast(torch.Tensor, input.tracer.create_proxy("call_module", path, (input,), {}))
    if input.layout is not torch.jagged:
        parts = input.unbind()
        rows = torch.cat([part.flatten(0, -2) for part in parts])
        outputs = layer(rows).split([part.shape[:-1].numel() for part in parts])
        return torch.nested.as_nested_tensor(
            [output.view(*part.shape[:-1], -1) for output, part in zip(outputs, parts, strict=True)]
        )
    nested = cast(Any, input)
    if nested._ragged_idx == nested.dim() - 1:
        raise ValueError(
            "the features of a nested tensor are ragged; give a linear layer one whose last dimension is regular, as "
            "[batch, tokens, features] with ragged tokens is"
        )
    return torch.nested.nested_tensor_from_jagged(
        layer(nested.values()), nested.offsets(), nested.lengths(), jagged_dim=nested._ragged_idx
    )
