"""`fp8booster eval` of a model, what was exported of it, and a run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fp8booster import FP8Config, export, quantize, report
from fp8booster.checkpoints import write_manifest
from fp8booster.cli.evaluation import Losses, evaluate
from fp8booster.cli.inference import FoundModel, load_model
from fp8booster.cli.main import app
from tests.cli.model_folders import TEXT, write_model
from tests.cli.train.test_runs import ENVIRONMENT, SMALL, succeed
from tests.colossal.moe.models import tiny_mixtral
from tests.nn.models import tiny_gpt2, tiny_llama
from tests.programs import run_program

BRIEF = ("--sequence", 32, "--tokens", 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[object, ...]:
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text(TEXT)
    return ("--data", file, "--cache", tmp_path_factory.mktemp("cache"))


def evaluated(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["eval", *map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_the_losses_are_those_of_transformers_and_the_divergence_is_torchs() -> None:
    model, other = tiny_llama(initializer_range=0.2), quantize(tiny_llama(initializer_range=0.2))
    batches = torch.randint(128, (3, 2, 16), generator=torch.Generator().manual_seed(0)).unbind()
    with torch.no_grad():
        losses = [torch.stack([each(input_ids=ids, labels=ids).loss for ids in batches]) for each in (model, other)]
        first, second = (
            torch.cat([each(input_ids=ids).logits[:, :-1].reshape(-1, 128).log_softmax(-1) for ids in batches])
            for each in (model, other)
        )
    found = evaluate([model, other], batches)
    assert [each.loss for each in found] == pytest.approx([each.mean().item() for each in losses], rel=1e-5)
    assert found[0].kl == 0
    expected = torch.nn.functional.kl_div(second, first, log_target=True, reduction="batchmean").item()
    assert found[1].kl == pytest.approx(expected, rel=1e-3)
    assert expected > 0
    assert found[1].perplexity == math.exp(found[1].loss)
    assert Losses(800.0, 0.0).perplexity == math.inf


def test_a_model_in_each_precision_and_calibrated(folder, data):
    found = evaluated(folder, *data, "--sequence", 32, "--tokens", 640, "--calibrated", 3, "--batch", 8)
    assert (found["tokens"], found["sequence"], found["calibration_tokens"]) == (20 * 31, 32, 3 * 32)
    bf16, fp8, calibrated = found["columns"]
    assert [each["precision"] for each in found["columns"]] == ["bf16", "fp8", "fp8-calibrated"]
    assert [each["fp8_layers"] for each in found["columns"]] == [0, 14, 14]
    assert bf16["kl"] == 0
    for each in (fp8, calibrated):
        assert 0 < each["kl"] < 0.1
        assert each["loss"] == pytest.approx(bf16["loss"], rel=0.02)
        assert each["parameter_bytes"] < bf16["parameter_bytes"]
    assert fp8["kl"] != calibrated["kl"]
    finer = evaluated(
        folder, *data, "--sequence", 32, "--tokens", 640, "--precision", "fp8", "--fp8-option", "scaling=rowwise"
    )
    (column,) = finer["columns"]
    assert column["loss"] != fp8["loss"]


def test_what_was_exported_computes_what_the_model_does_in_fp8(folder, data, tmp_path):
    export(folder, tmp_path / "fp8", format="tensorwise")
    found = evaluated(folder, tmp_path / "fp8", *data, "--sequence", 32, "--tokens", 320, "--precision", "fp8")
    of_model, of_exported = found["columns"]
    assert of_exported["fp8_layers"] == 14
    assert of_exported["loss"] == pytest.approx(of_model["loss"], rel=1e-3)
    # one scale for q, k and v, and one for gate and up, as training has them
    assert of_exported["kl"] < 0.02


def test_what_an_fp8_folder_has_in_16_bits_stays_in_them(folder, data, tmp_path):
    config = FP8Config(layers=lambda name, _: "mlp" in name)
    export(folder, tmp_path / "fp8", format="tensorwise", config=config)
    found = evaluated(tmp_path / "fp8", *data, "--sequence", 32, "--tokens", 640, "--calibrated", 2)
    assert [each["fp8_layers"] for each in found["columns"]] == [0, 6, 6]


def test_weights_of_a_run_are_cast_from_the_masters_that_training_cast(data, tmp_path):
    succeed("--precision", "fp8", "--steps", 3, "--out", tmp_path / "run", *data, *SMALL)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "fp8"), "--format", "tensorwise"])
    assert done.exit_code == 0, done.output
    options = (*data, "--tokens", 320, "--precision", "fp8", "--sequence", 32)
    of_run, of_exported = evaluated(tmp_path / "run", tmp_path / "fp8", *options)["columns"]
    assert (of_run["from_masters"], of_exported["from_masters"]) == (28, 0)
    assert of_exported["kl"] == 0  # the bytes that training multiplied by
    (masters,) = (tmp_path / "run").glob("fp8/checkpoints/*/masters")
    shutil.rmtree(masters)
    masters.mkdir()
    write_manifest(masters.parent)
    of_values, _ = evaluated(tmp_path / "run", tmp_path / "fp8", *options)["columns"]
    assert (of_values["from_masters"], of_values["loss"] == of_run["loss"]) == (0, False)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_mixtral])
def test_a_model_that_no_engine_casts_is_cast_from_its_values(make, tmp_path):
    make().save_pretrained(tmp_path / "model")
    source = FoundModel(tmp_path / "model", FP8Config(), tmp_path)
    loaded, from_masters = load_model(source, "fp8", FP8Config(), torch.device("cpu"))
    assert from_masters == 0
    assert report(loaded).fp8


def test_a_run_is_evaluated_in_sequences_as_long_as_in_training(data, tmp_path):
    succeed("--precision", "fp8", "--steps", 1, "--out", tmp_path / "run", *data, *SMALL)
    done = run_program("fp8booster", "eval", tmp_path / "run", *data, "--tokens", 320, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "310 tokens of" in done.stdout
    assert "in sequences of 32" in " ".join(done.stdout.split())
    assert "28 of 29" in done.stdout
    assert "KL from the first" in done.stdout


def test_losses_that_are_not_finite_are_null_in_json(folder, data, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)  # finite, and sums of it are not
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    [column] = evaluated(tmp_path / "model", *data, *BRIEF, "--precision", "bf16")["columns"]
    assert (column["loss"], column["perplexity"], column["kl"]) == (None, None, None)


def test_names_with_brackets_are_shown_as_they_are(folder, tmp_path):
    model, text = shutil.copytree(folder, tmp_path / "model [b]"), tmp_path / "of [red[" / "b].txt"
    text.parent.mkdir()
    text.write_text(TEXT)
    arguments = ["eval", model, folder, "--data", text, "--cache", tmp_path / "cache", *BRIEF, "--precision", "bf16"]
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    assert f"loading {model} in bf16" in done.stderr
    assert f"of {text}," in done.stdout
    assert "model [b]" in done.stdout


def test_what_cannot_be_evaluated_is_refused_in_a_sentence(folder, data, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "bare")
    write_model(tmp_path / "larger", vocabulary=528)
    export(folder, tmp_path / "fine-grained", engine_ranks=None)
    for arguments, words in (
        ((tmp_path, *data), "neither a run, nor a checkpoint"),
        ((tmp_path / "bare", *data), "holds no tokenizer"),
        ((folder, tmp_path / "larger", *data), "evaluate models with one tokenizer together"),
        ((folder, "--data", tmp_path / "not-looked-for", "--precision", "fp4"), "use one of bf16, fp8"),
        ((folder, *data, "--calibrated", 10**6), "smaller --sequence or --calibrated"),
        ((folder, *data, "--sequence", 10**6), "give a shorter one"),
        ((folder, *data, "--fp8-option", "scaling=rowwise", "--calibrated", 1), "no one amax to calibrate"),
        (
            (tmp_path / "fine-grained", *data, "--precision", "fp8", "--calibrated", 1),
            f"{tmp_path / 'fine-grained'} has blockwise scales, and --calibrated scales each input by one amax",
        ),
    ):
        done = CliRunner().invoke(app, ["eval", *map(str, arguments)])
        assert done.exit_code == 2, words
        assert words in " ".join(done.stderr.split()), done.stderr
