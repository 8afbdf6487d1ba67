"""`fp8booster generate` by a model and by what was exported of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from typer.testing import CliRunner

from fp8booster import export
from fp8booster.cli.main import app
from tests.cli.model_folders import write_model
from tests.cli.train.test_runs import ENVIRONMENT
from tests.programs import run_program

TWICE = ("--fp8-option", "scaling=rowwise") * 2
PROMPT = "def add_argument(self"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def generate(*arguments: object) -> tuple[str, str]:
    """Return the text that was printed, and what was told besides."""
    asked = ["generate", *map(str, arguments), "--prompt", PROMPT, "--max-new-tokens", "16"]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout, done.stderr


def test_bf16_is_greedy_decoding_of_transformers(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    for _ in range(16):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    printed, told = generate(folder, "--precision", "bf16")
    assert printed == tokenizer.decode(ids[0], skip_special_tokens=True) + "\n"
    assert "16 tokens in" in told


def test_transformers_generates_from_what_the_tokenizer_gives(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16)
    assert model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=2).shape[0] == 1


def kept(told: str) -> tuple[float, float]:
    """MiB of parameters, and of keys and values."""
    words = told.splitlines()[-1].split()
    places = [place for place, word in enumerate(words) if word == "MiB"]
    return float(words[places[0] - 1]), float(words[places[1] - 1])


@pytest.mark.parametrize("exported", [False, True])
def test_fp8_goes_on_from_the_prompt_with_fp8_keys_and_values(exported, folder, tmp_path):
    checkpoint = folder
    if exported:
        checkpoint = export(folder, tmp_path / "fp8", engine_ranks=None).folder
    (printed, told), (other, in_fp8) = (generate(checkpoint, "--kv-cache", kind) for kind in ("bf16", "fp8"))
    for text in (printed, other):
        assert text.startswith(PROMPT)
        assert len(text) > len(PROMPT) + 4
    assert kept(in_fp8)[1] < kept(told)[1]


@pytest.mark.parametrize(
    "model",
    [
        GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4)),
        Gemma2ForCausalLM(Gemma2Config(vocab_size=512, **SIZES, head_dim=64, sliding_window=8)),
        MambaForCausalLM(MambaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2, state_size=8)),
        JambaForCausalLM(
            JambaConfig(
                vocab_size=512,
                **SIZES,
                num_experts=1,
                attn_layer_offset=1,
                attn_layer_period=2,
                use_mamba_kernels=False,
            )
        ),
    ],
    ids=["GPT-2", "Gemma 2", "Mamba", "Jamba"],
)
def test_a_model_is_given_the_cache_that_it_takes(model, folder, tmp_path):
    """It is none of DynamicCache's kind for some with transformers 4.51, and states are no keys and values."""
    shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(folder / "tokenizer_config.json", tmp_path / "model")
    model.bfloat16().save_pretrained(tmp_path / "model")
    of_states = isinstance(model, (MambaForCausalLM, JambaForCausalLM))
    printed, told = generate(tmp_path / "model", *(("--precision", "bf16") if of_states else ()))
    assert printed.startswith(PROMPT)
    assert kept(told)[1] <= 0.01 if of_states else kept(told)[1] > 0


def test_a_mixture_that_was_trained_with_a_loss_of_balance_generates(folder, tmp_path):
    """With transformers 4.51 that loss fails on one token with a cache."""
    shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(folder / "tokenizer_config.json", tmp_path / "model")
    config = Qwen3MoeConfig(vocab_size=512, **SIZES, num_experts=4, num_experts_per_tok=2, output_router_logits=True)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    assert generate(tmp_path / "model")[0].startswith(PROMPT)


def test_the_settings_are_the_command_s_and_not_the_folder_s(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((folder / "generation_config.json").read_text())
    asked = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 5.0, "num_beams": 3, "stop_strings": ["a"]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({**settings, **asked}))
    assert generate(tmp_path / "model")[0] == generate(folder)[0]


def test_each_token_that_ends_a_text_for_the_model_does(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    third = model.generate(ids, max_new_tokens=3, do_sample=False)[0, -1].item()
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] = [tokenizer.eos_token_id, third]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    assert "3 tokens in" in generate(tmp_path / "model", "--precision", "bf16")[1]


def test_sampling_follows_the_seed(folder):
    first, again, other = (generate(folder, "--temperature", 2, "--seed", seed)[0] for seed in (1, 1, 2))
    assert first == again != other


def test_the_least_temperature_and_the_last_seed_are_taken(folder):
    greedy = generate(folder, "--precision", "bf16")[0]
    assert generate(folder, "--precision", "bf16", "--temperature", 1e-6, "--seed", 2**64 - 1)[0] == greedy


def test_a_program_prints_the_text_alone_to_standard_output(folder):
    done = run_program("fp8booster", "generate", folder, "--prompt", PROMPT, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(PROMPT)
    assert "MiB" not in done.stdout


def test_what_cannot_be_done_is_refused_in_a_sentence(folder):
    for arguments, words in (
        ((folder, "--kv-cache", "int4"), "--kv-cache is 'int4'; use one of bf16, fp8"),
        ((folder, "--precision", "int4"), "--precision is 'int4'; use one of bf16, fp8"),
        (("gone", "--temperature", "1e-30"), "--temperature is 1e-30; give 0, for the likeliest token always, or"),
        (("gone", "--temperature", "inf"), "--temperature is inf; give 0"),
        (("gone", "--seed", "5"), "--seed 5 needs sampling, and --temperature is 0; give a higher one, or leave"),
        (("gone", "--precision", "bf16", "--fp8-option", "always=true"), "--fp8-option is about FP8, and --precision"),
        ((folder, *TWICE), "--fp8-option scaling is given twice; give it once"),
        (
            (folder, "--fp8-option", "activations.recompute=all"),
            "--fp8-option activations.recompute is about training, and changes nothing",
        ),
        (("gone", "--temperature", "1", "--seed", 2**64), "18446744073709551615"),
        ((folder, "--prompt", ""), "--prompt is empty"),
        ((folder, "--prompt", "a", "--max-new-tokens", "100000"), "give at most --max-new-tokens "),
        ((folder, "--prompt", "a b " * 20000), "give a shorter --prompt"),
    ):
        done = CliRunner().invoke(app, ["generate", "--prompt", PROMPT, *map(str, arguments)])
        assert done.exit_code == 2, words
        assert words in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize("options", [(), ("--temperature", 1)])
def test_logits_that_are_no_numbers_are_an_error(folder, tmp_path, options):
    shutil.copytree(folder, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16)
    head = model.get_output_embeddings().weight.data  # finite, and what it computes is not
    head[0], head[1] = 3e38, -3e38
    model.save_pretrained(tmp_path / "model")
    arguments = ["generate", tmp_path / "model", "--prompt", PROMPT, "--precision", "bf16", *options]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    said = " ".join(done.stderr.split())
    assert "NaN" in said
    assert str(tmp_path / "model") in said
