"""Adapters of peft on a base that is frozen in FP8, by the Trainer."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments, set_seed

from fp8booster import FP8Config, comm, quantize
from fp8booster.hf import FP8Callback, prepare
from fp8booster.nn import FP8Layer, FrozenFP8Linear
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.nn.weights.source import CachedWeight
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks, shared_folder
from tests.hf.test_fsdp import shard_on_cpus
from tests.hf.ways import ALWAYS, EVALUATED, SAVED, STEPS, TRAINED, Run, arguments, run_trainer

LORA = {"task_type": "CAUSAL_LM", "r": 8, "target_modules": "all-linear"}


def base() -> torch.nn.Module:
    return tiny_llama().bfloat16()


def train(folder: Path, model: torch.nn.Module, callbacks: list[FP8Callback], resume: bool = False) -> Run:
    AcceleratorState._reset_state(reset_partial_state=True)
    set_seed(0)
    trainer = Trainer(
        peft.get_peft_model(model, peft.LoraConfig(**LORA)),
        arguments(TrainingArguments, folder, learning_rate=3e-2, label_names=["labels"]),
        train_dataset=TRAINED,
        eval_dataset=EVALUATED,
        callbacks=callbacks,
    )
    return run_trainer(trainer, folder, resume)


def frozen(folder: Path, resume: bool = False) -> Run:
    return train(folder, quantize(base(), ALWAYS), [FP8Callback(FP8Config())], resume)


def test_adapters_learn_on_a_frozen_base_and_resume(tmp_path: Path) -> None:
    ours = frozen(tmp_path / "fp8")
    native = train(tmp_path / "bf16", base(), [])
    assert len(ours.losses) == STEPS
    assert ours.losses[-1] < 0.97 * ours.losses[0]
    assert ours.losses != native.losses
    worst = max(abs(one - other) / other for one, other in zip(ours.losses, native.losses, strict=True))
    assert worst < 0.02
    layers = [module for module in ours.model.modules() if isinstance(module, FrozenFP8Linear)]
    assert len(layers) == 14
    untrained = [module for module in quantize(base(), ALWAYS).modules() if isinstance(module, FrozenFP8Linear)]
    assert all(torch.equal(one.weight, other.weight) for one, other in zip(layers, untrained, strict=True))

    resumed = frozen(tmp_path / "fp8", resume=True)
    assert resumed.losses == ours.losses[SAVED:]
    assert resumed.evaluation == ours.evaluation


def test_peft_loads_the_adapters_that_it_saves(tmp_path: Path) -> None:
    ours = frozen(tmp_path)
    native = peft.PeftModel.from_pretrained(base(), ours.last)
    trained = {name: each for name, each in ours.model.named_parameters() if "lora" in name}
    loaded = {name: each for name, each in native.named_parameters() if "lora" in name}
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(each, loaded[name]) for name, each in trained.items())
    assert all(each.any() for name, each in trained.items() if "lora_B" in name)


@ranks(2)
def test_gradients_of_adapters_are_sent_in_fp8() -> None:
    folder = shared_folder("adapters")
    native = train(folder / "bf16", base(), [])
    ours = frozen(folder / "fp8")
    assert ours.losses == pytest.approx(native.losses, rel=0.03)
    sent = comm.statistics()["all_reduce"]
    assert sent.calls == STEPS
    assert sent.raw_bytes == 4 * STEPS * sum(each.numel() for each in ours.model.parameters() if each.requires_grad)
    assert not sent.uncompressed


@ranks(2)
@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_adapters_may_come_before_or_after_the_model_is_prepared(engine: str) -> None:
    losses, sent = [], []
    for first in ("adapters", "prepare"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if engine == "FSDP2":
                shard_on_cpus(monkeypatch)
            AcceleratorState._reset_state(reset_partial_state=True)
            accelerator = Accelerator(mixed_precision="bf16", cpu=True)
            model, adapters = tiny_llama(), peft.LoraConfig(**LORA, init_lora_weights="gaussian")
            if first == "adapters":
                model = prepare(peft.get_peft_model(model, adapters), ALWAYS, accelerator=accelerator)
            else:  # peft calls the model past its hooks
                model = peft.get_peft_model(prepare(model, ALWAYS, accelerator=accelerator), adapters)
            optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2)
            model, optimizer = accelerator.prepare(model, optimizer)
            comm.reset_statistics()
            for _ in range(3):
                loss = model(input_ids=token_batch(0), labels=token_batch(0)).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
        sent.append({name: row.ratio < 0.7 for name, row in comm.statistics().rows.items()})
        weights = {type(each.fp8_weight) for each in model.modules() if isinstance(each, FP8Layer)}
        assert weights == {ReshardedWeight if engine == "FSDP2" else CachedWeight}
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert sent[0] == sent[1]
    assert all(sent[0].values())
    assert set(sent[0]) == ({"all_reduce"} if engine == "DDP" else {"parameter gather", "reduce_scatter_tensor"})
