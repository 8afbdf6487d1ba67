"""The documents: links and named code exist, tables list every option, the example of README.md trains."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from fp8booster import FP8Config
from fp8booster.cli.main import app
from tests.distributed import TEST_SECONDS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")]
    + [path for folder in ("benchmarks", "docs") for path in (ROOT / folder).glob("*.md")]
)

LINK = re.compile(r'!?\[[^\]]*\]\(([^)\s]+)\)|src="([^"]+)"')


def links(document: Path) -> list[str]:
    """The targets of a document's links and pictures, code left out."""
    found, fenced = [], False
    for line in document.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            found += [one or other for one, other in LINK.findall(line)]
    return found


def anchors(document: Path) -> set[str]:
    """What can stand after # in a link to a document, by the rule of its readers."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_point_to_files_and_headings(document: Path) -> None:
    broken = []
    for link in links(document):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = (document.parent / target).resolve() if target else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert not broken


def test_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def defined(file: Path) -> set[str]:
    """Functions, classes and methods that a file defines, the latter as Class.method."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def test_architecture_names_files_and_functions_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`(fp8booster/[\w/]+\.py)(?::([\w.]+))?`", text)
    assert len(named) > 15
    missing = [
        f"{file}:{name}"
        for file, name in named
        if not (ROOT / file).exists() or (name and name not in defined(ROOT / file))
    ]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_code_that_are_named_exist(document: Path) -> None:
    named = re.findall(r"`([\w.]+/[\w./]+\.(?:py|sh))\b", document.read_text(encoding="utf-8"))
    folders = (ROOT, ROOT / "fp8booster", ROOT / "fp8booster" / "colossal", document.parent)
    assert not [file for file in named if not any((folder / file).exists() for folder in folders)]


def test_configuration_lists_every_field() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| .* \| .* \| .*\|$", text, re.MULTILINE)) >= {
        field.name for field in dataclasses.fields(FP8Config)
    }


def test_command_line_lists_every_option() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    options = {
        option
        for command in typer.main.get_command(app).commands.values()
        for parameter in command.params
        for option in parameter.opts
    }
    assert len(options) > 30
    assert not {option for option in options if f"`{option}`" not in text}


def first_step() -> str:
    """README's example."""
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]


def check_first_step(folder: Path) -> None:
    """Run README's example as it stands, with the command below it: the loss falls, layers are in FP8."""
    (folder / "first_step.py").write_text(first_step(), encoding="utf-8")
    command = "--standalone --nproc-per-node 1 first_step.py"
    assert f"torchrun {command}" in (ROOT / "README.md").read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TEST_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in re.findall(r"^\d \d.*$", done.stdout, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < 0.6 * losses[0]
    assert "FP8: 14 of 15 linear layers" in done.stdout


def test_first_step_of_readme_trains(tmp_path: Path) -> None:
    check_first_step(tmp_path)


@pytest.mark.gpu
def test_first_step_of_readme_trains_on_a_gpu(tmp_path: Path) -> None:
    check_first_step(tmp_path)
