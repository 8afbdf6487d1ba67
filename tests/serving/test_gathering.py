"""Models of which each rank holds a part, or that an engine wraps, handed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp8booster import FP8Config, convert_to_fp8, export, fuse, quantize
from fp8booster.config import WeightCopies
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.scaling import WEIGHT
from fp8booster.serving import tensors
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks, shared_folder
from tests.nn.fsdp.resharding import follow_resharding
from tests.serving.folders import bits, equal, files

CONFIG = FP8Config(always=True)


def seen_in_forward(model: Any, tokens: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Run a model forward and backward; return the bytes and scales that its weights were cast to, by their names."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    names = {layer: f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, FP8Layer)}

    def observe(one: Any, layers: Any) -> None:
        def note(role: str, _: torch.Tensor, made: Any) -> None:
            if role == WEIGHT and made.data.numel():
                for layer, part in zip(layers, made.data.split([each.out_features for each in layers]), strict=True):
                    seen[names[layer]] = part.clone(), made.inverse_scale.clone()

        one.fp8_casts.observers.append(note)

    for layer in names:
        observe(layer, [layer])
    for merged in merged_layers(model):
        observe(merged, merged.layers)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return seen


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounded", [True, False], ids=["gathered in BF16", "gathered as it is"])
def test_shards_of_fsdp2_are_handed_over_as_the_layers_cast_them(dtype: torch.dtype, rounded: bool) -> None:
    model = convert_to_fp8(tiny_llama().to(dtype), CONFIG)
    fuse(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if rounded else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    follow_resharding(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = dict(tensors(model, "tensorwise"))  # an engine is given weights before the first step too
    for step in range(2):
        tokens = token_batch(10 * step + dist.get_rank())
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    handed = dict(tensors(model, "tensorwise"))
    assert {name: each.dtype for name, each in before.items()} == {name: each.dtype for name, each in handed.items()}
    seen = seen_in_forward(model, token_batch(5))
    assert len(seen) == 14
    for name, (data, inverse_scale) in seen.items():
        assert torch.equal(bits(handed[name]), bits(data)), name
        assert handed[f"{name}_scale_inv"] == inverse_scale
    norm = model.model.norm.weight.full_tensor()
    assert torch.equal(handed["model.norm.weight"], norm.bfloat16())
    with pytest.raises(ValueError, match=r"each rank holds a part .* hand it to an engine by fp8booster\.serving\.ten"):
        export(model, shared_folder("fsdp2") / "out", format="tensorwise")


@ranks(2)
@pytest.mark.parametrize("values", [True, False], ids=["values in 16 bits", "none"])
@pytest.mark.parametrize("communication", [True, False], ids=["FP8 sent", "16 bits sent"])
def test_zero_hands_over_the_bytes_that_ranks_gathered(communication: bool, values: bool) -> None:
    from tests.plugins.training import boost, fp8, train

    config = FP8Config(always=True, weight_copies=WeightCopies(high_precision=values))
    run = boost(fp8(fp8_communication=communication, fp8_config=config, overlap_allgather=True))
    train(run, steps=2)
    model = run.model.unwrap()
    layers = {f"{name}.weight": each for name, each in model.named_modules() if isinstance(each, FP8Layer)}
    released = [not any(layer.held_weight.stride()) for layer in layers.values()]
    assert released == [communication and not values] * 14
    # the ranks by turns: none waits for the other
    for rank in range(2):
        if dist.get_rank() == rank:
            handed = {name: value.clone() for name, value in tensors(run.model, "tensorwise")}
        dist.barrier()
    assert [not any(layer.held_weight.stride()) for layer in layers.values()] == released
    assert equal(dict(tensors(model, "tensorwise")), handed)
    if not communication:
        seen = seen_in_forward(model, token_batch(5))
    else:
        held = {name: layer.fp8_weight.held for name, layer in layers.items()}
        seen = {name: (each.data, each.inverse_scale) for name, each in held.items()}
    assert len(seen) == 14
    for name, (data, inverse_scale) in seen.items():
        assert torch.equal(bits(handed[name]), bits(data)), name
        assert handed[f"{name}_scale_inv"] == inverse_scale


@ranks(2)
@pytest.mark.parametrize("format", ["bf16", "tensorwise", "compressed-tensors"])
def test_tensor_parallel_ranks_hand_over_the_whole_model(format: str) -> None:
    from tests.colossal.hybrid.runs import fp8, start

    # a vocabulary that ranks pad
    run = start(fp8("TP2", fp8_config=CONFIG), tiny_llama(vocab_size=250))
    tokens = token_batch(3)
    run.step(tokens)
    handed = {name: value.clone() for name, value in tensors(run.model, format)}
    folder = shared_folder(f"tensor parallel {format}")
    run.booster.save_model(run.model, str(folder / "model"), shard=True, use_safetensors=True)
    dist.barrier()
    if dist.get_rank() == 0:
        tiny_llama(vocab_size=250).config.save_pretrained(folder / "model")
        export(folder / "model", folder / "out", format=format, config=CONFIG)
        assert equal(handed, files(folder / "out"))
    dist.barrier()


@ranks(2)
def test_a_stage_of_a_pipeline_is_refused() -> None:
    from tests.colossal.hybrid.runs import fp8, start

    run = start(fp8("PP2 1f1b", fp8_config=CONFIG))
    with pytest.raises(
        ValueError, match=r"is none in this process, and \[.*give a whole model, as booster\.save_model"
    ):
        tensors(run.model, "tensorwise")


@ranks(2)
def test_engines_that_lay_parameters_into_memory_of_their_own_are_refused() -> None:
    from tests.colossal.gemini.runs import ours
    from tests.plugins.training import boost

    run = boost(ours())
    for model in (run.model, FullyShardedDataParallel(tiny_llama(), device_id=torch.device("cpu"))):
        with pytest.raises(
            ValueError, match=r"lays parameters into memory of its own; save it with booster\.save_model"
        ):
            tensors(model, "tensorwise")


@ranks(2)
def test_a_model_within_ddp_is_handed_over() -> None:
    model: nn.Module = convert_to_fp8(tiny_llama().bfloat16(), CONFIG)
    assert equal(dict(tensors(DistributedDataParallel(model), "tensorwise")), dict(tensors(model, "tensorwise")))


@ranks(2)
def test_a_rank_that_trains_hands_over_to_one_that_generates_by_a_collective() -> None:
    """Rank 1 knows names, shapes and types from the first hand-over, and then receives bytes alone."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    model = convert_to_fp8(tiny_llama(**sizes).bfloat16(), CONFIG) if dist.get_rank() == 0 else None
    engine = quantize(tiny_llama(seed=1, **sizes).bfloat16()) if dist.get_rank() == 1 else None
    about: list[Any] = [None]
    if model is not None:
        about = [[(name, value.shape, value.dtype) for name, value in tensors(model, "tensorwise")]]
    dist.broadcast_object_list(about)
    handed = iter(tensors(model, "tensorwise")) if model is not None else None
    received = {}
    for name, shape, dtype in about[0]:
        value = torch.empty(shape, dtype=dtype) if handed is None else next(handed)[1]
        dist.broadcast(value.view(-1).view(torch.uint8), 0)
        received[name] = value.clone()
    if engine is not None:
        engine.load_state_dict(received)
        expected = dict(tensors(convert_to_fp8(tiny_llama(**sizes).bfloat16(), CONFIG), "tensorwise"))
        assert equal(dict(tensors(engine, "tensorwise")), expected)
