"""A LLaMA in FP8 by FSDP2: `torchrun --standalone --nproc-per-node 2 examples/fsdp2.py README.md`."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import fp8booster


def train(file: str, steps: int = 10) -> list[float]:
    """Train on the first bytes of a file; return this rank's loss of each step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))  # FP32 masters; it computes in BF16 and FP8
    fp8booster.fully_shard(model)  # in place of torch's, which is called on each layer and on the model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.from_file(file, size=256 * steps * dist.get_world_size(), dtype=torch.uint8)
    losses = []
    for batch in text.view(-1, 4, 64)[dist.get_rank() :: dist.get_world_size()]:
        tokens = batch.long()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id="checkpoint-fsdp2")
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(dist.get_node_local_rank())
    dist.init_process_group()
    print(train(sys.argv[1]))
    dist.destroy_process_group()
