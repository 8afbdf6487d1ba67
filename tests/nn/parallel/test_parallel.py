"""What every rank runs: layers spread over ranks against one layer on the whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint, noop_context_fn

from fp8booster import FP8Config, comm, convert_to_fp8, fp8_linear
from fp8booster.comm.encoding import DEFAULT
from fp8booster.monitor.traffic import count_traffic
from fp8booster.nn import FP8Layer
from fp8booster.nn.linear.functional import Defer, linear_from_quantized
from fp8booster.nn.linear.shared_input import begin_forward, end_forward
from fp8booster.nn.parallel import tensor_parallel as parallel_module
from fp8booster.nn.parallel.tensor_parallel import ColumnParallel, RowParallel, SequenceColumn, SequenceRow
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import deliver_amax
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT
from tests.distributed import ranks
from tests.nn.reference import products_kept, signal_to_noise

INPUTS, OUTPUTS = 96, 64
SHAPES = ((4, 16), (1, 24), (3, 10))
"""(batch, sequence) of the whole input; the last has a number of tokens that no product takes unpadded."""

SUMS_DB = 40
"""Where nothing but the order of sums, and the 16-bit rounding of parts before them, differs: BF16 has 8 bits."""
WIRE_DB = 25
"""Where parts were rounded to E4M3 on the wire: 3 bits make 31.6 dB, twice as in an all-reduce 28.6, and a sum of parts
may be smaller than they are."""


def part(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    """This rank's half."""
    return tensor.chunk(2, dimension)[dist.get_rank()].contiguous()


class Whole(NamedTuple):
    """A layer's tensors; halves of x, of w and of dy have the amax of the whole, so that their scales are equal."""

    x: torch.Tensor  # [batch, sequence, K]
    w: torch.Tensor  # [N, K]
    b: torch.Tensor  # [N]
    dy: torch.Tensor  # [batch, sequence, N]

    @classmethod
    def of(cls, shape: tuple[int, int], sequence: int = 1) -> Whole:
        x, w = torch.randn(*shape, INPUTS), torch.randn(OUTPUTS, INPUTS) / 8
        b, dy = torch.randn(OUTPUTS), torch.randn(*shape, OUTPUTS)
        for tensor in (x, w, dy):
            for corner in itertools.product(*((0, size - 1) for size in tensor.shape)):
                tensor[corner] = 6.0
        x, w, b, dy = (tensor.bfloat16() for tensor in (x, w, b, dy))
        return cls(x.movedim(1, sequence).contiguous(), w, b, dy.movedim(1, sequence).contiguous())

    def expected(self, config: FP8Config, bias: bool) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in self[: 3 if bias else 2]]
        y = fp8_linear(*leaves, config=config)
        return y.detach(), *torch.autograd.grad(y, leaves, self.dy)


def run_layer(
    exchange: object,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    dy: torch.Tensor,
    config: FP8Config,
    transposed: bool = False,
    defer: Defer | None = None,
) -> tuple[torch.Tensor, ...]:
    """Output and gradients of this rank's layer, whose weight lies transposed or not."""
    lies = w.t().contiguous() if transposed else w.clone()
    leaves = [x.clone().requires_grad_(), lies.requires_grad_()]
    leaves += [] if b is None else [b.clone().requires_grad_()]
    y = linear_from_quantized(
        leaves[0],
        leaves[1],
        leaves[2] if b is not None else None,
        exchange.input(leaves[0], Casts(config), transposed=True),
        Casts(config).quantize_weight(w, transposed=True),
        Casts(config),
        defer=defer,
        exchange=exchange,
        weight_is_transposed=transposed,
    )
    y.backward(dy)
    gradients = [leaf.grad for leaf in leaves]
    if transposed and gradients[1] is not None:
        assert gradients[1].is_contiguous()
        gradients[1] = gradients[1].t()
    return y.detach(), *gradients


def assert_near(expected: torch.Tensor, found: torch.Tensor, decibels: float) -> None:
    assert expected.shape == found.shape
    assert expected.dtype == found.dtype
    ratio = signal_to_noise(expected, found)
    assert ratio > decibels, ratio


CONFIGS = (FP8Config(), FP8Config(scaling="rowwise"), FP8Config(scaling="blockwise"), FP8Config(scaling="amax"))


def cases() -> list[tuple]:
    """(configuration, FP8 on the wire, shape, whether the weight lies transposed)"""
    kinds = itertools.cycle(zip(SHAPES, (False, True, False), strict=True))
    return [(config, wire, *next(kinds)) for wire in (True, False) for config in (CONFIGS[0], *CONFIGS)]


@ranks(2)
def test_column_parallel_layers_compute_what_one_layer_does() -> None:
    for config, wire, shape, transposed in cases():
        whole = Whole.of(shape)
        y, dx, dw, db = whole.expected(config, bias=True)
        exchange = ColumnParallel(dist.group.WORLD, encoding=DEFAULT if wire else None)
        found = run_layer(exchange, whole.x, part(whole.w, 0), part(whole.b, 0), part(whole.dy, -1), config, transposed)
        assert_near(part(y, -1), found[0], SUMS_DB)
        assert_near(dx, found[1], WIRE_DB if wire else SUMS_DB)
        assert_near(part(dw, 0), found[2], SUMS_DB)
        assert_near(part(db, 0), found[3], SUMS_DB)


@ranks(2)
def test_row_parallel_layers_compute_what_one_layer_does() -> None:
    for config, wire, shape, transposed in cases():
        whole = Whole.of(shape)
        y, dx, dw = whole.expected(config, bias=False)
        exchange = RowParallel(dist.group.WORLD, encoding=DEFAULT if wire else None)
        found = run_layer(exchange, part(whole.x, -1), part(whole.w, 1), None, whole.dy, config, transposed)
        if config.finer_scales is not None:  # each rank's row has an amax of its own
            assert_near(y, found[0], 20)
            continue
        assert_near(y, found[0], WIRE_DB if wire else SUMS_DB)
        assert_near(part(dx, -1), found[1], SUMS_DB)
        assert_near(part(dw, 1), found[2], SUMS_DB)


@ranks(2)
def test_a_checkpoint_may_keep_products_that_are_summed_over_ranks() -> None:
    whole, gradients = Whole.of(SHAPES[0]), []
    x, w, config = part(whole.x, -1), part(whole.w, 1), CONFIGS[0]
    exchange = RowParallel(dist.group.WORLD)
    for context in (noop_context_fn, products_kept):
        leaf = x.clone().requires_grad_()

        def block(leaf: torch.Tensor) -> torch.Tensor:
            quantized = (
                exchange.input(leaf, Casts(config), transposed=False),
                Casts(config).quantize_weight(w, transposed=True),
            )
            return linear_from_quantized(leaf, w, None, *quantized, Casts(config), exchange=exchange).sin()

        checkpoint(block, leaf, use_reentrant=False, context_fn=context).backward(whole.dy)
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@ranks(2)
def test_sequence_parallel_columns_compute_what_one_layer_does() -> None:
    for (config, wire, shape, transposed), sequence in itertools.product(cases(), (0, 1)):
        whole = Whole.of(shape, sequence)
        y, dx, dw, db = whole.expected(config, bias=True)
        exchange = SequenceColumn(dist.group.WORLD, sequence, encoding=DEFAULT if wire else None)
        x = part(whole.x, sequence)
        found = run_layer(exchange, x, part(whole.w, 0), part(whole.b, 0), part(whole.dy, -1), config, transposed)
        rounded_on_the_wire = wire and config.finer_scales is not None  # else x is what one process casts, bit for bit
        assert_near(part(y, -1), found[0], WIRE_DB if rounded_on_the_wire else SUMS_DB)
        assert_near(part(dx, sequence), found[1], WIRE_DB if wire else SUMS_DB)
        assert_near(part(dw, 0), found[2], WIRE_DB if rounded_on_the_wire else SUMS_DB)
        assert_near(part(db, 0), found[3], SUMS_DB)


@ranks(2)
def test_sequence_parallel_rows_compute_what_one_layer_does() -> None:
    for (config, wire, shape, transposed), sequence in itertools.product(cases(), (0, 1)):
        if config.finer_scales is not None:
            continue
        whole = Whole.of(shape, sequence)
        y, dx, dw = whole.expected(config, bias=False)
        exchange = SequenceRow(dist.group.WORLD, sequence, encoding=DEFAULT if wire else None)
        x, dy = part(whole.x, -1), part(whole.dy, sequence)
        found = run_layer(exchange, x, part(whole.w, 1), None, dy, config, transposed)
        assert_near(part(y, sequence), found[0], WIRE_DB if wire else SUMS_DB)
        assert_near(part(dx, -1), found[1], SUMS_DB)
        assert_near(part(dw, 1), found[2], SUMS_DB)


@ranks(2)
def test_what_is_gathered_has_the_bits_of_one_cast() -> None:
    config = FP8Config()
    for shape, sequence, features in itertools.product(SHAPES, (0, 1), (96, 40)):
        x = torch.randn(*shape, features).bfloat16().movedim(1, sequence).contiguous()
        for dimension, transposed, wire in itertools.product((sequence, sequence - 3), (True, False), (True, False)):
            expected = Casts(config).quantize(INPUT, x, transposed=transposed)
            exchange = SequenceColumn(dist.group.WORLD, dimension, encoding=DEFAULT if wire else None)
            assert exchange.shape(part(x, sequence).shape) == x.shape
            assert exchange.growth == 2
            found = exchange.input(part(x, sequence), Casts(config), transposed=transposed)
            for one, other in zip(expected[:2], found[:2], strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (shape, sequence, features)
            assert torch.equal(expected.inverse_scale, found.inverse_scale)


@ranks(2)
def test_a_gathered_gradient_has_the_bits_of_one_cast_and_a_row_of_its_own() -> None:
    config, dy = FP8Config(), torch.randn(3, 16, OUTPUTS).bfloat16()
    assert config.gradient_format != config.input_format
    for layouts in ({"plain": True, "transposed": False}, {"plain": False, "transposed": True}):
        comm.reset_statistics()
        expected = Casts(config).quantize(OUTPUT_GRADIENT, dy, **layouts)
        for wire in (True, False):
            exchange = SequenceRow(dist.group.WORLD, encoding=DEFAULT if wire else None)
            found = exchange.output_gradient(part(dy, 1), Casts(config), **layouts)
            for one, other in zip(expected[:2], found[:2], strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (layouts, wire)
        assert comm.statistics().rows.keys() == {parallel_module.GRADIENT_GATHER, "all_gather_into_tensor"}


@ranks(2)
def test_a_group_of_some_ranks_exchanges_with_no_others() -> None:
    """Of one, so that the layer is a lone one; the ranks have other tensors."""
    alone, _ = dist.new_subgroups(1)
    torch.manual_seed(dist.get_rank())
    for config, wire in itertools.product((CONFIGS[0], CONFIGS[1]), (True, False)):
        whole = Whole.of((4, 16))
        expected = whole.expected(config, bias=False)
        for kind in (ColumnParallel, RowParallel, SequenceColumn, SequenceRow):
            exchange = kind(alone, encoding=DEFAULT if wire else None)
            found = run_layer(exchange, whole.x, whole.w, None, whole.dy, config)
            for one, other in zip(expected, found, strict=True):
                assert_near(one, other, SUMS_DB)


OTHER_GATHERS: dict[str, Callable[[], SequenceColumn]] = {
    "dimension": lambda: SequenceColumn(dist.group.WORLD, 0),
    "communication": lambda: SequenceColumn(dist.group.WORLD, encoding=None),
    "group": lambda: SequenceColumn(dist.new_subgroups(1)[0]),
}


@ranks(2)
@pytest.mark.parametrize("what", OTHER_GATHERS)
def test_layers_that_gather_one_input_otherwise_do_not_share_it(what: str) -> None:
    one, other = columns(2)
    other.exchanges = OTHER_GATHERS[what]
    for layers in ((one, other), (other, one)):
        x = torch.randn(2, 16, INPUTS).bfloat16()
        expected = [layer(x.clone()) for layer in layers]
        holder = nn.ModuleList(layers)
        with count_traffic() as traffic:
            begin_forward(holder)
            found = [layer(x) for layer in layers]
            end_forward(holder)
        for right, y in zip(expected, found, strict=True):
            assert torch.equal(right, y)
        assert len(traffic.counts) == (3 if what == "communication" else 2)


@ranks(2)
def test_a_nan_on_one_rank_reaches_all() -> None:
    x = torch.randn(2, 16, INPUTS).bfloat16()
    if dist.get_rank() == 1:
        x[0, 3, 5] = float("nan")
    found = SequenceColumn(dist.group.WORLD).input(x, Casts(FP8Config()), transposed=False)
    assert found.inverse_scale.isnan()


@ranks(2)
def test_an_amax_that_came_with_the_input_is_agreed_on() -> None:
    x = deliver_amax(torch.randn(2, 16, INPUTS).bfloat16(), torch.tensor(7.0 * (1 + dist.get_rank())))
    found = SequenceColumn(dist.group.WORLD).input(x, Casts(FP8Config()), transposed=False)
    torch.testing.assert_close(found.inverse_scale, torch.tensor(14.0 / 448))


class _Column(FP8Layer, nn.Linear):
    """A layer as an engine makes it."""

    original = nn.Linear

    exchanges: Callable[[], SequenceColumn] = staticmethod(lambda: SequenceColumn(dist.group.WORLD))

    def fp8_exchange(self) -> SequenceColumn:
        return self.exchanges()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.fp8_product(input, self.bias)


def columns(count: int) -> nn.ModuleList:
    """Layers that read one input."""
    layers = nn.ModuleList(nn.Linear(INPUTS, OUTPUTS, dtype=torch.bfloat16) for _ in range(count))
    for layer in layers:
        _Column.convert_in_place(layer, FP8Config())
    return layers


@ranks(2)
def test_layers_that_read_one_input_gather_it_once_and_in_bytes() -> None:
    layers, x = columns(3), torch.randn(2, 16, INPUTS).bfloat16().requires_grad_()
    holder = nn.ModuleList(layers)
    with count_traffic() as traffic:
        begin_forward(holder)
        outputs = [layer(x) for layer in layers]
        end_forward(holder)
    assert {(name, str(dtype)) for name, dtype in traffic.counts} == {
        ("all_gather_single", "torch.uint8"),
        ("all_reduce", "torch.float32"),
    }
    assert traffic.calls == 2
    assert traffic.counts["all_gather_single", torch.uint8].payload == x.numel()
    row = comm.statistics()[parallel_module.INPUT_GATHER]
    assert (row.calls, row.wire_bytes, row.raw_bytes) == (1, traffic.sent, 2 * x.numel())
    sum(output.sum() for output in outputs).backward()
    assert x.grad is not None


@ranks(2)
def test_a_checkpointed_layer_has_the_gradients_of_the_layer() -> None:
    (layer,) = columns(1)
    gradients = []
    for recompute in (False, True):
        x = torch.randn(2, 16, INPUTS, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        layer.zero_grad()
        y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        y.square().sum().backward()
        gradients.append((x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@ranks(2)
def test_evaluation_and_autocast_compute_the_same_outputs() -> None:
    (layer,) = columns(1)
    x = torch.randn(2, 16, INPUTS).bfloat16()
    y = layer(x)
    layer.eval()
    with torch.no_grad():
        assert torch.equal(y, layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(y, layer(x.float()), SUMS_DB)


@ranks(2)
def test_a_deferred_weight_gradient_is_the_same() -> None:
    config, group = FP8Config(), dist.group.WORLD
    for exchange, transposed in itertools.product(
        (ColumnParallel(group), RowParallel(group), SequenceColumn(group), SequenceRow(group)), (False, True)
    ):
        whole = Whole.of((4, 16))
        dy = whole.dy.repeat(1, 2, 1) if isinstance(exchange, SequenceColumn) else whole.dy
        dy = part(dy, 1) if isinstance(exchange, SequenceRow) else dy
        waiting: list[Callable[[], torch.Tensor]] = []
        now = run_layer(exchange, whole.x, whole.w, None, dy, config, transposed)
        later = run_layer(exchange, whole.x, whole.w, None, dy, config, transposed, waiting.append)
        assert later[2] is None
        (compute,) = waiting
        dw = compute()
        assert torch.equal(now[2], dw.t() if transposed else dw)
        assert torch.equal(now[1], later[1])


@ranks(2)
def test_the_input_gradient_travels_while_wgrad_runs() -> None:
    """Begun after dgrad and before wgrad, waited for after it."""
    whole, events = Whole.of((4, 16)), []
    with pytest.MonkeyPatch.context() as patch:
        for exchange, collective in (
            (ColumnParallel(dist.group.WORLD), "all_reduce"),
            (SequenceColumn(dist.group.WORLD), "reduce_scatter_tensor"),
        ):
            events.clear()
            _trace(patch, events, comm, collective)
            _trace(patch, events, torch, "_scaled_mm")
            x = part(whole.x, 1) if isinstance(exchange, SequenceColumn) else whole.x
            run_layer(exchange, x, part(whole.w, 0), None, part(whole.dy, -1), FP8Config())
            assert events == ["_scaled_mm", "_scaled_mm", collective, "_scaled_mm", "wait"]
            patch.undo()


def _trace(patch: pytest.MonkeyPatch, events: list[str], owner: object, name: str) -> None:
    original = getattr(owner, name)

    def traced(*arguments: object, **options: object) -> object:
        events.append(name)
        result = original(*arguments, **options)
        if options.get("async_op"):
            wait = result.wait
            result.wait = lambda: (events.append("wait"), wait())
        return result

    patch.setattr(owner, name, traced)


@ranks(2)
def test_a_sequence_that_does_not_divide_is_refused() -> None:
    whole = Whole.of((2, 16))
    with pytest.raises(ValueError, match="a sequence of 15 does not divide by 2 ranks"):
        SequenceRow(dist.group.WORLD).output(whole.dy[:, :15])
    with pytest.raises(ValueError, match="dimension 2 of 3, which is that of the features"):
        SequenceRow(dist.group.WORLD, 2).output(whole.dy)


@ranks(2)
def test_shards_of_torchs_own_tensor_parallelism_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    convert_to_fp8(model, FP8Config(always=True))
    with pytest.raises(TypeError, match=r"is a DTensor, as parallelize_module makes it, .*; leave the layer out"):
        model(torch.randn(16, 64))
