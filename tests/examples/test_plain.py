"""The examples of plain PyTorch on two gloo ranks."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM

from tests.distributed import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("fsdp2", "ddp")


def train(folder: str, text: str) -> dict[str, list[float]]:
    """The losses of each example."""
    sys.path.insert(0, str(EXAMPLES))
    os.chdir(folder)
    return {name: importlib.import_module(name).train(text) for name in NAMES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples leave their checkpoints."""
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[dict[str, list[float]]]:
    """The losses of each rank."""
    return run_ranks(train, 2, str(folder), str(EXAMPLES / "README.md"))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short_and_learns(outcomes: list[dict[str, list[float]]], name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40
    for losses in (outcome[name] for outcome in outcomes):
        assert len(losses) == 10
        assert losses[-1] < 0.8 * losses[0]


def test_a_whole_model_takes_the_checkpoint(outcomes: list[dict[str, list[float]]], folder: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / "checkpoint-fsdp2", no_dist=True)
    model.load_state_dict(state["model"])
    tokens = torch.tensor([list((EXAMPLES / "README.md").read_bytes()[:64])])
    assert model(input_ids=tokens, labels=tokens).loss < 0.8 * outcomes[0]["fsdp2"][0]
