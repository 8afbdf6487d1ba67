from __future__ import annotations

import torch
from torch import nn

from fp8booster.nn.weights.stacking import as_matrix


def test_weights_are_read_without_their_own_detach() -> None:
    """That of a weight which shardformer has sharded copies its layout deeply, at every call."""
    weights = [nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    for weight in weights:
        weight.detach = None
    assert torch.equal(as_matrix(weights[:1]), weights[0])
    assert torch.equal(as_matrix(weights), torch.cat(weights))
    whole = torch.randn(8, 8)
    neighbours = [nn.Parameter(part) for part in whole.split(4)]
    for weight in neighbours:
        weight.detach = None
    assert as_matrix(neighbours).data_ptr() == whole.data_ptr()
    assert not as_matrix(weights).requires_grad
