"""What ZeRO trained with, and what is exported of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fp8booster import FP8Config, export
from fp8booster.config import WeightCopies
from tests.colossal.models import tiny_llama
from tests.distributed import ranks, shared_folder
from tests.plugins.training import boost, fp8, train


def files(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@ranks(2)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("values", [True, False], ids=["values in 16 bits", "none"])
def test_the_bytes_are_those_that_ranks_gathered(fused: bool, values: bool) -> None:
    from fp8booster.colossal.zero.rank_files import save_master_weights
    from fp8booster.nn import FP8Layer

    config = FP8Config(fused=fused, always=True, weight_copies=WeightCopies(high_precision=values))
    run = boost(fp8(fp8_communication=True, fp8_config=config))
    train(run, steps=2)
    model = run.model.unwrap()
    trained = {
        name: (layer.fp8_weight.held.data.clone(), layer.fp8_weight.held.inverse_scale.clone())
        for name, layer in model.named_modules()
        if isinstance(layer, FP8Layer)
    }
    assert len(trained) == 14
    folder = shared_folder(f"bytes {fused} {values}")
    for name in ("model", "masters"):
        (folder / name).mkdir(exist_ok=True)
    dist.barrier()
    save_master_weights(model, run.optimizer, folder / "masters")
    if values and dist.get_rank() == 0:  # before a checkpoint gathers the masters
        export(model, folder / "live", format="tensorwise")
        others = FP8Config(fused=fused, scaling="amax")  # other scales than training's: cast anew
        export(model, folder / "others", format="tensorwise", config=others)
    run.booster.save_model(run.model, str(folder / "model"), shard=True, use_safetensors=True)
    dist.barrier()
    if dist.get_rank() != 0:
        return
    tiny_llama().config.save_pretrained(folder / "model")
    if not values:
        with pytest.raises(ValueError, match="no values in 16 bits"):
            export(model, folder / "live", format="tensorwise")
    done = export(folder / "model", folder / "stored", format="tensorwise", config=config, masters=folder / "masters")
    assert done.from_masters == 14
    for out in ("live", "stored") if values else ("stored",):
        there = files(folder / out)
        for name, (data, inverse_scale) in trained.items():
            assert torch.equal(there[f"{name}.weight"].view(torch.uint8), data.view(torch.uint8)), (out, name)
            assert there[f"{name}.weight_scale_inv"] == inverse_scale
    for name in trained if values else ():
        scale = files(folder / "others")[f"{name}.weight_scale_inv"]
        assert scale.log2() == scale.log2().round()
    rounded = export(folder / "model", folder / "rounded", format="tensorwise", config=config)
    assert rounded.from_masters == 0  # cast from BF16 values, which are rounded twice
    assert any(
        not torch.equal(files(folder / "rounded")[f"{name}.weight"].view(torch.uint8), data.view(torch.uint8))
        for name, (data, _) in trained.items()
    )


@ranks(3)
def test_weights_of_which_ranks_have_uneven_shards_have_scales_of_their_own() -> None:
    from fp8booster.colossal.zero.rank_files import save_master_weights
    from fp8booster.nn import FP8Layer

    run = boost(fp8(fp8_communication=True, fp8_config=FP8Config(always=True)))
    train(run, steps=1)
    model = run.model.unwrap()
    folder = shared_folder("uneven")
    for name in ("model", "masters"):
        (folder / name).mkdir(exist_ok=True)
    dist.barrier()
    save_master_weights(model, run.optimizer, folder / "masters")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, FP8Layer)}
    trained = {name: layer.fp8_weight.held for name, layer in layers.items()}
    bytes_of = {name: held.data.clone() for name, held in trained.items()}
    run.booster.save_model(run.model, str(folder / "model"), shard=True, use_safetensors=True)
    if dist.get_rank() != 0:
        return
    tiny_llama().config.save_pretrained(folder / "model")
    export(folder / "model", folder / "out", format="tensorwise", masters=folder / "masters")
    there = files(folder / "out")
    for name, data in bytes_of.items():
        assert torch.equal(there[f"{name}.weight"].view(torch.uint8), data.view(torch.uint8)), name
