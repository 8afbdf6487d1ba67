from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.training.data import batches
from benchmarks.training.engines import ENGINES, PEERS, chosen
from benchmarks.training.job import Job
from fp8booster.cli.train.data import TokenFile
from fp8booster.training.batches import Replica


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model": "8b"}, "--model is '8b'; use one of tiny"),
        ({"plugin": "expert"}, "--plugin is 'expert'; use one of low_level_zero"),
        ({"plugin": "moe"}, "moe trains mixtures of experts; use --model mixtral-8x7b, mixtral-100m"),
        ({"plugin": "moe", "model": "mixtral-1b", "zero": 2}, "--zero is 2; --plugin moe takes 0 or 1"),
        ({"plugin": "moe", "model": "mixtral-1b", "ep": 3}, "--ep is 3, which cannot divide the 8 experts"),
        ({"plugin": "moe", "model": "mixtral-1b", "ep": 0}, "--ep is 0; it must be at least 1"),
        ({"plugin": "hybrid", "model": "mixtral-1b", "ep": 2}, "--plugin hybrid takes no --ep; moe does"),
        ({"micro_batch": 0}, "--micro-batch is 0; it must be at least 1"),
        ({"warm_up": -1}, "--warm-up is -1"),
        ({"record": -1}, "--record is -1; give the steps between samples"),
        ({"lora": 0}, "--lora is 0; it must be at least 1"),
        ({"lora": 8, "model": "mixtral-1b"}, "--lora is not for mixtures of experts, as mixtral-1b"),
        ({"tp": 2}, "low_level_zero takes no --tp; gemini, hybrid and moe do"),
        ({"plugin": "gemini", "pp": 2}, "gemini takes no --pp; hybrid and moe do"),
        ({"plugin": "hybrid", "sp": 2}, "--sp needs --sp-mode"),
        ({"sp_mode": "ring"}, "low_level_zero takes no --sp-mode"),
        ({"zero": 3}, "--zero is 3; --plugin low_level_zero takes 1 or 2"),
        ({"plugin": "ddp", "zero": 1}, "--plugin ddp takes none: leave it out"),
        ({"lazy": True}, "low_level_zero cannot make weights late"),
        (
            {"plugin": "hybrid", "pp": 2, "micro_batches": 3, "plugin_options": ("pp_style=zbv",)},
            "--micro-batches is 3; with pp_style=zbv it must be a multiple of --pp",
        ),
        ({"plugin_options": ("overlap",)}, "'overlap' has no '='"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(values: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Job(**values)


def test_a_job_travels_as_json() -> None:
    tokens = TokenFile(Path("cache"), "text", "0", 272, 1000)
    job = Job(model="micro", plugin="hybrid", tp=2, plugin_options=("a=1",), tokens=tokens)
    assert Job.from_record(json.loads(json.dumps(job.as_record()))) == job


def test_zero_stages() -> None:
    job = Job(plugin="hybrid", zero=0)
    assert job.parallel("hybrid").zero_stage == 0
    assert job.parallel("low_level_zero").zero_stage == 2  # a peer, for which --zero was not meant


def test_peers_take_their_turns_before_ours() -> None:
    assert chosen("both", ["torchao", "fsdp2"]) == ["fsdp2", "torchao", "fp8booster-bf16", "fp8booster-fp8"]
    assert chosen("all", []) == ["fp8booster-bf16", "fp8booster-bf16-fused", "fp8booster-fp8"]
    assert chosen("bf16-fused", []) == ["fp8booster-bf16-fused"]
    assert chosen("fp8", ["all"]) == [*(name for name in PEERS if name != "peft-lora"), "fp8booster-fp8"]
    assert chosen("plain", ["all"], lora=True) == ["peft-lora", "fp8booster-plain"]
    with pytest.raises(ValueError, match="fp8booster-fp8 trains no adapters; give --lora with --precision plain"):
        chosen("fp8", [], lora=True)
    with pytest.raises(ValueError, match="peft-lora trains adapters; give their rank as --lora"):
        chosen("plain", ["peft-lora"])
    with pytest.raises(ValueError, match="no peer is called 'te'; --against takes colossal-low_level_zero"):
        chosen("fp8", ["te"])
    with pytest.raises(ValueError, match="--precision is 'fp16'"):
        chosen("fp16", [])


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.training.engines.find_spec", lambda package: None)
    assert ENGINES["torchao"].why_missing() == "torchao is not installed"
    assert ENGINES["fsdp2"].why_missing() is None


def test_replicas_read_different_random_tokens_in_turn() -> None:
    job = Job(model="micro", sequence=8, micro_batch=2, micro_batches=3)
    feeds = [batches(job, Replica(index, 2), torch.device("cpu")) for index in (0, 1, 0)]
    assert feeds[0](0).shape == (6, 8)
    assert torch.equal(feeds[0](0), feeds[2](0))
    assert torch.equal(feeds[0](0), feeds[0](2))
    assert not torch.equal(feeds[0](0), feeds[0](1))
    assert not torch.equal(feeds[0](0), feeds[1](0))


def text(folder: Path, vocabulary: int) -> TokenFile:
    torch.arange(256, dtype=torch.int16).numpy().tofile(folder / "tokens.bin")
    return TokenFile(folder, "counting", "0", vocabulary, 256)


def test_replicas_share_out_a_text(tmp_path: Path) -> None:
    job = Job(model="micro", sequence=8, micro_batch=2, micro_batches=2, tokens=text(tmp_path, vocabulary=272))
    feeds = [batches(job, Replica(index, 2), torch.device("cpu")) for index in (0, 1)]
    rows = torch.cat([feed(step) for step in range(4) for feed in feeds])  # one epoch
    assert rows.shape == (32, 8)
    assert torch.equal(rows.flatten().sort().values, torch.arange(256))


def test_a_text_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    job = Job(model="micro", sequence=8, tokens=text(tmp_path, vocabulary=1000))
    with pytest.raises(ValueError, match="1000 kinds of tokens and --model micro embeddings for 512"):
        batches(job, Replica(0, 1), torch.device("cpu"))
