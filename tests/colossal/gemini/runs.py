"""Boosted runs under Gemini, with chunks small enough that tiny models are sharded, and what their ranks hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.nn import FP8Layer
from fp8booster.optim import HybridAdam
from tests.colossal.models import tiny_llama
from tests.plugins.training import Boosted

if TYPE_CHECKING:
    from colossalai.booster.plugin import GeminiPlugin as NativePlugin

    from fp8booster.colossal.gemini.chunks import FP8Chunk
    from fp8booster.plugins.gemini import GeminiPlugin

SMALL_CHUNKS = {"min_chunk_size_m": 2**-7, "search_range_m": 0, "hidden_dim": 64}
"""8192 values: `tiny_llama` has several chunks."""

OFFLOADED = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0}


def native(**arguments: Any) -> NativePlugin:
    """Colossal-AI's plugin, in BF16 unless `arguments` say otherwise."""
    from colossalai.booster.plugin import GeminiPlugin

    return GeminiPlugin(**{"precision": "bf16", **SMALL_CHUNKS} | arguments)


def ours(**arguments: Any) -> GeminiPlugin:
    """This project's plugin, in BF16 unless `arguments` say otherwise."""
    from fp8booster.plugins.gemini import GeminiPlugin

    return GeminiPlugin(**{"precision": "bf16", **SMALL_CHUNKS} | arguments)


def config(**options: Any) -> FP8Config:
    """Products in FP32 from FP8 values: a CPU without FP8 instructions takes 1000 times longer for E4M3 by E4M3."""
    return FP8Config(emulate=True, **options)


def wire(**arguments: Any) -> GeminiPlugin:
    """This project's plugin with FP8 products, emulated unless `arguments` say otherwise, and FP8 on the wire."""
    return ours(**{"use_fp8": True, "fp8_config": config()} | arguments)


class Run(Boosted):
    """A run whose model may give its outputs as a dictionary, as it does with `force_outputs_fp32`."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        from colossalai.accelerator import get_accelerator

        tokens = tokens.to(get_accelerator().get_current_device())
        return self.model(input_ids=tokens, labels=tokens)["loss"]


def boost(plugin: NativePlugin, model: nn.Module | None = None, lr: float = 1e-2) -> Run:
    """Boost a model, by default `tiny_llama()`, with the optimizer that Gemini takes uncompiled."""
    from colossalai.booster import Booster

    booster = Booster(plugin=plugin)
    model = tiny_llama() if model is None else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer, *_ = booster.boost(model, HybridAdam(trained, lr=lr, weight_decay=0.01))
    return Run(booster, model.train(), optimizer)


def weights(run: Boosted) -> dict[str, torch.Tensor]:
    """The weights that a checkpoint would hold, on every rank."""
    return {
        name: value.clone()
        for name, value in run.model.state_dict(only_rank_0=False).items()
        if torch.is_floating_point(value)
    }


def masters(run: Boosted) -> dict[str, torch.Tensor]:
    """The FP32 masters, whole, by the names of the parameters."""
    from colossalai.zero.gemini.utils import get_temp_total_chunk_on_cuda

    model, whole = run.model, {}
    for parameter, master in zip(model.fp16_params, model.fp32_params, strict=True):
        chunk = model.chunk_manager.get_chunk(master)
        place = chunk.tensors_info[master]
        values = get_temp_total_chunk_on_cuda(chunk, torch.float32)[place.offset : place.end]
        whole[model.param2name[parameter]] = values.view(parameter.shape).clone()
    return whole


def layers(run: Boosted) -> Iterator[tuple[str, FP8Layer]]:
    """The FP8 layers with their paths."""
    for name, module in run.model.unwrap().named_modules():
        if isinstance(module, FP8Layer):
            yield name, module


def fp8_chunks(run: Boosted) -> list[FP8Chunk]:
    """The chunks of FP8 weights."""
    return run.model.fp8_chunks
