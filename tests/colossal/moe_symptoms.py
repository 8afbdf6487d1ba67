"""What goes wrong without each mend of `compat/moe.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.colossal.models import token_batch
from tests.colossal.moe.models import tiny_mixtral
from tests.colossal.symptom import Symptom


def _overlap_gathers() -> None:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import MoeHybridParallelPlugin

    plugin = MoeHybridParallelPlugin(1, 1, 2, precision="bf16", zero_stage=1, overlap_allgather=True)
    booster = Booster(plugin=plugin)
    model = tiny_mixtral()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), 1e-2))
    tokens = token_batch(dist.get_rank())
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    late = [parameter for parameter in model.parameters() if hasattr(parameter, "_all_gather_handle")]
    assert late
    model(input_ids=tokens)
    waiting = [parameter for parameter in late if hasattr(parameter, "_all_gather_handle")]
    for parameter in waiting:
        parameter._all_gather_handle.wait()
    assert not waiting, "a forward did not wait for its weights"


SYMPTOMS = {
    "moe_waits_for_gathered_weights": Symptom(_overlap_gathers, "did not wait for its weights"),
}
