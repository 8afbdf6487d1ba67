"""What goes wrong in pipelines without each patch of them in `compat/`, and without OPT's and T5's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.colossal.models import token_batch
from tests.colossal.symptom import Symptom
from tests.colossal.tensor.models import shard


def _zero_bubble_layer() -> nn.Module:
    from colossalai.shardformer.layer import LinearWithGradAccum

    return LinearWithGradAccum(8, 8, bias=False, use_zbv=True)


def _run_w_passes(count: int) -> None:
    from colossalai.pipeline.weight_grad_store import WeightGradStore

    for _ in range(count):
        WeightGradStore.pop()


def _backward(loss: torch.Tensor) -> None:
    from colossalai.pipeline.weight_grad_store import WeightGradStore

    loss.backward()
    WeightGradStore.flush()


def _accumulate_native_weight_gradients() -> None:
    layer = _zero_bubble_layer()
    expected = torch.zeros_like(layer.weight)
    for x in torch.eye(8).split(4):
        _backward(layer(x.requires_grad_()).sum())
        expected += x.detach().sum(0)
    _run_w_passes(2)
    assert torch.equal(layer.weight.grad, expected), "a micro-batch is lost"


def _checkpoint_under_zero_bubble() -> None:
    x = torch.eye(8, requires_grad=True)
    layer, frozen = _zero_bubble_layer(), _zero_bubble_layer().requires_grad_(False)
    _backward(checkpoint(layer, frozen(x), use_reentrant=False).sum())
    _run_w_passes(1)
    assert layer.weight.grad is not None, "the layer does not train"
    assert frozen.weight.grad is None, "a frozen weight has a gradient"


class _Stage:
    """The second and last stage of two, each with two chunks of a model."""

    num_stages, stage, model_chunk_id = 2, 1, None

    @contextmanager
    def switch_model_chunk_id(self, chunk: int) -> Iterator[None]:
        self.model_chunk_id = chunk
        yield

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        return False

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        return ignore_chunk or self.model_chunk_id == 1


class _Handle:
    """Of a message; counts how often it is waited for."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


def _zero_bubble_scheduler(*types: str) -> Any:
    """With a schedule of one micro-batch, which holds nodes of these types."""
    from colossalai.pipeline.schedule import ZeroBubbleVPipeScheduler
    from colossalai.pipeline.schedule.v_schedule import ScheduledNode

    nodes = [ScheduledNode(type=each, chunk=0, stage=1, minibatch=0) for each in types]
    scheduler = ZeroBubbleVPipeScheduler(_Stage(), [[], nodes], 2, num_microbatch=2, microbatch_size=1)
    scheduler.schedule_f = lambda *_, **__: None
    return scheduler


def _step_twice_under_zero_bubble() -> None:
    scheduler, handles = _zero_bubble_scheduler("F", "F", "SEND_FORWARD"), []

    def send(chunk: int) -> list[_Handle]:
        handles.append(_Handle())
        return handles[-1:]

    scheduler.communication_map["SEND_FORWARD"] = send
    for _ in range(2):
        scheduler.forward_backward_step(None, iter([torch.zeros(2, 1)]), None, optimizer=object())
    assert [handle.waits for handle in handles] == [1, 1], "waited for messages of an earlier step"


def _evaluate_under_zero_bubble() -> None:
    scheduler = _zero_bubble_scheduler("F", "F", "B", "W")
    with torch.no_grad():
        scheduler.forward_backward_step(None, iter([torch.zeros(2, 1)]), None)
        with pytest.raises(ValueError, match="evaluate with batches of 2"):
            scheduler.forward_backward_step(None, iter([torch.zeros(3, 1)]), None)


def _add_up_late_losses_under_zero_bubble() -> None:
    from colossalai.tensor.colo_tensor import ColoTensor

    scheduler, total = _zero_bubble_scheduler(), torch.zeros(())
    scheduler.stage_manager.stage_indices = [None, None]
    scheduler.stage_manager.is_first_stage = lambda ignore_chunk=False: True  # where the V ends
    for make in (ColoTensor, torch.clone):
        criterion = partial(lambda make, *_: make(torch.tensor(3.0)), make)
        scheduler.forward_step(lambda *_, **__: None, 1, None, None, criterion, total)
    assert total == 3, "the loss is not added"


def _interleaved_schedule(comm: Any, **options: Any) -> Any:
    from colossalai.pipeline.schedule import InterleavedSchedule

    schedule = InterleavedSchedule(_Stage(), num_model_chunks=2, num_microbatch=2, **options)
    schedule.comm = comm
    return schedule


class _Silence:
    """Sends nothing, and has a handle for it."""

    def __init__(self) -> None:
        self.handle = _Handle()

    def send_forward_recv_forward(self, *_: Any, **__: Any) -> tuple[dict, list[_Handle]]:
        return {}, [self.handle]

    send_backward_recv_backward = send_forward_recv_forward

    def recv_forward(self, *_: Any, **__: Any) -> tuple[dict, list[_Handle]]:
        return {}, []

    def send_backward(self, *_: Any, **__: Any) -> list[_Handle]:
        return [self.handle]

    send_forward = send_backward


def _interleave_without_cached_metadata() -> None:
    schedule = _interleaved_schedule(_Silence(), enable_metadata_cache=False)
    for chunk in (1, 0):
        schedule.send_forward_recv_forward(chunk, 0, {})
        assert schedule.send_tensor_metadata, "the next message would go without metadata"
    cached = _interleaved_schedule(_Silence())
    for chunk, still_to_send in ((1, True), (0, False), (1, False)):
        cached.send_forward_recv_forward(chunk, 0, {})
        assert cached.send_tensor_metadata is still_to_send


def _end_an_interleaved_step() -> None:
    schedule = _interleaved_schedule(_Silence())
    schedule.run_forward_backward = lambda *_: {"handles": schedule.send_backward(1, {})}
    schedule.forward_backward_step(None, None, None, optimizer=object())
    assert schedule.comm.handle.waits == 1, "the last message is not waited for"


def _train_after_evaluation() -> None:
    schedule = _interleaved_schedule(_Silence())
    schedule.forward_step = lambda *_: {}
    schedule.run_forward_backward = lambda _, batches, *__: schedule.load_batch(batches)
    for rows in (4, 6, 4):
        with torch.set_grad_enabled(rows == 4):
            schedule.forward_backward_step(None, iter([torch.zeros(rows, 1)]), None, optimizer=object())
    assert (schedule.num_microbatch, schedule.enable_metadata_cache) == (2, True)


def _load_longer_batches() -> None:
    from colossalai.pipeline.schedule import OneForwardOneBackwardSchedule

    schedules = (
        OneForwardOneBackwardSchedule(_Stage(), num_microbatches=2),
        _interleaved_schedule(_Silence()),
        _zero_bubble_scheduler("F", "F"),
    )
    for schedule in schedules:
        schedule.forward_only = False
        chunks = isinstance(schedule.send_grad_metadata, list)
        unknown, known = (([each] * 2 if chunks else each) for each in (None, "known"))
        for length, kept in ((32, True), (32, True), (48, False), (32, False)):
            schedule.tensor_metadata_recv = schedule.grad_metadata_recv = known
            schedule.send_tensor_metadata = schedule.send_grad_metadata = [False] * 2 if chunks else False
            tokens = torch.zeros(2, length)
            schedule.load_batch(iter([{"input_ids": tokens, "labels": tokens}]))
            for received in (schedule.tensor_metadata_recv, schedule.grad_metadata_recv):
                assert received == (known if kept else unknown), "metadata of other shapes is kept"
            for sends in (schedule.send_tensor_metadata, schedule.send_grad_metadata):
                assert sends == ([not kept] * 2 if chunks else not kept)


def _train_on_batches_of_several_sizes() -> None:
    from colossalai.pipeline.schedule import OneForwardOneBackwardSchedule

    by_number = OneForwardOneBackwardSchedule(_Stage(), num_microbatches=2)
    by_size = OneForwardOneBackwardSchedule(_Stage(), microbatch_size=2)
    zero_bubble = _zero_bubble_scheduler("F", "F")  # for micro-batches of one row
    for schedule in (by_number, by_size, zero_bubble):
        schedule.forward_only = False
    for rows in (4, 6, 4):
        for schedule, sizes in ((by_number, (2, rows // 2)), (by_size, (rows // 2, 2))):
            schedule.load_batch(iter([torch.zeros(rows, 1)]))
            assert (schedule.num_microbatches, schedule.microbatch_size) == sizes
    zero_bubble.num_microbatch = None
    zero_bubble.load_batch(iter([torch.zeros(2, 1)]))
    with pytest.raises(ValueError, match="train with batches of 2, or give num_microbatches"):
        zero_bubble.load_batch(iter([torch.zeros(4, 1)]))


def _go_backward_through_tuples() -> None:
    from colossalai.pipeline.schedule.one_f_one_b import OneForwardOneBackwardSchedule

    schedule = OneForwardOneBackwardSchedule.__new__(OneForwardOneBackwardSchedule)
    optimizer = SimpleNamespace(backward=torch.Tensor.backward, backward_by_grad=torch.autograd.backward)
    weight = torch.ones((), requires_grad=True)
    sent = {"hidden_states": 2 * weight, "past_router_logits": (3 * weight, 5 * weight)}
    states, *logits = (torch.ones((), requires_grad=True) for _ in range(3))
    received = {"hidden_states": states, "past_router_logits": tuple(logits)}
    gradients = schedule.backward_step(optimizer, received, states + 10 * logits[0] + 100 * logits[1], None)
    schedule.backward_step(optimizer, None, sent, gradients)
    assert weight.grad == 2 + 30 + 500, "a gradient does not come back"


def _scale_the_loss_of_zero_bubble() -> None:
    from colossalai.amp.naive_amp.mixed_precision_mixin import FP16MixedPrecisionMixin

    class Mixin(FP16MixedPrecisionMixin):
        def check_local_overflow(self) -> bool:
            return False

    gradients = []
    for by_grad in (False, True):
        mixin, weight = Mixin(initial_scale=2.0**8), torch.ones(3, requires_grad=True)
        loss = (weight * 3).sum()
        if by_grad:
            torch.autograd.backward([loss], mixin.pre_backward_by_grad([loss], [None]))
        else:
            mixin.pre_backward(loss).backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients), "the loss is not scaled"


def _tiny_opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
    return OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)).eval()


def _attend_in_opt() -> None:
    whole, tokens = _tiny_opt(), token_batch(0)
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    with torch.no_grad():
        expected = whole(**batch).loss
        torch.testing.assert_close(shard(whole, enable_flash_attention=True)(**batch).loss, expected)


def _leave_out_the_mask_of_opt() -> None:
    from colossalai.shardformer import ShardConfig
    from colossalai.shardformer.modeling.opt import OPTPipelineForwards

    model, tokens = _tiny_opt(), token_batch(0)

    def run(first: bool, **inputs: Any) -> Any:
        stage = SimpleNamespace(is_first_stage=lambda: first, is_last_stage=lambda: not first)
        return OPTPipelineForwards.opt_for_causal_lm_forward(
            model,
            input_ids=tokens,
            labels=tokens,
            stage_manager=stage,
            stage_index=[0, 1] if first else [1, 2],
            shard_config=ShardConfig(enable_tensor_parallelism=False),
            **inputs,
        )

    with torch.no_grad():
        middle = run(True)["hidden_states"]
        torch.testing.assert_close(run(False, hidden_states=middle).loss, model(input_ids=tokens, labels=tokens).loss)


def _receive_none() -> None:
    from colossalai.pipeline.schedule import OneForwardOneBackwardSchedule

    schedule = OneForwardOneBackwardSchedule(_Stage(), num_microbatches=2)
    for rest, kept in (({"position_bias": None}, False), ({}, True)):
        message = {"hidden_states": torch.zeros(2)} | rest
        schedule.comm = SimpleNamespace(recv_forward=lambda *_, message=message, **__: (message, []))
        schedule.recv_forward()
        assert (schedule.tensor_metadata_recv is not None) is kept


def _pipe_t5(masks: bool) -> None:
    """Through one stage of an encoder and two of a decoder, and back as the schedule does."""
    from colossalai.pipeline.schedule import OneForwardOneBackwardSchedule
    from colossalai.shardformer.modeling.t5 import T5PipelineForwards
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
    tokens = token_batch(0)
    batch = {"input_ids": tokens, "labels": tokens}
    if masks:
        padded = torch.ones_like(tokens)
        padded[1, 24:] = 0
        batch |= {"attention_mask": padded, "decoder_attention_mask": padded}
    whole = model(**batch).loss
    whole.backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    model.zero_grad()

    passed, received = [], {}
    for number, layers in enumerate(([0, 2], [0, 1], [1, 2])):
        last = number == 2
        sent = T5PipelineForwards.t5_for_conditional_generation_forward(
            model,
            **batch,
            **received,
            stage_manager=SimpleNamespace(stage=number, num_stages=3, is_last_stage=lambda last=last: last),
            stage_index=layers,
            decoder_starting_stage=1,
        )
        passed.append((received or None, sent.loss if last else sent))
        if not last:
            received = {
                name: value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
                for name, value in sent.items()
            }
    torch.testing.assert_close(passed[-1][1], whole)
    optimizer = SimpleNamespace(backward=torch.autograd.backward, backward_by_grad=torch.autograd.backward)
    gradients = None
    for given, output in reversed(passed):
        gradients = OneForwardOneBackwardSchedule.backward_step(None, optimizer, given, output, gradients)
    for name, value in model.named_parameters():
        torch.testing.assert_close(
            value.grad, expected[name], msg=lambda found, name=name: f"{name} learns otherwise: {found}"
        )


def _pipe_t5_with_masks_and_without() -> None:
    for masks in (False, True):
        _pipe_t5(masks)


def _cut_into_chunks() -> None:
    from colossalai.shardformer.policies.bert import BertPolicy
    from colossalai.shardformer.policies.command import CommandPolicy
    from colossalai.shardformer.policies.deepseek import DeepseekForCausalLMPolicy
    from colossalai.shardformer.policies.gpt2 import GPT2Policy
    from colossalai.shardformer.policies.llama import LlamaPolicy
    from colossalai.shardformer.policies.mistral import MistralPolicy
    from colossalai.shardformer.policies.mixtral import MixtralForCausalLMPolicy
    from colossalai.shardformer.policies.opt import OPTPolicy
    from colossalai.shardformer.policies.qwen2 import Qwen2Policy
    from colossalai.shardformer.policies.t5 import T5BasePolicy
    from colossalai.shardformer.policies.vit import ViTPolicy
    from colossalai.shardformer.shard.sharder import ModelSharder

    class Nothing(ModelSharder):
        """Does nothing to its model."""

        def _do_nothing(self, **_: Any) -> None:
            pass

        _preprocess = _release_unheld_layers = _replace_module = _materialize = _postprocess = _do_nothing

    def refusal(kind: type, use_zbv: bool) -> str:
        stages = SimpleNamespace(is_interleave=True, use_zbv=use_zbv)
        config = SimpleNamespace(pipeline_stage_manager=stages, enable_tensor_parallelism=False)
        policy = kind()
        policy.set_shard_config = policy.set_model = policy.get_shared_params = lambda *_: None
        try:
            Nothing(nn.Linear(1, 1), policy, config).shard()
        except ValueError as error:
            return str(error)
        return ""

    for kind in (OPTPolicy, T5BasePolicy, ViTPolicy, DeepseekForCausalLMPolicy):
        assert refusal(kind, use_zbv=False).endswith("use pp_style='1f1b'"), "it is not refused"
    for kind in (BertPolicy, CommandPolicy, GPT2Policy, Qwen2Policy):
        assert not refusal(kind, use_zbv=False)
        assert "or '1f1b'" in refusal(kind, use_zbv=True), "it is not refused"
    for kind in (LlamaPolicy, MistralPolicy, MixtralForCausalLMPolicy):
        assert not refusal(kind, use_zbv=True)


SYMPTOMS = {
    "zero_bubble_adds_weight_gradients": Symptom(_accumulate_native_weight_gradients, "a micro-batch is lost"),
    "zero_bubble_finds_the_parameter": Symptom(_checkpoint_under_zero_bubble, "the layer does not train"),
    "zero_bubble_forgets_its_handles": Symptom(_step_twice_under_zero_bubble, "of an earlier step"),
    "zero_bubble_evaluates": Symptom(_evaluate_under_zero_bubble, "'list' object has no attribute 'type'"),
    "zero_bubble_adds_up_the_loss": Symptom(_add_up_late_losses_under_zero_bubble, "the loss is not added"),
    "evaluation_leaves_training_as_it_was": Symptom(_train_after_evaluation, "AssertionError()"),
    "metadata_is_kept_of_equal_batches_alone": Symptom(_load_longer_batches, "of other shapes is kept"),
    "training_batches_differ_in_size": Symptom(_train_on_batches_of_several_sizes, "AssertionError()"),
    "stages_return_gradients_in_tuples": Symptom(_go_backward_through_tuples, "a gradient does not come back"),
    "interleaved_sends_metadata": Symptom(_interleave_without_cached_metadata, "would go without metadata"),
    "interleaved_waits_for_what_it_sends": Symptom(_end_an_interleaved_step, "is not waited for"),
    "opt_needs_no_mask_in_a_pipeline": Symptom(_leave_out_the_mask_of_opt, "has no attribute 'device'"),
    "opt_attention_takes_positions": Symptom(_attend_in_opt, "unexpected keyword argument 'position_ids'"),
    "metadata_is_kept_of_tensors_alone": Symptom(_receive_none, "Only support tensor for fast send"),
    "t5_stages_return_all_gradients": Symptom(_pipe_t5_with_masks_and_without, "learns otherwise"),
    "t5_decoders_go_on_in_later_stages": Symptom(_pipe_t5_with_masks_and_without, "has no attribute 'device'"),
    "chunks_are_refused_where_there_are_none": Symptom(_cut_into_chunks, "it is not refused"),
    "zero_bubble_scales_the_loss": Symptom(_scale_the_loss_of_zero_bubble, "the loss is not scaled"),
}
