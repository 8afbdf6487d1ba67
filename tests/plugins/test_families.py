"""Fused families under plugins train as they do without what is fused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fp8booster import FP8Config
from fp8booster.nn.fused import fused_summary
from tests.distributed import ranks
from tests.nn.fused.models import VOCABULARY, build
from tests.plugins.training import boost

PLUGINS: dict[str, dict[str, object]] = {
    "LowLevelZeroPlugin": {"stage": 2, "precision": "bf16"},
    "GeminiPlugin": {"precision": "bf16"},
    "TorchFSDPPlugin": {},
    "TorchDDPPlugin": {},
}
CASES = (
    ("gemma3_text", "LowLevelZeroPlugin"),
    ("gemma3_text", "GeminiPlugin"),
    ("gpt2", "GeminiPlugin"),
    ("gpt2", "TorchFSDPPlugin"),
    ("cohere", "TorchDDPPlugin"),
    ("deepseek_v3", "LowLevelZeroPlugin"),
    ("stablelm", "LowLevelZeroPlugin"),
    ("stablelm", "GeminiPlugin"),
    ("stablelm", "TorchFSDPPlugin"),
)
CHANGES: dict[str, dict[str, object]] = {"stablelm": {"qk_layernorm": True}}
"""Of the small models."""


@ranks(2)
@pytest.mark.parametrize(("family", "plugin"), CASES)
def test_a_fused_family_trains_as_without_what_is_fused(family: str, plugin: str) -> None:
    import fp8booster.plugins

    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, (2, 32), generator=generator)
    losses = []
    for fused in (False, True):
        config = FP8Config(fused=fused, emulate=True)
        made = getattr(fp8booster.plugins, plugin)(use_fp8=True, fp8_config=config, **PLUGINS[plugin])
        boosted = boost(made, build(family, **CHANGES.get(family, {})))
        losses.append([boosted.step(tokens)[0] for _ in range(4)])
        assert fused_summary(boosted.model.unwrap()).startswith("2 decoder layers fused") == fused
    assert losses[1][0] == pytest.approx(losses[0][0], rel=2e-3)
    assert losses[1] == pytest.approx(losses[0], rel=3e-2)
    assert losses[1][-1] < losses[1][0] - 0.05
