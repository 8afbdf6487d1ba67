"""Adapters on a base that is kept in FP8 alone, under each plugin that takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.nn import FrozenFP8Linear
from fp8booster.nn.quantize import freeze
from fp8booster.training.adapters import load_adapters, with_adapters
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks, shared_folder
from tests.plugins.training import Boosted, assert_close, assert_equal, boost

STEPS = 3
LR = 2e-2


def low_level_zero(stage: int) -> Any:
    from fp8booster.plugins import LowLevelZeroPlugin

    return LowLevelZeroPlugin(stage=stage, precision="bf16", use_fp8=True, fp8_communication=True)


def ddp() -> Any:
    from fp8booster.plugins import TorchDDPPlugin

    return TorchDDPPlugin(use_fp8=True)


def fsdp() -> Any:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from fp8booster.plugins import TorchFSDPPlugin

    return TorchFSDPPlugin(auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), use_fp8=True)


PLUGINS: dict[str, Callable[[], Any]] = {
    "ZeRO 1": lambda: low_level_zero(1),
    "ZeRO 2": lambda: low_level_zero(2),
    "ddp": ddp,
    "fsdp": fsdp,
}


def adapted(rank: int = 8) -> Any:
    """A model in FP8, with adapters in FP32."""
    model = freeze(tiny_llama().bfloat16(), FP8Config())
    torch.manual_seed(1)
    return with_adapters(model, rank, alpha=2 * rank, targets="all-linear")


def batches() -> list[torch.Tensor]:
    """The tokens of each rank, in every step."""
    return [token_batch(7 + rank, 4) for rank in range(dist.get_world_size())]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=tokens, labels=tokens).loss


@functools.cache
def train_alone() -> list[float]:
    """The losses of this rank's tokens where one process trains on those of all, in plain PyTorch."""
    model = convert_to_fp8(adapted()).train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=LR)
    losses = []
    for _ in range(STEPS):
        found = [loss_of(model, tokens) for tokens in batches()]
        torch.stack(found).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found[dist.get_rank()].item())
    return losses


def boosted(name: str, model: nn.Module | None = None, **options: Any) -> Boosted:
    return boost(PLUGINS[name](), adapted() if model is None else model, lr=LR, **options)


def train(run: Boosted, name: str, steps: int = STEPS) -> list[float]:
    losses = []
    for _ in range(steps):
        tokens = batches()[dist.get_rank()]
        loss = loss_of(run.model, tokens) if name == "fsdp" else run.loss(tokens)
        run.booster.backward(loss, run.optimizer)
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def frozen_bytes(model: nn.Module) -> list[torch.Tensor]:
    return [module.fp8_data.clone() for module in model.modules() if isinstance(module, FrozenFP8Linear)]


@ranks(2)
@pytest.mark.parametrize("name", PLUGINS)
def test_adapters_train_on_a_frozen_base_as_in_plain_pytorch(name: str) -> None:
    run = boosted(name, mixed_precision="bf16" if name == "ddp" else None)
    before = frozen_bytes(run.model)
    assert len(before) == 14
    losses = train(run, name)
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.01
    assert_close(train_alone(), losses, 3e-3)
    after = frozen_bytes(run.model)
    assert all(torch.equal(one, other) and one.dtype is torch.uint8 for one, other in zip(before, after, strict=True))


@ranks(2)
@pytest.mark.parametrize("name", [name for name in PLUGINS if name != "fsdp"])
def test_saved_adapters_load_on_a_frozen_base(name: str) -> None:
    run = boosted(name)
    train(run, name)
    folder = shared_folder(f"adapters-{name.replace(' ', '-')}")
    run.booster.save_lora_as_pretrained(run.model, str(folder), use_safetensors=True)
    dist.barrier()
    model = adapted()
    load_adapters(model, folder)
    again = boosted(name, model)
    assert_equal(run.parameters(), again.parameters())
    tokens = batches()[dist.get_rank()]
    assert again.loss(tokens) == run.loss(tokens)
    with pytest.raises(ValueError, match="resume with the --lora options they began with"):
        load_adapters(adapted(rank=4), folder)
