from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fp8booster.cli.train.options import TrainOptions


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("precision", "fp16", "--precision is 'fp16'; it must be one of bf16, fp8, compare"),
        ("steps", 0, "--steps is 0; it must be at least 1"),
        ("sequence", 1, "--sequence is 1; it must be at least 2"),
        ("lr", 0.0, "--lr is 0.0; it must be finite and above 0"),
        ("lr", float("inf"), "--lr is inf; it must be finite"),
        ("weight_decay", float("inf"), "--weight-decay is inf; it must be finite"),
        ("seed", -1, "--seed is -1; it must be at least 0, and at most 4294967295"),
        ("vocabulary", 100, "--vocabulary is 100; it must be at least 272"),
        ("max_norm", -1.0, "--max-norm is -1.0; it must be at least 0"),
        ("level", "O4", "--level is 'O4'; it must be one of O1, O2, O3, lean"),
        ("optimizer", "sgd", "--optimizer is 'sgd'; it must be one of adamw, adamw-8bit"),
        ("progress", "loud", "--progress is 'loud'; it must be one of auto, bar, lines, none"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(field, value, says):
    with pytest.raises(ValueError, match=says):
        TrainOptions(**{field: value})


def test_a_floor_above_the_peak_is_refused():
    with pytest.raises(ValueError, match=r"--min-lr is 0\.1, above --lr 0\.01"):
        TrainOptions(lr=0.01, min_lr=0.1)


def test_checkpointed_layers_are_those_of_a_whole_model():
    assert TrainOptions(checkpointing=True).recomputed is True
    assert TrainOptions(checkpointing=True, checkpointed_layers=3).recomputed == 3
    assert TrainOptions().recomputed is False
    for others in ({}, {"checkpointing": True, "plugin": "hybrid", "pp": 2, "accumulate": 2}):
        with pytest.raises(ValueError, match="--checkpointed-layers 3 takes --checkpointing, and all layers on one"):
            TrainOptions(checkpointed_layers=3, **others)


def test_options_survive_json():
    options = TrainOptions(model="1b", plugin_options=("verbose=True",), fp8_options=("scaling=amax",), lr=1e-3)
    assert TrainOptions.from_file(json.loads(json.dumps(dataclasses.asdict(options))), Path("run.json"), "") == options


def test_a_level_has_an_optimizer_for_fp8_alone():
    assert [TrainOptions(level="O2").optimizer_of(precision) for precision in ("bf16", "fp8")] == [
        "adamw",
        "adamw-8bit",
    ]
    assert TrainOptions(level="O1").optimizer_of("fp8") == TrainOptions().optimizer_of("fp8") == "adamw"
    assert TrainOptions(level="O2", optimizer="adamw").optimizer_of("fp8") == "adamw"
    assert TrainOptions(optimizer="adamw-8bit").optimizer_of("bf16") == "adamw-8bit"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"level": "O1"}, "--level O1 is of runs in FP8; give --precision fp8 or compare"),
        ({"fp8_options": ("always=true",)}, "--fp8-option always=true is of runs in FP8"),
        ({"record": 5}, "--record 5 is of runs in FP8"),
    ],
)
def test_what_runs_in_fp8_alone_read_is_refused_without_one(options, says):
    with pytest.raises(ValueError, match=says):
        TrainOptions(precision="bf16", **options)
    of_both = TrainOptions(**options)
    assert of_both.of_precision("bf16") == TrainOptions(precision="bf16")
    assert of_both.of_precision("fp8") == TrainOptions(precision="fp8", **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"level": "O1"}, {"optimizer": "adamw-8bit", "plugin": "fsdp"}, {"level": "O3", "optimizer": "adamw"}],
)
def test_codes_are_saved_only_where_there_are_some(options):
    with pytest.raises(
        ValueError, match="give --optimizer adamw-8bit or a --level with it, and --plugin low_level_zero"
    ):
        TrainOptions(save_codes=True, **options)
    compared = TrainOptions(level="O2", save_codes=True)
    assert [compared.saves_codes(precision) for precision in ("bf16", "fp8")] == [False, True]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lora": 0}, "--lora is 0; it must be at least 1"),
        ({"lora_alpha": 8.0}, "--lora-alpha is about adapters; give their rank as --lora"),
        ({"lora_targets": "q_proj"}, "--lora-targets is about adapters; give their rank as --lora"),
        ({"lora": 8, "plugin": "gemini"}, "does not train with --plugin gemini; give --plugin low_level_zero or ddp"),
        ({"lora": 8, "plugin": "fsdp"}, "give --lora with --precision fp8, where what is frozen stays whole"),
    ],
)
def test_adapters_are_refused_where_they_do_not_go(options, says):
    with pytest.raises(ValueError, match=says):
        TrainOptions(**options)
    assert TrainOptions(lora=8, plugin="fsdp", precision="fp8").lora == 8


def test_documents_are_packed_where_attention_is_fused():
    with pytest.raises(ValueError, match="have with --plugin low_level_zero and ddp alone; give one of them"):
        TrainOptions(packing=True, plugin="fsdp")
    assert TrainOptions(packing=True, plugin="fsdp", precision="fp8").packing
    assert TrainOptions(packing=True, plugin="ddp").packing


@pytest.mark.parametrize(
    "field", ["steps", "batch", "accumulate", "sequence", "vocabulary", "nproc", "tp", "pp", "sp", "lora", "warmup"]
)
def test_counts_have_an_upper_bound(field):
    with pytest.raises(ValueError, match=f"--{field} is 1000000000000000; it must be at least .*, and at most"):
        TrainOptions(**{field: 10**15})
