"""Rows that tokens become on their way to experts, against plain indexing and its gradients."""

from __future__ import annotations

import pytest
import torch

from fp8booster.kernels.expert_rows import sender_begins
from fp8booster.nn.experts.host_copy import HostCopy
from fp8booster.nn.experts.routing import Choices, Routes, Sent, count_rows, rows_of, sent_weights, weighted_sum

EXPERTS = 6


@pytest.fixture
def chosen(device: torch.device) -> torch.Tensor:
    """Two experts for each of 40 tokens; one expert is nobody's."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(40, EXPERTS - 1, generator=generator).topk(2).indices.to(device)


def test_rows_lie_by_expert_and_then_by_token(chosen: torch.Tensor) -> None:
    routes = Routes.of(chosen, EXPERTS)
    expected = sorted((expert, token) for token, own in enumerate(chosen.tolist()) for expert in own)
    assert routes.tokens.tolist() == [token for _, token in expected]
    for token, (own, places) in enumerate(zip(chosen.tolist(), routes.places.tolist(), strict=True)):
        assert [expected[place] for place in places] == [(expert, token) for expert in own]
    wide = Routes.of(chosen, 2**16)
    assert torch.equal(routes.choices, wide.choices)
    assert torch.equal(routes.places, wide.places)


def test_counts_are_those_of_each_expert(chosen: torch.Tensor) -> None:
    counts = count_rows(chosen, EXPERTS)
    assert torch.equal(counts, chosen.flatten().bincount(minlength=EXPERTS))
    assert counts[-1] == 0
    assert HostCopy(counts).tolist() == counts.tolist()
    matrices = torch.stack([torch.zeros(2, 3, dtype=torch.int64, device=chosen.device), counts.view(2, 3)])
    part = HostCopy(matrices).part(1, slice(1, 3))
    assert part.tolist() == counts.view(2, 3)[:, 1:].tolist()


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_and_gradients_are_those_of_indexing(chosen: torch.Tensor, weight_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens, factors, dy = (
        torch.randn(rows, 16, generator=generator).bfloat16().to(chosen.device) for rows in (40, 80, 40)
    )
    weights = torch.rand(40, 2, generator=generator).to(chosen.device, weight_dtype)
    tokens.requires_grad_(), weights.requires_grad_()
    routes = Routes.of(chosen, EXPERTS)
    made = weighted_sum(rows_of(tokens, routes) * factors, weights, routes)  # the experts multiply by factors
    by_choice = (tokens[routes.tokens] * factors)[routes.places]
    expected = (by_choice * weights.unsqueeze(-1)).sum(1).to(torch.bfloat16)
    assert torch.equal(made, expected)
    dtokens, dweights = torch.autograd.grad(made, (tokens, weights), dy)
    expected_dtokens, expected_dweights = torch.autograd.grad(expected, (tokens, weights), dy)
    assert torch.equal(dtokens, expected_dtokens)
    torch.testing.assert_close(dweights, expected_dweights)  # a sum, on a GPU in another order


def test_without_tokens_there_are_no_rows() -> None:
    routes = Routes.of(torch.empty(0, 2, dtype=torch.int64), EXPERTS)
    tokens, weights = torch.zeros(0, 16, requires_grad=True), torch.zeros(0, 2, requires_grad=True)
    made = weighted_sum(rows_of(tokens, routes), weights, routes)
    made.sum().backward()
    assert made.shape == tokens.grad.shape == (0, 16)
    assert weights.grad.shape == (0, 2)


@pytest.mark.parametrize("experts", [127, 129, 300, 2**15 - 1, 2**15, 40000])
def test_rows_lie_by_expert_however_many_there_are(experts: int) -> None:
    """Also where their numbers do not fit into the types that a GPU sorts fast."""
    chosen = torch.tensor([[experts - 1, 0], [1, experts - 2], [experts // 2, experts - 1]])
    routes = Routes.of(chosen, experts)
    by_row = [chosen[token, (routes.places[token] == row).nonzero().item()] for row, token in enumerate(routes.tokens)]
    assert by_row == sorted(chosen.flatten().tolist())


def test_a_token_has_one_row_for_each_rank_that_holds_its_experts() -> None:
    chosen = torch.tensor([[5, 1, 0], [2, 3, 4], [1, 0, 1], [5, 4, 5]])
    routes = Routes.to_ranks(chosen, held=2, ranks=3)
    assert routes.tokens[:6].tolist() == [0, 2, 1, 0, 1, 3]  # by rank and then by token; the others nobody gets
    assert routes.places.tolist() == [[3, 0, 12], [2, 12, 4], [1, 12, 12], [5, 12, 12]]
    assert routes.ends.tolist() == [2, 3, 6]
    assert len(routes.choices) == chosen.numel()
    few = Routes.to_ranks(chosen, held=3, ranks=2)  # a token has no more rows than there are ranks
    assert few.places.tolist() == [[3, 0, 8], [1, 4, 8], [2, 8, 8], [5, 8, 8]]
    assert len(few.choices) == 2 * len(chosen)


def test_choices_go_with_tokens_and_their_gradients_come_back() -> None:
    chosen, weights = torch.tensor([[5, 1, 0], [2, 3, 4]]), torch.rand(2, 3, requires_grad=True)
    choices = Choices.of(chosen, 2, 3)
    words = choices.packed(weights)[:4]  # to ranks 0, 1, 2, 2 go tokens 0, 1, 0, 1
    own = words.detach().view(torch.int32)[:, :3]
    assert own.tolist() == [[2, 1, 0], [0, 1, 2], [1, 2, 2], [2, 2, 0]]
    of_rows = sent_weights(words, 3)
    assert torch.equal(of_rows, weights[[0, 1, 0, 1]])
    (of_rows * (own < 2) * torch.arange(1, 5).unsqueeze(1)).sum().backward()
    assert weights.grad.tolist() == [[3, 1, 1], [2, 2, 4]]  # by the rows on whose ranks they are used


def test_weights_that_were_sent_are_read_once_and_where_they_are_asked_for() -> None:
    told = torch.tensor([[2, 2, 0, 3, 0]])  # by a rank: choices of each of two experts, and behind them tokens
    words = Choices.of(torch.tensor([[0, 1], [0, 3], [1, 2]]), 2, 2).packed(torch.rand(3, 2))[:3]
    asked: list[int] = []

    def weights() -> torch.Tensor:
        asked.append(1)
        return sent_weights(words, 2)

    counts = HostCopy(torch.tensor([[2, 2]]))
    sent = Sent(torch.ones(3, 4), 2, weights, words.view(torch.int32), told, sender_begins(told, 2), counts)
    assert (sent.rows, sent.chosen.tolist()) == (4, [[0, 1], [0, 2], [1, 2]])
    assert sent.layout(2).places[:, 0].tolist() == [0, 1, 17]
    assert asked == []
    assert sent.weights is sent.weights
    assert asked == [1]


def test_choices_of_experts_elsewhere_have_no_row() -> None:
    own = torch.tensor([[1, 2], [2, 2], [0, 1]])  # 2: an expert elsewhere
    routes = Routes.of(own, 2, 3)
    assert routes.tokens.tolist() == [2, 0, 2]
    assert routes.places.tolist() == [[1, 3], [3, 3], [0, 2]]  # there are three
    tokens, weights = torch.arange(6.0).view(3, 2).requires_grad_(), torch.full((3, 2), 2.0).requires_grad_()
    rows = rows_of(tokens, routes)
    assert torch.equal(rows, tokens[[2, 0, 2]])
    made = weighted_sum(rows, weights, routes)
    assert torch.equal(made, torch.stack([2 * tokens[0], 0 * tokens[1], 4 * tokens[2]]))
    made.sum().backward()
    assert torch.equal(tokens.grad, torch.tensor([[2.0] * 2, [0.0] * 2, [4.0] * 2]))
    assert torch.equal(weights.grad, torch.tensor([[1.0, 0.0], [0.0, 0.0], [9.0, 9.0]]))
    none = Routes.of(torch.full((3, 2), 2), 2, 0)
    assert rows_of(tokens, none).shape == (0, 2)
    assert not weighted_sum(rows_of(tokens, none), weights, none).any()
