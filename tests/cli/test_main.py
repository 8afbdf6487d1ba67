"""The installed command, as a person runs it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fp8booster.version import __version__


def fp8booster(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fp8booster", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | environment,
    )


MISSING = ("train", "--data", "no-such-file.txt")


def test_a_wrong_path_is_one_sentence_without_a_traceback():
    done = fp8booster(*MISSING)
    assert done.returncode == 2
    *before, sentence = done.stderr.splitlines()
    assert sentence.startswith("error: ")
    assert "no-such-file.txt" in sentence
    assert not any("Traceback" in line or "error" in line for line in before)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(("--debug", *MISSING), {}), (MISSING, {"FP8BOOSTER_DEBUG": "1"})],
    ids=["option", "variable"],
)
def test_debugging_shows_the_traceback(arguments, environment):
    done = fp8booster(*arguments, **environment)
    assert done.returncode != 0
    assert "Traceback (most recent call last)" in done.stderr


def test_version():
    assert fp8booster("--version").stdout == f"fp8booster {__version__}\n"


def test_help_lists_the_commands():
    done = fp8booster("--help")
    assert done.returncode == 0
    for command in ("train", "doctor"):
        assert command in done.stdout


def test_the_command_line_imports_neither_colossalai_nor_transformers_before_a_command_runs():
    program = (
        "import sys, fp8booster.cli.main; "
        "print(*[name for name in ('colossalai', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []
