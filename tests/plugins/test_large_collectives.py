"""In every mode on two ranks, each collective of more than 1 MiB sends at most 0.52 of the bytes of 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config
from tests.colossal.gemini import runs as gemini_runs
from tests.colossal.hybrid import runs as hybrid_runs
from tests.colossal.hybrid.runs import MODES, HybridRun, parts
from tests.colossal.hybrid.test_traffic import COMMUNICATE
from tests.colossal.models import tiny_llama
from tests.distributed import ranks
from tests.plugins import training
from tests.plugins.large_collectives import assert_large_collectives_are_compressed

EMULATED = FP8Config(emulate=True)
"""Products in FP32 from FP8 values: what is sent is the same, and the CPU is faster."""

SEQUENCES, LENGTH = 20, 256
"""Of a batch: 2.5 MiB of activations of 256 features in 16 bits, and more than 1 MiB for half of it."""

VOCABULARY = 256


def narrow(layers: int) -> nn.Module:
    """A model whose activations are large."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    return tiny_llama(num_hidden_layers=layers, **sizes)


def wide() -> nn.Module:
    """A model whose weights are large: from 0.5 MiB to 2.75 MiB in 16 bits."""
    sizes = {"hidden_size": 512, "intermediate_size": 2816, "vocab_size": VOCABULARY}
    return tiny_llama(num_hidden_layers=1, **sizes)


def tokens(sequences: int, length: int, rank: int = 0) -> torch.Tensor:
    """[sequences, length], the same for equal ranks."""
    return torch.randint(0, VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(rank))


def start(mode: str | dict[str, Any]) -> HybridRun:
    """A run with large activations where a mode sends those, else with large weights."""
    plugin = hybrid_runs.fp8(mode, fp8_config=EMULATED)
    return hybrid_runs.start(plugin, narrow(parts(plugin)) if sends_activations(mode) else wide())


def sends_activations(mode: str | dict[str, Any]) -> bool:
    arguments = MODES[mode] if isinstance(mode, str) else mode
    return bool({"tp_size", "pp_size", "sp_size"} & arguments.keys())


@ranks(2)
@pytest.mark.parametrize("mode", COMMUNICATE)
def test_large_collectives_of_a_mode_are_compressed(mode: str) -> None:
    arguments = MODES[mode] | ({"num_microbatches": 2} if "pp_size" in MODES[mode] else {})
    run = start(arguments)
    batch = tokens(SEQUENCES, LENGTH) if sends_activations(mode) else tokens(2, 32, dist.get_rank())
    assert_large_collectives_are_compressed(lambda: run.step(batch))


def gemini(**arguments: Any) -> training.Boosted:
    """A run with large weights, in chunks of 1 MiB at least."""
    chunks = {"min_chunk_size_m": 1, "search_range_m": 0, "hidden_dim": 512}
    return gemini_runs.boost(gemini_runs.wire(**chunks, **arguments), wide())


def _low_level_zero() -> training.Boosted:
    return training.boost(training.ours(use_fp8=True, fp8_config=EMULATED), wide())


def _ddp() -> training.Boosted:
    from fp8booster.plugins import TorchDDPPlugin

    return training.boost(TorchDDPPlugin(use_fp8=True, fp8_config=EMULATED), wide(), mixed_precision="bf16")


def _fsdp() -> training.Boosted:
    from torch.distributed.fsdp import MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from fp8booster.plugins import TorchFSDPPlugin

    plugin = TorchFSDPPlugin(
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        use_fp8=True,
        fp8_config=EMULATED,
    )
    return training.boost(plugin, wide())


RUNS = {"Gemini": gemini, "LowLevelZero": _low_level_zero, "DDP": _ddp, "FSDP": _fsdp}


@ranks(2)
@pytest.mark.parametrize("plugin", RUNS)
def test_large_collectives_of_a_plugin_are_compressed(plugin: str) -> None:
    run, batch = RUNS[plugin](), tokens(2, 32, dist.get_rank())
    assert_large_collectives_are_compressed(lambda: run.step(batch))


@ranks(2)
@pytest.mark.parametrize("of", ["tokens", "weights"])
def test_large_collectives_between_experts_are_compressed(of: str) -> None:
    from tests.colossal.moe.models import tiny_mixtral
    from tests.plugins import test_moe_hybrid_parallel

    sizes = (
        # a row sent to experts has 16 bytes of scales at least, and 32 of choices
        {"hidden_size": 960, "intermediate_size": 256, "vocab_size": VOCABULARY}
        if of == "tokens"
        else {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": VOCABULARY}
    )
    plugin = test_moe_hybrid_parallel.fp8(ep_size=2 if of == "tokens" else 1)
    run = hybrid_runs.start(plugin, tiny_mixtral(num_hidden_layers=1, **sizes))
    batch = tokens(SEQUENCES, LENGTH, dist.get_rank()) if of == "tokens" else tokens(2, 32, dist.get_rank())
    assert_large_collectives_are_compressed(lambda: run.step(batch))
