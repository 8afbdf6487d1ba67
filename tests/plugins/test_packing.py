"""Packed batches under the plugins that do not shard layers: sequences are kept apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.colossal.gemini import runs as gemini_runs
from tests.colossal.hybrid.test_packing import batch, in_one_process, model
from tests.distributed import ranks
from tests.plugins import fsdp_runs, test_torch_ddp, training

PLUGINS: dict[str, Callable[[], Any]] = {
    "LowLevelZero": lambda: training.ours(stage=2, use_fp8=True),
    "DDP": test_torch_ddp.fp8,
    "FSDP": lambda: fsdp_runs.fp8(**fsdp_runs.WRAPPINGS["blocks in BF16"]),
    "Gemini": gemini_runs.wire,
}


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_sequences_of_packed_batches_are_kept_apart(plugin: str) -> None:
    run = training.boost(PLUGINS[plugin](), model())
    given = batch()
    expected = in_one_process(given, 1)
    one_sequence = in_one_process({name: each for name, each in given.items() if name != "position_ids"}, 1)
    loss = run.model(**given).loss
    run.booster.backward(loss, run.optimizer)
    assert abs(loss.item() - expected) < 0.05 * abs(one_sequence - expected)
