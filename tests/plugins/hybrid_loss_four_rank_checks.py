"""The loss over chunks of logits where two kinds of parallelism meet, on four ranks."""

from __future__ import annotations

from unittest import mock

from tests.plugins import hybrid_loss_checks
from tests.plugins.registry import check_each

MODES = {
    "TP2 x SP2 all_to_all": {"tp_size": 2, "sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    "TP2 x SP2 ring_attn": {"tp_size": 2, "sp_size": 2, "sequence_parallelism_mode": "ring_attn"},
    "PP2 x SP2 all_to_all": {"pp_size": 2, "sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    "TP2 x PP2 split_gather": {"tp_size": 2, "pp_size": 2, "sequence_parallelism_mode": "split_gather"},
}


@check_each(*MODES)
def loss_and_gradients_are_those_of_whole_logits_in_fp32(mode: str) -> None:
    with mock.patch.dict(hybrid_loss_checks.MODES, MODES):
        hybrid_loss_checks.assert_exact("LLaMA", mode)
