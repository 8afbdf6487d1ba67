"""Each FP8 layer of `colossal.tensor` against the native layer that it takes the place of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, comm, report
from fp8booster.monitor.traffic import count_traffic
from tests.distributed import ranks
from tests.nn.reference import signal_to_noise

FP8_DB = 18
"""Of products in FP8 beside BF16 ones: E5M2 gradients have 2 bits, which make 25 dB; operands and the wire add."""


class Case(NamedTuple):
    """A native layer, made anew, and the input that this rank gives it."""

    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]


def _sharded(cls: str, inputs: int, outputs: int, conv: bool = False, **options: Any) -> nn.Module:
    from colossalai.shardformer import layer
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    whole = Conv1D(outputs, inputs) if conv else nn.Linear(inputs, outputs, options.pop("bias", True))
    if conv:
        nn.init.normal_(whole.weight, std=0.1)
    native = getattr(layer, cls)
    groups = {"process_group": dist.group.WORLD} if cls not in WHOLE else {}
    return native.from_native_module(whole.bfloat16(), **groups, **options)


WHOLE = ("LinearWithGradAccum", "FusedLinear", "GPT2FusedLinearConv")
"""Classes of layers that take no process group."""


def _case(cls: str, shape: tuple[int, ...], *sizes: int, **options: Any) -> Case:
    return Case(lambda: _sharded(cls, *sizes, **dict(options)), shape)


_QKV = {"split_sizes": [64, 32, 32]}
CASES = {
    "column": _case("Linear1D_Col", (2, 16, 64), 64, 96),
    "column without bias": _case("Linear1D_Col", (2, 16, 64), 64, 96, bias=False),
    "column gathering": _case("Linear1D_Col", (2, 16, 64), 64, 96, gather_output=True),
    "column skipping bias": _case("Linear1D_Col", (2, 16, 64), 64, 96, skip_bias_add=True),
    "column split_gather": _case("Linear1D_Col", (2, 16, 64), 64, 96, seq_parallel_mode="split_gather"),
    "column ring": _case("Linear1D_Col", (2, 16, 64), 64, 96, seq_parallel_mode="ring"),
    "column along dimension 0": _case(
        "Linear1D_Col", (16, 2, 64), 64, 96, seq_parallel_mode="split_gather", seq_parallel_dim=0
    ),
    "row": _case("Linear1D_Row", (2, 16, 48), 96, 64),
    "row splitting": _case("Linear1D_Row", (2, 16, 96), 96, 64, parallel_input=False),
    "row skipping bias": _case("Linear1D_Row", (2, 16, 48), 96, 64, skip_bias_add=True),
    "row split_gather": _case("Linear1D_Row", (2, 16, 48), 96, 64, seq_parallel_mode="split_gather"),
    "row along dimension 0": _case(
        "Linear1D_Row", (16, 2, 48), 96, 64, seq_parallel_mode="split_gather", seq_parallel_dim=0
    ),
    "whole": _case("LinearWithGradAccum", (2, 16, 64), 64, 96),
    "head": _case("VocabParallelLMHead1D", (2, 16, 64), 64, 100, gather_output=True),
    "head in parts": _case("VocabParallelLMHead1D", (2, 16, 64), 64, 100, gather_output=False),
    "whole head": _case("PaddingLMHead", (2, 16, 64), 64, 100),
    "fused column": _case("FusedLinear1D_Col", (2, 16, 64), 64, 128, **_QKV),
    "fused column gathering": _case("FusedLinear1D_Col", (2, 16, 64), 64, 128, gather_output=True, **_QKV),
    "fused column split_gather": _case(
        "FusedLinear1D_Col", (2, 16, 64), 64, 128, seq_parallel_mode="split_gather", **_QKV
    ),
    "fused row": _case("FusedLinear1D_Row", (2, 16, 64), 128, 64, **_QKV),
    "fused row splitting": _case("FusedLinear1D_Row", (2, 16, 128), 128, 64, parallel_input=False, **_QKV),
    "fused whole": _case("FusedLinear", (2, 16, 64), 64, 128),
    "conv column": _case("GPT2FusedLinearConv1D_Col", (2, 16, 64), 64, 128, conv=True, **_QKV),
    "conv column split_gather": _case(
        "GPT2FusedLinearConv1D_Col", (2, 16, 64), 64, 128, conv=True, seq_parallel_mode="split_gather", **_QKV
    ),
    "conv row": _case("GPT2FusedLinearConv1D_Row", (2, 16, 48), 96, 64, conv=True),
    "conv row split_gather": _case(
        "GPT2FusedLinearConv1D_Row", (2, 16, 48), 96, 64, conv=True, seq_parallel_mode="split_gather"
    ),
    "conv whole": _case("GPT2FusedLinearConv", (2, 16, 64), 64, 128, conv=True),
}


def converted(module: nn.Module, **options: Any) -> nn.Module:
    """The layer in FP8, alone in a model, with FP8 on the wire."""
    from fp8booster.colossal.tensor import compress_groups, convert_sharded_to_fp8

    compress_groups(dist.group.WORLD)
    return convert_sharded_to_fp8(nn.ModuleDict({"layer": module}), FP8Config(**options), communication=True)["layer"]


def run(layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients, of an output gradient that is the same wherever the output is."""
    x = x.clone().requires_grad_()
    output = layer(x)
    found = {}
    if isinstance(output, tuple):
        output, bias = output
        assert bias is layer.bias
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(output.shape, generator=generator).bfloat16()
    output.backward(dy)
    found |= {"y": output.detach(), "dx": x.grad}
    found |= {f"d{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return found


@ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_native_layer_does(name: str) -> None:
    case = CASES[name]
    native, layer = case.make(), case.make()
    before = [(key, id(parameter)) for key, parameter in layer.named_parameters()]
    layer = converted(layer)
    assert isinstance(layer, type(native))
    assert [(key, id(parameter)) for key, parameter in layer.named_parameters()] == before
    # whole where ranks have the same input, and each rank's part of it where they do not
    torch.manual_seed(2 if "row" not in name and "split_gather" not in name else 2 + dist.get_rank())
    x = torch.randn(case.input_shape).bfloat16()
    if "splitting" in name:
        dist.broadcast(x, 0)
    expected, found = run(native, x), run(layer, x)
    assert expected.keys() == found.keys()
    for what, tensor in expected.items():
        assert tensor.shape == found[what].shape, what
        ratio = signal_to_noise(tensor, found[what])
        assert ratio > FP8_DB, (what, ratio)
    layer.revert()
    assert type(layer) is type(native)


@ranks(2)
@pytest.mark.parametrize("name", ["column", "column split_gather", "row", "row split_gather", "conv column", "whole"])
def test_its_products_run_in_fp8_and_nothing_else_in_16_bits_on_the_wire(name: str) -> None:
    from tests.plugins.test_low_level_zero_census import Census

    case = CASES[name]
    layer = converted(case.make())
    with Census() as products, count_traffic() as traffic:
        run(layer, torch.randn(case.input_shape).bfloat16())
    assert sum(products.fp8.values()) == 3
    assert not products.other
    assert {dtype for _, dtype in traffic.counts} <= {torch.uint8, torch.float32}
    amaxes = sum(count.payload for (_, dtype), count in traffic.counts.items() if dtype is torch.float32)
    assert amaxes <= 8


@ranks(2)
@pytest.mark.parametrize(
    "name", ["column", "column split_gather", "row", "row split_gather", "conv column", "conv row", "whole"]
)
def test_zero_bubble_pipelines_compute_its_weight_gradient_later(name: str) -> None:
    from colossalai.pipeline.weight_grad_store import WeightGradStore

    case = CASES[name]
    now = converted(case.make())
    later = converted(case.make())
    later.use_zbv = True
    x = torch.randn(case.input_shape).bfloat16()
    expected, found = run(now, x), run(later, x)
    assert "dweight" not in found
    WeightGradStore.flush()
    WeightGradStore.pop()
    assert torch.equal(later.weight.grad, expected["dweight"])
    assert torch.equal(found["dx"], expected["dx"])


@ranks(2)
def test_groups_that_were_not_given_keep_the_native_collectives() -> None:
    from colossalai.quantization import fp8
    from colossalai.shardformer.layer import _operation

    from fp8booster.colossal.tensor import compress_groups

    compress_groups(dist.group.WORLD)
    others, values = dist.new_group([0, 1]), torch.randn(2048).bfloat16()

    def calls(group: dist.ProcessGroup) -> Iterator[Any]:
        halves = list(values.chunk(2))
        yield _operation.all_reduce_fp8(values.clone(), group=group)
        yield fp8.all_gather_fp8([torch.empty_like(values) for _ in range(2)], values, group=group)
        yield _operation.reduce_scatter_fp8(halves[0].clone(), halves, group=group)
        yield _operation.all_to_all_single_fp8(values.clone(), values, group=group)
        yield _operation.all_to_all_fp8([torch.empty_like(half) for half in halves], halves, group=group)
        yield _operation._gather(values.view(2, -1), 0, group)
        yield _operation._reduce(values.clone(), group)

    for group, wire in ((others, torch.bfloat16), (dist.group.WORLD, torch.uint8)):
        with count_traffic() as traffic:
            assert len(list(calls(group))) == 7
        assert {dtype for _, dtype in traffic.counts} == {wire}, traffic.counts


@ranks(2)
@pytest.mark.parametrize(
    "name", ["column split_gather", "row split_gather", "conv column split_gather", "conv row split_gather"]
)
def test_a_layer_kept_in_16_bits_sends_fp8(name: str) -> None:
    from fp8booster.colossal.tensor import convert_sharded_to_fp8

    case = CASES[name]
    native, kept = case.make(), nn.ModuleDict({"kept": case.make(), "other": nn.Linear(64, 64)})
    torch.manual_seed(dist.get_rank())
    x = torch.randn(case.input_shape).bfloat16()
    expected = run(native, x) if name != "conv row split_gather" else None
    convert_sharded_to_fp8(kept, FP8Config(layers=lambda path, _: path == "other"), communication=True)
    with count_traffic() as traffic:
        found = run(kept["kept"], x)
    assert {dtype for _, dtype in traffic.counts} == {torch.uint8}, traffic.counts
    for what, tensor in (expected or {}).items():
        assert signal_to_noise(tensor, found[what]) > 22, what


@ranks(2)
@pytest.mark.parametrize("name", ["column gathering", "head"])
def test_features_such_as_logits_are_gathered_as_they_are(name: str) -> None:
    from fp8booster.colossal.tensor import compress_groups

    compress_groups(dist.group.WORLD)
    torch.manual_seed(0)
    x, layer = torch.randn(2, 16, 64).bfloat16(), CASES[name].make()
    part = nn.functional.linear(x, layer.weight, layer.bias).detach()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    comm.reset_statistics()
    found = run(layer, x)["y"]
    assert torch.equal(found, torch.cat(parts, -1)[..., : found.shape[-1]])
    assert comm.statistics()["all_gather"].uncompressed == {"features such as logits": 1}
    run(converted(layer), x)
    assert comm.statistics()["all_gather"].uncompressed == {"features such as logits": 2}


@ranks(2)
def test_the_report_shows_this_ranks_part_and_why_a_layer_is_kept() -> None:
    from fp8booster.colossal.tensor import convert_sharded_to_fp8

    model = nn.ModuleDict(
        {
            "column": CASES["column"].make(),
            "conv": CASES["conv row"].make(),
            "left_out": CASES["row"].make(),
            "kept_conv": CASES["conv column"].make(),
            "lm_head": CASES["head"].make(),
        }
    )
    model["conv"].weight.requires_grad_(False)
    rows = report(model).rows
    assert [row.notes for row in rows] == ["use_fp8 is off"] * 5
    config = FP8Config(layers=lambda name, module: name in ("column", "conv"))
    rows = {row.name: row for row in report(convert_sharded_to_fp8(model, config, communication=True)).rows}
    shapes = {name: row.shape for name, row in rows.items()}
    assert shapes == {
        "column": (64, 48),
        "conv": (48, 64),
        "left_out": (48, 64),
        "kept_conv": (64, 64),
        "lm_head": (64, 64),
    }
    assert rows["column"].passes == ("FP8", "FP8", "FP8")
    assert rows["conv"].passes == ("FP8", "FP8", "none")
    assert rows["left_out"].passes == ("BF16", "BF16", "BF16")
    assert rows["left_out"].notes == "FP8Config.layers leaves it out"


@ranks(2)
def test_a_copy_and_a_second_conversion_work() -> None:
    layer = converted(CASES["whole"].make())
    twin = copy.deepcopy(layer)
    x = torch.randn(2, 16, 64).bfloat16()
    assert torch.equal(layer(x), twin(x))
    again = converted(twin, scaling="rowwise")
    assert again.fp8_config.rowwise


@ranks(2)
def test_gpt2s_layers_refuse_modes_that_they_do_not_have() -> None:
    layer = converted(CASES["conv column"].make())
    layer.seq_parallel_mode = "all_to_all"
    with pytest.raises(ValueError, match="use 'split_gather' or 'ring' or 'ring_attn'"):
        layer(torch.randn(2, 16, 64).bfloat16())


@ranks(2)
def test_statistics_name_what_is_sent() -> None:
    layer = converted(CASES["column split_gather"].make())
    comm.reset_statistics()
    run(layer, torch.randn(2, 16, 64).bfloat16())
    rows = comm.statistics().rows
    assert rows.keys() == {"sequence gather of inputs", "reduce_scatter_tensor"}
    assert all(row.ratio < 0.52 and not row.uncompressed for row in rows.values()), rows


@ranks(2)
def test_a_sum_over_ranks_reaches_a_tensor_whose_values_lie_apart() -> None:
    from colossalai.quantization import fp8

    from fp8booster.colossal.tensor import compress_groups

    compress_groups(dist.group.WORLD)
    whole = torch.arange(24.0).view(4, 6).bfloat16()
    columns = whole[:, ::2]
    assert not columns.is_contiguous()
    left_alone = whole[:, 1::2].clone()
    expected = columns * dist.get_world_size()
    fp8.all_reduce_fp8(columns, group=dist.group.WORLD)
    assert torch.equal(columns, expected)
    assert torch.equal(whole[:, 1::2], left_alone)


@ranks(2)
@pytest.mark.parametrize("dimension", [-1, 1])
def test_what_is_gathered_gives_the_gradient_that_it_gives_natively(dimension: int) -> None:
    """Features as they are, a sequence in FP8; with the factor that some of shardformer's calls ask for."""
    from colossalai.shardformer.layer import _operation

    from fp8booster.colossal.tensor import compress_groups

    compress_groups(dist.group.WORLD)
    uncompressed = dist.new_group([0, 1])
    torch.manual_seed(dist.get_rank())
    part, gradient = torch.randn(2, 32, 64).bfloat16(), torch.randn(2, 64, 128).bfloat16()
    for factor in (None, 1.0, dist.get_world_size(), 0.25):
        found = []
        for gather, group in (
            (_operation._GatherForwardSplitBackward.apply, uncompressed),
            (_operation.gather_forward_split_backward, dist.group.WORLD),
        ):
            x = part.clone().requires_grad_()
            y = gather(x, dimension, group, factor, False)
            y.backward(gradient[..., : y.shape[-1]][:, : y.shape[1]])
            found.append((y.detach(), x.grad))
        (native, native_gradient), (y, own_gradient) = found
        assert torch.equal(own_gradient, native_gradient)  # a rank takes its part, and nothing is sent
        assert torch.equal(y, native) if dimension == -1 else signal_to_noise(y, native) > 22
