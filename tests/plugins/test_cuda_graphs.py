"""`FP8Config(cuda_graphs=True)` in the plugins: the bits of layers that are not captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8booster import FP8Config, comm, report
from fp8booster.config import WeightCopies
from fp8booster.nn.experts.mixture import LOOKED_AT
from fp8booster.nn.experts.spread import EXCHANGED
from fp8booster.nn.graphs import capture_layers, captured_layers, graph_breaks, recorder
from fp8booster.nn.graphs.layer import WARM_UP
from fp8booster.plugins import HybridParallelPlugin, LowLevelZeroPlugin, MoeHybridParallelPlugin, TorchDDPPlugin
from tests.colossal.models import tiny_llama, token_batch
from tests.colossal.moe.models import tiny_mixtral
from tests.colossal.pipeline.runs import MICRO_BATCHES, SCHEDULES, Pipeline
from tests.distributed import ranks, run_ranks
from tests.nn.experts.families import FAMILIES, batch_of, tiny_mixture
from tests.nn.graphs.rerun import Rerun
from tests.plugins.training import assert_same_outcome, boost, outcome, train

LEFT_ALONE = "the GPU takes longer than the host"
TENSOR_PARALLEL = {"tp_size": 2, "pp_size": 1, "zero_stage": 0, "precision": "bf16"}
PLUGINS = {
    "ZeRO 1": (LowLevelZeroPlugin, {"stage": 1}),
    "ZeRO 2": (LowLevelZeroPlugin, {"stage": 2}),
    "ZeRO 2, weights in FP8 alone": (LowLevelZeroPlugin, {"stage": 2, "high_precision": False}),
    "ZeRO 1, gathers during forward": (LowLevelZeroPlugin, {"stage": 1, "overlap_allgather": True}),
    "DDP": (TorchDDPPlugin, {}),
    "hybrid": (HybridParallelPlugin, {"tp_size": 1, "pp_size": 1, "zero_stage": 1, "precision": "bf16"}),
    "tensor parallel": (HybridParallelPlugin, TENSOR_PARALLEL),
    "sequence parallel, all to all": (
        HybridParallelPlugin,
        TENSOR_PARALLEL
        | {"tp_size": 1, "sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
    ),
    "sequence parallel": (
        HybridParallelPlugin,
        TENSOR_PARALLEL | {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"},
    ),
}


@ranks(2)
@pytest.mark.parametrize("name", PLUGINS)
def test_captured_layers_train_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "recorder_for", lambda _: Rerun())
    kind, options = PLUGINS[name]
    losses, sent = [], []
    for graphs in (False, True):
        comm.reset_statistics()
        given: dict[str, Any] = dict(options)
        config = FP8Config(
            always=True,
            cuda_graphs=graphs,
            weight_copies=WeightCopies(high_precision=given.pop("high_precision", None)),
        )
        if kind is LowLevelZeroPlugin:
            given["precision"] = "bf16"
        model = tiny_llama()
        model.config.use_cache = name == "DDP"  # transformers' default; then calls that train make none
        boosted = boost(kind(use_fp8=True, fp8_config=config, **given), model)
        losses.append(train(boosted, steps=7))
        sent.append(comm.statistics().rows)
    assert losses[0] == losses[1]
    assert sent[0] == sent[1]
    captured = captured_layers(boosted.model)
    assert captured == {None: 2}, captured


@ranks(2)
@pytest.mark.parametrize("name", PLUGINS)
def test_ranks_that_replay_train_with_ranks_that_do_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of rank 1 keeps ahead of its GPU, which leaves its layers alone unless they wait for rank 0 inside."""
    rerun = Rerun()
    monkeypatch.setattr(rerun, "timer", lambda: lambda: lambda: 9.0 * dist.get_rank())
    monkeypatch.setattr(recorder, "recorder_for", lambda _: rerun)
    kind, options = PLUGINS[name]
    found = []
    for graphs in (False, True):
        given: dict[str, Any] = {"precision": "bf16", **options} if kind is not TorchDDPPlugin else dict(options)
        config = FP8Config(
            always=True,
            cuda_graphs=graphs,
            weight_copies=WeightCopies(high_precision=given.pop("high_precision", None)),
        )
        model = tiny_llama()
        model.config.use_cache = False
        boosted = boost(kind(use_fp8=True, fp8_config=config, **given), model)
        if graphs:
            capture_layers(boosted.model, only_where_host_limits=True)
        if hasattr(boosted.optimizer, "_reduce_bucket_size"):
            boosted.optimizer._reduce_bucket_size = 5000  # a layer fills several
        found.append(outcome(boosted, steps=WARM_UP + 4))
    waits = "parallel" in name
    assert captured_layers(boosted.model) == {None if waits or not dist.get_rank() else LEFT_ALONE: 2}
    assert_same_outcome(*found)


@ranks(1)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_that_come_in_another_order_are_clipped_to_the_same_bits(tied: bool, monkeypatch) -> None:
    """A graph gives a layer's gradients together, and the norm is a sum over them all."""
    monkeypatch.setattr(recorder, "recorder_for", lambda _: Rerun())
    weights = []
    for graphs in (False, True):
        model = tiny_llama(tie_word_embeddings=tied)
        model.config.use_cache = False
        config = FP8Config(always=True, cuda_graphs=graphs)
        plugin = LowLevelZeroPlugin(use_fp8=True, fp8_config=config, stage=1, precision="bf16", max_norm=0.1)
        boosted = boost(plugin, model)
        for step in range(7):
            boosted.step(*(token_batch(2 * step + micro) for micro in range(2)))
        weights.append(boosted.parameters())
    assert captured_layers(boosted.model) == {None: 2}
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


@ranks(2)
@pytest.mark.parametrize(("schedule", "zero_stage"), [("1f1b", 0), ("interleaved", 0), ("1f1b", 1)])
def test_captured_stages_train_as_they_are(schedule: str, zero_stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage holds some of the layers, and each of them runs several micro-batches before it goes backward.

    They are captured in the first step, after which ZeRO begins to give the weights.
    """
    monkeypatch.setattr(recorder, "recorder_for", lambda _: Rerun())
    losses = []
    for graphs in (False, True):
        model = tiny_llama(num_hidden_layers=4)
        model.config.use_cache = False
        plugin = HybridParallelPlugin(
            use_fp8=True,
            fp8_config=FP8Config(always=True, cuda_graphs=graphs),
            tp_size=1,
            pp_size=2,
            zero_stage=zero_stage,
            precision="bf16",
            num_microbatches=MICRO_BATCHES,
            **SCHEDULES[schedule],
        )
        boosted = boost(plugin, model)
        losses.append(Pipeline(boosted.booster, plugin, boosted.model, boosted.optimizer).train(5))
    assert losses[0] == losses[1]
    captured = captured_layers(boosted.model)
    assert captured == {None: 2}, captured


@ranks(2)
@pytest.mark.parametrize("experts", [1, 2], ids=["EP1", "EP2"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_layers_are_captured_around_experts_that_are_spread(
    experts: int, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "recorder_for", lambda _: Rerun())
    found: list[list[Any]] = []
    for graphs in (False, True):
        comm.reset_statistics()
        config = FP8Config(always=True, cuda_graphs=graphs)
        options = {"tp_size": 1, "pp_size": 1, "ep_size": experts, "zero_stage": 1, "precision": "bf16"}
        boosted = boost(MoeHybridParallelPlugin(use_fp8=True, fp8_config=config, **options), tiny_mixtral())
        if checkpointed:
            boosted.model.unwrap().gradient_checkpointing_enable({"use_reentrant": False})
        of_run: list[Any] = []
        for step in range(WARM_UP + 4):
            batches = [token_batch(10 * step + 2 * micro + dist.get_rank()) for micro in range(2)]
            of_run += boosted.step(*batches)
            boosted.model.eval()
            with torch.no_grad():
                of_run.append(boosted.loss(batches[0]).item())
            boosted.model.train()
        found.append([of_run, comm.statistics().rows, boosted.parameters()])
    (losses, sent, weights), (right, sent_before, weights_before) = found[1], found[0]
    assert losses == right
    assert sent == sent_before
    assert all(torch.equal(each, weights_before[name]) for name, each in weights.items())
    if experts == 1 and not report(boosted.model).grouped:  # in one parameter, nothing of which the host waits for
        of_more = "checkpointing is of more than the layer; checkpoint each layer by itself"
        assert captured_layers(boosted.model) == {of_more if checkpointed else None: 2}
        return
    why_eager = EXCHANGED if experts > 1 else LOOKED_AT
    why_not = "checkpointing must compute again what runs eagerly in it" if checkpointed else None
    assert captured_layers(boosted.model) == {why_not: 2}
    if not checkpointed:
        line = f", 2 layers replayed as CUDA graphs, graphs of 2 layers broken ({why_eager})"
        assert line in report(boosted.model).summary()


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_each_mixture_are_captured_around_experts_that_are_spread(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "recorder_for", lambda _: Rerun())
    losses = []
    for graphs in (False, dist.get_rank() == 0, True):
        config = FP8Config(always=True, emulate=True, cuda_graphs=graphs)
        options = {"tp_size": 1, "pp_size": 1, "ep_size": 2, "zero_stage": 1, "precision": "bf16"}
        model = tiny_mixture(family)
        model.config.use_cache = False
        boosted = boost(MoeHybridParallelPlugin(use_fp8=True, fp8_config=config, **options), model)
        losses.append([boosted.step(batch_of(2 * step + dist.get_rank()))[0] for step in range(WARM_UP + 3)])
    assert losses[0] == losses[1] == losses[2]
    mixtures = 1 if family.startswith("DeepSeek") else 2  # the first layer of theirs has no experts
    packed = family == "gpt-oss"
    assert captured_layers(boosted.model) == {"it is given a PackedEmbeddings" if packed else None: 2}
    assert graph_breaks(boosted.model) == ({} if packed else {EXCHANGED: mixtures})


def train_over_nccl() -> tuple[list[float], list[float], dict[str | None, int]]:
    """Losses of tensor parallelism on this GPU without graphs and with them, whose model is there to the end."""
    import colossalai

    colossalai.launch_from_torch(verbose=False)
    losses = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = tiny_llama()
        model.config.use_cache = False
        config = FP8Config(always=True, cuda_graphs=graphs)
        boosted = boost(HybridParallelPlugin(use_fp8=True, fp8_config=config, **TENSOR_PARALLEL), model)
        losses.append([boosted.step(token_batch(step).cuda())[0] for step in range(7)])
    captured = dict(captured_layers(boosted.model))
    dist.destroy_process_group()
    return *losses, captured


@pytest.mark.gpu
def test_ranks_that_hold_graphs_end() -> None:
    """NCCL gives up no communicator that a CUDA graph uses: the ranks would hang."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for eager, replayed, captured in run_ranks(train_over_nccl, 2, initialize=False, timeout=120):
        assert eager == replayed
        assert captured == {None: 2}
