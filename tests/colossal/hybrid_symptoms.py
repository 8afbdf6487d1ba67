"""Symptoms of hybrid parallelism without each of its patches."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.colossal.models import tiny_llama
from tests.colossal.symptom import Symptom


def _train_colo_parameters_without_zero() -> None:
    from colossalai.amp.naive_amp.mixed_precision_optimizer import MixedPrecisionOptimizer
    from colossalai.tensor.colo_parameter import ColoParameter

    parameter = ColoParameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW([parameter], lr=0.1), precision="bf16")
    for gradient in (1.0, -1.0, 1.0):
        parameter.grad = torch.full_like(parameter, gradient).as_subclass(torch.Tensor)
        optimizer.step()
    plain = torch.ones(4, requires_grad=True)
    reference = torch.optim.AdamW([plain], lr=0.1)
    for gradient in (1.0, -1.0, 1.0):
        plain.grad = torch.full_like(plain, gradient)
        reference.step()
    found = parameter.detach().as_subclass(torch.Tensor)
    assert torch.allclose(found.float(), plain, rtol=0.01), f"moments do not decay: {found}"


def _accumulate_under_sequence_parallelism() -> None:
    from tests.colossal.hybrid.runs import native, norm_gradients, start

    for stage in (0, 1):
        expected, found = (
            norm_gradients(start(native("TP2 split_gather", zero_stage=stage)), no_sync) for no_sync in (True, False)
        )
        for name, gradient in expected.items():
            apart = (found[name] - gradient).norm() / gradient.norm()
            assert apart < 0.02, f"a micro-batch is added twice: {name} of stage {stage} is {apart:.2f} off"


def _save_shards_in_the_background() -> None:
    from tests.colossal.hybrid.runs import learn, native, start

    run = start(native("DP2"))
    learn(run, last=1)
    errors: list[str | None] = [None] * dist.get_world_size()
    own = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            run.booster.save_model(run.model, f"{folder}/model", shard=True, use_async=True, use_safetensors=True)
            run.booster.save_optimizer(run.optimizer, f"{folder}/optimizer", shard=True, use_async=True)
            run.booster.checkpoint_io._sync_io()
        except RuntimeError as error:
            own = str(error)
    dist.all_gather_object(errors, own)  # the first rank alone writes
    assert not any(errors), errors


def _leave_out_the_mode_along_a_sequence() -> None:
    from tests.colossal.hybrid.runs import native, start

    start(native({"sp_size": 2}, enable_sequence_parallelism=True))


def _train_command_r() -> None:
    from tests.colossal.hybrid.runs import native
    from tests.colossal.hybrid.test_sharded_models import begin, step

    step(*begin(native("TP2"), "Command-R"))


def _clip_gradients_of_fused_layers() -> None:
    from tests.colossal.hybrid.runs import batches, native, start
    from tests.colossal.hybrid.test_norms import norm_by_sizes
    from tests.colossal.hybrid.test_sharded_models import MODELS, VOCABULARY
    from tests.plugins.norms import steps_of

    for mode in ("TP2", "TP2 ZeRO 1"):
        model = MODELS["GPT-2"][0]()
        whole = {name: value.numel() for name, value in model.named_parameters()}
        run = start(native(mode), model)
        norm, exact, _ = steps_of(run, batches(0, 1)[0][0] % VOCABULARY, limit=1e6, norm_of=norm_by_sizes(run, whole))
        assert abs(norm / exact - 1) < 1e-3, f"shards do not count whole: {norm} of {exact}"


def _load_a_tied_weight_into_a_pipeline() -> None:
    from tests.colossal.hybrid.runs import native, sizes, start

    written = tiny_llama(seed=1, **sizes(tie_word_embeddings=True)).bfloat16()
    embeddings = written.model.embed_tokens.weight
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for form, size in (("shards", "50KB"), ("one file", "1GB")):
        if dist.get_rank() == 0:
            written.save_pretrained(f"{folder[0]}/{form}", max_shard_size=size)
        dist.barrier()
        run = start(native("PP2 1f1b", zero_stage=1), tiny_llama(**sizes(tie_word_embeddings=True)))
        run.booster.load_model(run.model, f"{folder[0]}/{form}")
        name = "model.embed_tokens.weight" if run.booster.plugin.stage_manager.is_first_stage() else "lm_head.weight"
        held = dict(run.model.unwrap().named_parameters())[name]
        master = run.optimizer.get_working_to_master_map()[id(held)]
        same = [None] * dist.get_world_size()
        dist.all_gather_object(
            same, torch.equal(held, embeddings) and torch.equal(master, embeddings.flatten().float())
        )
        assert same == [True, True], f"stages of {form} differ: {same}"


def _put_adapters_into_a_model_that_is_cut() -> None:
    from colossalai.booster import Booster

    from tests.colossal.hybrid.runs import native
    from tests.plugins.test_low_level_zero_lora import lora_config

    for mode in ("TP2", "PP2 1f1b"):
        refusal: Exception | None = None
        try:
            Booster(plugin=native(mode)).enable_lora(tiny_llama(), lora_config=lora_config())
        except (AssertionError, ValueError) as error:
            refusal = error
        assert "use tp_size=1 and pp_size=1" in str(refusal), f"not refused with a sentence, but {refusal!r}"


def _train_an_empty_group() -> None:
    from tests.colossal.hybrid.runs import native, start

    def in_groups(trained: list[torch.nn.Parameter], lr: float) -> torch.optim.AdamW:
        return torch.optim.AdamW([{"params": []}, {"params": trained}], lr=lr)

    run = start(native("PP2 1f1b ZeRO 1"), optimizer=in_groups)
    counts = [len(group["params"]) for group in run.optimizer.param_groups]
    assert counts[0] == 0
    assert counts[1] > 0


def _clip_without_gradients() -> None:
    from tests.colossal.hybrid.runs import native, start

    plain, zero = (start(native("PP2 1f1b", zero_stage=stage, max_norm=1.0)).optimizer for stage in (0, 1))
    for compute in (partial(plain._compute_grad_norm, []), partial(zero._compute_grad_norm, None, [])):
        with mock.patch.object(dist, "all_reduce") as reduce:
            assert compute() == 0
        assert reduce.called, "the other stages wait for ever"


def _save_a_padded_vocabulary() -> None:
    from tests.colossal.hybrid.runs import native, start

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    run = start(native("DP2", zero_stage=1), tiny_llama(vocab_size=101))
    head = run.model.unwrap().lm_head.weight
    padded = head.detach().clone()
    errors: list[str | None] = [None] * dist.get_world_size()
    own = None
    try:
        run.booster.save_model(run.model, folder[0], shard=True, use_safetensors=True)
    except AttributeError as error:
        own = str(error)
    dist.all_gather_object(errors, own)  # the first rank alone writes
    assert not any(errors), errors
    saved: dict[str, torch.Tensor] = {}
    for file in Path(folder[0]).glob("*.safetensors"):
        saved |= load_file(file)
    assert torch.equal(saved["lm_head.weight"], padded[:101])
    run.booster.load_model(run.model, folder[0])
    assert torch.equal(head, padded)


SYMPTOMS = {
    "detached_weights_lose_their_padding": Symptom(_save_a_padded_vocabulary, "_unpad_detach"),
    "zero_runs_where_a_group_is_empty": Symptom(_train_an_empty_group, "list index out of range"),
    "norms_are_added_without_gradients_too": Symptom(_clip_without_gradients, "wait for ever"),
    "masters_are_plain_tensors": Symptom(_train_colo_parameters_without_zero, "moments do not decay"),
    "parts_of_gradients_are_added_once": Symptom(
        _accumulate_under_sequence_parallelism, "a micro-batch is added twice"
    ),
    "norms_count_shards_of_fused_layers": Symptom(_clip_gradients_of_fused_layers, "shards do not count whole"),
    "sequences_have_one_default_mode": Symptom(_leave_out_the_mode_along_a_sequence, "AssertionError"),
    "adapters_need_a_whole_model": Symptom(_put_adapters_into_a_model_that_is_cut, "not refused with a sentence"),
    "cpu_shards_are_not_pinned": Symptom(_save_shards_in_the_background, "pin_memory=True requires"),
    "command_prepares_masks_for_its_attention": Symptom(_train_command_r, "should be a dict"),
    "pipeline_stages_load_a_weight_that_they_share": Symptom(
        _load_a_tied_weight_into_a_pipeline, "stages of shards differ: [True, False]"
    ),
}
