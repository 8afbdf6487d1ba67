"""A LLaMA in FP8 by DDP: `torchrun --standalone --nproc-per-node 2 examples/ddp.py README.md`."""

import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import fp8booster


def train(file: str, steps: int = 10) -> list[float]:
    """Train on the first bytes of a file; return this rank's loss of each step."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256)).to(device)  # FP32 masters, under autocast
    model = fp8booster.data_parallel(model)  # in place of DistributedDataParallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.from_file(file, size=256 * steps * dist.get_world_size(), dtype=torch.uint8)
    losses = []
    for batch in text.view(-1, 4, 64)[dist.get_rank() :: dist.get_world_size()]:
        tokens = batch.long().to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(dist.get_node_local_rank())
    dist.init_process_group()
    print(train(sys.argv[1]))
    dist.destroy_process_group()
