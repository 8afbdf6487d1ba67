"""Experts that a module holds as two parameters, in FP8, against the same in FP32."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, capture_layers, convert_to_fp8, forget_weights, report
from fp8booster.config import Activations, Formats, WeightCopies
from fp8booster.formats import E4M3, E5M2
from fp8booster.nn.experts import grouped_linear, stack
from fp8booster.nn.experts.fp8_experts import FP8Experts
from fp8booster.nn.experts.row_layout import RowLayout
from fp8booster.nn.graphs.capture import CapturedLayer
from fp8booster.nn.graphs.eager import COUNTED
from fp8booster.nn.graphs.held import Held
from fp8booster.nn.linear import speed_model
from fp8booster.nn.modules import mixed_class
from tests.kernels.grouped_stand_in import scaled_grouped_mm, stand_in
from tests.nn.fsdp.resharding import follow_resharding
from tests.nn.swapping import by_swapping

HIDDEN, FEATURES, EXPERTS, TOKENS, EACH = 64, 96, 4, 40, 2
QUICK = FP8Config(emulate=True)


class Experts(nn.Module):
    """What transformers 5 tells of experts, computed one by one."""

    def __init__(
        self,
        is_transposed: bool = False,
        has_bias: bool = False,
        has_gate: bool = True,
        has_post_expert_norm: bool = False,
    ) -> None:
        super().__init__()
        self.is_transposed, self.has_bias, self.has_gate = is_transposed, has_bias, has_gate
        self.has_post_expert_norm, self._is_expert_parallel = has_post_expert_norm, False
        up = ("gate_up_proj", 2 * FEATURES) if has_gate else ("up_proj", FEATURES)
        for name, outputs, inputs in ((*up, HIDDEN), ("down_proj", HIDDEN, FEATURES)):
            weight = torch.randn(EXPERTS, outputs, inputs) / inputs**0.5
            weight *= torch.arange(1.0, EXPERTS + 1)[:, None, None]  # of different sizes
            setattr(self, name, nn.Parameter(weight.mT.contiguous() if is_transposed else weight))
            if has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, outputs)))
        self.act_fn = nn.SiLU()
        if has_post_expert_norm:
            self.post_expert_norm = nn.RMSNorm(HIDDEN)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        mixed = torch.zeros_like(hidden_states)
        for number in range(len(self.down_proj)):
            tokens, places = torch.where(top_k_index == number)
            x = self.product("gate_up_proj" if self.has_gate else "up_proj", number, hidden_states[tokens])
            x = self.product("down_proj", number, self._apply_gate(x) if self.has_gate else self.act_fn(x))
            if self.has_post_expert_norm:
                x = self.post_expert_norm(x)
            mixed = mixed.index_add(0, tokens, (x * top_k_weights[tokens, places, None]).to(mixed.dtype))
        return mixed

    def product(self, name: str, number: int, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, name)[number]
        bias = getattr(self, f"{name}_bias")[number] if self.has_bias else None
        return F.linear(x, weight.mT if self.is_transposed else weight, bias)


class Clamped(Experts):
    """As gpt-oss has them."""

    def __init__(self) -> None:
        super().__init__(is_transposed=True, has_bias=True)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2].clamp(max=7), gate_up[..., 1::2].clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)


class ClampedHalves(Experts):
    """Of gate and up in halves, of which many reach the bounds; what FP8 takes over one has another gradient."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=3.0)) * up.clamp(-3.0, 3.0)


class Interleaved(Experts):
    """Of gate and up in turn."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.act_fn(gate_up[..., ::2]) * gate_up[..., 1::2]


class UpFirst(Experts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        up, gate = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def normed(norm: nn.Module) -> Experts:
    """Experts with another norm behind."""
    experts = Experts(has_post_expert_norm=True)
    experts.post_expert_norm = norm
    return experts


FORMS: dict[str, Callable[[], Experts]] = {
    "gated": Experts,
    "transposed": lambda: Experts(is_transposed=True),
    "with biases": lambda: Experts(has_bias=True),
    "without gates": lambda: Experts(has_gate=False),
    "with a norm behind": lambda: Experts(has_post_expert_norm=True),
    "transposed, with biases, clamped and interleaved": Clamped,
    "clamped": ClampedHalves,
    "interleaved": Interleaved,
    "up first": UpFirst,
}
TOLERANCES = {"clamped": 0.3}


def made(form: str = "gated", config: FP8Config | None = QUICK, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The same at every call; None converts nothing."""
    torch.manual_seed(0)
    experts = FORMS[form]().to(dtype)
    return experts if config is None else convert_to_fp8(experts, config)


def exact(form: str = "gated") -> nn.Module:
    """In FP32, of the weights that BF16 has."""
    return made(form, None).float()


def routed(device: torch.device | str = "cpu", tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    """Tokens, their experts, of which the last has none, and these' weights."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    chosen = torch.rand(tokens, EXPERTS - 1, generator=generator).topk(EACH).indices
    weights = torch.rand(tokens, EACH, generator=generator)
    return x.to(device), chosen.to(device), weights.to(device)


def results(experts: nn.Module, given: tuple[torch.Tensor, ...] | None = None, call: Callable | None = None) -> dict:
    """Output and gradients of tokens, of the routers' weights and of all parameters, in FP32."""
    x, chosen, weights = routed() if given is None else given
    x = x.to(next(experts.parameters()).dtype).requires_grad_()
    weights = weights.clone().requires_grad_()
    experts.zero_grad()
    y = (experts if call is None else call)(x, chosen, weights)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    y.backward(dy)
    gradients = {name: each.grad for name, each in experts.named_parameters()}
    return {
        name: value.float()
        for name, value in {"y": y.detach(), "x": x.grad, "router": weights.grad, **gradients}.items()
    }


def assert_near(found: dict, expected: dict, tolerance: float = 0.1) -> None:
    """By expert, where there are several."""
    for name, right in expected.items():
        one, other = (each[name].flatten(1) if each[name].dim() > 1 else each[name][None] for each in (found, expected))
        if right.dim() < 3:
            one, other = one.reshape(1, -1), other.reshape(1, -1)
        assert ((one - other).norm(dim=1) <= tolerance * other.norm(dim=1)).all(), name


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def assert_in_fp8(experts: nn.Module) -> None:
    assert isinstance(experts, FP8Experts)
    assert {row.precision for row in report(experts).outside} == {"FP8"}, report(experts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["emulated", "group by group", "kernel"])
def test_values_and_gradients_are_near_those_in_fp32(form: str, way: str, monkeypatch) -> None:
    config = FP8Config(emulate=way == "emulated")
    if way == "kernel":
        stand_in(monkeypatch)
    experts = made(form, config)
    found = results(experts)
    assert_near(found, results(exact(form)), TOLERANCES.get(form, 0.1))
    assert_in_fp8(experts)
    assert not torch.equal(found["y"], results(made(form, None))["y"])
    for name, gradient in found.items():
        if "proj" in name:
            assert not gradient[-1].any()  # the expert without tokens
            assert gradient[0].any()


@pytest.mark.parametrize(
    ("fast", "longest", "expected"),
    [
        (("fprop",), 2 * FEATURES, [True] * 6),  # of up: fprop, dgrad, wgrad; and of down
        (("fprop",), 2 * FEATURES - 1, [True, False, True, True, True, True]),
        (("fprop",), TOKENS * EACH, [True, False, True, True, True, True]),  # of wgrad: what pads rows is no part of it
        (("fprop",), TOKENS * EACH - 1, [True, False, False, True, True, False]),
        (("fprop",), HIDDEN - 1, [True, False, False, True, False, False]),
        (("fprop", "wgrad"), 0, [True, False, True] * 2),
        ((), 2 * FEATURES, [False] * 6),
    ],
)
def test_short_sums_are_accumulated_fast(fast, longest: int, expected: list[bool], monkeypatch) -> None:
    monkeypatch.setattr(grouped_linear, "FAST_SUM", longest)
    found: dict[tuple, bool] = {}

    def note(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, use_fast_accum: bool, **options) -> torch.Tensor:
        found[a.shape[-1], b.shape[-1], b.dim()] = use_fast_accum
        return scaled_grouped_mm(a, b, *scales, use_fast_accum=use_fast_accum, **options)

    stand_in(monkeypatch, note)
    results(made("gated", FP8Config(fast_accumulation=fast)))
    rows = TOKENS * EACH // 16 * 16 + 16 * EXPERTS  # of which one of the four experts may have all
    up, down = (HIDDEN, 2 * FEATURES), (FEATURES, HIDDEN)
    keys = [[(k, n, 3), (n, k, 3), (rows, k, 2)] for k, n in (up, down)]
    assert [found[key] for key in (*keys[0], *keys[1])] == expected


@pytest.mark.parametrize("form", ["gated", "transposed, with biases, clamped and interleaved"])
def test_values_and_gradients_are_near_those_in_fp32_on_each_device(form: str, device: torch.device) -> None:
    experts = made(form, FP8Config()).to(device)
    found = results(experts, routed(device))
    assert_near({name: value.cpu() for name, value in found.items()}, results(exact(form)))
    assert_in_fp8(experts)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_experts_are_of_the_tokens_type_and_weighed_in_that_of_the_routers(dtype, training: bool) -> None:
    experts, (x, chosen, weights) = made().train(training), routed()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
        y = experts(x.to(dtype), chosen, weights)
    assert y.dtype is dtype
    doubled = experts(x, chosen, weights * torch.tensor([2.0, 0.0]))
    first = experts(x, chosen[:, :1].contiguous(), weights[:, :1].contiguous())
    torch.testing.assert_close(doubled, 2 * first, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("form", ["gated", "with biases", "without gates", "interleaved"])
def test_weights_inside_err_no_more_than_weights_behind_the_products(form: str) -> None:
    """Against FP64, where routers' weights and gradients span some octaves, of weights of BF16 and of FP32."""
    generator = torch.Generator().manual_seed(3)
    chosen = torch.rand(400, EXPERTS, generator=generator).topk(EACH).indices
    x, dy = (torch.randn(400, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    dy *= torch.randn(400, 1, generator=generator).exp()
    weights = (2 * torch.randn(400, EACH, generator=generator)).softmax(1)

    def errors(way: Callable, dtype: torch.dtype) -> list[float]:
        found, right = (
            gradients(experts, call, given)
            for experts, call, given in (
                (made(form), way, (x, chosen, weights.to(dtype))),
                (made(form, None).double(), nn.Module.__call__, (x.double(), chosen, weights.to(dtype).double())),
            )
        )
        return [((found[name].double() - value).norm() / value.norm()).item() for name, value in right.items()]

    def gradients(experts: nn.Module, call: Callable, given: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        x, chosen, weights = (each.detach() for each in given)
        x.requires_grad_(), weights.requires_grad_()
        y = call(experts, x, chosen, weights)
        y.backward(dy.to(y.dtype))
        of_parameters = {name: each.grad for name, each in experts.named_parameters()}
        return {"y": y.detach(), "x": x.grad, "router": weights.grad, **of_parameters}

    def behind(experts: FP8Experts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        layout = RowLayout.of_choices(chosen, EXPERTS)
        rows = experts.on_rows(x, layout, layout.by_choice(), chosen).view(*chosen.shape, -1)
        return (rows * weights.unsqueeze(2)).sum(1).to(x.dtype)

    for dtype in (torch.float32, torch.bfloat16):
        for inside, outside in zip(errors(nn.Module.__call__, dtype), errors(behind, dtype), strict=True):
            assert inside <= 1.1 * outside


def test_backward_keeps_tokens_once_however_many_experts_they_have() -> None:
    kept = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is E4M3 and HIDDEN in tensor.shape:
            kept[tensor.data_ptr()] = tensor.shape
        return tensor

    experts, (x, chosen, weights) = made(), routed(tokens=48)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        experts(x.requires_grad_(), chosen, weights)
    assert torch.Size([48, HIDDEN]) in kept.values()
    assert all(48 * EACH not in shape for shape in kept.values())


@pytest.mark.gpu
def test_a_captured_layer_gives_what_an_eager_one_does_for_whatever_its_tokens_chose() -> None:
    experts = made(config=FP8Config(always=True)).cuda()
    x, chosen, weights = (each.cuda() for each in routed())
    x.requires_grad_(), weights.requires_grad_()

    def step() -> list[torch.Tensor]:
        y = experts(x, chosen, weights)
        return [y, *torch.autograd.grad(y.float().square().sum(), [x, weights, *experts.parameters()])]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for shift in (1, 2):
        with torch.no_grad():
            chosen.copy_((chosen + shift) % EXPERTS)
        graph.replay()
        torch.cuda.synchronize()
        for found, expected in zip(captured, step(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_weights_that_lie_transposed_give_the_same_bits() -> None:
    plain, transposed = results(made("gated")), results(made("transposed"))
    for name in ("y", "x", "router"):
        assert torch.equal(plain[name], transposed[name])
    for name in ("gate_up_proj", "down_proj"):
        torch.testing.assert_close(transposed[name].mT, plain[name], rtol=1e-2, atol=1e-3)


def test_without_any_token_every_gradient_is_zero() -> None:
    experts = made("with biases")
    found = results(experts, routed(tokens=0))
    assert found["y"].shape == (0, HIDDEN)
    assert all(not value.any() for value in found.values())
    assert len(found) == 3 + len(list(experts.parameters()))
    assert_in_fp8(experts)


@pytest.mark.parametrize("form", ["gated", "transposed"])
def test_how_weights_and_activations_are_kept_changes_little_or_nothing(form: str) -> None:
    expected = results(made(form))
    assert_same(results(made(form, FP8Config(emulate=True, weight_copies=WeightCopies(transposes=False)))), expected)
    resharded = made(form)
    follow_resharding(resharded)
    assert_same(results(resharded), expected)
    assert all(source.held is None for source in resharded.fp8_weights.values())
    saved = results(made(form, FP8Config(emulate=True, activations=Activations(saved="8-bit"))))
    assert torch.equal(saved["y"], expected["y"])
    assert_near(saved, expected, 0.03)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_gives_the_same_bits(reentrant: bool) -> None:
    experts, expected = made(), results(made())

    def recomputed(*given: torch.Tensor) -> torch.Tensor:
        return checkpoint(experts, *given, use_reentrant=reentrant)

    assert_same(results(experts, call=recomputed), expected)


def test_what_compiled_code_calls_gives_the_same_bits() -> None:
    experts, expected = made(), results(made())
    assert_same(results(experts, call=torch.compile(experts, backend="eager")), expected)
    assert_in_fp8(experts)


def test_unfused_activations_are_near_fused_ones() -> None:
    found, expected = results(made(config=FP8Config(emulate=True, fused=False))), results(made())
    assert not torch.equal(found["y"], expected["y"])
    assert_near(found, expected, 0.03)


def test_a_hook_on_the_activation_runs() -> None:
    experts, seen = made(), []
    expected = results(experts)
    experts.act_fn.register_forward_hook(lambda _, given, output: seen.append(output.shape))
    assert_near(results(experts), expected, 0.03)
    assert len(seen) == 1
    assert_in_fp8(experts)


@pytest.mark.parametrize("form", ["gated", "without gates"])
def test_an_activation_that_is_replaced_counts(form: str) -> None:
    experts, right = made(form), exact(form)
    before = results(experts)
    for each in (experts, right):
        each.act_fn = nn.Tanh()
    assert_near(results(experts), results(right), 0.2)
    experts.act_fn = nn.SiLU()
    assert_same(results(experts), before)


def test_experts_with_another_forward_than_their_attributes_tell_stay_as_they_are() -> None:
    class Doubled(Experts):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(*args)

    torch.manual_seed(0)
    experts = Doubled().bfloat16()
    right = results(experts)
    found = results(convert_to_fp8(experts, QUICK))
    assert_same(found, right)
    assert {row.notes for row in report(experts).outside} == {"a forward of its class's own, which must run"}


@pytest.mark.parametrize("before", [True, False])
def test_a_forward_that_is_put_in_the_place_of_a_classs_own_runs(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(Experts):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return super().forward(*args)

        _apply_gate = Experts._apply_gate

    torch.manual_seed(0)
    experts = nn.Sequential(Replaced().bfloat16(), nn.Linear(16, 16))
    if not before:
        convert_to_fp8(experts, QUICK)
        results(experts[0])
        assert_in_fp8(experts[0])
    monkeypatch.setattr(Replaced, "forward", lambda self, x, *_: 3 * x + self.down_proj.sum())
    if before:
        convert_to_fp8(experts, QUICK)
    x, *choice = routed()
    assert torch.equal(experts[0](x, *choice), 3 * x + experts[0].down_proj.sum())
    assert all(row.notes.endswith("a forward of its class's own, which must run") for row in report(experts).outside)


def test_a_gate_of_an_instance_counts() -> None:
    experts, right = made(), exact()
    results(experts)
    for each in (experts, right):
        each._apply_gate = lambda gate_up: gate_up.chunk(2, -1)[0].relu()
    assert_near(results(experts), results(right), 0.2)


def test_evaluation_computes_what_training_does_with_weights_that_it_casts_once(casts: list) -> None:
    experts, given = made(), routed()
    trained = experts(*given)
    for context in (torch.no_grad, torch.inference_mode):
        experts.eval()
        for new in (4, 2):  # the weights too
            casts.clear()
            with context():
                assert torch.equal(experts(*given), trained)
            assert len(casts) == new
    experts.train()
    assert all(source.held is None for source in experts.fp8_weights.values())


def write_past_torchs_count(experts: nn.Module) -> None:
    """As optimizers over shards do."""
    other = nn.Parameter(torch.zeros(1))
    other.grad = torch.ones(1)
    experts.gate_up_proj.data.mul_(2)
    torch.optim.SGD([other]).step()


def write_and_forget(experts: nn.Module) -> None:
    experts.gate_up_proj.data.mul_(2)
    forget_weights(experts)


def load(experts: nn.Module) -> None:
    experts.load_state_dict({name: 2 * value for name, value in experts.state_dict().items()})


def replace_a_weight(experts: nn.Module) -> None:
    experts.gate_up_proj = nn.Parameter(2 * experts.gate_up_proj.detach())


def reconfigure(experts: nn.Module) -> None:
    convert_to_fp8(experts, FP8Config(emulate=True, scaling="amax"))


@pytest.mark.parametrize(
    "change",
    [write_past_torchs_count, write_and_forget, load, by_swapping(load), replace_a_weight, reconfigure],
    ids=lambda c: c.__name__,
)
def test_weights_are_cast_once_until_they_change(change: Callable[[nn.Module], None], casts: list) -> None:
    experts = made()
    torch.optim.SGD(experts.parameters()).step()  # until the first, each backward counts as one
    counted = []
    for _ in range(2):
        casts.clear()
        before = results(experts)
        counted.append(len(casts))
    assert counted == [6, 4]  # tokens, activations and their gradients; at first two weights more
    change(experts)
    after = results(experts)
    assert not torch.equal(before["y"], after["y"])
    fresh = copy.deepcopy(experts)
    assert fresh.fp8_weights["down_proj"].held is None
    assert_same(after, results(fresh))


def test_names_stay_and_copies_compute_the_same() -> None:
    plain, experts = made(config=None), made()
    assert experts.state_dict().keys() == plain.state_dict().keys()
    assert isinstance(experts, type(plain))
    expected = results(experts)
    for each in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert type(each) is type(experts)
        assert_same(results(each), expected)


def test_fp32_weights_compute_under_autocast() -> None:
    experts = made(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(experts)
    assert_near(found, results(made(config=None, dtype=torch.float32)))
    assert_in_fp8(experts)
    assert experts.gate_up_proj.grad.dtype is torch.float32


# ---- what stays in high precision ----


def test_experts_that_are_left_out_become_what_they_were() -> None:
    model = nn.ModuleDict({"experts": made(), "layer": nn.Linear(16, 16)})
    convert_to_fp8(model, FP8Config(layers=lambda name, module: name == "layer"))
    assert type(model["experts"]) is Experts
    assert "fp8_weights" not in vars(model["experts"])
    assert {row.notes for row in report(model).outside} == {"FP8Config.layers leaves it out"}
    assert_same(results(model["experts"]), results(made(config=None)))
    with pytest.raises(ValueError, match="leaves it out"):
        convert_to_fp8(model, FP8Config(layers=lambda *_: False))


class Narrow(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * 24, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 24))


NEVER: dict[str, tuple[Callable[[], nn.Module], FP8Config]] = {
    "a size is no multiple of 16": (Narrow, QUICK),
    "rowwise scales": (Experts, FP8Config(scaling="rowwise")),
    "grouped products multiply E4M3 alone": (
        Experts,
        FP8Config(formats=Formats(input=E5M2, gradient=torch.float8_e4m3fn)),
    ),
    "a forward of its own, which must run": (lambda: with_own_forward(Experts()), QUICK),
    "Untold has no FP8 form": (lambda: type("Untold", (nn.Bilinear,), {})(8, 8, 8), QUICK),
}


def with_own_forward(experts: nn.Module) -> nn.Module:
    experts.forward = lambda *_: None
    return experts


@pytest.mark.parametrize("reason", NEVER)
def test_what_cannot_be_in_fp8_stays_as_it_is_with_the_reason(reason: str) -> None:
    make, config = NEVER[reason]
    model = nn.Sequential(make(), nn.Linear(16, 16))
    kind = type(model[0])
    convert_to_fp8(model, config)
    assert type(model[0]) is kind
    assert {row.notes for row in report(model).outside} == {reason}
    assert {row.precision for row in report(model).outside} == {"FP32"}


def test_a_model_of_nothing_else_is_told_of() -> None:
    with pytest.warns(UserWarning, match="rowwise scales"):
        convert_to_fp8(Experts(), FP8Config(scaling="rowwise"))


Given = tuple[torch.Tensor, ...]


def halve(experts: nn.Module, given: Given, _: pytest.MonkeyPatch) -> Given:
    experts.half()
    return given[0].half(), *given[1:]


def spread_over_ranks(experts: nn.Module, given: Given, _: pytest.MonkeyPatch) -> Given:
    experts._is_expert_parallel = True
    return given


def weigh_all(_: nn.Module, given: Given, __: pytest.MonkeyPatch) -> Given:
    return *given[:2], torch.rand(TOKENS, EXPERTS)


def compute_on_a_gpu(experts: nn.Module, given: Given, patch: pytest.MonkeyPatch) -> Given:
    patch.setattr(speed_model, "_looked_up", lambda _: speed_model.MEASURED[9, 0])
    FP8Experts.convert_in_place(experts, FP8Config())
    return given


SOMETIMES = {
    "grouped products give BF16 alone": halve,
    "transformers spreads the experts over ranks": spread_over_ranks,
    "a weight for each expert, not for those of a token alone": weigh_all,
    "too few tokens": compute_on_a_gpu,
}


@pytest.mark.gpu
def test_the_host_waits_for_nothing() -> None:
    experts = made(config=FP8Config(always=True)).cuda()
    given = [each.cuda() for each in routed()]
    given[0].requires_grad_()
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            experts(*given).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert {row.precision for row in report(experts).outside} == {"FP8"}
    assert experts.why_eager is None


@pytest.mark.parametrize("reason", SOMETIMES)
def test_calls_that_are_not_in_fp8_compute_as_before_with_the_reason(reason: str, monkeypatch) -> None:
    experts = made()
    given = SOMETIMES[reason](experts, routed(), monkeypatch)
    dtype = given[0].dtype
    assert torch.equal(experts(*given), made(config=None).to(dtype)(*given))
    precision = "FP16" if dtype is torch.float16 else "BF16"
    assert {(row.precision, row.notes) for row in report(experts).outside} == {(precision, reason)}


def test_calls_by_other_names_compute_as_before_and_the_report_tells_of_both() -> None:
    experts, given = made(), routed()
    named = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), given, strict=True))
    assert torch.equal(experts(**named), made(config=None)(**named))
    reason = "called otherwise than with tokens, their experts and weights"
    assert {(row.precision, row.notes) for row in report(experts).outside} == {("BF16", reason)}
    assert experts.why_eager == COUNTED
    experts(*given)
    notes = f"experts in one parameter, in grouped products; emulated in FP32; not in FP8 for some calls: {reason}"
    assert {(row.precision, row.notes) for row in report(experts).outside} == {("FP8", notes)}


def test_many_experts_are_in_fp8_in_training_and_for_many_tokens_in_evaluation(monkeypatch) -> None:
    monkeypatch.setattr(speed_model, "_looked_up", lambda _: speed_model.MEASURED[9, 0])
    monkeypatch.setattr(stack, "EXPERTS_THAT_PAY", EXPERTS)
    experts, given = made(config=FP8Config()), routed()
    experts(*given)
    assert_in_fp8(experts)
    assert torch.equal(experts.eval()(*given), made(config=None)(*given))
    always = made(config=FP8Config(always=True)).eval()
    assert not torch.equal(always(*given), made(config=None)(*given))


def test_the_report_counts_weights_in_fp8() -> None:
    model = nn.Sequential(made(), nn.Linear(16, 16, dtype=torch.bfloat16))
    convert_to_fp8(model, QUICK)
    assert report(model).share == 1.0
    assert (
        "2 parameters of no linear layer in FP8, 99 % of the weights (experts in one parameter, in grouped products; "
        "emulated in FP32)" in report(model).summary()
    )
    assert [(row.name, row.shape, row.passes) for row in report(model).outside] == [
        ("0.gate_up_proj", (EXPERTS, 2 * FEATURES, HIDDEN), ("FP8", "FP8", "FP8")),
        ("0.down_proj", (EXPERTS, HIDDEN, FEATURES), ("FP8", "FP8", "FP8")),
    ]


def test_experts_whose_scales_no_graph_holds_are_not_captured() -> None:
    """As linear layers: else the capture would fail, and no layer of the model be captured after it."""
    experts = made(config=FP8Config(scaling="delayed", emulate=True))
    held = Held(nn.Sequential(experts), lambda _: None)
    assert held.why_not == "delayed scales, of which a graph cannot tell when a step begins"


def test_experts_that_are_captured_are_converted_again_and_reverted() -> None:
    listed = nn.ModuleDict({"layers": nn.ModuleList(made(config=None) for _ in range(2))})
    convert_to_fp8(listed, QUICK)
    capture_layers(listed)
    fp8 = {type(each) for each in listed["layers"]}
    convert_to_fp8(listed, FP8Config(emulate=True, always=True))
    assert {type(each) for each in listed["layers"]} == fp8
    assert report(listed).share == 1
    for each in listed["layers"]:
        each.revert()
    assert {type(each) for each in listed["layers"]} == {mixed_class(CapturedLayer, Experts)}


def test_calls_in_evaluation_tell_nothing_of_training(monkeypatch) -> None:
    monkeypatch.setattr(speed_model, "_looked_up", lambda _: speed_model.MEASURED[9, 0])
    monkeypatch.setattr(stack, "EXPERTS_THAT_PAY", EXPERTS)
    experts, given = made(config=FP8Config()), routed()
    tokens, chosen, weights = given
    experts.eval()(*given)
    few = "not in FP8 in evaluation: too few tokens"
    assert (experts.has_run, experts.in_fp8, experts.fp8_notes(), experts.why_eager) == (True, False, few, None)
    experts.train()(*given)
    notes = f"experts in one parameter, in grouped products; {few}"
    assert (experts.in_fp8, experts.fp8_notes(), experts.why_eager) == (True, notes, None)
    before = Held(nn.Sequential(experts), lambda _: None)
    experts.eval()(tokens, chosen, top_k_weights=weights)  # another reason
    experts.train()
    assert Held(nn.Sequential(experts), lambda _: None).changed_since(before) is None
    experts(tokens, chosen, top_k_weights=weights)
    otherwise = "called otherwise than with tokens, their experts and weights"
    assert experts.fp8_notes() == (
        f"experts in one parameter, in grouped products; not in FP8 for some calls: {otherwise}; {few}, {otherwise}"
    )
    assert experts.why_eager == COUNTED
