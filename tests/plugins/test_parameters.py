"""A model with parameters that an engine cannot train is refused in a sentence, on every rank, before it is boosted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.distributed import ranks

# colossalai, which takes seconds to import, is imported on the ranks alone
if TYPE_CHECKING:
    from fp8booster.plugins.fp8_plugin import FP8Plugin


class Odd(nn.Module):
    """A layer for FP8, and what the case adds."""

    def __init__(self, sparse: bool = False, **parts: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64, sparse=sparse)
        self.layer = nn.Linear(64, 64)
        for name, part in parts.items():
            setattr(self, name, part)


def _empty() -> nn.Parameter:
    return nn.Parameter(torch.zeros(0, 4, dtype=torch.float32))


def _transposed() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 8, dtype=torch.float32).t())


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "empty": (lambda: Odd(extra=_empty()), "have no values.*: extra$"),
    "channels last": (
        lambda: Odd(conv=nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)),
        "not contiguous.*: conv.weight$",
    ),
    "transposed": (lambda: Odd(extra=_transposed()), "not contiguous.*: extra$"),
    "complex": (lambda: Odd(extra=nn.Parameter(torch.ones(4, dtype=torch.complex64))), "are complex.*: extra$"),
    "sparse": (lambda: Odd(sparse=True), "sparse gradients.*: embedding$"),
}


def check(model: nn.Module, *, in_buffers: bool, sparse: bool) -> None:
    from fp8booster.plugins.fp8_plugin import require_parameters

    require_parameters(model, in_buffers=in_buffers, sparse=sparse)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_in_buffers_is_named(case: str) -> None:
    make, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        check(make(), in_buffers=True, sparse=False)


@pytest.mark.parametrize("case", ["empty", "channels last", "transposed", "sparse"])
def test_an_engine_that_can_train_it_is_given_it(case: str) -> None:
    check(REFUSED[case][0](), in_buffers=False, sparse=True)


def test_what_is_not_trained_may_lie_anyhow() -> None:
    model = Odd(extra=_empty().requires_grad_(False), other=_transposed().requires_grad_(False), sparse=True)
    model.embedding.requires_grad_(False)
    check(model, in_buffers=True, sparse=False)
    check(Odd(extra=nn.Parameter(torch.tensor(1.0, dtype=torch.float32))), in_buffers=True, sparse=False)


def plugin_called(name: str, **options: Any) -> FP8Plugin:
    from fp8booster import plugins

    whole = {"tp_size": 1, "pp_size": 1, "precision": "bf16"}
    makers: dict[str, Callable[[], FP8Plugin]] = {
        "LowLevelZero": lambda: plugins.LowLevelZeroPlugin(precision="bf16", **options),
        "Gemini": lambda: plugins.GeminiPlugin(precision="bf16", **options),
        "hybrid": lambda: plugins.HybridParallelPlugin(**whole, zero_stage=1, **options),
        "hybrid without ZeRO": lambda: plugins.HybridParallelPlugin(**whole, zero_stage=0, **options),
        "MoE": lambda: plugins.MoeHybridParallelPlugin(**whole, ep_size=1, zero_stage=1, **options),
        "DDP": lambda: plugins.TorchDDPPlugin(**options),
        "FSDP": lambda: plugins.TorchFSDPPlugin(**options),
    }
    return makers[name]()


WHOLE = ("hybrid without ZeRO", "DDP", "FSDP")


@ranks(2)
@pytest.mark.parametrize("name", ["LowLevelZero", "Gemini", "hybrid", "MoE", *WHOLE])
def test_each_plugin_refuses_before_it_boosts(name: str) -> None:
    plugin = plugin_called(name, use_fp8=True)
    assert plugin.engine.in_buffers == (name not in WHOLE)
    for case in ("sparse", "complex") if name in WHOLE else REFUSED:
        make, sentence = REFUSED[case]
        model = make()
        with pytest.raises(ValueError, match=sentence):
            plugin.configure(model, torch.optim.AdamW(model.parameters()))
        assert type(model.layer) is nn.Linear
    del plugin


@ranks(2)
def test_ddp_without_fp8_messages_reduces_sparse_gradients() -> None:
    assert plugin_called("DDP", use_fp8=True, fp8_communication=False).engine.sparse_gradients
    assert not plugin_called("DDP", use_fp8=True).engine.sparse_gradients


def test_a_plugin_that_is_made_too_early_names_the_call_that_comes_first() -> None:
    from fp8booster.plugins import LowLevelZeroPlugin

    with pytest.raises(RuntimeError, match=r"use colossalai\.launch"):
        LowLevelZeroPlugin(precision="bf16", use_fp8=True)
