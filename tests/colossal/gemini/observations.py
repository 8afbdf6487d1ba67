"""Options of Gemini with FP8, and what checks look at: products, and weights as their layers read them."""

from __future__ import annotations

from typing import Any

import torch

from fp8booster.kernels.cast import cast
from tests.colossal.gemini.runs import OFFLOADED, layers, masters
from tests.colossal.zero.runs import assert_same_on_all_ranks
from tests.plugins.test_low_level_zero_census import Census
from tests.plugins.training import Boosted

FP16 = {"precision": "fp16", "initial_scale": 2.0**8}
LAYERS = 14

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "kept gathered": {"min_chunk_size_m": 32},
    "no overlap": {"enable_async_reduce": False},
    "ZeRO stage 2": {"shard_param_frac": 0.0},
    "half the optimizer on the host": {"offload_optim_frac": 0.5},
    "optimizer on the host": {"offload_optim_frac": 1.0},
    "all on the host": OFFLOADED,
    "auto": {"placement_policy": "auto"},
    "auto, masters back on the GPU": {"placement_policy": "auto", "gpu_margin_mem_ratio": 0.9},
    "prefetch": {"max_prefetch": 2},
    "auto with prefetch": {"placement_policy": "auto", "max_prefetch": 2},
    "accumulation": {"enable_gradient_accumulation": True},
    "accumulation on the host": {"enable_gradient_accumulation": True, **OFFLOADED},
    "accumulation, optimizer on the host": {"enable_gradient_accumulation": True, "offload_optim_frac": 1.0},
    "outputs in FP32": {"force_outputs_fp32": True},
}
"""What only moves work."""


def census(run: Boosted, tokens: torch.Tensor) -> Census:
    """What one step multiplies."""
    with Census() as counted:
        loss = run.loss(tokens)
        with torch._C.DisableTorchFunction():  # Gemini's own class of tensors cannot go backward under a mode
            loss = loss.as_subclass(torch.Tensor)
        run.booster.backward(loss, run.optimizer)
        run.optimizer.step()
    return counted


def assert_are_casts_of_masters(run: Any, power_of_two: bool = False) -> None:
    """The bytes and the scale of every FP8 weight, read as its layer reads them, on all ranks."""
    whole, manager = masters(run), run.model.chunk_manager
    for name, layer in layers(run):
        chunk, config = manager.get_chunk(layer.weight), layer.fp8_config
        manager.access_chunk(chunk)
        found = layer.fp8_weight.forward([layer.weight], layer.fp8_casts, transpose=True)
        transpose, _ = layer.fp8_weight.backward([layer.weight], layer.fp8_casts)()
        data, expected_transpose, inverse_scale = cast.reference(
            whole[f"{name}.weight"],
            config.weight_format,
            plain=True,
            transposed=True,
            power_of_two=power_of_two,
            amax=None,
        )
        assert torch.equal(found.data.view(torch.uint8), data.view(torch.uint8)), name
        assert torch.equal(transpose.view(torch.uint8), expected_transpose.view(torch.uint8)), name
        assert torch.equal(found.inverse_scale, inverse_scale), name
        assert_same_on_all_ranks(found.data)
        if not chunk.keep_gathered:
            manager.release_chunk(chunk)
        else:
            manager.fake_release_chunk(chunk)
