"""Folders with a small model and its tokenizer."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import torch

from fp8booster.cli.train.data import train_tokenizer
from tests.nn.models import tiny_llama

TEXT = inspect.getsource(argparse)


def write_model(folder: Path, vocabulary: int = 512) -> Path:
    """A model with weights so large that its parts matter."""
    train_tokenizer([TEXT], vocabulary, folder)
    model = tiny_llama(vocab_size=vocabulary, initializer_range=0.1).to(torch.bfloat16)
    model.config.use_cache = False  # as training saves it
    model.save_pretrained(folder)
    return folder
