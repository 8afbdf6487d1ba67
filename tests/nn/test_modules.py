from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, report
from fp8booster.nn.convert import LEFT_OUT
from fp8booster.nn.modules import change_class, class_without, mixed_class, remixed, repeated_layers, unmixed
from tests.nn.models import tiny_llama

TRANSFORMERS_5 = transformers.__version__.startswith("5.")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
EMBEDDING = {"embedding_size": 64}
DISTILBERT = {"vocab_size": 128, "dim": 64, "hidden_dim": 160, "n_layers": 1, "n_heads": 4}
WHISPER = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_mel_bins": 16,
    "pad_token_id": 0,
}
MUSICGEN = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
VIT = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}

CLASSES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "BertForMaskedLM": ("BertConfig", SIZES, {"cls.predictions.decoder"}),
    "BertForPreTraining": ("BertConfig", SIZES, {"cls.predictions.decoder"}),
    "RobertaForMaskedLM": ("RobertaConfig", SIZES, {"lm_head.decoder"}),
    "ElectraForMaskedLM": ("ElectraConfig", SIZES | EMBEDDING, {"generator_lm_head"}),
    "DistilBertForMaskedLM": ("DistilBertConfig", DISTILBERT, {"vocab_projector"}),
    "AlbertForMaskedLM": ("AlbertConfig", SIZES | EMBEDDING, {"predictions.decoder"}),
    "ModernBertForMaskedLM": ("ModernBertConfig", SIZES | {"pad_token_id": 0}, {"decoder"}),
    "WhisperForConditionalGeneration": ("WhisperConfig", WHISPER, {"proj_out"}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SIZES, {"lm_head" if TRANSFORMERS_5 else "embed_out"}),
    "MptForCausalLM": ("MptConfig", {"vocab_size": 128, "d_model": 64, "n_heads": 4, "n_layers": 1}, {"lm_head"}),
    "MusicgenForCausalLM": ("MusicgenDecoderConfig", MUSICGEN, {f"lm_heads.{n}" for n in range(4)}),
    "BertForSequenceClassification": ("BertConfig", SIZES | {"num_labels": 16}, set()),
    "ViTForImageClassification": ("ViTConfig", VIT | {"num_labels": 16}, set()),
}
"""By class: its configuration's class and arguments, and its vocabulary heads."""


class Wrapper(nn.Module):
    """Around a model, as DDP is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def left_out(model: nn.Module) -> set[str]:
    """The layers that the report says were left out by choice."""
    return {row.name for row in report(model).other if row.notes == LEFT_OUT}


def tiny_bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


@pytest.mark.parametrize("name", CLASSES)
def test_the_head_that_a_model_names_is_left_out_by_default(name) -> None:
    config, arguments, heads = CLASSES[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**arguments))
    convert_to_fp8(model)
    assert left_out(model) == heads
    # what else stays is too small, as the two outputs that tell whether a sentence follows
    others = {row.name for row in report(model).other} - heads
    assert others <= {"cls.seq_relationship"}


def test_a_wrapped_model_is_asked_too() -> None:
    model = Wrapper(Wrapper(tiny_bert()))
    convert_to_fp8(model)
    assert left_out(model) == {"module.module.cls.predictions.decoder"}


def test_a_head_that_took_the_place_of_another_is_left_out() -> None:
    model = tiny_bert()
    model.cls.predictions.decoder = nn.Linear(64, 256)  # as sharding does
    convert_to_fp8(model)
    assert left_out(model) == {"cls.predictions.decoder"}


def test_adapters_of_a_head_are_a_part_of_it() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "lm_head"])
    model = convert_to_fp8(peft.get_peft_model(tiny_llama(), config))
    parts = ("base_layer", "lora_A.default", "lora_B.default")
    assert left_out(model) == {f"base_model.model.lm_head.{part}" for part in parts}


def test_a_model_without_the_head_that_its_class_has_is_converted() -> None:
    model = tiny_bert()
    del model.cls
    convert_to_fp8(model)
    assert report(model).fp8
    assert not report(model).other


class Another(nn.Sequential):
    """Has a method of the name with another meaning, or none."""

    def get_output_embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens)


class Abstract(nn.Sequential):
    def get_output_embeddings(self) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Another, Abstract])
def test_a_method_of_another_meaning_names_no_head(kind) -> None:
    assert not report(convert_to_fp8(kind(nn.Linear(64, 64)))).other


def test_a_head_is_asked_for_by_itself() -> None:
    model = convert_to_fp8(tiny_bert(), FP8Config(vocabulary_head=True))
    assert not report(model).other
    convert_to_fp8(model, FP8Config(vocabulary_head=True, layers=lambda name, module: False))
    assert [row.name for row in report(model).fp8] == ["cls.predictions.decoder"]
    named = convert_to_fp8(nn.ModuleDict({"lm_head": nn.Linear(64, 64)}), FP8Config(vocabulary_head=True))
    assert report(named).head_in_fp8


def test_a_choice_of_layers_is_asked_alone() -> None:
    model = convert_to_fp8(tiny_bert(), FP8Config(layers=lambda name, module: True))
    assert type(model.cls.predictions.decoder) is FP8Linear
    convert_to_fp8(model)
    assert type(model.cls.predictions.decoder) is nn.Linear
    # tied to the embedding, which keeps values that FP8 does not have
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_the_head_left_out_runs_no_product_in_fp8(device, products) -> None:
    model = convert_to_fp8(tiny_bert()).to(device)
    model(input_ids=torch.randint(0, 128, (2, 32), device=device))
    assert len(products) == len(report(model).fp8) == 7


class Louder(nn.Module):
    name_prefix = "Louder"

    @classmethod
    def members_before(cls, original: type[nn.Module]) -> dict[str, Any]:
        return {"original": original}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Quieter(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class Shy(nn.Linear):
    """Pickled without what it would not show."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "secret"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_module_of_mixed_classes_is_copied_and_pickled_as_its_own_class_is(copied) -> None:
    module, x = Shy(4, 4), torch.ones(1, 4)
    right = module(x)
    module.secret = 1
    of_two = mixed_class(Quieter, mixed_class(Louder, Shy))
    assert change_class(module, of_two) is module
    assert (of_two.__name__, of_two.__module__, of_two.original) == ("LouderShy", __name__, Shy)
    other = copied(module)
    assert type(other) is of_two is mixed_class(Quieter, mixed_class(Louder, Shy))
    assert torch.equal(other(x), right)
    assert not hasattr(other, "secret")


def test_a_mixin_is_taken_out_of_a_class_again() -> None:
    of_two = mixed_class(Quieter, mixed_class(Louder, Shy))
    assert class_without(Quieter, of_two) is mixed_class(Louder, Shy)
    assert class_without(Louder, of_two) is mixed_class(Quieter, Shy)
    assert class_without(Louder, Shy) is Shy
    assert class_without(nn.Module, of_two) is unmixed(of_two) is unmixed(Shy) is Shy


def test_another_class_is_put_behind_mixins() -> None:
    of_two = mixed_class(Quieter, mixed_class(Louder, Shy))
    assert remixed(of_two, FP8Linear) is mixed_class(Quieter, mixed_class(Louder, FP8Linear))
    assert remixed(Shy, FP8Linear) is FP8Linear


def test_a_class_whose_forward_was_replaced_is_mixed_anew(monkeypatch) -> None:
    before = mixed_class(Louder, Shy)
    monkeypatch.setattr(Shy, "forward", lambda self, x: x)
    assert mixed_class(Louder, Shy) is not before


def test_the_layers_that_a_stage_of_a_pipeline_holds_are_repeated_ones() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3))
    for other in layers[1:]:
        other[0].weight = other[0].bias = None
    assert repeated_layers(nn.ModuleDict({"layers": layers})) == [layers[0]]


@pytest.mark.parametrize(
    "members", [[nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)], [nn.ReLU(), nn.ReLU()], [nn.Linear(2, 2)], []]
)
def test_what_is_no_list_of_layers_has_no_repeated_ones(members: list[nn.Module]) -> None:
    assert repeated_layers(nn.ModuleDict({"layers": nn.ModuleList(members)})) == []
