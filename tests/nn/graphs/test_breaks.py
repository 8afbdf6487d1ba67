"""Layers with a part that must run eagerly: their graphs break there, with the bits of eager layers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, capture_layers, convert_to_fp8, fuse, report
from fp8booster.nn.experts.mixture import LOOKED_AT
from fp8booster.nn.fused import norm
from fp8booster.nn.graphs import captured_layers, graph_breaks
from fp8booster.nn.graphs.breaks import run_eagerly
from fp8booster.nn.graphs.eager import COUNTED, eager_parts, modules_apart
from fp8booster.nn.graphs.layer import TOO_EARLY, WARM_UP
from fp8booster.nn.weights.delivered import deliver_amax, delivered_amax
from tests.nn.fused.models import MAJOR, VOCABULARY, build

LAYERS = 2

pytestmark = pytest.mark.usefixtures("record")


class Told(nn.Module):
    """Tells why no graph can hold it."""

    why_eager: str | None = "it asks its user"

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        float(x.detach().sum())  # as who asks for numbers
        return self.inside(x)


class Layer(nn.Module):
    """Some parts, one of them eager, and one that holds another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.block = nn.ModuleDict({"told": Told(), "shared": nn.Sequential(nn.Linear(8, 8), nn.Tanh())})
        self.activation = nn.Sequential(nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(self.norm(x))
        return x + self.activation(self.block["told"](x)) + self.block["shared"](x)


def layers(device: torch.device) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(LAYERS)).to(device)


def in_a_model(of: nn.ModuleList) -> nn.Module:
    return nn.ModuleDict({"layers": of})


def trained(of: nn.ModuleList, step: int) -> list[torch.Tensor]:
    """The output and all gradients of a step."""
    for parameter in of.parameters():
        parameter.grad = None
    device = next(of.parameters()).device
    dtype = next(of.parameters()).dtype
    given = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device, dtype).requires_grad_()
    x = given
    for layer in of:
        x = layer(x)
    x.float().square().sum().backward()
    return [x.detach(), given.grad, *(parameter.grad for parameter in of.parameters())]


def assert_equal(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> None:
    assert all(torch.equal(*both) for both in zip(one, other, strict=True))


def test_experts_of_which_nobody_tells_run_eagerly_with_what_holds_them() -> None:
    layer = Layer()
    (told,) = eager_parts(layer.modules())
    assert (told.tells, told.called, told.why) == (layer.block["told"], layer.block["told"], "it asks its user")
    layer.block["told"].why_eager = None
    assert told.why is None
    assert not modules_apart([told])
    layer.block = nn.ModuleDict({"experts": nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))})
    (untold,) = eager_parts(layer.modules())
    assert (untold.tells, untold.called, untold.why) == (None, layer.block, COUNTED)
    assert modules_apart([untold]) == set(layer.block.modules())


def test_pieces_are_replayed_with_the_bits_of_eager_layers(device: torch.device) -> None:
    eager = layers(device)
    captured = copy.deepcopy(eager)
    assert capture_layers(in_a_model(captured)) == LAYERS
    for step in range(WARM_UP + 3):
        assert_equal(trained(eager, step), trained(captured, step))
        for each in (eager, captured):
            each.eval()
        with torch.no_grad():
            assert_equal([eager[0](torch.ones(4, 8, device=device))], [captured[0](torch.ones(4, 8, device=device))])
        for each in (eager, captured):
            each.train()
        assert captured_layers(captured) == {None if step >= WARM_UP else TOO_EARLY: LAYERS}
    assert graph_breaks(captured) == {"it asks its user": LAYERS}


class Twice(nn.Module):
    """Reads its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) * self.other(x)


def test_a_part_that_reads_twice_what_others_read_too_gives_two_gradients(device: torch.device) -> None:
    eager = layers(device)
    for layer in eager:
        layer.first, layer.block["shared"] = Twice().to(device), Twice().to(device)
    eager.bfloat16()
    captured = copy.deepcopy(eager)
    capture_layers(in_a_model(captured))
    for step in range(WARM_UP + 2):
        assert_equal(trained(eager, step), trained(captured, step))
    assert captured_layers(captured) == {None: LAYERS}


class Several(nn.Module):
    """Breaks twice; tensors go past a break, into one and past it, and through both; one is a number of choice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Twice(), Twice(), Twice()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.first(x)
        chosen = early.argmax(-1)
        found, again = run_eagerly(self._asked, {"x": early, "by": [chosen, 2]}, x)
        late = (self.second(found) * early + again).tanh()
        (more,) = run_eagerly(self._asked_again, late, found)
        return (self.third(more * early) + more).tanh() + 0.5 * x.tanh()

    def _asked(self, given: dict[str, Any], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, factor = given["by"]
        values = given["x"] * (factor + len(set(chosen.tolist())))
        return self.one(values), (x * values).tanh()

    def _asked_again(self, x: torch.Tensor, found: torch.Tensor) -> list[torch.Tensor]:
        float(x.detach().sum())
        return [self.other(x) * found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_add_up_as_in_eager_layers_across_breaks(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    eager = nn.ModuleList(Several() for _ in range(LAYERS)).to(device, dtype)
    captured = copy.deepcopy(eager)
    capture_layers(in_a_model(captured))
    for step in range(WARM_UP + 3):
        assert_equal(trained(eager, step), trained(captured, step))
    assert captured_layers(captured) == {None: LAYERS}


def test_two_forwards_may_wait_and_gradients_add_up(device: torch.device) -> None:
    eager = nn.ModuleList(Several() for _ in range(LAYERS)).to(device)
    captured = copy.deepcopy(eager)
    capture_layers(in_a_model(captured))
    for step in range(WARM_UP + 3):
        found = []
        for each in (eager, captured):
            for parameter in each.parameters():
                parameter.grad = None
            made = []
            for micro in range(2):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(9 * step + micro)).to(device)
                for layer in each:
                    x = layer(x)
                made.append(x.square().sum())
            for loss_of_one in made if step % 2 else made[::-1]:
                loss_of_one.backward()
            found.append([*made, *(parameter.grad for parameter in each.parameters())])
        assert_equal(*found)


class Delivers(nn.Module):
    """Gives the amax of a tensor along with it, as a norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        return run_eagerly(self._asked, deliver_amax(made, made.detach().abs().amax()), x)

    def _asked(self, given: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        amax = delivered_amax(given)
        assert amax is not None
        assert torch.equal(amax, given.abs().amax())
        assert delivered_amax(other) is None
        return given * amax


def test_an_amax_comes_along_with_its_tensor(device: torch.device) -> None:
    eager = nn.ModuleList(Delivers() for _ in range(LAYERS)).to(device)
    captured = copy.deepcopy(eager)
    capture_layers(in_a_model(captured))
    for step in range(WARM_UP + 3):
        assert_equal(trained(eager, step), trained(captured, step))
    assert captured_layers(captured) == {None: LAYERS}


class Fails(nn.Module):
    """Asks for something that is not always there."""

    why_eager = "it asks its user"
    is_there = True

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_there:
            raise KeyError("not there")
        return self.inside(x)


def test_an_error_between_graphs_is_the_callers_and_the_next_call_is_right(device: torch.device) -> None:
    eager = layers(device)
    for layer in eager:
        layer.block["told"] = Fails().to(device)
    captured = copy.deepcopy(eager)
    capture_layers(in_a_model(captured))
    for step in range(WARM_UP + 1):
        trained(captured, step)
    captured[1].block["told"].is_there = False
    with pytest.raises(KeyError, match="not there"):
        trained(captured, 0)
    captured[1].block["told"].is_there = True
    assert_equal(trained(eager, 7), trained(captured, 7))
    assert captured_layers(captured) == {None: LAYERS}


def test_what_runs_eagerly_may_change_between_replays(device: torch.device) -> None:
    """Its modules are no graph's: they may be replaced, frozen and trained otherwise."""
    eager = layers(device)
    captured = copy.deepcopy(eager)
    capture_layers(in_a_model(captured))
    for step in range(WARM_UP + 8):
        if step == WARM_UP + 2:
            torch.manual_seed(5)
            for each in (eager, captured):
                for layer in each:
                    layer.block["told"].inside = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)
            captured.load_state_dict(eager.state_dict())
        assert_equal(trained(eager, step), trained(captured, step))
        # what graphs give them may be another thing now
        again = range(WARM_UP + 2, 2 * WARM_UP + 2)
        assert captured_layers(captured) == {TOO_EARLY if step < WARM_UP or step in again else None: LAYERS}
    for each in (eager, captured):
        each.requires_grad_(False)
        each[0].norm.requires_grad_()
    for step in range(WARM_UP + 2):
        found = [[made for made in trained(each, step) if made is not None] for each in (eager, captured)]
        assert_equal(*found)
    assert captured_layers(captured) == {None: LAYERS}


def test_hooks_of_what_runs_eagerly_run_at_each_call(device: torch.device) -> None:
    eager = layers(device)
    captured = copy.deepcopy(eager)
    capture_layers(in_a_model(captured))
    seen: list[str] = []
    for step in range(2 * WARM_UP + 3):
        if step == WARM_UP + 2:
            for each, name in ((eager, "eager"), (captured, "captured")):
                told = each[1].block["told"]
                told.register_forward_hook(lambda module, args, made, name=name: seen.append(name) or 2 * made)
                told.inside.register_forward_hook(lambda module, args, made: 3 * made)
        assert_equal(trained(eager, step), trained(captured, step))
    assert captured_layers(captured) == {None: LAYERS}
    assert seen.count("eager") == seen.count("captured") == WARM_UP + 1


class Given(nn.Module):
    """Is given what no graph can have."""

    why_eager = "it asks its user"

    def forward(self, x: torch.Tensor, of: object) -> torch.Tensor:
        return x * 2


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.told = nn.Linear(8, 8), Given()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.told(self.linear(x), object())


def test_a_layer_stays_eager_where_what_breaks_it_is_given_more_than_tensors(device: torch.device) -> None:
    captured = nn.ModuleList(Gives() for _ in range(LAYERS)).to(device)
    capture_layers(in_a_model(captured))
    for step in range(WARM_UP + 1):
        trained(captured, step)
    assert captured_layers(captured) == {"what must run eagerly in it is given a object": LAYERS}


def test_a_part_may_go_back_alone_before_all_of_it(device: torch.device) -> None:
    captured = nn.ModuleList([Several()]).to(device)
    capture_layers(nn.ModuleDict({"layers": nn.ModuleList([captured[0], Several().to(device)])}))
    x = torch.ones(4, 8, device=device, requires_grad=True)
    for _ in range(WARM_UP + 1):
        captured[0](x).sum().backward()
    made = captured[0](x).sum()
    torch.autograd.grad(made, [captured[0].other.weight], retain_graph=True)
    for parameter in captured.parameters():
        parameter.grad = None
    x.grad = None
    made.backward()
    eager = copy.deepcopy(captured[0]).eval()
    again = x.detach().requires_grad_()
    eager(again).sum().backward()
    assert torch.equal(x.grad, again.grad)


def test_copies_of_layers_in_pieces_begin_anew(device: torch.device) -> None:
    captured = layers(device)
    model = in_a_model(captured)
    for _ in range(2):  # as `fuse` and the program each may
        assert capture_layers(model) == LAYERS
    for step in range(WARM_UP + 1):
        right = trained(captured, step)
    for again in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        assert captured_layers(again) == {TOO_EARLY: LAYERS}
        for _ in range(WARM_UP + 1):
            assert_equal(trained(again, WARM_UP), right)
        assert captured_layers(again) == {None: LAYERS}


def mixtures(device: torch.device, **options: object) -> tuple[nn.Module, nn.Module]:
    """A small mixture twice, in FP8 and fused, of which parts of the second are captured."""
    eager = build("mixtral", torch.bfloat16).to(device)
    convert_to_fp8(eager, FP8Config(always=True, cuda_graphs=False, **options))
    fuse(eager)
    captured = copy.deepcopy(eager)
    assert capture_layers(captured) == LAYERS
    return eager, captured


def loss(model: nn.Module, step: int) -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(step))
    ids = ids.to(next(model.parameters()).device)
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.skipif(MAJOR > 4, reason="experts are one parameter, and the whole layer is captured")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_are_captured_around_experts_that_are_modules(
    device: torch.device, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = mixtures(device)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    if checkpointed:
        for model in models:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    for step in range(WARM_UP + 3):
        found = [loss(model, step) for model in models]
        for each in found:
            each.backward()
        assert torch.equal(*found)
        assert_equal(*([each.grad for each in model.parameters()] for model in models))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    why_not = "checkpointing must compute again what runs eagerly in it" if checkpointed else None
    assert captured_layers(models[1]) == {why_not: LAYERS}
    line = f", graphs of {LAYERS} layers broken ({LOOKED_AT})"
    assert (line in report(models[1]).summary()) != checkpointed
    if device.type == "cuda" and not checkpointed:
        return  # a replay calls no Python
    # the norm behind a replayed attention adds its output to the residual stream
    adds: list[bool] = []
    row_norm = norm.row_norm

    def recorded(*args: Any, **how: Any) -> Any:
        adds.append(args[3] is not None)  # the residual
        return row_norm(*args, **how)

    monkeypatch.setattr(norm, "row_norm", recorded)
    loss(models[1], 0)
    assert adds == [*(LAYERS * [False, True]), False]
