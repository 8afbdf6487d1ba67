"""LoRA: a frozen base in FP8 under adapters in BF16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fp8booster import FP8Config, FP8Linear, report
from fp8booster.config import WeightCopies
from tests.colossal.models import tiny_llama
from tests.distributed import ranks, shared_folder
from tests.plugins.training import STAGES, Boosted, assert_close, assert_equal, boost, fp8, native, rank_batches, train

if TYPE_CHECKING:
    from peft import LoraConfig


def lora_config(rank: int = 8) -> LoraConfig:
    """Adapters on every linear layer but the vocabulary head."""
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def with_lora(plugin: object, **arguments: object) -> Boosted:
    """A boosted model with adapters."""
    torch.manual_seed(0)
    return boost(plugin, lora=arguments or {"lora_config": lora_config()})


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_adapters_train_over_a_frozen_fp8_base(stage: int) -> None:
    run, in_16_bits = with_lora(fp8(stage=stage)), with_lora(native(stage=stage))
    before = run.parameters()
    assert_close(train(in_16_bits), train(run), 1e-2)
    after = run.parameters()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "lora_" in name}


@ranks(2)
@pytest.mark.parametrize("rank", [8, 16])
def test_the_report_says_why_adapters_are_in_bf16(rank: int) -> None:
    run = with_lora(fp8(), lora_config=lora_config(rank))
    rows = {row.name: row for row in report(run.model).rows}
    base = {name for name in rows if name.endswith("base_layer")}
    adapters = {name for name in rows if "lora_" in name}
    assert (len(base), len(adapters)) == (14, 28)
    assert {rows[name].precision for name in base} == {"FP8"}
    if rank == 16:
        assert {rows[name].precision for name in adapters} == {"FP8"}
        return
    assert {rows[name].precision for name in adapters} == {"BF16"}
    assert all("rounded up to multiples of 16" in rows[name].notes for name in adapters)
    assert all(type(module) is not FP8Linear for name, module in run.model.named_modules() if "lora_" in name)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_saved_adapters_load_here_in_native_and_in_peft(stage: int) -> None:
    from peft import PeftModel

    run, theirs = with_lora(fp8(stage=stage)), with_lora(native(stage=stage))
    train(run)
    folder, their_folder = (str(shared_folder(f"lora-{stage}") / name) for name in ("ours", "theirs"))
    run.booster.save_lora_as_pretrained(run.model, folder, use_safetensors=True)
    theirs.booster.save_lora_as_pretrained(theirs.model, their_folder, use_safetensors=True)
    dist.barrier()
    file = "adapter_model.safetensors"
    assert load_file(f"{folder}/{file}").keys() == load_file(f"{their_folder}/{file}").keys()
    expected = run.parameters()
    here, there = (
        with_lora(fp8(stage=stage), pretrained_dir=folder),
        with_lora(native(stage=stage), pretrained_dir=folder),
    )
    assert_equal(expected, here.parameters())
    assert_equal(expected, there.parameters())
    batch = rank_batches(1)[0]
    assert here.loss(batch) == run.loss(batch)
    in_peft = PeftModel.from_pretrained(tiny_llama(), folder).bfloat16().train()
    assert in_peft(input_ids=batch, labels=batch).loss == there.loss(batch)


@ranks(2)
@pytest.mark.parametrize("weights", ["16 bits", "FP8 alone"])
def test_merged_adapters_go_into_the_base(weights: str) -> None:
    config = FP8Config(fused=False, weight_copies=WeightCopies(high_precision=weights == "16 bits"))
    plugin = fp8(stage=1, fp8_communication=True, fp8_config=config)
    run = with_lora(plugin, lora_config=lora_config(16))
    train(run)
    (batch,) = rank_batches(1)
    model = run.model.unwrap(unwrap_peft=False)
    apart = run.loss(batch).item()
    base = {name: value.clone() for name, value in model.named_parameters() if "base_layer" in name}
    model.merge_adapter()
    merged = dict(model.named_parameters())
    for name, value in base.items():
        assert torch.isfinite(merged[name]).all(), name
        assert not torch.equal(merged[name], value), name
    assert_close([apart], [run.loss(batch).item()], 1e-2)
    model.unmerge_adapter()
    assert_close([apart], [run.loss(batch).item()], 1e-2)
    train(run, steps=1)
    assert all(torch.isfinite(value).all() for value in run.parameters().values())
