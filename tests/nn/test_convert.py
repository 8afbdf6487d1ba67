from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fp8booster import FP8Config, FP8Linear, capture_layers, convert_to_fp8, quantize, report
from fp8booster.nn.convert import LEFT_OUT
from fp8booster.nn.experts.fp8_experts import FP8Experts
from fp8booster.nn.graphs.capture import CapturedLayer
from fp8booster.nn.linear.frozen import FrozenFP8Linear
from fp8booster.nn.modules import mixed_class
from tests.nn.experts.test_fp8_experts import Experts
from tests.nn.models import tiny_llama


class Doubled(nn.Linear):
    """A linear layer with a product of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_parameters_modules_and_hooks_stay() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    modules, parameters, state = list(model.modules()), list(model.parameters()), list(model.state_dict())
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    assert convert_to_fp8(model) is model
    assert all(one is other for one, other in zip(modules, model.modules(), strict=True))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == state
    assert [type(layer) for layer in model] == [FP8Linear, FP8Linear]
    model(torch.randn(16, 32))
    assert calls == ["hook"]


def test_the_model_may_itself_be_a_linear_layer() -> None:
    layer = nn.Linear(32, 32)
    convert_to_fp8(layer)
    assert type(layer) is FP8Linear


def test_the_predicate_decides_by_name_and_module() -> None:
    model = tiny_llama()
    config = FP8Config(layers=lambda name, module: "mlp" in name and module.in_features == 64)
    convert_to_fp8(model, config)
    chosen = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    assert chosen == {"gate_proj", "up_proj"}
    rows = {row.name: row for row in report(model).rows}
    assert rows["model.layers.0.mlp.down_proj"].notes == "FP8Config.layers leaves it out"


def test_every_projection_of_a_llama_is_converted_and_the_head_is_not() -> None:
    model = convert_to_fp8(tiny_llama())
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert kinds.pop("lm_head") is nn.Linear
    assert len(kinds) == 2 * 7
    assert set(kinds.values()) == {FP8Linear}


def test_layers_at_both_ends_stay_in_high_precision() -> None:
    for count, left in ((1, {1, 2, 3}), (2, {2})):
        model = convert_to_fp8(tiny_llama(num_hidden_layers=5), FP8Config(high_precision_ends=count))
        found = {name.split(".")[2] for name, module in model.named_modules() if isinstance(module, FP8Linear)}
        assert found == {str(layer) for layer in left}
    rows = {row.name: row for row in report(model).rows}
    assert rows["model.layers.3.mlp.down_proj"].notes.startswith("one of the first or last 2 decoder layers")
    assert rows["model.layers.2.mlp.down_proj"].precision == "FP8"
    convert_to_fp8(model)
    assert all(row.precision == "FP8" for row in report(model).rows if row.name != "lm_head")


def test_lists_inside_layers_have_no_ends_of_their_own() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    model = nn.ModuleDict({side: nn.ModuleList(Layer() for _ in range(3)) for side in ("encoder", "decoder")})
    convert_to_fp8(model, FP8Config(high_precision_ends=1))
    found = {name for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    assert found == {f"{side}.1.parts.{part}" for side in ("encoder", "decoder") for part in range(3)}


def test_experts_in_one_parameter_stay_in_high_precision_at_both_ends() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.experts = nn.Linear(32, 32), Experts()

    model = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(3))})
    convert_to_fp8(model, FP8Config(high_precision_ends=1))
    assert [isinstance(layer.experts, FP8Experts) for layer in model["layers"]] == [False, True, False]
    assert "the first or last decoder layer" in str(report(model))


def test_ends_of_a_model_without_layers_between_are_refused() -> None:
    with pytest.raises(ValueError, match=r"holds no nn.ModuleList of layers; choose"):
        convert_to_fp8(nn.Sequential(nn.Linear(32, 32)), FP8Config(high_precision_ends=1))
    with pytest.raises(ValueError, match=r"no layer of the model would compute in FP8: .*first or last decoder layer"):
        convert_to_fp8(tiny_llama(), FP8Config(high_precision_ends=1))


def test_a_router_stays_in_high_precision_unless_asked_for() -> None:
    experts = nn.ModuleList([nn.Linear(32, 32)])
    block = nn.ModuleDict({"gate": nn.Linear(32, 32), "experts": experts, "other": nn.ModuleDict()})
    block["other"]["gate"] = nn.Linear(32, 32)  # chooses among no experts
    convert_to_fp8(block)
    assert [row.name for row in report(block).fp8] == ["experts.0", "other.gate"]
    assert report(block).other[0].notes.startswith("a router")
    convert_to_fp8(block, FP8Config(layers=lambda name, module: True))
    assert type(block["gate"]) is FP8Linear


def test_experts_that_give_a_number_for_each_of_them_are_no_router() -> None:
    experts = nn.ModuleList(nn.Linear(32, 16) for _ in range(16))
    block = convert_to_fp8(nn.ModuleDict({"chooser": nn.Linear(32, 16), "experts": experts}))
    assert [row.name for row in report(block).fp8] == [f"experts.{number}" for number in range(16)]
    assert report(block).other[0].notes.startswith("a router")


def test_the_head_is_converted_when_asked_for() -> None:
    model = convert_to_fp8(tiny_llama(), FP8Config(layers=lambda name, module: True))
    assert type(model.lm_head) is FP8Linear


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Doubled(32, 32), "Doubled is a subclass of nn.Linear"),
        (lambda: parametrizations.weight_norm(nn.Linear(32, 32)), "ParametrizedLinear is a subclass of nn.Linear"),
        (lambda: nn.Linear(32, 17), "32 x 17 features, rounded up to multiples of 16, would make its products 1.88"),
        (lambda: nn.Linear(8, 32), "8 x 32 features, .* would make its products 2.00 times larger"),
        (lambda: nn.Linear(32, 0), "it has no weights"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_stays_as_it_was_says_why(make, reason) -> None:
    kept = make()
    kind, before = type(kept), kept(torch.ones(2, kept.in_features))
    model = convert_to_fp8(nn.ModuleList([nn.Linear(32, 32), kept]))
    assert type(kept) is kind
    assert torch.equal(kept(torch.ones(2, kept.in_features)), before)
    (row,) = report(model).other
    assert (row.name, row.precision) == ("1", "FP32")
    assert re.match(reason, row.notes)


@pytest.mark.parametrize(("inputs", "outputs", "converted"), [(300, 256, True), (250, 250, True), (100, 100, False)])
def test_padding_is_taken_where_it_is_cheap(inputs, outputs, converted) -> None:
    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(inputs, outputs)])
    convert_to_fp8(model)
    assert isinstance(model[1], FP8Linear) is converted


def test_the_output_of_multihead_attention_stays_as_it_was() -> None:
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    convert_to_fp8(model)
    assert type(model.linear1) is type(model.linear2) is FP8Linear
    assert not isinstance(model.self_attn.out_proj, FP8Linear)
    model(torch.randn(2, 8, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_shared_module_is_converted_once_and_a_tied_weight_stays_tied() -> None:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.GELU(), shared, nn.Linear(32, 32))
    model[3].weight = shared.weight
    convert_to_fp8(model)
    assert model[0] is model[2]
    assert model[3].weight is model[0].weight
    assert [row.name for row in report(model).rows] == ["0", "3"]


def test_converting_again_applies_the_new_configuration() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert_to_fp8(model)
    model(torch.randn(16, 32))
    config = FP8Config(layers=lambda name, module: name == "1", scaling="amax")
    convert_to_fp8(model, config)
    assert type(model[0]) is nn.Linear
    assert model[0].__dict__.keys() - nn.Linear(1, 1).__dict__.keys() == {"_fp8booster_kept"}
    assert model[1].fp8_config is config
    convert_to_fp8(model)
    assert [type(layer) for layer in model] == [FP8Linear, FP8Linear]
    assert not report(model).other


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (nn.Sequential(nn.Conv1d(3, 3, 1), nn.GELU()), FP8Config(), "it has no linear layers"),
        (nn.Sequential(nn.Linear(32, 32)), FP8Config(layers=lambda *_: False), "FP8Config.layers leaves it out"),
    ],
)
def test_a_model_with_nothing_to_convert_is_refused(model, config, message) -> None:
    with pytest.raises(ValueError, match=rf"no layer of the model would compute in FP8: {message}.*use_fp8"):
        convert_to_fp8(model, config)


@pytest.mark.parametrize("function", [convert_to_fp8, quantize])
def test_options_that_are_no_configuration_are_refused(function) -> None:
    with pytest.raises(TypeError, match=r"config is {'always': True}; give an fp8booster.FP8Config"):
        function(nn.Sequential(nn.Linear(32, 32)), {"always": True})


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Doubled(32, 32), "Doubled is a subclass of nn.Linear that may compute its product otherwise"),
        (nn.Linear(100, 100), "100 x 100 features, rounded up to multiples of 16, would make its products 1.25"),
    ],
)
def test_where_no_choice_of_layers_would_help_all_stay_as_they_were_and_a_warning_says_why(layer, reason) -> None:
    model, tokens = (nn.ModuleDict({"layer": layer, "lm_head": nn.Linear(32, 48)}), torch.ones(2, layer.in_features))
    before = layer(tokens)
    with pytest.warns(UserWarning, match=rf"no layer .* FP8: .*{reason}.* They compute in 16 bits"):
        convert_to_fp8(model, FP8Config(always=True))
    assert torch.equal(layer(tokens), before)
    (row, head) = report(model).rows
    assert (row.precision, head.precision) == ("FP32", "FP32")
    assert row.notes.startswith(reason)


def test_lora_over_frozen_layers(device, products) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_llama(), peft.LoraConfig(r=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    ).to(device)
    convert_to_fp8(model)
    rows = {row.name: row for row in report(model).rows}
    assert all(row.precision == "FP8" for name, row in rows.items() if "lm_head" not in name)
    assert sum("lora_" in name for name in rows) == 2 * 2 * 2
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.randint(0, 128, (2, 32), device=device)
    losses = []
    for _ in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    base = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    assert base.weight.grad is None
    products.clear()
    loss = model(input_ids=tokens, labels=tokens).loss
    forward = len(products)
    loss.backward()
    adapters, frozen = 8, 14
    assert forward == adapters + frozen
    # weight gradients of the adapters; input gradients of all but the five that read the embedding
    assert len(products) - forward == adapters + (adapters - 2) + (frozen - 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_trains_as_it_does_in_high_precision(dtype, device) -> None:
    plain = tiny_llama().to(device, dtype)
    fp8 = convert_to_fp8(copy.deepcopy(plain))
    tokens = torch.randint(0, 128, (4, 32), device=device)
    curves = []
    for model in (plain, fp8):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        curve = []
        for _ in range(15):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0][-1] < curves[0][0] - 0.5
    torch.testing.assert_close(curves[1], curves[0], rtol=0.01, atol=0)
    assert curves[1] != curves[0]


@pytest.mark.parametrize("kept", [(nn.LazyLinear(32),), (nn.LazyConv1d(4, 1), nn.LazyBatchNorm1d())])
def test_layers_without_a_size_before_their_first_batch_stop_nothing(kept: tuple[nn.Module, ...]) -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32), *kept))
    assert [row.name for row in report(model).fp8] == ["0"]
    notes = [row.notes for row in report(model).rows[1:]]
    assert notes == ["it has no size before its first batch; run the model once, and convert it then"] * len(notes)
    model(torch.randn(4, 32) if notes else torch.randn(4, 32, 32))
    assert [row.name for row in report(convert_to_fp8(model)).fp8] == (["0", "1"] if notes else ["0"])
    assert not notes or report(model).rows[1].shape == (32, 32)


@pytest.mark.parametrize("captured_first", [True, False])
def test_captured_layers_turn_into_other_fp8_layers_and_back(captured_first) -> None:
    """`fuse` captures members of a ModuleList, which may be linear layers themselves."""
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(64, 64) for _ in range(2)), "last": nn.Linear(64, 64)})
    layer, *_ = layers = model["layers"]
    x, right = torch.randn(16, 64), mixed_class(CapturedLayer, nn.Linear)
    if captured_first:
        assert capture_layers(model) == 2
    convert_to_fp8(model, FP8Config(emulate=True))
    capture_layers(model)
    for config in (FP8Config(emulate=True, scaling="rowwise"), FP8Config(emulate=True)):
        convert_to_fp8(model, config)
        assert {type(each) for each in layers} == {mixed_class(CapturedLayer, FP8Linear)}
        assert report(model).share == 1
        assert torch.equal(layer(x), convert_to_fp8(plain_like(layer), config)(x))
    convert_to_fp8(model, FP8Config(emulate=True, layers=lambda name, _: name == "last"))
    assert {type(each) for each in layers} == {right}
    assert {row.notes for row in report(model).other} == {LEFT_OUT}
    quantize(model, FP8Config(emulate=True))
    assert {type(each) for each in layers} == {mixed_class(CapturedLayer, FrozenFP8Linear)}
    layer.revert()
    assert type(layer) is right


def plain_like(layer: nn.Module) -> nn.Linear:
    """Return an nn.Linear of a layer's parameters."""
    made = nn.Linear(layer.in_features, layer.out_features)
    made.load_state_dict(layer.state_dict())
    return made
