from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from fp8booster import FP8Config, convert_to_fp8, formats, fp8_linear, quantize, report
from fp8booster.nn import FrozenFP8Linear
from fp8booster.nn.linear.frozen import FrozenLayer
from fp8booster.scaling import Constant
from tests.nn.models import tiny_gpt2, tiny_llama

BF16 = torch.bfloat16
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TOKENS = {"vocab_size": 128, "max_position_embeddings": 64}


def bert() -> BertForMaskedLM:
    return BertForMaskedLM(BertConfig(**SIZES, **TOKENS))


def vit() -> ViTForImageClassification:
    return ViTForImageClassification(ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=32))


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(**SIZES, **TOKENS, num_key_value_heads=2, num_local_experts=4))


def phi3() -> Phi3ForCausalLM:
    return Phi3ForCausalLM(Phi3Config(**SIZES, **TOKENS, num_key_value_heads=2, pad_token_id=0))


MAJOR = int(transformers.__version__.split(".")[0])

FAMILIES = {"LLaMA": tiny_llama, "GPT-2": tiny_gpt2, "BERT": bert, "ViT": vit, "Mixtral": mixtral, "Phi-3": phi3}


def built(family: str, device: torch.device) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model in BF16, with weights so large that its parts matter, and what it takes."""
    torch.manual_seed(0)
    model = FAMILIES[family]().to(device, BF16).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(3)
    if family == "ViT":
        return model, {"pixel_values": torch.randn(2, 3, 32, 32, device=device, dtype=BF16)}
    return model, {"input_ids": torch.randint(1, 128, (2, 24), device=device)}


def frozen_layers(model: nn.Module) -> list[FrozenLayer]:
    return [module for module in model.modules() if isinstance(module, FrozenLayer)]


def parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_there_are_as_many_bytes_as_values_in_fp8_and_the_rest_stays(device) -> None:
    model = tiny_llama().to(device, BF16)
    values = sum(layer.weight.numel() for layer in model.model.layers.modules() if isinstance(layer, nn.Linear))
    before = parameter_bytes(model)
    assert quantize(model) is model
    layers = frozen_layers(model)
    assert len(layers) == 14
    assert parameter_bytes(model) == before - 2 * values + values + 4 * len(layers)
    assert sum(layer.fp8_data.nbytes for layer in layers) == values
    # all that the layers reach, with and without gradients
    x = torch.randint(128, (2, 8), device=device)
    model(x).logits.sum().backward()
    held = {id(each): each for layer in layers for each in vars(layer).values() if isinstance(each, torch.Tensor)}
    assert not held


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_models_of_every_kind_compute_nearly_the_same(family, granularity, device) -> None:
    model, given = built(family, device)
    expected = model(**given).logits.float()
    quantize(model, FP8Config(scaling=granularity))
    assert frozen_layers(model)
    error = model(**given).logits.float() - expected
    # of a token or a picture; the median, because a token whose experts change differs altogether
    share = error.norm(dim=-1) / expected.norm(dim=-1)
    assert 0 < share.median() < 0.12
    result = report(model)
    assert {row.notes.split(";")[0] for row in result.fp8} == {"weight kept in FP8 alone"}
    assert all(row.notes for row in result.other)


def test_blockwise_scales_are_for_sizes_that_they_pad_little(device) -> None:
    model = tiny_llama(hidden_size=128, intermediate_size=256).to(device, BF16)
    tokens = torch.randint(128, (2, 24), device=device)
    expected = model(tokens).logits.float()
    quantize(model, FP8Config(scaling="blockwise"))
    assert len(frozen_layers(model)) == 10
    assert "rounded up to multiples of 128" in report(model).summary()  # two heads of keys
    error = model(tokens).logits.float() - expected
    assert 0 < error.norm() < 0.12 * expected.norm()


def test_the_report_names_what_stays_in_16_bits_and_why() -> None:
    model, _ = built("Mixtral", torch.device("cpu"))
    quantize(model)
    kept = {row.notes for row in (*report(model).other, *report(model).outside)}
    router = "a router, where rounding would send tokens to other experts"
    as_one = {"experts in one parameter are not kept in FP8"} if MAJOR >= 5 else set()
    assert kept == {"FP8Config.layers leaves it out", router} | as_one
    tied = quantize(copy.deepcopy(tiny_llama(tie_word_embeddings=True)), FP8Config(vocabulary_head=True))
    (head,) = report(tied).other
    assert (head.name, head.notes) == ("lm_head", "its weight is that of another module too")


def test_an_untied_head_is_quantized_if_asked_for() -> None:
    model = quantize(tiny_llama(), FP8Config(vocabulary_head=True))
    assert isinstance(model.lm_head, FrozenFP8Linear)
    assert not report(model).other


@pytest.mark.parametrize(
    ("granularity", "calibrated"), [("tensorwise", False), ("tensorwise", True), ("rowwise", False)]
)
@pytest.mark.parametrize("family", ["LLaMA", "GPT-2", "BERT"])
def test_its_state_loads_into_a_model_quantized_alike(family, granularity, calibrated, device) -> None:
    model, given = built(family, device)
    quantize(model, FP8Config(scaling=granularity), batches=[given] if calibrated else None)
    state = model.state_dict()
    assert sum(value.dtype is formats.E4M3 for value in state.values()) == len(frozen_layers(model))
    other, _ = built(family, device)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    quantize(other, FP8Config(scaling=granularity)).load_state_dict(state)
    assert torch.equal(other(**given).logits, model(**given).logits)
    for name, value in other.state_dict().items():
        assert torch.equal(value.float(), state[name].float()), name


@pytest.mark.parametrize("family", ["LLaMA", "GPT-2", "Mixtral", "Phi-3"])
def test_it_generates(family, device) -> None:
    model, given = built(family, device)
    quantize(model)
    prompt = given["input_ids"][:, :8]
    tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, 14)
    whole = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(tokens[:, :9], whole[:, :9])


def test_calibrated_inputs_have_the_largest_amax_of_the_batches(device) -> None:
    layer = nn.Linear(64, 32, device=device, dtype=BF16)
    exact = copy.deepcopy(layer)
    model = quantize(
        nn.Sequential(layer), batches=[torch.full((4, 64), size, device=device, dtype=BF16) for size in (1, 4, -7, 2)]
    )
    assert layer.input_amax == 7
    x = torch.randn(16, 64, device=device, dtype=BF16)
    x[0, 0] = 7
    assert torch.equal(model(x), fp8_linear(x, exact.weight, exact.bias))
    assert report(model).rows[0].notes.startswith("weight kept in FP8 alone; calibrated scales of inputs")
    larger = x.clone()
    larger[0, 0] = 700
    assert torch.equal(model(larger), model(x))  # it saturates


def test_calibration_takes_what_models_take_and_leaves_their_mode_and_gradients(device) -> None:
    model, given = built("BERT", device)
    model.train()
    twin = copy.deepcopy(model)
    quantize(model, batches=[given, (given["input_ids"],), given["input_ids"]])
    quantize(twin, batches=[given])
    assert model.training
    assert all(module.training for module in model.modules())
    assert all(not layer._forward_pre_hooks for layer in frozen_layers(model))
    for one, other in zip(frozen_layers(model), frozen_layers(twin), strict=True):
        assert torch.equal(one.input_amax, other.input_amax)
    error = model.eval()(**given).logits - twin.eval()(**given).logits
    assert not error.any()


def test_a_layer_that_is_given_its_input_by_name_is_calibrated(device) -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32, device=device, dtype=BF16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(input=x)

    model = quantize(ByName(), batches=[torch.full((4, 32), 3.0, device=device, dtype=BF16)])
    assert model.layer.input_amax == 3


def test_what_no_value_reached_is_not_calibrated_and_what_is_not_finite_is_refused(device) -> None:
    linears = [nn.Linear(32, 32, device=device, dtype=BF16) for _ in range(2)]
    few = torch.ones(4, 32, device=device, dtype=BF16)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(linears)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x) + self.layers[1](x[:0]).sum()

    model = quantize(Experts(), batches=[few])
    assert [layer.input_amax is None for layer in model.layers] == [False, True]
    for value in (torch.inf, torch.nan):
        another = quantize(nn.Sequential(nn.Linear(32, 32, device=device, dtype=BF16)))
        with pytest.raises(ValueError, match="batches gave 0 inputs that are not finite"):
            quantize(another, batches=[few, few * value])
        assert another[0].input_amax is None
    calibrated = quantize(nn.Sequential(nn.Linear(32, 32, device=device, dtype=BF16)), batches=[few])
    with pytest.raises(ValueError, match="given scales already; leave out batches"):
        quantize(calibrated, batches=[few])


def test_a_weight_that_is_computed_stays_in_16_bits() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32))
    x = torch.randn(4, 32)
    expected = model(x)
    quantize(model)
    assert report(model).other[0].notes == "its weight is computed for each forward"
    assert 0 < (model(x) - expected).norm() < 0.1 * expected.norm()


def test_scales_of_the_paper_s_inference(device) -> None:
    """FP8-AMAX: real-time scales, rounded down to powers of two. FP8-CSCALE: one for weights and inputs."""
    layer = nn.Linear(64, 32, device=device, dtype=BF16)
    x = torch.randn(16, 64, device=device, dtype=BF16)
    by_amax = quantize(nn.Sequential(copy.deepcopy(layer)), FP8Config(scaling="amax"))
    assert torch.equal(by_amax(x), fp8_linear(x, layer.weight, layer.bias, FP8Config(scaling="amax")))
    constant = quantize(nn.Sequential(copy.deepcopy(layer)), FP8Config(scaling=Constant(forward_bias=5)))
    assert constant[0].fp8_inverse_scale == 2.0**-5
    assert constant[0].input_amax == 448 * 2.0**-5
    assert torch.equal(constant(100 * x), constant(100 * x.clamp(-0.14, 0.14)))
    rounded = (layer.weight.float() * 2**5).to(formats.E4M3).float() / 2**5
    assert torch.equal(constant[0].weight.float(), rounded)
    assert "constant scales" in report(constant).rows[0].notes
    state = nn.Sequential(layer).state_dict()
    constant.load_state_dict({name: -value for name, value in state.items()})
    assert constant[0].input_amax == 448 * 2.0**-5
    assert torch.equal(constant[0].weight.float(), -rounded)


def test_a_model_that_trained_in_fp8_is_quantized_to_the_weights_it_multiplied_by(device) -> None:
    model, _ = built("LLaMA", device)
    convert_to_fp8(model)
    bytes_of = {
        name: module.fp8_weight.for_call(module.weight, module.fp8_casts, torch.empty(0))
        for name, module in model.named_modules()
        if name.endswith("_proj")
    }
    quantize(model)
    for name, quantized in bytes_of.items():
        module = model.get_submodule(name)
        assert torch.equal(module.quantized.data.view(torch.uint8), quantized.data.view(torch.uint8))


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    def linear() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32))

    with pytest.raises(ValueError, match="of which inference has none"):
        quantize(linear(), FP8Config(scaling="delayed"))
    with pytest.raises(ValueError, match="needs no calibration"):
        quantize(linear(), FP8Config(scaling="constant"), batches=[torch.ones(1, 32)])
    with pytest.raises(ValueError, match="no one amax to calibrate"):
        quantize(linear(), FP8Config(scaling="rowwise"), batches=[torch.ones(1, 32)])
    with pytest.raises(ValueError, match="learns from training steps"):
        quantize(linear(), FP8Config(scaling="smooth-swiglu"))
    with pytest.raises(ValueError, match="at least one batch"):
        quantize(linear(), batches=[])
    with pytest.raises(ValueError, match="it has no linear layers"):
        quantize(nn.Sequential(nn.ReLU()))
