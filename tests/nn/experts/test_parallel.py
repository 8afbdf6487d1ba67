"""Experts that are spread over ranks against the whole model on one, in every family."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, comm, convert_to_fp8, report
from fp8booster.comm import Encoding
from fp8booster.monitor.traffic import count_traffic
from fp8booster.nn.experts.host_copy import HostCopy
from fp8booster.nn.experts.parallel import blocks_to_spread, spread_experts
from fp8booster.nn.experts.spread import Spread, spread_of
from fp8booster.nn.modules import held_by_modules
from tests.colossal.models import tiny_llama
from tests.distributed import ranks
from tests.nn.experts.families import BALANCED, EXPERTS, FAMILIES, batch_of, tiny_mixture
from tests.nn.experts.test_fp8_experts import FORMS, HIDDEN, TOLERANCES, normed

Gradients = dict[str, torch.Tensor]


def backward(model: nn.Module, tokens: torch.Tensor, balanced: bool = False) -> tuple[float, Gradients]:
    """The loss, and gradients by name; with `balanced` also of the experts' balance and the router's z-loss.

    The z-loss is arXiv 2202.08906, section 3.3.
    """
    asked = {"output_router_logits": True} if balanced else {}
    made = model(input_ids=tokens, labels=tokens, **asked)
    loss = made.loss
    for logits in made.router_logits if balanced else ():
        loss = loss + 0.1 * logits.float().logsumexp(-1).square().mean()
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def expected_of(model: nn.Module, tokens: torch.Tensor, balanced: bool) -> tuple[float, Gradients]:
    """The loss on one rank, and the gradients of the mean of all ranks' losses, of the whole model."""
    loss, found = backward(model, tokens, balanced)
    gradients = {name: found.get(name, torch.zeros_like(each)) for name, each in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return loss, gradients


def groups(ep_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """The ranks over which experts are spread, and those that hold the same as this one."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if ep_size == world:
        return dist.group.WORLD, None
    of_experts = [dist.new_group(list(range(first, first + ep_size))) for first in range(0, world, ep_size)]
    of_copies = [dist.new_group(list(range(first, world, ep_size))) for first in range(ep_size)]
    return of_experts[rank // ep_size], of_copies[rank % ep_size]


def part_of(model: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, or of its gradient."""
    parameter = dict(model.named_parameters())[name]  # `get_parameter` would read a layer's weight, which is noted
    spread = spread_of(parameter)
    return whole if spread is None or parameter.shape == whole.shape else spread.own(whole)


def assert_equal_to_whole(model: nn.Module, tokens: torch.Tensor, ep_size: int, balanced: bool = False) -> None:
    """In FP32, each gradient as data parallelism averages it: of experts over the ranks that hold the same."""
    spread = copy.deepcopy(model)
    group, copies = groups(ep_size)
    assert {block.held for block in spread_experts(spread, group)} == {EXPERTS // ep_size}
    loss, expected = expected_of(model, tokens, balanced)
    found_loss, found = backward(spread, tokens, balanced)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    of_experts = 0
    # whoever got no tokens has a gradient of zeros: ranks wait for each other's parts of messages
    assert found.keys() == {name for name, _ in spread.named_parameters()}
    for name, gradient in found.items():
        is_spread = spread_of(spread.get_parameter(name)) is not None
        of_experts += is_spread
        averaged = copies if is_spread else dist.group.WORLD
        if averaged is not None:
            dist.all_reduce(gradient, group=averaged)
            gradient /= dist.get_world_size(averaged)
        right = part_of(spread, name, expected[name])
        difference = (gradient - right).abs().max().item()
        assert difference <= 1e-5 + 1e-4 * right.abs().max().item(), f"{name}: {difference}"
    assert of_experts


@ranks(2, 4)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_one_rank(family: str) -> None:
    assert_equal_to_whole(tiny_mixture(family), batch_of(dist.get_rank()), dist.get_world_size())


@ranks(4)
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_where_several_ranks_hold_the_same_experts(family: str, ep_size: int) -> None:
    assert_equal_to_whole(tiny_mixture(family), batch_of(dist.get_rank()), ep_size)


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_with_all_experts_computes_as_if_there_were_no_others(family: str) -> None:
    """Bit for bit; it sends nothing, and its host waits for no counts."""
    whole, spread = (tiny_mixture(family).bfloat16() for _ in range(2))
    for each in spread_experts(spread, groups(1)[0]):
        each.encoding = Encoding()
    for model in (whole, spread):
        convert_to_fp8(model, FP8Config(emulate=True, always=True))
    loss, expected = backward(whole, batch_of(dist.get_rank()))
    with count_traffic() as traffic, mock.patch.object(HostCopy, "tolist") as waits:
        found_loss, found = backward(spread, batch_of(dist.get_rank()))
    assert (found_loss, traffic.counts, waits.called) == (loss, {}, False)
    assert found.keys() == {name for name, _ in spread.named_parameters()}
    for name, gradient in found.items():
        assert torch.equal(gradient, expected.get(name, torch.zeros_like(gradient))), name
    told = report(spread)
    assert {load.sent for load in told.loads} == {None}
    assert {row.why_one_by_one for row in told.grouped} <= {None}


@ranks(2)
@pytest.mark.parametrize("family", BALANCED)
def test_they_are_with_losses_of_the_router(family: str) -> None:
    """Of the balance of experts, which models add, and a z-loss, of logits that they return."""
    assert_equal_to_whole(tiny_mixture(family, router_aux_loss_coef=0.5), batch_of(dist.get_rank()), 2, balanced=True)


@ranks(4)
@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("chosen", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_where_all_tokens_go_to_the_same_experts(family: str, chosen: int, ep_size: int) -> None:
    """One token many times, which differs from rank to rank: other experts, and other ranks, have none."""
    tokens = torch.full((2, 17), 3 + dist.get_rank())
    assert_equal_to_whole(tiny_mixture(family, num_experts_per_tok=chosen), tokens, ep_size)


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_where_ranks_have_other_numbers_of_tokens(family: str) -> None:
    assert_equal_to_whole(tiny_mixture(family), batch_of(dist.get_rank(), length=2 + 11 * dist.get_rank()), 2)


@ranks(2)
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("routers", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_where_one_rank_alone_trains_its_experts(family: str, routers: bool, again: bool) -> None:
    """As in expert-specialized fine-tuning (arXiv 2407.01906); the other sends gradients back all the same."""
    model = tiny_mixture(family)
    if again:  # layers are computed again in backward, on all ranks
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    spread = copy.deepcopy(model)
    spread_experts(spread, dist.group.WORLD)
    for each in (model, spread):
        for name, parameter in each.named_parameters():
            is_router = "router" in name or name.endswith("gate.weight")
            trained = ".experts." in name and (spread_of(parameter) is None or dist.get_rank() == 1)
            parameter.requires_grad_(trained or (routers and is_router))
    tokens = batch_of(dist.get_rank())
    _, expected = expected_of(model, tokens, False)
    _, found = backward(spread, tokens)
    assert found.keys() == {name for name, parameter in spread.named_parameters() if parameter.requires_grad}
    for name, gradient in found.items():
        if spread_of(spread.get_parameter(name)) is None:
            dist.all_reduce(gradient)
            gradient /= 2
        right = part_of(spread, name, expected[name])
        assert (gradient - right).abs().max() <= 1e-5 + 1e-4 * right.abs().max(), name


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_where_layers_are_computed_again_in_backward(family: str) -> None:
    model = tiny_mixture(family)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_equal_to_whole(model, batch_of(dist.get_rank()), 2)


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_compute_and_are_sent_in_fp8(family: str) -> None:
    config = FP8Config(emulate=True, always=True)
    # all tokens go to all experts: rounding would send some to others
    all_experts = {"num_experts_per_tok": EXPERTS, "topk_group": 2}
    whole, spread = (tiny_mixture(family, **all_experts).bfloat16() for _ in range(2))
    convert_to_fp8(whole, config)
    for each in spread_experts(spread, dist.group.WORLD):
        each.encoding = Encoding()
    convert_to_fp8(spread, config)
    tokens = batch_of(0)  # the same on both ranks: either's part of an expert's gradient is half of it
    loss, expected = backward(whole, tokens)
    comm.reset_statistics()
    found_loss, found = backward(spread, tokens)
    row = comm.statistics()["all_to_all_single"]
    blocks = len(blocks_to_spread(tiny_mixture(family)))
    assert (row.calls, row.uncompressed) == (4 * blocks, {})  # to the experts and back, in forward and in backward
    assert found_loss == pytest.approx(loss, rel=0.01)
    assert found.keys() == {name for name, _ in spread.named_parameters()}
    for name, gradient in found.items():
        right = part_of(spread, name, expected.get(name, torch.zeros_like(gradient)))
        # a router's is a difference of what experts give
        close = 0.6 if "router" in name or name.endswith("gate.weight") else 0.25
        assert (gradient - right).norm() <= close * right.norm() + 1e-6, name
    told = report(spread)
    assert {load.sent for load in told.loads} == {"in FP8, as the first product reads them"}
    sentence = f"tokens of {blocks} block{'s' if blocks > 1 else ''} sent to other ranks in FP8, as the first"
    assert sentence in told.summary()
    precisions = {row.name: (row.precision, row.notes) for row in (*told.rows, *told.outside)}
    experts = {name: each for name, each in precisions.items() if ".experts." in name}
    assert experts
    assert {precision for precision, _ in experts.values()} == {"FP8"}, experts
    routers = {
        name: each for name, each in precisions.items() if "router" in name or name.endswith(("gate", "gate.weight"))
    }
    assert routers
    assert {precision for precision, _ in routers.values()} == {"BF16"}, routers


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_all_experts_is_loaded_in_parts(family: str) -> None:
    model = tiny_mixture(family)
    spread_experts(model, dist.group.WORLD)
    other = tiny_mixture(family)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    state = other.state_dict()
    missing, _ = model.load_state_dict(state, strict=False)
    assert not missing
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, part_of(model, name, state[name])), name


@ranks(2)
def test_experts_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="5 experts cannot be divided evenly among 2 ranks"):
        spread_experts(tiny_mixture("Mixtral", num_local_experts=5), dist.group.WORLD)
    assert not blocks_to_spread(tiny_llama())
    assert not spread_experts(tiny_llama(), dist.group.WORLD)


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_keeps_its_experts_alone(family: str) -> None:
    model = tiny_mixture(family)
    names = {name for name, _ in model.named_parameters()}
    whole = sum(parameter.numel() for parameter in model.parameters())
    of_experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    spread_experts(model, dist.group.WORLD)
    held = sum(parameter.untyped_storage().nbytes() // 4 for parameter in model.parameters())
    assert held == whole - of_experts // 2
    assert {name for name, _ in model.named_parameters()} <= names


@ranks(2)
def test_what_only_the_blocks_own_code_could_do_is_refused() -> None:
    model = tiny_mixture("Mixtral")
    (block, *_) = [each for each in model.modules() if "SparseMoeBlock" in type(each).__name__]
    spread_experts(model, dist.group.WORLD)
    x = torch.randn(1, 4, 64)
    if isinstance(block.experts, nn.ModuleList):
        block.jitter_noise = 0.5
        with pytest.raises(ValueError, match="the block draws noise; use ep_size=1"):
            block(x)
        block.jitter_noise = 0.0
        with pytest.raises(ValueError, match="called otherwise than its class was tried"):
            block(x, x)
    else:
        with pytest.raises(ValueError, match="called otherwise than with tokens, their experts and weights"):
            block.experts(x)


@ranks(2)
def test_the_blocks_own_code_may_run_where_a_rank_has_all_experts() -> None:
    whole, spread = (tiny_mixture("Mixtral") for _ in range(2))
    spread_experts(spread, groups(1)[0])
    found = []
    for model in (whole, spread):
        (block, *_) = [each for each in model.modules() if "SparseMoeBlock" in type(each).__name__]
        block.jitter_noise = 0.5
        torch.manual_seed(0)
        found.append(block(torch.randn(1, 4, 64)))
    assert all(map(torch.equal, *(each if isinstance(each, tuple) else (each,) for each in found)))


@ranks(2)
def test_a_copy_has_the_same_ranks() -> None:
    model = tiny_mixture("Qwen3-MoE")
    spread_experts(model, dist.group.WORLD)
    twin = copy.deepcopy(model)
    assert held_by_modules(twin, Spread) == held_by_modules(model, Spread)
    tokens = batch_of(dist.get_rank())
    with torch.no_grad():
        assert torch.equal(twin(input_ids=tokens).logits, model(input_ids=tokens).logits)


@ranks(2)
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_report_counts_the_tokens_of_each_expert(family: str, in_fp8: bool) -> None:
    whole, spread = (tiny_mixture(family).bfloat16() for _ in range(2))
    spread_experts(spread, dist.group.WORLD)
    for model in (whole, spread) if in_fp8 else ():
        convert_to_fp8(model, FP8Config(emulate=True, always=True))
    tokens = batch_of(dist.get_rank())
    with torch.no_grad():
        spread(input_ids=tokens)
        whole(input_ids=tokens)
    loads = report(spread).loads
    assert len(loads) == len(blocks_to_spread(tiny_mixture(family)))
    for load in loads:
        assert len(load.tokens) == EXPERTS
        assert sum(load.tokens) == 2 * tokens.numel()
        assert load.busiest == pytest.approx(max(load.tokens) / (2 * tokens.numel() / EXPERTS))
        assert load.idle == sum(count == 0 for count in load.tokens)
        assert load.sent == "in 16 bits"
    assert "times the mean of the last batch's tokens here" in report(spread).summary()
    # the first block, as tokens come to later ones with other roundings
    whole_loads = report(whole).loads
    assert [load.tokens for load in whole_loads[:1]] == ([loads[0].tokens] if in_fp8 else [])
    assert {load.sent for load in whole_loads} <= {None}
    assert not report(copy.deepcopy(spread)).loads
    with torch.no_grad():
        spread.eval()(input_ids=torch.zeros(2, 9, dtype=torch.int64))
    assert report(spread).loads == loads  # of training alone


@ranks(2)
@pytest.mark.parametrize("few", [0, 20])
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("form", [*FORMS, "with a norm that makes something of zeros"])
def test_experts_of_every_form_compute_over_ranks_what_they_do_on_one(form: str, fp8: bool, few: int) -> None:
    """Values, and gradients as data parallelism averages them; the first rank has few tokens, of uneven choices."""
    torch.manual_seed(0)
    whole = FORMS[form]() if form in FORMS else normed(nn.LayerNorm(HIDDEN))
    for each in whole.parameters():
        if each.dim() == 1:
            nn.init.normal_(each)
    whole = nn.Sequential(whole).to(torch.bfloat16 if fp8 else torch.float64)
    spread = copy.deepcopy(whole)
    (over,) = spread_experts(spread, dist.group.WORLD)
    if fp8:
        for model in (whole, spread):
            convert_to_fp8(model, FP8Config(emulate=True, always=True))
    dtype, rank, sizes = next(whole.parameters()).dtype, dist.get_rank(), [few, 30]
    tokens, dy = (torch.randn(sum(sizes), HIDDEN).to(dtype) for _ in range(2))
    chosen = torch.rand(sum(sizes), len(whole[0].down_proj)).square().topk(2).indices
    weights = torch.rand(chosen.shape).to(dtype)

    def run(model: nn.Sequential, part: slice) -> dict[str, torch.Tensor]:
        x, of_rows = (each[part].clone().requires_grad_() for each in (tokens, weights))
        y = model[0](x, chosen[part], of_rows)
        y.backward(dy[part])
        gradients = {name: each.grad for name, each in model.named_parameters()}
        return {"y": y.detach(), "x": x.grad, "weights": of_rows.grad, **gradients}

    own = slice(few) if rank == 0 else slice(few, None)
    expected, found = run(whole, slice(None)), run(spread, own)
    for name, right in expected.items():
        got = found[name]
        if name in ("y", "x", "weights"):
            right = right[own]
        elif spread_of(spread.get_parameter(name)) is not None:
            right = over.own(right) / 2
        else:
            dist.all_reduce(got)
        got, right = got.double(), right.double()
        assert (got - right).norm() <= (TOLERANCES.get(form, 0.15) if fp8 else 1e-6) * right.norm(), name
