from __future__ import annotations

from dataclasses import replace

import pytest

from fp8booster import Encoding, FP8Config, WeightCopies
from fp8booster.engine import DDP, FSDP

ASKED = FP8Config(
    always=False,
    weight_copies=WeightCopies(high_precision=False, transposes=True),
    messages=Encoding(block_size=128, automatic_scaling=True),
    gradient_accumulation="8-bit",
    cuda_graphs=True,
)


def test_options_without_effect_have_their_defaults_and_others_stay() -> None:
    with pytest.warns(UserWarning, match="has no effect") as warned:
        used = FSDP.used_with_warnings(ASKED, stacklevel=1)
    named = [str(each.message).partition("=")[0] for each in warned]
    assert named == [
        "config.weight_copies.high_precision",
        "config.weight_copies.transposes",
        "config.messages.automatic_scaling",
        "config.gradient_accumulation",
    ]
    assert used == FP8Config(messages=Encoding(block_size=128), cuda_graphs=True)
    assert DDP.used(ASKED) == replace(used, weight_copies=WeightCopies(transposes=True))
    assert FSDP.no_effect(used) == []
    # without it small layers compute in 16 bits where that is faster
    assert ASKED.keeps_high_precision is False
    assert used.keeps_high_precision is True


def test_messages_and_graphs_that_an_engine_does_not_use() -> None:
    engine = replace(DDP, messages="nothing is sent", cuda_graphs="layers are gathered one by one")
    found = engine.used(replace(ASKED, weight_copies=WeightCopies()))
    assert found == FP8Config()
    assert engine.used(replace(found, messages=None)) == FP8Config()
    assert engine.used(replace(found, cuda_graphs=False)).cuda_graphs is False
