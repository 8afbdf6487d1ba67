"""colossalai 0.5.0 trains and saves with the patches, and each patch is missed when it is taken out."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from fp8booster.colossal import compat
from tests.colossal.compat_checks import SYMPTOMS, run_checks
from tests.distributed import run_ranks

_IMPORT_PATCHES = [patch.name for patch in compat.patches() if patch.during_import]

# Needs neither a process group nor a rank: what a user sees who imports colossalai.booster before fp8booster,
# then each stand-in's absence, then that a later import is patched all the same.
_IMPORT_SCRIPT = """
def attempt():
    try:
        import colossalai.booster.plugin, colossalai.nn.optimizer
        return "imported"
    except ModuleNotFoundError as error:
        return error.name

print(attempt())
from fp8booster.colossal import compat
compat.apply(without=("bitsandbytes_is_optional",))
print(attempt())
next(patch for patch in compat.patches() if patch.name == "bitsandbytes_is_optional").state = compat.State.WAITING
print(attempt())
"""


@pytest.mark.skipif(
    bool(importlib.util.find_spec("galore_torch") or importlib.util.find_spec("bitsandbytes")),
    reason="galore_torch or bitsandbytes is installed, so that colossalai imports without stand-ins",
)
def test_colossalai_does_not_import_without_the_stand_ins() -> None:
    script = [sys.executable, "-W", "ignore", "-c", _IMPORT_SCRIPT]
    result = subprocess.run(script, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == ["galore_torch", "bitsandbytes", "imported"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `run_checks` found on two ranks, started once for all tests of this file."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return run_ranks(run_checks, 2, folder, timeout=400, initialize=False, preloaded=False)


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def outcome(outcomes: list[dict[str, Any]], request: pytest.FixtureRequest) -> dict[str, Any]:
    """What each rank found."""
    return outcomes[request.param]


def test_launch_from_torch_joins_ranks_by_gloo(outcome: dict[str, Any]) -> None:
    assert (outcome["backend"], outcome["world_size"]) == ("gloo", 2)


def test_every_patch_has_a_symptom() -> None:
    assert set(SYMPTOMS) | set(_IMPORT_PATCHES) == {patch.name for patch in compat.patches()}


@pytest.mark.parametrize("name", SYMPTOMS)
def test_patch_is_missed_when_taken_out(outcomes: list[dict[str, Any]], name: str) -> None:
    without = []
    for rank, outcome in enumerate(outcomes):
        state, with_patch, without_patch = outcome["symptoms"][name]
        assert with_patch is None, f"rank {rank}: the defect shows although the patch is {state}"
        assert state in ("applied", "not needed here")
        if state == "applied":
            without.append(without_patch)
    shown = [symptom for symptom in without if symptom is not None]
    assert shown or not without, "colossalai works without this patch: it can go"
    assert all(SYMPTOMS[name].error in symptom for symptom in shown)


def test_every_patch_acted(outcome: dict[str, Any]) -> None:
    assert set(outcome["states"].values()) <= {"applied", "not needed here"}
    assert set(outcome["states"]) == {patch.name for patch in compat.patches()}


def test_stand_ins_are_hidden_and_say_what_to_install(outcome: dict[str, Any]) -> None:
    if importlib.util.find_spec("galore_torch") or importlib.util.find_spec("bitsandbytes"):
        pytest.skip("the real packages are installed")
    stand_ins = outcome["stand_ins"]
    assert not stand_ins["found by transformers"]
    assert "GaLoreAdamW needs galore_torch, which is not installed" in stand_ins["GaLoreAdamW"]
    assert "GaLoreAdamW8bit needs bitsandbytes, which is not installed" in stand_ins["GaLoreAdamW8bit"]


@pytest.mark.parametrize("stage", [1, 2])
def test_native_zero_trains(outcome: dict[str, Any], stage: int) -> None:
    losses = outcome["losses"][stage]
    assert losses[-1] < 0.8 * losses[0]


def test_stages_agree(outcome: dict[str, Any]) -> None:
    assert outcome["losses"][1] == pytest.approx(outcome["losses"][2], rel=1e-3)


@pytest.mark.parametrize("stage", [1, 2])
def test_checkpoints_load_again(outcome: dict[str, Any], stage: int) -> None:
    failures = {case: error for case, error in outcome["checkpoints"][stage].items() if error is not None}
    assert len(outcome["checkpoints"][stage]) == 20
    assert not failures


@pytest.mark.parametrize("stage", [1, 2])
def test_lora_trains_and_loads_again(outcome: dict[str, Any], stage: int) -> None:
    losses, restored = outcome["lora"][stage]
    assert losses[-1] < losses[0]
    assert restored
