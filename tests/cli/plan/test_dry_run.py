"""Steps on tensors without values, compared with steps of ranks."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor
from transformers import MixtralConfig, PretrainedConfig

from benchmarks import plan
from fp8booster.cli.plan import dry_run
from fp8booster.cli.plan.configurations import GIB, KEPT, MASTERS, MOMENTS, WEIGHTS, planned_config
from fp8booster.cli.plan.counted_graphs import GRAPHS, CountedGraphs
from fp8booster.cli.plan.dry_run import NotCaptured, shortened
from fp8booster.cli.train.options import TrainOptions
from fp8booster.kernels import adamw_8bit, device
from fp8booster.kernels.operators import Operator
from fp8booster.monitor.memory import ACTIVATIONS, FORWARD, FREE_IN_POOLS, GRADIENTS
from fp8booster.nn.fused.self_attention import FusedAttention
from fp8booster.nn.graphs.recorder import Memory
from fp8booster.training.models import build
from tests.distributed import run_ranks


def options(**given: object) -> TrainOptions:
    sizes = {"model": "tiny", "batch": 2, "sequence": 64, "nproc": 2}
    return TrainOptions(**sizes | given)


def small_config(asked: TrainOptions) -> PretrainedConfig:
    """A layer for each stage of a pipeline."""
    return shortened(planned_config(asked), asked.pp)


@functools.cache
def dry_steps(precision: str = "fp8", memory_a_value: float = 1e6, **given: object) -> dict[str, Counter[str]]:
    asked = options(**given)
    return dry_run.dry_steps(asked, precision, small_config(asked), memory_a_value)


def peak(found: dict[str, Counter[str]]) -> int:
    return max(parts.total() for parts in found.values())


def real_step(given: dict[str, object], precision: str) -> dict[str, Counter[str]]:
    """Count what this rank's tensors take."""
    tracker = dry_run.MemoryTracker()
    run = Operator.run

    def as_a_kernel(self: Operator, *args: object, **kwargs: object) -> object:
        with tracker.as_one():
            return run(self, *args, **kwargs)

    with patch.object(Operator, "run", as_a_kernel), tracker:
        return dry_run.take_steps(tracker, options(**given), precision, small_config(options(**given)))


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ({}, "fp8"),
        ({"stage": 1, "accumulate": 2}, "bf16"),
        ({"accumulate": 2, "fp8_options": ("gradient_accumulation=8-bit",)}, "fp8"),
        ({"plugin": "hybrid", "tp": 2}, "fp8"),
    ],
    ids=["zero", "zero in bf16, micro-batches", "zero, sums in 8 bits", "tp"],
)
def test_peaks_are_those_of_a_rank_that_trains(given: dict[str, object], precision: str) -> None:
    real, _ = run_ranks(real_step, 2, given, precision)
    planned = dry_steps(precision, **given)
    assert peak(planned) == pytest.approx(peak(real), rel=0.01)
    for part in (WEIGHTS, MASTERS, MOMENTS, ACTIVATIONS):
        assert planned[FORWARD][part] == pytest.approx(real[FORWARD][part], rel=0.01)


def test_attention_is_fused_in_a_plan_as_in_a_run(monkeypatch):
    attended = []
    attend = FusedAttention.attend
    monkeypatch.setattr(FusedAttention, "attend", lambda *args: attended.append(args) or attend(*args))
    dry_run.dry_steps(options(), "fp8", small_config(options()), 1e6)
    without_values = [query for _, query, *_ in attended if isinstance(query, FakeTensor)]
    assert len(without_values) == 2  # one layer, two steps; trials have values


def test_layers_are_counted_from_two_models():
    config = planned_config(options())
    assert config.num_hidden_layers == 4
    whole = dry_run.dry_steps(options(), "fp8", config, 1e6)
    assert peak(dry_run.footprint(options(), "fp8", 80 * 2**30)) == pytest.approx(peak(whole), rel=0.01)


def test_a_model_with_layers_of_several_sizes_is_run_whole(monkeypatch):
    def values(config: PretrainedConfig) -> int:  # the first two layers are smaller
        return sum(1 if layer < 2 else 5 for layer in range(config.num_hidden_layers))

    run = []
    monkeypatch.setattr(dry_run, "_values", values)
    monkeypatch.setattr(dry_run, "dry_steps", lambda _, __, config, each: run.append((config.num_hidden_layers, each)))
    dry_run.footprint(options(), "fp8", 120)
    assert run == [(4, 10)]


@pytest.mark.parametrize(
    "given",
    [
        {"plugin": "hybrid", "pp": 2, "accumulate": 4},
        {"plugin": "hybrid", "tp": 2, "sp_mode": "split_gather"},
        {"plugin": "hybrid", "sp": 2, "sp_mode": "all_to_all"},
        {"plugin": "hybrid", "tp": 2, "stage": 0},
        {"plugin": "ddp"},
        {"plugin": "fsdp"},
    ],
    ids=lambda given: " ".join(map(str, given.values())),
)
def test_each_plugin_shares_the_states_as_it_does(given: dict[str, object]) -> None:
    model = build(small_config(options(**given)), device=torch.device("meta"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parts = dry_steps(**given)[FORWARD]
    shared = 1 if given["plugin"] == "ddp" else 2
    assert parts[MOMENTS] == pytest.approx(8 * parameters / shared, rel=0.02)
    masters = 0 if given["plugin"] in ("ddp", "fsdp") else 4 * parameters / shared
    assert parts[MASTERS] == pytest.approx(masters, rel=0.02)


def test_fp8_weights_that_a_step_frees_have_a_part_of_their_own():
    in_bf16, in_fp8 = (dry_steps(precision, plugin="ddp", sequence=16) for precision in ("bf16", "fp8"))
    model = build(small_config(options()), device=torch.device("meta"))
    values = sum(layer.weight.numel() for layer in model.model.modules() if isinstance(layer, torch.nn.Linear))
    more = in_fp8[FORWARD][KEPT] - in_bf16[FORWARD][KEPT]
    assert 2 * values <= more < 2.1 * values  # and their transposes


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="experts are modules")
def test_experts_in_one_parameter_are_planned_in_grouped_products(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MixtralConfig(
        **sizes, num_key_value_heads=4, num_local_experts=4, vocab_size=128, max_position_embeddings=64
    )
    config.save_pretrained(tmp_path)
    in_bf16, in_fp8 = (dry_steps(precision, model=str(tmp_path)) for precision in ("bf16", "fp8"))
    values = 4 * 3 * 256 * 512
    more = in_fp8[FORWARD][KEPT] - in_bf16[FORWARD][KEPT]
    assert 2 * values < more < 2.5 * values  # FP8 weights and their transposes; attention has some too
    assert in_fp8[FORWARD][MOMENTS] == in_bf16[FORWARD][MOMENTS]


def test_what_makes_a_run_smaller_does():
    found = dry_steps(sequence=1024)
    assert peak(dry_steps(sequence=1024, checkpointing=True)) < 0.9 * peak(found)
    assert peak(dry_steps(sequence=1024, fp8_options=("activations.saved=8-bit",))) < 0.95 * peak(found)


def test_some_layers_are_checkpointed_between_none_and_all(monkeypatch):
    """Every number of layers is between the same two footprints, which are counted once."""
    counted, count_steps = {}, dry_run.dry_steps

    def count_once(asked: TrainOptions, precision: str, config: PretrainedConfig, *memory: float) -> object:
        key = asked, config.num_hidden_layers
        if key not in counted:
            counted[key] = count_steps(asked, precision, config, *memory)
        return counted[key]

    monkeypatch.setattr(dry_run, "dry_steps", count_once)
    sizes = {"sequence": 1024, "checkpointing": True}
    config = planned_config(options(**sizes))
    layers = config.num_hidden_layers
    assert layers > 2
    for count in (1, layers - 1):
        asked = options(**sizes, checkpointed_layers=count)
        expected = peak(dry_run.dry_steps(asked, "fp8", config, 1e6))
        assert peak(dry_run.footprint(asked, "fp8", int(1e6 * dry_run._values(config)))) == pytest.approx(
            expected, rel=0.05
        )


def test_an_update_in_8_bits_is_not_computed_as_it_is_defined(monkeypatch) -> None:
    """A part of a weight after the other: without values a model of billions of parameters would take hours."""
    defined = []
    monkeypatch.setattr(adamw_8bit, "_update_part", lambda *_: defined.append("a part"))
    asked = options(optimizer="adamw-8bit", nproc=1)
    assert peak(dry_run.dry_steps(asked, "fp8", small_config(asked), 1e6)) > 0
    assert defined == []


def test_gradients_that_wait_for_the_next_micro_batch_are_counted_by_their_kind():
    model = build(small_config(options()), device=torch.device("meta"))
    of_rank = sum(parameter.numel() for parameter in model.parameters()) / 2
    once = dry_steps()
    for kind, bytes_each in (("32-bit", 4), ("16-bit", 2), ("8-bit", 1 + 4 / 128)):
        found = dry_steps(accumulate=3, fp8_options=(f"gradient_accumulation={kind}",))
        assert found[FORWARD][GRADIENTS] == pytest.approx(bytes_each * of_rank, rel=0.01)
        assert found[FORWARD][ACTIVATIONS] == pytest.approx(once[FORWARD][ACTIVATIONS], rel=0.01)


def test_a_default_goes_by_the_memory_of_the_gpu():
    """A model with few layers has its share of it."""
    assert dry_steps(memory_a_value=1)[FORWARD][WEIGHTS] < 0.8 * dry_steps()[FORWARD][WEIGHTS]


def test_lists_with_an_entry_for_each_layer_are_cut():
    config = planned_config(options())
    config.kinds = ["full"] * 4
    short = shortened(config, 2)
    assert (short.num_hidden_layers, short.kinds, config.kinds) == (2, ["full"] * 2, ["full"] * 4)


def test_a_dry_step_does_not_ask_this_machines_gpu_for_fp8(monkeypatch) -> None:
    asked = options(fp8_options=("scaling=blockwise",))
    expected = dry_run.dry_steps(asked, "fp8", small_config(asked), 1e6)
    for name in ("why_no_fp8", "why_no_blockwise"):
        monkeypatch.setattr(device, name, lambda _: "this GPU is too old")
    assert dry_run.dry_steps(asked, "fp8", small_config(asked), 1e6) == expected


def with_graphs(captured: bool = True, **given: object) -> TrainOptions:
    return options(**given, fp8_options=(f"cuda_graphs={str(captured).lower()}",))


@pytest.mark.parametrize("sizes", ["1 x 1", "8 x 1", "2 x 4"])
def test_graphs_take_what_was_measured(sizes: str) -> None:
    cases = {case.options.fp8_options: case for case in plan.graph_cases() if f", {sizes}, " in case.name}
    eager, captured = (cases[with_graphs(each).fp8_options] for each in (False, True))
    # since then each spares a copy of two bytes a weight: of gradients, or of what the engine gives in FP8
    config = planned_config(captured.options)
    layers = build(config, device=torch.device("meta")).model.layers
    saved = 2 * sum(parameter.numel() for parameter in layers.parameters()) / GIB
    planned = plan.planned_peak(captured) - plan.planned_peak(eager)
    assert planned == pytest.approx(captured.measured - eager.measured - saved, abs=0.3)
    assert planned > 1.5


def test_a_capture_keeps_no_more_than_its_budget(monkeypatch) -> None:
    asked, config = with_graphs(), shortened(planned_config(options()), 3)
    budgets, kept = [], []
    count, add = CountedGraphs.why_no_room, Memory.add
    monkeypatch.setattr(CountedGraphs, "why_no_room", lambda *given: budgets.append(given[2:]) or count(*given))
    monkeypatch.setattr(Memory, "add", lambda *given: kept.append(sum(given[2].values())) or add(*given))
    dry_run.dry_steps(asked, "fp8", config, 1e6)
    assert len(kept) == len(budgets) == 3
    for (budget, passing), held in zip(budgets, kept, strict=True):
        assert 0 < held < budget
        assert passing > 0


@pytest.mark.parametrize(
    "given", [{}, {"plugin": "hybrid", "pp": 2, "accumulate": 4}, {"checkpointing": True}, {"plugin": "ddp"}]
)
def test_graphs_are_counted_beside_what_a_step_takes(given: dict[str, object]) -> None:
    found = [
        dry_run.dry_steps(asked, "fp8", shortened(planned_config(asked), 4), 1e6)
        for asked in (with_graphs(each, **given) for each in (False, True))
    ]
    # of checkpointed layers the pool alone stays
    eager, captured = (each[FORWARD][GRAPHS] + each[FORWARD][FREE_IN_POOLS] for each in found)
    assert eager == 0 < captured
    assert peak(found[0]) < peak(found[1])


def test_what_cannot_be_captured_is_told() -> None:
    for given, reason in (({"plugin": "fsdp"}, "FSDP gathers"), ({}, "layers that are alike")):
        asked = with_graphs(**given)
        with pytest.raises(NotCaptured, match=reason):
            dry_run.dry_steps(asked, "fp8", shortened(planned_config(asked), 1), 1e6)
