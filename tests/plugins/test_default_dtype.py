"""Engines train to the same bits under every default dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.comm import Encoding
from fp8booster.optim import AdamW
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks
from tests.plugins.training import boost, rank_batches

CONFIG = FP8Config(emulate=True, always=True)
DTYPES = (torch.float16, torch.bfloat16, torch.float64)


def engine(name: str) -> Any:
    """A plugin with FP8 everywhere that clips gradients where it can."""
    from fp8booster import plugins

    arguments: dict[str, Any] = {"use_fp8": True, "fp8_config": CONFIG}
    if name == "low_level_zero":
        return plugins.LowLevelZeroPlugin(precision="bf16", stage=2, max_norm=0.1, **arguments)
    if name == "automatic":
        config = FP8Config(emulate=True, messages=Encoding(automatic_scaling=True))
        return plugins.LowLevelZeroPlugin(precision="bf16", max_norm=0.1, use_fp8=True, fp8_config=config)
    if name == "gemini":
        return plugins.GeminiPlugin(precision="bf16", max_norm=0.1, **arguments)
    if name.startswith("tp2"):
        stage = {"tp2": 0, "tp2 zero": 1}[name]
        return plugins.HybridParallelPlugin(
            tp_size=2, pp_size=1, zero_stage=stage, precision="bf16", max_norm=0.1, **arguments
        )
    return {"ddp": plugins.TorchDDPPlugin, "fsdp": plugins.TorchFSDPPlugin}[name](**arguments)


def under(dtype: torch.dtype, work: Callable[[], Any]) -> Any:
    """What work gives under a default dtype."""
    torch.set_default_dtype(dtype)
    try:
        return work()
    finally:
        torch.set_default_dtype(torch.float32)


PLAIN = {
    "real-time": {},
    "powers of two": {"scaling": "amax"},
    "rowwise": {"scaling": "rowwise"},
    "delayed": {"scaling": "delayed"},
    "constant": {"scaling": "constant"},
    "smooth SwiGLU": {"scaling": "smooth-swiglu"},
    "unfused": {"fused": False},
}


@pytest.mark.parametrize("case", PLAIN)
def test_a_plain_model_trains_to_the_same_bits(case: str) -> None:
    options = PLAIN[case]

    def trained(model: torch.nn.Module) -> tuple[list[float], list[torch.Tensor]]:
        model = convert_to_fp8(model, FP8Config(emulate=True, always=True, **options)).train()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        losses = []
        for seed in range(3):
            tokens = token_batch(seed)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step(div_scale=2.0)
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [parameter.detach().clone() for parameter in model.parameters()]

    right = trained(tiny_llama().bfloat16())
    for dtype in DTYPES:
        model = tiny_llama().bfloat16()
        losses, parameters = under(dtype, lambda model=model: trained(model))
        assert losses == right[0], dtype
        assert all(map(torch.equal, right[1], parameters)), dtype


@ranks(2)
@pytest.mark.parametrize("name", ["low_level_zero", "automatic", "tp2", "tp2 zero", "gemini", "ddp", "fsdp"])
def test_an_engine_trains_to_the_same_bits(name: str) -> None:
    batches = rank_batches(2) if not name.startswith("tp2") else [token_batch(seed) for seed in range(2)]

    def trained(model: torch.nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
        run = boost(engine(name), model, lr=1e-2, optimizer=AdamW if name != "gemini" else torch.optim.Adam)
        losses = [loss for tokens in batches for loss in run.step(tokens)]
        return losses, {} if name == "gemini" else run.parameters()

    right = trained(tiny_llama())
    assert right[0][0] != right[0][1]
    for dtype in DTYPES:
        model = tiny_llama()
        losses, parameters = under(dtype, lambda model=model: trained(model))
        assert losses == right[0], dtype
        for name_of, value in right[1].items():
            assert torch.equal(value, parameters[name_of]), (dtype, name_of)
