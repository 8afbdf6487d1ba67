"""Where tokens lie among the rows of experts."""

from __future__ import annotations

import random

import pytest
import torch

from fp8booster.kernels.grouped_product import Groups
from fp8booster.nn.experts.row_layout import RowLayout

COUNTS = {
    "one sender": [[3, 0, 40, 16]],
    "three senders": [[3, 0, 40], [0, 0, 8], [13, 0, 1]],
    "all to the last": [[0, 0, 70]],
    "all to the first": [[64, 0, 0]],
    "nothing": [[0, 0], [0, 0]],
    "uneven": [random.Random(0).choices(range(40), k=128)],
}


def assert_lays_out(groups: Groups, choices: list[int], owners: list[int], experts: int) -> None:
    """Each expert has its choices in order, rows of a multiple of 16 and not of 0; the last has what is spare."""
    ends, before = groups.ends.tolist(), 0
    assert groups.rows == len(choices) == ends[-1]
    assert len(ends) == experts
    for expert, (end, of_group) in enumerate(zip(ends, groups.slices(), strict=True)):
        assert of_group == slice(before, end)
        assert (end - before) % 16 == 0 < end - before
        own = [number for number, owner in enumerate(owners) if owner == expert]
        found = choices[before:end]
        assert found == own + [-1] * (len(found) - len(own))
        assert len(found) - len(own) <= 16 or expert == experts - 1
        before = end


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_each_expert_has_the_tokens_that_senders_sent_it(counts: list[list[int]], device: torch.device) -> None:
    """Of each token every second choice is of an expert elsewhere."""
    experts = len(counts[0])
    owners = [expert for sender in counts for expert, count in enumerate(sender) for _ in range(count)]
    chosen = torch.tensor([[owner, experts] for owner in owners], dtype=torch.int64, device=device).view(-1, 2)
    layout = RowLayout.of_choices(chosen, experts)
    choices, places = layout.choices.tolist(), layout.places
    assert_lays_out(layout.groups, [-1 if each < 0 else each // 2 for each in choices], owners, experts)
    assert layout.choices[places[:, 0]].tolist() == list(range(0, 2 * len(owners), 2))
    assert places[:, 1].tolist() == [len(choices)] * len(owners)


@pytest.mark.parametrize("experts", [2, 5, 130, 2**15 - 1, 2**15])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_each_expert_has_its_choices(experts: int, tokens: int, device: torch.device) -> None:
    """Also where experts' numbers do not fit into the type that a GPU sorts fast; the first is nobody's."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(1, experts, (tokens, 3), generator=generator)
    layout = RowLayout.of_choices(chosen.to(device), experts)
    assert_lays_out(layout.groups, layout.choices.tolist(), chosen.flatten().tolist(), experts)
    assert layout.choices[layout.places.flatten()].tolist() == list(range(3 * tokens))
    assert layout.places.shape == (tokens, 3)
    assert layout.of_token == 3
    assert layout.by_choice().of_token == 1
    assert torch.equal(layout.by_choice().places.flatten(), layout.places.flatten())
