"""What `prepare` and `FP8Callback` refuse, leave alone, and import."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from fp8booster import Encoding, FP8Config, FP8Linear, WeightCopies, convert_to_fp8, fuse, quantize
from fp8booster.hf import FP8Callback, prepare
from fp8booster.hf.sharding import name_units
from fp8booster.nn.fused import fused_summary, use_fused_loss, use_native_loss
from fp8booster.nn.graphs.capture import captured_layers
from fp8booster.optim import AdamW
from tests.colossal.models import tiny_llama, token_batch
from tests.hf.ways import ALWAYS, TRAINED, arguments


@pytest.fixture(autouse=True)
def _no_accelerator() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


def trainer(folder: Path, model: nn.Module | None = None, callback: FP8Callback | None = None, **more: Any) -> Trainer:
    init = {name: more.pop(name) for name in ("model_init", "optimizers") if name in more}
    return Trainer(
        model,
        arguments(TrainingArguments, folder, max_steps=1, save_steps=9, **more),
        train_dataset=TRAINED,
        callbacks=[callback or FP8Callback(ALWAYS)],
        **init,
    )


def test_the_import_brings_neither_transformers_nor_accelerate() -> None:
    code = "import sys, fp8booster.hf; print({'transformers', 'accelerate'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import fp8booster.hf

    with pytest.raises(AttributeError, match="no attribute 'FP8Trainer'"):
        _ = fp8booster.hf.FP8Trainer


def test_a_configuration_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"config is 'O2'; give an fp8booster\.FP8Config"):
        FP8Callback("O2")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("use_liger_kernel", True, "Liger replaces .* leave use_liger_kernel out"),
        ("_n_gpu", 2, "start a process for each GPU"),
    ],
)
def test_arguments_that_do_not_go_with_fp8_are_refused(tmp_path: Path, name: str, value: object, says: str) -> None:
    # the libraries behind them need not be installed: what the constructor checks of these is left out
    given = arguments(TrainingArguments, tmp_path)
    setattr(given, name, value)
    model = tiny_llama()
    with pytest.raises(ValueError, match=says):
        FP8Callback(ALWAYS).on_init_end(given, None, None, model=model)
    assert not any(isinstance(each, FP8Linear) for each in model.modules())


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (DistributedType.DEEPSPEED, "were not tried with DEEPSPEED of accelerate; use DDP or FSDP2"),
        (DistributedType.MEGATRON_LM, "were not tried with MEGATRON_LM of accelerate"),
        (DistributedType.FSDP, r"choose FSDP2: fsdp_version=2 .*version\": 2.*FSDP_VERSION=2"),
    ],
)
def test_engines_that_do_not_go_with_fp8_are_refused(kind: DistributedType, says: str) -> None:
    # the engines need not be installed, nor several ranks be there
    plugin = SimpleNamespace(fsdp_version=1, transformer_cls_names_to_wrap=None)
    state = SimpleNamespace(distributed_type=kind, fsdp_plugin=plugin, mixed_precision="bf16")
    accelerator = SimpleNamespace(ddp_handler=None, state=state)
    model = tiny_llama()
    with pytest.raises(ValueError, match=says):
        prepare(model, ALWAYS, accelerator=accelerator)
    assert not any(isinstance(each, FP8Linear) for each in model.modules())


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_ranks_that_each_train_alone_are_told(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    state = SimpleNamespace(
        distributed_type=DistributedType.NO, mixed_precision="bf16", device=torch.device("cpu"), fsdp_plugin=None
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(tiny_llama(), ALWAYS, accelerator=SimpleNamespace(ddp_handler=None, state=state))
    told = [str(each.message) for each in caught if "trains alone" in str(each.message)]
    assert len(told) == (ranks == "2"), told
    assert all("each of 2 processes trains alone on cpu" in each and "cpu=True" in each for each in told)


def test_weights_frozen_in_fp8_are_not_sharded() -> None:
    plugin = SimpleNamespace(fsdp_version=2, transformer_cls_names_to_wrap=None)
    state = SimpleNamespace(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin, mixed_precision="bf16")
    with pytest.raises(ValueError, match=r"whole on each rank under FSDP2, .*; train adapters on them with DDP"):
        prepare(quantize(tiny_llama(), ALWAYS), accelerator=SimpleNamespace(ddp_handler=None, state=state))


def warned_of(model: nn.Module, **how: Any) -> list[str]:
    """Return the options that `prepare` says have no effect."""
    config = replace(
        ALWAYS,
        messages=Encoding(automatic_scaling=True),
        gradient_accumulation="8-bit",
        weight_copies=WeightCopies(high_precision=False, transposes=False),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(model, config, **how)
        prepare(tiny_llama(), ALWAYS)
    told = [each for each in caught if " has no effect: " in str(each.message)]
    assert all(each.filename == __file__ for each in told)
    return [str(each.message).split("=")[0].removeprefix("config.") for each in told]


def test_options_without_effect_are_warned_of() -> None:
    ddp = ["weight_copies.high_precision", "messages.automatic_scaling", "gradient_accumulation"]
    assert warned_of(tiny_llama().bfloat16()) == ddp
    plugin = SimpleNamespace(
        fsdp_version=2, transformer_cls_names_to_wrap=None, set_auto_wrap_policy=lambda model: None
    )
    state = SimpleNamespace(
        distributed_type=DistributedType.FSDP, fsdp_plugin=plugin, mixed_precision="bf16", device=torch.device("cpu")
    )
    accelerator = SimpleNamespace(ddp_handler=None, state=state)
    assert warned_of(tiny_llama(), accelerator=accelerator) == [ddp[0], "weight_copies.transposes", *ddp[1:]]


def test_a_callback_warns_of_options_without_effect(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"config\.gradient_accumulation='8-bit' has no effect: .*LowLevelZeroPlugin"):
        trainer(tmp_path, tiny_llama(), FP8Callback(replace(ALWAYS, gradient_accumulation="8-bit")))


def units_of(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> list[nn.Module]:
    """Return the modules that accelerate shards one by one."""
    plugin.set_auto_wrap_policy(model)
    is_unit = fsdp2_prepare_auto_wrap_policy(plugin, model)
    return [module for module in model.modules() if is_unit(module)]


@pytest.mark.parametrize("names", [None, ["LlamaDecoderLayer"]])
def test_one_accelerator_shards_the_layers_of_models_with_fp8_and_without(names: list[str] | None) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=names
    )
    models = [tiny_llama() for _ in range(4)]
    for model in models[:3]:
        config = replace(ALWAYS, cuda_graphs=True) if model is models[1] else ALWAYS
        fuse(convert_to_fp8(model, config))
        name_units(plugin)
    for model in [*models, models[0]]:
        assert units_of(plugin, model) == list(model.model.layers)


def test_an_accelerator_that_converts_to_fp8_itself_is_refused() -> None:
    accelerator = SimpleNamespace(ddp_handler=None, state=SimpleNamespace(mixed_precision="fp8"))
    with pytest.raises(ValueError, match="converts the model to FP8 layers of another library"):
        prepare(tiny_llama(), ALWAYS, accelerator=accelerator)


def test_a_trainer_in_fp32_is_refused_for_a_model_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers 4.51 leaves it there, and accelerate reads it
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    with pytest.raises(ValueError, match="needs a 16-bit type, and the model is in FP32; train with bf16=True"):
        trainer(tmp_path, tiny_llama(), bf16=False)


def test_a_model_of_16_bits_needs_no_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    made = trainer(tmp_path, tiny_llama().bfloat16(), bf16=False)
    made.train()
    made.save_model(str(tmp_path / "last"))
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "last", torch_dtype="auto")
    assert saved.dtype == torch.bfloat16


def test_a_model_that_is_made_later_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, model_init=lambda: tiny_llama())
    with pytest.raises(ValueError, match=r"let that function return fp8booster\.hf\.prepare\(model\)"):
        made.train()


def test_a_model_that_is_made_later_and_prepared_is_trained(tmp_path: Path) -> None:
    made = trainer(tmp_path, model_init=lambda: prepare(tiny_llama(), ALWAYS))
    made.train()
    assert isinstance(made.model.model.layers[0].mlp.up_proj, FP8Linear)


def test_a_callback_that_is_added_later_is_refused(tmp_path: Path) -> None:
    made = Trainer(tiny_llama(), arguments(TrainingArguments, tmp_path), train_dataset=TRAINED)
    made.add_callback(FP8Callback(ALWAYS))
    with pytest.raises(ValueError, match="the callback was added later"):
        made.train()


def test_a_second_trainer_goes_on_with_the_model(tmp_path: Path) -> None:
    model = tiny_llama()
    trainer(tmp_path, model).train()
    AcceleratorState._reset_state(reset_partial_state=True)
    trained = trainer(tmp_path, model).train()
    assert trained.training_loss > 0
    model.train()
    assert model(input_ids=token_batch(0), labels=token_batch(0)).logits is None


def test_what_accelerate_wraps_stays_around_either_loss() -> None:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(prepare(tiny_llama(), ALWAYS, accelerator=accelerator))
    batch = {"input_ids": token_batch(0), "labels": token_batch(0)}
    fused = model(**batch)
    assert fused_summary(model).endswith("loss over chunks of logits")
    use_native_loss(model)
    assert fused_summary(model).endswith("loss as it was (use_fused_loss changes that)")
    native = model(**batch)
    use_fused_loss(model)
    assert native.logits is not None
    assert fused.logits is model(**batch).logits is None
    assert model(**batch).loss == fused.loss
    assert fused.loss.item() == pytest.approx(native.loss.item(), rel=1e-4)
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(**batch)
    assert seen == [torch.bfloat16]  # autocast is on
    model.lm_head._forward_hooks.clear()
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False)(**batch).logits is None


def test_layers_that_are_not_fused_are_captured_as_the_configuration_says() -> None:
    model = prepare(tiny_llama(), replace(ALWAYS, fused=False, cuda_graphs=True))
    assert captured_layers(model).total() == len(model.model.layers)
    prepare(model, replace(ALWAYS, fused=False, cuda_graphs=False))
    assert not captured_layers(model)


def test_a_second_call_without_fusing_is_refused_where_the_first_one_fused() -> None:
    model = prepare(tiny_llama(), ALWAYS)
    layers = [type(each) for each in model.modules()]
    with pytest.raises(ValueError, match=r"fused=False, .* not undone; leave fused=False out, or make the model anew"):
        prepare(model, replace(ALWAYS, fused=False))
    assert [type(each) for each in model.modules()] == layers
    prepare(model, ALWAYS)  # serves still
    assert model(input_ids=token_batch(0), labels=token_batch(0)).logits is None


def test_a_second_call_without_fusing_computes_the_loss_as_it_was() -> None:
    model = prepare(tiny_llama(), replace(ALWAYS, fused=False))
    assert use_fused_loss(model)
    prepare(model, replace(ALWAYS, fused=False))
    assert model(input_ids=token_batch(0), labels=token_batch(0)).logits is not None


def test_a_second_trainer_fuses_where_the_first_did_not(tmp_path: Path) -> None:
    model = tiny_llama()
    trainer(tmp_path, model, FP8Callback(replace(ALWAYS, fused=False))).train()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert trainer(tmp_path, model).train().training_loss > 0
    assert fused_summary(model).startswith("2 decoder layers fused, ")


def test_a_second_trainer_of_smooth_swiglu_scales_by_channel_as_the_first(tmp_path: Path) -> None:
    model = tiny_llama()
    for _ in range(2):
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer(tmp_path, model, FP8Callback(replace(ALWAYS, scaling="smooth-swiglu"))).train()
        assert all(layer.mlp.down_proj.fp8_casts.by_channel for layer in model.model.layers)


def test_each_trainer_of_a_model_has_the_loss_that_it_asks_for(tmp_path: Path) -> None:
    model = tiny_llama()
    batch = {"input_ids": token_batch(0), "labels": token_batch(0)}
    for fused in (True, False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer(tmp_path, model, FP8Callback(ALWAYS, fused_loss=fused)).train()
        model.train()
        assert (model(**batch).logits is None) == fused


def test_a_trainer_that_reads_logits_gets_them(tmp_path: Path) -> None:
    class OfLogits(Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().compute_loss(model, inputs, True)[1].logits.float().logsumexp(-1).mean()

    model = tiny_llama()
    settings = arguments(TrainingArguments, tmp_path, max_steps=1)
    callback = FP8Callback(ALWAYS, fused_loss=False)
    assert OfLogits(model, settings, train_dataset=TRAINED, callbacks=[callback]).train().training_loss > 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, r"max_grad_norm is 1\.0, .* leave clipping out \(max_grad_norm=0\)"),
        ({"max_grad_norm": 0, "gradient_accumulation_steps": 2}, "after 1; make it with micro_batches=2"),
        ({"max_grad_norm": 0}, None),
    ],
)
def test_an_optimizer_that_updates_in_backward_does_as_the_trainer_or_is_refused(
    tmp_path: Path, settings: dict, says: str | None
) -> None:
    model = tiny_llama()
    optimizer = AdamW(model.parameters(), update_in_backward=True)
    made = trainer(tmp_path, model, optimizers=(optimizer, None), **settings)
    if says is None:
        assert made.train().training_loss > 0
        return
    with pytest.raises(ValueError, match=says):
        made.train()


def test_steps_that_are_no_optimizer_s_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOMO updates weights in backward, through `.data`, and accelerate then leaves out the optimizer's step."""

    def update(parameter: torch.Tensor) -> None:
        parameter.data.sub_(0.3 * parameter.grad)

    monkeypatch.setattr(AcceleratedOptimizer, "step", lambda optimizer, closure=None: None)
    model = tiny_llama()
    made = trainer(tmp_path, model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    made.train()

    @torch.no_grad()
    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=token_batch(0), labels=token_batch(0)).loss

    # at once, for a call of `train` or `eval`, or a load into any model, would let weights be looked at again
    found = loss(model)
    fresh = prepare(tiny_llama(), ALWAYS)
    fresh.load_state_dict(model.state_dict())
    assert found == loss(fresh.train())


def test_label_smoothing_gets_logits(tmp_path: Path) -> None:
    assert trainer(tmp_path, tiny_llama(), label_smoothing_factor=0.1).train().training_loss > 0


def test_buckets_hold_as_much_as_fp8_messages_need_unless_they_were_given(tmp_path: Path) -> None:
    assert trainer(tmp_path, tiny_llama()).args.ddp_bucket_cap_mb == 64
    assert trainer(tmp_path, tiny_llama(), ddp_bucket_cap_mb=8).args.ddp_bucket_cap_mb == 8
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepare(tiny_llama(), FP8Config(always=True, messages=None), accelerator=accelerator)
    assert accelerator.ddp_handler is None
    prepare(tiny_llama(), ALWAYS, accelerator=accelerator)
    assert accelerator.ddp_handler.bucket_cap_mb == 64
    given = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, kwargs_handlers=[given])
    prepare(tiny_llama(), ALWAYS, accelerator=accelerator)
    assert accelerator.ddp_handler is given


def test_a_model_that_accelerate_wrapped_is_refused() -> None:
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(tiny_llama())
    with pytest.raises(ValueError, match="was wrapped before it was converted to FP8"):
        prepare(model, ALWAYS)
    assert not any(isinstance(each, FP8Linear) for each in model.modules())


def test_an_accelerator_in_fp32_is_refused_for_a_model_in_fp32() -> None:
    with pytest.raises(ValueError, match='mixed_precision="bf16" of Accelerator'):
        prepare(tiny_llama(), ALWAYS, accelerator=Accelerator(mixed_precision="no", cpu=True))
