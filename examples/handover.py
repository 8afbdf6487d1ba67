"""Train a step, hand over, generate: an engine gets the FP8 bytes of a policy. `python examples/handover.py`

The engine is a second model of this package here. `load_weights` of a model in vLLM takes `tensors(policy, ...)` as is.
"""

from copy import deepcopy
from itertools import groupby

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fp8booster import FP8Config, convert_to_fp8, quantize
from fp8booster.serving import tensors

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}


def train(steps: int = 8) -> list[tuple[float, float]]:
    """Teach the policy to say 7; return each step's reward, and the divergence of the engine from the policy."""
    torch.manual_seed(0)
    policy = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64, eos_token_id=None, pad_token_id=0)).bfloat16()
    config = FP8Config(fused=False, always=True)  # the engine rounds between operations as transformers does
    engine, policy = quantize(deepcopy(policy), config).eval(), convert_to_fp8(policy, config)
    optimizer, history, prompts = torch.optim.AdamW(policy.parameters(), lr=1e-3), [], torch.ones(32, 1).long()
    for _ in range(steps):
        for path, layer in groupby(tensors(policy, "tensorwise"), key=lambda pair: pair[0].rpartition(".")[0]):
            engine.get_submodule(path).load_state_dict({name.rpartition(".")[2]: value for name, value in layer})
        said = engine.generate(prompts, attention_mask=prompts, max_new_tokens=16, do_sample=True)
        theirs, own = (model(said[:, :-1]).logits.float().log_softmax(-1) for model in (engine, policy))
        reward = (said[:, 1:] == 7).float()
        (-(reward - reward.mean()) * own.gather(-1, said[:, 1:, None])[..., 0]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append((reward.mean().item(), (theirs.exp() * (theirs - own)).sum(-1).mean().item()))
        print("reward {:.3f}  KL {:.1e}".format(*history[-1]), flush=True)
    return history


if __name__ == "__main__":
    train()
