"""`examples/trainer.py`: it learns, saves what transformers loads, and resumes."""

from __future__ import annotations

import shutil
import sys

import pytest
from accelerate.state import AcceleratorState
from transformers import LlamaForCausalLM, Trainer

from fp8booster import report
from tests.examples.example_ranks import EXAMPLES


def losses_of(trainer: Trainer) -> list[float]:
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def test_the_trainer_learns_saves_and_resumes_in_fp8(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    file = EXAMPLES / "trainer.py"
    assert len(file.read_text().splitlines()) <= 40
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    import trainer

    sys.modules.pop("trainer")
    AcceleratorState._reset_state(reset_partial_state=True)
    done = trainer.train(str(file.parent / "README.md"))
    losses = losses_of(done)
    assert len(losses) == trainer.STEPS
    assert losses[-1] < 0.8 * losses[0]
    assert len(report(done.model).fp8) == 14
    assert LlamaForCausalLM.from_pretrained("trained").config.vocab_size == 256

    shutil.rmtree(f"checkpoints/checkpoint-{trainer.STEPS}")
    resumed = trainer.train(str(file.parent / "README.md"), resume=True)
    assert losses_of(resumed) == losses
