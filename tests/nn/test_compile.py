"""Compiled code computes the bits of eager code, in one graph."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, formats, fp8_linear

BF16 = torch.bfloat16

TRACED = "aot_eager_decomp_partition"
"""Traces, differentiates and partitions as the default backend, and generates no code, which takes seconds."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting(graphs: list, backend: str):
    """A backend that keeps the graphs which it compiles."""
    compile_graph = torch._dynamo.lookup_backend(backend)

    def compile_and_count(graph, inputs):
        graphs.append(graph)
        return compile_graph(graph, inputs)

    return compile_and_count


def gradients(function, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output and gradients of the leaves."""
    y = function(*leaves)
    torch.manual_seed(1)
    return y.detach(), *torch.autograd.grad(y, leaves, torch.randn_like(y))


# code is generated for each, which takes seconds; aligned BF16 on real products is compiled under autocast, below
@pytest.mark.parametrize(
    ("config", "shape", "dtype"),
    [(FP8Config(), (2, 9, 40), torch.float32), (FP8Config(scaling="amax", emulate=True), (32, 48), BF16)],
    ids=["real, padded", "emulated, aligned"],
)
def test_the_function_has_the_bits_of_eager(dtype, shape, config, device) -> None:
    sizes = (shape, (24, shape[-1]), (24,))
    leaves = [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for size in sizes]
    compiled = torch.compile(fp8_linear, fullgraph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo")
        results = gradients(lambda *arguments: compiled(*arguments, config=config), *leaves)
    *eager, bias_gradient = gradients(lambda *arguments: fp8_linear(*arguments, config=config), *leaves)
    *compiled_results, compiled_bias_gradient = results
    for one, other in zip(eager, compiled_results, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(bias_gradient, compiled_bias_gradient)  # a sum, which a compiler may order otherwise


def test_a_model_has_the_bits_of_eager_over_steps_and_is_compiled_once(device) -> None:
    graphs = []
    eager = nn.Sequential(
        FP8Linear(48, 64, bias=False, device=device), nn.ReLU(), FP8Linear(64, 48, bias=False, device=device)
    )
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend=counting(graphs, "inductor"))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (eager, model)]
    for _ in range(4):
        x = torch.randn(32, 48, device=device)
        outputs = []
        for forward, optimizer in zip((eager, compiled), optimizers, strict=True):
            y = forward(x)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(y.detach())
        assert torch.equal(*outputs)
    for one, other in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(graphs) == 1


def test_batches_of_any_size_need_two_graphs_at_most_for_each_alignment(device) -> None:
    graphs = []
    layer = FP8Linear(48, 32, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend=counting(graphs, TRACED))
    for rows in (32, 17, 48, 33, 64, 5, 80, 23):
        x = torch.randn(rows, 48, device=device)
        assert torch.equal(compiled(x), layer(x))
    assert len(graphs) <= 4


def test_layers_of_one_kind_share_their_graph(device) -> None:
    graphs = []
    backend = counting(graphs, TRACED)
    blocks = [nn.Sequential(FP8Linear(32, 32, device=device), nn.ReLU()) for _ in range(3)]
    x = torch.randn(5, 32, device=device)
    for block in blocks:
        y = block(x)
        block.compile(fullgraph=True, backend=backend)
        assert torch.equal(block(x), y)
    assert len(graphs) == 1


def test_query_key_and_value_share_one_cast(device, casts) -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(FP8Linear(48, 32, device=device) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(layer(x) for layer in self.layers)

    model = torch.compile(Projections(), fullgraph=True, backend=TRACED)
    x = torch.randn(16, 48, device=device)
    model(x).sum().backward()
    casts.clear()
    model(x).sum().backward()
    assert sum(matrix.data_ptr() == x.data_ptr() for matrix, _ in casts) == 1


def test_what_compiled_code_saves_is_fp8(device) -> None:
    layer = FP8Linear(64, 64, bias=False, device=device, dtype=BF16)
    compiled = torch.compile(layer, fullgraph=True, backend=TRACED)
    x = torch.randn(256, 64, device=device, dtype=BF16) * 2
    x.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        compiled(x)
    large = [t for t in saved if t.numel() >= 64 * 64]
    assert {t.dtype for t in large} == {formats.E4M3}
    assert sum(t.nbytes for t in large) == x.numel() + layer.weight.numel()


def test_checkpointing_inside_compiled_code(device) -> None:
    layer = FP8Linear(48, 48, device=device)
    compiled = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), fullgraph=True, backend=TRACED)
    x = torch.randn(20, 48, device=device, requires_grad=True)
    for eager, other in zip(gradients(layer, x), gradients(compiled, x), strict=True):
        assert torch.equal(eager, other)


def test_autocast_inside_compiled_code(device) -> None:
    layer = FP8Linear(48, 32, bias=False, device=device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, BF16):
            return layer(x)

    x = torch.randn(16, 48, device=device, requires_grad=True)
    eager, compiled = gradients(forward, x), gradients(torch.compile(forward, fullgraph=True), x)
    assert compiled[0].dtype is BF16
    for one, other in zip(eager, compiled, strict=True):
        assert torch.equal(one, other)


def test_a_nan_reaches_the_loss_of_compiled_code(device) -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32))).to(device)
    compiled = torch.compile(model, fullgraph=True, backend=TRACED)
    x = torch.randn(16, 32, device=device)
    x[3, 3] = float("nan")
    assert compiled(x).square().mean().isnan()
    assert compiled(x.nan_to_num()).square().mean().isfinite()
