"""What a rank casts, sends and counts of the weights that are gathered at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fp8booster import FP8Config, FP8Linear, comm
from fp8booster.colossal.zero import gathered_weights
from fp8booster.colossal.zero.gathered_weights import GatheredWeights, _Cast, _parts, _stacked
from fp8booster.colossal.zero.weight_batch import Filled, GatheredWeight, ScaleGroup, WeightBatch, keeps_transpose
from fp8booster.kernels.cast import cast
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.engine import EngineWeight
from fp8booster.tensor import QuantizedMatrix

RANKS = 3
FORMAT = torch.float8_e4m3fn


def gathered_weight(rows: int, columns: int = 32, **options: object) -> GatheredWeight:
    """Of a layer of its own, whose weight is padded for all ranks."""
    layer = FP8Linear(columns, rows, bias=False, config=FP8Config(emulate=True, **options), dtype=torch.bfloat16)
    count = layer.weight.numel()
    flat = torch.zeros(-(-count // RANKS) * RANKS, dtype=FORMAT)
    transpose = torch.zeros(columns, rows, dtype=FORMAT) if keeps_transpose(layer) else torch.zeros(0, dtype=FORMAT)
    quantized = QuantizedMatrix(flat[:count].view(rows, columns), transpose, torch.zeros(()), None)
    layer.fp8_weight = EngineWeight()
    group = ScaleGroup([Filled(layer, layer.fp8_weight, [layer.weight], quantized)])
    return GatheredWeight(layer, group, flat, quantized)


class Noting(Casts):
    """Notes what an engine has cast of its weight."""

    sees_weights = True

    def note_weight(self, values: torch.Tensor, data: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        self.noted = values, data, inverse_scale


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_casts_its_part_and_knows_how_much_of_it_is_padding(rank: int) -> None:
    weights = [gathered_weight(16), gathered_weight(32), gathered_weight(16, columns=16)]
    batch = WeightBatch(weights, RANKS, rank)
    assert batch.firsts.tolist() == [0, 1, 2]
    sizes = [171, 342, 86]  # of 512, 1024 and 256 values
    assert batch.counts == ([171, 342, 86] if rank < 2 else [170, 340, 84])
    for each, size, (whole, own) in zip(weights, sizes, batch.messages, strict=True):
        assert whole.data_ptr() == each.flat.data_ptr()
        assert (whole.numel(), own.numel()) == (RANKS * size, size)
        assert own.data_ptr() == each.flat[rank * size :].data_ptr()


def test_a_weight_smaller_than_the_parts_before_has_no_values_here() -> None:
    weight = gathered_weight(16)
    weight.flat = torch.zeros(RANKS * 256, dtype=FORMAT)
    assert [WeightBatch([weight], RANKS, rank).counts for rank in range(RANKS)] == [[256], [256], [0]]


@pytest.mark.parametrize("kinds", [(False, False), (True, True), (False, True), (True, False)], ids=str)
def test_each_weight_is_cast_by_its_own_layers_rounding_of_scales(kinds: tuple[bool, ...]) -> None:
    weights = [gathered_weight(16, power_of_two=kind) for kind in kinds]
    weights[1].layer.fp8_casts = casts = Noting()
    rank, size, count = 2, 171, 170  # the last part has a value of padding
    batch = WeightBatch(weights, RANKS, rank)
    shards = [torch.randn(size) for _ in weights]
    amaxes = [torch.tensor(5.0), torch.tensor(7.0)]
    comm.reset_statistics()
    batch.cast(shards, amaxes)
    for each, shard, amax, kind in zip(weights, shards, amaxes, kinds, strict=True):
        data, _, inverse_scale = cast.reference(
            shard.view(1, -1), FORMAT, plain=True, transposed=False, power_of_two=kind, amax=amax
        )
        part = each.flat[rank * size :]
        assert torch.equal(part.view(torch.uint8), data[0, :size].view(torch.uint8))
        assert torch.equal(each.quantized.inverse_scale, inverse_scale)
        assert not each.flat[: rank * size].view(torch.uint8).any()
    values, data, inverse_scale = casts.noted
    assert torch.equal(values, shards[1][:count])
    assert torch.equal(data.view(torch.uint8), weights[1].flat[rank * size :][:count].view(torch.uint8))
    assert inverse_scale is weights[1].quantized.inverse_scale
    row = comm.statistics()["weight gather"]
    others = RANKS - 1
    # each rank sends its part to the others, and of the amax of each weight what an all-reduce sends
    assert (row.calls, row.raw_bytes) == (2, 2 * others * size * 2)
    assert row.wire_bytes == 2 * (others * size + 2 * 4 * others // RANKS)
    assert not row.uncompressed


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("lies_transposed", [False, True])
def test_a_weight_that_lies_transposed_has_both_layouts(kept: bool, lies_transposed: bool) -> None:
    layer = SimpleNamespace(fp8_config=SimpleNamespace(keeps_transposes=kept), weight_is_transposed=lies_transposed)
    assert keeps_transpose(layer) is (kept or lies_transposed)


def test_weights_under_one_scale_know_the_first_of_them() -> None:
    one, two, three = (gathered_weight(16) for _ in range(3))
    two.group = one.group
    assert WeightBatch([one, two, three], RANKS, 0).firsts.tolist() == [0, 0, 2]
    assert len(WeightBatch([one, two, three], RANKS, 0).groups) == 2


def test_a_layer_that_was_converted_again_gets_its_source_back() -> None:
    weight = gathered_weight(16)
    source, other = weight.layer.fp8_weight, EngineWeight()
    weight.layer.fp8_weight = other
    weight.group.fill()
    assert weight.layer.fp8_weight is source
    assert source.held is weight.quantized
    assert other.held is None


def test_padding_is_left_out_where_the_amax_is_to_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shard whose amax is known it is not read."""
    weights = [gathered_weight(16), gathered_weight(16)]
    batch = WeightBatch(weights, RANKS, 2)
    shards = [torch.randn(171) for _ in range(4)]
    seen = []

    def agree(values: list[torch.Tensor], group: object, known: list[torch.Tensor | None]) -> torch.Tensor:
        seen.append((values, group, known))
        return torch.tensor([3.0, 4.0])

    monkeypatch.setattr(gathered_weights, "agree_on_amax", agree)
    amax = torch.tensor(9.0)
    of_batch = _Cast(batch, [3, 1], shards, [None, amax, None, None])
    assert [each.data_ptr() for each in of_batch.shards] == [shards[3].data_ptr(), shards[1].data_ptr()]
    assert [each.item() for each in of_batch.agreed("group")] == [3.0, 4.0]
    ((values, group, known),) = seen
    assert group == "group"
    assert known == [None, amax]
    assert [len(each) for each in values] == [170, 171]


@pytest.mark.parametrize("transposes", [True, False])
def test_stacked_memory_is_cut_into_the_rows_and_columns_of_each_weight(transposes: bool) -> None:
    layers = [gathered_weight(rows, keep_weight_transposes=transposes).layer for rows in (16, 48, 32)]
    data, transpose = _stacked(layers)
    assert data.shape == (96, 32)
    assert transpose.shape == ((32, 96) if transposes else (0,))
    assert data.dtype is transpose.dtype is FORMAT
    parts = _parts(data, transpose, [layer.weight for layer in layers])
    first = 0
    for layer, (part, columns) in zip(layers, parts, strict=True):
        rows = len(layer.weight)
        assert part.data_ptr() == data[first:].data_ptr()
        assert part.shape == layer.weight.shape
        if transposes:
            assert columns.shape == (32, rows)
            assert columns.data_ptr() == transpose[:, first:].data_ptr()
        first += rows


def of_optimizer(weights: list[GatheredWeight], groups: dict[int, object] | None = None) -> GatheredWeights:
    """Without the rest that boosting makes."""
    parameters = [each.layer.weight for each in weights]
    made = object.__new__(GatheredWeights)
    made._weights = dict(zip(parameters, weights, strict=True))
    made._optimizer = SimpleNamespace(
        param_to_pg={each: (groups or {}).get(number, "group") for number, each in enumerate(parameters)},
        _working_param_to_padded_working_param={each: torch.empty(each.shape) for each in parameters},
    )
    made._reasons = {}
    return made


def test_batches_end_when_they_are_large_and_keep_those_of_one_scale_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: RANKS)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    weights = [gathered_weight(16) for _ in range(6)]
    for each in (weights[0], weights[4]):  # as q and v are merged, of which one comes late
        each.group = ScaleGroup([Filled(None, None, [weights[0].layer.weight, weights[4].layer.weight], None)])
    made = of_optimizer(weights)
    for limit, expected in (
        (2**28, [[0, 4, 1, 2, 3, 5]]),
        (1, [[0, 4], [1], [2], [3], [5]]),
        (1026, [[0, 4], [1, 2], [3, 5]]),
    ):
        monkeypatch.setattr(gathered_weights, "BATCH_BYTES", limit)
        batches = list(made._batches(weights, "group"))
        assert [[weights.index(each) for each in batch.weights] for batch in batches] == expected


@pytest.mark.parametrize("differs", ["nothing", "group", "configuration", "padding"])
def test_weights_lie_together_where_none_of_these_differs(differs: str) -> None:
    weights = [gathered_weight(16, power_of_two=differs == "configuration" and number == 1) for number in range(3)]
    made = of_optimizer(weights, {2: "another"} if differs == "group" else None)
    if differs == "padding":
        padded = made._optimizer._working_param_to_padded_working_param
        padded[weights[1].layer.weight] = torch.empty(513)
    merged = SimpleNamespace(layers=[each.layer for each in weights], weights=[each.layer.weight for each in weights])
    assert made._can_lie_together(merged) is (differs == "nothing")


def test_gathers_in_16_bits_are_counted_by_group_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two groups the second sends what the first has gathered."""
    weights = [gathered_weight(16) for _ in range(4)]
    made = of_optimizer(weights, {0: (2, 4), 1: 4, 2: 4, 3: 2})
    parameters = list(made._weights)
    made._reasons = {parameters[1]: "a reason"}
    del made._weights[parameters[3]]
    counted = []
    monkeypatch.setattr(gathered_weights, "ranks_of", lambda group: group)
    monkeypatch.setattr(
        gathered_weights,
        "count_plain",
        lambda name, ranks, payload, reason, collective, calls: counted.append((ranks, payload, reason, calls)),
    )
    made.count_in_16_bits(parameters, [torch.empty(10, dtype=torch.bfloat16) for _ in parameters])
    assert sorted(counted) == [
        (2, 20, "not the weight of an FP8 layer", 1),
        (2, 80, "for a checkpoint", 1),
        (4, 20, "a reason", 1),
        (4, 40, "for a checkpoint", 2),
    ]
