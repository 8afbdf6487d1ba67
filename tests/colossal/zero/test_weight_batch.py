"""What a rank casts, sends and counts of the weights that are gathered at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fp8booster import FP8Config, FP8Linear, comm
from fp8booster.colossal.zero import gathered_weights
from fp8booster.colossal.zero.gathered_weights import GatheredWeight, GatheredWeights, WeightBatch
from fp8booster.config import WeightCopies
from fp8booster.kernels.cast import cast
from fp8booster.nn import sharding
from fp8booster.nn.sharding import ScaleGroup
from fp8booster.nn.weights.engine import EngineWeight
from fp8booster.scaling import RealTime
from fp8booster.tensor import QuantizedMatrix

RANKS = 3
FORMAT = torch.float8_e4m3fn


def gathered_weight(rows: int, columns: int = 32, **options: object) -> GatheredWeight:
    """Of a layer of its own, whose weight is padded for all ranks."""
    return gathered_weights_under_one_scale(rows, columns=columns, **options)[0]


def gathered_weights_under_one_scale(*rows: int, columns: int = 32, **options: object) -> list[GatheredWeight]:
    """Stacked by rows, where they are several."""
    config = FP8Config(emulate=True, **options)
    layers = [FP8Linear(columns, each, bias=False, config=config, dtype=torch.bfloat16) for each in rows]
    count = sum(rows) * columns
    flat = torch.zeros(-(-count // RANKS) * RANKS, dtype=FORMAT)
    for layer in layers:
        layer.fp8_weight = EngineWeight()
    group = ScaleGroup(layers)
    data, transpose = flat[:count].view(-1, columns), torch.zeros(columns, sum(rows), dtype=FORMAT)
    group.lie_in(QuantizedMatrix(data, transpose, torch.zeros(()), None))
    parts = [flat] if len(layers) == 1 else [part.data.view(-1) for part in group.parts]
    return [
        GatheredWeight(layer, group, quantized, part, keeps_16_bits=True)
        for layer, quantized, part in zip(layers, group.parts, parts, strict=True)
    ]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_casts_its_part_and_knows_how_much_of_it_is_padding(rank: int) -> None:
    weights = [gathered_weight(16), gathered_weight(32), gathered_weight(16, columns=16)]
    batch = WeightBatch(weights, RANKS, rank)
    assert batch.sharded.firsts is None
    sizes = [171, 342, 86]  # of 512, 1024 and 256 values
    assert batch.sharded.counts == ([171, 342, 86] if rank < 2 else [170, 340, 84])
    for each, size, (whole, own) in zip(weights, sizes, batch.messages, strict=True):
        assert whole.data_ptr() == each.flat.data_ptr()
        assert (whole.numel(), own.numel()) == (RANKS * size, size)
        assert own.data_ptr() == each.flat[rank * size :].data_ptr()


def test_a_weight_smaller_than_the_parts_before_has_no_values_here() -> None:
    weight = gathered_weight(16)
    weight.flat = torch.zeros(RANKS * 256, dtype=FORMAT)
    assert [WeightBatch([weight], RANKS, rank).sharded.counts for rank in range(RANKS)] == [[256], [256], [0]]


@pytest.mark.parametrize("kinds", [(False, False), (True, True), (False, True), (True, False)], ids=str)
def test_each_weight_is_cast_by_its_own_layers_rounding_of_scales(kinds: tuple[bool, ...]) -> None:
    weights = [gathered_weight(16, scaling=RealTime(power_of_two=kind)) for kind in kinds]
    noted: list[tuple] = []
    weights[1].layer.fp8_casts.weight_observers.append(lambda *what: noted.append(what))
    rank, size, count = 2, 171, 170  # the last part has a value of padding
    batch = WeightBatch(weights, RANKS, rank)
    shards = [torch.randn(size) for _ in weights]
    amaxes = torch.tensor([5.0, 7.0])
    comm.reset_statistics()
    batch.cast(dict(zip(weights, [(shard, None) for shard in shards], strict=True)), amaxes)
    for each, shard, amax, kind in zip(weights, shards, amaxes, kinds, strict=True):
        data, _, inverse_scale = cast.reference(
            shard.view(1, -1), FORMAT, plain=True, transposed=False, power_of_two=kind, amax=amax
        )
        part = each.flat[rank * size :]
        assert torch.equal(part.view(torch.uint8), data[0, :size].view(torch.uint8))
        assert torch.equal(each.quantized.inverse_scale, inverse_scale)
        assert not each.flat[: rank * size].view(torch.uint8).any()
    ((values, data, inverse_scale),) = noted
    assert torch.equal(values, shards[1][:count])
    assert torch.equal(data.view(torch.uint8), weights[1].flat[rank * size :][:count].view(torch.uint8))
    assert inverse_scale is weights[1].quantized.inverse_scale
    row = comm.statistics()["weight gather"]
    others = RANKS - 1
    # each rank sends its part to the others, and of the amax of each weight what an all-reduce sends
    assert (row.calls, row.raw_bytes) == (2, 2 * others * size * 2)
    assert row.wire_bytes == 2 * (others * size + 2 * 4 * others // RANKS)
    assert not row.uncompressed


def test_weights_under_one_scale_know_the_first_of_them() -> None:
    weights = [*gathered_weights_under_one_scale(16, 48), gathered_weight(16)]
    batch = WeightBatch(weights, RANKS, 0)
    assert batch.sharded.firsts.tolist() == [0, 0, 2]
    assert len(batch.groups) == 2


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

    monkeypatch.setattr(sharding, "agree_on_amax", agree)
    amax = torch.tensor(9.0)
    given = {weights[0]: (shards[3], None), weights[1]: (shards[1], amax)}
    assert batch.agree(given, "group").tolist() == [3.0, 4.0]
    ((values, group, known),) = seen
    assert group == "group"
    assert known == [None, amax]
    assert [each.data_ptr() for each in values] == [shards[3].data_ptr(), shards[1].data_ptr()]
    assert len(values[0]) == 170


@pytest.mark.parametrize("transposes", [True, False])
@pytest.mark.parametrize("lies_transposed", [True, False])
def test_memory_holds_the_rows_of_all_and_a_transpose_where_one_is_multiplied(
    transposes: bool, lies_transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = gathered_weights_under_one_scale(16, 48, 32, weight_copies=WeightCopies(transposes=transposes))
    monkeypatch.setattr(FP8Linear, "weight_is_transposed", lies_transposed)
    flat, (data, transpose, inverse_scale, _) = of_optimizer(weights)._memory([each.layer for each in weights])
    assert data.shape == (96, 32)
    assert flat.data_ptr() == data.data_ptr()
    assert transpose.shape == ((32, 96) if transposes or lies_transposed else (0,))
    assert data.dtype is transpose.dtype is FORMAT
    assert inverse_scale.shape == ()


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
    merged = gathered_weights_under_one_scale(16, 16)
    others = [gathered_weight(16) for _ in range(4)]
    weights = [merged[0], *others[:3], merged[1], others[3]]  # as q and v are merged, of which one comes late
    groups = list(dict.fromkeys(each.group for each in weights))
    made = of_optimizer(weights)
    for limit, expected in (
        (2**28, [[0, 4, 1, 2, 3, 5]]),
        (1, [[0, 4], [1], [2], [3], [5]]),
        (1024, [[0, 4], [1, 2], [3, 5]]),
    ):
        monkeypatch.setattr(gathered_weights, "BATCH_BYTES", limit)
        batches = list(made._batches(groups, "group"))
        assert [[weights.index(each) for each in batch.weights] for batch in batches] == expected


@pytest.mark.parametrize("differs", ["nothing", "group", "configuration", "padding"])
def test_weights_lie_together_where_none_of_these_differs(differs: str) -> None:
    weights = [
        gathered_weight(16, scaling=RealTime(power_of_two=differs == "configuration" and number == 1))
        for number in range(3)
    ]
    made = of_optimizer(weights, {2: "another"} if differs == "group" else None)
    if differs == "padding":
        padded = made._optimizer._working_param_to_padded_working_param
        padded[weights[1].layer.weight] = torch.empty(513)
    merged = SimpleNamespace(layers=[each.layer for each in weights], weights=[each.layer.weight for each in weights])
    assert (made._why_apart(merged) is None) is (differs == "nothing")


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
        gathered_weights.observer,
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
