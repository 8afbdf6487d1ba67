"""The `fp8booster` command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fp8booster.cli.main import app
from fp8booster.version import __version__
from tests.distributed import TEST_SECONDS
from tests.programs import run_program

MISSING = ("train", "--data", "no-such-file.txt")


def test_a_wrong_path_is_one_sentence_without_a_traceback():
    done = run_program("fp8booster", *MISSING, environment=os.environ | {"NO_COLOR": "1"})
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
    done = CliRunner().invoke(app, arguments, env=environment)
    assert isinstance(done.exception, FileNotFoundError)


def test_version():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"fp8booster {__version__}\n"


def test_help_lists_the_commands():
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    for command in ("train", "doctor"):
        assert command in done.stdout


def test_the_command_line_imports_neither_colossalai_nor_transformers_before_a_command_runs():
    program = (
        "import sys, fp8booster.cli.main; "
        "print(*[name for name in ('colossalai', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=TEST_SECONDS
    )
    assert done.stdout.split() == []
