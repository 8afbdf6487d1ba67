"""The families of models that people train, as transformers writes them: converted, fused where known, and trained."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from fp8booster import convert_to_fp8, fuse, report
from fp8booster.nn.convert import WHY_NOT_ROUTERS
from tests.nn.fused.models import INSTALLED, MAJOR, SIZES, build

STEPS = 6
SINCE_5 = ("deepseek_v2", "gpt_oss")


def train(model: nn.Module) -> list[float]:
    """The losses of a few steps on one batch; all gradients are finite."""
    ids = torch.randint(128, (4, 32), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        assert gradients
        assert all(gradient.isfinite().all() for gradient in gradients.values())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_each_version_of_transformers_has_the_families_that_it_is_said_to_have() -> None:
    known = {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    assert known.issuperset(INSTALLED)
    assert set(SIZES) - set(INSTALLED) == (set(SINCE_5) if MAJOR < 5 else set())


@pytest.mark.parametrize("family", INSTALLED)
def test_a_family_is_converted_and_trains_as_in_bf16(family: str) -> None:
    plain = build(family)
    model = convert_to_fp8(copy.deepcopy(plain))
    linear = {name for name, module in plain.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    not_converted = linear - {row.name for row in report(model).fp8}
    assert len(linear) > len(not_converted)
    assert {name.rpartition(".")[2] for name in not_converted} <= {"lm_head", "embed_out", "gate", "router"}
    outside = {row.notes for row in report(model).outside if row.precision != "FP8"}
    assert outside <= {WHY_NOT_ROUTERS}
    assert fuse(model).startswith("2 decoder layers fused")
    losses, right = train(model), train(plain)
    fall = right[0] - right[-1]
    assert fall > 0.04  # Command-R divides its logits by 16
    assert losses == pytest.approx(right, abs=0.04 * fall, rel=0)
