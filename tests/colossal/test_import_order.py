"""colossalai is patched whenever fp8booster is imported: before it, after it, or after its import failed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import TEST_SECONDS

installed = bool(importlib.util.find_spec("galore_torch") or importlib.util.find_spec("bitsandbytes"))
without_them = pytest.mark.skipif(installed, reason="galore_torch or bitsandbytes is installed")


def run(script: str, *paths: Path) -> str:
    """What a new process prints."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-W", "ignore", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TEST_SECONDS, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@without_them
def test_any_import_of_fp8booster_before_colossalai_will_do() -> None:
    script = """
import sys
from fp8booster import FP8Config
assert not any(name.startswith(("colossalai", "fp8booster.colossal")) for name in sys.modules)
from colossalai.booster import Booster
from fp8booster.plugins import LowLevelZeroPlugin
print(Booster.__module__, LowLevelZeroPlugin.__module__)
"""
    assert run(script).split() == ["colossalai.booster.booster", "fp8booster.plugins.low_level_zero"]


@without_them
def test_plugins_can_be_imported_after_colossalai_failed() -> None:
    script = """
import colossalai
try:
    from colossalai.booster import Booster
except ModuleNotFoundError as error:
    print(error.name)
from fp8booster.plugins import LowLevelZeroPlugin
from colossalai.booster import Booster
print(Booster.__module__)
"""
    assert run(script).split() == ["galore_torch", "colossalai.booster.booster"]


PATCHED = """
import inspect, json, sys
if {late}:
    import colossalai.booster, colossalai.shardformer.policies.mixtral
import fp8booster.plugins
import colossalai.booster, colossalai.shardformer.policies.mixtral
from fp8booster.colossal import compat

def ours(value):
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return code is not None and "compat" in code.co_filename

places = []
for name, module in list(sys.modules.items()):
    if not name.startswith("colossalai"):
        continue
    for key, value in vars(module).items():
        if ours(value):
            places.append(f"{{name}}.{{key}}")
        elif inspect.isclass(value) and value.__module__ == name:
            places += [f"{{name}}.{{key}}.{{inner}}" for inner, each in vars(value).items() if ours(each)]
states = {{patch.name: patch.state.value for patch in compat.patches()}}
print(json.dumps([sorted(places), states]))
"""


def test_a_colossalai_that_was_imported_first_is_patched_as_one_that_comes_later(tmp_path: Path) -> None:
    """As where galore_torch and bitsandbytes are installed."""
    (tmp_path / "galore_torch.py").write_text("class GaLoreAdafactor: ...\nclass GaLoreAdamW: ...\n")
    package = tmp_path / "bitsandbytes" / "optim"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "optimizer.py").write_text("class Optimizer2State: ...\n")
    late, first = (json.loads(run(PATCHED.format(late=late), tmp_path)) for late in (True, False))
    assert len(first[0]) > 50
    assert late == first
