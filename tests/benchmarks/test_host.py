from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.environment import REPOSITORY
from benchmarks.training.host import Host

ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY), "RANK": "1"}


@pytest.fixture
def host() -> Iterator[Host]:
    one = Host("tests.benchmarks.llama_worker", ENVIRONMENT)
    yield one
    one.kill()


def task(name: str, folder: Path) -> dict[str, object]:
    return {
        "engine": name,
        "outcome": str(folder / "outcome.json"),
        "log": str(folder / "log"),
        "environment": {"MASTER_PORT": "1"},
    }


def forked(host: Host) -> psutil.Process:
    """The process of the task that was begun."""
    while host.ended(0.05) is None:
        if forks := psutil.Process(host._process.pid).children():
            return forks[0]
    raise AssertionError("the task has ended")


def test_each_task_has_a_fork_and_a_log(host: Host, tmp_path) -> None:
    host.begin(task("fails on rank 1", tmp_path))
    assert host.ended(60) == 1
    assert json.loads((tmp_path / "outcome.json").read_text())["failed"] == "out of GPU memory"
    host.begin(task("well", tmp_path))  # nobody serves that port
    assert host.ended(60) == 1
    assert "ConnectionRefusedError" in (tmp_path / "log").read_text()
    assert host.alive


def test_a_task_ends_with_its_host(host: Host, tmp_path) -> None:
    host.begin(task("hangs", tmp_path))
    fork = forked(host)
    host.kill()
    assert not host.alive
    gone, _ = psutil.wait_procs([fork], timeout=60)
    assert gone


def test_a_task_ends_with_the_process_that_gave_it(host: Host, tmp_path) -> None:
    host.begin(task("hangs", tmp_path))
    fork = forked(host)
    host._process.stdin.close()  # as when that process is gone
    gone, _ = psutil.wait_procs([fork], timeout=60)
    assert gone
    assert host.ended(60) == 1


def test_what_is_imported_before_a_fork_leaves_native_plugins_as_they_are() -> None:
    said = subprocess.run(
        [sys.executable, "-c", _IMPORTS], env=ENVIRONMENT, capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines()[-1] == "[]"


_IMPORTS = """
import importlib, sys
from benchmarks.training.worker import PRELOADED
for name in PRELOADED:
    importlib.import_module(name)
print([name for name in sys.modules if name.partition(".")[0] in ("colossalai", "torchao")])
"""


def test_where_a_fork_is_of_no_use_the_process_does_one_task_and_ends(tmp_path) -> None:
    alone = Host("tests.benchmarks.llama_worker", ENVIRONMENT | {"MAY_FORK": "no"})
    alone.begin(task("fails on rank 1", tmp_path))
    assert alone.ended(60) == 1
    deadline = time.monotonic() + 60
    while alone.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alone.alive
    alone.kill()
