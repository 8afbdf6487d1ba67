"""The scripts under `examples/` on two gloo ranks, which are started once for all modes."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fp8booster import export, load_fp8
from fp8booster.checkpoints import newest_checkpoint
from fp8booster.cli.train.data import train_tokenizer
from tests.colossal.models import tiny_llama
from tests.distributed import run_ranks
from tests.examples.example_ranks import EXAMPLES, FINETUNING, PRETRAINING, Outcome, train_all

VOCABULARY = 336


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples find a pretrained model and leave their checkpoints."""
    folder = tmp_path_factory.mktemp("examples")
    source = Path(sysconfig.get_paths()["stdlib"], "ast.py").read_text()
    (folder / "text.txt").write_text(source[:20000])
    lines = [
        {"instruction": "Repeat this line.", "input": line, "output": line} for line in source.splitlines()[:40] if line
    ]
    del lines[0]["input"]
    (folder / "instructions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    train_tokenizer([source], VOCABULARY, folder / "pretrained")
    tiny_llama(vocab_size=VOCABULARY).save_pretrained(folder / "pretrained")
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[dict[str, dict[str, Outcome]]]:
    """The losses of each rank."""
    files = [str(folder / name) for name in ("text.txt", "instructions.jsonl")]
    return run_ranks(train_all, 2, str(folder), *files, initialize=False)


def losses_of(outcomes: list[dict[str, dict[str, Outcome]]], kind: str, name: str) -> list[float]:
    """Those of rank 0, which are those of all ranks."""
    first, second = (outcome[kind][name] for outcome in outcomes)
    assert not isinstance(first, str), first
    assert first == second
    return first


def test_the_minimal_one_learns_and_saves(outcomes, folder) -> None:
    for outcome in outcomes:
        losses = outcome["minimal"]["low_level_zero"]
        assert len(losses) == 10
        assert losses[-1] < 0.8 * losses[0]
    assert AutoModelForCausalLM.from_pretrained(folder / "checkpoint").config.vocab_size == 256


@pytest.mark.parametrize("name", PRETRAINING)
def test_pretraining_learns_and_goes_on_from_its_checkpoint(outcomes, folder, name) -> None:
    losses = losses_of(outcomes, "pretrain", name)
    assert len(losses) == 4
    assert losses[-1] < 0.95 * losses[0]
    (resumed,) = losses_of(outcomes, "resume", name)
    # from other weights, a step would begin at the first loss
    assert resumed < 0.5 * (losses[0] + losses[-1])
    checkpoint = newest_checkpoint(folder / name)
    assert checkpoint.name == "step-00000005"
    model, loading = AutoModelForCausalLM.from_pretrained(checkpoint / "model", output_loading_info=True)
    assert not loading["missing_keys"]
    tokens = torch.tensor([list(b"import os")])
    assert model(input_ids=tokens, labels=tokens).loss < losses[0]


@pytest.mark.parametrize("name", FINETUNING)
def test_finetuning_learns_answers(outcomes, folder, name) -> None:
    losses = losses_of(outcomes, "finetune", name)
    assert losses[-1] < losses[0]
    tuned = newest_checkpoint(folder / f"tuned {name}")
    assert (tuned / "model" / "tokenizer.json").is_file()
    assert json.loads((tuned / "state.json").read_text()) == {"step": 3}


def test_adapters_learn_on_a_frozen_model(folder, monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    import lora

    sys.modules.pop("lora")
    export(folder / "pretrained", tmp_path / "fp8", engine_ranks=None)
    losses = lora.train("fp8", str(folder / "text.txt"))
    assert len(losses) == 10
    assert losses[-1] < 0.98 * losses[0]
    adapted = PeftModel.from_pretrained(load_fp8("fp8", frozen=True), "adapters")
    assert all(weight.any() for name, weight in adapted.named_parameters() if "lora_B" in name)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import loop

    yield loop
    sys.modules.pop("loop")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--plugin", "ddp", "--tp", "2"], "--plugin ddp takes no --tp; gemini, hybrid and moe do"),
        (["--plugin", "moe", "--sp-mode", "ring"], "--plugin moe takes no --sp-mode; hybrid does"),
        (["--plugin", "hybrid", "--pp", "2"], "--pp is 2 and --micro-batches 1; a pipeline takes at least one"),
        (["--plugin", "hybrid", "--tp", "4"], "2 processes cannot be divided into groups of 4"),
        (["--plugin", "hybrid", "--sp", "2"], "--sp needs --sp-mode"),
    ],
)
def test_what_cannot_be_done_is_refused(loop, capsys, monkeypatch, options, says) -> None:
    import argparse

    monkeypatch.setenv("WORLD_SIZE", "2")
    parser = argparse.ArgumentParser()
    loop.add_arguments(parser)
    with pytest.raises(SystemExit):
        loop.parse_arguments(parser, options)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--data", "no-such-file"], "error: --data no-such-file is not a file"),
        (["--resume", "--out", "no-such-folder"], "holds no checkpoint; leave --resume out"),
        (["--out", "done"], "holds a checkpoint; add --resume to go on from it, or give another --out"),
    ],
)
def test_files_that_are_not_as_told_end_it_before_ranks_meet(loop, monkeypatch, tmp_path, options, says) -> None:
    import argparse

    monkeypatch.chdir(tmp_path)
    (tmp_path / "done" / "step-00000004").mkdir(parents=True)
    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    loop.add_arguments(parser)
    with pytest.raises(SystemExit, match=says):
        loop.run(lambda args: pytest.fail("it trained"), parser.parse_args(options))


def test_a_line_without_an_answer_is_told(loop, monkeypatch, tmp_path) -> None:
    import finetune

    sys.modules.pop("finetune")
    file = tmp_path / "instructions.jsonl"
    for line in ('{"instruction": "a"}', "not JSON", "3"):
        file.write_text(line + "\n")
        with pytest.raises(ValueError, match=r'line 1 of .* is no JSON object with "instruction" and "output"'):
            finetune.Instructions(str(file), None, 8)


def test_an_encoder_is_refused(loop, tmp_path) -> None:
    import finetune
    from transformers import BertConfig

    sys.modules.pop("finetune")
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is an encoder \(bert\)"):
        finetune.train(finetune.parse(["--model", str(tmp_path), "--data", "none.jsonl"]))
