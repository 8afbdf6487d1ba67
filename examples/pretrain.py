"""Pre-train a LLaMA, or with `--plugin moe` a Mixtral, from random weights in FP8.

    torchrun --standalone --nproc-per-node 8 pretrain.py --size 1b --data corpus.txt --tokenizer folder

Without `--data` it trains on random tokens, which shows speed and memory; without `--tokenizer` a token is a byte.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from loop import train_and_save
from modes import add_arguments, make_booster, make_plugin, parse_arguments, run, weights_dtype

import torch  # isort: skip  (after modes, which imports fp8booster)
from colossalai.accelerator import get_accelerator
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MixtralConfig, PretrainedConfig

SIZES = {  # hidden, feed-forward, layers, heads, key-value heads
    "tiny": (64, 128, 4, 4, 2),
    "1b": (2048, 5632, 22, 32, 4),
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
}


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


def make_config(args: argparse.Namespace, vocabulary: int) -> PretrainedConfig:
    """The shape of the model."""
    hidden, feed_forward, layers, heads, key_value_heads = SIZES[args.size]
    shape = {
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": args.sequence,
        "use_cache": False,
    }
    if args.plugin == "moe":
        return MixtralConfig(**shape, num_local_experts=args.experts)
    return LlamaConfig(**shape)


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
    # equal seeds: every rank draws the same weights, of which plugins keep what they shard
    torch.manual_seed(0)
    tokens, vocabulary = read_data(args)
    config = make_config(args, vocabulary)
    with get_accelerator().get_current_device():
        model = AutoModelForCausalLM.from_config(config, torch_dtype=weights_dtype(args))
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    plugin = make_plugin(args, model)
    loader = plugin.prepare_dataloader(
        Pieces(tokens, args.sequence), batch_size=args.batch * args.micro_batches, shuffle=True, drop_last=True
    )
    booster = make_booster(args, plugin)
    model, optimizer, *_ = booster.boost(model.train(), optimizer)

    return train_and_save(args, booster, model, optimizer, loader, config.save_pretrained)


if __name__ == "__main__":
    run(train, parse())
