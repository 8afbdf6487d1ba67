"""Layers that are told that each row of a batch is a sequence, as those of gpt-oss are, as CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8booster.nn.fused.packing import PackedEmbeddings, Sequences
from fp8booster.nn.graphs import captured_layers
from fp8booster.nn.graphs.layer import WARM_UP
from fp8booster.nn.graphs.values import Unsupported, flatten, maker_of
from tests.nn.fused.models import INSTALLED, VOCABULARY
from tests.nn.graphs.test_layer import LAYERS, pair_of_models

CPU = torch.device("cpu")


@pytest.mark.skipif("gpt_oss" not in INSTALLED, reason="this transformers has no gpt-oss")
@pytest.mark.usefixtures("record")
def test_layers_with_sinks_compute_the_bits_of_eager_ones(device: torch.device) -> None:
    models = pair_of_models(device, "gpt_oss")
    for step in range(2 * WARM_UP + 4):
        # as many tokens in one row and in two: calls of two kinds
        ids = torch.randint(0, VOCABULARY, (1 + step % 2, 32 // (1 + step % 2)), device=device)
        losses = [model(input_ids=ids, labels=ids).loss for model in models]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one.grad, other.grad)
    assert captured_layers(models[1]) == {None: LAYERS}


def embeddings(sequences: Sequences) -> PackedEmbeddings:
    return PackedEmbeddings.of((torch.ones(2, 4), torch.zeros(2, 4)), sequences)


def test_calls_of_other_rows_are_of_another_kind() -> None:
    same, again, others = (Sequences.of_rows(rows, 4, CPU) for rows in (2, 2, 3))
    tensors: list[torch.Tensor] = []
    key = flatten(embeddings(same), tensors)
    assert key == flatten(embeddings(again), [])
    assert key != flatten(embeddings(others), [])
    assert key != flatten(tuple(embeddings(same)), [])
    assert [each.tolist() for each in tensors] == [[[1.0] * 4] * 2, [[0.0] * 4] * 2]
    made = maker_of(embeddings(same))(tensors)
    assert type(made) is PackedEmbeddings
    assert made.sequences is same
    assert all(one is other for one, other in zip(made, tensors, strict=True))


def test_sequences_of_a_batch_are_none_of_the_rows_that_a_graph_has() -> None:
    boundaries = Sequences.of_rows(2, 4, CPU).boundaries
    for sequences in (Sequences(boundaries, 4), Sequences(boundaries.clone(), 4)):
        with pytest.raises(Unsupported, match="PackedEmbeddings"):
            flatten(embeddings(sequences), [])
    lost = PackedEmbeddings((torch.ones(1),))  # rebuilt by something that does not know them
    with pytest.raises(Unsupported, match="PackedEmbeddings"):
        flatten(lost, [])


def test_rows_that_were_met_without_values_are_made_again() -> None:
    rows = 1234
    with FakeTensorMode():
        Sequences.of_rows(rows, 3, CPU)
    with torch.inference_mode():
        made = Sequences.of_rows(rows, 3, CPU)
    assert not made.boundaries.is_inference()
    assert made.boundaries.tolist() == made.on_host == list(range(0, 3 * rows + 1, 3))
    assert Sequences.of_rows(rows, 3, CPU) is made
