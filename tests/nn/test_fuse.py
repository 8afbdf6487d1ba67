"""`fuse` in plain PyTorch: CUDA graphs as the configuration says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8booster import FP8Config, capture_layers, convert_to_fp8, fuse, report
from fp8booster.nn.graphs.capture import CapturedLayer
from tests.nn.fused.models import build


@pytest.mark.parametrize(
    ("options", "limited"),
    [
        ({}, [True, True]),
        ({"cuda_graphs": True}, [False, False]),
        ({"cuda_graphs": False}, []),
        ({"scaling": "delayed"}, []),  # cannot be captured, and nobody asked for it
    ],
    ids=str,
)
def test_layers_are_captured_as_configured(
    options: dict[str, Any], limited: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = convert_to_fp8(build(), FP8Config(**options))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fuse(model)
    captured = [layer for layer in model.modules() if isinstance(layer, CapturedLayer)]
    assert [layer.fp8_graphs.shared.only_where_host_limits for layer in captured] == limited


def test_without_a_gpu_or_fp8_layers_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fuse(model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fuse(other := convert_to_fp8(build(), FP8Config()))
    assert not any(isinstance(layer, CapturedLayer) for each in (model, other) for layer in each.modules())


def test_a_call_by_hand_captures_all_layers() -> None:
    model = convert_to_fp8(build(), FP8Config(cuda_graphs=True))
    fuse(model)
    assert capture_layers(model, only_where_host_limits=True) == capture_layers(model) == len(model.model.layers)
    assert not any(layer.fp8_graphs.shared.only_where_host_limits for layer in model.model.layers)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_later_configuration_turns_graphs_off(family: str) -> None:
    models = [convert_to_fp8(build(family), FP8Config(cuda_graphs=graphs)) for graphs in (True, False)]
    for model in models:
        fuse(model)
    assert any(isinstance(each, CapturedLayer) for each in models[0].modules())
    assert report(models[0]).summary() != report(models[1]).summary()
    fuse(convert_to_fp8(models[0], FP8Config(cuda_graphs=False)))
    assert [type(each) for each in models[0].modules()] == [type(each) for each in models[1].modules()]
    assert report(models[0]).summary() == report(models[1]).summary()
