"""What goes wrong in Gemini without each patch of Gemini."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch import nn

from tests.colossal.models import tiny_llama, token_batch
from tests.colossal.symptom import Symptom


def boosted(model: nn.Module | None = None, **arguments: Any) -> tuple[Any, nn.Module, Any]:
    """Booster, model and optimizer of a native GeminiPlugin in BF16, with chunks small enough to be sharded."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin

    from fp8booster.optim import HybridAdam

    small = {"precision": "bf16", "min_chunk_size_m": 2**-10, "search_range_m": 0, "hidden_dim": 64}
    booster = Booster(plugin=GeminiPlugin(**small | arguments))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) if model is None else model
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
    return booster, model, optimizer


def _step(booster: Any, model: nn.Module, optimizer: Any) -> None:
    booster.backward(model(torch.full((4, 64), 1.0 + dist.get_rank())).square().sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def _boost_with_an_uncompiled_optimizer() -> None:
    boosted()


def _train() -> None:
    _step(*boosted())


def _clip_an_offloaded_gradient() -> None:
    from colossalai.nn.optimizer.hybrid_adam import HybridAdam
    from colossalai.nn.optimizer.nvme_optimizer import NVMeOptimizer

    moments = []
    for div_scale in (-1, 2.0):
        optimizer = HybridAdam.__new__(HybridAdam)  # past its constructor, which compiles what is not used here
        defaults = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "bias_correction": True}
        parameter = nn.Parameter(torch.zeros(4))
        NVMeOptimizer.__init__(optimizer, [parameter], defaults)
        optimizer.adamw_mode = True
        # as Gemini gives it: the gradient has another dtype than the parameter
        parameter.data = torch.ones(4, dtype=torch.bfloat16)
        parameter.grad = parameter.data
        parameter.data = torch.zeros(4)
        optimizer.step(div_scale=div_scale)
        moments.append(optimizer.state[parameter]["exp_avg"])
    assert torch.equal(moments[0], 2 * moments[1]), "div_scale is ignored"


def _accumulate_past_an_overflow() -> None:
    booster, model, optimizer = boosted(precision="fp16", initial_scale=2.0**30, enable_gradient_accumulation=True)
    before = model.state_dict(only_rank_0=False)
    _step(booster, model, optimizer)
    after = model.state_dict(only_rank_0=False)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not model.chunk_manager.accumulating_grads, "it goes on accumulating"


def _end_an_evaluation() -> None:
    """With a chunk on the way; a real one would be written after its memory was freed, which ends the process."""
    from colossalai.zero.gemini.gemini_ddp import GeminiDDP

    work = Mock()
    manager = SimpleNamespace(accessed_chunks=set(), accessed_mem=0)
    model = SimpleNamespace(gemini_manager=SimpleNamespace(async_works={"chunk": work}), chunk_manager=manager)
    GeminiDDP._post_forward(model)
    assert not model.gemini_manager.async_works, "chunks are on their way"
    work.wait.assert_called_once()


def _load_tied_weights() -> None:
    _, model, _ = boosted(tiny_llama(tie_word_embeddings=True))
    state = model.state_dict(only_rank_0=False)
    embeddings = 2 * state["model.embed_tokens.weight"]
    tied = {"model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings}
    model.load_state_dict({**state, **tied})
    loaded = model.state_dict(only_rank_0=False)["model.embed_tokens.weight"]
    assert torch.equal(loaded, embeddings)


def _accumulate_in_a_gathered_chunk() -> None:
    moments = []
    for micro_batches in (1, 2):
        booster, model, optimizer = boosted(min_chunk_size_m=32, enable_gradient_accumulation=True)
        for _ in range(micro_batches):
            loss = model(torch.full((4, 64), 1.0 + dist.get_rank())).square().sum()
            booster.backward(loss / micro_batches, optimizer)
        optimizer.step()
        moments.append(optimizer.state_dict(only_rank_0=False)["state"][0]["exp_avg"])
    assert torch.allclose(*moments, rtol=0.02), "earlier micro-batches weigh more"


def _collect_tensor_parallel_states() -> None:
    model = tiny_llama()
    shapes = [parameter.shape for parameter in model.parameters()]
    booster, model, optimizer = boosted(model, tp_size=2)
    tokens = token_batch(0)
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    states = optimizer.state_dict(only_rank_0=False)["state"]
    assert [state["exp_avg"].shape for state in states.values()] == shapes


def _lose_over_a_sharded_vocabulary() -> None:
    from colossalai.shardformer.layer.loss import cross_entropy_1d
    from colossalai.tensor.colo_tensor import ColoTensor

    labels = torch.tensor([1, 9, 3, 12])
    logits = torch.arange(64.0).sin().view(4, 16).requires_grad_()
    nn.functional.cross_entropy(logits, labels).backward()
    own = logits.detach().chunk(2, -1)[dist.get_rank()].clone().requires_grad_()
    sharded = own * 1.0
    sharded.__class__ = ColoTensor
    group = dist.group.WORLD
    loss = cross_entropy_1d(sharded, labels, process_group=group, vocab_size=16, dtype=torch.float32)
    loss.backward()
    expected = logits.grad.chunk(2, -1)[dist.get_rank()]
    assert torch.allclose(own.grad, expected, atol=1e-6), "the gradient is not that of the mean"


def _lose_own_tokens() -> None:
    from colossalai.shardformer import ShardConfig
    from colossalai.shardformer.layer.loss import dist_cross_entropy

    generator = torch.Generator().manual_seed(dist.get_rank())
    logits, labels = torch.randn(2, 8, 16, generator=generator), token_batch(dist.get_rank(), length=8) % 16
    config = ShardConfig(enable_tensor_parallelism=False)
    expected = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 16), labels[:, 1:].reshape(-1))
    loss = dist_cross_entropy(labels, logits, config, 16, torch.float32)
    assert torch.allclose(loss, expected), "tokens of other ranks count"


def _yield_states() -> None:
    booster, model, optimizer = boosted()
    _step(booster, model, optimizer)
    assert list(model.state_dict_shard(pinned_state_dicts={}))
    assert list(optimizer.state_shard(pinned_state_dicts={}))


def _measure_memory() -> None:
    from colossalai.legacy.utils.memory import colo_get_cpu_memory_capacity
    from colossalai.zero.gemini.memory_tracer.memory_monitor import SyncCudaMemoryMonitor

    monitor = SyncCudaMemoryMonitor()
    monitor.start()
    assert 0 < monitor.finish() < colo_get_cpu_memory_capacity()


def _ask_for_capacity() -> None:
    from colossalai.legacy.utils.memory import colo_device_memory_capacity

    assert colo_device_memory_capacity(torch.device("cpu")) > 0, "less than no memory"


SYMPTOMS = {
    "gemini_loads_tied_weights": Symptom(_load_tied_weights, "Unexpected key"),
    "gemini_takes_an_uncompiled_optimizer": Symptom(
        _boost_with_an_uncompiled_optimizer, "You should use an optimizer in the available list"
    ),
    "offloaded_gradients_are_scaled": Symptom(_clip_an_offloaded_gradient, "div_scale is ignored"),
    "gemini_forgets_gradients_that_overflowed": Symptom(_accumulate_past_an_overflow, "it goes on accumulating"),
    "evaluation_leaves_nothing_on_the_way": Symptom(_end_an_evaluation, "chunks are on their way"),
    "accumulated_gradients_count_once": Symptom(_accumulate_in_a_gathered_chunk, "earlier micro-batches weigh more"),
    "tensor_parallel_states_are_gathered": Symptom(
        _collect_tensor_parallel_states, "two sharding specs with different length"
    ),
    "loss_of_a_sharded_vocabulary_scales_its_gradient": Symptom(
        _lose_over_a_sharded_vocabulary, "the gradient is not that of the mean"
    ),
    "loss_is_of_the_ranks_own_tokens": Symptom(_lose_own_tokens, "tokens of other ranks count"),
    "gemini_runs_on_cpu": Symptom(_train, "pin_memory=True requires"),
    "gemini_states_are_not_pinned": Symptom(_yield_states, "pin_memory=True requires"),
    "gemini_measures_memory_on_cpu": Symptom(
        _measure_memory, "NVIDIA driver" if torch.backends.cuda.is_built() else "not compiled with CUDA"
    ),
    "memory_of_the_cpu_is_shared": Symptom(_ask_for_capacity, "less than no memory"),
}
