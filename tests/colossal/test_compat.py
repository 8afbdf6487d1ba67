"""colossalai 0.5.0 trains and saves with the patches, and each patch is missed when it is taken out."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster.colossal import compat
from tests.colossal.symptoms import SYMPTOMS, boosted, error, train
from tests.distributed import TEST_SECONDS, ranks, run_ranks

_IMPORT_PATCHES = [patch.name for patch in compat.patches() if patch.during_import]

# Needs neither a process group nor a rank: what a user sees who imports colossalai.booster before fp8booster,
# then the stand-ins' absence, then that a later import is patched all the same.
_IMPORT_SCRIPT = """
def attempt():
    try:
        import colossalai.booster.plugin, colossalai.nn.optimizer
        return "imported"
    except ModuleNotFoundError as error:
        return error.name

print(attempt())
from fp8booster.colossal import compat
compat.apply(without=("missing_imports_are_late_errors",))
print(attempt())
(patch,) = (each for each in compat.patches() if each.name == "missing_imports_are_late_errors")
patch.state = compat.State.WAITING
print(attempt())
"""


@pytest.mark.skipif(
    bool(importlib.util.find_spec("galore_torch") or importlib.util.find_spec("bitsandbytes")),
    reason="galore_torch or bitsandbytes is installed, so that colossalai imports without stand-ins",
)
def test_colossalai_does_not_import_without_the_stand_ins() -> None:
    script = [sys.executable, "-W", "ignore", "-c", _IMPORT_SCRIPT]
    result = subprocess.run(script, capture_output=True, text=True, check=True, timeout=TEST_SECONDS)
    assert result.stdout.split() == ["galore_torch", "galore_torch", "imported"]


def launched() -> tuple[str, int]:
    import colossalai

    colossalai.launch_from_torch(verbose=False)
    return dist.get_backend(), dist.get_world_size()


def test_launch_from_torch_joins_ranks_by_gloo() -> None:
    assert run_ranks(launched, 2, initialize=False) == [("gloo", 2)] * 2


def test_every_patch_has_a_symptom() -> None:
    assert set(SYMPTOMS) | set(_IMPORT_PATCHES) == {patch.name for patch in compat.patches()}


def state(name: str) -> compat.State:
    return next(patch.state for patch in compat.patches() if patch.name == name)


@pytest.mark.parametrize("name", SYMPTOMS)
@ranks(2)
def test_patch_is_missed_when_taken_out(name: str) -> None:
    symptom = SYMPTOMS[name]
    with_patch = error(symptom.show)
    assert with_patch is None, f"the defect shows although the patch is {state(name).value}"
    if state(name) is compat.State.NOT_NEEDED:
        return
    assert state(name) is compat.State.APPLIED  # `show` may import what it patches
    with compat.taken_out(name):
        without_patch = error(symptom.show)
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, without_patch)
    shown = [each for each in found if each is not None]
    assert shown, "colossalai works without this patch: it can go"
    assert all(symptom.error in each for each in shown)


@ranks(2)
def test_patches_of_imports_acted() -> None:
    import tests.preloaded  # noqa: F401

    for name in _IMPORT_PATCHES:
        assert state(name) in (compat.State.APPLIED, compat.State.NOT_NEEDED), name


@pytest.mark.skipif(
    bool(importlib.util.find_spec("galore_torch") or importlib.util.find_spec("bitsandbytes")),
    reason="the real packages are installed",
)
@ranks(2)
def test_stand_ins_are_hidden_and_say_what_to_install() -> None:
    from colossalai.nn import optimizer
    from transformers.utils import is_bitsandbytes_available

    assert not is_bitsandbytes_available()
    parameters = [nn.Parameter(torch.zeros(1))]
    for made, package in ((optimizer.GaLoreAdamW, "galore_torch"), (optimizer.GaLoreAdamW8bit, "bitsandbytes")):
        with pytest.raises(
            ImportError, match=rf"colossalai\.nn\.optimizer\S* needs {package}\.\S+, and {package} is not"
        ):
            made(parameters)


@ranks(2)
def test_native_zero_trains_alike_in_both_stages() -> None:
    first, second = (train(*boosted(stage), steps=6) for stage in (1, 2))
    assert first == pytest.approx(second, rel=1e-3)
    for losses in (first, second):
        assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("stage", [1, 2])
@ranks(2)
def test_checkpoints_load_again(stage: int, tmp_path: Path) -> None:
    booster, model, optimizer = boosted(stage)
    train(booster, model, optimizer, steps=2)
    differences: dict[str, str | None] = {}
    for shard in (False, True):
        for low_cpu_mem_mode in (True, False):
            for kind in ("bin", "safetensors", "async"):
                case = f"model, shard={shard}, {kind}, low_cpu_mem_mode={low_cpu_mem_mode}"
                path = str(tmp_path / case)
                if not shard:
                    path += ".bin" if kind == "bin" else ".safetensors"
                booster.save_model(model, path, shard=shard, use_safetensors=kind != "bin", use_async=kind == "async")
                _wait_for_files(booster)
                other, loaded, _ = boosted(stage)
                _blank(loaded)
                other.load_model(loaded, path, low_cpu_mem_mode=low_cpu_mem_mode)
                differences[case] = _first_difference(dict(model.named_parameters()), dict(loaded.named_parameters()))
            for kind in ("bin", "async"):
                case = f"optimizer, shard={shard}, {kind}, low_cpu_mem_mode={low_cpu_mem_mode}"
                path = str(tmp_path / case)
                if not shard:
                    path += ".bin" if kind == "bin" else ".safetensors"
                booster.save_optimizer(optimizer, path, shard=shard, use_async=kind == "async")
                _wait_for_files(booster)
                other, _, loaded = boosted(stage)
                other.load_optimizer(loaded, path, low_cpu_mem_mode=low_cpu_mem_mode)
                differences[case] = _first_difference(_states(optimizer), _states(loaded))
    assert len(differences) == 20
    assert set(differences.values()) == {None}, differences


def _wait_for_files(booster: Any) -> None:
    booster.checkpoint_io._sync_io()
    dist.barrier()


@torch.no_grad()
def _blank(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()


def _states(optimizer: Any) -> dict[str, torch.Tensor]:
    parameters = [p for group in optimizer.optim.param_groups for p in group["params"]]
    return {
        f"{index}.{key}": value
        for index, parameter in enumerate(parameters)
        for key, value in optimizer.optim.state[parameter].items()
    }


def _first_difference(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str | None:
    if expected.keys() != found.keys():
        return f"keys differ: {sorted(expected.keys() ^ found.keys())}"
    return next((name for name in expected if not torch.equal(expected[name], found[name])), None)


@pytest.mark.parametrize("stage", [1, 2])
@ranks(2)
def test_lora_trains_and_loads_again(stage: int, tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    booster, model, optimizer = boosted(stage, {"lora_config": config})
    losses = train(booster, model, optimizer, steps=4)
    booster.save_lora_as_pretrained(model, str(tmp_path))
    dist.barrier()
    _, loaded, _ = boosted(stage, {"pretrained_dir": str(tmp_path)})
    expected = {name: p for name, p in model.named_parameters() if "lora_" in name}
    found = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
    assert losses[-1] < losses[0]
    assert expected
    assert _first_difference(expected, found) is None
