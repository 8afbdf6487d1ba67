"""Decoder layers that FSDP2 shards, replayed as CUDA graphs, on two gloo ranks and on two GPUs."""

from __future__ import annotations

import math
import os
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as shard_by_torch

from fp8booster import FP8Config, convert_to_fp8, fully_shard, fuse
from fp8booster.comm import Encoding
from fp8booster.comm.fsdp import fsdp_units
from fp8booster.nn.distributed import follow_fsdp2
from fp8booster.nn.fsdp import units
from fp8booster.nn.fsdp.bookkeeping import FP8FSDPParam
from fp8booster.nn.fsdp.units import params_of
from fp8booster.nn.graphs import captured_layers, free_graphs, layer, recorder
from fp8booster.nn.graphs.layer import WARM_UP
from fp8booster.nn.graphs.pair import GraphPair
from fp8booster.nn.graphs.recorder import Recorder
from tests.distributed import run_ranks
from tests.nn.fused.models import batch, build
from tests.nn.graphs.rerun import Rerun

LAYERS = 3
STEPS = WARM_UP + 2
PRODUCTS = 4  # of a layer: q, k and v are one, gate and up
READS = "it reads values of weights that are gathered in FP8 alone"
MOVES = "a weight is gathered elsewhere each time"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"family": "qwen2"},
    "whole after forward": {"reshard_after_forward": False},
}


def sharded(device: torch.device, graphs: bool, family: str = "llama", **how: Any) -> nn.Module:
    model = build(family, num_hidden_layers=LAYERS, use_cache=False).to(device)
    return fully_shard(model, FP8Config(always=True, cuda_graphs=graphs), **how)


def places(model: nn.Module) -> int:
    """Count the places that the weights of one kind of layer are gathered into."""
    params = [param for unit in fsdp_units(model) for param in params_of(unit) if isinstance(param, FP8FSDPParam)]
    down = [param for param in params if param._param_fqn.endswith("down_proj.weight")]
    return len({param.all_gather_outputs[0].untyped_storage().data_ptr() for param in down})


def trained(
    model: nn.Module,
    device: torch.device,
    micro_batches: int = 1,
    held: nn.Module | None = None,
    keeps_whole: Literal["after backward", "in evaluation"] | None = None,
) -> list[Any]:
    """Train, and evaluate after each step.

    Args:
        model, device: its layers are sharded.
        micro_batches: of a step.
        held: gathered by hand before each backward, and held.
        keeps_whole: when layers are not sharded again, between the backwards of a step or over an evaluation.

    Returns:
        Losses, norms of gradients and logits.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    ids = batch()[dist.get_rank() % 2][None].to(device)
    found: list[Any] = []
    for _ in range(STEPS):
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            if keeps_whole == "after backward":
                model.set_reshard_after_backward(micro == micro_batches - 1)
            loss = model(input_ids=ids.roll(micro), labels=ids.roll(micro)).loss
            if held is not None:
                held.unshard()
            loss.backward()
            found.append(loss.item())
        found += [each.grad.to_local().float().norm().item() for each in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if keeps_whole == "in evaluation":
            model.set_reshard_after_forward(False)
        with torch.no_grad():
            found.append(model(input_ids=ids).logits.norm().item())
        if keeps_whole == "in evaluation":
            model.set_reshard_after_forward(True)
            for unit in fsdp_units(model):
                unit.reshard()
    return found


def outcome(models: list[nn.Module], device: torch.device) -> dict[str, Any]:
    """Train a model without graphs and one with them."""
    return {"trained": [trained(model, device) for model in models], "captured": dict(captured_layers(models[1]))}


def by_hand(device: torch.device) -> dict[str, Any]:
    """Gather all layers at once between two runs, and then one during the backward of another."""
    models = [sharded(device, graphs) for graphs in (False, True)]
    for model in models:
        trained(model, device)
        for act in ("unshard", "reshard"):
            for unit in model.model.layers:
                getattr(unit, act)()
    found = outcome(models, device) | {"places": places(models[1])}
    model = sharded(device, True)
    trained(model, device)
    try:
        trained(model, device, held=model.model.layers[0])
    except RuntimeError as error:
        found["held"] = str(error)
    return found


def kept_whole(device: torch.device) -> dict[str, Any]:
    """Let torch keep layers whole for a time, when they are graphs and before; and then no longer."""
    models = [sharded(device, graphs) for graphs in (False, True)]
    found: list[list[Any]] = []
    for model in models:
        runs = trained(model, device, 2, keeps_whole="after backward") + trained(model, device, 2)
        runs += trained(model, device, 2, keeps_whole="after backward") + trained(model, device)
        runs += trained(model, device, keeps_whole="in evaluation") + trained(model, device)
        found.append(runs)
    return {"trained": found, "captured": dict(captured_layers(models[1])), "places": places(models[1])}


def readers(device: torch.device) -> dict[str, Any]:
    """Let layers read a weight themselves, as DoRA does."""
    models = [sharded(device, graphs) for graphs in (False, True)]
    for model in models:
        for each in model.model.layers:
            mlp = each.mlp

            def forward(x: torch.Tensor, mlp: nn.Module = mlp, product: Any = mlp.forward) -> torch.Tensor:
                return product(x) / mlp.down_proj.weight.float().norm().to(x.dtype)

            mlp.forward = forward
    return outcome(models, device)


def shared_layer(device: torch.device) -> dict[str, Any]:
    """Let the last layer be the first one once more."""
    models = []
    for graphs in (False, True):
        model = build(num_hidden_layers=LAYERS, use_cache=False).to(device)
        model.model.layers[-1] = model.model.layers[0]
        models.append(fully_shard(model, FP8Config(always=True, cuda_graphs=graphs)))
    return outcome(models, device)


def checkpointed(device: torch.device, by_torch: bool) -> dict[str, Any]:
    """Train a model whose layers are in torch's wrappers before they are sharded, and packed sequences; and without."""
    models = []
    for wrapped in (False, True):
        model = build(num_hidden_layers=LAYERS, use_cache=False).to(device)
        config = FP8Config(always=True, cuda_graphs=True)
        if by_torch:
            fuse(convert_to_fp8(model, config))
        if wrapped:
            for number, each in enumerate(model.model.layers):
                model.model.layers[number] = checkpoint_wrapper(each, preserve_rng_state=False)
        if by_torch:
            for unit in (*model.model.layers, model):
                shard_by_torch(unit, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            follow_fsdp2(model, Encoding())
        else:
            fully_shard(model, config)
        models.append(model)
    found = outcome(models, device)
    length = batch().shape[1]
    places = torch.cat([torch.arange(12), torch.arange(length - 12)])[None].to(device)
    ids = batch()[:1].to(device)
    found["packed"] = [model(input_ids=ids, labels=ids, position_ids=places).loss.item() for model in models]
    return found


def moving(device: torch.device, by_torch: bool, at_once: bool = False) -> dict[str, Any]:
    """Leave a large weight of each layer in 16 bits, or let torch shard the model, by layers or all of them at once."""
    models = []
    for graphs in (False, True):
        model = build(num_hidden_layers=LAYERS).to(device)
        layers = {} if by_torch else {"layers": lambda name, _: "down_proj" not in name and "head" not in name}
        config = FP8Config(always=True, cuda_graphs=graphs, **layers)
        if by_torch:
            fuse(convert_to_fp8(model, config))
            for unit in (*([model.model] if at_once else model.model.layers), model):
                shard_by_torch(unit)
        else:
            fully_shard(model, config)
        models.append(model)
    return outcome(models, device)


def as_accelerate_does(device: torch.device) -> dict[str, Any]:
    """Shard models that were fused before by torch's function, and let FP8 layers follow that; under autocast."""
    models = []
    for graphs in (False, True):
        model = build(num_hidden_layers=LAYERS, use_cache=False).to(device)
        fuse(convert_to_fp8(model, FP8Config(always=True, cuda_graphs=graphs)))
        for unit in (*model.model.layers, model):
            shard_by_torch(unit, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        follow_fsdp2(model, Encoding())
        models.append(model)
    with torch.autocast(device.type, torch.bfloat16):
        return outcome(models, device) | {"places": places(models[1])}


def everything(kind: str) -> dict[str, Any]:
    device = torch.device(kind, dist.get_rank() if kind == "cuda" else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "ROOM", -(2**50))
        given_as: list[str] = []

        def pair(*arguments: Any, gradients: str, **named: Any) -> GraphPair:
            given_as.append(gradients)
            return GraphPair(*arguments, gradients=gradients, **named)

        patch.setattr(layer, "GraphPair", pair)
        records: list[Any] = []

        def recorder_for(device: torch.device) -> Any:
            records.append(Rerun() if kind == "cpu" else Recorder(device))
            return records[-1]

        patch.setattr(recorder, "recorder_for", recorder_for)
        found: dict[str, Any] = {}
        for name, how in CASES.items():
            models = [sharded(device, graphs, **how) for graphs in (False, True)]
            found[name] = outcome(models, device) | {"places": places(models[1])}
            found[name]["gradients"] = [each.memory.shape for each in records[-1]._shared.values()]
        found["micro-batches"] = {
            "trained": [trained(model, device, micro_batches=2) for model in models],
            "captured": dict(captured_layers(models[1])),
        }
        models = [sharded(device, graphs and dist.get_rank() == 0) for graphs in (False, True)]
        found["on one rank"] = outcome(models, device)
        found["by hand"] = by_hand(device)
        found["kept whole"] = kept_whole(device)
        found["as accelerate does"] = as_accelerate_does(device)
        found["gradients"] = given_as
        if kind == "cpu":
            found["shared layer"] = shared_layer(device)
            found["by torch, at once"] = moving(device, by_torch=True, at_once=True)
            for by_torch in (False, True):
                found["checkpointed", by_torch] = checkpointed(device, by_torch)
        found["readers"] = readers(device)
        if kind == "cpu" or hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            found["experts"] = outcome([sharded(device, graphs, "mixtral") for graphs in (False, True)], device)
        patch.setattr(units, "_SMALL", 100)
        found["moving"], found["by torch"] = (moving(device, by_torch) for by_torch in (False, True))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(everything, 2, "cpu")


def check_bits(found: dict[str, Any]) -> None:
    eager, replayed = found["trained"]
    assert eager == replayed
    assert found["captured"] == {None: LAYERS}


def check_by_hand(found: dict[str, Any]) -> None:
    eager, replayed = found["trained"]
    assert eager == replayed
    assert found["places"] == 2
    assert found["captured"] == {None: LAYERS}  # the third too, which found the first in its place
    assert "call reshard() on such a layer" in found["held"]


@pytest.mark.parametrize("case", [*CASES, "micro-batches", "kept whole", "as accelerate does"])
def test_replayed_layers_compute_the_bits_of_eager_ones(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        check_bits(rank[case])


def test_ranks_that_replay_train_with_ranks_that_do_not(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        eager, found = rank["on one rank"]["trained"]
        assert eager == found
    assert [rank["on one rank"]["captured"] for rank in ranks] == [{None: LAYERS}, {}]


def test_layers_are_gathered_into_two_places_by_turns(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["plain"]["places"] == rank["as accelerate does"]["places"] == 2
        assert rank["whole after forward"]["places"] == LAYERS


def test_a_layer_that_runs_twice_is_sharded_once(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        eager, replayed = rank["shared layer"]["trained"]
        assert not any(math.isnan(each) for each in eager)
        assert eager == replayed
        assert rank["shared layer"]["captured"] == {None: LAYERS - 1}


@pytest.mark.parametrize("by_torch", [False, True])
def test_layers_in_wrappers_that_checkpoint_them_compute_the_same_and_get_packed_sequences(
    ranks: list[dict[str, Any]], by_torch: bool
) -> None:
    for rank in ranks:
        found = rank["checkpointed", by_torch]
        check_bits(found)
        assert found["packed"][0] == found["packed"][1]


def test_no_rank_keeps_places_for_the_gradients_of_whole_layers(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["gradients"]) > LAYERS
        assert set(rank["gradients"]) == {"shared", "copied"}
        assert len(rank["plain"]["gradients"]) == PRODUCTS


def test_layers_come_back_to_their_places_when_the_program_no_longer_keeps_others_there(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert rank["kept whole"]["places"] == 2


def test_what_is_gathered_by_hand_is_never_taken_for_another_and_comes_back(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        check_by_hand(rank["by hand"])


@pytest.mark.parametrize(
    ("case", "reason"), [("readers", READS), ("moving", MOVES), ("by torch", MOVES), ("by torch, at once", MOVES)]
)
def test_a_layer_that_reads_what_a_graph_would_not_find_runs_without(ranks: list[Any], case: str, reason: str) -> None:
    for rank in ranks:
        eager, others = rank[case]["trained"]
        assert not any(math.isnan(each) for each in eager)
        assert eager == others
        assert rank[case]["captured"] == {reason: LAYERS}


def test_experts_go_backward_after_other_layers_were_gathered_in_their_place(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        eager, replayed = rank["experts"]["trained"]
        assert eager == replayed


def over_nccl() -> dict[str, Any]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found = everything("cuda")
    free_graphs()  # NCCL gives up no communicator that a graph uses
    dist.destroy_process_group()
    return found


@pytest.mark.gpu
def test_on_two_gpus_replays_read_what_is_gathered() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for rank in run_ranks(over_nccl, 2, initialize=False, timeout=240):
        for case in (*CASES, "micro-batches", "kept whole", "as accelerate does"):
            check_bits(rank[case])
        assert rank["plain"]["places"] == 2
        assert len(rank["plain"]["gradients"]) == PRODUCTS
        check_by_hand(rank["by hand"])
