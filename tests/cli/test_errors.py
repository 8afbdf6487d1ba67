"""An error of use is one sentence; everything else keeps its traceback."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from fp8booster.cli.errors import EXIT_CODE, OneSentenceErrors

SENTENCE = "steps is -1; give a positive number [of steps]"


def app_that_raises(error: Exception) -> typer.Typer:
    app = typer.Typer(cls=OneSentenceErrors, pretty_exceptions_enable=False)

    @app.callback()
    def options(debug: bool = False) -> None: ...

    @app.command()
    def fail() -> None:
        raise error

    return app


@pytest.mark.parametrize("kind", [ValueError, TypeError, FileNotFoundError, PermissionError])
def test_an_error_of_use_is_its_sentence_and_nothing_else(kind):
    result = CliRunner().invoke(app_that_raises(kind(SENTENCE)), ["fail"])
    assert result.exit_code == EXIT_CODE == 2
    assert result.stderr == f"error: {SENTENCE}\n"
    assert result.stdout == ""


def test_debug_lets_the_error_through():
    result = CliRunner().invoke(app_that_raises(ValueError(SENTENCE)), ["--debug", "fail"])
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == SENTENCE


@pytest.mark.parametrize("kind", [RuntimeError, KeyError, AssertionError])
def test_a_defect_is_not_dressed_up_as_an_error_of_use(kind):
    result = CliRunner().invoke(app_that_raises(kind("broken")), ["fail"])
    assert isinstance(result.exception, kind)


def test_an_error_without_a_sentence_shows_its_kind():
    result = CliRunner().invoke(app_that_raises(ValueError()), ["fail"])
    assert result.stderr == "error: ValueError\n"


def test_an_error_of_the_system_names_the_file_and_what_is_wrong_with_it(tmp_path):
    with pytest.raises(IsADirectoryError) as raised:
        tmp_path.open("w")
    result = CliRunner().invoke(app_that_raises(raised.value), ["fail"])
    assert result.stderr == f"error: {tmp_path}: Is a directory.\n"


@pytest.mark.parametrize("columns", ["0", "00", ""])
def test_no_width_hides_no_text(columns):
    done = CliRunner().invoke(app_that_raises(ValueError(SENTENCE)), ["fail"], env={"COLUMNS": columns})
    assert done.stderr == f"error: {SENTENCE}\n"
    helped = CliRunner().invoke(app_that_raises(ValueError(SENTENCE)), ["--help"], env={"COLUMNS": columns})
    assert "Usage" in helped.stdout
