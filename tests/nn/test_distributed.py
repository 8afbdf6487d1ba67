"""FSDP2 and DDP by one call each, on gloo ranks that are started once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as shard_by_torch
from torch.nn.parallel import DistributedDataParallel

from fp8booster import (
    Encoding,
    FP8Config,
    WeightCopies,
    comm,
    convert_to_fp8,
    data_parallel,
    fully_shard,
    fuse,
    quantize,
    report,
)
from fp8booster.nn import distributed
from fp8booster.nn.fsdp.bookkeeping import FP8FSDPParam
from fp8booster.nn.fsdp.units import params_of
from fp8booster.nn.fused import fused_summary
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.linear.layer import FP8Layer
from tests.distributed import ranks as run_on_ranks
from tests.distributed import run_ranks
from tests.nn.fused.models import INSTALLED, batch, build

BF16, FP32 = torch.bfloat16, torch.float32
GPUS = max(1, min(2, torch.cuda.device_count()))
EXACT = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)


def ids() -> torch.Tensor:
    """This rank's row of the batch."""
    return batch()[dist.get_rank() % 2][None]


def gathered(model: nn.Module) -> int:
    """Count the bytes that the weights take which are gathered in FP8, in FP8 and in 16 bits."""
    params = [
        param
        for unit in model.modules()
        if hasattr(unit, "_get_fsdp_state")
        for param in params_of(unit)
        if isinstance(param, FP8FSDPParam)
    ]
    held = [each for param in params for each in param.all_gather_outputs]
    held += [param._unsharded_param for param in params if hasattr(param, "_unsharded_param")]  # gathered before
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in held}
    return sum(size for size in storages.values() if size > 4)  # one value stands for all of a parameter


def losses_of(model: nn.Module, steps: int = 4, **more: Any) -> list[float]:
    """Train; return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids(), labels=ids(), **more).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def outcome(found: Any) -> Any:
    """What a function returns, or the sentence of the error that it raises."""
    try:
        return found()
    except (ValueError, TypeError) as error:
        return str(error)


def train_in_fp8_and_16_bits(dtype: torch.dtype) -> dict[str, Any]:
    """The same model, its gathers and reductions in FP8, its gathers alone, and neither."""
    found: dict[str, Any] = {}
    plain = distributed.compress_fsdp
    for name in ("16 bits", "gathers", "both"):
        distributed.compress_fsdp = plain if name == "both" else lambda *_, **__: None
        messages = None if name == "16 bits" else Encoding()
        model = fully_shard(build(dtype=dtype, use_cache=True), FP8Config(messages=messages, always=True))
        distributed.compress_fsdp = plain
        comm.reset_statistics()
        found[name] = losses_of(model)
        found[name + ", ratios"] = {key: row.ratio for key, row in comm.statistics().rows.items()}
    found["summary"], found["fused"] = report(model).summary(), fused_summary(model)
    return found


def memory(**changes: int) -> dict[str, Any]:
    """Bytes of gathered weights in a step, as layers run and between forward and backward."""
    model = fully_shard(build(**changes))
    seen = []
    model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(gathered(model)))
    loss = model(input_ids=ids(), labels=ids()).loss
    between = gathered(model), sum(each.fp8_weight.held is not None for each in merged_layers(model))
    loss.backward()
    return {"in a layer": seen, "between": between, "after": gathered(model)}


def bytes_of_layer() -> int:
    """Bytes that the weights of one layer take in FP8."""
    return sum(weight.numel() for name, weight in build().model.layers[0].named_parameters() if "proj" in name)


def edits() -> dict[str, Any]:
    """Losses after edits of shards that no optimizer makes."""
    model, other = fully_shard(build()), build()
    with torch.no_grad():
        before = model(input_ids=batch(), labels=batch()).loss.item()
        for each in (model, other):
            for name, weight in each.named_parameters():
                if "q_proj" in name or "down_proj" in name:
                    weight.data.mul_(30)
        after = model(input_ids=batch(), labels=batch()).loss.item()
    convert_to_fp8(other)
    fuse(other)
    return {"before": before, "after": after, "right": other(input_ids=batch(), labels=batch()).loss.item()}


def agreements() -> dict[str, Any]:
    """How often ranks agree on amaxes in steps, and what a layer computes that runs by itself after an edit."""
    model, other = fully_shard(build(dtype=FP32)), build(dtype=FP32)
    convert_to_fp8(other)
    found: dict[str, Any] = {}
    reduced = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *more: Any, **named: Any) -> Any:
        if op == dist.ReduceOp.MAX:
            reduced.append(tensor.numel())
        return all_reduce(tensor, op, *more, **named)

    layers = [each.model.layers[1] for each in (model, other)]
    given: list[Any] = []

    def stop(*_: Any) -> None:
        if given:
            raise ValueError("stop")

    model.model.layers[0].register_forward_pre_hook(stop)
    layers[0].register_forward_pre_hook(lambda _, *given_now: given.append(given_now), with_kwargs=True)

    def forward() -> torch.Tensor:
        return model(input_ids=batch(), labels=batch()).loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        forward().backward()
        found["a step"], reduced[:] = list(reduced), []
        found["broken off"] = outcome(forward)
        arguments, named = given[0]
        named = {key: value for key, value in named.items() if key not in ("past_key_values", "past_key_value")}
        for when in ("after a forward that broke off", "again"):
            reduced[:] = []
            with torch.no_grad():
                for layer in layers:
                    for name, weight in layer.named_parameters():
                        if "proj" in name:
                            weight.mul_(3)
                alone, right = [layer(*arguments, **named) for layer in layers]
                alone, right = [each[0] if isinstance(each, tuple) else each for each in (alone, right)]
            found[when] = ((alone - right).norm() / right.norm()).item(), list(reduced)
    return found


def by_hand() -> list[float]:
    """Inverse scales of a weight in forward and in backward, of a layer that was gathered by hand after an edit."""
    model = fully_shard(build())
    layer = model.model.layers[0]
    scales: list[float] = []

    def note(*_: Any) -> None:
        scales.append(layer.mlp.down_proj.fp8_weight.held.inverse_scale.item())

    model(input_ids=ids(), labels=ids()).loss.backward()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(3)
    layer.mlp.register_forward_hook(note)
    layer.mlp.register_full_backward_pre_hook(note)
    layer.unshard()
    model(input_ids=ids(), labels=ids()).loss.backward()
    return scales


def checkpoints(folder: str) -> dict[str, Any]:
    """Save with DCP, load into another model, and gather the whole state."""
    model = fully_shard(build(dtype=FP32))
    losses_of(model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    other = fully_shard(build(dtype=FP32))
    losses_of(other, steps=1)  # it has gathered once, and holds other weights
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    loaded, right = (each(input_ids=batch(), labels=batch()).loss.item() for each in (other, model))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    found = {"loaded": loaded, "right": right}
    if dist.get_rank() == 0:
        plain = build(dtype=FP32)
        found["keys"] = list(whole) == list(plain.state_dict())
        plain.load_state_dict(whole)
        convert_to_fp8(plain)
        fuse(plain)
        with torch.autocast("cpu", BF16):
            found["plain"] = plain(input_ids=batch(), labels=batch()).loss.item()
    return found


def readers() -> dict[str, Any]:
    """Whoever reads a weight without its layer finds the values that are multiplied."""
    model = fully_shard(build())
    layer = model.model.layers[0].self_attn.q_proj
    seen = []

    def read(*_: Any) -> None:
        quantized = layer.fp8_weight.held
        values = quantized.data.float() * quantized.inverse_scale
        seen.append(torch.equal(layer.weight.float(), values.to(layer.weight.dtype).float()))

    model.model.layers[0].mlp.register_forward_pre_hook(read)
    model(input_ids=ids(), labels=ids()).loss.backward()
    return {"seen": seen, "after": gathered(model)}


def micro_batches() -> dict[str, Any]:
    """Gradients of two backward passes of which one is reduced, and of a model that is whole after forward."""
    found: dict[str, Any] = {}
    for name in ("once", "twice", "kept"):
        model = fully_shard(build(dtype=FP32), mp_policy=EXACT, reshard_after_forward=False if name == "kept" else None)
        rows = ids().repeat(2, 1) if name == "once" else ids()
        if name == "twice":
            model.set_requires_gradient_sync(False)
            (model(input_ids=rows, labels=rows).loss / 2).backward()
            model.set_requires_gradient_sync(True)
            (model(input_ids=rows, labels=rows).loss / 2).backward()
        else:
            model(input_ids=rows, labels=rows).loss.backward()
        found[name] = model.model.layers[0].mlp.up_proj.weight.grad.full_tensor()
    return found


def ways() -> dict[str, list[float]]:
    """Losses of the same model, sharded in other ways, and of others."""
    found: dict[str, list[float]] = {}
    recomputed, lazy = build(dtype=FP32), build(dtype=FP32)
    found["usual"] = losses_of(fully_shard(build(dtype=FP32)))
    recomputed.gradient_checkpointing_enable({"use_reentrant": False})
    found["recomputed"] = losses_of(fully_shard(recomputed))
    found["whole after forward"] = losses_of(fully_shard(build(dtype=FP32), reshard_after_forward=False))
    replicas = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    found["replicas"] = losses_of(fully_shard(build(dtype=FP32), mesh=replicas))
    whole = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    found["replicas that are whole"] = losses_of(fully_shard(build(dtype=FP32), mesh=whole))
    state, rotary = lazy.state_dict(), copy.deepcopy(lazy.model.rotary_emb)
    lazy = fully_shard(lazy.to("meta")).to_empty(device="cpu")
    set_model_state_dict(lazy, state, options=StateDictOptions(full_state_dict=True))
    lazy.model.rotary_emb = rotary
    found["from no device"] = losses_of(lazy)
    blocks = build(dtype=FP32)
    of_fp8_alone = [part for layer in blocks.model.layers for part in (layer.self_attn, layer.mlp)]
    found["blocks"] = losses_of(fully_shard(blocks, units=[*of_fp8_alone, *blocks.model.layers]))
    found["head in FP8"] = losses_of(fully_shard(build(), FP8Config(vocabulary_head=True)))
    found["tied head"] = losses_of(fully_shard(build(tie_word_embeddings=True)))
    found["rowwise"] = losses_of(fully_shard(build(), FP8Config(scaling="rowwise")))
    found["unfused"] = losses_of(fully_shard(build(), FP8Config(fused=False)))
    return found


def orders() -> dict[str, Any]:
    """What follows, or precedes, the one call."""
    fused = convert_to_fp8(build(), FP8Config(scaling="amax"))
    fuse(fused)
    sharded = fully_shard(fused)
    by_torch = shard_by_torch(build(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    compiled = nn.Sequential(torch.compile(nn.Linear(64, 64)))
    return {
        "converted before": [
            {layer.fp8_config.scaling.name for layer in sharded.modules() if isinstance(layer, FP8Layer)},
            losses_of(sharded),
        ],
        "converted after": outcome(lambda: convert_to_fp8(sharded)),
        "fused after": outcome(lambda: fuse(sharded)),
        "twice": outcome(lambda: fully_shard(sharded)),
        "by torch": outcome(lambda: fully_shard(by_torch)),
        "DDP": outcome(lambda: fully_shard(DistributedDataParallel(build()))),
        "compiled": outcome(lambda: data_parallel(compiled)),
        "unfused": [
            outcome(lambda way=way: way(fuse_first(), FP8Config(fused=False))) for way in (fully_shard, data_parallel)
        ],
        "fused by hand": losses_of(data_parallel(fuse_first(FP8Config(fused=False)))),
        "no effect": [warnings_of(given, way) for given in (True, False) for way in (fully_shard, data_parallel)],
        "no module": outcome(lambda: fully_shard("llama")),
        "optimizer": outcome(earlier_optimizer),
        "units": [outcome(partial(fully_shard, build(), units=given)) for given in ([nn.Linear], nn.Linear, ["model"])],
    }


def fuse_first(config: FP8Config | None = None) -> nn.Module:
    """Return a model that was converted and fused by hand."""
    model = convert_to_fp8(build(), config)
    fuse(model)
    return model


def warnings_of(given: bool, way: Callable[..., nn.Module]) -> tuple[list[str], list[bool]]:
    """Return which options of a configuration are warned of, and where: one that is given, or a converted model has."""
    config = FP8Config(
        messages=Encoding(automatic_scaling=True),
        weight_copies=WeightCopies(high_precision=True, transposes=False),
        gradient_accumulation="8-bit",
        cuda_graphs=True,
    )
    model = build() if given else convert_to_fp8(build(), config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        way(model, config if given else None)
    told = [each for each in caught if " has no effect: " in str(each.message)]
    return [str(each.message).split("=")[0] for each in told], [each.filename == __file__ for each in told]


def earlier_optimizer() -> None:
    """Step an optimizer that was made before the model was sharded, and one whose model is another."""
    models = build(), build()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    fully_shard(models[0])
    optimizers[1].step()
    optimizers[0].step()


def families() -> dict[str, Any]:
    """Losses of each family, and of a model frozen in FP8 with adapters."""
    found = {family: losses_of(fully_shard(build(family)), steps=3) for family in INSTALLED}
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        quantize(build()), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights="gaussian")
    )
    found["frozen"] = losses_of(fully_shard(adapted), steps=3)
    return found


def packed() -> dict[str, Any]:
    """Losses of two sequences in a row, and of the same as rows of a batch."""
    model = fully_shard(build())
    row = batch()[:1]
    positions = torch.arange(16).repeat(2)[None]
    with torch.no_grad():
        apart = model(input_ids=row.view(2, 16), labels=row.view(2, 16)).loss.item()
        labels = row.masked_fill(positions == 0, -100)
        together = model(input_ids=row, labels=labels, position_ids=positions).loss.item()
    return {"apart": apart, "together": together}


def evaluation() -> dict[str, Any]:
    """Errors of the logits, and whether tokens agree, in evaluation, of a sharded and of a whole model."""
    exact = build(dtype=FP32).eval()
    model, whole = fully_shard(build()).eval(), build()
    convert_to_fp8(whole)
    fuse(whole)
    whole.eval()
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        right, *logits = [each(input_ids=batch()).logits for each in (exact, model, whole)]
        tokens = [each.generate(batch(), **how) for each in (model, whole)]
    errors = [((each - right).norm() / right.norm()).item() for each in logits]
    return {"errors": errors, "tokens": torch.equal(*tokens)}


def ddp() -> dict[str, Any]:
    """Losses under DDP by hand and by one call, under autocast."""
    found: dict[str, Any] = {}
    for name in ("by hand", "one call", "16 bits"):
        model = build(dtype=FP32)
        if name == "by hand":
            convert_to_fp8(model)
            fuse(model)
            model = DistributedDataParallel(model, bucket_cap_mb=64)
            model.register_comm_hook(None, comm.ddp_hook)
        else:
            model = data_parallel(model, None if name == "one call" else FP8Config(messages=None))
        with torch.autocast("cpu", BF16):
            comm.reset_statistics()
            found[name] = losses_of(model)
            found[name + ", sent"] = list(comm.statistics().rows)
    found["summary"] = report(model).summary()
    return found


def everything(folder: str) -> dict[str, Any]:
    return {
        "FP32": train_in_fp8_and_16_bits(FP32),
        "BF16": train_in_fp8_and_16_bits(BF16),
        "memory": memory(),
        "edits": edits(),
        "agreements": agreements(),
        "by hand": by_hand(),
        "checkpoints": checkpoints(folder),
        "readers": readers(),
        "micro-batches": micro_batches(),
        "ways": ways(),
        "orders": orders(),
        "families": families(),
        "evaluation": evaluation(),
        "packed": packed(),
        "ddp": ddp(),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(everything, 2, str(tmp_path_factory.mktemp("checkpoint")))


@pytest.mark.parametrize("dtype", ["FP32", "BF16"])
def test_gathers_and_reductions_in_fp8_train_as_those_in_16_bits(ranks: list[dict[str, Any]], dtype: str) -> None:
    for rank in ranks:
        found = rank[dtype]
        plain = found["16 bits"]
        assert plain[-1] < 0.95 * plain[0]
        # the bytes that are sent are those of a cast of the whole weight; of FP32 one of BF16 values has others
        assert (found["gathers"] == plain) == (dtype == "BF16")
        for name in ("gathers", "both"):
            assert all(abs(one - other) < 0.02 * one for one, other in zip(plain, found[name], strict=True)), (
                name,
                found,
            )
        assert found["16 bits, ratios"] == {}
        assert set(found["gathers, ratios"]) == {"parameter gather"}
        assert found["both, ratios"]["parameter gather"] < 0.6  # embeddings and head are in 16 bits
        assert found["both, ratios"]["reduce_scatter_tensor"] < 0.52
        assert "14 of 15 linear layers" in found["summary"]
        assert "10 of them merged to 4 products" in found["summary"]
        assert "unfused" not in found["summary"]
        assert found["fused"] == "2 decoder layers fused, loss over chunks of logits"


def test_no_weight_outlives_its_layer(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["memory"]
        assert found["in a layer"] == [bytes_of_layer()]
        assert found["between"] == (0, 0)
        assert found["after"] == 0


def test_edits_of_shards_are_seen(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["edits"]
        assert found["after"] == pytest.approx(found["right"], rel=1e-3)
        assert abs(found["after"] - found["before"]) > 1e-2


def test_ranks_agree_once_a_forward_or_for_a_layer_that_runs_by_itself(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["agreements"]
        assert found["a step"] == [14]  # weights of both layers, for forward and backward
        assert found["broken off"] == "stop"
        for when in ("after a forward that broke off", "again"):
            error, reduced = found[when]
            assert reduced == [7]
            assert error < 0.12  # by the scales of before, weights three times as large would saturate


def test_backward_has_the_scales_of_a_forward_that_was_gathered_by_hand(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        in_forward, in_backward = rank["by hand"]
        assert in_forward == in_backward


def test_checkpoints_have_the_exact_weights_under_the_names_of_the_model(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["checkpoints"]
        assert found["loaded"] == found["right"]
    found = ranks[0]["checkpoints"]
    assert found["keys"]
    assert found["plain"] == pytest.approx(found["right"], rel=5e-3)


def test_a_weight_that_is_read_has_the_values_that_are_multiplied_while_it_is_there(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["readers"] == {"seen": [True], "after": 0}


def test_gradients_of_micro_batches_add_up(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        once, *others = rank["micro-batches"].values()
        assert once.any()
        for gradient in others:
            assert (gradient - once).norm() < 0.05 * once.norm()


def test_ways_to_shard_a_model_give_the_same_losses(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        usual, *others = rank["ways"].items()
        for name, losses in others:
            if name in ("recomputed", "whole after forward", "replicas", "from no device"):
                assert losses == usual[1], name
            assert losses[-1] < 0.9 * losses[0], name


def test_calls_in_another_order_serve_or_are_refused_with_a_sentence(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["orders"]
        names, losses = found["converted before"]
        assert names == {"amax"}
        assert losses[-1] < losses[0]
        assert "convert and fuse a model before" in found["converted after"]
        assert found["fused after"] == found["converted after"]
        assert found["twice"] == found["by torch"]
        assert "sharded by fully_shard already; give it to fp8booster.fully_shard as it was before" in found["twice"]
        assert "in DistributedDataParallel already; give the one inside" in found["DDP"]
        assert "compile what fp8booster.data_parallel returns" in found["compiled"]
        assert all("leave fused=False out, or make the model anew" in each for each in found["unfused"])
        assert found["fused by hand"][-1] < found["fused by hand"][0]
        assert "give an nn.Module" in found["no module"]
        assert "was made before fully_shard" in found["optimizer"]
        assert all("give modules of the model, as list(model.model.layers)" in each for each in found["units"])


def test_options_without_effect_are_warned_of(ranks: list[dict[str, Any]]) -> None:
    high_precision, transposes = "config.weight_copies.high_precision", "config.weight_copies.transposes"
    others = ["config.messages.automatic_scaling", "config.gradient_accumulation"]
    expected = [
        [high_precision, transposes, *others],  # FSDP2's layers keep none
        [high_precision, *others],
        [high_precision, *others],  # a large model is converted so, whether its user asked for it or not
        [high_precision, *others],
    ]
    for rank in ranks:
        found = rank["orders"]["no effect"]
        assert [names for names, _ in found] == expected
        assert all(all(here) for _, here in found)


@pytest.mark.parametrize("name", [*INSTALLED, "frozen"])
def test_each_family_learns(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        losses = rank["families"][name]
        assert losses[-1] < losses[0] - 0.02


def test_evaluation_and_generation_are_those_of_the_whole_model(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        error, of_whole = rank["evaluation"]["errors"]
        assert 0 < error < 1.1 * of_whole  # q, k and v have one scale in what is gathered, and else one each
        assert rank["evaluation"]["tokens"]


def test_packed_sequences_reach_the_layers(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["packed"]["together"] == pytest.approx(rank["packed"]["apart"], rel=1e-3)


def test_ddp_by_one_call_is_ddp_by_hand(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["ddp"]
        assert found["one call"] == found["by hand"]
        assert found["16 bits"] == pytest.approx(found["by hand"], rel=0.02)
        assert found["one call"][-1] < 0.95 * found["one call"][0]
        assert found["one call, sent"] == ["all_reduce"]
        assert found["16 bits, sent"] == []
        assert "10 of them merged to 4 products" in found["summary"]


@pytest.mark.gpu
@run_on_ranks(GPUS, backend="nccl")
def test_on_gpus_what_is_gathered_is_what_a_cast_of_the_whole_weight_gives() -> None:
    found = train_in_fp8_and_16_bits(BF16)
    assert found["gathers"] == found["16 bits"]
    assert found["both"] == pytest.approx(found["16 bits"], rel=0.02)
    # graphs find weights in places that stay, of two layers whatever the number of layers; no layer holds any
    places, held = memory(num_hidden_layers=4)["between"]
    assert held == 0
    assert places <= 2 * bytes_of_layer()
    if dist.get_world_size() > 1:
        found = readers()
        assert found["seen"] == [True]
        assert found["after"] <= 2 * bytes_of_layer()  # the places again


def alone() -> dict[str, Any]:
    """Train on one rank, and the same model without FSDP2."""
    model, plain = fully_shard(build()), build()
    convert_to_fp8(plain)
    fuse(plain)
    found = {"losses": losses_of(model), "plain": losses_of(plain), "summary": report(model).summary()}
    return found | {"held": sum(each.fp8_weight.held is not None for each in merged_layers(model))}


def test_one_rank_trains_as_without_fsdp2() -> None:
    (found,) = run_ranks(alone, 1)
    assert found["losses"] == pytest.approx(found["plain"], rel=0.01)
    assert found["losses"][-1] < 0.95 * found["losses"][0]
    assert "10 of them merged to 4 products" in found["summary"]
    assert found["held"] == 0


def uneven() -> tuple[list[float], str]:
    """Train on three ranks, which hold other numbers of rows each."""
    model = fully_shard(build())
    return losses_of(model), report(model).summary()


def test_ranks_may_hold_other_numbers_of_rows() -> None:
    for losses, summary in run_ranks(uneven, 3):
        assert losses[-1] < 0.95 * losses[0]
        assert "groups of layers not merged (ranks do not hold as many rows each)" in summary
