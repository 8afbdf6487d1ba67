"""FP8 layers on a GPU: in CUDA graphs, and over many steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, FP8Linear, fp8_linear

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise"])
def test_a_captured_layer_follows_its_input_gradient_and_weight(granularity, bias) -> None:
    torch.manual_seed(0)
    config = FP8Config(scaling=granularity)
    layer = FP8Linear(256, 384, bias=bias, device=DEVICE, dtype=BF16, config=config)
    x = torch.randn(128, 256, device=DEVICE, dtype=BF16, requires_grad=True)
    dy = torch.randn(128, 384, device=DEVICE, dtype=BF16)
    leaves = [x, *layer.parameters()]

    def step() -> torch.Tensor:
        for leaf in leaves:
            leaf.grad = None
        y = layer(x)
        y.backward(dy)
        return y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles the kernels, which a capture cannot
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    captured = [y, *(leaf.grad for leaf in leaves)]
    for factor in (1.0, 0.1, 30.0):
        with torch.no_grad():
            for tensor in (*leaves, dy):
                tensor.copy_(factor * torch.randn_like(tensor))
        graph.replay()
        eager = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        expected = fp8_linear(*eager, config=config)
        expected.backward(dy)
        for one, other in zip(captured, [expected, *(leaf.grad for leaf in eager)], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise"])
def test_memory_does_not_grow_over_200_steps(granularity) -> None:
    torch.manual_seed(0)
    config = FP8Config(scaling=granularity)
    model = nn.Sequential(
        FP8Linear(256, 1024, device=DEVICE, dtype=BF16, config=config),
        nn.GELU(),
        FP8Linear(1024, 250, device=DEVICE, dtype=BF16, config=config),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.randn(128, 256, device=DEVICE, dtype=BF16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        step()
    allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    for _ in range(200):
        step()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.max_memory_allocated() == peak
