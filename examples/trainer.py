"""FP8 in Hugging Face's Trainer: a small LLaMA on a text file, of which a token is a byte.

    torchrun --standalone --nproc-per-node 2 examples/trainer.py README.md

Take the callback away to compare with BF16.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from fp8booster import report
from fp8booster.hf import FP8Callback

SEQUENCE, STEPS = 64, 10


def train(file: str, resume: bool = False) -> Trainer:
    """Train on a file, or go on from the newest checkpoint."""
    set_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = list(Path(file).read_bytes())
    pieces = [text[start : start + SEQUENCE] for start in range(0, len(text) - SEQUENCE + 1, SEQUENCE)]
    data = [{"input_ids": piece, "labels": piece} for piece in pieces]

    arguments = TrainingArguments(
        "checkpoints", per_device_train_batch_size=4, max_steps=STEPS, save_steps=STEPS // 2, learning_rate=1e-2,
        bf16=True, use_cpu=not torch.cuda.is_available(), logging_steps=1, report_to=[],
    )  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[FP8Callback()])
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model("trained")  # as any model of transformers
    return trainer


if __name__ == "__main__":
    print(report(train(sys.argv[1]).model))
