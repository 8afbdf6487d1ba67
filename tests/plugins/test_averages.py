"""Averages of weights that are swapped in through `.data` for an evaluation, and out again; and weights loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from fp8booster import FP8Config, forget_weights
from fp8booster.config import WeightCopies
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks, shared_folder
from tests.plugins.training import Boosted, boost, rank_batches

CLOSE = 2e-2

ENGINES = (
    "low_level_zero",
    "low_level_zero unfused",
    "low_level_zero, 16 bits on the wire",
    "hybrid ZeRO",
    "TP2 ZeRO",
    "hybrid without ZeRO",
    "ddp",
    "fsdp",
)

WHOLE = ("low_level_zero", "low_level_zero unfused", "low_level_zero, 16 bits on the wire", "hybrid ZeRO", "ddp")
"""Of which each rank holds whole weights."""


def engine(name: str, **options: Any) -> Any:
    """A plugin with FP8 products, and FP8 on the wire unless the name tells otherwise; `options` of its `FP8Config`."""
    from fp8booster import plugins

    config = FP8Config(emulate=True, always=True, fused="unfused" not in name, **options)
    arguments: dict[str, Any] = {"use_fp8": True, "fp8_config": config}
    if name.startswith("low_level_zero"):
        wire = "16 bits" not in name
        return plugins.LowLevelZeroPlugin(precision="bf16", stage=2, fp8_communication=wire, **arguments)
    if name in ("ddp", "fsdp"):
        return {"ddp": plugins.TorchDDPPlugin, "fsdp": plugins.TorchFSDPPlugin}[name](**arguments)
    sizes = {"tp_size": 2 if name.startswith("TP2") else 1, "pp_size": 1, "zero_stage": 0 if "without" in name else 1}
    return plugins.HybridParallelPlugin(precision="bf16", **sizes, **arguments)


@contextmanager
def written(run: Boosted) -> Iterator[list[torch.nn.Parameter]]:
    """The parameters of a model, to be written: FSDP keeps the root's whole after an evaluation, and asks for this."""
    is_sharded = isinstance(run.model.unwrap(), FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(run.model.unwrap()) if is_sharded else nullcontext():
        yield list(run.model.parameters())


def evaluated(run: Boosted, tokens: torch.Tensor) -> float:
    """The loss in evaluation."""
    with torch.no_grad():
        return run.loss(tokens).item()


@ranks(2)
@pytest.mark.parametrize("name", ENGINES)
def test_an_average_that_is_swapped_in_is_evaluated_and_training_goes_on_as_without(name: str) -> None:
    alike = name.startswith("TP2")
    batches = [token_batch(seed) for seed in range(3)] if alike else rank_batches(3)
    swapped, undisturbed = (boost(engine(name), tiny_llama(), lr=1e-2) for _ in range(2))
    for run in (swapped, undisturbed):
        for tokens in batches[:2]:
            run.step(tokens)
    tokens = batches[2]
    undisturbed.model.eval()
    before = evaluated(undisturbed, tokens)
    undisturbed.model.train()
    run = swapped
    with written(run) as parameters:
        kept = [parameter.data.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.data.mul_(-3)
    run.model.eval()
    changed = evaluated(run, tokens)
    if name in WHOLE:
        plain = tiny_llama().bfloat16().eval()
        plain.load_state_dict(run.model.unwrap().state_dict())
        right = plain(input_ids=tokens, labels=tokens).loss.item()
        assert abs(changed - right) < CLOSE * right
        assert abs(before - right) > 2 * CLOSE * right
    run.model.eval()
    assert evaluated(run, tokens) == changed
    forget_weights(run.model)
    assert evaluated(run, tokens) == pytest.approx(changed, rel=CLOSE) != before
    run.model.eval()
    with written(run) as parameters:
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.data.copy_(value)
    run.model.eval()
    # what FSDP summons in an evaluation stays, in high precision, until a backward
    within = CLOSE / 10 if name == "fsdp" else 0
    assert evaluated(run, tokens) == pytest.approx(before, rel=within, abs=0)
    run.model.train()
    for tokens in (batches[2], batches[0]):
        assert run.step(tokens) == pytest.approx(undisturbed.step(tokens), rel=within, abs=0)


@ranks(2)
@pytest.mark.parametrize("keeps_16_bits", [True, False])
@pytest.mark.parametrize("name", ["low_level_zero", "low_level_zero unfused", "hybrid ZeRO", "TP2 ZeRO"])
def test_loaded_weights_are_evaluated_and_trained_from_after_a_save_too(name: str, keeps_16_bits: bool) -> None:
    run = boost(engine(name, weight_copies=WeightCopies(high_precision=keeps_16_bits)), tiny_llama(), lr=1e-2)
    tokens = token_batch(0)  # the same on all ranks, so that these have one loss
    folder = shared_folder(f"loaded {name} {keeps_16_bits}")
    path, again = str(folder / "model"), str(folder / "again")
    run.step(tokens)
    run.booster.save_model(run.model, path, shard=True)
    saved = evaluated(run, tokens)
    for _ in range(3):
        run.step(tokens)
    run.booster.save_model(run.model, again, shard=True)  # other values of what was gathered
    before = evaluated(run, tokens)
    run.booster.load_model(run.model, path)
    run.booster.save_model(run.model, again, shard=True)
    loaded = evaluated(run, tokens)
    # what was gathered is rounded once from FP32, what was loaded from the 16 bits in the file
    assert loaded == pytest.approx(saved, rel=CLOSE / 4)
    assert abs(before - saved) > 2 * CLOSE * saved
    run.model.eval()
    run.model.train()
    assert evaluated(run, tokens) == loaded
    assert run.step(tokens) == [loaded]
