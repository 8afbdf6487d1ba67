"""What goes wrong in pipelines without each mend of `compat/pipeline.py`."""

from __future__ import annotations

import torch

from tests.colossal.symptom import Symptom


def _accumulate_native_weight_gradients() -> None:
    from colossalai.pipeline.weight_grad_store import WeightGradStore
    from colossalai.shardformer.layer import LinearWithGradAccum

    layer = LinearWithGradAccum(8, 8, bias=False, use_zbv=True)
    expected = torch.zeros_like(layer.weight)
    for x in torch.eye(8).split(4):
        layer(x.requires_grad_()).sum().backward()
        WeightGradStore.flush()
        expected += x.detach().sum(0)
    for _ in range(2):
        WeightGradStore.pop()
    assert torch.equal(layer.weight.grad, expected), "a micro-batch is lost"


SYMPTOMS = {
    "zero_bubble_adds_weight_gradients": Symptom(
        _accumulate_native_weight_gradients, "a micro-batch is lost"
    ),
}
