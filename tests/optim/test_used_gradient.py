"""What is told of gradients that an optimizer has used up in backward."""

from __future__ import annotations

from collections.abc import Callable

import accelerate
import pytest
import torch
from torch import nn

from fp8booster.optim import AdamW
from fp8booster.optim.used_gradient import UsedGradient


def after_backward(device: torch.device | None = None, **given: object) -> tuple[nn.Module, AdamW]:
    """A layer whose weights were updated in backward, and its optimizer, before `step()`."""
    network = nn.Linear(16, 16, device=device)
    optimizer = AdamW(network.parameters(), update_in_backward=True, **given)
    network(torch.ones(2, 16, device=device)).sum().backward()
    return network, optimizer


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False),
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=float("inf")),
        lambda parameters: nn.utils.clip_grad_value_(parameters, 1.0),
        lambda parameters: nn.utils.get_total_norm([each.grad for each in parameters]),
        lambda parameters: accelerate.Accelerator(cpu=True).clip_grad_norm_(parameters, 1.0),
        lambda parameters: [each.grad.norm() for each in parameters],
    ],
    ids=["norm", "norm, one by one", "largest value", "value", "total norm", "accelerate", "by hand"],
)
def test_clipping_after_an_update_in_backward_is_an_error(
    clip: Callable[[list[nn.Parameter]], object], micro_batches: int, device: torch.device
) -> None:
    network, optimizer = after_backward(device, micro_batches=micro_batches)
    with pytest.raises(ValueError, match=r"leaves no gradients to clip.* leave clipping out \(max_grad_norm=0\)"):
        clip(list(network.parameters()))
    optimizer.step()
    assert all(each.grad is None for each in network.parameters())


@pytest.mark.parametrize("foreach", [None, False])
def test_a_norm_that_is_only_read_is_not_known(foreach: bool | None) -> None:
    """As by the Trainer of transformers 5, which logs it where it does not clip."""
    network, optimizer = after_backward()
    before = network.weight.detach().clone()
    assert torch.nn.utils.clip_grad_norm_(network.parameters(), float("inf"), foreach=foreach).isnan()
    optimizer.step()
    assert torch.equal(network.weight, before)


def test_what_says_so_takes_no_memory_and_is_shaped_like_the_parameter() -> None:
    network, _ = after_backward()
    used = network.weight.grad
    assert isinstance(used, UsedGradient)
    assert used.untyped_storage().nbytes() == 0
    assert (used.shape, used.dtype, used.device) == (network.weight.shape, torch.float32, network.weight.device)
    assert "UsedGradient" in repr(used)


@pytest.mark.parametrize("create_graph", [False, True])
def test_backwards_without_steps_between_them_update_by_each_gradient(create_graph: bool) -> None:
    weights = []
    for steps in (True, False):
        torch.manual_seed(0)
        network = nn.Linear(16, 16)
        optimizer = AdamW(network.parameters(), update_in_backward=True)
        for number in range(3):
            network(torch.ones(2, 16) + number).square().sum().backward(create_graph=create_graph)
            if steps:
                optimizer.step()
        weights.append(network.weight.detach().clone())
        assert optimizer.state[network.weight]["step"] == 3
    assert torch.equal(*weights)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_setting_gradients_to_zero_forgets_them(set_to_none: bool) -> None:
    network, optimizer = after_backward()
    optimizer.zero_grad(set_to_none)
    assert all(each.grad is None for each in network.parameters())
    assert float(nn.utils.clip_grad_norm_(network.parameters(), 1.0)) == 0


@pytest.mark.parametrize(
    "set_to_zero",
    [
        lambda network: network.zero_grad(),
        lambda network: network.zero_grad(set_to_none=False),
        lambda network: [each.grad.zero_() for each in network.parameters()],
        lambda network: torch.optim.SGD(network.parameters(), foreach=True).zero_grad(set_to_none=False),
    ],
    ids=["none", "zero", "by hand", "another optimizer"],
)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("then_step", [False, True])
def test_whoever_sets_gradients_to_zero_forgets_what_waits(
    set_to_zero: Callable[[nn.Module], object], micro_batches: int, then_step: bool
) -> None:
    network, optimizer = after_backward(micro_batches=micro_batches)
    before = network.weight.detach().clone()
    set_to_zero(network)
    if then_step:
        optimizer.step()
        assert torch.equal(network.weight, before)
    for number in range(micro_batches):
        assert torch.equal(network.weight, before)
        network(torch.full((2, 16), number + 1.0)).sum().backward()
    assert not optimizer.gradient_sums
    if micro_batches > 1:  # the update is by what came after alone
        expected = nn.Parameter(before.clone())
        other = AdamW([expected])
        expected.grad = torch.full((16, 16), sum(2.0 * (number + 1) for number in range(micro_batches)))
        other.step()
        assert torch.equal(network.weight, expected)
    assert optimizer.state[network.weight]["step"] == (2 if micro_batches == 1 else 1)


def test_memory_of_a_model_may_be_shared_after_an_update_in_backward() -> None:
    network, optimizer = after_backward()
    network.share_memory()
    assert all(each.is_shared() for each in network.parameters())
    optimizer.step()


def test_compiled_code_runs_beside_used_gradients() -> None:
    network = nn.Linear(16, 16)
    compiled = torch.compile(network, backend="aot_eager")
    AdamW(network.parameters(), update_in_backward=True)
    for rows in (2, 3, 5):  # compiled anew with gradients that are used up
        before = network.weight.detach().clone()
        compiled(torch.ones(rows, 16)).sum().backward()
        assert not torch.equal(network.weight, before)
