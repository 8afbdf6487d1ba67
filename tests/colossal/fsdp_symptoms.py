"""Symptoms without each patch of FSDP that is about more than starting."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8booster.optim import HybridAdam
from tests.colossal.models import tiny_llama, token_batch
from tests.colossal.symptom import Symptom


def _boosted() -> tuple[Any, Any, Any]:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import TorchFSDPPlugin

    booster = Booster(plugin=TorchFSDPPlugin())
    model = tiny_llama()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), 1e-2))
    return booster, model, optimizer


def _clip() -> None:
    booster, model, optimizer = _boosted()
    tokens = token_batch(dist.get_rank())
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    norms = [None, None]
    dist.all_gather_object(norms, float(optimizer.clip_grad_by_norm(1.0)))
    assert norms[0] == norms[1], "each rank clips by a norm of its own"
    optimizer.zero_grad()
    booster.backward(model(input_ids=tokens, labels=tokens).loss * torch.nan, optimizer)
    with pytest.raises(RuntimeError, match=r"cannot be clipped by it|non-finite"):
        optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)


def save() -> None:
    booster, model, _ = _boosted()
    with tempfile.TemporaryDirectory() as folder:
        booster.save_model(model, f"{folder}/model.bin")


def _warm_up() -> None:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import TorchFSDPPlugin

    model = tiny_llama()
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "weight_decay": 0.5}], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    _, optimizer, *_ = Booster(plugin=TorchFSDPPlugin()).boost(model, optimizer, lr_scheduler=schedule)
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.0, "the full learning rate"
    assert (group["weight_decay"], group["initial_lr"]) == (0.5, 1e-2)


def _groups() -> None:
    _warm_up()
    from colossalai.booster import Booster
    from colossalai.booster.plugin import TorchFSDPPlugin

    model = tiny_llama()
    expected = [list(model.model.parameters()), list(model.lm_head.parameters())]
    optimizer = torch.optim.AdamW(
        [{"params": expected[0], "weight_decay": 0.5}, {"params": expected[1], "lr": 0.1}], lr=1e-2
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 + step, lambda step: 0.0])
    booster = Booster(plugin=TorchFSDPPlugin())
    model, optimizer, *_ = booster.boost(model, optimizer, lr_scheduler=schedule)
    head = [name for name, _ in model.named_parameters() if "lm_head" in name]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    tokens = token_batch(dist.get_rank())
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    schedule.step()
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved
    assert not moved.intersection(head)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.02, 0.5), (0.0, 0.01)]


def _load_steps() -> None:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import TorchFSDPPlugin

    def boosted() -> tuple[Booster, Any, Any]:
        model, booster = tiny_llama(), Booster(plugin=TorchFSDPPlugin())
        model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
        return booster, model, optimizer

    booster, model, optimizer = boosted()
    tokens = token_batch(dist.get_rank())
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    booster.save_optimizer(optimizer, f"{folder[0]}/optimizer.bin")
    dist.barrier()
    booster, _, loaded = boosted()
    booster.load_optimizer(loaded, f"{folder[0]}/optimizer.bin")
    (was,), (now,) = optimizer.optim.state.values(), loaded.optim.state.values()
    assert (was["step"], now["step"]) == (1, 1)
    assert torch.equal(was["exp_avg"], now["exp_avg"])


def _split_in_background() -> None:
    from colossalai.checkpoint_io import utils

    state = tiny_llama().state_dict()
    shards = utils.shard_model_checkpoint(state, max_shard_size=1, pinned_state_dicts={})
    assert {name for shard, _ in shards for name in shard} == state.keys()


SYMPTOMS = {
    "fsdp_clips_by_the_whole_norm": Symptom(_clip, "a norm of its own"),
    "fsdp_keeps_parameter_groups": Symptom(_groups, "the full learning rate"),
    "fsdp_loads_counts_of_steps": Symptom(_load_steps, "'int' object has no attribute 'cpu'"),
    "fsdp_shards_are_not_pinned": Symptom(_split_in_background, "pin_memory=True requires"),
}
