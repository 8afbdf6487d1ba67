"""The wheel and the sdist that a release would be made of."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.distributed import TEST_SECONDS

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt")
FOLDERS = ("fp8booster", "scripts", "tests")


def build(folder: Path, kind: str, out: Path) -> Path:
    """Build a distribution of what lies in a folder, by the backend alone, which asks no registry."""
    script = f"from setuptools.build_meta import build_{kind} as build; build({str(out)!r})"
    options = {"cwd": folder, "capture_output": True, "text": True, "timeout": TEST_SECONDS, "check": False}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], **options)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of the sources, unpacked."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    folder = tmp_path_factory.mktemp("sources")
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(build(folder, "sdist", tmp_path_factory.mktemp("sdist"))) as archive:
        archive.extractall(unpacked, filter="data")
    (root,) = unpacked.iterdir()
    return root


def sources(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in (folder / "fp8booster").rglob("*.py")}


def test_an_sdist_has_the_sources_and_what_tests_and_installs_them(sdist: Path) -> None:
    assert sources(sdist) == sources(ROOT)
    for name in (*FILES, "scripts/setup.sh", "tests/conftest.py", "tests/kernels/test_product.py"):
        assert (sdist / name).is_file(), name


def test_a_wheel_of_the_sdist_has_all_that_the_package_needs(sdist: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    wheel = build(sdist, "wheel", tmp_path / "out")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        names = set(archive.namelist())
    kept = {name for name in names if name.startswith("fp8booster/")}
    assert kept == sources(ROOT) | {"fp8booster/py.typed", "fp8booster/cli/plot/page.html"}
    metadata = message_from_bytes(next((tmp_path / "installed").glob("*.dist-info/METADATA")).read_bytes())
    assert metadata["License-Expression"] == "Apache-2.0"
    # whose metadata pins an old PyTorch
    assert not any("colossalai" in each for each in metadata.get_all("Requires-Dist"))
    script = "import fp8booster; from fp8booster.cli.main import app; print(fp8booster.__file__); app(['--version'])"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=tmp_path / "installed",
        capture_output=True,
        text=True,
        timeout=TEST_SECONDS,
        check=False,
    )
    place, version = done.stdout.splitlines()
    assert Path(place).is_relative_to(tmp_path)
    assert version == f"fp8booster {metadata['Version']}"
