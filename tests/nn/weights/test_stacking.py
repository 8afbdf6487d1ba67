from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8booster.nn.weights.stacking import are_stacked, as_matrix, stack_rows, stacked_columns, stacked_view


def test_weights_are_read_without_their_own_detach() -> None:
    """That of a weight which shardformer has sharded copies its layout deeply, at every call."""
    weights = [nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    for weight in weights:
        weight.detach = None
    assert torch.equal(as_matrix(weights[:1]), weights[0])
    assert torch.equal(as_matrix(weights), torch.cat(weights))
    whole = torch.randn(8, 8)
    neighbours = [nn.Parameter(part) for part in whole.split(4)]
    for weight in neighbours:
        weight.detach = None
    assert as_matrix(neighbours).data_ptr() == whole.data_ptr()
    assert not as_matrix(weights).requires_grad


def neighbours_by_chance() -> list[torch.Tensor]:
    """Two memories, one behind the other."""
    memory = bytearray(2 * 4 * 8 * 4)
    return [
        torch.frombuffer(memory, dtype=torch.float32, count=32, offset=offset).view(4, 8) for offset in (0, 4 * 8 * 4)
    ]


def apart() -> dict[str, list[torch.Tensor]]:
    """Weights that are no consecutive rows, though each shares memory with others or lies beside it."""
    whole = torch.randn(16, 8)
    return {
        "the other way round": [whole[4:8], whole[:4]],
        "a gap": [whole[:4], whole[5:9]],
        "twice the same": [whole[:4], whole[:4]],
        "columns": [whole[:4, :4], whole[:4, 4:]],
        "transposed": [whole[:8].t(), whole[8:].t()],
        "memories of their own": [torch.randn(4, 8), torch.randn(4, 8)],
        "neighbours by chance": neighbours_by_chance(),
    }


@pytest.mark.parametrize("how", apart())
def test_weights_that_are_no_consecutive_rows_are_copied(how: str) -> None:
    weights = apart()[how]
    assert not are_stacked(weights)
    found = stack_rows(weights)
    assert torch.equal(found, torch.cat(weights))
    assert found.untyped_storage().data_ptr() not in [weight.untyped_storage().data_ptr() for weight in weights]


@pytest.mark.parametrize("rows", [(4, 4), (3, 1, 5), (2,)])
def test_consecutive_rows_are_viewed_as_one_matrix(rows: tuple[int, ...]) -> None:
    whole = torch.randn(16, 8)
    weights = [nn.Parameter(part) for part in whole[2 : 2 + sum(rows)].split(rows)]
    assert are_stacked(weights)
    for view in (stacked_view(weights), stack_rows(weights)):
        assert torch.equal(view, whole[2 : 2 + sum(rows)])
        assert view.data_ptr() == whole[2].data_ptr()
        assert not view.requires_grad


def test_consecutive_columns_are_viewed_as_one_matrix() -> None:
    whole = torch.randn(8, 16)
    for part in (whole, whole[:, 2:11]):
        parts = part.split((4, part.shape[1] - 4), 1)
        found = stacked_columns(parts)
        assert torch.equal(found, part)
        assert found.data_ptr() == part.data_ptr()


def columns_apart() -> dict[str, list[torch.Tensor]]:
    whole, flat, memory = torch.randn(8, 16), torch.randn(64), bytearray(64)
    return {
        "the other way round": [whole[:, 4:], whole[:, :4]],
        "a gap": [whole[:, :4], whole[:, 5:8]],
        "other strides": [whole[:, :4], whole.view(4, 32)[:, 4:8]],
        "memories of their own": [torch.randn(8, 4), torch.randn(8, 4)],
        "rows": [whole[:4], whole[4:]],
        "beyond a row": [flat[:8].view(2, 4), flat[4:12].view(2, 4)],
        "columns that lie apart": [whole.t()[:, :4], whole.t()[:, 4:]],
        "neighbours by chance": [
            torch.frombuffer(memory, dtype=torch.float32, count=8, offset=offset).as_strided((1, 8), (16, 1))
            for offset in (0, 32)
        ],
        "columns of columns": [flat.as_strided((4, 1), (2, 16), place) for place in range(2)],
    }


@pytest.mark.parametrize("how", columns_apart())
def test_columns_that_are_not_consecutive_are_no_matrix(how: str) -> None:
    assert stacked_columns(columns_apart()[how]) is None


def test_one_weight_may_lie_transposed_or_hold_several_matrices() -> None:
    matrix, matrices = torch.randn(4, 8), torch.randn(3, 4, 8)
    assert torch.equal(as_matrix([matrix], is_transposed=True), matrix.t())
    assert torch.equal(as_matrix([matrices]), torch.cat(list(matrices)))
    assert torch.equal(as_matrix([matrices], is_transposed=True), torch.cat(list(matrices)).t())
