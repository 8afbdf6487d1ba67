"""The loss over chunks of logits where two kinds of parallelism meet, on four ranks."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.colossal.hybrid import test_loss
from tests.distributed import ranks

MODES = {
    "TP2 x SP2 all_to_all": {"tp_size": 2, "sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    "TP2 x SP2 ring_attn": {"tp_size": 2, "sp_size": 2, "sequence_parallelism_mode": "ring_attn"},
    "PP2 x SP2 all_to_all": {"pp_size": 2, "sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    "TP2 x PP2 split_gather": {"tp_size": 2, "pp_size": 2, "sequence_parallelism_mode": "split_gather"},
}


@ranks(4)
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradients_are_those_of_whole_logits_in_fp32(mode: str) -> None:
    with mock.patch.dict(test_loss.MODES, MODES):
        test_loss.assert_exact("LLaMA", mode)
