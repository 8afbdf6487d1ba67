"""A program that ends with a plugin says nothing of it, whether it has destroyed its process groups or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """\
import sys
import torch.distributed as dist
from fp8booster import plugins
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
plugin = plugins.{plugin}
if sys.argv[2] == "destroyed":
    dist.destroy_process_group()
"""


PLUGINS = ["GeminiPlugin(use_fp8=True)", "HybridParallelPlugin(1, 1, precision='bf16', use_fp8=True)"]


@pytest.mark.parametrize("groups", ["destroyed", "left"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_no_error_is_shown_of_a_plugin_that_goes_with_its_program(plugin: str, groups: str, tmp_path: Path) -> None:
    program = PROGRAM.replace("{plugin}", plugin)
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "store"), groups]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
