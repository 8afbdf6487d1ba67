from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8booster.training.batches import Batches, GlobalBatch

SEQUENCE = 4
SEQUENCES = 10
TOKENS = np.arange(SEQUENCE * SEQUENCES + 3, dtype=np.uint16)  # three tokens too few for an eleventh


def batches(replicas: int = 1, batch: int = 1, accumulate: int = 1, replica: int = 0, seed: int = 0) -> Batches:
    step = GlobalBatch(sequence=SEQUENCE, batch=batch, accumulate=accumulate, replicas=replicas)
    return Batches(TOKENS, step, replica, seed)


def first_tokens(source: Batches, positions: range) -> list[int]:
    return [int(micro[0, 0]) for position in positions for micro in source.micro_batches(position)]


def test_an_epoch_visits_every_sequence_once_and_the_next_in_another_order():
    first = first_tokens(batches(), range(SEQUENCES))
    second = first_tokens(batches(), range(SEQUENCES, 2 * SEQUENCES))
    assert sorted(first) == sorted(second) == [SEQUENCE * index for index in range(SEQUENCES)]
    assert first != second


def test_a_sequence_is_a_piece_of_the_file_in_int64():
    (tokens,) = batches().micro_batches(0)
    assert tokens.dtype == torch.int64
    assert tokens.tolist()[0] == list(range(int(tokens[0, 0]), int(tokens[0, 0]) + SEQUENCE))


def test_the_order_depends_on_the_seed_and_on_the_position_alone():
    assert first_tokens(batches(seed=1), range(8)) == first_tokens(batches(seed=1), range(8))
    assert first_tokens(batches(seed=1), range(8)) != first_tokens(batches(seed=2), range(8))
    # reading from the middle, as a resumed run does, also across the end of an epoch
    assert first_tokens(batches(), range(7, 15)) == first_tokens(batches(), range(15))[7:]


@pytest.mark.parametrize(("replicas", "batch", "accumulate"), [(2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 2, 2)])
def test_a_step_takes_the_same_sequences_however_it_is_spread(replicas, batch, accumulate):
    def step(position: int) -> set[int]:
        return {
            int(row[0])
            for replica in range(replicas)
            for micro in batches(replicas, batch, accumulate, replica).micro_batches(position)
            for row in micro
        }

    assert step(4) == set(first_tokens(batches(), range(4, 8)))


def test_too_few_tokens_are_told_with_what_a_step_takes():
    with pytest.raises(ValueError, match=r"43 tokens and one step takes 48 .*smaller --batch"):
        batches(replicas=3, batch=4)
