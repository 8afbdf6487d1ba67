"""Pre-train a LLaMA, or with `--plugin moe` a Mixtral, from random weights in FP8.

    torchrun --standalone --nproc-per-node 8 pretrain.py --size 1b --data corpus.txt --tokenizer folder

Without `--data` it trains on random tokens, which shows speed and memory; without `--tokenizer` a token is a byte.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from loop import add_arguments, parse_arguments, run, train_and_save, weights_dtype

import torch  # isort: skip  (after loop, which imports fp8booster)
from colossalai.accelerator import get_accelerator
from torch.utils.data import Dataset
from transformers import AutoTokenizer

from fp8booster.training.models import MODELS, SIZES, build


class Pieces(Dataset):
    """Token numbers cut into sequences of equal length, each a sample that predicts itself."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        """`tokens`  [count]."""
        count = len(tokens) // length
        self.pieces = tokens[: count * length].reshape(count, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = torch.from_numpy(self.pieces[index].astype(np.int64))
        return {"input_ids": piece, "labels": piece}


def read_data(args: argparse.Namespace) -> tuple[np.ndarray, int]:
    """Token numbers and how many kinds there are. Encodes the whole file: tokenize large corpora beforehand."""
    if args.data is None:
        generator = np.random.default_rng(0)
        return generator.integers(0, 32000, size=1024 * args.sequence, dtype=np.uint16), 32000
    if args.tokenizer is None:
        return np.fromfile(args.data, dtype=np.uint8), 256
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    text = Path(args.data).read_text(encoding="utf-8")
    return np.array(tokenizer(text, verbose=False)["input_ids"]), len(tokenizer)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--experts", type=int, default=8, help="of each layer (moe)")
    parser.add_argument("--data", help="a text file")
    parser.add_argument("--tokenizer", help="a folder in Hugging Face's format")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    add_arguments(parser)
    return parse_arguments(parser, arguments)


def train(args: argparse.Namespace) -> list[float]:
    """Train as the arguments say; returns the loss of each step."""
    tokens, vocabulary = read_data(args)
    shape = replace(MODELS[args.size], vocabulary=vocabulary, sequence=args.sequence)
    if args.plugin == "moe":
        shape = replace(shape, family="mixtral", rope_theta=1e6, experts=args.experts, experts_per_token=2)
    config = shape.config(args.sequence)
    torch.manual_seed(0)  # on every rank: all draw the same weights, of which plugins keep what they shard
    device = get_accelerator().get_current_device()
    model = build(config, device=device, dtype=weights_dtype(args), checkpointing=args.checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    return train_and_save(args, model, optimizer, Pieces(tokens, args.sequence), config.save_pretrained)


if __name__ == "__main__":
    run(train, parse())
