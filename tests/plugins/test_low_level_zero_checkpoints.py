"""Checkpoints cross between FP8 and BF16, between this plugin and Colossal-AI's one, and to transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from fp8booster import convert_to_fp8
from tests.colossal.models import tiny_llama
from tests.distributed import ranks, shared_folder
from tests.plugins.training import (
    STAGES,
    Boosted,
    assert_close,
    assert_equal,
    boost,
    fp8,
    native,
    ours,
    rank_batches,
    train,
)

PLUGINS = {"fp8": fp8, "bf16": ours, "native": native}
FORMS = {
    "one file": {},
    "one safetensors file": {"use_safetensors": True},
    "one file in the background": {"use_safetensors": True, "use_async": True},
    "shards": {"shard": True},
    "safetensors shards": {"shard": True, "use_safetensors": True},
    "shards in the background": {"shard": True, "use_safetensors": True, "use_async": True},
}
"""Ways to save a model: the arguments of `save_model`. An optimizer knows no safetensors."""

CROSSINGS = (
    "fp8 to fp8, stage 1",
    "fp8 to fp8, stage 2",
    "fp8 to bf16, stage 2",
    "fp8 to native, stage 1",
    "fp8 to native, stage 2",
    "bf16 to fp8, stage 1",
    "native to fp8, stage 2",
)
SHARD = 0.05
"""MiB: `tiny_llama` makes several shards."""


def save(run: Boosted, form: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Save model and optimizer in a form; returns both paths once the files are whole."""
    ending = "" if form.get("shard") else ".safetensors" if form.get("use_safetensors") else ".bin"
    model = str(folder / f"model{ending}")
    of_optimizer = {name: value for name, value in form.items() if name != "use_safetensors"}
    ending = "" if form.get("shard") else ".safetensors" if form.get("use_async") else ".bin"
    optimizer = str(folder / f"optimizer{ending}")
    run.booster.save_model(run.model, model, size_per_shard=SHARD, **form)
    run.booster.save_optimizer(run.optimizer, optimizer, size_per_shard=SHARD, **of_optimizer)
    run.booster.checkpoint_io._sync_io()
    dist.barrier()
    if form.get("shard") and "fp8" in folder.parts[-2]:
        assert len(list(Path(model).glob("*.safetensors" if form.get("use_safetensors") else "*.bin"))) > 1
    return model, optimizer


def states(run: Boosted) -> dict[str, torch.Tensor]:
    """The optimizer's states, whole."""
    return {
        f"{number}.{name}": value
        for number, values in run.optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


@ranks(2)
@pytest.mark.parametrize("crossing", CROSSINGS)
def test_checkpoints_cross(crossing: str) -> None:
    source, _, rest = crossing.partition(" to ")
    target, stage = rest.split(", stage ")
    writer, reader = (boost(PLUGINS[name](stage=int(stage))) for name in (source, target))
    train(writer, steps=2)
    batch = rank_batches(1)[0]
    expected = writer.parameters()
    loss = _loss_of(target, expected, batch)
    # what crosses does not depend on the form: in every form where both are in FP8, else in one file and in several
    for form_name in FORMS if crossing.startswith("fp8 to fp8") else ("one safetensors file", "shards"):
        model, optimizer = save(writer, FORMS[form_name], shared_folder(f"{crossing}/{form_name}"))
        train(reader, steps=1)  # other weights, and FP8 copies of them
        stale = reader.loss(batch)
        reader.booster.load_model(reader.model, model)
        reader.booster.load_optimizer(reader.optimizer, optimizer)
        assert_equal(expected, reader.parameters())
        assert_equal(states(writer), states(reader))
        assert reader.loss(batch) == loss, form_name
        assert stale != loss
    assert_close([writer.loss(batch).item()], [loss.item()], 1e-2)
    # what was loaded goes on training
    assert_close(train(writer), train(reader), 2e-2)


def _loss_of(plugin: str, weights: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """The loss of these weights in a model that was never boosted."""
    model = tiny_llama().bfloat16().train()
    model.load_state_dict(weights)
    if plugin == "fp8":
        convert_to_fp8(model)
    return model(input_ids=batch, labels=batch).loss


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_loaded_run_goes_on_as_another_that_loads_the_same(stage: int) -> None:
    folder = shared_folder(f"twice {stage}") / "fp8"
    folder.mkdir(exist_ok=True)
    writer = boost(fp8(stage=stage))
    train(writer)
    model, optimizer = save(writer, FORMS["safetensors shards"], folder)
    runs = [boost(fp8(stage=stage)), boost(fp8(stage=stage))]
    train(runs[1])  # has FP8 copies and states that loading must replace
    for run in runs:
        run.booster.load_model(run.model, model)
        run.booster.load_optimizer(run.optimizer, optimizer)
    assert train(runs[0]) == train(runs[1])
    assert_equal(runs[0].parameters(), runs[1].parameters())


@ranks(2)
@pytest.mark.parametrize("form", ["safetensors shards", "one safetensors file"])
def test_keys_are_those_of_the_native_plugin(form: str) -> None:
    found = {}
    for name in ("fp8", "native"):
        folder = shared_folder(f"keys {form}/{name}")
        run = boost(PLUGINS[name]())
        train(run, steps=1)  # an optimizer without states cannot be saved in shards
        model, _ = save(run, FORMS[form], folder)
        files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else [Path(model)]
        found[name] = {key: (value.shape, value.dtype) for file in files for key, value in load_file(file).items()}
    assert found["fp8"] == found["native"]
    assert found["fp8"].keys() == tiny_llama().state_dict().keys()


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_transformers_loads_a_checkpoint_of_an_fp8_run(stage: int) -> None:
    from transformers import AutoModelForCausalLM

    run = boost(fp8(stage=stage))
    train(run)
    model, _ = save(run, FORMS["safetensors shards"], shared_folder(f"transformers {stage}/fp8"))
    loaded, about = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.bfloat16, output_loading_info=True)
    assert not any(about.values()), about
    assert_equal(run.parameters(), dict(loaded.named_parameters()))
    batch = rank_batches(1)[0]
    # transformers keeps the angles of the rotary embedding in FP32
    expected = _loss_of("bf16", run.parameters(), batch)
    assert_close([expected.item()], [loaded(input_ids=batch, labels=batch).loss.item()], 1e-3)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_learning_rate_schedule_is_saved_and_loaded(stage: int) -> None:
    from colossalai.booster import Booster

    path = str(shared_folder(f"schedule {stage}") / "schedule.bin")
    rates = []
    for saved in (True, False):
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        booster = Booster(plugin=fp8(stage=stage))
        model, optimizer, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=schedule)
        if saved:
            for batch in rank_batches(3):
                Boosted(booster, model, optimizer).step(batch)
                schedule.step()
            booster.save_lr_scheduler(schedule, path)
            dist.barrier()
        else:
            booster.load_lr_scheduler(schedule, path)
            assert schedule.last_epoch == 3
        rates.append(schedule.get_last_lr())
    assert rates[0] == rates[1]


@ranks(2)
@pytest.mark.parametrize("_", ["another shape"])
def test_a_checkpoint_of_another_shape_is_refused(_: str) -> None:
    run = boost(fp8())
    other: nn.Module = tiny_llama(hidden_size=32)
    path = shared_folder("shape") / "model.bin"
    if dist.get_rank() == 0:
        torch.save(other.state_dict(), path)
    dist.barrier()
    with pytest.raises(RuntimeError, match="size mismatch"):
        run.booster.load_model(run.model, str(path))
