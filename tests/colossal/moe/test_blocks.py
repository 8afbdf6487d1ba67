"""Expert-parallel blocks on two ranks against the whole block on one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8booster.colossal  # noqa: F401  (patches colossalai before it is imported)
from fp8booster import FP8Config, comm, convert_to_fp8, report
from fp8booster.comm import Encoding
from fp8booster.monitor.traffic import count_traffic
from fp8booster.nn.experts.host_copy import HostCopy
from fp8booster.nn.experts.one_by_one import run_experts
from fp8booster.nn.experts.routing import Routed
from fp8booster.nn.experts.spread import Run, Spread
from fp8booster.nn.experts.wire import Wire
from tests.colossal.moe.models import EXPERTS, DeepseekMoE, deepseek_v3_block, tiny_mixtral
from tests.distributed import ranks

KINDS = ("Mixtral", "DeepSeek", "DeepSeek-V3")
ALONE: list[dist.ProcessGroup] = []


def alone() -> dist.ProcessGroup:
    """The group of this rank alone."""
    if not ALONE:
        ALONE.extend(dist.new_group([rank]) for rank in range(dist.get_world_size()))
    return ALONE[dist.get_rank()]


def whole_block(kind: str) -> nn.Module:
    """The block with all its experts."""
    if kind == "Mixtral":
        return tiny_mixtral().model.layers[0].block_sparse_moe
    return DeepseekMoE() if kind == "DeepSeek" else deepseek_v3_block()


def spread_block(kind: str, *, communication: bool, expert_parallel: bool = True) -> nn.Module:
    """The same, its experts spread over the ranks, or its tokens (`moe_dp`)."""
    from colossalai.shardformer.modeling.deepseek import EPDeepseekMoE
    from colossalai.shardformer.modeling.deepseek_v3 import EpDeepseekV3MoE
    from colossalai.shardformer.modeling.mixtral import EPMixtralSparseMoeBlock

    from fp8booster.colossal.moe import convert_blocks

    native: Any = {"Mixtral": EPMixtralSparseMoeBlock, "DeepSeek": EPDeepseekMoE, "DeepSeek-V3": EpDeepseekV3MoE}[kind]
    groups = {"ep_group": dist.group.WORLD, "moe_dp_group": alone()}
    if not expert_parallel:
        groups = {"ep_group": alone(), "moe_dp_group": dist.group.WORLD}
    if kind != "DeepSeek-V3":
        groups["tp_group"] = alone()
    block = native.from_native_module(whole_block(kind), **groups)
    assert convert_blocks(block, encoding=Encoding() if communication else None) == 1
    return block


def inputs() -> torch.Tensor:
    """Tokens [2, 16, 64] that differ from rank to rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(2, 16, 64, generator=generator)


def outputs_and_gradients(
    block: nn.Module, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """What the block makes of x, and gradients of a loss of it."""
    x = x.clone().requires_grad_()
    y = block(x)
    y = y[0] if isinstance(y, tuple) else y
    (y.square().sum() + getattr(block, "loss", 0)).backward()
    gradients = {name: parameter.grad for name, parameter in block.named_parameters() if parameter.grad is not None}
    return y.detach(), x.grad, gradients


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_over_two_ranks_computes_what_it_computes_on_one(kind: str) -> None:
    y, dx, gradients = outputs_and_gradients(spread_block(kind, communication=False), inputs())
    y_whole, dx_whole, expected = outputs_and_gradients(whole_block(kind), inputs())
    torch.testing.assert_close(y, y_whole)
    torch.testing.assert_close(dx, dx_whole)
    held = [name for name in gradients if name.startswith("experts.")]
    assert len(held) == 3 * EXPERTS // 2
    for name, gradient in expected.items():
        if name.startswith("experts."):
            dist.all_reduce(gradient)  # Colossal-AI's mean over the tokens of the ranks
            gradient /= dist.get_world_size()
        if name in gradients:
            torch.testing.assert_close(gradients[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@ranks(2)
def test_a_block_draws_the_noise_that_transformers_does() -> None:
    block, whole, x = spread_block("Mixtral", communication=False), whole_block("Mixtral"), inputs()
    without = block(x)[0]
    for each in (block, whole):
        each.jitter_noise = 0.5
    torch.manual_seed(1)
    found, *_ = outputs_and_gradients(block, x)
    torch.manual_seed(1)
    # transformers writes to what it is given
    torch.testing.assert_close(found, whole(x.clone())[0])
    assert (found - without).norm() > 0.1 * without.norm()
    torch.testing.assert_close(block.eval()(x)[0], without)


@ranks(2)
def test_ranks_that_share_experts_draw_the_same_noise() -> None:
    block = spread_block("Mixtral", communication=False)
    block.jitter_noise, block.tp_group = 0.5, dist.group.WORLD
    torch.manual_seed(dist.get_rank())
    noise = block._noise(torch.zeros(4, 8))
    both = [torch.empty_like(noise) for _ in range(2)]
    dist.all_gather(both, noise)
    assert torch.equal(*both)


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_sends_tokens_and_their_gradients_in_fp8(kind: str) -> None:
    block = spread_block(kind, communication=True)
    comm.reset_statistics()
    with count_traffic() as traffic:
        y, dx, _ = outputs_and_gradients(block, inputs())
    row = comm.statistics()["all_to_all_single"]
    assert row.calls == 4  # to the experts and back, in forward and in backward
    assert not row.uncompressed
    # of FP32: a row of 64 values, and 16 bytes of scales; to the experts also 32 of choices and weights
    assert row.ratio == (80 + 32 / 2) / 256
    # numbers of rows are sent as they are
    dtypes = {dtype for name, dtype in traffic.counts if name == "all_to_all_single"}
    assert dtypes == {torch.uint8, torch.int64}
    y_whole, dx_whole, _ = outputs_and_gradients(whole_block(kind), inputs())
    for found, expected in ((y, y_whole), (dx, dx_whole)):
        assert (found - expected).norm() < 0.05 * expected.norm()
        assert not torch.equal(found, expected)


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_without_tokens_has_a_gradient_of_zeros(kind: str) -> None:
    for expert_parallel in (True, False):
        block = spread_block(kind, communication=True, expert_parallel=expert_parallel)
        convert_to_fp8(block, FP8Config(emulate=True, layers=lambda name, _: name.startswith("experts")))
        token = inputs()[:1, :1].expand(2, 16, 64)  # one token many times: two experts
        _, _, gradients = outputs_and_gradients(block, token)
        held = {name: gradient for name, gradient in gradients.items() if name.startswith("experts.")}
        assert len(held) == 3 * EXPERTS // (2 if expert_parallel else 1)
        used = torch.zeros(EXPERTS, dtype=torch.int64)
        for name, gradient in held.items():
            assert torch.isfinite(gradient).all()
            used[int(name.split(".")[1])] += bool(gradient.any())
        assert ((used == 0) | (used == 3)).all()
        if not expert_parallel:
            assert (used == 3).sum() == 2


@ranks(2)
def test_an_experts_weight_gradient_is_that_of_its_tokens_also_where_other_ranks_have_none() -> None:
    """So the mean over the ranks that hold it is that of the mean loss; in Colossal-AI it is more."""
    block = spread_block("Mixtral", communication=False, expert_parallel=False)
    token = inputs()[:1, :1].expand(2, 16, 64)
    _, _, gradients = outputs_and_gradients(block, token)
    _, _, alone_gradients = outputs_and_gradients(whole_block("Mixtral"), token)
    for name, gradient in alone_gradients.items():
        torch.testing.assert_close(gradients[name], gradient)
    assert any(not gradient.any() for gradient in alone_gradients.values())


@ranks(2)
def test_experts_are_told_which_rows_are_whose() -> None:
    spread_over = Spread(4, dist.group.WORLD)
    chosen = torch.tensor([[0, 1], [0, 1]] if dist.get_rank() == 0 else [[0, 3], [0, 3]])
    # from both ranks for the experts here: 0 and 1, or 2 and 3
    arrived = [4, 2] if dist.get_rank() == 0 else [0, 2]
    told = []

    def run(routed: Routed, factor: float) -> torch.Tensor:
        chosen, weights = routed.chosen, routed.weights
        told.append((chosen.tolist(), routed.counts(2).tolist()[0], factor, weights.tolist()))
        return 2 * routed.tokens * (weights * (chosen < 2)).sum(1, keepdim=True)

    def prepare(tokens: torch.Tensor, rows: int) -> Run:
        assert rows == chosen.numel()
        assert not waits.called  # a look at experts takes the host a while
        return run

    noted: list[torch.Tensor] = []
    experts: Any = SimpleNamespace(
        input_casts=lambda tokens: None, are_trained=lambda: False, prepare=prepare, note_choice=noted.append
    )
    tokens = torch.randn(2, 8)
    with mock.patch.object(HostCopy, "tolist", autospec=True, side_effect=HostCopy.tolist) as waits:
        mixed = spread_over.mix(tokens, chosen, torch.full((2, 2), 0.5), experts)
    torch.testing.assert_close(mixed, 2 * tokens)
    assert noted == [chosen]
    # by sender; 2 is an expert elsewhere
    own = [[0, 1], [0, 1], [0, 2], [0, 2]] if dist.get_rank() == 0 else [[2, 1], [2, 1]]
    assert told == [(own, arrived, 1 / 2, len(own) * [[0.5, 0.5]])]


def weighted(made: torch.Tensor, routed: Routed) -> torch.Tensor:
    """The sum of what the experts make of each token, where each makes the same; a rank holds one."""
    return made * (routed.weights * (routed.chosen < 1)).sum(1, keepdim=True)


def experts_of(run: Run) -> Any:
    """Experts that compute so, of 16 bits, and train nothing."""
    return SimpleNamespace(
        input_casts=lambda tokens: None,
        are_trained=lambda: False,
        prepare=lambda tokens, rows: run,
        note_choice=lambda chosen: None,
    )


@ranks(2)
def test_a_token_goes_once_to_each_rank_and_one_sum_comes_back() -> None:
    rank = dist.get_rank()
    tokens = torch.randn(6, 64, requires_grad=True)
    # two of three experts are on one rank; of any strides
    chosen = torch.tensor([[0, 1, 3]] * 4 + [[2, 3, 1]] * 2).t().contiguous().t()
    weights = torch.rand(6, 3, requires_grad=True)

    def run(routed: Routed, factor: float) -> torch.Tensor:
        factors = (2 * rank + routed.chosen + 1) * (routed.chosen < 2)
        return routed.tokens * (factors * routed.weights).sum(1, keepdim=True)

    mixed = Spread(4, dist.group.WORLD, Encoding()).mix(tokens, chosen, weights, experts_of(run))
    factors = ((chosen + 1) * weights).sum(1, keepdim=True)
    assert (mixed - tokens * factors).norm() < 0.05 * mixed.norm()
    gradient = torch.randn_like(mixed)
    found = torch.autograd.grad(mixed, (tokens, weights), gradient)
    expected = torch.autograd.grad(tokens * factors, (tokens, weights), gradient)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 0.1 * other.norm()
    # to the experts and back, in forward and in backward: 12 rows of a token on a rank, not 18 of its experts
    row = comm.statistics()["all_to_all_single"]
    assert (row.calls, row.raw_bytes) == (4, 4 * 12 * 64 * 4 / 2)  # half of it leaves the rank


@ranks(2)
@pytest.mark.parametrize("tokens_train", [True, False])
@pytest.mark.parametrize("weights_train", [True, False])
def test_ranks_whose_tokens_or_weights_need_no_gradients_take_part_in_backward(
    tokens_train: bool, weights_train: bool
) -> None:
    here = dist.get_rank() == 0
    tokens = torch.randn(4, 64, requires_grad=here or tokens_train)
    weights = torch.rand(4, 2, requires_grad=here or weights_train)
    chosen = torch.tensor([[0, 1]] * 4)
    mixed = Spread(2, dist.group.WORLD).mix(
        tokens, chosen, weights, experts_of(lambda routed, factor: weighted(routed.tokens, routed))
    )
    mixed.sum().backward()
    if tokens.requires_grad:
        torch.testing.assert_close(tokens.grad, weights.detach().sum(1, keepdim=True).expand(4, 64))
    if weights.requires_grad:
        torch.testing.assert_close(weights.grad, tokens.detach().sum(1, keepdim=True).expand(4, 2))


@ranks(2)
def test_a_block_without_shared_experts_adds_none() -> None:
    block = spread_block("DeepSeek-V3", communication=False)
    x = inputs()
    with torch.no_grad():
        whole, shared = block(x), block.shared_experts(x)
        block.config = SimpleNamespace(**{**vars(block.config), "n_shared_experts": None})
        del block.shared_experts
        torch.testing.assert_close(block(x), whole - shared)


@ranks(2)
@pytest.mark.parametrize("fused", [True, False])
def test_experts_are_grouped_where_they_are_in_fp8_and_to_be_fused(fused: bool) -> None:
    from fp8booster.colossal.moe import convert_blocks

    block = spread_block("Mixtral", communication=False).bfloat16()
    convert_blocks(block, encoding=None)
    assert block.fp8_grouped_experts is None
    convert_to_fp8(block, FP8Config(emulate=True, fused=fused))
    convert_blocks(block, encoding=None)
    assert (block.fp8_grouped_experts is not None) == fused


@ranks(2)
@pytest.mark.parametrize("encoding", [Encoding(), Encoding(block_size=None), None])
def test_rows_come_where_they_were_sent_and_back(encoding: Encoding | None) -> None:
    rank = dist.get_rank()
    sent = [[0, 3], [5, 0]][rank]
    received = [[0, 5], [3, 0]][rank]
    rows = torch.full((sum(sent), 64), float(rank + 1), requires_grad=True)
    wire = Wire.of(rows, dist.group.WORLD, encoding)
    assert wire.encoding == encoding
    got = wire.decoded(wire.exchanged(wire.encoded(rows), sent, received))
    assert torch.equal(got, torch.full((sum(received), 64), float(2 - rank)))
    (gradient,) = torch.autograd.grad((got * (rank + 1)).sum(), rows)
    assert torch.equal(gradient, torch.full_like(rows, float(2 - rank)))


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [((2, 3), (3, 2)), ((1, 0), (1, 0)), ((0, 1), (0, 0))], ids=str)
def test_words_go_with_rows_and_come_back_bit_for_bit(sizes: tuple, dtype: torch.dtype) -> None:
    """Also those that are no numbers, or a zero with a sign, as autograd's sums would change them."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)

    def any_bits(of: torch.dtype, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of both ranks, and this one's as numbers."""
        whole = torch.iinfo(bits := {2: torch.int16, 4: torch.int32, 8: torch.int64}[of.itemsize])
        both = torch.randint(whole.min, whole.max, (2, 5, columns), dtype=bits, generator=generator)
        both[:, :2, 0] = whole.min  # -0.0
        return both, both[rank, : sum(sizes[rank])].view(of)

    payloads, payload = any_bits(dtype, 7)
    words, word = any_bits(torch.float32, 4)
    payload, word = payload.requires_grad_(), word.requires_grad_()
    wire = Wire(dist.group.WORLD, 7, dtype, None, None)
    received = [of_sender[rank] for of_sender in sizes]
    found = wire.exchanged_with(payload, word, list(sizes[rank]), received)
    for got, both in zip(found, (payloads, words), strict=True):
        parts = [of_sender[: sum(own)].split(own)[rank] for of_sender, own in zip(both, sizes, strict=True)]
        assert torch.equal(got.detach().view(both.dtype), torch.cat(parts))
    # what came goes back, and is what was sent
    back = torch.autograd.grad(found, (payload, word), [each.detach() for each in found])
    for got, given in zip(back, (payload, word), strict=True):
        bits = payloads.dtype if given is payload else words.dtype
        assert torch.equal(got.view(bits), given.detach().view(bits))


@ranks(2)
def test_anomalies_are_sought_among_numbers_alone() -> None:
    tokens = torch.randn(60, 8).bfloat16().requires_grad_()
    weights = torch.rand(60, 2, requires_grad=True)  # whose gradients in FP32 hold NaN as pairs of BF16
    experts = experts_of(lambda routed, factor: weighted(routed.tokens, routed))
    with torch.autograd.set_detect_anomaly(True):
        mixed = Spread(2, dist.group.WORLD).mix(tokens, torch.arange(2).expand(60, 2), weights, experts)
        (mixed * torch.randn_like(mixed)).sum().backward()
    assert weights.grad.isfinite().all()


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tokens_in_another_dtype_than_that_of_autocast_are_sent(dtype: torch.dtype) -> None:
    tokens, chosen = torch.randn(6, 8).to(dtype), torch.arange(2).expand(6, 2)
    experts = experts_of(lambda routed, factor: weighted(routed.tokens, routed))
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
    with torch.autocast("cpu", other):
        mixed = Spread(2, dist.group.WORLD).mix(tokens, chosen, torch.full((6, 2), 0.5), experts)
    torch.testing.assert_close(mixed, tokens, rtol=1e-2, atol=1e-2)


@ranks(2)
@pytest.mark.parametrize(
    ("width", "dtype", "is_encoded"),
    [(8, torch.float32, False), (9, torch.float32, True), (24, torch.bfloat16, False), (25, torch.bfloat16, True)],
)
def test_rows_that_encoding_makes_no_shorter_are_sent_as_they_are(
    width: int, dtype: torch.dtype, is_encoded: bool
) -> None:
    rows = torch.full((4, width), dist.get_rank() + 1, dtype=dtype)
    wire = Wire.of(rows, dist.group.WORLD, Encoding())
    got = wire.decoded(wire.exchanged(wire.encoded(rows), [2, 2], [2, 2]))
    assert torch.equal(got, torch.tensor([1, 1, 2, 2], dtype=dtype).unsqueeze(1).expand(4, width))
    row = comm.statistics()["all_to_all_single"]
    assert row.uncompressed == ({} if is_encoded else {"small": 1})
    assert (row.wire_bytes < row.raw_bytes) == is_encoded


@ranks(2)
def test_bytes_are_compared_with_those_of_the_dtype_that_experts_give() -> None:
    """As under autocast, where tokens in FP32 come back in BF16."""
    tokens = torch.randn(6, 64, requires_grad=True)
    # in FP32, as products of what experts give with weights are
    experts = experts_of(lambda routed, factor: weighted(routed.tokens.bfloat16(), routed))
    chosen = torch.arange(2).expand(6, 2).contiguous()  # half of the rows leave the rank
    with torch.autocast("cpu", torch.bfloat16):
        mixed = Spread(2, dist.group.WORLD, Encoding()).mix(tokens, chosen, torch.full((6, 2), 0.5), experts)
    assert mixed.dtype is torch.float32
    mixed.sum().backward()
    torch.testing.assert_close(tokens.grad, torch.ones_like(tokens))
    assert comm.statistics()["all_to_all_single"].raw_bytes == 2 * 6 * 64 * (4 + 2)


@ranks(2)
def test_experts_get_the_rows_of_all_senders_at_once() -> None:
    seen = []

    def expert(factor: int) -> Any:
        return lambda x: seen.append(x.shape[0]) or x * factor

    tokens = torch.arange(1.0, 7.0).view(6, 1)
    chosen = torch.tensor([[0], [1], [1], [1], [1], [1]])
    made = run_experts(Routed(tokens, chosen, torch.ones(6, 1)), [expert(10), expert(100), expert(1000)])
    assert seen == [1, 5, 0]
    assert made.flatten().tolist() == [10, 200, 300, 400, 500, 600]


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_router_stays_in_high_precision_and_is_listed(kind: str) -> None:
    block = spread_block(kind, communication=True)
    convert_to_fp8(block)
    (row,) = [row for row in report(block).rows if row.name == "gate"]
    assert (row.precision, row.shape) == ("FP32", (64, EXPERTS))
    assert row.notes == "a router, where rounding would send tokens to other experts"
