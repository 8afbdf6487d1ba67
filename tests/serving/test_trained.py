"""Weights that ZeRO trained with, and what is exported of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, export
from fp8booster.config import WeightCopies
from tests.colossal.models import tiny_llama
from tests.distributed import ranks, shared_folder
from tests.plugins.training import boost, fp8, train
from tests.serving.folders import bits, files


def trained_model(config: FP8Config, steps: int, name: str) -> tuple[Any, nn.Module, dict[str, Any], Path]:
    """Train under ZeRO; return the run, its model, each FP8 weight with its scale, and a folder with the masters."""
    from fp8booster.colossal.zero.rank_files import save_master_weights
    from fp8booster.nn import FP8Layer

    run = boost(fp8(fp8_communication=True, fp8_config=config))
    train(run, steps=steps)
    model = run.model.unwrap()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, FP8Layer)}
    held = {name: layer.fp8_weight.held for name, layer in layers.items()}
    trained = {name: (each.data.clone(), each.inverse_scale.clone()) for name, each in held.items()}
    folder = shared_folder(name)
    for part in ("model", "masters"):
        (folder / part).mkdir(exist_ok=True)
    dist.barrier()
    save_master_weights(model, run.optimizer, folder / "masters")
    return run, model, trained, folder


@ranks(2)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("values", [True, False], ids=["values in 16 bits", "none"])
def test_the_bytes_are_those_that_ranks_gathered(fused: bool, values: bool) -> None:
    config = FP8Config(fused=fused, always=True, weight_copies=WeightCopies(high_precision=values))
    run, model, trained, folder = trained_model(config, 2, f"bytes {fused} {values}")
    assert len(trained) == 14
    if dist.get_rank() == 0:  # before a checkpoint gathers the masters
        export(model, folder / "live", format="tensorwise")
        others = FP8Config(fused=fused, scaling="amax")  # other scales than training's: cast anew
        if values:
            export(model, folder / "others", format="tensorwise", config=others)
        else:
            with pytest.raises(ValueError, match=r"no values in 16 bits .*; use a format with the scales of training"):
                export(model, folder / "others", format="tensorwise", config=others)
    run.booster.save_model(run.model, str(folder / "model"), shard=True, use_safetensors=True)
    dist.barrier()
    if dist.get_rank() != 0:
        return
    tiny_llama().config.save_pretrained(folder / "model")
    done = export(folder / "model", folder / "stored", format="tensorwise", config=config, masters=folder / "masters")
    assert done.from_masters == 14
    for out in ("live", "stored"):
        there = files(folder / out)
        for name, (data, inverse_scale) in trained.items():
            assert torch.equal(bits(there[f"{name}.weight"]), bits(data)), (out, name)
            assert there[f"{name}.weight_scale_inv"] == inverse_scale
    for name in trained if values else ():
        scale = files(folder / "others")[f"{name}.weight_scale_inv"]
        assert scale.log2() == scale.log2().round()
    rounded = export(folder / "model", folder / "rounded", format="tensorwise", config=config)
    assert rounded.from_masters == 0  # cast from BF16 values, which are rounded twice
    there = files(folder / "rounded")
    assert any(not torch.equal(bits(there[f"{name}.weight"]), bits(data)) for name, (data, _) in trained.items())


@ranks(3)
def test_weights_of_which_ranks_have_uneven_shards_have_scales_of_their_own() -> None:
    run, _, trained, folder = trained_model(FP8Config(always=True), 1, "uneven")
    run.booster.save_model(run.model, str(folder / "model"), shard=True, use_safetensors=True)
    if dist.get_rank() != 0:
        return
    tiny_llama().config.save_pretrained(folder / "model")
    export(folder / "model", folder / "out", format="tensorwise", masters=folder / "masters")
    there = files(folder / "out")
    for name, (data, _) in trained.items():
        assert torch.equal(bits(there[f"{name}.weight"]), bits(data)), name
