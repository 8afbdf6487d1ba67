"""TRL's trainers for preferences and for rewards. `test_ways` has its SFTTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, set_seed

from fp8booster import report
from fp8booster.cli.train.data import train_tokenizer
from fp8booster.hf import FP8Callback
from tests.colossal.models import tiny_llama
from tests.hf.ways import ALWAYS, arguments

trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402

STEPS = 3
PAIRS = [{"prompt": "one two", "chosen": " three", "rejected": " one"}] * (4 * STEPS)


def dpo(model: PreTrainedModel, **common: Any) -> Trainer:
    return trl.DPOTrainer(model, **common)


def grpo(model: PreTrainedModel, **common: Any) -> Trainer:
    def count_letters(completions: list[str], **_: object) -> list[float]:
        return [float(len(set(each))) for each in completions]

    return trl.GRPOTrainer(model, reward_funcs=count_letters, **common)


WAYS = {
    "DPO": (dpo, trl.DPOConfig, {"max_length": 32}, ("prompt", "chosen", "rejected")),
    "GRPO": (grpo, trl.GRPOConfig, {"max_completion_length": 8, "num_generations": 4}, ("prompt",)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_of_trl_trains_in_fp8(way: str, tmp_path: Path) -> None:
    make, kind, options, columns = WAYS[way]
    train_tokenizer(["one two three"], 300, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = tokenizer.eos_token
    tiny_llama(vocab_size=304).save_pretrained(tmp_path)
    losses, trained = [], []
    for callbacks in ([], [FP8Callback(ALWAYS)]):
        AcceleratorState._reset_state(reset_partial_state=True)
        set_seed(0)
        trainer = make(
            AutoModelForCausalLM.from_pretrained(tmp_path),
            args=arguments(kind, tmp_path / "checkpoints", max_steps=STEPS, save_strategy="no", **options),
            train_dataset=Dataset.from_list([{name: pair[name] for name in columns} for pair in PAIRS]),
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        trainer.train()
        losses.append([float(line["loss"]) for line in trainer.state.log_history if "loss" in line])
        trained.append(trainer.model)
    assert {row.name for row in report(trained[1]).other} == {"lm_head"}
    start = tiny_llama(vocab_size=304).state_dict()
    assert all((start[name] != each).any() for name, each in trained[1].named_parameters() if "proj" in name)
    if way == "DPO":  # what GRPO generates depends on every bit
        assert losses[1] == pytest.approx(losses[0], rel=0.02)
        assert losses[1][-1] < losses[1][0]
