"""Tokens that are cast once, before they are sent to experts on other ranks."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fp8booster import FP8Config, comm, convert_to_fp8
from fp8booster.comm import Encoding
from fp8booster.comm.encoding import DEFAULT
from fp8booster.kernels.expert_rows import words_of
from fp8booster.kernels.grouped_product import summed_product
from fp8booster.nn.experts import grouped_linear
from fp8booster.nn.experts.fp8_experts import FP8Experts
from fp8booster.nn.experts.fp8_rows import packed, received_rows, with_amax
from fp8booster.nn.experts.grouped import GroupedExperts
from fp8booster.nn.experts.host_copy import HostCopy
from fp8booster.nn.experts.parallel import blocks_to_spread, spread_experts
from fp8booster.nn.experts.routing import Routed
from fp8booster.nn.experts.row_layout import RowLayout
from fp8booster.nn.experts.spread import AS_CAST, IN_16_BITS, Spread
from fp8booster.nn.experts.stack import WeightStack
from fp8booster.nn.held_casts import held_casts
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT, Constant, Delayed, RealTime
from fp8booster.tensor import QuantizedMatrix
from tests.distributed import ranks
from tests.nn.experts.families import EXPERTS, tiny_mixture
from tests.nn.experts.test_parallel import groups
from tests.nn.fused.models import MAJOR

HIDDEN = 64


def config_of(**options: Any) -> FP8Config:
    """Of experts in FP8 whatever their tokens."""
    return FP8Config(emulate=True, always=True, **options)


def block_of(config: FP8Config | None, ep_size: int | None, encoding: Encoding | None = DEFAULT) -> Any:
    """A block of experts, spread over ranks or whole; a list of modules or one parameter, as transformers has them."""
    model = tiny_mixture("Qwen3-MoE").bfloat16()
    block = blocks_to_spread(model)[0]
    if ep_size is not None:
        for each in spread_experts(model, groups(ep_size)[0]):
            each.encoding = encoding
    if config is not None:
        convert_to_fp8(model, config)
    return block


def mix(block: Any, *call: torch.Tensor) -> torch.Tensor:
    """The weighted sums of a block's experts."""
    return getattr(block, "mix", block)(*call)


def call_of(rank: int, tokens: int = 21, chosen: int = 2, largest: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Tokens, their experts and weights, which differ from rank to rank."""
    generator = torch.Generator().manual_seed(rank)
    x = largest * torch.randn(tokens, HIDDEN, generator=generator)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    weights, experts = scores.topk(chosen)
    return x.bfloat16(), experts, weights.bfloat16()


OF_MODULES = pytest.mark.skipif(MAJOR > 4, reason="one parameter holds the weights of all experts")


class Products:
    """The operands of the grouped products that run inside, by expert, without rows of zeros behind them."""

    def __init__(self) -> None:
        self.inputs: list[list[torch.Tensor]] = []
        self.scales: list[torch.Tensor] = []

    def __enter__(self) -> Products:
        run = grouped_linear.grouped_product

        def seen(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
            of_experts = [a.view(torch.uint8)[rows] for rows in others[1].slices()]
            self.inputs.append([rows[: int(rows.any(1).sum())].clone() for rows in of_experts])
            self.scales.append(scale.clone())
            return run(a, b, scale, *others, **options)

        self._patch = mock.patch.object(grouped_linear, "grouped_product", seen)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


@ranks(4)
@pytest.mark.parametrize("chosen", [1, 2])
@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("scaling", [RealTime(), RealTime(power_of_two=True), Constant()], ids=lambda each: each.name)
def test_first_products_read_what_they_read_on_one_rank(scaling: Any, ep_size: int, chosen: int) -> None:
    """Bit for bit, and nothing is cast on arrival."""
    # one rank's tokens are far larger: the scale of all must be theirs
    calls = [
        call_of(rank, tokens=5 + 16 * rank, chosen=chosen, largest=100.0 if rank == 1 else 1.0)
        for rank in range(dist.get_world_size())
    ]
    block, whole = block_of(config_of(scaling=scaling), ep_size), block_of(config_of(scaling=scaling), None)
    spread: Spread = block.fp8_spread
    first = dist.get_rank() // ep_size * ep_size
    with Products() as found, torch.no_grad():
        mix(block, *calls[dist.get_rank()])
    with Products() as expected, torch.no_grad():
        mix(whole, *(torch.cat(each) for each in zip(*calls[first : first + ep_size], strict=True)))
    assert spread.way == AS_CAST
    assert torch.equal(found.scales[0], expected.scales[0])
    for own, right in zip(found.inputs[0], spread.own(expected.inputs[0]), strict=True):
        assert torch.equal(own, right)


WAYS = {
    "tensorwise": (RealTime(), AS_CAST),
    "rowwise": (RealTime("rowwise"), AS_CAST),
    "blockwise": (RealTime("blockwise"), AS_CAST),
    "constant": (Constant(), AS_CAST),
    "delayed": (Delayed(), "encoded in FP8, delayed scales"),
}


@ranks(2)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", WAYS)
def test_losses_and_gradients_are_those_of_one_rank_within_the_rounding(name: str, fused: bool) -> None:
    scaling, way = WAYS[name]
    config = config_of(scaling=scaling, fused=fused)
    block, exact = block_of(config, 2), block_of(None, 2, None)
    x, *choice = call_of(dist.get_rank())
    found = gradients(block, x, choice)
    expected = gradients(exact, x, choice)
    if block.fp8_spread.way != "encoded in FP8, whose experts read 16 bits":  # finer scales of experts in one parameter
        assert block.fp8_spread.way == way
    assert exact.fp8_spread.way == IN_16_BITS
    assert found.keys() == expected.keys()
    for what, right in expected.items():
        assert (found[what] - right).norm() <= 0.12 * right.norm(), what


def gradients(block: Any, x: torch.Tensor, choice: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a block makes of tokens, and all gradients of a sum of it."""
    x = x.clone().requires_grad_()
    weights = choice[1].clone().requires_grad_()
    y = mix(block, x, choice[0], weights)
    (y.float() * torch.linspace(-1e-3, 1e-3, HIDDEN)).sum().backward()  # constant scales are for small gradients
    found = {name: parameter.grad.float() for name, parameter in block.named_parameters() if parameter.grad is not None}
    return found | {"y": y.detach().float(), "x": x.grad.float(), "weights": weights.grad.float()}


@ranks(2)
@pytest.mark.parametrize("case", ["no tokens here", "none for this rank", "all for one expert"])
def test_ranks_with_few_rows_or_none_learn(case: str) -> None:
    rank = dist.get_rank()
    block, exact = block_of(config_of(), 2), block_of(None, 2, None)
    x, experts, weights = call_of(rank, tokens=0 if case == "no tokens here" and rank else 13)
    if case == "none for this rank":
        experts = experts % (EXPERTS // 2)  # all of them on the first rank
    if case == "all for one expert":
        experts, weights = torch.full((13, 1), 5), weights[:, :1]
    found, expected = (gradients(each, x, [experts, weights]) for each in (block, exact))
    assert block.fp8_spread.way == AS_CAST
    assert found.keys() == {*expected, *(name for name, _ in block.named_parameters() if "gate." not in name)}
    for what, gradient in found.items():
        right = expected.get(what, torch.zeros_like(gradient))
        assert (gradient - right).norm() <= 0.12 * right.norm(), what


@ranks(2)
@pytest.mark.parametrize("trained", ["tokens", "experts"])
@pytest.mark.parametrize("way", [AS_CAST, "encoded", IN_16_BITS])
def test_backward_comes_to_what_one_rank_alone_trains(way: str, trained: str) -> None:
    config, encoding = config_of() if way == AS_CAST else None, None if way == IN_16_BITS else DEFAULT
    x, *choice = call_of(dist.get_rank())
    found = []
    for alone in (True, False):
        block = block_of(config, 2, encoding)
        is_trained = dist.get_rank() == 1 or not alone
        for parameter in block.parameters():
            parameter.requires_grad_(is_trained and trained == "experts")
        tokens = x.clone().requires_grad_(is_trained and trained == "tokens")
        mix(block, tokens, *choice).float().square().sum().backward()
        found.append([each.grad for each in (tokens, *block.parameters()) if each.grad is not None])
    if dist.get_rank() == 1:
        assert found[0]
        assert all(map(torch.equal, *found))
    else:
        assert not found[0]


@ranks(2)
def test_what_is_not_finite_on_one_rank_is_on_all() -> None:
    for bad in (float("inf"), float("nan")):
        block = block_of(config_of(), 2)
        x, *choice = call_of(dist.get_rank())
        if dist.get_rank() == 1:
            x[3, 5] = bad
        with Products() as products, torch.no_grad():
            mix(block, x, *choice)
        assert products.scales[0].isnan()


@ranks(2)
def test_bytes_of_tokens_are_counted_as_they_are_sent() -> None:
    tokens, chosen = 40, 2
    block = block_of(config_of(), 2)
    x, experts, weights = call_of(0, tokens)
    half = EXPERTS // 2
    # as many to either rank
    experts = torch.stack([experts[:, 0] % half, half + experts[:, 1] % half], 1)
    comm.reset_statistics()
    with torch.no_grad():
        mix(block, x, experts, weights)
    row = comm.statistics()["all_to_all_single"]
    assert (row.calls, row.uncompressed) == (2, {})
    rows = tokens * chosen // 2  # that leave this rank, either way
    back = Encoding().layout(HIDDEN, rows).bytes  # each row has scales of its own
    assert row.raw_bytes == 2 * rows * HIDDEN * 2
    assert row.wire_bytes == rows * (HIDDEN + 4 * words_of(chosen)) + back


@ranks(2)
def test_who_observes_the_first_product_sees_one_cast_of_the_tokens() -> None:
    block = block_of(config_of(), 2)
    x, *choice = call_of(dist.get_rank())
    # of a list of experts as one product, or of a parameter
    held = {each.name.rpartition(".")[2]: each.get() for each in held_casts(block) if each.part is not None}
    first = held["gate_up"] if "gate_up" in held else held["gate_up_proj"]
    seen: list[tuple[str, torch.Size]] = []
    assert first is not None
    first.observers.append(lambda role, tensor, made: seen.append((role, tensor.shape)))
    mix(block, x.requires_grad_(), *choice).sum().backward()
    assert [each for each in seen if each[0] == INPUT] == [(INPUT, x.shape)]


@ranks(2)
def test_ranks_whose_experts_read_otherwise_send_as_all_can_read() -> None:
    """As where a configuration leaves out the experts of one rank."""
    block = block_of(config_of() if dist.get_rank() == 0 else None, 2)
    exact = block_of(None, 2, None)
    x, chosen, weights = call_of(dist.get_rank())
    choice = [chosen.t().contiguous().t(), weights]  # of any strides
    found, expected = (gradients(each, x, choice) for each in (block, exact))
    whose = "as another rank's experts read them otherwise" if dist.get_rank() == 0 else "whose experts read 16 bits"
    assert block.fp8_spread.way == f"encoded in FP8, {whose}"
    for what, right in expected.items():
        assert (found[what] - right).norm() <= 0.12 * right.norm(), what


@ranks(2)
@pytest.mark.parametrize("of_tokens", ["neither", "one", pytest.param("one of the last expert", marks=OF_MODULES)])
@pytest.mark.parametrize("fused", [True, False])
def test_tokens_are_not_cast_before_they_are_sent_where_gate_or_up_reads_16_bits(fused: bool, of_tokens: str) -> None:
    """Whichever other layers are in FP8, in training and in evaluation."""
    left_out = {"neither": ("gate", "up"), "one": ("up",), "one of the last expert": (f"{EXPERTS - 1}.up",)}[of_tokens]

    def in_fp8(name: str, _: Any) -> bool:
        return "_proj" in name and not any(f"{each}_proj" in name for each in left_out)

    block = block_of(config_of(fused=fused, layers=in_fp8), 2)
    # as the rank that holds the last expert tells the others
    whose = "whose experts read 16 bits"
    if of_tokens == "one of the last expert" and dist.get_rank() == 0:
        whose = "as another rank's experts read them otherwise"
    x, *choice = call_of(dist.get_rank())
    for training in (True, False):
        block.train(training)
        with torch.no_grad():
            mix(block, x, *choice)
        assert block.fp8_spread.way == f"encoded in FP8, {whose}"


@ranks(2)
@pytest.mark.parametrize("fused", [True, False])
def test_in_inference_mode_experts_give_what_they_give_without_gradients(fused: bool) -> None:
    block = block_of(config_of(fused=fused), 2).eval()
    # one token is far larger: the scale of all is not that of one expert's rows
    x, *choice = call_of(dist.get_rank())
    x[0] *= 100
    with torch.no_grad():
        expected = mix(block, x, *choice)
    with torch.inference_mode():
        assert torch.equal(mix(block, x, *choice), expected)


@ranks(2)
def test_backward_keeps_rows_in_fp8_alone() -> None:
    block = block_of(config_of(), 2)
    x, *choice = call_of(dist.get_rank(), tokens=200)
    saved: list[torch.Tensor] = []
    arrived: list[int] = []

    def watched(run: Any) -> Any:
        def on_sent(self: Any, *given: Any) -> torch.Tensor | None:
            arrived.extend(len(each.tokens) for each in given if isinstance(each, Routed))
            with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
                return run(self, *given)

        return on_sent

    with (  # experts that are modules, or in one parameter
        mock.patch.object(GroupedExperts, "_on_sent", watched(GroupedExperts._on_sent)),
        mock.patch.object(FP8Experts, "run", watched(FP8Experts.run)),
    ):
        mix(block, x.requires_grad_(), *choice)
    assert len(arrived) == 1
    # besides the weights of each
    of_rows = [each for each in saved if each.dim() == 2 and len(each) == arrived[0] and each.shape[1] > 2]
    assert [(each.dtype, each.shape[1]) for each in of_rows] == [(torch.float8_e4m3fn, HIDDEN)]


@ranks(2)
def test_what_is_added_is_queued_before_the_host_waits() -> None:
    block = block_of(config_of(), 2)
    x, *choice = call_of(dist.get_rank())

    def beside() -> torch.Tensor:
        assert not waits.called
        return torch.ones_like(x)

    with mock.patch.object(HostCopy, "tolist", autospec=True, side_effect=HostCopy.tolist) as waits, torch.no_grad():
        added = block.fp8_spread.mix(x, *choice, block, beside)
    assert waits.called
    with torch.no_grad():
        assert torch.equal(added, mix(block, x, *choice) + 1)


@OF_MODULES
@ranks(2)
@pytest.mark.parametrize("rows_that_run_as_one", [0, 10**6])
def test_weights_that_will_be_multiplied_are_looked_up_before_the_host_waits(rows_that_run_as_one: int) -> None:
    block = block_of(config_of(), 2).eval()
    looked, look_up = [], WeightStack.look_up

    def seen(layers: WeightStack, tokens: torch.Tensor) -> None:
        looked.append(waits.called)
        look_up(layers, tokens)

    def too_few(self: GroupedExperts, look: Any, rows: float) -> str | None:
        return "too few" if rows < rows_that_run_as_one else None

    with (
        mock.patch.object(HostCopy, "tolist", autospec=True, side_effect=HostCopy.tolist) as waits,
        mock.patch.object(WeightStack, "look_up", seen),
        mock.patch.object(GroupedExperts, "_why_slower", too_few),
        torch.no_grad(),
    ):
        mix(block, *call_of(dist.get_rank()))
    assert looked == ([] if rows_that_run_as_one else [False])
    assert block.fp8_grouped_experts.why_one_by_one_in_evaluation == ("too few" if rows_that_run_as_one else None)


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("features", [40, 128, 300])
def test_rows_keep_their_scales_on_the_way(granularity: str, features: int) -> None:
    scaling, tokens = RealTime(granularity), torch.randn(37, features).bfloat16()
    tokens *= torch.logspace(-3, 3, 37).unsqueeze(1)
    cast = scaling.cast(INPUT, tokens, torch.float8_e4m3fn)
    order = torch.randperm(37)
    message = packed(cast).view(torch.uint8)[order].view(torch.float8_e4m3fn)
    rows = received_rows(tokens, message, cast, None, lambda gradient: lambda: gradient)
    assert torch.equal(rows.values(), cast.dequantize(37, features).bfloat16()[order])


@pytest.mark.parametrize("power_of_two", [True, False])
def test_values_are_cast_to_the_bytes_that_they_came_from(power_of_two: bool) -> None:
    """So experts that run one by one round no second time."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()].view(-1, 1)[:240].view(15, 16)
    scaling = RealTime(power_of_two=power_of_two)
    for amax in torch.logspace(-20, 20, 61):
        inverse_scale = scaling.cast(INPUT, torch.ones(1, 1), torch.float8_e4m3fn, amax=amax).inverse_scale
        matrix = QuantizedMatrix(codes, codes.new_empty(0), inverse_scale, None)
        tokens = torch.empty(15, 16, dtype=torch.bfloat16)
        rows = received_rows(tokens, codes, matrix, amax, lambda gradient: lambda: gradient)
        values = with_amax(rows.values(), rows)
        found = Casts(FP8Config(scaling=scaling)).quantize(INPUT, values)
        assert torch.equal(found.data[:15].float(), codes.float())


def test_a_gradient_comes_in_the_dtype_of_the_tokens() -> None:
    tokens = torch.randn(3, 16, requires_grad=True)
    cast = RealTime().cast(INPUT, tokens.detach(), torch.float8_e4m3fn)
    arrived = received_rows(tokens, packed(cast)[:3], cast, None, lambda gradient: lambda: 2 * gradient)
    rows, held = arrived.to(torch.bfloat16), weakref.ref(arrived)
    values = rows.values()
    assert values.dtype is torch.bfloat16
    del arrived, rows
    assert held() is None  # where no product's backward reads the values, their memory is free
    values.backward(torch.ones(3, 16).bfloat16())
    assert torch.equal(tokens.grad, torch.full((3, 16), 2.0))


def test_gradients_of_weights_are_computed_while_that_of_tokens_is_on_its_way() -> None:
    seen = []

    def send_back(gradient: torch.Tensor) -> Any:
        seen.append("sent")
        return lambda: seen.append("arrived") or gradient

    tokens = torch.randn(32, HIDDEN).bfloat16().requires_grad_()
    weights = [torch.randn(48, HIDDEN).bfloat16().requires_grad_() for _ in range(2)]
    casts = Casts(config_of())
    cast = casts.quantize(INPUT, tokens.detach())
    rows = received_rows(tokens, packed(cast), cast, None, send_back)
    layout = RowLayout.of_choices(torch.tensor([0] * 20 + [1] * 12).unsqueeze(1), 2)
    how = grouped_linear.Products(layout.groups, casts, reads=layout, sums=layout)
    stacked = grouped_linear.cast_experts([weight.detach() for weight in weights], casts)
    made = grouped_linear.grouped_linear(rows, weights, stacked, how)
    with mock.patch.object(
        grouped_linear, "summed_product", side_effect=lambda *a, **k: seen.append("weights") or summed_product(*a, **k)
    ):
        made.sum().backward()
    assert seen == ["sent", "weights", "arrived"]
    assert tokens.grad is not None
