"""A live model's tensors, as engines load them."""

from __future__ import annotations

import copy
import sys
import weakref
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fp8booster
from fp8booster import FP8Config, convert_to_fp8, fuse, quantize
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.scaling import RealTime
from fp8booster.serving import tensors
from fp8booster.serving.formats import CHECKPOINT_FORMATS
from tests.colossal.models import tiny_llama, token_batch
from tests.serving.folders import bits, equal, files

SIZES = {"hidden_size": 128, "intermediate_size": 256}
EXAMPLES = Path(__file__).parents[2] / "examples"


def llama(**options: Any) -> Any:
    return tiny_llama(**SIZES | options).bfloat16()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    tokens = token_batch(seed)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(model: Any, config: FP8Config) -> Any:
    """Convert a model and take two steps, and a forward with the weights that they leave."""
    convert_to_fp8(model, config)
    fuse(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(2):
        step(model, optimizer, seed)
    return model


def load(engine: nn.Module, pairs: Any) -> None:
    """Load layer by layer, as `examples/handover.py` does."""
    for path, layer in groupby(pairs, key=lambda pair: pair[0].rpartition(".")[0]):
        engine.get_submodule(path).load_state_dict({name.rpartition(".")[2]: value for name, value in layer})


def log_probabilities(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(token_batch(9)).logits.float().log_softmax(-1)


def divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.exp() * (one - other)).sum(-1).mean())


@pytest.mark.parametrize("format", [*CHECKPOINT_FORMATS, "bf16"])
def test_they_are_those_of_the_files_that_export_writes(tmp_path, format):
    model = trained(llama(), FP8Config(always=True))
    fp8booster.export(model, tmp_path / "out", format=format, engine_ranks=None)
    pairs = list(tensors(model, format, engine_ranks=None))
    assert equal(dict(pairs), files(tmp_path / "out"))
    # a scale follows its weight, and nothing of another layer comes between
    paths = [name.rpartition(".")[0] for name, _ in pairs]
    assert len({*paths}) == len(list(groupby(paths)))


@pytest.mark.parametrize("when", ["before a step", "after it"])
@pytest.mark.parametrize(
    ("scaling", "format"),
    [
        ("tensorwise", "tensorwise"),
        ("tensorwise", "compressed-tensors-tensorwise"),
        ("rowwise", "compressed-tensors"),
        (RealTime("blockwise", power_of_two=False), "fine-grained"),
    ],
)
def test_the_bytes_are_those_of_the_next_forward(scaling, format, when):
    model = trained(llama(head_dim=128, num_attention_heads=2), FP8Config(scaling=scaling, always=True))
    tokens = token_batch(5)
    if when == "before a step":  # the copies that forward made are there
        model(input_ids=tokens, labels=tokens).loss.backward()
    handed = {name: value.clone() for name, value in tensors(model, format)}
    model(input_ids=tokens, labels=tokens).loss.backward()
    held = {layer: layer.fp8_weight.held for layer in model.modules() if isinstance(layer, FP8Layer)}
    held = {layer: (matrix.data, matrix.inverse_scale) for layer, matrix in held.items() if matrix is not None}
    for merged in merged_layers(model):
        if (matrix := merged.fp8_weight.held) is None:
            continue
        rows = [layer.out_features for layer in merged.layers]
        scales = [matrix.inverse_scale] * len(rows)
        if matrix.inverse_scale.dim() == 2:
            scales = list(matrix.inverse_scale.split([count // 128 for count in rows]))
        held.update(zip(merged.layers, zip(matrix.data.split(rows), scales, strict=True), strict=True))
    assert len(held) == 14
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Layer):
            data, inverse_scale = held[layer]
            assert torch.equal(bits(handed[f"{name}.weight"]), bits(data)), name
            scale = handed[f"{name}.{CHECKPOINT_FORMATS[format].scale_name}"]
            if inverse_scale.dim() == 2:  # padded to whole tiles
                inverse_scale = inverse_scale[:, : scale.shape[1]]
            assert torch.equal(scale.flatten(), inverse_scale.flatten()), name


def test_an_engine_that_gets_them_computes_as_training_does():
    """To the bit, in training and in evaluation; one that gets other scales does not."""
    config = FP8Config(fused=False, always=True)
    policy = llama()
    engine = quantize(copy.deepcopy(policy), config).eval()
    other = copy.deepcopy(engine)
    optimizer = torch.optim.AdamW(convert_to_fp8(policy, config).parameters(), lr=1e-2)
    for seed in range(3):
        assert divergence(log_probabilities(engine), log_probabilities(policy)) > 1e-3 or seed == 0
        load(engine, tensors(policy, "tensorwise"))
        own = log_probabilities(policy)
        assert torch.equal(log_probabilities(engine), own)
        assert torch.equal(log_probabilities(policy.eval()), own)
        step(policy.train(), optimizer, seed)
    load(engine, tensors(policy, "tensorwise"))
    load(other, tensors(policy, "tensorwise", config=FP8Config(scaling="amax")))
    own = log_probabilities(policy)
    assert divergence(log_probabilities(engine), own) == 0 < divergence(log_probabilities(other), own)


def test_an_engine_of_a_fused_model_has_its_bytes_and_differs_by_roundings_alone():
    model = llama()
    engine = quantize(copy.deepcopy(model)).eval()
    trained(model, FP8Config(always=True))
    load(engine, tensors(model, "tensorwise"))
    # rotary embedding and SwiGLU are rounded once where they are fused
    assert divergence(log_probabilities(engine), log_probabilities(model)) < 1e-3


def test_no_copy_of_the_model_is_made():
    """Each weight is freed before the next is cast, and the model holds none after it."""
    model = llama(num_hidden_layers=4)
    optimizer = torch.optim.SGD(trained(model, FP8Config(always=True)).parameters(), lr=0.1)
    step(model, optimizer, 3)
    storages = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    alive: list[weakref.ref] = []
    for name, value in tensors(model, "tensorwise"):
        if value.dtype is torch.float8_e4m3fn:
            alive = [each for each in alive if each() is not None]
            assert len(alive) <= 1, name
            alive.append(weakref.ref(value.untyped_storage()))
        elif value.dtype is torch.bfloat16:  # norms and embeddings lie where the model has them
            assert value.untyped_storage().data_ptr() in storages, name
    held = [layer.fp8_weight.held for layer in model.modules() if isinstance(layer, FP8Layer)]
    held += [merged.fp8_weight.held for merged in merged_layers(model)]
    assert held == [None] * len(held)


def test_wrappers_are_opened():
    model = trained(llama(), FP8Config(always=True))
    expected = dict(tensors(model, "tensorwise"))

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    for wrapped in (Wrapper(model), torch.compile(model), Wrapper(torch.compile(model))):
        assert equal(dict(tensors(wrapped, "tensorwise")), expected)


def test_a_model_that_was_not_converted_is_cast():
    model = llama()
    in_fp8 = [name for name, value in tensors(model, "tensorwise") if value.dtype is torch.float8_e4m3fn]
    assert len(in_fp8) == 14
    chosen = FP8Config(layers=lambda name, module: name.endswith("down_proj"))
    in_fp8 = [name for name, value in tensors(model, "tensorwise", config=chosen) if value.element_size() == 1]
    assert in_fp8 == [f"model.layers.{number}.mlp.down_proj.weight" for number in range(2)]


@pytest.mark.parametrize("base", ["16 bits", "FP8 layers", "frozen"])
@pytest.mark.parametrize("format", ["tensorwise", "bf16"])
def test_adapters_are_merged_in_what_is_handed_over_and_stay_in_the_model(base, format):
    peft = pytest.importorskip("peft")
    model = llama()
    if base == "FP8 layers":
        convert_to_fp8(model, FP8Config(always=True))
        fuse(model)
    elif base == "frozen":
        quantize(model)
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    pairs = list(tensors(adapted, format))
    assert all(torch.equal(bits(value), bits(before[name])) for name, value in adapted.state_dict().items())
    exact = {}
    for name, module in adapted.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            weight = module.get_base_layer().weight.detach().float()
            if base == "frozen":  # decoded without a rounding to 16 bits
                layer = module.get_base_layer()
                weight = layer.quantized.dequantize(*layer.fp8_shape)
            exact[f"{name}.weight"] = weight + module.get_delta_weight("default").float()
    assert len(exact) == 4
    handed = dict(pairs)
    plain = dict(tensors(llama(), format))
    assert list(handed) == list(plain)
    for name, value in exact.items():
        if format == "bf16":
            torch.testing.assert_close(handed[name].float(), value, rtol=2**-8, atol=1e-5)
        else:
            decoded = handed[name].float() * handed[f"{name}_scale_inv"]
            torch.testing.assert_close(decoded, value, rtol=2**-4, atol=float(handed[f"{name}_scale_inv"]) * 2**-9)
    paths = [name.rpartition(".")[0] for name, _ in pairs]
    assert len({*paths}) == len(list(groupby(paths)))


def test_what_cannot_be_handed_over_is_a_sentence():
    """At the call, before anything is yielded."""
    peft = pytest.importorskip("peft")
    model = llama()
    with pytest.raises(ValueError, match="no format 'gguf'; use one of fine-grained"):
        tensors(model, "gguf")
    with pytest.raises(TypeError, match="Linear is no model of transformers"):
        tensors(nn.Linear(16, 16))
    for saved, words in ((["lm_head"], "a copy of lm_head; save the adapters, and export their folder"), (None, None)):
        options = {"target_modules": ["q_proj"], "modules_to_save": saved}
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options))
        if words is not None:
            with pytest.raises(ValueError, match=words):
                tensors(adapted, "tensorwise")
    tied = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["lm_head"])
    with pytest.raises(ValueError, match=r"lm_head\.weight in the model is not one layer's weight"):
        tensors(peft.get_peft_model(llama(tie_word_embeddings=True), tied), "tensorwise")
    merged = adapted.merge_and_unload()
    with torch.no_grad():
        merged.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds values that are not finite"):
        dict(tensors(merged, "tensorwise"))


def test_the_example_hands_over_what_it_trained(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import handover

    sys.modules.pop("handover")
    history = handover.train(steps=6)
    assert [kl for _, kl in history] == [0.0] * 6
    assert history[-1][0] > 0.5 > 10 * history[0][0]
    assert len(Path(handover.__file__).read_text().splitlines()) <= 40


@pytest.mark.parametrize("format", ["tensorwise", "fine-grained"])
def test_transformers_own_fp8_layers_take_them(format):
    """Every tensor under its name and in its shape, and none is missing."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.utils.quantization_config import FineGrainedFP8Config

    if format == "tensorwise" and not transformers.__version__.startswith("5."):
        pytest.skip("transformers 4 has blocks alone")
    policy = trained(llama(head_dim=128), FP8Config(always=True))
    settings = CHECKPOINT_FORMATS[format].settings(["lm_head"])
    theirs = replace_with_fp8_linear(
        tiny_llama(**SIZES, head_dim=128).bfloat16(),
        modules_to_not_convert=["lm_head"],
        quantization_config=FineGrainedFP8Config(**settings),
    )
    handed = dict(tensors(policy, format))
    theirs.load_state_dict(handed, assign=True)  # strict: they are made without memory
    assert equal(dict(theirs.state_dict()), handed)
