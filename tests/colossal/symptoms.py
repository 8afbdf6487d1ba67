"""One symptom for each patch, by its name; those of engines are in files of their own."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.colossal import (
    fp8_symptoms,
    fsdp_symptoms,
    gemini_symptoms,
    hybrid_symptoms,
    moe_symptoms,
    pipeline_symptoms,
    tensor_symptoms,
)
from tests.colossal.models import tiny_llama, token_batch
from tests.colossal.payload import Payload
from tests.colossal.symptom import Symptom


def boosted(stage: int, lora: Any = None) -> tuple[Any, nn.Module, Any]:
    """Booster, model and optimizer of a native LowLevelZeroPlugin in BF16; `lora` goes to enable_lora."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin

    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="bf16"))
    model = tiny_llama()
    if lora is not None:
        model = booster.enable_lora(model, **lora)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return booster, model, optimizer


def train(booster: Any, model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    tokens = token_batch(dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def error(show: Callable[[], None]) -> str | None:
    try:
        show()
    except Exception as error:
        return repr(error)
    return None


def _look_at_connections() -> None:
    import colossalai  # noqa: F401

    from fp8booster.colossal.compat.environment import CONNECTIONS

    if os.environ.get(CONNECTIONS) == "1":
        raise RuntimeError("all streams share one queue")


def _quantize_without_bitsandbytes() -> None:
    from colossalai.quantization import BnbQuantizationConfig, bnb

    with pytest.raises(ImportError, match="pip install bitsandbytes"):
        bnb.quantize_model(nn.Linear(4, 4), BnbQuantizationConfig(load_in_8bit=True))


def _name_types_where_weights_are_lazy() -> None:
    from colossalai.lazy import LazyInitContext

    tensors, ids = (torch.LongTensor, torch.FloatTensor), torch.tensor([3])
    with LazyInitContext():
        # as annotations of a module that is imported here
        assert (torch.LongTensor | None, str | torch.FloatTensor) == (tensors[0] | None, str | tensors[1])
        assert torch.LongTensor(ids) is ids
    assert (torch.LongTensor, torch.FloatTensor) == tensors


def _write_a_lazy_tensor_into_another() -> None:
    from colossalai.lazy import LazyInitContext

    with LazyInitContext():
        read, written = torch.ones(3), torch.zeros(3)
        written.copy_(read)
        written.add_(written).sub_(other=read)
    assert written.materialize().tolist() == read.materialize().tolist() == [1.0] * 3


def _ask_for_hccl() -> None:
    from colossalai.pipeline import p2p

    with pytest.MonkeyPatch.context() as monkeypatch:
        # As in a PyTorch that was built without CUDA.
        monkeypatch.setattr(p2p.c10d, "is_nccl_available", lambda: False)
        assert not p2p._check_for_nccl_hccl_backend(None)
        # as in one that was built with it, over gloo
        monkeypatch.setattr(p2p.c10d, "is_nccl_available", lambda: True)
        assert not p2p._check_for_nccl_hccl_backend(None)


def _count_ranks_of_a_node() -> None:
    from colossalai.quantization import fp8

    for variable, value, expected in (
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2", True),
        ("SLURM_TASKS_PER_NODE", "1(x2)", False),
        ("UNRELATED", "", True),
    ):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.delenv("LOCAL_WORLD_SIZE")
            monkeypatch.setenv(variable, value)
            assert fp8.process_group_is_intranode(None) is expected


def _boost() -> None:
    boosted(1)


def _overlap_reductions() -> None:
    train(*boosted(1), steps=1)


def _seed_tensor_parallel_layers() -> None:
    from colossalai.shardformer.layer.utils import Randomizer

    before = torch.get_rng_state()
    with Randomizer(seed=3).fork_rng():
        drawn = torch.rand(1)
    assert drawn == torch.rand(1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), before)


def _count_memory() -> None:
    from colossalai.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.empty_cache()
    ballast = torch.ones(64 * 2**20, dtype=torch.uint8)
    peak = accelerator.max_memory_allocated()
    assert min(peak, accelerator.memory_allocated()) > ballast.nbytes
    if Path("/proc/self/clear_refs").exists():
        del ballast
        accelerator.reset_peak_memory_stats()
        assert accelerator.max_memory_allocated() < peak - 32 * 2**20


def _use_the_accelerator() -> None:
    _count_memory()
    _boost()
    _seed_tensor_parallel_layers()


def _save_in_background() -> None:
    from colossalai.checkpoint_io import GeneralCheckpointIO

    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        io = GeneralCheckpointIO()
        io.save_model(model, f"{folder}/model.safetensors", use_safetensors=True, use_async=True)
        io._sync_io()
        io.load_model(nn.Linear(4, 4, dtype=torch.bfloat16), f"{folder}/model.safetensors")


def _load_through_pinned_memory() -> None:
    from colossalai.checkpoint_io import GeneralCheckpointIO

    with tempfile.TemporaryDirectory() as folder:
        torch.save(nn.Linear(4, 4).state_dict(), f"{folder}/model.bin")
        GeneralCheckpointIO().load_model(nn.Linear(4, 4), f"{folder}/model.bin", low_cpu_mem_mode=False)


def _gather_states_that_are_not_there() -> None:
    booster, model, optimizer = boosted(stage=1)
    train(booster, model, optimizer, steps=1)
    (group,) = optimizer.optim.param_groups
    del optimizer.optim.state[group["params"][0]]  # as of a layer that never got a gradient
    for _ in optimizer.state_dict_shard():
        pass


def _gather_optimizer_states() -> None:
    booster, model, optimizer = boosted(1)
    train(booster, model, optimizer, steps=1)
    assert optimizer.state_dict({})["state"]
    list(optimizer.state_dict_shard(pinned_state_dicts={}))


def _load_what_an_index_names_elsewhere() -> None:
    from colossalai.checkpoint_io import GeneralCheckpointIO

    with tempfile.TemporaryDirectory() as folder:
        torch.save(nn.Linear(4, 4).state_dict(), f"{folder}/secret.bin")
        os.mkdir(f"{folder}/checkpoint")
        index = {"metadata": {}, "weight_map": dict.fromkeys(("weight", "bias"), "../secret.bin")}
        Path(folder, "checkpoint", "model.index.json").write_text(json.dumps(index))
        found = error(lambda: GeneralCheckpointIO().load_model(nn.Linear(4, 4), f"{folder}/checkpoint"))
        assert found is not None, "it was read"
        assert "names a file outside of its folder, '../secret.bin': do not trust" in found


def _load_code() -> None:
    from colossalai.checkpoint_io import GeneralCheckpointIO

    io, layer = GeneralCheckpointIO(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/part.bin"
        torch.save({"weight": Payload(f"{folder}/ran")}, file)
        for load, target in ((io.load_model, layer), (io.load_optimizer, optimizer), (io.load_lr_scheduler, scheduler)):
            with pytest.raises(ValueError, match=r"part.bin asks for posix.mkdir, .* not trust") as caught:
                load(target, file)
            assert "weights_only" not in str(caught.value)
        assert not Path(folder, "ran").exists()


def _save_config() -> None:
    from colossalai.checkpoint_io import GeneralCheckpointIO

    with tempfile.TemporaryDirectory() as folder:
        GeneralCheckpointIO().save_model(tiny_llama(), folder, shard=True)
        assert {"config.json", "generation_config.json"} <= set(os.listdir(folder)), "config.json is missing"


def boosted_ddp(mixed_precision: str) -> tuple[Any, nn.Module, Any]:
    """Booster, model and optimizer of a native TorchDDPPlugin."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import TorchDDPPlugin

    booster = Booster(plugin=TorchDDPPlugin(), mixed_precision=mixed_precision)
    model = tiny_llama()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return booster, model, optimizer


def _train_ddp(mixed_precision: str, dtype: torch.dtype) -> None:
    booster, model, optimizer = boosted_ddp(mixed_precision)
    tokens = token_batch(dist.get_rank())
    assert model(input_ids=tokens).logits.dtype == dtype
    losses = train(booster, model, optimizer, steps=6)
    assert losses[-1] < 0.8 * losses[0], losses


def _train_ddp_in_bf16() -> None:
    _train_ddp("bf16", torch.bfloat16)


def _train_ddp_in_fp16() -> None:
    _train_ddp("fp16", torch.float16)


def _ask_for_fp8_precision() -> None:
    with pytest.raises(ValueError, match="'fp16' and 'bf16', and FP8 beside either by use_fp8=True"):
        boosted_ddp("fp8")


def _accumulate_under_mixed_precision() -> None:
    booster, model, optimizer = boosted_ddp("bf16")
    with booster.no_sync(model, optimizer):
        assert not model.module.module.require_backward_grad_sync
    assert model.module.module.require_backward_grad_sync


def _load_shards_of_fp16_optimizer() -> None:
    booster, model, optimizer = boosted_ddp("fp16")
    train(booster, model, optimizer, steps=1)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    booster.save_optimizer(optimizer, folder[0], shard=True)
    dist.barrier()
    other, _, loaded = boosted_ddp("fp16")
    other.load_optimizer(loaded, folder[0])


def _train_fsdp() -> None:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import TorchFSDPPlugin

    booster = Booster(plugin=TorchFSDPPlugin())
    model = tiny_llama()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1))
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert optimizer.defaults["decoupled_weight_decay"]
    losses = train(booster, model, optimizer, steps=6)
    assert losses[-1] < 0.8 * losses[0], losses


def _train_and_save_fsdp() -> None:
    _train_fsdp()
    fsdp_symptoms.save()


def _save_tied_weights() -> None:
    from colossalai.checkpoint_io.utils import save_state_dict
    from safetensors.torch import load_file

    weight = nn.Parameter(torch.ones(2, 3))
    with tempfile.TemporaryDirectory() as folder:
        save_state_dict({"first": weight, "second": weight}, f"{folder}/a.safetensors", use_safetensors=True)
        loaded = load_file(f"{folder}/a.safetensors")
    assert all(torch.equal(loaded[name], weight) for name in ("first", "second"))


def _load_shards_that_name_a_tied_weight_once() -> None:
    from colossalai.checkpoint_io.utils import load_state_dict_into_model

    model, missing = tiny_llama(tie_word_embeddings=True), []
    once = {name: 2 * value for name, value in model.named_parameters()}
    assert "lm_head.weight" not in once
    load_state_dict_into_model(model, once, missing, strict=True)
    assert torch.equal(model.lm_head.weight, once["model.embed_tokens.weight"])
    load_state_dict_into_model(
        model, {"model.norm.weight": once["model.norm.weight"]}, missing, strict=True
    )  # a shard without it
    assert {"model.embed_tokens.weight", "lm_head.weight"} < set(missing[1])
    assert missing[0] == [], f"missing: {missing[0]}"


SYMPTOMS = {
    "streams_have_queues_of_their_own": Symptom(_look_at_connections, "share one queue"),
    "quantized_lora_names_bitsandbytes": Symptom(_quantize_without_bitsandbytes, "NameError"),
    "lazy_constructors_are_types": Symptom(_name_types_where_weights_are_lazy, "unsupported operand type"),
    "lazy_tensors_are_read_without_being_written": Symptom(_write_a_lazy_tensor_into_another, "RecursionError"),
    "hccl_is_unavailable": Symptom(_ask_for_hccl, "is_hccl_available"),
    "ranks_of_a_node_are_counted": Symptom(_count_ranks_of_a_node, "KeyError('LOCAL_WORLD_SIZE')"),
    "cpu_accelerator_is_complete": Symptom(_use_the_accelerator, "not supported for cpu accelerator"),
    "zero_runs_on_cpu": Symptom(_boost, "device is required"),
    "zero_overlaps_without_streams": Symptom(_overlap_reductions, "unknown parameter type"),
    "async_save_without_tensornvme": Symptom(_save_in_background, "AsyncFileWriter"),
    "cpu_memory_is_not_pinned": Symptom(_load_through_pinned_memory, "Cannot access accelerator device"),
    "cpu_optimizer_states_are_not_pinned": Symptom(_gather_optimizer_states, "pin_memory=True requires"),
    "states_are_saved_of_what_was_stepped": Symptom(_gather_states_that_are_not_there, "KeyError"),
    "tied_weights_are_saved_from_the_cpu": Symptom(_save_tied_weights, "share memory"),
    "shards_name_a_tied_weight_once": Symptom(_load_shards_that_name_a_tied_weight_once, "missing: ['lm_head.weight']"),
    "an_index_names_files_of_its_folder": Symptom(_load_what_an_index_names_elsewhere, "it was read"),
    "a_file_with_code_is_not_to_be_trusted": Symptom(_load_code, "UnpicklingError"),
    "sharded_checkpoint_keeps_its_config": Symptom(_save_config, "config.json is missing"),
    "bf16_autocasts": Symptom(_train_ddp_in_bf16, "abstract class BF16MixedPrecision"),
    "cpu_autocasts": Symptom(_train_ddp_in_fp16, "context manager protocol"),
    "no_sync_reaches_ddp_under_mixed_precision": Symptom(
        _accumulate_under_mixed_precision, "Model is not boosted by TorchDDPPlugin"
    ),
    "empty_precisions_are_refused": Symptom(_ask_for_fp8_precision, "abstract class FP8MixedPrecision"),
    "fsdp_makes_optimizers_anew": Symptom(_train_fsdp, "decoupled_weight_decay"),
    "fsdp_runs_on_cpu": Symptom(
        _train_and_save_fsdp, "NVIDIA driver" if torch.backends.cuda.is_built() else "not compiled with CUDA"
    ),
    "fp16_optimizer_is_unwrapped_wholly": Symptom(_load_shards_of_fp16_optimizer, "has no attribute 'state'"),
    **fp8_symptoms.SYMPTOMS,
    **fsdp_symptoms.SYMPTOMS,
    **moe_symptoms.SYMPTOMS,
    **pipeline_symptoms.SYMPTOMS,
    **gemini_symptoms.SYMPTOMS,
    **hybrid_symptoms.SYMPTOMS,
    **tensor_symptoms.SYMPTOMS,
}
