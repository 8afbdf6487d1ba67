"""Fine-tune a pretrained model in FP8 on instructions and answers.

    torchrun --standalone --nproc-per-node 8 finetune.py --model folder --data instructions.jsonl

`--model` is a folder in Hugging Face's format with weights and tokenizer. A line of `--data` is an object with
"instruction", "output" and, if there is any, "input". Only the answer counts for the loss.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from loop import add_arguments, parse_arguments, run, train_and_save, weights_dtype

import torch  # isort: skip  (after loop, which imports fp8booster)
from torch.utils.data import Dataset
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

IGNORED = -100
"""The label of a token that does not count, in transformers and in Colossal-AI."""


class Instructions(Dataset):
    """Instructions with their answers, as token numbers of one length."""

    def __init__(self, file: str, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self.samples = []
        for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
            try:
                example = json.loads(line)
                example["instruction"], example["output"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f'line {number} of {file} is no JSON object with "instruction" and "output"; correct or remove it'
                ) from None
            question = f"{example['instruction']}\n{example.get('input', '')}".strip() + "\n\n"
            prompt = tokenizer(question)["input_ids"]
            answer = tokenizer(example["output"], add_special_tokens=False)["input_ids"]
            self.samples.append(self._sample(prompt, [*answer, tokenizer.eos_token_id], length))

    @staticmethod
    def _sample(prompt: list[int], answer: list[int], length: int) -> dict[str, torch.Tensor]:
        # padding comes last, so that causal attention needs no mask for it; equal lengths suit every plugin
        prompt = prompt[: max(0, length - len(answer))]
        answer = answer[:length]
        padding = length - len(prompt) - len(answer)
        return {
            "input_ids": torch.tensor([*prompt, *answer, *[answer[-1]] * padding]),
            "labels": torch.tensor([*[IGNORED] * len(prompt), *answer, *[IGNORED] * padding]),
        }

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder in Hugging Face's format")
    parser.add_argument("--data", required=True, help="a file of JSON lines")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    add_arguments(parser)
    parser.set_defaults(lr=2e-5)
    return parse_arguments(parser, arguments)


def train(args: argparse.Namespace) -> list[float]:
    """Train as the arguments say; returns the loss of each step."""
    config = AutoConfig.from_pretrained(args.model, use_cache=False)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_decoder:
        raise ValueError(
            f"the model in {args.model} is an encoder ({config.model_type}), whose tokens see those that they are to "
            "predict; give a causal language model"
        )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {args.model} has no eos_token to end answers with; set one and save it")
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {args.model} has {len(tokenizer)} tokens and the model {config.vocab_size} embeddings; "
            "use the tokenizer that belongs to it"
        )
    if getattr(config, "max_position_embeddings", args.sequence) < args.sequence:
        raise ValueError(
            f"--sequence is {args.sequence} and the model has {config.max_position_embeddings} positions; give less"
        )
    model = AutoModelForCausalLM.from_pretrained(args.model, config=config, torch_dtype=weights_dtype(args))
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)

    def save_config(folder: Path) -> None:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    data = Instructions(args.data, tokenizer, args.sequence)
    return train_and_save(args, model.train(), optimizer, data, save_config)


if __name__ == "__main__":
    run(train, parse())
