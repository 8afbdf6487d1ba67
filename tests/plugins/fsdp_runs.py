"""Boosted runs under FSDP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fp8booster import FP8Config
from fp8booster.nn.fsdp import flat_weights
from fp8booster.nn.fsdp.handle import compress_flat_fsdp
from fp8booster.nn.weights.casting import Casts
from fp8booster.tensor import QuantizedMatrix
from tests.colossal.models import tiny_llama
from tests.plugins.training import Boosted, assert_equal, boost, train

if TYPE_CHECKING:
    from colossalai.booster.plugin import TorchFSDPPlugin as NativePlugin

    from fp8booster.plugins.torch_fsdp import TorchFSDPPlugin

LAYERS = 14
"""Linear layers of `tiny_llama` beside the vocabulary head."""

CLOSE = 1e-2
"""How far a loss in FP8 may lie from that in high precision, in the first steps of `tiny_llama`."""

BLOCKS = ModuleWrapPolicy({LlamaDecoderLayer})
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
FP16 = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
WRAPPINGS: dict[str, dict[str, Any]] = {
    "one unit": {},
    "one unit in BF16": {"mixed_precision": BF16},
    "blocks": {"auto_wrap_policy": BLOCKS},
    "blocks in BF16": {"auto_wrap_policy": BLOCKS, "mixed_precision": BF16},
    "blocks in FP16": {"auto_wrap_policy": BLOCKS, "mixed_precision": FP16},
}
STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.HYBRID_SHARD,
)

OPTIONS: dict[str, Any] = {
    "process_group": None,  # made on the ranks
    "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
    "cpu_offload": CPUOffload(offload_params=True),
    "auto_wrap_policy": BLOCKS,
    "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
    "mixed_precision": BF16,
    "ignored_modules": None,  # modules of the model
    "param_init_fn": lambda module: None,  # called for modules on the meta device
    "sync_module_states": True,
}
"""For every argument of Colossal-AI's plugin but `fp8_communication`, a value that is not its default."""

TRIED = tuple(option for option in OPTIONS if option != "sync_module_states")
"""Those that FSDP takes on the CPU."""

QUICK = FP8Config(emulate=True)
"""The same roundings; CPUs without FP8 products take milliseconds for each of the others."""

UNFUSED = FP8Config(emulate=True, fused=False)
"""The same, each layer by itself."""


def native(*positional: Any, **arguments: Any) -> NativePlugin:
    """Colossal-AI's plugin."""
    from colossalai.booster.plugin import TorchFSDPPlugin

    return TorchFSDPPlugin(*positional, **arguments)


def ours(*positional: Any, **arguments: Any) -> TorchFSDPPlugin:
    """This project's plugin."""
    from fp8booster.plugins.torch_fsdp import TorchFSDPPlugin

    return TorchFSDPPlugin(*positional, **arguments)


def fp8(**arguments: Any) -> TorchFSDPPlugin:
    """This project's plugin with products, weights and gradients in FP8."""
    return ours(**{"use_fp8": True, "fp8_config": QUICK} | arguments)


def plain_wire(**arguments: Any) -> TorchFSDPPlugin:
    """This project's plugin with products in FP8, weights and gradients sent in high precision."""
    return fp8(fp8_communication=False, **arguments)


def boost_with(make: Callable[..., Any], option: str, **others: Any) -> Boosted:
    """A run whose plugin has one option of `OPTIONS`."""
    model, value = tiny_llama(), OPTIONS[option]
    if option == "process_group":
        value = dist.new_group([0, 1])
    elif option == "ignored_modules":
        value = [model.model.layers[1].mlp]
    return boost(make(**others, **{option: value}), model)


def whole(run: Boosted) -> dict[str, torch.Tensor]:
    """Copies of the parameters, whole and exact."""
    unit = run.model.module
    with FullyShardedDataParallel.summon_full_params(unit, writeback=False):
        return {name: parameter.detach().clone() for name, parameter in unit.named_parameters()}


@functools.cache
def alone() -> dist.ProcessGroup:
    """The group of this rank alone."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


@contextmanager
def offloading() -> Iterator[None]:
    """Where FSDP can offload parameters without a GPU: torch pins no memory there, and has nothing to wait for."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(torch.cpu.Stream, "synchronize", lambda stream: None, raising=False)
        yield


def assert_fsdp_trains_equally(expected: Boosted, found: Boosted, **how: Any) -> None:
    """Losses and exact weights are equal bit for bit."""
    losses, others = train(expected, **how), train(found, **how)
    assert losses == others, (losses, others)
    assert_equal(whole(expected), whole(found))


def wrapped(strategy: ShardingStrategy, gather: bool, **arguments: Any) -> Boosted:
    """A run that reduces gradients in high precision, through the plain wrapper."""
    run = boost(plain_wire(**arguments, sharding_strategy=strategy))
    compress_flat_fsdp(run.model, gather=gather, reduce=False)
    return run


class FP8Weights:
    """Watches the memory of the FP8 weights that layers cast and that units gather."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen: list[StorageWeakRef] = []
        for module, name in ((Casts, "quantize_weight"), (flat_weights, "QuantizedMatrix")):
            monkeypatch.setattr(module, name, self._watching(getattr(module, name)))

    def _watching(self, make: Callable[..., QuantizedMatrix]) -> Callable[..., QuantizedMatrix]:
        @functools.wraps(make, updated=())
        def watched(*args: Any, **kwargs: Any) -> QuantizedMatrix:
            made = make(*args, **kwargs)
            self._seen += [StorageWeakRef(layout.untyped_storage()) for layout in made[:2] if layout.numel()]
            return made

        return watched

    def made(self) -> int:
        return len(self._seen)

    def alive(self) -> int:
        return sum(not seen.expired() for seen in self._seen)
