from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.config import WeightCopies
from fp8booster.kernels.transpose import transposed
from tests.kernels.matrices import quantize


def model_of(device: torch.device, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 120), nn.ReLU(), nn.Linear(120, 64, bias=False)).to(device)
    return convert_to_fp8(model, FP8Config(**options))


def kept(model: nn.Module) -> list[torch.Tensor]:
    return [layer.fp8_weight.held.transpose for layer in (model[0], model[2])]


@pytest.mark.parametrize("shape", [(32, 48), (40, 24), (1, 17)])
def test_the_transpose_is_that_of_a_cast(shape, device) -> None:
    matrix = torch.randn(shape, device=device)
    both = quantize(matrix, torch.float8_e4m3fn, transposed=True)
    late = transposed(quantize(matrix, torch.float8_e4m3fn).data)
    assert torch.equal(late.view(torch.uint8), both.transpose.view(torch.uint8))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_gives_the_same_bits_and_keeps_no_transpose(checkpointed, device) -> None:
    models = [model_of(device, weight_copies=WeightCopies(transposes=keep)) for keep in (True, False)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for _ in range(3):
        batches = torch.randn(2, 16, 48, device=device)
        for model, optimizer in zip(models, optimizers, strict=True):
            for batch in batches:  # the weights of both micro-batches are one cast
                out = checkpoint(model, batch, use_reentrant=False) if checkpointed else model(batch)
                out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with_transposes, without = models
    for one, other in zip(with_transposes.parameters(), without.parameters(), strict=True):
        assert torch.equal(one, other)
    for model in models:
        model(torch.randn(16, 48, device=device))
    assert all(transpose.numel() for transpose in kept(with_transposes))
    assert not any(transpose.numel() for transpose in kept(without))


def test_a_weight_is_cast_once_a_step(device, casts) -> None:
    model = model_of(device, weight_copies=WeightCopies(transposes=False))
    torch.optim.SGD(model.parameters()).step()  # until the first, each backward counts as one
    for _ in range(3):
        model(torch.randn(16, 48, device=device)).sum().backward()
    weights = [model[0].weight.data_ptr(), model[2].weight.data_ptr()]
    assert sorted(matrix.data_ptr() for matrix, _ in casts if matrix.data_ptr() in weights) == sorted(weights)


def test_a_copy_of_the_model_keeps_none_either(device) -> None:
    model = copy.deepcopy(model_of(device, weight_copies=WeightCopies(transposes=False)))
    model(torch.randn(16, 48, device=device)).sum().backward()
    assert not any(transpose.numel() for transpose in kept(model))


def test_rowwise_scales_need_their_transposes() -> None:
    with pytest.raises(ValueError, match="transposes=False"):
        FP8Config(scaling="rowwise", weight_copies=WeightCopies(transposes=False))
