"""The gradients with which a run stepped, and how far they lie from those of another run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.plugins.training import Boosted

NOISE = 0.25
"""Largest norm of the difference of two gradients over that of the expected one: 0.09 is usual, 0.2 the most seen."""

FACTOR = 0.08
"""How far from 1 the factor between two gradients may lie beyond what their noise explains: 0.03 is usual, 0.07 the
most seen, where weights have diverged."""


class Losses(list):
    """Losses of steps, with the gradients of the first of them that changed a weight."""

    gradients: dict[str, torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.gradients = {}


def first_moments(run: Boosted) -> dict[str, torch.Tensor]:
    """Copies of Adam's first moments: of whole parameters under Gemini and FSDP, else of what this rank holds.

    After one step they are 0.1 times the gradients, summed or averaged, divided by the loss scale, and clipped.
    """
    found = {
        str(name): state["exp_avg"].detach().float().flatten().clone()
        for name, state in _states(run).items()
        if "exp_avg" in state
    }
    return {name: value for name, value in found.items() if value.numel()}


def _states(run: Boosted) -> dict[str, dict[str, Any]]:
    from colossalai.zero import GeminiOptimizer
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(run.optimizer, GeminiOptimizer):
        return run.optimizer.state_dict(only_rank_0=False)["state"]
    unit = getattr(run.model, "module", None)
    if isinstance(unit, FullyShardedDataParallel):
        return FullyShardedDataParallel.full_optim_state_dict(unit, optim=run.optimizer, rank0_only=False)["state"]
    inner = run.optimizer.unwrap()
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    return {str(place): inner.state.get(parameter, {}) for place, parameter in enumerate(parameters)}


def assert_same_gradients(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Parameter by parameter: alike in direction, and of one size.

    The size is the factor of the least squares fit found = factor * expected, which noise changes by about
    noise / sqrt(values).
    """
    assert expected
    assert expected.keys() == found.keys(), sorted(expected.keys() ^ found.keys())
    wrong = {}
    for name, one in expected.items():
        other = found[name]
        assert one.shape == other.shape, (name, one.shape, other.shape)
        if not one.any():
            factor, noise = (float("inf"), float("inf")) if other.any() else (1.0, 0.0)
        else:
            factor = float(torch.dot(one, other) / torch.dot(one, one))
            noise = float((other - one).norm() / one.norm())
        if noise > NOISE or abs(factor - 1) > FACTOR + 3 * noise / one.numel() ** 0.5:
            wrong[name] = f"{factor:.3f} times what it was, with noise of {noise:.3f}, {one.numel()} values"
    assert not wrong, wrong
