"""AdamShards to update by Adam's rule, and how they are compared."""

from __future__ import annotations

import torch

from fp8booster.kernels.adamw import AdamRates, AdamShards

COUNTS = (1, 7, 1024, 4097, 20001)  # the last takes more programs than a run of them has
RATES = {
    "AdamW": AdamRates(1e-2, (0.9, 0.95), 1e-8, 0.1, decoupled=True),
    "Adam": AdamRates(1e-2, (0.9, 0.999), 1e-6, 0.0, decoupled=False),
    "Adam with decay": AdamRates(torch.tensor(1e-2), (0.5, 0.7), 1e-3, 0.3, decoupled=False),
}


def shards(dtype: torch.dtype, gradients: torch.dtype, device: torch.device | str = "cpu") -> AdamShards:
    torch.manual_seed(0)

    def draw(of: torch.dtype) -> list[torch.Tensor]:
        return [(torch.randn(count) * torch.exp(torch.randn(count))).to(of).to(device) for count in COUNTS]

    steps = [torch.tensor(float(1 + index)).to(device) for index in range(len(COUNTS))]
    moments = [moment.mul(0.01) for moment in draw(dtype)], [moment.square() for moment in draw(dtype)]
    return AdamShards(draw(dtype), draw(gradients), *moments, steps)


def copied(one: AdamShards) -> AdamShards:
    return AdamShards(*([tensor.clone() for tensor in tensors] for tensors in one))


def far_apart(one: AdamShards, other: AdamShards) -> list[str]:
    """What was written and differs by more than some units in the last place."""
    found = []
    for name in ("values", "exp_avgs", "exp_avg_sqs"):
        for count, ours, theirs in zip(COUNTS, getattr(one, name), getattr(other, name), strict=True):
            ulp = torch.finfo(ours.dtype).eps
            # on a GPU torch takes 1 - 0.999 in FP32, 1.3e-5 off
            if not torch.allclose(ours, theirs, rtol=max(2e-5, ulp), atol=1e-6 if ulp < 1e-6 else ulp):
                found.append(f"{name} {count}")
    return found
