"""Symptoms of mixtures of experts without each of their patches."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from fp8booster.colossal.moe.mixtral import split_experts
from tests.colossal.models import token_batch
from tests.colossal.moe.models import tiny_mixtral
from tests.colossal.symptom import Symptom
from tests.nn.experts.families import batch_of, tiny_mixture


def _trained(ep_size: int = 2, tp_size: int = 1, **arguments: Any) -> tuple[Any, Any, Any]:
    """Booster, model and optimizer after a step, experts on both ranks."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import MoeHybridParallelPlugin

    plugin = MoeHybridParallelPlugin(tp_size, 1, ep_size, **{"precision": "bf16", "zero_stage": 1} | arguments)
    booster = Booster(plugin=plugin)
    model = tiny_mixtral()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), 1e-2))
    tokens = token_batch(dist.get_rank() // tp_size)
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return booster, model, optimizer


def _late(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are still gathered."""
    return [parameter for parameter in model.parameters() if hasattr(parameter, "_all_gather_handle")]


def _overlap_gathers() -> None:
    _, model, _ = _trained(overlap_allgather=True)
    tokens = token_batch(dist.get_rank())
    assert _late(model)
    model(input_ids=tokens)
    waiting = _late(model)
    for parameter in waiting:
        parameter._all_gather_handle.wait()
    assert not waiting, "a forward did not wait for its weights"


def _save_late_weights() -> None:
    booster, model, _ = _trained(overlap_allgather=True)
    assert _late(model)
    booster.save_model(model, _shared_folder(), shard=True)
    dist.barrier()
    waiting = _late(model)
    for parameter in waiting:
        parameter._all_gather_handle.wait()
    assert not waiting, "saved before they were there"


def _save_states() -> None:
    booster, _, optimizer = _trained()
    booster.save_optimizer(optimizer, _shared_folder(), shard=True)


def _save_all_experts_in_one_file() -> None:
    booster, model, _ = _trained(ep_size=1)
    errors: list[str | None] = [None] * dist.get_world_size()
    own = None
    try:
        with mock.patch.object(dist, "barrier"):  # at which others would wait for ever for one that failed
            found = booster.checkpoint_io.pre_save_model(model)
        names = dict(model.unwrap().named_parameters())
        assert found.keys() >= names.keys(), "other names"
        assert all(torch.equal(found[name], weight) for name, weight in names.items())
    except Exception as error:
        own = str(error)
    dist.all_gather_object(errors, own)  # the first rank alone gathers
    assert not any(errors), errors


def _save_states_of_one_holder() -> None:
    booster, _, optimizer = _trained()
    folder = _shared_folder()
    booster.save_optimizer(optimizer, folder, shard=True)
    dist.barrier()
    moments = [state["exp_avg"] for file in Path(folder).glob("*shard*.bin") for state in torch.load(file).values()]
    assert {moment.dim() for moment in moments} >= {2}
    of_experts = [moment for moment in moments if moment.numel() % (64 * 96) == 0]
    assert of_experts
    assert all(moment.dim() > 1 for moment in of_experts), "saved flat"


def _load_states_of_one_holder() -> None:
    booster, model, optimizer = _trained()
    folder = _shared_folder()
    booster.save_optimizer(optimizer, folder, shard=True)
    dist.barrier()
    booster.load_optimizer(optimizer, folder)
    tokens = token_batch(dist.get_rank())
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()


def _spread_another_family() -> None:
    from colossalai.booster.plugin import MoeHybridParallelPlugin

    from tests.colossal.hybrid.runs import start

    plugin = MoeHybridParallelPlugin(1, 1, 2, precision="bf16", zero_stage=1)
    start(plugin, tiny_mixture("Qwen3-MoE")).step(batch_of(dist.get_rank()))


def _save_whole_models() -> None:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import MoeHybridParallelPlugin

    booster = Booster(plugin=MoeHybridParallelPlugin(1, 1, 2, precision="bf16", zero_stage=1))
    model = tiny_mixture("Qwen3-MoE")
    whole = sum(parameter.numel() for parameter in model.parameters())
    model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    folder = _shared_folder()
    booster.save_model(model, folder, shard=True)
    dist.barrier()
    written = sum(each.numel() for file in Path(folder).glob("*.bin") for each in torch.load(file).values())
    assert written < 1.01 * whole, "written twice"


def _save_one_file() -> None:
    booster, model, _ = _trained()
    # what is not refused fails on all ranks at once: in Colossal-AI some would wait for others that failed
    model.state_dict = model.unwrap().state_dict = _unreadable
    refusal: Exception | None = None
    try:
        booster.save_model(model, f"{_shared_folder()}/model.bin")
    except Exception as error:
        refusal = error
    if not isinstance(refusal, ValueError) or "save with shard=True" not in str(refusal):
        raise AssertionError("not refused") from refusal


def _save_buffers() -> None:
    booster, model, _ = _trained()
    folder = _shared_folder()
    booster.save_model(model, folder, shard=True)
    dist.barrier()
    written = {name for file in Path(folder).glob("*.bin") for name in torch.load(file)}
    assert written == set(tiny_mixtral().state_dict()), "other keys"


def _save_adapters() -> None:
    from colossalai.checkpoint_io.utils import gather_state_dict_fast

    value = torch.ones(2)
    of_the_first = {"adapter": value} if dist.get_rank() == 0 else {}
    gathered = gather_state_dict_fast(of_the_first, dist.group.WORLD)
    assert gathered == ({"adapter": value} if dist.get_rank() == 0 else None)


def _share_sequences() -> None:
    refusal: Exception | None = None
    try:
        _trained(ep_size=1, sp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all")
    except Exception as error:
        refusal = error
    if "leave enable_sequence_parallelism out" not in str(refusal):
        raise AssertionError(f"not refused, but {refusal!r}") from refusal


def _spread_without_zero() -> None:
    refusal: Exception | None = None
    try:
        _trained(zero_stage=0)
    except Exception as error:
        refusal = error
    if "use zero_stage=1" not in str(refusal):
        raise AssertionError(f"not refused, but {refusal!r}") from refusal


def _clip_without_zero() -> None:
    _, _, optimizer = _trained(ep_size=1, tp_size=2, zero_stage=0, max_norm=0.1)
    norms: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(norms, optimizer.get_grad_norm())
    assert norms[0] == norms[1], f"ranks clip by different norms: {norms}"


def _size_micro_batches() -> None:
    from colossalai.booster.plugin import MoeHybridParallelPlugin

    from fp8booster.colossal.pipeline import zero_bubble_schedule
    from tests.colossal.hybrid.runs import start

    sizes = {"num_model_chunks": 2, "microbatch_size": 2, "overlap_p2p": False}
    nodes = zero_bubble_schedule(2, 4)
    plugin = MoeHybridParallelPlugin(1, 2, 1, precision="bf16", pp_style="zbv", scheduler_nodes=nodes, **sizes)
    start(plugin, tiny_mixtral(num_hidden_layers=4)).step(token_batch(0, batch=8))


def _pipe() -> None:
    from colossalai.shardformer.modeling.mixtral import MixtralPipelineForwards

    model = tiny_mixtral()
    split_experts(model, None)
    stage = SimpleNamespace(is_first_stage=lambda: True, is_last_stage=lambda: True)
    tokens = token_batch(0)
    with torch.no_grad():
        found = MixtralPipelineForwards.mixtral_for_causal_lm_forward(
            model, tokens, torch.ones_like(tokens), labels=tokens, stage_manager=stage, stage_index=[0, 2]
        )
        torch.testing.assert_close(found.loss, model(tokens, labels=tokens).loss)


def _boost_by_hybrid_parallelism() -> None:
    from tests.colossal.hybrid.runs import native, start

    start(native("TP2"), tiny_mixtral())


def _train_sharded() -> None:
    _trained(ep_size=1, tp_size=2)


def _unreadable(*args: object, **named: object) -> None:
    raise RuntimeError("read")


def _shared_folder() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


_STACKED = "evenly distributed"
"""In transformers 5, where all experts are one parameter."""
_IS_STACKED = not version("transformers").startswith("4.")

SYMPTOMS = {
    "moe_passes_the_size_of_micro_batches_on": Symptom(_size_micro_batches, "'NoneType'"),
    "moe_waits_for_gathered_weights": Symptom(_overlap_gathers, "did not wait for its weights"),
    "moe_spreads_experts_with_zero_alone": Symptom(_spread_without_zero, "not refused"),
    "moe_without_zero_clips_by_the_whole_norm": Symptom(_clip_without_zero, "ranks clip by different norms"),
    "moe_waits_before_saving": Symptom(_save_late_weights, "saved before they were there"),
    "moe_states_are_gathered_on_cpu": Symptom(
        _save_states, "NVIDIA driver" if torch.backends.cuda.is_built() else "not compiled with CUDA"
    ),
    "moe_saves_the_names_of_the_model": Symptom(_save_all_experts_in_one_file, "other names"),
    "moe_models_are_gathered_on_cpu": Symptom(
        _save_all_experts_in_one_file, "NVIDIA driver" if torch.backends.cuda.is_built() else "not compiled with CUDA"
    ),
    "moe_gathers_states_of_all_experts": Symptom(_save_states_of_one_holder, _STACKED if _IS_STACKED else "saved flat"),
    "moe_divides_states_of_all_experts": Symptom(
        _load_states_of_one_holder, _STACKED if _IS_STACKED else "must match the size of tensor b"
    ),
    "moe_writes_each_weight_once": Symptom(_save_whole_models, "written twice"),
    "ranks_without_adapters_send_none": Symptom(_save_adapters, "list index out of range"),
    "mixtures_have_a_policy": Symptom(_spread_another_family, "is not implemented"),
    "moe_saves_spread_experts_in_shards": Symptom(_save_one_file, "not refused"),
    "moe_saves_what_a_state_dict_holds": Symptom(_save_buffers, "other keys"),
    # of transformers 5 alone
    "hybrid_parallel_plugin_splits_experts": Symptom(_boost_by_hybrid_parallelism, "without tensor parallelism"),
    "moe_hybrid_parallel_plugin_splits_experts": Symptom(_train_sharded, "without tensor parallelism"),
    "mixtral_policies_know_the_block": Symptom(_train_sharded, "block_sparse_moe"),
    "mixtral_has_one_body": Symptom(_pipe, "Error"),
    "mixtral_blocks_return_their_output": Symptom(_train_sharded, "'tuple'"),
    "mixtral_along_a_sequence_is_refused": Symptom(_share_sequences, "not refused"),
}
