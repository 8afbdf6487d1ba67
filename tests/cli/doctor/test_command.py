"""`fp8booster doctor`, run in full on this machine."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from fp8booster.cli.doctor import problems
from fp8booster.cli.doctor.problems import COLOSSALAI
from fp8booster.cli.main import app
from fp8booster.version import __version__


@pytest.fixture(scope="module")
def answer():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_this_machine_can_train(answer):
    assert answer["can_train"] is True
    assert not any(problem["stops_training"] for problem in answer["problems"])


def test_versions(answer):
    versions = answer["environment"]["versions"]
    assert versions["fp8booster"] == __version__
    assert versions["torch"] == torch.__version__
    assert versions["colossalai"] == COLOSSALAI
    assert "gloo" in answer["environment"]["backends"]


def test_both_kinds_of_product_ran_on_every_kind_of_device(answer):
    ran = {(check["device"], check["formats"]) for check in answer["checks"]}
    kinds = {"cpu"} | {device for device, _ in ran}
    assert ran == {(device, formats) for device in kinds for formats in ("E4M3 x E4M3", "E5M2 x E4M3")}
    for check in answer["checks"]:
        # BF16 keeps 8 bits: its rounding error lies around 2**-9, and a result without any would be no BF16 result
        assert 2**-11 < check["error"] < 2**-8


def test_times_are_there_for_every_device(answer):
    assert {speed["device"] for speed in answer["speeds"]} == {check["device"] for check in answer["checks"]}
    assert all(speed[time] > 0 for speed in answer["speeds"] for time in ("bf16", "fp8", "fp8_fast"))


def test_patches_of_colossalai_are_put_in(answer):
    assert answer["colossal"]["error"] is None
    patches = answer["colossal"]["patches"]
    assert patches
    # those of models that are sharded are put in when these are
    assert {patch["state"] for patch in patches} <= {"applied", "not needed here", "waits for the import"}
    assert {patch["kind"] for patch in patches} == {"defect of Colossal-AI", "needed without CUDA", "needed for FP8"}
    assert sum(patch["state"] == "applied" for patch in patches) > len(patches) / 2


def test_tables_name_what_the_json_names():
    result = CliRunner().invoke(app, ["doctor", "--no-speed"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for words in (torch.__version__, "E5M2 x E4M3", "FP8 training can run here", "gloo"):
        assert words in result.stdout
    assert "TFLOP/s" not in result.stdout


@pytest.mark.parametrize("width", ["80", "200"])
def test_what_the_machine_can_do_fits_on_some_screens(answer, width):
    result = CliRunner().invoke(app, ["doctor", "--no-speed"], env={"COLUMNS": width})
    assert len(result.stdout.splitlines()) < 60
    (row,) = (line.split() for line in result.stdout.splitlines() if line.strip().startswith("defect of Colossal-AI"))
    defects = [patch for patch in answer["colossal"]["patches"] if patch["kind"] == "defect of Colossal-AI"]
    assert sum(map(int, row[3:])) == len(defects) > 1


def test_each_patch_is_listed_when_asked_for(answer):
    result = CliRunner().invoke(app, ["doctor", "--no-speed", "--patches"], env={"COLUMNS": "400"})
    for patch in answer["colossal"]["patches"]:
        assert patch["summary"] in result.stdout


def test_a_problem_that_stops_training_gives_exit_code_1_and_its_reason(monkeypatch):
    monkeypatch.setattr(problems, "OLDEST_TORCH", "3.0")
    result = CliRunner().invoke(app, ["doctor", "--no-speed"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert f"stops training: PyTorch {torch.__version__} is older than 3.0." in result.stdout
    assert "FP8 training cannot run here" in result.stdout


@pytest.mark.parametrize("flag", ["--no-speed", "--patches"])
def test_what_is_about_a_machine_does_not_go_with_a_run(flag, tmp_path):
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), flag])
    assert done.exit_code == 2
    assert f"{flag} is about this machine, and RUN about" in " ".join(done.stderr.split())
