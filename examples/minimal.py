"""The whole of FP8 training in one file, with nothing of fp8booster's but a plugin: a small LLaMA on a text file.

    torchrun --standalone --nproc-per-node 2 examples/minimal.py README.md

A token is a byte. Take `use_fp8=True` away to compare with BF16.
"""

import sys
from pathlib import Path

from fp8booster.plugins import LowLevelZeroPlugin  # in place of colossalai's, and before anything of it is imported

import colossalai  # isort: skip
import torch  # isort: skip
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

SEQUENCE, STEPS = 64, 10


def train(file: str) -> list[float]:
    """Train on a file; returns this rank's loss of each step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    model = LlamaForCausalLM(config).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    plugin = LowLevelZeroPlugin(stage=2, precision="bf16", max_norm=1.0, use_fp8=True)  # the line that FP8 takes
    booster = Booster(plugin=plugin)
    text = torch.tensor(list(Path(file).read_bytes()))
    pieces = TensorDataset(text[: len(text) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE))
    loader = plugin.prepare_dataloader(pieces, batch_size=4, shuffle=True, drop_last=True)
    model, optimizer, *_ = booster.boost(model, optimizer)

    losses = []
    for step, (tokens,) in zip(range(STEPS), loader, strict=False):
        tokens = tokens.to(get_accelerator().get_current_device())
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step + 1}/{STEPS}  loss {losses[-1]:.4f}", flush=True)
    booster.save_model(model, "checkpoint", shard=True, use_safetensors=True)  # as any model of transformers
    return losses


if __name__ == "__main__":
    colossalai.launch_from_torch()
    train(sys.argv[1])
    dist.destroy_process_group()
