"""`fp8booster export` of runs, and `fp8booster train` from what it wrote."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fp8booster.cli.inference import find_source
from fp8booster.cli.main import app
from tests.cli.train.test_runs import ENVIRONMENT, SMALL, losses, succeed
from tests.colossal.models import tiny_llama
from tests.programs import run_program


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[object, ...]:
    folder = tmp_path_factory.mktemp("data")
    shutil.copy(Path(sysconfig.get_paths()["stdlib"], "argparse.py"), folder)
    return ("--data", folder, "--cache", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, data) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    succeed("--precision", "fp8", "--steps", 2, "--save", 1, "--out", out, *data, *SMALL)
    return out


def export(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["export", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_a_run_is_exported_from_its_masters_and_trained_on(run, data, tmp_path):
    options = ("--engine-ranks", "0")
    done = run_program("fp8booster", "export", run, tmp_path / "fp8", *options, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "28 linear layers in FP8, 28 of them cast from FP32 masters; 1 in 16 bits: lm_head" in done.stdout
    assert "step-00000002" in done.stdout
    names = {file.name for file in (tmp_path / "fp8").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not {"state.json", "files.json"} & names
    record = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert record["quantization_config"]["weight_block_size"] == [128, 128]
    succeed(
        *("--model", tmp_path / "fp8", "--precision", "bf16", "--steps", 2, "--lr", 1e-6, "--out", tmp_path / "run"),
        *data,
        *SMALL[2:],  # the folder has a tokenizer
    )
    # the masters of the run, in FP8: the loss goes on from where it was
    assert losses(tmp_path / "run" / "bf16")[1] < losses(run / "fp8")[1] - 0.05
    trained_on = tmp_path / "run" / "bf16" / "checkpoints" / "step-00000002" / "model" / "config.json"
    assert "quantization_config" not in json.loads(trained_on.read_text())


def test_a_checkpoint_is_exported(run, tmp_path):
    printed = export(run / "fp8" / "checkpoints" / "step-00000001", tmp_path / "out", "--format", "tensorwise")
    assert "step-00000001" in printed


def test_what_is_not_sent_in_fp8_is_not_cast_from_masters(run, tmp_path):
    checkpoint = tmp_path / "step-00000002"
    shutil.copytree(run / "fp8" / "checkpoints" / checkpoint.name, checkpoint)
    assert find_source(checkpoint).masters == checkpoint / "masters"
    state = json.loads((checkpoint / "state.json").read_text())
    for name, pair in (("plugin_options", "fp8_communication=False"), ("fp8_options", "messages=None")):
        changed = {**state, "options": {**state["options"], name: [pair]}}
        (checkpoint / "state.json").write_text(json.dumps(changed))
        (checkpoint / "files.json").unlink(missing_ok=True)
        assert find_source(checkpoint).masters is None
    (checkpoint / "state.json").write_text(json.dumps({**state, "precision": "bf16"}))
    assert find_source(checkpoint).masters is None


def test_a_model_is_exported(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    printed = export(tmp_path / "model", tmp_path / "out", "--engine-ranks", 0)
    assert printed.startswith("14 linear layers in FP8; 1 in 16 bits: lm_head\n")


def test_shapes_that_engines_refuse_are_refused_with_the_format_that_works(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    arguments = [str(tmp_path / name) for name in ("model", "out")]
    done = CliRunner().invoke(app, ["export", *arguments])
    assert done.exit_code == 2
    assert "q_proj.weight is [64, 64] in a part of 64 output features" in " ".join(done.stderr.split())
    assert "use the format compressed-tensors" in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()
    export(*arguments, "--format", "compressed-tensors", "--engine-ranks", 4)


def test_other_folders_are_refused(tmp_path):
    for arguments, words in (
        ((tmp_path, tmp_path / "out"), "neither a run, nor a checkpoint"),
        ((tmp_path / "none", tmp_path / "out"), "neither a run, nor a checkpoint"),
    ):
        done = CliRunner().invoke(app, ["export", *map(str, arguments)])
        assert done.exit_code == 2
        assert words in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()
