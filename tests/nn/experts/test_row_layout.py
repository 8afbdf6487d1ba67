"""Where tokens lie among the rows of experts."""

from __future__ import annotations

import random

import pytest
import torch

from fp8booster.nn.experts.row_layout import RowLayout, permute, unpermute

COUNTS = {
    "one sender": [[3, 0, 40, 16]],
    "three senders": [[3, 0, 40], [0, 0, 8], [13, 0, 1]],
    "all to the last": [[0, 0, 70]],
    "all to the first": [[64, 0, 0]],
    "nothing": [[0, 0], [0, 0]],
    "uneven": [random.Random(0).choices(range(40), k=128)],
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_each_expert_has_its_tokens_in_order_and_zeros(counts: list[list[int]], device: torch.device) -> None:
    owners = [expert for sender in counts for expert, count in enumerate(sender) for _ in range(count)]
    layout = RowLayout.of(torch.tensor(counts, device=device), len(owners))
    tokens = torch.arange(1.0, len(owners) + 1, device=device).view(-1, 1).requires_grad_()
    rows = permute(tokens, layout)
    ends, before = layout.groups.ends.tolist(), 0
    assert layout.groups.rows == len(rows) == ends[-1]
    for expert, (end, of_group) in enumerate(zip(ends, layout.groups.slices(), strict=True)):
        assert of_group == slice(before, end)
        assert (end - before) % 16 == 0 < end - before
        own = [float(number) for number, owner in enumerate(owners, 1) if owner == expert]
        found = rows[before:end].flatten().tolist()
        assert found == own + [0.0] * (len(found) - len(own))
        assert len(found) - len(own) <= 16 or expert == len(ends) - 1
        before = end
    assert torch.equal(unpermute(rows, layout), tokens)
    (gradient,) = torch.autograd.grad((rows * torch.arange(len(rows), device=device).view(-1, 1)).sum(), tokens)
    assert gradient.flatten().tolist() == layout.places.tolist()
