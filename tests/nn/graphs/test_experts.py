"""Layers with experts that the host need not wait for, as CUDA graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, capture_layers, convert_to_fp8, fuse
from fp8booster.nn.graphs import captured_layers, graph_breaks
from fp8booster.nn.graphs import layer as layer_module
from fp8booster.nn.graphs.held import Held
from fp8booster.nn.graphs.layer import TOO_EARLY, WARM_UP
from fp8booster.nn.graphs.pair import GraphPair
from tests.nn.experts.test_fp8_experts import EACH, EXPERTS, HIDDEN, Experts
from tests.nn.fsdp.resharding import follow_resharding
from tests.nn.fused.models import batch, build
from tests.nn.graphs.rerun import Rerun

LAYERS = 2


class Block(nn.Module):
    """Attention aside, a layer of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(EACH)
        return x + self.experts(tokens, chosen, weights).view_as(x)


def model(device: torch.device, block: type[Block] = Block) -> nn.ModuleDict:
    torch.manual_seed(0)
    made = nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(LAYERS))}).bfloat16().to(device)
    return convert_to_fp8(made, FP8Config(always=True, cuda_graphs=False))


def forward(of: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    for layer in of["layers"]:
        x = layer(x)
    return x


def pairs_of(captured: nn.ModuleDict) -> list[GraphPair]:
    kinds = [kind for layer in captured["layers"] for kind in layer.fp8_graphs._kinds.values()]
    return [pair for kind in kinds for pair in kind.pairs]


def assert_no_copies(captured: nn.ModuleDict, x: torch.Tensor) -> None:
    for pair in pairs_of(captured):  # of the router and the input alone
        copied = sum(each.nbytes for each in pair._gradients if isinstance(each, torch.Tensor))
        assert copied <= captured["layers"][0].gate.weight.nbytes + 2 * x.nbytes


@pytest.mark.usefixtures("record")
def test_experts_are_captured_with_the_bits_of_eager_ones(device: torch.device) -> None:
    eager = model(device)
    captured = copy.deepcopy(eager)
    capture_layers(captured)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (eager, captured)]
    for step in range(WARM_UP + 4):
        generator = torch.Generator().manual_seed(step)  # other tokens for each expert at each step
        x = torch.randn(2, 24, HIDDEN, generator=generator).bfloat16().to(device)
        found = []
        for each, optimizer in zip((eager, captured), optimizers, strict=True):
            given = x.clone().requires_grad_()
            made = forward(each, given)
            made.float().square().mean().backward()
            found.append([made.detach(), given.grad, *(parameter.grad for parameter in each.parameters())])
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, *found)), step
    assert captured_layers(captured) == {None: LAYERS}
    assert_no_copies(captured, x)


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("ways", ["add up", "held", "go backward twice", "in FP32"])
def test_gradients_of_experts_are_eager_ones(device: torch.device, ways: str) -> None:
    eager = model(device)
    if ways == "in FP32":
        eager.float()
    captured = copy.deepcopy(eager)
    capture_layers(captured)
    held: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    for step in range(WARM_UP + 4):
        x = torch.randn(2, 24, HIDDEN, generator=torch.Generator().manual_seed(step))
        found = []
        for each in (eager, captured):
            made = forward(each, x.to(device, each["layers"][0].gate.weight.dtype).requires_grad_())
            loss = made.float().square().mean()
            if ways == "go backward twice":
                loss.backward(retain_graph=True)
            loss.backward()
            found.append([parameter.grad for parameter in each.parameters()])
        assert all(map(torch.equal, *found)), step
        held.append((found[1], [each.clone() for each in found[1]]))
        if ways != "add up" or step % 2:
            for each in (eager, captured):
                each.zero_grad()
    if ways == "held":  # no later step writes them
        assert all(torch.equal(*pair) for gradients in held for pair in zip(*gradients, strict=True))
    assert captured_layers(captured) == {None: LAYERS}
    assert_no_copies(captured, x.to(eager["layers"][0].gate.weight.dtype))


@pytest.mark.usefixtures("record")
def test_experts_that_are_read_twice_in_a_layer_are_left_eager(device: torch.device) -> None:
    class Twice(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(0.01 * super().forward(x))

    eager = model(device)
    for layer in eager["layers"]:
        layer.__class__ = Twice
    captured = copy.deepcopy(eager)
    capture_layers(captured)
    for step in range(WARM_UP + 2):
        x = torch.randn(2, 24, HIDDEN, generator=torch.Generator().manual_seed(step)).bfloat16().to(device)
        for each in (eager, captured):
            each.zero_grad()
            forward(each, x).float().mean().backward()
        gradients = ([parameter.grad for parameter in each.parameters()] for each in (eager, captured))
        assert all(map(torch.equal, *gradients)), step
    assert captured_layers(captured) == {"more than one product reads a weight of experts": LAYERS}


class WithProjection(Block):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.projection(x))


@pytest.mark.usefixtures("record")
def test_gradients_that_are_held_survive_a_product_that_fails(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = model(device, WithProjection)
    capture_layers(captured)
    x = torch.randn(2, 24, HIDDEN).bfloat16().to(device)
    for _ in range(WARM_UP + 2):
        captured.zero_grad()
        forward(captured, x).float().mean().backward()
    held = [(parameter.grad, parameter.grad.clone()) for parameter in captured.parameters()]
    captured.zero_grad()
    made = forward(captured, 2 * x).float().mean()

    def fails() -> None:
        raise torch.OutOfMemoryError("no room")

    for pair in pairs_of(captured):
        monkeypatch.setattr(pair, "_following", [fails])
    with pytest.raises(torch.OutOfMemoryError):
        made.backward()
    assert all(torch.equal(*each) for each in held)


class Hooking(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.experts.down_proj.register_hook(lambda gradient: 0.5 * gradient)
        return super().forward(x)


@pytest.mark.usefixtures("record")
def test_a_layer_that_hooks_its_parameters_is_left_eager(device: torch.device) -> None:
    captured = model(device, Hooking)
    capture_layers(captured)
    for _ in range(WARM_UP + 2):
        forward(captured, torch.randn(2, 24, HIDDEN, device=device).bfloat16()).float().mean().backward()
    assert captured_layers(captured) == {"it hooks gradients of its parameters": LAYERS}


@pytest.mark.usefixtures("record")
def test_layers_whose_functions_hold_what_they_have_not_saved_share_memory(device: torch.device) -> None:
    """As products of experts hold where rows lie."""
    captured = model(device)
    capture_layers(captured)
    for _ in range(WARM_UP + 2):
        forward(captured, torch.randn(2, 24, HIDDEN, device=device).bfloat16()).sum().backward()
    assert captured_layers(captured) == {None: LAYERS}
    pairs = pairs_of(captured)
    assert len(pairs) == LAYERS
    assert len({id(pair._memory) for pair in pairs}) == 1
    if device.type == "cuda":  # the stand-in's graphs keep nothing that could be lost
        in_use = pairs[0]._record.in_use(pairs[0]._memory)
        assert all(pair._kept.keys() <= in_use.keys() for pair in pairs)


@pytest.mark.usefixtures("record")
def test_experts_that_ran_in_16_bits_break_the_graphs_of_their_layer(device: torch.device) -> None:
    captured = model(device)
    capture_layers(captured)
    captured["layers"][0].experts._is_expert_parallel = True
    for _ in range(2 * WARM_UP + 2):
        forward(captured, torch.randn(2, 24, HIDDEN, device=device).bfloat16()).sum().backward()
    assert captured_layers(captured) == {None: LAYERS}
    assert graph_breaks(captured) == {"the host must know how many tokens an expert gets": 1}


def test_eager_layers_are_looked_at_again_only_where_something_has_changed(
    device: torch.device, record: Rerun | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if record is None:
        pytest.skip("times of what stands in for graphs")
    monkeypatch.setattr(Rerun, "seconds", staticmethod(lambda: 1e9))
    eager = model(device)
    capture_layers(eager, only_where_host_limits=True)
    looks: list[nn.Module] = []

    def look(layer: nn.Module, record_on: object) -> Held:
        looks.append(layer)
        return Held(layer, record_on)

    monkeypatch.setattr(layer_module, "Held", look)
    for step in range(WARM_UP + 3):
        looks_before = len(looks)
        forward(eager, torch.randn(2, 24, HIDDEN, device=device).bfloat16()).sum().backward()
        assert step == 0 or len(looks) == looks_before
    assert captured_layers(eager) == {"the GPU takes longer than the host": LAYERS}


@pytest.mark.usefixtures("record")
def test_experts_whose_weights_are_gathered_elsewhere_are_told_so(device: torch.device) -> None:
    of = model(device)
    for layer in of["layers"]:
        layer.gate.requires_grad_(False)
    follow_resharding(of)
    capture_layers(of)
    for _ in range(WARM_UP + 1):
        forward(of, torch.randn(2, 24, HIDDEN, device=device).bfloat16()).float().mean().backward()
    assert captured_layers(of) == {"its weights are gathered elsewhere": LAYERS}


@pytest.mark.usefixtures("record")
def test_options_of_experts_that_change_are_seen(device: torch.device) -> None:
    captured = model(device)
    capture_layers(captured)
    x = torch.randn(2, 24, HIDDEN, device=device).bfloat16()
    for _ in range(WARM_UP + 1):
        forward(captured, x).sum().backward()
    assert captured_layers(captured) == {None: LAYERS}
    for casts in captured["layers"][0].experts.fp8_casts.values():
        casts.under(FP8Config(always=True, cuda_graphs=False, fast_accumulation=()))
    forward(captured, x).sum().backward()
    assert captured_layers(captured) == {None: 1, TOO_EARLY: 1}


@pytest.mark.usefixtures("record")
def test_how_many_experts_a_token_gets_is_a_setting(device: torch.device) -> None:
    captured = build("mixtral").to(device)
    convert_to_fp8(captured, FP8Config(always=True, cuda_graphs=False))
    fuse(captured)
    capture_layers(captured)
    ids = batch().to(device)
    for _ in range(WARM_UP + 1):
        captured(input_ids=ids, labels=ids).loss.backward()
    assert captured_layers(captured) == {None: 2}
    for module in captured.model.layers[0].modules():
        if hasattr(module, "top_k"):
            module.top_k = 1
    captured(input_ids=ids, labels=ids).loss.backward()
    assert captured_layers(captured) == {None: 1, TOO_EARLY: 1}
