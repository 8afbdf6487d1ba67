"""Ranks record one file of all, which has the lines that one process gets of the same batch; faults are named alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8booster import FP8Config, convert_to_fp8, fuse, record
from fp8booster.monitor.scales import ScaleRow
from fp8booster.monitor.sinks import read_scales
from fp8booster.monitor.watchdog import Watchdog
from fp8booster.nn.held_casts import plain_name
from fp8booster.nn.recording import NonFiniteStep
from tests.colossal.gemini import runs as gemini_runs
from tests.colossal.hybrid import runs as hybrid_runs
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import on_ranks
from tests.plugins import fsdp_runs, test_moments_in_8_bits, test_torch_ddp, training
from tests.plugins.training import Boosted

CONFIG = FP8Config(always=True, emulate=True)
LR = 1e-5

MODES: dict[str, tuple[Callable[[], Boosted], bool]] = {
    "LowLevelZero": (lambda: training.boost(training.ours(stage=2, use_fp8=True, fp8_config=CONFIG), lr=LR), True),
    "Gemini": (lambda: gemini_runs.boost(gemini_runs.wire(), lr=LR), True),
    "FSDP": (
        lambda: training.boost(fsdp_runs.fp8(fp8_config=CONFIG, **fsdp_runs.WRAPPINGS["blocks in BF16"]), lr=LR),
        True,
    ),
    "DDP": (lambda: training.boost(test_torch_ddp.fp8(fp8_config=CONFIG), tiny_llama().bfloat16(), lr=LR), True),
    "ZeRO 1 in hybrid": (lambda: hybrid("DP2 ZeRO 1"), True),
    "TP": (lambda: hybrid("TP2"), False),
    "TP with sequence parallelism": (lambda: hybrid("TP2 split_gather"), False),
    "PP": (lambda: hybrid("PP2 1f1b"), False),
}
"""What boosts a model, and whether ranks read different sequences."""


MESSAGES = {
    "LowLevelZero": {"reduce_scatter_tensor"},
    "Gemini": {"reduce_scatter_tensor"},
    "FSDP": {"reduce_scatter_tensor"},
    "DDP": {"all_reduce", "all_reduce sums"},
    "ZeRO 1 in hybrid": {"reduce_scatter_tensor"},
    "TP": {"all_reduce", "all_reduce sums"},
    "TP with sequence parallelism": {"reduce_scatter_tensor", "all_gather", "all_reduce", "all_reduce sums"},
    "PP": {"send"},
}
"""What is sent in FP8 besides weights and inputs, which are cast once for product and message."""


def hybrid(mode: str) -> Boosted:
    return hybrid_runs.start(hybrid_runs.fp8(mode, fp8_config=CONFIG), tiny_llama(), lr=LR)


def batch(step: int) -> torch.Tensor:
    return token_batch(seed=step, batch=8)


def steps(run: Boosted, spread: bool, count: int = 2) -> None:
    for step in range(1, count + 1):
        tokens = batch(step)
        run.step(tokens.chunk(dist.get_world_size())[dist.get_rank()] if spread else tokens)


def one_process(path: Path) -> dict[tuple[str, str], ScaleRow]:
    model = convert_to_fp8(tiny_llama().bfloat16(), CONFIG)
    fuse(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    with record(model, every=2, sink=path):
        for step in (1, 2):
            model(input_ids=batch(step), labels=batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return lines(path)


def lines(path: Path) -> dict[tuple[str, str], ScaleRow]:
    rows = [row for row in read_scales(path)[1] if row.step == 2]
    assert len({(row.layer, row.role) for row in rows}) == len(rows)
    return {(row.layer, row.role): row for row in rows}


def recorded(mode: str, folder: Path) -> None:
    boost, spread = MODES[mode]
    run = boost()
    with record(run.model, every=2, sink=folder / "scales.jsonl"):
        steps(run, spread)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_record_what_one_process_does(mode, tmp_path) -> None:
    on_ranks(2, recorded, mode=mode, folder=tmp_path)
    expected, found = one_process(tmp_path / "one.jsonl"), lines(tmp_path / "scales.jsonl")
    messages = [found.pop(key) for key in list(found) if key[1] == "message"]
    assert {row.layer for row in messages} == MESSAGES[mode]
    assert all(row.ranks in (1, 2) and 25 < row.snr_db < 45 and row.flushed < 0.1 for row in messages)
    assert found.keys() == expected.keys()
    for key, row in found.items():
        one = expected[key]
        assert row.format == one.format
        # a stage has its layers, and a shard may lie on one rank
        assert row.ranks in ((1,) if mode == "PP" else (1, 2) if row.role == "weight" else (2,))
        assert (row.saturated, row.non_finite) == (0, 0)
        # an output gradient is of a rank's own mean, and rounding differs with the scales of parts
        within = {"weight": 0.02, "input": 0.1, "output gradient": 0.35}[row.role]
        assert row.outlier == pytest.approx(one.outlier, rel=within), key
        assert row.snr_db == pytest.approx(one.snr_db, abs=1.0), key
        assert row.flushed == pytest.approx(one.flushed, abs=0.02), key
        if row.role != "output gradient":
            assert row.amax == pytest.approx(one.amax, rel=within), key
            assert row.scale == pytest.approx(448 / row.amax, rel=0.01) or "+" in key[0] or row.role == "weight"


def moments_recorded(engine: str, folder: Path) -> None:
    run = test_moments_in_8_bits.start(engine)
    with record(run.model, sink=folder / "scales.jsonl"):
        test_moments_in_8_bits.train(run, 1)


@pytest.mark.parametrize("engine", ["ZeRO 2", "DP2", "Gemini"])
def test_moments_of_every_parameter_are_recorded_by_its_name(engine, tmp_path) -> None:
    on_ranks(2, moments_recorded, engine=engine, folder=tmp_path)
    rows = [row for row in read_scales(tmp_path / "scales.jsonl")[1] if row.role == "first moment"]
    names = {name.removesuffix(".weight") for name, _ in tiny_llama().named_parameters()}
    assert {row.layer for row in rows} == names
    assert all(row.snr_db > 35 and row.non_finite == 0 for row in rows)


def sums_recorded(folder: Path) -> None:
    config = FP8Config(always=True, emulate=True, gradient_accumulation="8-bit")
    run = training.boost(training.ours(stage=2, use_fp8=True, fp8_config=config), lr=LR)
    with record(run.model, sink=folder / "scales.jsonl"):
        for seed in (1, 2):
            run.booster.backward(run.loss(batch(seed).chunk(2)[dist.get_rank()]), run.optimizer)
        run.optimizer.step()


def test_sums_of_gradients_in_8_bits_are_recorded_by_names(tmp_path) -> None:
    on_ranks(2, sums_recorded, folder=tmp_path)
    rows = [row for row in read_scales(tmp_path / "scales.jsonl")[1] if row.role == "gradient sum"]
    names = {name.removesuffix(".weight") for name, _ in tiny_llama().named_parameters()}
    assert {row.layer for row in rows} == names
    assert all(row.snr_db > 35 and (row.format, row.non_finite, row.scale) == ("int8", 0, None) for row in rows)


FAULTS = [(mode, "weight") for mode in ("LowLevelZero", "DDP", "TP", "PP")]
FAULTS += [(mode, "activation") for mode in ("LowLevelZero", "Gemini", "FSDP", "TP", "PP")]


def layer_of(model: nn.Module, end: str) -> nn.Module | None:
    """The layer whose name ends so, where this rank computes it."""
    found = [module for name, module in model.named_modules() if plain_name(name).endswith(end)]
    return found[0] if found and getattr(found[0], "weight", None) is not None else None


def break_weight(model: nn.Module) -> None:
    """On the last rank alone."""
    layer = layer_of(model, "layers.1.mlp.down_proj")
    if layer is not None and dist.get_rank() == 1:
        with torch.no_grad():
            layer.weight[3, 5] = math.nan


def overflow_before(model: nn.Module) -> None:
    """The activation that down_proj of the first layer reads, on all ranks that compute it."""
    layer = layer_of(model, "layers.0.mlp.down_proj")
    if layer is not None:
        layer.register_forward_pre_hook(lambda _, args: (args[0] * torch.tensor(math.inf),))


PLANTED = {
    "weight": (break_weight, "weight of model.layers.1.mlp.down_proj on rank 1 is the first tensor that is not"),
    "activation": (overflow_before, "input of model.layers.0.mlp.down_proj on rank 0 is the first tensor that is not"),
}


def found_on_rank(mode: str, fault: str) -> str:
    boost, spread = MODES[mode]
    run = boost()
    with record(run.model, every=1000) as recording:
        steps(run, spread, 1)
        PLANTED[fault][0](run.model.unwrap())
        tokens = batch(2).chunk(2)[dist.get_rank()] if spread else batch(2)
        loss = run.backward(tokens) if isinstance(run, hybrid_runs.HybridRun) else run.loss(tokens)
        with pytest.raises(NonFiniteStep) as raised:
            recording.allows_step(loss)
    return str(raised.value)


@pytest.mark.parametrize(("mode", "fault"), FAULTS)
def test_a_fault_is_named_alike_on_all_ranks(mode, fault) -> None:
    one, other = on_ranks(2, found_on_rank, mode=mode, fault=fault)
    assert one == other
    assert one.startswith(f"Step 2 is not finite, and {PLANTED[fault][1]}")


def skipped_on_rank() -> tuple[bool, int, list[str]]:
    said: list[str] = []
    run = MODES["DDP"][0]()
    rules = Watchdog(on_nonfinite="skip")
    with record(run.model, watchdog=rules, on_warning=said.append) as recording:
        allowed = recording.allows_step(math.nan if dist.get_rank() else 1.0)
        return allowed, recording.step, said


def test_ranks_skip_a_step_together_though_one_alone_saw_it() -> None:
    (one, step, said), (other, same_step, nothing) = on_ranks(2, skipped_on_rank)
    assert (one, other, step, same_step, nothing) == (False, False, 2, 2, [])
    assert len(said) == 1


KEEP_GRADIENTS: dict[str, Callable[[], Boosted]] = {
    **{
        f"ZeRO {stage}": lambda stage=stage: training.boost(
            training.ours(stage=stage, max_norm=1.0, use_fp8=True, fp8_config=CONFIG), lr=LR
        )
        for stage in (1, 2)
    },
    "Gemini": lambda: gemini_runs.boost(gemini_runs.wire(max_norm=1.0), lr=LR),
}


def checked_before_the_update_on_rank(engine: str) -> tuple[str, list[str]]:
    run, said = KEEP_GRADIENTS[engine](), []
    tokens = batch(1).chunk(2)[dist.get_rank()]
    with record(run.model, on_warning=said.append) as recording:
        run.optimizer.before_update = lambda: recording.allows_step(run.optimizer.get_grad_norm())
        run.step(tokens)
        expected = run.loss(tokens).item()
        run.booster.backward(run.loss(tokens) * math.nan, run.optimizer)
        assert said == []
        # what torch finds is 0, and not what went wrong
        for _ in range(2):
            assert recording.allows_step(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0))
        with pytest.raises(NonFiniteStep) as raised:
            run.optimizer.step()
        run.optimizer.zero_grad()
        assert run.loss(tokens).item() == expected
    return str(raised.value), said


@pytest.mark.parametrize("engine", KEEP_GRADIENTS)
def test_gradients_that_an_engine_keeps_are_checked_before_the_update_and_not_by_torch(engine) -> None:
    (one, said), (other, nothing) = on_ranks(2, checked_before_the_update_on_rank, engine=engine)
    assert one == other
    assert one.startswith("Step 2 is not finite, and output gradient of")
    (sentence,) = said
    assert sentence.startswith("allows_step was given 0, and no parameter of the model has a gradient in .grad")
    assert nothing == []


def warned_of_growth_on_rank_1() -> list[str]:
    model, said = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16(), []
    convert_to_fp8(model, CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with record(model, every=1, on_warning=said.append):
        for step in range(1, 16):
            if step > 8 and dist.get_rank() == 1:
                with torch.no_grad():
                    model[1].weight[3] *= 1.5
            model(torch.randn(16, 32, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return said


def test_rank_0_warns_of_a_weight_that_grows_on_another_rank() -> None:
    (sentence,), nothing = on_ranks(2, warned_of_growth_on_rank_1)
    assert "weight of 1: its largest value" in sentence
    assert nothing == []


def norms_under_fsdp2() -> list[bool]:
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), FP8Config(always=True))
    fully_shard(model)
    allowed = []
    with record(model, watchdog=Watchdog(on_nonfinite="skip"), on_warning=lambda _: None) as recording:
        for factor in (1.0, math.nan if dist.get_rank() else 1.0):
            (factor * model(torch.randn(16, 32))).sum().backward()
            allowed.append(recording.allows_step(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
    return allowed


def test_the_norm_of_fsdp2_is_that_of_all_ranks() -> None:
    assert on_ranks(2, norms_under_fsdp2) == [[True, False]] * 2


def blamed_twice() -> list[str]:
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32)), FP8Config(always=True))
    with record(model) as recording:
        sentences = [recording.blame()]
        dist.barrier()
        model(torch.full((16, 32), math.nan if dist.get_rank() else 1.0))
        return [*sentences, recording.blame()]


def test_a_step_that_is_blamed_twice_is_looked_at_twice() -> None:
    one, other = on_ranks(2, blamed_twice)
    assert one == other
    assert "outside FP8 layers" in one[0]
    assert "input of 0 on rank 1 is the first tensor that is not" in one[1]
