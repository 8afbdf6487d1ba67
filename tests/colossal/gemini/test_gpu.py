"""Gemini with FP8 on GPUs: what only moves work changes no bit, with chunks on the host and on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8booster import FP8Config, report
from tests.colossal.gemini.runs import OFFLOADED, Run, boost, fp8_chunks, masters, native, wire
from tests.colossal.models import tiny_llama
from tests.distributed import ranks
from tests.plugins.training import assert_close, assert_equal, train

pytestmark = pytest.mark.gpu
RANKS = max(1, min(2, torch.cuda.device_count()))

PLACEMENTS: dict[str, dict[str, Any]] = {
    "no overlap": {"enable_async_reduce": False},
    "ZeRO stage 2": {"shard_param_frac": 0.0},
    "half the optimizer on the host": {"offload_optim_frac": 0.5},
    "all on the host": OFFLOADED,
    "all on the host, pinned": OFFLOADED | {"pin_memory": True},
    "auto": {"placement_policy": "auto"},
    "auto, masters back on the GPU": {"placement_policy": "auto", "gpu_margin_mem_ratio": 0.9},
    "prefetch": {"max_prefetch": 2},
    "accumulation": {"enable_gradient_accumulation": True},
    "accumulation on the host": {"enable_gradient_accumulation": True, **OFFLOADED},
}
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3}
CHUNKS = {"min_chunk_size_m": 2**-2}


def run(fused: bool = False, **arguments: Any) -> Run:
    """FP8 wherever it could be."""
    plugin = wire(fp8_config=FP8Config(always=True, fused=fused), **CHUNKS, **arguments)
    return boost(plugin, tiny_llama(**SIZES), lr=1e-3)


@ranks(RANKS, backend="nccl")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements_change_no_bit_but_those_of_adam_on_the_host(placement: str) -> None:
    expected, found = run(), run(**PLACEMENTS[placement])
    losses, others = train(expected, steps=6), train(found, steps=6)
    if "host" in placement or "auto" in placement:  # another operator of Adam, which rounds otherwise
        assert_close(losses, others, 2e-3)
        return
    assert losses == others
    assert_equal(masters(expected), masters(found))


@ranks(RANKS, backend="nccl")
@pytest.mark.parametrize("placement", ["no overlap", "prefetch", "accumulation"])
def test_placements_change_no_bit_of_fused_layers(placement: str) -> None:
    expected, found = run(fused=True), run(fused=True, **PLACEMENTS[placement])
    assert train(expected, steps=6) == train(found, steps=6)
    assert_equal(masters(expected), masters(found))


@ranks(RANKS, backend="nccl")
@pytest.mark.parametrize("how", ["layers one by one", "fused layers", "fused layers on the host"])
def test_it_trains_near_native(how: str) -> None:
    # native reduces beside backward without telling the allocator: on a busy GPU its losses became NaN
    in_16_bits = train(boost(native(**CHUNKS, enable_async_reduce=False), tiny_llama(**SIZES), lr=1e-3), steps=6)
    options = OFFLOADED if "host" in how else {}
    boosted = run(fused="fused" in how, **options)
    assert_close(in_16_bits, train(boosted, steps=6), 1e-2)
    if "fused" in how:
        assert "15 of them merged to 6 products" in report(boosted.model).summary()


@ranks(RANKS, backend="nccl")
def test_a_forward_holds_one_gathered_chunk_in_bytes() -> None:
    boosted = run(enable_async_reduce=False)
    train(boosted, steps=1)
    gathered = []
    for layer in boosted.model.unwrap().model.layers:
        layer.register_forward_hook(lambda *_: gathered.append(sum(chunk.is_gathered for chunk in fp8_chunks(boosted))))
    train(boosted, steps=1)
    assert max(gathered) <= 1
    assert all(chunk.cuda_global_chunk.dtype is torch.uint8 for chunk in fp8_chunks(boosted))
