"""Cross entropy of a rank's part of the logits, without other ranks: what they send is computed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fp8booster.nn.fused import loss as loss_module
from fp8booster.nn.fused.loss import VocabularyPart

ROWS, VOCABULARY = 40, 5000
SPLITS = (0, 3000, 5000)
"""Where ranks' columns begin and end: more than a block of the kernel, and not whole ones."""


@pytest.fixture
def case(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, the last of a group far above the others in half of the rows, and targets on all ranks."""
    logits = 3 * torch.randn(ROWS, VOCABULARY, device=device)
    logits[::2, -1] = 30.0
    targets = torch.randint(0, VOCABULARY, (ROWS,), device=device)
    targets[::7] = -100
    targets[2], targets[4] = VOCABULARY - 1, 0
    return logits, targets


@pytest.fixture
def whole(case: tuple, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """[all logits]; the gather gives what their ranks would send."""
    found = [case[0]]

    def gather(output: torch.Tensor, values: torch.Tensor, group: object) -> None:
        logits, targets = found[0].double(), case[1]
        parts = []
        for first, last in pairwise(SPLITS):
            here = (targets >= first) & (targets < last)
            at_target = logits.gather(1, targets.clamp(0, VOCABULARY - 1)[:, None])[:, 0]
            parts += [logits[:, first:last].logsumexp(1), torch.where(here, at_target, 0.0)]
        counted = (targets != -100).repeat(2)
        own = [torch.cat(parts[start : start + 2]) for start in (0, 2)]
        # one of the ranks sent these
        assert any(torch.allclose(values[counted].double(), part[counted], rtol=1e-5, atol=1e-5) for part in own)
        output.copy_(torch.cat(own))

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(loss_module, "gather_bytes", gather)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [0, 1])
def test_losses_and_gradient_are_those_of_whole_rows(case, whole, dtype, rank) -> None:
    targets = case[1]
    whole[0] = case[0].to(dtype)
    exact = whole[0].double().requires_grad_()
    right = F.cross_entropy(exact, targets, reduction="none")
    (0.25 * right.sum()).backward()
    first, last = SPLITS[rank : rank + 2]
    padded = F.pad(whole[0][:, first:last], (0, 24), value=100.0)
    part = VocabularyPart(VOCABULARY, last - first, first, group="two ranks")
    factor = torch.full((), 0.25, device=targets.device)
    losses, _ = part.cross_entropy(padded.clone(), targets, ignore_index=-100)
    gradient = padded.clone()
    again, _ = part.cross_entropy(gradient, targets, ignore_index=-100, factor=factor)
    torch.testing.assert_close(losses, again)
    torch.testing.assert_close(losses.double(), right.detach(), rtol=1e-5, atol=1e-5)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    # in FP16 the smallest values are no more than steps of 2^-24
    wanted = exact.grad[:, first:last]
    torch.testing.assert_close(gradient[:, : last - first].double(), wanted, rtol=rounding, atol=2**-24)
    assert not gradient[:, last - first :].any()
    assert not gradient[targets == -100].any()


@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("rank", [0, 1])
def test_tokens_that_cannot_be_chosen_leave_the_loss_of_other_targets_alone(case, whole, rank, low) -> None:
    logits, targets = case
    # the first columns of both ranks, where the other rank's rows have no target of their own
    logits[:, list(SPLITS[:2])] = low
    targets[:] = torch.randint(1, SPLITS[1], targets.shape, device=targets.device)
    targets[1::2] += SPLITS[2] - SPLITS[1]
    targets[3], targets[5] = 0, SPLITS[1]
    right = F.cross_entropy(logits.double(), targets, reduction="none")
    first, last = SPLITS[rank : rank + 2]
    part = VocabularyPart(VOCABULARY, last - first, first, group="two ranks")
    own = logits[:, first:last].clone()
    factor = torch.ones((), device=targets.device)
    losses, _ = part.cross_entropy(own, targets, ignore_index=-100, factor=factor)
    torch.testing.assert_close(losses.double(), right, rtol=1e-5, atol=1e-5)
    assert own.isfinite().all()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_target_that_is_no_token_makes_its_own_loss_nan(case, whole, rank) -> None:
    logits, targets = case
    wrong = torch.tensor([1, 3, 5, 8], device=targets.device)
    targets[wrong] = torch.tensor([-1, VOCABULARY, VOCABULARY + 24, -99], device=targets.device)
    first, last = SPLITS[rank : rank + 2]
    own = F.pad(logits[:, first:last], (0, 24))
    part = VocabularyPart(VOCABULARY, last - first, first, group="two ranks")
    losses, _ = part.cross_entropy(own, targets, ignore_index=-100, factor=torch.ones((), device=targets.device))
    expected = torch.zeros_like(targets, dtype=torch.bool).index_fill_(0, wrong, True)
    assert torch.equal(losses.isnan(), expected)
    assert torch.equal(own[:, : last - first].isnan().all(1), expected)


def test_padding_of_a_whole_vocabulary_counts_for_nothing(case) -> None:
    logits, targets = case
    right = F.cross_entropy(logits, targets, reduction="none")
    padded = F.pad(logits, (0, 24), value=100.0)
    part = VocabularyPart(VOCABULARY, VOCABULARY)
    factor = torch.ones((), device=targets.device)
    losses, _ = part.cross_entropy(padded, targets, ignore_index=-100, factor=factor)
    torch.testing.assert_close(losses, right)
    assert not padded[:, VOCABULARY:].any()


@pytest.mark.parametrize("adjusted", [{"scale": 2.0}, {"cap": 3.0}])
def test_logits_of_several_ranks_are_neither_scaled_nor_capped(case, whole, adjusted) -> None:
    part = VocabularyPart(VOCABULARY, SPLITS[1], group="two ranks")
    with pytest.raises(ValueError, match=r"neither scaled nor capped here; compute them.*as Colossal-AI does"):
        part.cross_entropy(case[0][:, : SPLITS[1]].clone(), case[1], ignore_index=-100, **adjusted)


@pytest.mark.parametrize("adjusted", [{"scale": 0.25}, {"cap": 3.0}, {"scale": 2.0, "cap": 3.0}])
def test_padded_logits_of_one_rank_are_scaled_and_capped(case, adjusted) -> None:
    logits, targets = case
    exact = logits.double().requires_grad_()
    of_loss, cap = exact * adjusted.get("scale", 1.0), adjusted.get("cap")
    of_loss = of_loss if cap is None else cap * (of_loss / cap).tanh()
    right = F.cross_entropy(of_loss, targets, reduction="none", ignore_index=-100)
    right.sum().backward()
    padded = F.pad(logits, (0, 24), value=100.0)
    part, factor = VocabularyPart(VOCABULARY, VOCABULARY), torch.ones((), device=targets.device)
    losses, _ = part.cross_entropy(padded, targets, ignore_index=-100, factor=factor, **adjusted)
    torch.testing.assert_close(losses.double(), right.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded[:, :VOCABULARY].double(), exact.grad, rtol=1e-4, atol=1e-6)


def test_a_rank_of_padding_alone_has_the_loss_and_no_gradient(case, monkeypatch) -> None:
    logits, targets = case
    right = F.cross_entropy(logits.double(), targets, reduction="none")
    known = targets.clamp(min=0)

    def gather(output: torch.Tensor, values: torch.Tensor, group: object) -> None:
        of_others = torch.cat([logits.logsumexp(1), logits.gather(1, known[:, None])[:, 0]])
        output.copy_(torch.cat([of_others, values]))

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(loss_module, "gather_bytes", gather)
    padding = torch.full((ROWS, 24), 100.0, device=targets.device)
    part = VocabularyPart(VOCABULARY, 0, VOCABULARY, group="two ranks")
    factor = torch.ones((), device=targets.device)
    losses, amax = part.cross_entropy(padding, targets, ignore_index=-100, factor=factor)
    torch.testing.assert_close(losses.double(), right, rtol=1e-5, atol=1e-5)
    assert amax is None
    assert not padding.any()
