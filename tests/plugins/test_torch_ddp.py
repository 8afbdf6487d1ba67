"""`TorchDDPPlugin`: without `use_fp8` it is Colossal-AI's plugin, with it products and gradients are in FP8."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, FP8Linear, comm, convert_to_fp8, fuse
from fp8booster.comm import Encoding, ddp_hook
from fp8booster.comm.links import ESTIMATED
from fp8booster.monitor.traffic import count_traffic
from fp8booster.nn.weights.casting import Casts
from fp8booster.optim import AdamW
from tests.colossal.models import tiny_llama
from tests.distributed import ranks, shared_folder
from tests.nn.reference import count_calls
from tests.plugins.test_low_level_zero_census import census, products
from tests.plugins.test_low_level_zero_convergence import SCHEDULE, STEPS, WITHIN, learn, learner, text
from tests.plugins.test_low_level_zero_lora import lora_config
from tests.plugins.training import (
    Boosted,
    Outcome,
    assert_close,
    assert_equal,
    assert_same_outcome,
    assert_trains_equally,
    boost,
    outcome,
    rank_batches,
    train,
)
from tests.plugins.training import fp8 as fp8_zero

if TYPE_CHECKING:
    from colossalai.booster.plugin import TorchDDPPlugin as NativePlugin

    from fp8booster.plugins import TorchDDPPlugin

LAYERS = 14
"""Linear layers of `tiny_llama` beside the vocabulary head."""

CLOSE = 1e-2
"""How far a loss in FP8 may lie from that in high precision, in the first steps of `tiny_llama`."""

PRECISIONS = (None, "bf16", "fp16")
"""For `Booster(mixed_precision=...)`."""

OPTIONS: dict[str, Any] = {
    "broadcast_buffers": False,
    "bucket_cap_mb": 0.01,
    "find_unused_parameters": True,
    "check_reduction": True,
    "gradient_as_bucket_view": True,
    "static_graph": True,
}
"""For every argument of Colossal-AI's plugin but `fp8_communication`, a value that is not its default."""

MIB = 2**20


def native(**arguments: Any) -> NativePlugin:
    """Colossal-AI's plugin."""
    from colossalai.booster.plugin import TorchDDPPlugin

    return TorchDDPPlugin(**arguments)


def ours(*positional: Any, **arguments: Any) -> TorchDDPPlugin:
    """This project's plugin."""
    from fp8booster.plugins import TorchDDPPlugin

    return TorchDDPPlugin(*positional, **arguments)


def fp8(**arguments: Any) -> TorchDDPPlugin:
    """This project's plugin with products and gradients in FP8."""
    return ours(**{"use_fp8": True} | arguments)


def plain_wire(**arguments: Any) -> TorchDDPPlugin:
    """This project's plugin with products in FP8 and gradients in high precision."""
    return fp8(fp8_communication=False, **arguments)


# ---- without use_fp8 ----


@ranks(2)
def test_ddp_tries_every_argument_of_the_native_plugin() -> None:
    names = list(inspect.signature(type(native()).__init__).parameters)[1:]
    assert names == [*OPTIONS, "fp8_communication"]


@ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
def test_ddp_without_fp8_trains_as_the_native_plugin(option: str) -> None:
    arguments = {option: OPTIONS[option]}
    theirs, mine = native(**arguments), ours(**arguments)
    assert theirs.ddp_kwargs == mine.ddp_kwargs
    assert_trains_equally(boost(theirs), boost(mine), micro_batches=2)


@ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ddp_without_fp8_leaves_the_precision_to_booster(precision: str) -> None:
    runs = (boost(plugin, mixed_precision=precision) for plugin in (native(), ours()))
    assert_trains_equally(*runs, micro_batches=2, no_sync=True)


@ranks(2)
def test_ddp_by_position_means_what_it_means_in_the_native_plugin() -> None:
    assert ours(*OPTIONS.values()).ddp_kwargs == native(**OPTIONS).ddp_kwargs
    assert ours(*OPTIONS.values(), True).fp8_communication


@ranks(2)
def test_ddp_without_fp8_compresses_by_the_native_hook_alone() -> None:
    from colossalai.quantization.fp8 import fp8_compress_ddp_grad_comm_hook_async

    for plugin, hook in (
        (native(fp8_communication=True), fp8_compress_ddp_grad_comm_hook_async),
        (ours(fp8_communication=True), fp8_compress_ddp_grad_comm_hook_async),
        (fp8(), ddp_hook),
        (fp8(fp8_communication=True), ddp_hook),
    ):
        assert [each for each, _ in boost(plugin).model.module._comm_hooks] == [hook]
    no_communication = fp8(fp8_config=FP8Config(messages=None))
    for plugin in (native(), ours(), plain_wire(), no_communication):
        assert not boost(plugin).model.module._comm_hooks


@ranks(2)
def test_ddp_names_an_unknown_option_and_refuses_a_wrong_configuration() -> None:
    with pytest.raises(TypeError, match=r"'bucket_cap'; did you mean bucket_cap_mb"):
        ours(bucket_cap=1)
    with pytest.raises(TypeError, match=r"did you mean use_fp8"):
        ours(use_fp=True)
    with pytest.raises(TypeError, match=r"fp8_communication and use_fp8 and fp8_config"):
        ours(zzz=1)
    with pytest.raises(TypeError, match=r"give an fp8booster.FP8Config"):
        fp8(fp8_config={"scaling": "amax"})


# ---- products ----


@ranks(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_ddp_runs_all_products_but_those_of_the_vocabulary_head_in_fp8(precision: str | None) -> None:
    run = boost(fp8(fp8_config=FP8Config(fused=False)), mixed_precision=precision)
    counted, rows = census(run)
    network = run.model.unwrap()
    eligible = [module for module in network.model.modules() if isinstance(module, nn.Linear)]
    assert len(eligible) == LAYERS
    assert all(isinstance(layer, FP8Linear) for layer in eligible)
    assert counted.fp8 == sum(products(eligible, rows).values(), Counter())
    assert counted.other == sum(products([network.lm_head], rows).values(), Counter())


@functools.cache
def _trained_in_fp8() -> Outcome:
    return outcome(boost(plain_wire()), micro_batches=2)


@ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
def test_ddp_options_change_no_bit_of_fp8_products(option: str) -> None:
    run = boost(plain_wire(**{option: OPTIONS[option]}))
    assert_same_outcome(_trained_in_fp8(), outcome(run, micro_batches=2))


@ranks(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_ddp_in_fp8_stays_near_native(precision: str | None) -> None:
    expected, found, uncompressed = (
        train(boost(plugin, mixed_precision=precision)) for plugin in (native(), fp8(), plain_wire())
    )
    assert_close(expected, found, CLOSE)
    assert len({tuple(losses) for losses in (expected, found, uncompressed)}) == 3


@ranks(2)
def test_ddp_refuses_a_model_without_linear_layers() -> None:
    with pytest.raises(ValueError, match=r"no linear layers"):
        boost(fp8(), nn.Sequential(nn.Embedding(8, 16), nn.LayerNorm(16)))


@ranks(2)
def test_ddp_refuses_a_gpu_without_fp8() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU of 2020")
        monkeypatch.setattr(
            "fp8booster.plugins.fp8_plugin.get_accelerator",
            lambda: type("OldGPU", (), {"get_current_device": lambda self: torch.device("cuda", 0)})(),
        )
        with pytest.raises(ValueError, match=r"emulate"):
            boost(fp8())


@ranks(2)
def test_ddp_says_at_boost_what_is_in_fp8() -> None:
    sizes = f"; sizes from which FP8 is sent: {ESTIMATED.source}"
    for make, wire in ((fp8, "in FP8" + sizes), (plain_wire, "uncompressed")):
        plugin = make(fp8_config=FP8Config(fused=False))
        with pytest.MonkeyPatch.context() as monkeypatch:
            lines = count_calls(monkeypatch, plugin.logger, "info")
            boost(plugin)
        assert [line for (line,) in lines] == [
            "FP8: 14 of 15 linear layers (90 % of the weights of matrix products); "
            f"1 in FP32 (FP8Config.layers leaves it out); gradients are sent {wire}"
        ]


@ranks(2)
def test_ddp_refuses_to_leave_a_fused_model_unfused() -> None:
    model = tiny_llama()
    fuse(model)
    with pytest.raises(ValueError, match=r"fused=False, .* not undone; leave fused=False out"):
        boost(fp8(fp8_config=FP8Config(fused=False)), model)
    assert not any(isinstance(each, FP8Linear) for each in model.modules())


@ranks(2)
def test_ddp_warns_of_what_has_no_effect() -> None:
    logger = fp8().logger
    for plugin, config, warning in (
        (ours, FP8Config(), "fp8_config has no effect: use_fp8 is off"),
        (
            fp8,
            FP8Config(messages=Encoding(automatic_scaling=True)),
            "fp8_config.messages.automatic_scaling=True has no effect: DDP's",
        ),
        (plain_wire, FP8Config(messages=Encoding(block_size=None)), "fp8_config.messages=Encoding("),
        (plain_wire, FP8Config(), None),
        (fp8, FP8Config(), None),
    ):
        with pytest.MonkeyPatch.context() as monkeypatch:
            warnings = count_calls(monkeypatch, logger, "warning")
            plugin(fp8_config=config)
        if warning is None:
            assert not warnings
        else:
            assert [line.startswith(warning) for (line,) in warnings] == [True]


@ranks(2)
def test_ddp_trains_adapters_on_a_frozen_base_in_fp8() -> None:
    run = boost(fp8(), lora={"lora_config": lora_config()})
    layers = dict(run.model.module.module.named_modules())
    base = [layer for name, layer in layers.items() if name.endswith("base_layer")]
    assert len(base) == LAYERS
    assert all(type(layer) is FP8Linear and not layer.weight.requires_grad for layer in base)
    expected = train(boost(native(), lora={"lora_config": lora_config()}))
    assert_close(expected, train(run), CLOSE)


# ---- gradients ----


@ranks(2)
def test_ddp_casts_a_weight_once_and_sends_once_for_all_micro_batches_of_a_step() -> None:
    run = boost(fp8(fp8_config=FP8Config(fused=False)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        casts = count_calls(monkeypatch, Casts, "quantize_weight")
        for step in range(1, 4):
            comm.reset_statistics()
            run.step(*rank_batches(3), no_sync=True)
            assert len(casts) == step * LAYERS
            assert comm.statistics()["all_reduce"].calls == 1


@ranks(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_ddp_accumulates_gradients_in_fp8_as_native_does(precision: str | None) -> None:
    for no_sync in (False, True):
        expected, found = (
            train(boost(plugin, mixed_precision=precision), micro_batches=3, no_sync=no_sync)
            for plugin in (native(), fp8())
        )
        assert_close(expected, found, CLOSE)


@ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
def test_ddp_options_go_with_gradients_in_fp8(option: str) -> None:
    arguments = {option: OPTIONS[option]}
    expected, found = (train(boost(plugin(**arguments)), micro_batches=2) for plugin in (native, fp8))
    assert_close(expected, found, CLOSE)


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ddp_sends_gradients_in_fp8(dtype: torch.dtype) -> None:
    run = boost(fp8(bucket_cap_mb=1), _wide_llama().to(dtype))
    batches = rank_batches(3)
    run.step(batches[0])  # DDP orders its buckets anew after the first step
    comm.reset_statistics()
    with count_traffic() as traffic:
        run.step(*batches[1:])
    row = comm.statistics()["all_reduce"]
    gradients = 2 * sum(parameter.nbytes for parameter in run.model.parameters())
    assert row.calls >= 4
    assert row.raw_bytes == gradients > 4 * MIB  # of two ranks, each sends what it reduces
    assert not row.uncompressed
    assert row.wire_bytes <= (0.26 if dtype is torch.float32 else 0.52) * row.raw_bytes
    assert {dtype for _, dtype in traffic.counts} == {torch.uint8}
    assert traffic.sent == row.wire_bytes
    for parameter in run.model.parameters():
        whole = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(whole, parameter.detach())
        assert torch.equal(*whole)


def _wide_llama() -> nn.Module:
    return tiny_llama(hidden_size=256, intermediate_size=512)


@ranks(2)
@pytest.mark.parametrize("how", ["one batch", "accumulated"])
def test_ddp_in_fp8_follows_one_process_in_fp8(how: str) -> None:
    accumulate = 2 if how == "accumulated" else 1
    run = learner(fp8(bucket_cap_mb=1))
    losses = learn(run, accumulate=accumulate)
    assert losses[-1] < 0.65 * losses[0], losses
    assert_close(_learn_alone(), losses, WITHIN)


@functools.cache
def _learn_alone() -> list[float]:
    """The losses of an unboosted model that takes all ranks' sequences by itself, in FP8."""
    model = convert_to_fp8(_start_of_learner()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE.rate(step + 1)
        batches, layout = text(1)
        own = torch.cat(list(batches.micro_batches(step * layout.sequences)))
        every = [torch.empty_like(own) for _ in range(layout.replicas)]
        dist.all_gather(every, own)
        tokens = torch.cat(every)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _start_of_learner() -> nn.Module:
    return learner(native()).model.unwrap()


# ---- checkpoints ----

FORMS: dict[str, dict[str, Any]] = {
    "one file": {},
    "one safetensors file": {"use_safetensors": True},
    "shards": {"shard": True},
    "safetensors shards in the background": {"shard": True, "use_safetensors": True, "use_async": True},
}
PLUGINS = {"fp8": fp8, "native": native, "fp8 ZeRO": fp8_zero}


def _save(run: Boosted, form: dict[str, Any], folder: Path) -> tuple[str, str]:
    shard = form.get("shard", False)
    model = str(folder / ("model" if shard else "model.safetensors" if form else "model.bin"))
    optimizer = str(folder / ("optimizer" if shard else "optimizer.bin"))
    run.booster.save_model(run.model, model, size_per_shard=0.05, **form)
    run.booster.save_optimizer(run.optimizer, optimizer, shard=shard, size_per_shard=0.05)
    run.booster.checkpoint_io._sync_io()
    dist.barrier()
    return model, optimizer


@ranks(2)
@pytest.mark.parametrize("crossing", ["fp8 to fp8", "fp8 to native", "native to fp8", "fp8 to fp8 ZeRO"])
def test_ddp_checkpoints_cross(crossing: str) -> None:
    source, _, target = crossing.partition(" to ")
    writer, reader = (boost(PLUGINS[name]()) for name in (source, target))
    train(writer, steps=2)
    expected = writer.parameters()
    batch = rank_batches(1)[0]
    for name, form in FORMS.items():
        model, optimizer = _save(writer, form, shared_folder(f"ddp {crossing}/{name}"))
        train(reader, steps=1)  # other weights, and FP8 copies of them
        stale = reader.loss(batch)
        reader.booster.load_model(reader.model, model)
        reader.booster.load_optimizer(reader.optimizer, optimizer)
        found = reader.parameters()
        assert_equal({key: value.to(found[key].dtype) for key, value in expected.items()}, found)
        assert_close([writer.loss(batch).item()], [reader.loss(batch).item()], CLOSE)
        assert stale != reader.loss(batch)
    losses = train(reader), train(writer)
    assert_close(*losses, 2 * CLOSE, gradients="ZeRO" not in target)
    if source == target:
        assert losses[0] == losses[1]


@ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ddp_checkpoints_under_mixed_precision_load_again(precision: str) -> None:
    writer, reader = (boost(fp8(), mixed_precision=precision) for _ in range(2))
    train(writer, steps=2)
    train(reader, steps=1)  # DDP orders its buckets anew after the first step
    for name, form in FORMS.items():
        model, optimizer = _save(writer, form, shared_folder(f"ddp {precision}/{name}"))
        reader.booster.load_model(reader.model, model)
        reader.booster.load_optimizer(reader.optimizer, optimizer)
        assert_equal(writer.parameters(), reader.parameters())
    assert train(writer) == train(reader)


@ranks(2)
def test_adamw_with_8_bit_moments_trains_as_torchs() -> None:
    optimizers = torch.optim.AdamW, AdamW
    boosted = [boost(ours(use_fp8=True), tiny_llama().bfloat16(), lr=1e-3, optimizer=each) for each in optimizers]
    expected, found = (train(each, steps=4) for each in boosted)
    assert found == pytest.approx(expected, rel=CLOSE)
    assert all(state.codes["exp_avg"].dtype is torch.int8 for state in boosted[1].optimizer.optim.state.values())
    for parameter in boosted[1].model.parameters():
        gathered = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, parameter.detach())
        assert torch.equal(*gathered)
