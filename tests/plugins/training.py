"""Boost and train tiny models on the ranks of a test, with our plugin or Colossal-AI's one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import fp8booster.colossal  # noqa: F401  (patches colossalai before it is imported)
from fp8booster import FP8Config
from tests.colossal.models import tiny_llama, token_batch
from tests.plugins.gradients import Losses, assert_same_gradients, first_moments

# colossalai, which takes seconds to import, is imported on the ranks alone
if TYPE_CHECKING:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin as NativePlugin
    from colossalai.booster.plugin.plugin_base import Plugin
    from colossalai.interface import ModelWrapper, OptimizerWrapper

    from fp8booster.plugins import LowLevelZeroPlugin

STAGES = (1, 2)


@dataclass
class Boosted:
    """A boosted model and what trains it."""

    booster: Booster
    model: ModelWrapper
    optimizer: OptimizerWrapper

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def step(self, *batches: torch.Tensor, no_sync: bool = False) -> list[float]:
        """One optimizer step over micro-batches, with `no_sync` for all but the last; returns their losses."""
        losses = []
        for number, tokens in enumerate(batches, 1):
            unsynchronized = no_sync and number < len(batches)
            with self.booster.no_sync(self.model, self.optimizer) if unsynchronized else nullcontext():
                loss = self.loss(tokens)
                self.booster.backward(loss / len(batches), self.optimizer)
            losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the working weights, gathered."""
        if hasattr(self.model, "_force_wait_all_gather"):  # ZeRO may gather late
            self.model._force_wait_all_gather()
        return {name: parameter.detach().clone() for name, parameter in self.model.unwrap().named_parameters()}


def boost(
    plugin: Plugin,
    model: nn.Module | None = None,
    lora: Any = None,
    lr: float = 1e-2,
    mixed_precision: str | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Boosted:
    """Boost a model, by default `tiny_llama()`, with AdamW; `lora` holds the arguments of `enable_lora`."""
    from colossalai.booster import Booster

    booster = Booster(plugin=plugin, mixed_precision=mixed_precision)
    model = tiny_llama() if model is None else model
    if lora is not None:
        model = booster.enable_lora(model, **lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer, *_ = booster.boost(model, optimizer(trained, lr=lr))
    return Boosted(booster, model.train(), optimizer)


def native_class() -> type[NativePlugin]:
    """Colossal-AI's plugin."""
    from colossalai.booster.plugin import LowLevelZeroPlugin

    return LowLevelZeroPlugin


def our_class() -> type[LowLevelZeroPlugin]:
    """This project's plugin."""
    from fp8booster.plugins import LowLevelZeroPlugin

    return LowLevelZeroPlugin


def native(**arguments: Any) -> NativePlugin:
    """Colossal-AI's plugin, in BF16 unless `arguments` say otherwise."""
    return native_class()(**{"precision": "bf16"} | arguments)


def ours(**arguments: Any) -> LowLevelZeroPlugin:
    """This project's plugin, in BF16 unless `arguments` say otherwise."""
    return our_class()(**{"precision": "bf16"} | arguments)


def fp8(**arguments: Any) -> LowLevelZeroPlugin:
    """This project's plugin with FP8 products layer by layer, gradients sent in 16 bits."""
    layer_by_layer = FP8Config(fused=False)
    return ours(**{"use_fp8": True, "fp8_communication": False, "fp8_config": layer_by_layer} | arguments)


def rank_batches(count: int, **sizes: int) -> list[torch.Tensor]:
    """Batches of random tokens that differ from rank to rank."""
    return [token_batch(seed=100 * number + dist.get_rank(), **sizes) for number in range(count)]


def train(boosted: Boosted, steps: int = 3, micro_batches: int = 1, no_sync: bool = False) -> list[float]:
    """Take steps on `rank_batches`; returns every loss of this rank."""
    batches = rank_batches(steps * micro_batches)
    losses = Losses()
    for step in range(steps):
        losses += boosted.step(*batches[step * micro_batches : (step + 1) * micro_batches], no_sync=no_sync)
        losses.gradients = losses.gradients or first_moments(boosted)
    return losses


def assert_equal(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """The same tensors under the same names, bit for bit."""
    assert expected.keys() == found.keys(), sorted(expected.keys() ^ found.keys())
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype, name
        assert torch.equal(tensor, found[name]), name


class Outcome(NamedTuple):
    """What training came to, which several tests may compare."""

    losses: Losses
    """Every one of this rank."""
    parameters: dict[str, torch.Tensor]
    """In the end."""


def outcome(run: Boosted, **how: Any) -> Outcome:
    """Train a run; `how` as in `train`."""
    return Outcome(train(run, **how), run.parameters())


def assert_same_outcome(expected: Outcome, found: Outcome) -> None:
    """The losses at every step and the weights at the end are equal bit for bit."""
    assert expected.losses == found.losses, (expected.losses, found.losses)
    assert_equal(expected.parameters, found.parameters)


def assert_trains_equally(expected: Boosted, found: Boosted, **how: Any) -> None:
    """Train both, to the same outcome."""
    assert_same_outcome(outcome(expected, **how), outcome(found, **how))


def assert_close(expected: Iterable[float], found: Iterable[float], within: float, gradients: bool = True) -> None:
    """Relative difference of at most `within`, place by place; and the same gradients, where both are `Losses`.

    `gradients=False` is for runs that hold other parts of them, or route tokens to other experts.
    """
    for one, other in zip(expected, found, strict=True):
        assert abs(one - other) <= within * abs(one), (one, other)
    if gradients and isinstance(expected, Losses) and isinstance(found, Losses):
        assert_same_gradients(expected.gradients, found.gradients)
