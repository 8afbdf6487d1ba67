"""`MoeHybridParallelPlugin`: without `use_fp8` it is Colossal-AI's, with it experts and their tokens are in FP8."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, comm, report
from fp8booster.colossal.hybrid.gradients import is_replicated
from fp8booster.comm import Encoding
from fp8booster.comm.links import ESTIMATED
from fp8booster.config import WeightCopies
from fp8booster.kernels.expert_rows import most_counted_rows
from fp8booster.monitor.traffic import Traffic, count_traffic
from fp8booster.nn import FP8Layer
from fp8booster.nn.experts import spread
from fp8booster.nn.experts.grouped import grouped_experts
from fp8booster.nn.experts.routing import Sent
from tests.colossal.hybrid.runs import HybridRun, start
from tests.colossal.hybrid.test_learning import assert_close_over_steps, of_first_process
from tests.colossal.models import token_batch
from tests.colossal.moe.models import EXPERTS, mixtral_block, tiny_mixtral
from tests.distributed import ranks, shared_folder
from tests.nn.reference import count_calls
from tests.plugins import training
from tests.plugins.norms import assert_clips_by_one_norm, steps_of
from tests.plugins.test_learning import learn
from tests.plugins.test_low_level_zero_census import Census, Sizes, products
from tests.plugins.training import Boosted, assert_close, assert_equal, assert_trains_equally, rank_batches, train

if TYPE_CHECKING:
    from colossalai.booster.plugin import MoeHybridParallelPlugin as NativePlugin

    from fp8booster.plugins.moe_hybrid_parallel import MoeHybridParallelPlugin

CLOSE = 1e-2
"""How far a loss in FP8 may lie from that in BF16, in the first steps of `tiny_mixtral`."""

QUICK = FP8Config(emulate=True)
"""The same roundings; CPUs without FP8 products take milliseconds for each of the others."""

EP2 = {"tp_size": 1, "pp_size": 1, "ep_size": 2, "precision": "bf16", "zero_stage": 1}
MODES: dict[str, dict[str, Any]] = {
    "EP2": EP2,
    "experts on every rank": EP2 | {"ep_size": 1},
    "experts on every rank, without ZeRO": EP2 | {"ep_size": 1, "zero_stage": 0},
    "EP2, clipping, late weights": EP2 | {"max_norm": 0.1, "overlap_allgather": True},
    "EP2, stage 2, FP16": EP2  # stage 2 turns into stage 1 in Colossal-AI
    | {"zero_stage": 2, "precision": "fp16", "initial_scale": 2.0**8},
    "TP2": EP2 | {"tp_size": 2, "ep_size": 1},
    "PP2": EP2 | {"pp_size": 2, "ep_size": 1, "num_microbatches": 2},
}

WHY_ONE_BY_ONE = {
    "EP2, clipping, late weights": "an expert has hooks or a forward of its own, which must run",
    "EP2, stage 2, FP16": "grouped products give BF16 alone",
    "TP2": "FP8Linear1DCol has no grouped form",
}
"""In the other modes experts run by grouped products."""


def native(**arguments: Any) -> NativePlugin:
    """Colossal-AI's plugin."""
    from colossalai.booster.plugin import MoeHybridParallelPlugin

    return MoeHybridParallelPlugin(**EP2 | arguments)


def ours(*positional: Any, **arguments: Any) -> MoeHybridParallelPlugin:
    """This project's plugin."""
    from fp8booster.plugins.moe_hybrid_parallel import MoeHybridParallelPlugin

    return MoeHybridParallelPlugin(*positional, **({} if positional else EP2) | arguments)


def fp8(**arguments: Any) -> MoeHybridParallelPlugin:
    """This project's plugin with products, tokens, weights and gradients in FP8."""
    return ours(**{"use_fp8": True, "fp8_config": QUICK} | arguments)


def boost(plugin: Any, **options: Any) -> HybridRun:
    """A boosted `tiny_mixtral`."""
    return start(plugin, tiny_mixtral(**options), lr=1e-2)


# ---- without use_fp8 ----


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_moe_without_fp8_trains_as_the_native_plugin(mode: str) -> None:
    assert_trains_equally(*(boost(make(**MODES[mode])) for make in (native, ours)), micro_batches=2)


@ranks(2)
def test_moe_takes_the_arguments_of_the_native_plugin() -> None:
    plugin = ours(1, 1, 2, None, "bf16", 1, max_norm=0.5)
    theirs = native(max_norm=0.5)
    for name in (
        "ep_size",
        "moe_dp_size",
        "dp_size",
        "precision",
        "zero_stage",
        "max_norm",
        "amp_config",
        "ddp_config",
    ):
        assert getattr(plugin, name) == getattr(theirs, name), name
    with pytest.raises(TypeError, match=r"'epsize'; did you mean ep_size"):
        ours(epsize=2)
    with pytest.raises(TypeError, match=r"give an fp8booster.FP8Config"):
        fp8(fp8_config={"scaling": "amax"})
    with pytest.raises(ValueError, match=r"'bf16' or 'fp16', not 'fp32'"):
        fp8(precision="fp32", zero_stage=0)


# ---- products ----


@ranks(2)
def test_moe_runs_the_products_of_layers_with_hooks_one_by_one_in_fp8() -> None:
    run = boost(fp8(fp8_config=None))
    network = run.model.unwrap()
    tokens: Counter[nn.Module] = Counter()
    for layer in network.modules():
        if isinstance(layer, FP8Layer):
            layer.register_forward_pre_hook(lambda module, args: tokens.update({module: args[0].shape[:-1].numel()}))
    batch = rank_batches(1)[0]
    with Census() as counted:
        run.step(batch)
    experts = [layer for name, layer in network.named_modules() if "experts." in name and isinstance(layer, nn.Linear)]
    held = [layer for layer in experts if isinstance(layer, FP8Layer) and layer.weight is not None]
    attention = [
        layer for name, layer in network.named_modules() if "self_attn." in name and isinstance(layer, nn.Linear)
    ]
    assert len(held) == 2 * 2 * 3  # in each of two layers, two experts of three products
    assert len(attention) == 2 * 4
    assert set(tokens) == {*held, *attention}
    expected: Counter[tuple[int, int, int]] = Counter()
    for layer, rows in tokens.items():
        if rows:
            expected += sum(products([layer], -(-rows // 16) * 16).values(), Counter())
    assert counted.fp8 == expected
    routers = [mixtral_block(layer).gate for layer in network.model.layers]
    in_16_bits = sum(products([network.lm_head, *routers], batch.numel()).values(), Counter())
    assert {sizes: count for sizes, count in counted.other.items() if all(sizes)} == in_16_bits


@ranks(2)
def test_moe_runs_all_products_but_those_of_head_and_routers_in_fp8() -> None:
    run = boost(fp8(fp8_config=None))
    network = run.model.unwrap()
    batch = rank_batches(1)[0]
    run.step(batch)  # now the weights are those that ZeRO gathered
    loads: list[list[int]] = []

    def recording(*given: Any) -> Sent:
        loads.append((sent := Sent(*given)).counts(2).tolist()[0])
        return sent

    with pytest.MonkeyPatch.context() as monkeypatch, Census() as counted:
        monkeypatch.setattr(spread, "Sent", recording)
        run.step(batch)
    told = report(run.model)
    stacked = [(row.shape[0], None) for row in told.outside if row.name.endswith("experts.down_proj")]
    assert [(row.experts, row.why_one_by_one) for row in told.grouped] + stacked == [(2, None)] * 2
    hidden, features, keys = 64, 96, 32
    expected = 2 * [
        *_of_layer(batch.numel(), hidden, hidden + 2 * keys),  # q, k and v
        *_of_layer(batch.numel(), hidden, hidden),
    ]
    # what stands for a grouped product here multiplies for one expert after the other
    padded = [[max(16, -(-load // 16) * 16) for load in of_block] for of_block in loads]
    for of_block, rows_of_block in zip(loads, padded, strict=True):  # the last expert has the rows that are spare
        rows_of_block[-1] = most_counted_rows(sum(of_block), len(of_block)) - sum(rows_of_block[:-1])
    for rows in (rows for of_block in padded for rows in of_block):
        expected += [*_of_layer(rows, hidden, 2 * features), *_of_layer(rows, features, hidden)]
    assert len(loads) == 2
    assert counted.fp8 == Counter(expected)
    # no linear layers in transformers 5
    shapes = [mixtral_block(layer).gate.weight.shape for layer in network.model.layers]
    routers = [nn.Linear(*reversed(shape), device="meta") for shape in shapes]
    in_16_bits = sum(products([network.lm_head, *routers], batch.numel()).values(), Counter())
    assert {sizes: count for sizes, count in counted.other.items() if all(sizes)} == in_16_bits


def _of_layer(rows: int, inputs: int, outputs: int) -> list[Sizes]:
    return [(rows, inputs, outputs), (rows, outputs, inputs), (outputs, rows, inputs)]


@ranks(2)
def test_moe_says_what_is_in_fp8() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        plugin = fp8(fp8_config=FP8Config(fused=False))
        lines = count_calls(monkeypatch, plugin.logger, "info")
        run = boost(plugin)
    assert [line for (line,) in lines if line.startswith("FP8")] == [
        "FP8: 20 of 23 linear layers (92 % of the weights of matrix products); "
        "2 in BF16 (a router, where rounding would send tokens to other experts); "
        "1 in BF16 (FP8Config.layers leaves it out); activations and gradients are sent in FP8, and 20 of 29 weights"
        f"; sizes from which FP8 is sent: {ESTIMATED.source}"
    ]
    assert len(report(run.model).fp8) == 20
    assert not report(run.model).grouped


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_moe_in_fp8_stays_near_native(mode: str) -> None:
    expected = train(boost(native(**MODES[mode])), micro_batches=2)
    run = boost(fp8(**MODES[mode]))
    found = train(run, micro_batches=2)
    assert_close(expected, found, CLOSE, gradients=False)
    assert expected != found
    blocks = report(run.model).grouped
    stacked = [row for row in report(run.model).outside if ".experts." in row.name]
    assert blocks or stacked
    assert {block.why_one_by_one for block in blocks} <= {WHY_ONE_BY_ONE.get(mode)}
    # one parameter of all experts, as in transformers 5, which no hook on an expert takes out of its product
    assert {row.precision for row in stacked} <= {"FP16" if "FP16" in mode else "FP8"}


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_moe_gradients_are_those_of_the_native_plugin(mode: str) -> None:
    assert_native_gradients(MODES[mode])


def assert_native_gradients(mode: dict[str, Any]) -> None:
    """In direction and size, where all tokens go to all experts: rounding would send some to others."""
    losses = (
        train(boost(make(**mode), num_experts_per_tok=EXPERTS), steps=2, micro_batches=2) for make in (native, fp8)
    )
    assert_close(*losses, CLOSE)


@ranks(2)
@pytest.mark.parametrize("mode", ["EP2", "TP2"])
def test_moe_clips_by_one_norm_of_all_experts(mode: str) -> None:
    """In Colossal-AI each rank counts the experts that it holds, and adds norms where it should add squares."""
    assert_clips_by_one_norm(boost(fp8(**MODES[mode])), *rank_batches(2), norm_of=norm_of_all_parts)


@ranks(2)
@pytest.mark.parametrize("make", ["native", "fp8"])
@pytest.mark.parametrize("mode", ["TP2", "PP2"])
def test_moe_without_zero_clips_by_the_norm_over_all_ranks(mode: str, make: str) -> None:
    """In Colossal-AI each rank clips by the norm of what it holds."""
    run = boost({"native": native, "fp8": fp8}[make](**MODES[mode] | {"zero_stage": 0}))
    copies = dist.get_world_size(run.booster.plugin.tp_group)

    def norm_of_all_ranks(optimizer: Any) -> float:
        working = optimizer.get_master_to_working_map()
        masters = [master for group in optimizer.param_groups for master in group["params"]]
        squares = [
            master.grad.double().square().sum() / (copies if is_replicated(working[id(master)]) else 1)
            for master in masters
        ]
        total = sum(squares)
        dist.all_reduce(total)
        return float(total.sqrt())

    norm, exact, _ = steps_of(run, token_batch(0, batch=4), limit=1e6, norm_of=norm_of_all_ranks)
    assert norm == pytest.approx(exact, rel=1e-5)


@ranks(2)
@pytest.mark.parametrize("mode", ["EP2", "experts on every rank"])
def test_moe_scales_gradients_for_a_sum_over_the_widest_group(mode: str) -> None:
    """Over the group of an expert that one rank has, nothing is added; over that of all others, two gradients are."""
    run = boost(fp8(**MODES[mode], fp8_config=FP8Config(emulate=True, messages=Encoding(automatic_scaling=True))))
    assert run.optimizer.automatic_scaling.mu.item() == 1 / 2


def norm_of_all_parts(optimizer: Any) -> float:
    """Of the gradients as they are, of which both ranks hold parts that are their own, or the same (TP)."""
    parts = [
        (master.grad.double().square().sum(), is_replicated(optimizer.master_to_working_param[id(master)]))
        for group in optimizer.param_groups
        for master in group["params"]
    ]
    copies = dist.get_world_size(optimizer.tp_pg)
    total = sum(square / (copies if replicated else 1) for square, replicated in parts)
    dist.all_reduce(total)
    return float(total.sqrt())


@ranks(2)
def test_moe_trains_alike_where_parameters_keep_no_value() -> None:
    configs = (FP8Config(emulate=True, weight_copies=WeightCopies(high_precision=kept)) for kept in (True, False))
    runs = [boost(fp8(fp8_config=config)) for config in configs]
    losses = [train(run, micro_batches=2) for run in runs]
    assert losses[0] == losses[1]
    layer = mixtral_block(runs[1].model.unwrap().model.layers[0])
    of_experts = (expert.w2._parameters["weight"] for expert in layer.experts)  # to look at `weight` gives it values
    held = [weight for weight in of_experts if weight is not None]
    assert all(weight.isnan().all() for weight in held)
    assert {row.why_one_by_one for run in runs for row in report(run.model).grouped} == {None}
    for run in runs:
        run.loss(token_batch(seed=0))  # the last step has freed the copies of the experts' weights
    for grouped in (each for run in runs for each in grouped_experts(run.model.unwrap())):
        products = zip(grouped.products(), (grouped._gate_up, grouped._down), strict=True)
        for layers, weight in products:  # no copy of what ZeRO gathers
            gathered = layers[0].fp8_weight.forward([layers[0].weight], layers[0].fp8_casts, transpose=True)
            assert weight.made.data.data_ptr() == gathered.data.data_ptr()
            assert weight.made.transpose.data_ptr() == gathered.transpose.data_ptr()


@ranks(2)
def test_moe_trains_where_experts_get_no_tokens() -> None:
    batch = torch.full((2, 32), 7 + dist.get_rank())  # one token each: in the first layer two experts
    for mode in ("EP2", "experts on every rank"):
        run = boost(fp8(**MODES[mode]))
        losses = [run.step(batch)[0] for _ in range(4)]
        assert losses[-1] < losses[0]
        for parameter in run.parameters().values():
            assert torch.isfinite(parameter).all()


@ranks(2)
@pytest.mark.parametrize("which", ["native", "fp8"])
def test_moe_routers_of_all_stages_learn_to_balance_their_experts(which: str) -> None:
    """In Colossal-AI the loss of balance reaches those of the last stage alone."""
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    batch, alone = token_batch(seed=0, batch=4), tiny_mixtral(**balanced).bfloat16()
    for micro_batch in batch.chunk(2):
        (alone(input_ids=micro_batch, labels=micro_batch).loss / 2).backward()
    make = native if which == "native" else fp8
    run = boost(make(**MODES["PP2"] | {"zero_stage": 0}), **balanced)
    run.backward(batch)
    expected = {name: value.grad.float().flatten() for name, value in alone.named_parameters()}
    found = {
        name: value.grad.float().flatten() for name, value in run.model.unwrap().named_parameters() if "gate" in name
    }
    assert len(found) == 1
    for name, gradient in found.items():
        assert nn.functional.cosine_similarity(expected[name], gradient, 0) > 0.9, name


# ---- communication ----


def _traffic(run: Boosted, batch: torch.Tensor) -> Traffic:
    run.step(batch)
    comm.reset_statistics()
    with count_traffic() as counted:
        run.step(batch)
    return counted


@ranks(2)
@pytest.mark.parametrize("mode", ["EP2", "experts on every rank"])
def test_moe_sends_at_most_0_52_of_the_bytes(mode: str) -> None:
    # of a row sent to experts the scales take 16 bytes at least
    sizes = {"hidden_size": 512, "intermediate_size": 256, "vocab_size": 64}
    batch = rank_batches(1, batch=8)[0] % 64
    expected = _traffic(boost(native(**MODES[mode]), **sizes), batch)
    run = boost(fp8(**MODES[mode]), **sizes)
    found = _traffic(run, batch)
    rows = comm.statistics().rows
    assert found.sent <= 0.52 * expected.sent
    if mode == "EP2":
        assert rows["all_to_all_single"].ratio < 0.52
        assert rows["all_to_all_single"].calls == 2 * 4
        assert not rows["all_to_all_single"].uncompressed
        # the gradients of the routers' weights, one message a layer
        assert found.counts["all_to_all_single", torch.bfloat16].calls == 2
    else:  # half of each gradient, of 2 bytes a value, goes to the other rank, once
        trained = sum(parameter.numel() for parameter in run.model.unwrap().parameters())
        assert rows["reduce_scatter_tensor"].raw_bytes == trained
    large = [reason for row in rows.values() for reason in row.uncompressed]
    assert set(large) <= {"not the weight of an FP8 layer", "one rank"}


@ranks(2)
def test_moe_sends_nothing_in_fp8_where_it_is_told_so() -> None:
    run = boost(fp8(fp8_communication=False))
    counted = _traffic(run, rank_batches(1)[0])
    assert torch.uint8 not in {dtype for _, dtype in counted.counts}


# ---- convergence ----


@functools.cache
def _alone() -> list[float]:
    return of_first_process(lambda: tiny_mixtral(vocab_size=256))


@ranks(2)
@pytest.mark.parametrize("mode", ["EP2", "experts on every rank"])
def test_moe_follows_one_process_in_fp8(mode: str) -> None:
    run = training.boost(fp8(fp8_config=None, **MODES[mode]), tiny_mixtral(vocab_size=256))
    assert_close_over_steps(learn(run), _alone())


# ---- checkpoints ----


@ranks(2)
@pytest.mark.parametrize("crossing", ["fp8 to fp8", "fp8 to native", "native to fp8"])
def test_moe_checkpoints_cross(crossing: str) -> None:
    makers = {"fp8": fp8, "native": native}
    source, _, target = crossing.partition(" to ")
    writer, reader = (boost(makers[name]()) for name in (source, target))
    train(writer, steps=2)
    train(reader, steps=1)
    folder = shared_folder(f"moe {crossing}")
    writer.booster.save_model(writer.model, str(folder / "model"), shard=True, use_safetensors=True)
    writer.booster.save_optimizer(writer.optimizer, str(folder / "optimizer"), shard=True)
    dist.barrier()
    reader.booster.load_model(reader.model, str(folder / "model"))
    reader.booster.load_optimizer(reader.optimizer, str(folder / "optimizer"))
    held = {name for name, parameter in writer.model.unwrap().named_parameters() if parameter is not None}
    assert held
    assert_equal(writer.parameters(), reader.parameters())
    assert_close(train(writer), train(reader), CLOSE, gradients=False)
