"""AdamW with 8-bit moments under each engine: learns as in FP32, takes its bytes, and saves its states as FP32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8booster import FP8Config
from fp8booster.optim import AdamW
from tests.colossal.gemini import runs as gemini
from tests.colossal.hybrid import runs as hybrid
from tests.colossal.models import tiny_llama, token_batch
from tests.colossal.moe.models import tiny_mixtral
from tests.distributed import ranks, shared_folder
from tests.plugins import fsdp_runs, training
from tests.plugins.training import Boosted, assert_equal

QUICK = FP8Config(emulate=True)
FP8 = {"use_fp8": True, "fp8_config": QUICK}


def ddp(**arguments: Any) -> Any:
    from fp8booster.plugins.torch_ddp import TorchDDPPlugin

    return TorchDDPPlugin(**arguments)


def moe(**arguments: Any) -> Any:
    from fp8booster.plugins.moe_hybrid_parallel import MoeHybridParallelPlugin

    return MoeHybridParallelPlugin(tp_size=1, pp_size=1, ep_size=2, zero_stage=1, precision="bf16", **arguments)


ENGINES = {
    "ZeRO 1": lambda: training.ours(stage=1, **FP8),
    "ZeRO 2": lambda: training.ours(stage=2, **FP8),
    "ZeRO 2, clipped": lambda: training.ours(stage=2, max_norm=0.5, **FP8),
    "ZeRO 1, native": lambda: training.ours(stage=1),
    "ZeRO 1, offloaded": lambda: training.ours(stage=1, cpu_offload=True, **FP8),
    "DP2": lambda: hybrid.fp8("DP2", fp8_config=QUICK),
    "DP2 ZeRO 1": lambda: hybrid.fp8("DP2 ZeRO 1", fp8_config=QUICK),
    "TP2": lambda: hybrid.fp8("TP2", fp8_config=QUICK),
    "TP2 ZeRO 1": lambda: hybrid.fp8("TP2 ZeRO 1", fp8_config=QUICK),
    "PP2 ZeRO 1": lambda: hybrid.fp8("PP2 1f1b ZeRO 1", fp8_config=QUICK),
    "MoE": lambda: moe(**FP8),
    "Gemini": gemini.wire,
    "Gemini, clipped": lambda: gemini.wire(max_norm=0.5),
    "Gemini, offloaded": lambda: gemini.wire(**gemini.OFFLOADED),
    "Gemini, native": gemini.ours,
    "FSDP": lambda: fsdp_runs.fp8(auto_wrap_policy=fsdp_runs.BLOCKS, mixed_precision=fsdp_runs.BF16),
    "FSDP, native": lambda: fsdp_runs.ours(auto_wrap_policy=fsdp_runs.BLOCKS),
    "DDP": lambda: ddp(**FP8),
}
"""Of each plugin; native: without FP8, so that Colossal-AI's own optimizers run."""

SAVED = ("ZeRO 1", "ZeRO 2", "DP2", "TP2 ZeRO 1", "PP2 ZeRO 1", "MoE", "Gemini", "Gemini, offloaded", "FSDP", "DDP")

LEARN = [engine for engine in ENGINES if engine not in ("ZeRO 2", "TP2", "TP2 ZeRO 1", "Gemini")]
"""Those left out train in other tests here, and learn with clipping, over replicas or through stages."""


def start(engine: str, optimizer: Any = AdamW, lr: float = 3e-3) -> Boosted:
    """A boosted model with this optimizer."""
    plugin = ENGINES[engine]()
    model = tiny_mixtral() if engine == "MoE" else tiny_llama()
    if "DP2" in engine or "P2" in engine or engine == "MoE":
        return hybrid.start(plugin, model, lr=lr, optimizer=optimizer)
    if "Gemini" in engine:
        run = training.boost(plugin, model, lr=lr, optimizer=optimizer)
        return gemini.Run(run.booster, run.model, run.optimizer)
    return training.boost(plugin, model, lr=lr, optimizer=optimizer)


def train(run: Boosted, steps: int, micro_batches: int = 1, seed: int = 0, **how: Any) -> list[float]:
    """Take steps on the same few batches, so that there is something to learn; the losses of this rank."""
    share = 0 if getattr(run.booster.plugin, "dp_size", 2) == 1 else dist.get_rank()
    batches = [token_batch(seed=seed + 2 * number + share, batch=4) for number in range(micro_batches)]
    return [loss for _ in range(steps) for loss in run.step(*batches, **how)]


def held(run: Boosted) -> dict[torch.Tensor, Any]:
    """The states that this rank holds, by what they are of."""
    return run.optimizer.optim.state


@ranks(2)
@pytest.mark.parametrize("engine", LEARN)
def test_it_learns_as_with_moments_in_fp32(engine: str) -> None:
    expected = train(start(engine, torch.optim.AdamW), 6)
    run = start(engine)
    found = train(run, 6)
    assert expected[-1] < 0.9 * expected[0]
    assert found == pytest.approx(expected, rel=0.02)
    states = held(run)
    assert len(states) > 0
    kept = sum(state.nbytes + (0 if tensor.dtype is torch.bfloat16 else 4 * n) for tensor, state, n in sized(states))
    values = sum(n for *_, n in sized(states))
    # blocks that are not full weigh more in a tiny model
    assert 6.0 * values < kept <= 6.1 * values + 12 * len(states)
    assert run.optimizer.optim.skipped_blocks == 0


def sized(states: dict[torch.Tensor, Any]) -> list[tuple[torch.Tensor, Any, int]]:
    """(tensor, its state, values)."""
    return [(tensor, state, state.codes["exp_avg"].numel()) for tensor, state in states.items()]


@ranks(2)
@pytest.mark.parametrize(
    ("engine", "how"),
    [
        ("ZeRO 1", "no_sync"),
        ("ZeRO 2", "accumulating"),
        ("DP2", "no_sync"),
        ("FSDP", "no_sync"),
        ("FSDP", "accumulating"),
    ],
)
def test_it_accumulates_gradients(engine: str, how: str) -> None:
    losses = [
        train(start(engine, kind), 6, micro_batches=2, no_sync=how == "no_sync") for kind in (torch.optim.AdamW, AdamW)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def save(run: Boosted, folder: Path, shard: bool) -> tuple[str, str]:
    """Save model and optimizer; returns both paths."""
    model, optimizer = (str(folder / name) + ("" if shard else ".bin") for name in ("model", "optimizer"))
    run.booster.save_model(run.model, model, shard=shard)
    run.booster.save_optimizer(run.optimizer, optimizer, shard=shard)
    dist.barrier()
    return model, optimizer


def whole(run: Boosted) -> dict[str, torch.Tensor]:
    """Copies of the weights of this rank."""
    if hasattr(run.model, "chunk_manager"):
        return gemini.weights(run)
    return run.parameters()


def decoded(run: Boosted) -> list[torch.Tensor]:
    """Each moment of this rank, and the steps, in the order of the parameters."""
    numbers = run.optimizer.optim._numbers
    states = sorted(held(run).items(), key=lambda item: numbers[item[0]])
    return [torch.as_tensor(value) for _, state in states for value in state.values()]


@ranks(2)
@pytest.mark.parametrize("engine", SAVED)
def test_a_resumed_run_has_the_same_bits(engine: str) -> None:
    writer, reader = start(engine), start(engine)
    for shard in (True, False) if engine != "MoE" else (True,):  # which Colossal-AI cannot save in one file
        train(writer, 2)
        model, optimizer = save(writer, shared_folder(f"{engine} {shard}"), shard)
        train(reader, 1, seed=50)  # other states, which are replaced
        writer.booster.load_model(writer.model, model)  # masters as they are saved; the states stay what they are
        reader.booster.load_model(reader.model, model)
        reader.booster.load_optimizer(reader.optimizer, optimizer)
        pairs = list(zip(decoded(writer), decoded(reader), strict=True))
        assert all(torch.equal(one, other) for one, other in pairs)
        assert all(state.codes["exp_avg"].dtype is torch.int8 for state in held(reader).values())
        assert train(writer, 2) == train(reader, 2)
        assert_equal(whole(writer), whole(reader))


@ranks(2)
@pytest.mark.parametrize("engine", ["ZeRO 1", "DP2", "TP2 ZeRO 1", "Gemini", "FSDP", "DDP"])
def test_states_go_to_torchs_adamw_and_back(engine: str) -> None:
    torchs, ours = start(engine, torch.optim.AdamW), start(engine)
    train(torchs, 3)
    for writer, reader, shard in ((torchs, ours, True), (ours, torchs, False)):
        model, optimizer = save(writer, shared_folder(f"{engine} {shard}"), shard)
        reader.booster.load_model(reader.model, model)
        reader.booster.load_optimizer(reader.optimizer, optimizer)
        assert train(reader, 3) == pytest.approx(train(writer, 3), rel=0.02)


@ranks(2)
@pytest.mark.parametrize(("engine", "bad"), [("ZeRO 1", math.nan), ("ZeRO 2, clipped", math.inf), ("DP2", math.inf)])
def test_a_gradient_that_is_not_finite_leaves_states_as_they_were(engine: str, bad: float) -> None:
    run = start(engine)
    train(run, 2)
    before = [value.clone() for value in decoded(run)]
    factor = bad if dist.get_rank() == 1 else 1.0
    parameter = next(each for name, each in run.model.unwrap().named_parameters() if "1.input_layernorm" in name)
    hook = parameter.register_hook(lambda gradient: factor * gradient)
    train(run, 1)
    hook.remove()
    after = decoded(run)
    assert run.optimizer.optim.skipped_blocks > 0
    assert all(value.isfinite().all() for value in after)
    assert any(torch.equal(one, other) for one, other in zip(before, after, strict=True) if one.any() and one.dim())
    assert all(math.isfinite(loss) for loss in train(run, 2))


@ranks(2)
def test_chance_differs_between_shards_and_not_between_copies() -> None:
    for engine, same in {"ZeRO 1": False, "DP2": True, "TP2": True, "FSDP": False, "DDP": True}.items():
        numbers = list(start(engine).optimizer.optim._numbers.values())
        of_ranks: list[Any] = [None, None]
        dist.all_gather_object(of_ranks, numbers)
        assert (of_ranks[0] == of_ranks[1]) is same, engine
        assert len(set(numbers)) == len(numbers)


def in_backward(*args: Any, **named: Any) -> AdamW:
    """The optimizer that updates in backward."""
    return AdamW(*args, **named, update_in_backward=True)


@ranks(2)
@pytest.mark.parametrize(
    ("engine", "what_to_do"),
    [
        ("ZeRO 1, native", "give use_fp8=True and fp8_communication, or leave that out"),
        ("ZeRO 2, clipped", "give max_norm=0"),
        ("TP2 ZeRO 1", "use LowLevelZeroPlugin"),
        ("Gemini", "use LowLevelZeroPlugin"),
        ("FSDP", "use LowLevelZeroPlugin"),
        ("DDP", "use LowLevelZeroPlugin"),
    ],
)
def test_updates_in_backward_are_refused_where_all_gradients_are_needed(engine: str, what_to_do: str) -> None:
    with pytest.raises(ValueError, match=what_to_do):
        start(engine, in_backward)


@ranks(2)
def test_updates_in_backward_are_refused_with_a_loss_scale_and_with_micro_batches() -> None:
    plugin = training.ours(precision="fp16", **FP8)
    with pytest.raises(ValueError, match='give precision="bf16"'):
        training.boost(plugin, tiny_llama(), optimizer=in_backward)
    with pytest.raises(ValueError, match="make the optimizer with micro_batches=1"):
        start("ZeRO 2", lambda *args, **named: in_backward(*args, **named, micro_batches=2))


@ranks(2)
@pytest.mark.parametrize(
    ("engine", "no_sync"), [("ZeRO 1", False), ("ZeRO 1", True), ("ZeRO 2", False), ("ZeRO 1, offloaded", False)]
)
def test_updates_in_backward_are_those_of_the_step_bit_for_bit(engine: str, no_sync: bool) -> None:
    how = {"micro_batches": 2, "no_sync": True} if no_sync else {}
    expected, found = start(engine), start(engine, in_backward)
    schedules = [torch.optim.lr_scheduler.StepLR(run.optimizer.optim, 2, 0.5) for run in (expected, found)]
    for seed in range(4):
        assert train(found, 1, seed=seed, **how) == train(expected, 1, seed=seed, **how)
        for schedule in schedules:
            schedule.step()
    masters = [
        [each for group in run.optimizer.optim.param_groups for each in group["params"]] for run in (expected, found)
    ]
    for one, other in zip(*masters, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(decoded(expected), decoded(found), strict=True):
        assert torch.equal(one, other)


@ranks(2)
def test_no_gradient_waits_for_a_step_that_comes_after_updates_in_backward() -> None:
    run = start("ZeRO 2", in_backward)
    loss = run.loss(token_batch(seed=dist.get_rank()))
    run.booster.backward(loss, run.optimizer)
    stores = run.optimizer.pg_to_grad_store.values()
    assert not any(store.get_working_grads_by_group_id(0) for store in stores)
    assert all(parameter.grad is None for parameter in run.model.parameters())
    for clip in (run.optimizer.clip_grad_by_norm, run.optimizer.clip_grad_by_value):
        with pytest.raises(ValueError, match="leaves no gradients to clip"):
            clip(1.0)
    with pytest.raises(RuntimeError, match=r"call step\(\) after each backward"):
        run.booster.backward(run.loss(token_batch(seed=dist.get_rank())), run.optimizer)


@ranks(2)
def test_colossal_ais_own_plugin_is_refused() -> None:
    run = training.boost(training.native(), optimizer=AdamW)
    with pytest.raises(TypeError, match=r"boost it with a plugin of fp8booster\.plugins"):
        train(run, 1)
