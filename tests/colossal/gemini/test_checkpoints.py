"""Checkpoints cross between Gemini with FP8, native Gemini and LowLevelZero, in every form that Gemini saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.colossal.gemini import runs as gemini_runs
from tests.colossal.gemini.runs import OFFLOADED, masters, native, weights, wire
from tests.colossal.models import tiny_llama
from tests.distributed import ranks, shared_folder
from tests.plugins import training
from tests.plugins.training import Boosted, assert_close, assert_equal, rank_batches, train

FORMS: dict[str, dict[str, Any]] = {
    "one file": {},
    "one safetensors file": {"use_safetensors": True},
    "one file in the background": {"use_safetensors": True, "use_async": True},
    "shards": {"shard": True},
    "safetensors shards": {"shard": True, "use_safetensors": True},
    "shards in the background": {"shard": True, "use_safetensors": True, "use_async": True},
}
"""Ways to save a model: the arguments of `save_model`. An optimizer knows no safetensors."""

SHARD = 0.05


def zero() -> Boosted:
    """LowLevelZeroPlugin with FP8 products and FP8 on the wire."""
    return training.boost(training.ours(use_fp8=True, fp8_config=gemini_runs.config()))


WRITERS = {
    "fp8": lambda: gemini_runs.boost(wire()),
    "fp8 on the host": lambda: gemini_runs.boost(wire(**OFFLOADED)),
    "fp8, accumulating": lambda: gemini_runs.boost(wire(enable_gradient_accumulation=True)),
    "fp8, no masters": lambda: gemini_runs.boost(wire(master_weights=False)),
    "native": lambda: gemini_runs.boost(native()),
    "zero": zero,
}

CROSSINGS = (
    ("fp8", "fp8", tuple(FORMS)),
    # what crosses does not depend on the form: each form has a weight and a moment from everywhere
    ("fp8 on the host", "fp8", ("safetensors shards", "one file")),
    ("fp8, accumulating", "fp8 on the host", ("safetensors shards",)),
    ("fp8, no masters", "fp8, no masters", ("one file",)),
    ("fp8", "native", ("one file",)),
    ("fp8", "zero", ("safetensors shards",)),
    ("native", "fp8", ("safetensors shards",)),
    ("zero", "fp8", ("one file",)),
)


def save(run: Boosted, form: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Save model and optimizer; returns both paths once the files are whole."""
    ending = "" if form.get("shard") else ".safetensors" if form.get("use_safetensors") else ".bin"
    model = str(folder / f"model{ending}")
    of_optimizer = {name: value for name, value in form.items() if name != "use_safetensors"}
    ending = "" if form.get("shard") else ".safetensors" if form.get("use_async") else ".bin"
    optimizer = str(folder / f"optimizer{ending}")
    run.booster.save_model(run.model, model, size_per_shard=SHARD, **form)
    run.booster.save_optimizer(run.optimizer, optimizer, size_per_shard=SHARD, **of_optimizer)
    run.booster.checkpoint_io._sync_io()
    dist.barrier()
    return model, optimizer


def whole(run: Boosted) -> dict[str, torch.Tensor]:
    """The weights of any run, to the bits that native and ZeRO checkpoints keep."""
    if hasattr(run.model, "chunk_manager"):
        return {name: value.bfloat16() for name, value in weights(run).items()}
    return {name: value.cpu() for name, value in run.parameters().items()}


def moments(run: Boosted) -> dict[str, torch.Tensor]:
    """The optimizer's states, whole."""
    arguments = {"only_rank_0": False} if hasattr(run.model, "chunk_manager") else {}
    return {
        f"{number}.{name}": torch.as_tensor(value, dtype=torch.float32).flatten()
        for number, values in run.optimizer.state_dict(**arguments)["state"].items()
        for name, value in values.items()
    }


@ranks(2)
@pytest.mark.parametrize("crossing", [*(f"{source} to {target}" for source, target, _ in CROSSINGS)])
def test_checkpoints_cross(crossing: str) -> None:
    source, target, forms = next(one for one in CROSSINGS if " to ".join(one[:2]) == crossing)
    writer, reader = WRITERS[source](), WRITERS[target]()
    train(writer, steps=2)
    expected, states = whole(writer), moments(writer)
    exact = source.startswith("fp8") and target.startswith("fp8") and "no masters" not in source
    batch = rank_batches(1)[0]
    for form in forms:
        model, optimizer = save(writer, FORMS[form], shared_folder(f"{crossing}/{form}"))
        train(reader, steps=1)  # other weights, and FP8 copies of them
        reader.booster.load_model(reader.model, model)
        reader.booster.load_optimizer(reader.optimizer, optimizer)
        assert_equal(expected, whole(reader))
        assert_equal(states, moments(reader))
        if exact:
            assert_equal(masters(writer), masters(reader))
        with torch.no_grad():
            losses = [run.loss(batch).item() for run in (writer, reader)]
        # ZeRO's and Colossal-AI's masters lack the bits below BF16
        assert losses[0] == losses[1] if exact else abs(losses[0] - losses[1]) < 5e-3 * losses[0]
    assert_close(train(writer), train(reader), 2e-2, gradients="zero" not in crossing)


@ranks(2)
def test_keys_and_values_are_those_of_the_masters() -> None:
    run = gemini_runs.boost(wire())
    train(run)
    model, _ = save(run, FORMS["safetensors shards"], shared_folder("keys"))
    files = sorted(Path(model).glob("*.safetensors"))
    assert len(files) > 1
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert_equal(masters(run), found)
    assert found.keys() == tiny_llama().state_dict().keys()
    # saving changes nothing that training sees
    undisturbed = gemini_runs.boost(wire())
    train(undisturbed)
    assert train(undisturbed) == train(run)


@ranks(2)
@pytest.mark.parametrize(
    "case", ["built in FP32", "built in BF16", "in one chunk", "in one chunk, accumulating", "no masters"]
)
def test_checkpoints_have_the_dtype_of_the_model_or_native_ones(case: str) -> None:
    arguments = {
        "in one chunk": {"min_chunk_size_m": 32, "search_range_m": 32},
        "in one chunk, accumulating": {
            "min_chunk_size_m": 32,
            "search_range_m": 32,
            "enable_gradient_accumulation": True,
        },
        "no masters": {"master_weights": False},
    }.get(case, {})
    built_in = torch.float32 if case == "built in FP32" else torch.bfloat16
    run = gemini_runs.boost(wire(**arguments), tiny_llama().to(built_in))
    train(run, steps=1)
    found = run.model.state_dict(only_rank_0=False)
    dtypes = {value.dtype for value in found.values()}
    if case == "built in FP32":
        assert_equal(masters(run), found)
    else:
        expected = gemini_runs.boost(native(**arguments), tiny_llama().to(built_in)).model.state_dict(only_rank_0=False)
        assert dtypes == {value.dtype for value in expected.values()}
    assert dtypes == {torch.float32 if case in ("built in FP32", "in one chunk") else torch.bfloat16}


@ranks(2)
def test_a_learning_rate_schedule_reaches_an_optimizer_that_was_turned_and_loaded() -> None:
    from colossalai.booster import Booster

    path = str(shared_folder("schedule") / "schedule.bin")
    rates = []
    for saved in (True, False):
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        booster = Booster(plugin=wire())
        model, optimizer, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=schedule)
        run = Boosted(booster, model, optimizer)
        if saved:
            for batch in rank_batches(3):
                run.step(batch)
                schedule.step()
            booster.save_lr_scheduler(schedule, path)
            states = save(run, FORMS["one file"], shared_folder("schedule"))[1]
        else:
            run.step(rank_batches(1)[0])
            booster.load_optimizer(optimizer, states)
            booster.load_lr_scheduler(schedule, path)
            schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    expected = torch.optim.lr_scheduler.CosineAnnealingLR(
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1e-2), 10
    )
    for _ in range(4):
        expected.optimizer.step()
        expected.step()
    assert rates[0] != rates[1]
    assert_close(expected.get_last_lr(), rates[1:], 1e-6)
