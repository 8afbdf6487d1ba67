from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.harness import environment
from fp8booster.version import __version__


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_and_whether_files_differ_from_it(tmp_path) -> None:
    assert environment.git_commit(tmp_path) == "unknown"
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert environment.git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert environment.git_commit(tmp_path) == f"{commit} with changes"


def test_a_head_names_everything_one_needs_to_repeat_it(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--out", "a folder"])
    head = environment.head(environment.gpu_of(torch.device("cpu")), commit="abc")
    assert head["torch"] == torch.__version__
    assert head["fp8booster"] == __version__
    assert head["commit"] == "abc"
    assert head["command"].endswith("--out 'a folder'")
    for key in ("GPU", "compute capability", "driver", "CUDA", "cuDNN", "triton", "torchao", "date"):
        assert head[key]
    assert all(isinstance(value, str) for value in head.values())


def test_a_package_that_is_missing() -> None:
    assert environment.version_of("no-such-package-anywhere") == "not installed"


class Properties:
    name, uuid, major, minor, multi_processor_count = "NVIDIA H200", "12-34", 9, 0, 132


def test_facts_of_a_gpu(monkeypatch) -> None:
    asked = []

    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="580.1, 1980, 700.00\n")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(subprocess, "run", answer)
    gpu = environment.gpu_of(torch.device("cuda"))
    assert gpu == environment.Gpu("NVIDIA H200", (9, 0), 132, "580.1", 1.98e9, "700.00 W")
    assert "--id=GPU-12-34" in asked[0]


def test_no_nvidia_smi(monkeypatch) -> None:
    def missing(command: list[str], **_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(RuntimeError, match="must be on the PATH"):
        environment.gpu_of(torch.device("cuda"))
