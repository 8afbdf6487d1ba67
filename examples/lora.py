"""LoRA on a model whose own weights are frozen in FP8, in one short file: plain PyTorch on one GPU, or the CPU.

    python examples/lora.py models/7b-fp8 README.md

The folder is an FP8 checkpoint, as `fp8booster export` writes it or other engines do; its weights stay as they are, one
byte a value. `adapters/` gets what peft saves.
"""

import sys
from pathlib import Path

import peft
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from fp8booster import fuse, load_fp8

SEQUENCE, STEPS = 64, 10


def train(folder: str, file: str) -> list[float]:
    """Train adapters on a text file; returns the loss of each step."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_fp8(folder, frozen=True, device=device)  # in place of transformers' from_pretrained
    fuse(model)  # norms, rotary embedding and the loss over chunks of logits
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2, fused=True)

    text = AutoTokenizer.from_pretrained(folder)(Path(file).read_text(), return_tensors="pt")["input_ids"][0]
    pieces = text[: len(text) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    loader = DataLoader(pieces, batch_size=4, shuffle=True, drop_last=True)
    losses = []
    model.train()
    for step, tokens in zip(range(STEPS), loader, strict=False):
        tokens = tokens.to(device)
        with torch.autocast(device, torch.bfloat16):  # peft keeps adapters in FP32
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1}/{STEPS}  loss {losses[-1]:.4f}", flush=True)
    model.save_pretrained("adapters")
    return losses


if __name__ == "__main__":
    train(*sys.argv[1:])
