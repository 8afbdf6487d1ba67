"""What of an FSDP1 unit is gathered in FP8, without ranks: each one's message is kept and handed to the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fp8booster import FP8Config, FP8Linear, formats
from fp8booster.config import Formats
from fp8booster.nn import sharding
from fp8booster.nn.fsdp import flat_weights
from fp8booster.nn.fsdp.flat_weights import FlatWeights
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.scaling import RealTime

RANKS = 2


def unit(layers: list[FP8Linear], *, contiguous: bool = True) -> SimpleNamespace:
    """What is read of a flat parameter, which holds the weights of layers one after the other."""
    sizes = [layer.weight.numel() for layer in layers]
    infos = [
        SimpleNamespace(module=layer, param_name="weight", module_name=str(number))
        for number, layer in enumerate(layers)
    ]
    return SimpleNamespace(
        _sharded_size=torch.Size([sum(sizes) // RANKS]),
        _shared_param_infos=(),
        _numels_with_padding=tuple(sizes),
        _is_padding_mask=(False,) * len(layers),
        _param_infos=infos,
        _shapes=[layer.weight.shape for layer in layers],
        _contiguities=[contiguous] * len(layers),
        _param_extensions=[None] * len(layers),
    )


def layer(config: FP8Config | None = None, outputs: int = 32) -> FP8Linear:
    made = FP8Linear(32, outputs, bias=False, dtype=torch.bfloat16, config=config or FP8Config())
    made.fp8_weight = ReshardedWeight()
    return made


@pytest.mark.parametrize(
    "own",
    [
        FP8Config(scaling="amax"),
        FP8Config(formats=Formats(weight=formats.E5M2, gradient=formats.E4M3)),
        FP8Config(fast_accumulation=()),
    ],
)
def test_layers_of_another_configuration_are_gathered_in_16_bits(own) -> None:
    weights = FlatWeights(unit([layer(), layer(own), layer()]), 0, RANKS)
    assert weights.reasons == {"1.weight": "another FP8Config in the unit"}


def test_what_cannot_be_gathered_in_fp8_has_its_reason() -> None:
    odd, rowwise = layer(outputs=24), layer(FP8Config(scaling="rowwise"))
    assert FlatWeights(unit([odd, rowwise]), 0, RANKS).reasons == {
        "0.weight": "size no multiple of 16",
        "1.weight": "rowwise scales",
    }
    assert FlatWeights(unit([layer()], contiguous=False), 0, RANKS).reasons == {"0.weight": "not contiguous"}


@pytest.mark.parametrize("power_of_two", [False, True])
def test_every_rank_gets_the_weights_of_all_whoever_holds_them(monkeypatch, power_of_two) -> None:
    torch.manual_seed(0)
    config = FP8Config(scaling=RealTime(power_of_two=power_of_two))
    layers = [layer(config) for _ in range(RANKS)]  # one on each rank
    whole = torch.cat([each.weight.detach().view(-1) for each in layers])
    amaxes = torch.stack([each.weight.detach().abs().max().float() for each in layers])
    monkeypatch.setattr(sharding, "agree_on_amax", lambda parts, group, known: amaxes)
    sent: dict[int, torch.Tensor] = {}

    def gather(message: torch.Tensor, own: torch.Tensor, group: object) -> None:
        sent[rank] = own.clone()
        message.copy_(torch.cat([sent.get(each, torch.zeros_like(own)) for each in range(RANKS)]))

    monkeypatch.setattr(flat_weights, "gather_bytes", gather)
    for rank in range(RANKS):  # their messages
        gathered = torch.empty_like(whole)
        FlatWeights(unit(layers), rank, RANKS).gather(whole.chunk(RANKS)[rank], gathered, group=None)
    for rank in range(RANKS):
        gathered = torch.empty_like(whole)
        FlatWeights(unit(layers), rank, RANKS).gather(whole.chunk(RANKS)[rank], gathered, group=None)
        for each, values in zip(layers, gathered.chunk(RANKS), strict=True):
            expected = Casts(config).quantize_weight(each.weight.detach(), transposed=True)
            found = each.fp8_weight.held
            assert found.inverse_scale == expected.inverse_scale
            assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(found.transpose.view(torch.uint8), expected.transpose.view(torch.uint8))
            torch.testing.assert_close(values.view(32, 32).float(), expected.dequantize(32, 32), rtol=2**-8, atol=0)


def test_when_the_unit_is_sharded_again_no_source_holds_what_was_gathered(monkeypatch) -> None:
    layers = [layer() for _ in range(3)]
    merged = MergedLayers(layers[:2])
    merged.fp8_weight = ReshardedWeight()
    monkeypatch.setattr(sharding, "agree_on_amax", lambda parts, group, known: torch.ones(len(parts)))
    monkeypatch.setattr(flat_weights, "gather_bytes", lambda message, own, group: None)
    weights = FlatWeights(unit(layers), 0, RANKS, [merged])
    whole = torch.cat([each.weight.detach().view(-1) for each in layers])
    weights.gather(whole.chunk(RANKS)[0], torch.empty_like(whole), group=None)
    sources = [each.fp8_weight for each in (*layers, merged)]
    assert all(source.held is not None for source in sources)
    weights.drop()
    assert all(source.held is None for source in sources)
