"""Adam's update computes what torch's optimizers do, and delivers the amax of what it writes."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from fp8booster.kernels.adamw import AdamShards, factors, update
from tests.kernels.adam_shards import COUNTS, RATES, copied, far_apart, shards


@pytest.mark.parametrize("case", RATES)
def test_the_reference_is_torchs_optimizer(case) -> None:
    rates = RATES[case]
    of_optimizer = torch.optim.AdamW if rates.decoupled else torch.optim.Adam
    parameters = [torch.nn.Parameter(torch.randn(count)) for count in COUNTS]
    settings: dict[str, Any] = {name: getattr(rates, name) for name in ("lr", "betas", "eps", "weight_decay")}
    optimizer = of_optimizer(parameters, foreach=False, **settings)
    ours = [parameter.detach().clone() for parameter in parameters]
    moments = [[torch.zeros_like(one) for one in ours] for _ in range(2)]
    for step in range(1, 4):
        gradients = [torch.randn(count) for count in COUNTS]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient / 3
        optimizer.step()
        steps = [torch.tensor(float(step))] * len(COUNTS)
        amaxes = update(AdamShards(ours, gradients, *moments, steps), rates, torch.tensor(3.0))
        assert torch.equal(amaxes, torch.stack([one.abs().max() for one in ours]))
    for one, parameter in zip(ours, parameters, strict=True):
        torch.testing.assert_close(one, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_nan_is_the_largest() -> None:
    given = shards(torch.float32, torch.float32)
    given.gradients[3][17] = math.nan
    given.values[2][5] = math.inf
    amaxes = update(given, RATES["AdamW"])
    assert amaxes[3].isnan()
    assert amaxes[2] == math.inf
    assert amaxes[[0, 1, 4]].isfinite().all()


def test_empty_shards_have_no_magnitude() -> None:
    nothing = [torch.zeros(0)]
    amaxes = update(AdamShards(nothing, nothing, nothing, nothing, [torch.tensor(1.0)]), RATES["AdamW"])
    assert amaxes.tolist() == [0.0]


@pytest.mark.parametrize("zeros", [1, 5, 1030])
def test_an_epsilon_of_zero_leaves_the_amax_of_what_has_gradients(zeros, device) -> None:
    """No count is a multiple of the kernel's block: what lies behind a shard's end must not be 0 / 0 in its amax."""
    gradients = [torch.ones(zeros, device=device)]
    values = [torch.full((zeros,), 3.0, device=device)]
    moments = [[torch.zeros(zeros, device=device)] for _ in range(2)]
    rates = RATES["AdamW"]._replace(eps=0.0)
    amaxes = update(AdamShards(values, gradients, *moments, [torch.ones((), device=device)]), rates)
    assert amaxes.tolist() == [values[0].abs().max().item()]
    assert amaxes.isfinite().all()


def test_without_an_eps_what_never_had_a_gradient_stays_and_all_else_is_as_ever(device) -> None:
    rates = RATES["AdamW"]._replace(eps=0.0)
    given = shards(torch.float32, torch.float32, device)
    expected = [
        (value - rates.lr * rates.weight_decay * value).double()
        - rates.lr
        / (1 - 0.9 ** step.double())
        * (moment * 0.9 + gradient * 0.1).double()
        / ((square * 0.95 + gradient.square() * 0.05).double() / (1 - 0.95 ** step.double())).sqrt()
        for value, gradient, moment, square, step in zip(*given, strict=True)
    ]
    for tensors in given[:4]:
        tensors[-1][-64:] = 0.0
    amaxes = update(given, rates)
    assert amaxes.isfinite().all()
    assert torch.equal(given.values[-1][-64:], torch.zeros(64, device=device))
    for one, other in zip(given.values[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


def test_values_that_lie_apart_are_refused() -> None:
    apart, together = [torch.ones(8)[::2]], [torch.ones(4)]
    with pytest.raises(ValueError, match="contiguous"):
        update(AdamShards(together, apart, together, together, [torch.tensor(1.0)]), RATES["AdamW"])


@pytest.mark.gpu
@pytest.mark.parametrize("case", RATES)
@pytest.mark.parametrize(
    ("dtype", "gradients"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_triton_computes_what_the_reference_does(case, dtype, gradients) -> None:
    rates = RATES[case]
    if isinstance(rates.lr, torch.Tensor):
        rates = rates._replace(lr=rates.lr.cuda())
    for divisor, nan in product((None, torch.tensor(7.0, device="cuda")), (False, True)):
        ours = shards(dtype, gradients, "cuda")
        if nan:
            ours.gradients[-1][COUNTS[-1] // 2] = math.nan
        theirs, versions = copied(ours), [value._version for value in ours.values]
        amaxes = update(ours, rates, divisor)
        update.reference(
            AdamShards(*([each.float() for each in tensors] for tensors in theirs))
            if dtype is torch.float32
            else theirs,
            rates,
            divisor,
        )
        assert all(value._version > version for value, version in zip(ours.values, versions, strict=True))
        if nan:
            assert amaxes.isnan().tolist() == [False] * (len(COUNTS) - 1) + [True]
            continue
        assert far_apart(ours, theirs) == []
        expected = torch.stack([value.abs().max().float() for value in ours.values])
        assert torch.equal(amaxes, expected)


@pytest.mark.parametrize("case", RATES)
def test_factors_give_the_update(case) -> None:
    """Those that the kernel takes, in the arithmetic that it does with them."""
    rates = RATES[case]
    ours, theirs = (shards(torch.float32, torch.float32) for _ in range(2))
    rows = factors(ours, rates)
    assert rows.dtype is torch.float32
    assert rows[:, 3].eq(0).all()
    beta1, beta2 = rates.betas
    for value, gradient, first, second, (decay, step_size, root, _) in zip(*ours[:4], rows, strict=True):
        if rates.decoupled:
            value.mul_(1 - decay)
        else:
            gradient = gradient + decay * value
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        value.sub_(step_size * first / (second.sqrt() / root + rates.eps))
    update.reference(theirs, rates)
    assert far_apart(ours, theirs) == []


@pytest.mark.gpu
def test_a_cuda_graph_keeps_the_tables_that_its_launches_read() -> None:
    ours, rates = shards(torch.float32, torch.bfloat16, "cuda"), RATES["AdamW"]
    update(ours, rates)  # compiles, outside
    theirs, graph = copied(ours), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        amaxes = update(ours, rates)
    for _ in range(3):
        # what was pinned for a launch is given out again, and would be read by the next replay
        others = shards(torch.float32, torch.bfloat16, "cuda")
        update(others, rates)
        graph.replay()
        expected = update(theirs, rates)
        assert torch.equal(amaxes, expected)
        for one, other in zip(ours[:4], theirs[:4], strict=True):
            assert all(map(torch.equal, one, other))
