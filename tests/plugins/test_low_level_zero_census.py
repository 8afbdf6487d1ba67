"""Every product of every eligible linear layer runs through `torch._scaled_mm`, and no other product does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8booster import FP8Linear
from tests.distributed import ranks
from tests.plugins.test_low_level_zero_lora import lora_config
from tests.plugins.training import STAGES, Boosted, boost, fp8, rank_batches

Sizes = tuple[int, int, int]
"""(M, K, N) of a product of [M, K] by [K, N]."""

_aten = torch.ops.aten


class Census(TorchDispatchMode):
    """Counts the matrix products that reach a kernel, by what runs them and by their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8: Counter[Sizes] = Counter()
        self.other: Counter[Sizes] = Counter()
        self.batched: Counter[torch.dtype] = Counter()
        """Products of stacks of matrices, by dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        operator = func.overloadpacket
        if operator is _aten._scaled_mm:
            self.fp8[_sizes(args[0], args[1])] += 1
        elif operator in (_aten.mm, _aten.matmul, _aten.linear):
            self.other[_sizes(args[0], args[1])] += 1
        elif operator is _aten.addmm:
            self.other[_sizes(args[1], args[2])] += 1
        elif operator in (_aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv):
            self.batched[args[0].dtype] += 1
        return func(*args, **kwargs or {})


def _sizes(a: torch.Tensor, b: torch.Tensor) -> Sizes:
    return a.shape[0], a.shape[1], b.shape[1]


def products(layers: Iterable[torch.nn.Linear], rows: int) -> dict[str, Counter[Sizes]]:
    """The sizes of the layers' products on so many tokens."""
    shapes = [(layer.in_features, layer.out_features) for layer in layers]
    return {
        "fprop": Counter((rows, inputs, outputs) for inputs, outputs in shapes),
        "dgrad": Counter((rows, outputs, inputs) for inputs, outputs in shapes),
        "wgrad": Counter((outputs, rows, inputs) for inputs, outputs in shapes),
    }


def census(run: Boosted) -> tuple[Census, int]:
    """What one step multiplies, and on how many tokens."""
    batch = rank_batches(1)[0]
    with Census() as counted:
        run.step(batch)
    return counted, batch.numel()


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_all_products_but_those_of_the_vocabulary_head_run_in_fp8(stage: int) -> None:
    run = boost(fp8(stage=stage))
    counted, rows = census(run)
    network = run.model.unwrap()
    eligible = [module for name, module in network.model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert len(eligible) == 14
    assert all(isinstance(layer, FP8Linear) for layer in eligible)
    assert counted.fp8 == sum(products(eligible, rows).values(), Counter())
    assert counted.other == sum(products([network.lm_head], rows).values(), Counter())
    assert set(counted.batched) == {torch.float32}  # the angles of the rotary embedding


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_base_runs_fprop_and_dgrad_in_fp8_and_adapters_run_in_bf16(stage: int) -> None:
    run = boost(fp8(stage=stage), lora={"lora_config": lora_config()})
    counted, rows = census(run)
    layers = dict(run.model.module.named_modules())
    base = {name: layer for name, layer in layers.items() if name.endswith("base_layer")}
    assert len(base) == 14
    assert all(type(layer) is FP8Linear and not layer.weight.requires_grad for layer in base.values())
    of_base = products(base.values(), rows)
    # nothing below the first layer's q, k and v is trained: their input needs no gradient
    first = [
        layer for name, layer in base.items() if any(f"layers.0.self_attn.{which}_proj" in name for which in "qkv")
    ]
    below = products(first, rows)["dgrad"]
    assert counted.fp8 == of_base["fprop"] + of_base["dgrad"] - below
    adapters = [layer for name, layer in layers.items() if "lora_" in name and isinstance(layer, torch.nn.Linear)]
    assert len(adapters) == 28
    of_adapters = products(adapters, rows)
    head = products([layers["base_model.model.lm_head"]], rows)
    first_adapters = [
        layer
        for name, layer in layers.items()
        if any(f"layers.0.self_attn.{which}_proj.lora_A.default" in name for which in "qkv")
    ]
    not_needed = products(first_adapters, rows)["dgrad"]
    assert counted.other == (sum(of_adapters.values(), Counter()) - not_needed + head["fprop"] + head["dgrad"])
