from __future__ import annotations

import pytest

from benchmarks.harness.shapes import DIRECTIONS, Workload, layers_of, workloads
from fp8booster.training.models import MODELS


def test_grouped_queries_have_narrow_keys_and_values() -> None:
    layers = layers_of(MODELS["70b"], separate=True, fused=True)
    assert ("k,v", 8192, 1024) in layers
    assert ("q+k+v", 8192, 10240) in layers


@pytest.mark.parametrize(("name", "parameters"), [("7b", 6.5e9), ("13b", 12.7e9), ("70b", 68.5e9), ("35b", 32.9e9)])
def test_layers_add_up_to_the_model(name, parameters) -> None:
    model = MODELS[name]
    weights = 2 * model.hidden**2 + 2 * model.hidden * model.key_value + 3 * model.hidden * model.feed_forward
    assert model.layers * weights == pytest.approx(parameters, rel=0.01)
    fused = layers_of(model, separate=False, fused=True)
    apart = {layer: (k, n) for layer, k, n in layers_of(model, separate=True, fused=False)}
    assert sum(k * n for _, k, n in fused) + model.hidden**2 + apart["down"][0] * apart["down"][1] == weights


def test_a_shape_that_two_models_share_is_measured_once() -> None:
    found = [work for work in workloads(["70b", "35b"], [8192]) if (work.k, work.n) == (8192, 8192)]
    assert [work.labels for work in found] == [("LLaMA-2 70B q,o", "Command-R 35B q,k,v,o")]


def test_the_published_layer_keeps_its_tokens() -> None:
    assert workloads(["te"], [8192, 16384]) == [Workload(15872, 4096, 16384, ("Transformer Engine's documentation",))]


def test_products_multiply_what_the_layer_has() -> None:
    work = Workload(2, 3, 5, ())
    assert [work.product(direction) for direction in DIRECTIONS] == [(2, 3, 5), (2, 5, 3), (5, 2, 3)]
    for rows, inner, columns in map(work.product, DIRECTIONS):
        assert 2 * rows * inner * columns == work.flops


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"'8b'; use 7b, 13b"):
        workloads(["8b"], [16])
