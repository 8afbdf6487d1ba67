"""Folders that are not whole, or hold what their model has not: every reader refuses them, and names the tensor."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)
from typer.testing import CliRunner

from fp8booster import FP8Config, convert_to_fp8, load_fp8
from fp8booster.cli.main import app
from fp8booster.cli.train.model_folder import has_weights, require_buildable
from fp8booster.serving.read import load_frozen, load_model
from tests.cli.model_folders import TEXT, write_model
from tests.nn.models import tiny_llama
from tests.serving.folders import export

NORM, UP, HEAD = "model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
SCALE = f"{UP}_scale_inv"


def mixtral() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=96, num_hidden_layers=1, num_local_experts=4, **sizes))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4))


def opt() -> nn.Module:
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4, "word_embed_proj_dim": 64}
    return OPTForCausalLM(OPTConfig(vocab_size=96, num_hidden_layers=1, **sizes))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (tiny_llama, NORM),
    "tied llama": (lambda: tiny_llama(tie_word_embeddings=True), EMBEDDING),
    "gpt2": (gpt2, "transformer.h.1.mlp.c_fc.bias"),
    "mixtral": (mixtral, "model.layers.0.block_sparse_moe.experts.2.w1.weight"),
    "opt": (opt, "model.decoder.layers.0.fc1.weight"),
}
"""And a tensor of each, by its name in files."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in 16 bits, with its tokenizer."""
    return write_model(tmp_path_factory.mktemp("model") / "bf16")


@pytest.fixture(scope="module")
def in_fp8(folder: Path) -> Path:
    return export(folder, folder.with_name("fp8")).folder


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "model")


@pytest.fixture
def copied_fp8(in_fp8: Path, tmp_path: Path) -> Path:
    return shutil.copytree(in_fp8, tmp_path / "model")


def rewrite(folder: Path, **changed: torch.Tensor | None) -> None:
    """Change tensors of a folder; None leaves one out."""
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **changed}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)


def readers(folder: Path) -> dict[str, Callable[[], object]]:
    """Return all that reads a folder of a model in 16 bits."""
    return {
        "train": lambda: require_buildable(str(folder)),
        "load": lambda: load_model(folder),
        "frozen": lambda: load_frozen(folder, FP8Config()),
        "export": lambda: export(folder, folder.with_name("out")),
    }


def refused(folder: Path, words: str, *, but: tuple[str, ...] = ()) -> None:
    """Every reader says this in a sentence."""
    for name, read in readers(folder).items():
        if name not in but:
            with within(60), pytest.raises(ValueError, match=words) as caught:
                read()
            assert "\n" not in str(caught.value), name
    assert not folder.with_name("out").exists()


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail where something waits for ever, as for who writes to a pipe."""

    def stop(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("changed", [{"hidden_act": "spiral"}, {"rope_scaling": {"rope_type": "spiral"}}])
def test_a_config_that_transformers_builds_no_model_from_is_refused(copied: Path, changed: dict[str, object]) -> None:
    config = copied / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    refused(copied, rf"transformers builds no model from {config} .*spiral.*; correct the config")


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_that_lacks_a_tensor_is_refused_and_a_whole_one_is_read(tmp_path, name):
    make, tensor = MODELS[name]
    torch.manual_seed(0)
    model = make().bfloat16()
    model.save_pretrained(tmp_path / "model")
    for key, value in load_model(tmp_path / "model").state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    require_buildable(str(tmp_path / "model"))
    rewrite(tmp_path / "model", **{tensor: None})
    experts = "mixtral" in name  # transformers 5 stacks them, and finds that there are too few
    refused(tmp_path / "model", f"lacks .*{tensor}; copy" + (r"|do not fit its config\.json" if experts else ""))


@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_of_another_shape_and_one_too_many_are_refused(tmp_path, name):
    make, tensor = MODELS[name]
    make().bfloat16().save_pretrained(tmp_path / "model")
    right = load_file(tmp_path / "model" / "model.safetensors")[tensor]
    rewrite(tmp_path / "model", **{tensor: torch.zeros(3, 5, dtype=torch.bfloat16)})
    refused(tmp_path / "model", r"do not fit its config\.json")
    rewrite(tmp_path / "model", **{tensor: right, f"{tensor}_of_another": right.clone()})
    refused(
        tmp_path / "model",
        f"holds .*{tensor.rpartition('.')[2]}_of_another, which the model of its config.json does not have",
    )


def test_many_missing_tensors_are_counted(copied):
    rewrite(copied, **{name: None for name in load_file(copied / "model.safetensors") if "layers.1" in name})
    refused(copied, r"lacks model\.layers\.1\S+, \S+, \S+ and 6 more; copy")


def test_what_is_made_from_others_may_be_there_or_not(copied):
    before = load_model(copied).state_dict()
    out = export(copied, copied.with_name("whole")).folder
    frequencies = {f"model.layers.{number}.self_attn.rotary_emb.inv_freq": torch.ones(8) for number in range(2)}
    rewrite(copied, **frequencies)
    assert all(torch.equal(value, before[name]) for name, value in load_model(copied).state_dict().items())
    again = export(copied, copied.with_name("again")).folder
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    load_frozen(copied, FP8Config())


def test_a_tied_weight_may_be_there_twice_if_it_is_one(tmp_path):
    model = tiny_llama(tie_word_embeddings=True).bfloat16()
    model.save_pretrained(tmp_path / "model")
    rewrite(tmp_path / "model", **{HEAD: model.lm_head.weight.detach().clone()})
    for loaded in (load_model(tmp_path / "model"), load_frozen(tmp_path / "model", FP8Config())):
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    rewrite(tmp_path / "model", **{HEAD: model.lm_head.weight.detach() + 1})
    refused(tmp_path / "model", f"{EMBEDDING} and {HEAD} in .* differ")


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_numbers_that_are_no_weights_are_refused(copied, dtype):
    rewrite(copied, **{NORM: torch.ones(64).to(dtype)})
    refused(copied, f"holds {NORM} as {dtype}, and weights are floating-point numbers")


@pytest.mark.parametrize("name", [NORM, EMBEDDING, UP, HEAD])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_values_that_are_not_finite_are_refused(copied, name, value):
    tensor = load_file(copied / "model.safetensors")[name]
    tensor.view(-1)[5] = value
    rewrite(copied, **{name: tensor})
    # a frozen layer's weight is cast
    refused(copied, f"{name} .*not finite", but=("train", "frozen") if name == UP else ("train",))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            UP,
            lambda codes: codes.view(torch.uint8).index_fill(0, torch.tensor([3]), 0x7F),
            "values that are not finite",
        ),
        (
            UP,
            lambda codes: codes.view(torch.uint8).index_fill(0, torch.tensor([3]), 0xFF),
            "values that are not finite",
        ),
        (SCALE, lambda scale: scale.fill_(torch.nan), "scales that are not finite numbers above 0"),
        (SCALE, lambda scale: scale.fill_(torch.inf), "scales that are not finite numbers above 0"),
        (SCALE, torch.neg, "scales that are not finite numbers above 0"),
        (SCALE, torch.zeros_like, "scales that are not finite numbers above 0"),
        (SCALE, lambda scale: torch.ones_like(scale, dtype=torch.int32), "scales of torch.int32"),
        (SCALE, lambda scale: scale.to(torch.complex64), "scales of torch.complex64"),
        (NORM, lambda norm: norm.fill_(torch.nan), "not finite"),
        (NORM, lambda norm: norm.to(torch.int32), "as torch.int32, and weights are floating-point numbers"),
        (NORM, lambda norm: None, f"lacks {NORM}"),
        (SCALE, lambda scale: None, rf"{UP} .*has no scale"),
    ],
)
def test_damaged_weights_in_fp8_are_refused(copied_fp8, name, change, words):
    changed = change(load_file(copied_fp8 / "model.safetensors")[name])
    if changed is not None and changed.dtype is torch.uint8:
        changed = changed.view(torch.float8_e4m3fn)
    rewrite(copied_fp8, **{name: changed})
    reads = {
        "load": lambda: load_fp8(copied_fp8),
        "frozen": lambda: load_fp8(copied_fp8, frozen=True),
        "export": lambda: export(copied_fp8, copied_fp8.with_name("out")),
        "decode": lambda: export(copied_fp8, copied_fp8.with_name("out"), format="bf16"),
    }
    for read in reads.values():
        with pytest.raises(ValueError, match=words):
            read()
    assert not copied_fp8.with_name("out").exists()


def test_files_of_torch_hold_the_same(folder, copied):
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    torch.save(tensors, copied / "pytorch_model.bin")
    loaded, expected = (load_model(each).state_dict() for each in (copied, folder))
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    require_buildable(str(copied))
    torch.save({name: value for name, value in tensors.items() if name != NORM}, copied / "pytorch_model.bin")
    refused(copied, f"lacks {NORM}; copy")
    torch.save({"model": tensors}, copied / "pytorch_model.bin")
    refused(copied, "holds more than tensors by name")


@contextmanager
def indexed(folder: Path) -> Iterator[dict[str, object]]:
    """Cut a folder's file in two, with an index, which may be changed."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": [NORM], "b.safetensors": [name for name in tensors if name != NORM]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    index: dict[str, object] = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    yield index
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index.update(weight_map=["a.safetensors"]), "'weight_map' in .* is a list where an object"),
        (lambda index: index.pop("weight_map"), "has no 'weight_map'"),
        (lambda index: index["weight_map"].update({NORM: 3}), f"a whole number in place of the file .*{NORM}"),
        (lambda index: index["weight_map"].update({NORM: ["a.safetensors"]}), f"a list in place of .*{NORM}"),
        (lambda index: index["weight_map"].update({NORM: "../outside.safetensors"}), "a file outside of its folder"),
        (lambda index: index["weight_map"].update({NORM: "c.safetensors"}), "c.safetensors is missing, which"),
        (lambda index: index["weight_map"].update({NORM: "*.safetensors"}), r"\*.safetensors is missing"),
        (lambda index: index["weight_map"].update({NORM: "."}), "is no regular file, which"),
        (lambda index: index["weight_map"].update({NORM: "b.safetensors"}), f"b.safetensors lacks {NORM}, which"),
        (lambda index: index["weight_map"].pop(HEAD), f"index.json lacks {HEAD}, which its files hold"),
    ],
)
def test_an_index_that_does_not_name_its_files_is_refused(copied, change, words):
    with indexed(copied) as index:
        save_file({NORM: torch.ones(64)}, copied.with_name("outside.safetensors"))
        change(index)
    refused(copied, words)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to nowhere"])
@pytest.mark.parametrize("name", ["a.safetensors", "model.safetensors.index.json", "model.safetensors", "config.json"])
def test_what_is_no_file_is_refused_at_once(copied, kind, name):
    if name in ("a.safetensors", "model.safetensors.index.json"):
        with indexed(copied):
            pass
    place = copied / name
    place.unlink()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("/dev/zero" if kind == "device" else copied / "gone")
    refused(copied, rf"{name} is (no regular file|missing)")


@pytest.mark.parametrize("kind", ["pipe", "link to nowhere"])
def test_a_tokenizer_that_is_no_file_is_not_left_out_of_an_export(copied, kind):
    place = copied / "tokenizer.json"
    place.unlink()
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(copied / "gone")
    with pytest.raises(ValueError, match=r"tokenizer\.json is (no regular file|missing)"):
        export(copied, copied.with_name("out"))
    assert not copied.with_name("out").exists()


def test_shards_without_their_index_are_not_taken_for_no_weights(copied):
    with indexed(copied):
        pass
    (copied / "model.safetensors.index.json").unlink()
    refused(copied, r"holds a\.safetensors, b\.safetensors, and no model\.safetensors")
    for file in copied.glob("*.safetensors"):
        file.unlink()
    assert not has_weights(str(copied))


def test_a_cache_of_links_is_read(folder, tmp_path):
    """As Hugging Face's hub client lays out what it fetched."""
    snapshot, blobs = tmp_path / "snapshots" / "1a2b", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(folder, blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        blob = file.rename(blobs / f"blob{number}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    expected = load_model(folder).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in load_model(snapshot).state_dict().items())
    require_buildable(str(snapshot))
    export(snapshot, tmp_path / "out")


@pytest.mark.parametrize("command", ["train", "plan", "generate", "eval", "export"])
def test_every_command_refuses_a_folder_that_lacks_tensors(copied, tmp_path, command):
    rewrite(copied, **{UP: None})
    (tmp_path / "text.txt").write_text(TEXT)
    text = ("--data", tmp_path / "text.txt", "--cache", tmp_path / "cache")
    arguments = {
        "train": ("--model", copied, "--nproc", 1, "--steps", 1, "--out", tmp_path / "run", *text),
        "plan": (copied, "--gpus", 1),
        "generate": (copied, "--prompt", "def"),
        "eval": (copied, "--sequence", 16, *text),
        "export": (copied, tmp_path / "out"),
    }[command]
    done = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert done.exit_code == 2, done.output
    assert f"lacks {UP}; copy the model again." in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("in_fp8", [True, False])
def test_a_model_with_another_head_is_not_read_as_a_causal_one(tmp_path: Path, in_fp8: bool) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}
    # of the same tensors as BertLMHeadModel, which shifts its labels
    model = BertForMaskedLM(BertConfig(vocab_size=96, **sizes)).bfloat16()
    if in_fp8:
        export(convert_to_fp8(model, FP8Config(always=True)), tmp_path / "model")
    else:
        model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"is a BertForMaskedLM, and .* here a BertLMHeadModel; load"):
        load_model(tmp_path / "model")
