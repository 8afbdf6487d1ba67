from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fp8booster.cli.doctor import fixing
from fp8booster.cli.doctor.problems import Problem
from fp8booster.cli.main import app

MISSING = Problem("There is no Booster.", "pip install --no-deps colossalai==0.5.0", True)
OLD = Problem("transformers is another.", "pip install transformers==4.51.3", False)
NO_GPU = Problem("PyTorch sees no GPU.", "nvidia-smi", True)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are run; those with "broken" in them fail."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        ran.append(command)
        return subprocess.CompletedProcess(command, int("broken" in command))

    monkeypatch.setattr(fixing.subprocess, "run", run)
    return ran


def test_only_packages_without_which_nothing_trains_are_installed(commands) -> None:
    assert not fixing.install([OLD, NO_GPU])
    assert commands == []
    assert fixing.install([MISSING, OLD, NO_GPU])
    assert commands == [[sys.executable, "-m", "pip", "install", "--no-deps", "colossalai==0.5.0"]]


def test_what_pip_refuses_is_told(commands) -> None:
    with pytest.raises(ValueError, match=r"-m pip install broken` failed; install the package as"):
        fixing.install([Problem("It is gone.", "pip install broken", True)])


def test_fix_installs_and_looks_again_with_the_same_flags(commands, monkeypatch) -> None:
    from fp8booster.cli.doctor import examination

    colossal = examination.Colossal(None, None, [])
    environment = examination.Environment({}, None, None, None, [], [])
    looked = examination.Examination(environment, [], [], colossal, [MISSING])
    monkeypatch.setattr(examination, "examine", lambda speed, announce: looked)
    done = CliRunner().invoke(app, ["doctor", "--fix", "--json", "--no-speed"])
    assert done.exit_code == 0, done.output
    assert commands == [
        [sys.executable, "-m", "pip", "install", "--no-deps", "colossalai==0.5.0"],
        [sys.executable, "-m", "fp8booster", "doctor", "--json", "--no-speed"],
    ]
    assert done.stdout == ""
