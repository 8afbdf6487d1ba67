"""`MoeHybridParallelPlugin` where experts are spread over ranks, and each part of them has replicas: on four ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import ranks
from tests.plugins.test_moe_hybrid_parallel import CLOSE, EP2, assert_native_gradients, boost, fp8, native
from tests.plugins.training import assert_close, train

MODES: dict[str, dict[str, Any]] = {
    "EP2 x MoE-DP2": EP2,
    "EP2 x MoE-DP2, stage 2": EP2 | {"zero_stage": 2},
    "EP2 x PP2": EP2 | {"pp_size": 2, "num_microbatches": 2},
}


@ranks(4)
@pytest.mark.parametrize("mode", MODES)
def test_moe_over_four_ranks_has_the_gradients_of_the_native_plugin(mode: str) -> None:
    assert_native_gradients(MODES[mode])


@ranks(4)
@pytest.mark.parametrize("mode", MODES)
def test_moe_over_four_ranks_trains_near_native(mode: str) -> None:
    expected, found = (train(boost(make(**MODES[mode])), micro_batches=2) for make in (native, fp8))
    assert_close(expected, found, CLOSE, gradients=False)
    assert expected != found
