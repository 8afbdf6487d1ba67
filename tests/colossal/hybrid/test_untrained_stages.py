"""ZeRO in a pipeline whose stages do not all train: a stage holds nothing of the optimizer, or of its first group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from fp8booster import FP8Config
from tests.colossal.hybrid.runs import HybridRun, fp8, learn, native, sizes, start
from tests.colossal.hybrid.test_checkpoints import load, save
from tests.colossal.models import tiny_llama
from tests.colossal.moe.models import tiny_mixtral
from tests.distributed import ranks
from tests.plugins.training import assert_close, assert_equal

# colossalai, which takes seconds to import, is imported on the ranks alone
if TYPE_CHECKING:
    from fp8booster.plugins import MoeHybridParallelPlugin

QUICK = FP8Config(emulate=True)
"""The same roundings; CPUs without FP8 products take milliseconds for each of the others."""

TRAINED = {"first stage": "embed_tokens", "last stage": "lm_head"}
"""The one layer that trains; each is on that stage alone."""


def moe(mode: dict[str, Any], **arguments: Any) -> MoeHybridParallelPlugin:
    from fp8booster.plugins import MoeHybridParallelPlugin

    sizes = {"tp_size": 1, "ep_size": 1, "precision": "bf16", "num_microbatches": 4}
    return MoeHybridParallelPlugin(**sizes | mode | arguments, use_fp8=True)


MAKERS: dict[str, tuple[Callable[..., Any], Callable[..., nn.Module], dict[str, Any]]] = {
    "Colossal-AI's": (native, tiny_llama, {}),
    "HybridParallel": (fp8, tiny_llama, {"fp8_config": QUICK}),
    "MoE": (moe, tiny_mixtral, {"fp8_config": QUICK}),
}


def in_groups(model: nn.Module, names: tuple[str, ...], trained: list[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """AdamW over a group for each layer in `names`, and one for what else is trained, each of half the rate before."""
    named = [[value for name, value in model.named_parameters() if each in name.split(".")] for each in names]
    first = {id(value) for group in named for value in group}
    rest = [value for value in trained if id(value) not in first]
    groups = [group for group in (*named, rest) if group]
    return torch.optim.AdamW([{"params": group, "lr": lr / 2**place} for place, group in enumerate(groups)])


def run(which: str, zero_stage: int, *, trained: str | None = None, first: tuple[str, ...] = ()) -> HybridRun:
    """Boost a model over two stages, of which `trained` alone trains; `first` are in groups of their own."""
    plugin, make, options = MAKERS[which]
    model = make(**sizes())
    if trained is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name.split("."))
    mode = {"pp_size": 2, "pp_style": "1f1b", "zero_stage": zero_stage}
    return start(plugin(mode, max_norm=1.0, **options), model, lr=1e-2, optimizer=partial(in_groups, model, first))


@ranks(2)
@pytest.mark.parametrize("which", MAKERS)
@pytest.mark.parametrize("place", TRAINED)
def test_a_stage_that_trains_nothing_trains_as_without_zero(place: str, which: str) -> None:
    expected, found = (run(which, stage, trained=TRAINED[place]) for stage in (0, 1))
    stage = found.booster.plugin.stage_manager
    trains = stage.is_first_stage() if place == "first stage" else stage.is_last_stage()
    assert [len(group["params"]) for group in found.optimizer.param_groups] == [int(trains)]
    before = found.parameters()
    losses = learn(found)
    assert_close(learn(expected), losses, 1e-3, gradients=False)
    assert losses[-1] < losses[0]
    changed = [name for name, value in found.parameters().items() if not torch.equal(value, before[name])]
    assert [name.split(".")[-2] for name in changed] == ([TRAINED[place]] if trains else [])


@ranks(2)
@pytest.mark.parametrize("first", [("lm_head",), ("embed_tokens", "lm_head")])
def test_groups_of_which_a_stage_holds_nothing_keep_their_places(first: tuple[str, ...]) -> None:
    """Rates go by group."""
    expected, found = (run("HybridParallel", stage, first=first) for stage in (0, 1))
    held = {name.split(".")[-2] for name in found.parameters()}
    groups = found.optimizer.param_groups
    assert [len(group["params"]) for group in groups[:-1]] == [int(name in held) for name in first]
    assert sum(len(group["params"]) for group in groups) == len(found.parameters())
    assert [group["lr"] for group in groups] == [0.01 / 2**place for place in range(len(first) + 1)]
    assert_close(learn(expected), learn(found), 1e-2)


@ranks(2)
@pytest.mark.parametrize("form", ["shards", "one file"])
def test_a_stage_that_trains_nothing_is_saved_and_loaded(form: str) -> None:
    writer, fresh, used = (run("HybridParallel", 1, trained="lm_head") for _ in range(3))
    learn(writer)
    learn(used, last=1)  # has states that loading must replace
    written = save(writer, form, f"untrained {form}")
    for each in (fresh, used):
        load(each, *written)
    losses = [learn(each, 3, 6) for each in (writer, fresh, used)]
    assert losses[1] == losses[2]
    assert_close(losses[0], losses[1], 1e-2, gradients=False)
    assert_equal(fresh.parameters(), used.parameters())
