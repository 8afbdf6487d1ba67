"""Batches of tokens for a causal language model."""

from __future__ import annotations

import torch

from fp8booster.training.boosted import causal


def test_documents_are_packed_behind_their_separators() -> None:
    tokens = torch.tensor([[5, 9, 6, 7, 9, 9, 8, 8], [9, 5, 5, 5, 5, 5, 5, 5], [5, 5, 5, 5, 5, 5, 5, 9]])
    batch = causal(tokens, separator=9)
    assert batch["input_ids"] is tokens
    assert batch["position_ids"].tolist() == [
        [0, 1, 0, 1, 2, 0, 0, 1],
        [0, 0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert batch["labels"].tolist() == [
        [5, 9, -100, 7, 9, -100, -100, 8],
        [9, -100, 5, 5, 5, 5, 5, 5],
        [5, 5, 5, 5, 5, 5, 5, 9],
    ]
    assert causal(tokens).keys() == {"input_ids", "labels"}
