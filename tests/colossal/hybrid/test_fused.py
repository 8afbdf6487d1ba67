"""`FP8Config(fused=True)` under `HybridParallelPlugin` computes what it computes unfused, in fewer products."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from fp8booster import FP8Config
from fp8booster.monitor.traffic import count_traffic
from fp8booster.nn.convert import linear_layers
from fp8booster.nn.fused.decoder import FusedDecoderLayer
from fp8booster.nn.fused.merged_layers import merged_layers
from tests.colossal.hybrid.runs import LENGTH, MICRO_BATCHES, SEQUENCES, HybridRun, batches, fp8, sizes, start
from tests.colossal.hybrid.runs import MODES as UNFUSED_MODES
from tests.colossal.hybrid.test_census import PASSES, expected, operations
from tests.colossal.hybrid.test_sharded_models import begin, step
from tests.colossal.models import tiny_llama
from tests.colossal.moe.models import tiny_mixtral
from tests.distributed import ranks, shared_folder
from tests.plugins.test_low_level_zero_census import Census
from tests.plugins.training import assert_close, assert_equal, rank_batches

FLASH = {"enable_flash_attention": True}
MODES: dict[str, dict[str, Any]] = {
    name: UNFUSED_MODES[name]
    for name in (
        "DP2 ZeRO 1",
        "TP2 ZeRO 1",
        "TP2 split_gather",
        "SP2 all_to_all",
        "SP2 ring_attn",
        "PP2 1f1b ZeRO 1",
        "PP2 interleaved",
        "PP2 zbv",
    )
} | {"TP2 flash": {"tp_size": 2} | FLASH, "PP2 1f1b flash": {"pp_size": 2, "pp_style": "1f1b"} | FLASH}
"""One of each kind: stage 2 of ZeRO has the bits of stage 1, and "ring" those of "split_gather"."""

ALIKE_DB = 12
"""At least, between gradients with and without fusion: each is some 17 dB from those of 16 bits, E5M2's two bits."""

CLOSE = 1.5e-2
"""How far losses may part in the first steps; in Colossal-AI those of parts of a sequence are added up in BF16."""

LOSS_AND_COUNT = 2
"""Ranks with parts of a sequence add up two values, in FP32 where in Colossal-AI they are in BF16."""


@dataclass
class Seen:
    """What the first steps of a run show on this rank."""

    run: HybridRun
    said: str
    """The summary line."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    """Of the first step."""

    census: Census
    """Of the last."""

    sent: int
    """Bytes in the last step."""


def model_of(mode: str) -> nn.Module:
    return tiny_llama(**sizes(num_hidden_layers=4 if "num_model_chunks" in MODES[mode] else 2))


def boosted(mode: str, fused: bool, model: nn.Module | None = None, **arguments: Any) -> tuple[HybridRun, str]:
    """A run, and the line that its plugin says."""
    plugin = fp8(MODES[mode], fp8_config=FP8Config(fused=fused), **arguments)
    with mock.patch.object(plugin.logger, "info") as info:
        run = start(plugin, model_of(mode) if model is None else model)
    return run, info.call_args.args[0]


def three_batches(run: HybridRun) -> list[torch.Tensor]:
    """This rank's."""
    group = run.booster.plugin.dp_group
    found = batches(0, 3, dist.get_world_size(group), dist.get_rank(group))
    return [tokens for (tokens,) in found]


def gradients_of(run: HybridRun) -> dict[str, torch.Tensor]:
    """This rank's part of the gradients that a backward left."""
    found = {}
    for name, value in run.model.unwrap().named_parameters():
        if run.booster.plugin.zero_stage == 0:
            gradient = value.grad
        else:
            gradient = run.optimizer.get_working_grad_by_param_id(id(value))
        found[name] = gradient.detach().float().flatten().clone()
    return found


@functools.cache
def seen(mode: str, fused: bool) -> Seen:
    """Three steps."""
    run, said = boosted(mode, fused)
    first, second, third = three_batches(run)
    losses = [run.backward(first)]
    gradients = gradients_of(run)
    run.optimizer.step()
    run.optimizer.zero_grad()
    losses += run.step(second)
    with Census() as census, count_traffic() as traffic:
        losses += run.step(third)
    return Seen(run, said, losses, gradients, census, traffic.sent)


def losses_of(run: HybridRun) -> list[float]:
    """Of the same three steps."""
    return [loss for tokens in three_batches(run) for loss in run.step(tokens)]


def decoder_layers(run: HybridRun) -> list[nn.Module]:
    """Those that were fused."""
    return [module for module in run.model.modules() if isinstance(module, FusedDecoderLayer)]


def signal_to_noise(values: torch.Tensor, exact: torch.Tensor) -> float:
    """In dB."""
    noise = (values.double() - exact.double()).square().sum()
    return (10 * torch.log10(exact.double().square().sum() / noise)).item()


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_and_losses_are_those_of_unfused_layers(mode: str) -> None:
    plain, fused = seen(mode, False), seen(mode, True)
    assert plain.gradients.keys() == fused.gradients.keys()
    apart = {
        name: signal_to_noise(fused.gradients[name], gradient)
        for name, gradient in plain.gradients.items()
        if gradient.any() or fused.gradients[name].any()  # a shard of the vocabulary may have none of these tokens
    }
    assert min(apart.values()) > ALIKE_DB, apart
    assert min(apart.values()) < 40, apart  # it is another computation
    assert_close(plain.losses, fused.losses, CLOSE)
    assert fused.losses[-1] < fused.losses[0]


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_q_k_and_v_are_one_product_and_gate_and_up_another_all_in_fp8(mode: str) -> None:
    run, counted = seen(mode, True).run, seen(mode, True).census
    plugin = run.booster.plugin
    layers = dict(linear_layers(run.model.unwrap()))
    heads = [layer for name, layer in layers.items() if name == "lm_head"]
    eligible = [layer for name, layer in layers.items() if name != "lm_head"]
    fused = len(decoder_layers(run))
    assert len(eligible) == 7 * fused > 0
    products = PASSES * fused * 4
    assert sum(counted.fp8.values()) == products * (MICRO_BATCHES if plugin.pp_size > 1 else 1)
    rows = SEQUENCES * LENGTH // dist.get_world_size(plugin.dp_group) // plugin.sp_size
    assert operations(counted.fp8) == expected(eligible, rows), counted.fp8
    assert operations(counted.other) == expected(heads, rows), counted.other
    # ZeRO gathers them stacked by rows, under one scale
    kept = [merged.fp8_weight.is_provided(merged.weights) for merged in merged_layers(run.model)]
    assert len(kept) == fused * 2
    assert all(kept) if plugin.zero_stage else not any(kept)


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_no_more_is_sent_and_with_tensor_parallelism_less(mode: str) -> None:
    plain, fused = seen(mode, False), seen(mode, True)
    if plain.run.booster.plugin.tp_size > 1:
        # five all-reduces or reduce-scatters of a layer's input gradients are two
        assert fused.sent < 0.8 * plain.sent, (fused.sent, plain.sent)
    elif "ring" in mode:
        # keys and values go round once for the two queries that share them
        assert fused.sent < 0.9 * plain.sent, (fused.sent, plain.sent)
    else:
        more = LOSS_AND_COUNT * 2 if plain.run.booster.plugin.sp_size > 1 else 0
        assert fused.sent <= plain.sent + more, (fused.sent, plain.sent)


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_the_summary_says_what_is_fused_and_what_is_not(mode: str) -> None:
    found = seen(mode, True)
    assert f"{len(decoder_layers(found.run))} decoder layers fused, loss over chunks of logits" in found.said, (
        found.said
    )
    assert "fused" not in seen(mode, False).said


ALONG_A_SEQUENCE = ("SP2 all_to_all", "SP2 ring_attn")
"""Modes among ranks of their own, which exchange q, k and v, or keys and values."""


@ranks(2)
@pytest.mark.parametrize("mode", ALONG_A_SEQUENCE)
def test_padding_is_left_out_along_a_sequence_as_in_unfused_layers(mode: str) -> None:
    places, padding = torch.arange(LENGTH), torch.tensor([0, LENGTH // 2, 4]).unsqueeze(1)
    # rings have it at the end alone, where no token attends to it anyhow
    at_the_end = "ring" in mode
    text = places < LENGTH - padding if at_the_end else places >= padding

    def trained(fused: bool, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        run, _ = boosted(mode, fused)
        tokens = three_batches(run)[0][: len(padding)]
        with Census() as counted:
            loss = run.model(input_ids=tokens, labels=tokens.masked_fill(~text, -100), attention_mask=mask.long()).loss
            run.booster.backward(loss, run.optimizer)
        assert sum(counted.fp8.values()) == PASSES * 2 * (4 if fused else 7)
        return gradients_of(run)

    expected, found = (trained(fused, text) for fused in (False, True))
    for name, gradient in expected.items():
        assert signal_to_noise(found[name], gradient) > ALIKE_DB, name
    if not at_the_end:
        unmasked = trained(True, torch.ones_like(text))
        query = next(name for name in expected if "q_proj" in name)
        assert signal_to_noise(unmasked[query], expected[query]) < ALIKE_DB / 2


@ranks(2)
@pytest.mark.parametrize("mode", ALONG_A_SEQUENCE)
def test_a_mask_that_is_not_for_flash_attention_is_left_to_shardformers_forward(mode: str) -> None:
    attention = decoder_layers(seen(mode, True).run)[0].self_attn
    tokens = torch.randn(1, 8, attention.config.hidden_size).bfloat16()
    angles = (torch.ones(1, 16, attention.head_dim),) * 2
    theirs = mock.Mock(return_value=(tokens, None))
    with mock.patch.dict(attention.__dict__, {"fp8_forward_of_engine": theirs}):
        output, _ = attention(tokens, angles, attention_mask=torch.zeros(1, 1, 16, 16))
    assert output is tokens
    theirs.assert_called_once()


@ranks(2)
@pytest.mark.parametrize("mode", ALONG_A_SEQUENCE)
def test_a_copy_of_a_model_along_a_sequence_computes_what_the_model_does(mode: str) -> None:
    run, _ = boosted(mode, True)
    first, *_ = three_batches(run)
    model = run.model.unwrap()
    inputs = {"input_ids": first, "labels": first, "attention_mask": torch.ones_like(first)}
    assert torch.equal(copy.deepcopy(model)(**inputs).loss, model(**inputs).loss)


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2 ZeRO 1", "PP2 1f1b flash", "SP2 all_to_all", "SP2 ring_attn"])
def test_checkpointed_fused_layers_give_the_same_bits(mode: str) -> None:
    model = model_of(mode)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    run, _ = boosted(mode, True, model)
    assert losses_of(run) == seen(mode, True).losses


@ranks(2)
@pytest.mark.parametrize("mode", ["DP2 ZeRO 1", "TP2 ZeRO 1"])
def test_late_gathers_give_fused_layers_the_same_bits(mode: str) -> None:
    run, _ = boosted(mode, True, overlap_allgather=True)
    assert losses_of(run) == seen(mode, True).losses


@ranks(2)
@pytest.mark.parametrize("mode", ["DP2 ZeRO 1", "TP2 ZeRO 1", "PP2 interleaved"])
def test_a_checkpoint_has_the_names_and_values_of_an_unfused_one(mode: str) -> None:
    path = shared_folder(f"{mode} fused") / "model.safetensors"

    def save(run: HybridRun) -> dict[str, torch.Tensor]:
        run.booster.save_model(run.model, str(path), use_safetensors=True)
        dist.barrier()
        return load_file(path)

    run, _ = boosted(mode, True)
    written = save(run)
    dist.barrier()  # before the other writes
    assert_equal(save(boosted(mode, False)[0]), written)
    # what a run has learned, another goes on with
    trained = seen(mode, True).run
    learned = save(trained)
    assert any(not torch.equal(learned[name], value) for name, value in written.items())
    run.booster.load_model(run.model, str(path))
    first, *_ = three_batches(run)
    assert_close([trained.backward(first)], [run.backward(first)], CLOSE)
    for each in (trained, run):
        each.optimizer.zero_grad()


@ranks(2)
@pytest.mark.parametrize(
    "case", ["TP2 Mistral flash", "TP2 Qwen2", "SP2 all_to_all Qwen2", "SP2 all_to_all Mistral flash"]
)
def test_the_other_families_train_fused(case: str) -> None:
    mode, name = case.removesuffix(" flash").rsplit(" ", 1)
    options = FLASH if "flash" in case else {}
    losses, counts = [], []
    for fused in (False, True):
        run, batch = begin(fp8(mode, fp8_config=FP8Config(fused=fused), **options), name)
        with Census() as counted:
            first = step(run, batch)
        losses.append([first, *(step(run, batch) for _ in range(2))])
        counts.append(sum(counted.fp8.values()))
    assert_close(*losses, CLOSE)
    assert losses[1][-1] < losses[1][0]
    assert counts == [PASSES * 2 * 7, PASSES * 2 * 4]


@ranks(2)
def test_experts_train_fused_where_they_lie_on_several_ranks() -> None:
    from fp8booster.plugins.moe_hybrid_parallel import MoeHybridParallelPlugin

    arguments = {"tp_size": 1, "pp_size": 1, "ep_size": 2, "precision": "bf16", "zero_stage": 1}
    losses, counts = [], []
    for fused in (False, True):
        plugin = MoeHybridParallelPlugin(**arguments, use_fp8=True, fp8_config=FP8Config(fused=fused))
        run = start(plugin, tiny_mixtral())
        (tokens,) = rank_batches(1)
        with Census() as counted:
            found = run.step(tokens)
        losses.append(found + [run.step(tokens)[0] for _ in range(2)])
        counts.append(sum(counted.fp8.values()))
    assert_close(*losses, CLOSE)
    assert losses[1][-1] < losses[1][0]
    # on each of two layers, attention and two experts, whose gate and up are one parameter in transformers 5
    of_expert = 3 if version("transformers").startswith("4.") else 2
    assert counts == [PASSES * 2 * (4 + 2 * of_expert), PASSES * 2 * (2 + 2 * 2)]


@ranks(2)
@pytest.mark.parametrize("name", ["OPT"])
def test_a_model_without_a_fused_form_is_left_alone_and_the_summary_says_so(name: str) -> None:
    plugin = fp8("TP2", fp8_config=FP8Config(fused=True))
    with mock.patch.object(plugin.logger, "info") as info:
        run, batch = begin(plugin, name)
    assert (
        "nothing is fused, as there are no decoder layers of LLaMA 2 and 3, LLaMA 4, Mistral" in info.call_args.args[0]
    )
    plain, _ = begin(fp8("TP2"), name)
    assert step(run, batch) == step(plain, batch)
