"""Checkpoints cross between modes of `HybridParallelPlugin`, between FP8 and 16 bits, to Colossal-AI and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fp8booster.nn.linear.layer import FP8Layer
from tests.colossal.hybrid.runs import HybridRun, fp8, learn, native, sizes, start
from tests.colossal.models import tiny_llama
from tests.distributed import ranks, shared_folder
from tests.plugins import training
from tests.plugins.training import Boosted, assert_close, assert_equal, boost

PLUGINS: dict[str, Callable[[], Any]] = {
    "fp8 TP2": lambda: fp8("TP2"),
    "fp8 TP2 ZeRO 1": lambda: fp8("TP2 ZeRO 1"),
    "fp8 DP2 ZeRO 2": lambda: fp8("DP2 ZeRO 2"),
    "fp8 PP2 ZeRO 1": lambda: fp8("PP2 1f1b ZeRO 1"),
    "fp8 LowLevelZero": lambda: training.ours(use_fp8=True, stage=1),
    "native TP2": lambda: native("TP2"),
    "native DP2 ZeRO 1": lambda: native("DP2 ZeRO 1"),
    "native PP2": lambda: native("PP2 1f1b"),
    "native LowLevelZero": lambda: training.native(stage=1),
}

FORMS = {
    "one file": {},
    "shards": {"shard": True, "use_safetensors": True},
    "shards in the background": {"shard": True, "use_safetensors": True, "use_async": True},
    "one file in the background": {"use_safetensors": True, "use_async": True},
}

CROSSINGS = {
    "fp8 TP2 ZeRO 1 to native PP2": "shards",
    "fp8 PP2 ZeRO 1 to native TP2": "shards",
    "fp8 TP2 to native LowLevelZero": "one file",
    "fp8 PP2 ZeRO 1 to fp8 LowLevelZero": "one file",
    "fp8 DP2 ZeRO 2 to fp8 TP2": "shards in the background",
    "fp8 LowLevelZero to fp8 TP2 ZeRO 1": "shards",
    "native TP2 to fp8 DP2 ZeRO 2": "one file in the background",
    "native DP2 ZeRO 1 to fp8 PP2 ZeRO 1": "shards",
    "native PP2 to fp8 TP2 ZeRO 1": "one file",
}
"""Who writes, who reads, and in what form."""


def begin(name: str) -> Boosted:
    """A run of a plugin."""
    plugin = PLUGINS[name]()
    if "LowLevelZero" in name:
        return boost(plugin, tiny_llama(**sizes()), lr=1e-3)
    return start(plugin)


def take_steps(run: Boosted) -> None:
    """Two of them."""
    if isinstance(run, HybridRun):
        learn(run, last=2)
    else:
        training.train(run, steps=2)


def save(run: Boosted, form: str, name: str | Path) -> tuple[Path, Path]:
    """Save model and optimizer; returns both paths once the files are whole."""
    folder, options = shared_folder(name), FORMS[form]
    in_one = not options.get("shard")
    model = folder / ("model.safetensors" if in_one and options else "model.bin" if in_one else "model")
    of_optimizer = {key: value for key, value in options.items() if key != "use_safetensors"}
    optimizer = folder / ("optimizer.safetensors" if in_one and options else "optimizer.bin" if in_one else "optimizer")
    run.booster.save_model(run.model, str(model), size_per_shard=0.1, **options)
    run.booster.save_optimizer(run.optimizer, str(optimizer), size_per_shard=0.1, **of_optimizer)
    run.booster.checkpoint_io._sync_io()
    dist.barrier()
    return model, optimizer


def load(run: Boosted, model: Path, optimizer: Path) -> None:
    """Load both."""
    run.booster.load_model(run.model, str(model))
    run.booster.load_optimizer(run.optimizer, str(optimizer))


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    """What a saved model holds."""
    files = sorted([*path.glob("*.safetensors"), *path.glob("*.bin")]) if path.is_dir() else [path]
    return {
        key: value
        for file in files
        for key, value in (load_file(file) if file.suffix == ".safetensors" else torch.load(file)).items()
    }


def states_in(path: Path) -> dict[str, torch.Tensor]:
    """What an optimizer saved as one file holds."""
    return {
        f"{number}.{name}": value
        for number, values in torch.load(path)["state"].items()
        for name, value in values.items()
    }


@ranks(2)
@pytest.mark.parametrize("crossing", CROSSINGS)
def test_what_one_mode_writes_another_reads(crossing: str) -> None:
    form = CROSSINGS[crossing]
    writer, reader = map(begin, crossing.split(" to "))
    take_steps(writer)
    take_steps(reader)  # other weights, and FP8 copies of them
    written = save(writer, form, f"{crossing}/written")
    load(reader, *written)
    again = save(reader, form, f"{crossing}/again")
    found = weights_in(written[0])
    assert found.keys() == tiny_llama(**sizes()).state_dict().keys()
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert_equal(found, weights_in(again[0]))
    # optimizers are compared in the form that needs no index
    (_, expected), (_, restored) = (
        save(writer, "one file", f"{crossing}/1"),
        save(reader, "one file", f"{crossing}/2"),
    )
    assert_equal(states_in(expected), states_in(restored))


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2", "TP2 ZeRO 1", "PP2 1f1b ZeRO 1", "DP2"])
def test_a_loaded_run_goes_on_as_another_that_loads_the_same(mode: str) -> None:
    writer, fresh, used = (start(fp8(mode)) for _ in range(3))
    learn(writer)
    learn(used, last=1)  # has FP8 copies and states that loading must replace
    if mode == "DP2":
        learn(fresh, last=2)  # after its first backward DDP fills its buckets in another order, with other blocks
    written = save(writer, "shards", f"twice {mode}")
    for run in (fresh, used):
        load(run, *written)
    losses = [learn(run, 3, 6) for run in (writer, fresh, used)]
    assert losses[1] == losses[2]
    assert_close(losses[0], losses[1], 1e-2)
    assert_equal(fresh.parameters(), used.parameters())


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2", "TP2 ZeRO 1", "PP2 1f1b ZeRO 1", "DP2 ZeRO 2"])
def test_a_run_resumed_with_its_masters_repeats_the_whole_one(mode: str) -> None:
    from fp8booster.colossal.zero.rank_files import load_master_weights, save_master_weights

    whole, resumed = (start(fp8(mode)) for _ in range(2))
    learn(whole)
    written = save(whole, "shards", f"resumed {mode}")
    folder = shared_folder(f"resumed {mode}/masters")
    save_master_weights(whole.model.unwrap(), whole.optimizer, folder)
    dist.barrier()
    load(resumed, *written)
    load_master_weights(resumed.model.unwrap(), resumed.optimizer, folder)
    assert learn(whole, 3, 6) == learn(resumed, 3, 6)
    assert_equal(whole.parameters(), resumed.parameters())
    if mode != "DP2 ZeRO 2":
        other = start(fp8("DP2 ZeRO 1"))
        with pytest.raises(ValueError, match="resume with the same"):
            load_master_weights(other.model.unwrap(), other.optimizer, folder)


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2 ZeRO 1", "PP2 1f1b ZeRO 1"])
def test_a_checkpoint_holds_the_masters_in_16_bits(mode: str) -> None:
    run = start(fp8(mode))
    learn(run)
    layers = {
        name: module.weight
        for name, module in run.model.unwrap().named_modules()
        if isinstance(module, FP8Layer) and module.weight in run.optimizer.gathered_weights
    }
    assert len(layers) == 14 // run.booster.plugin.pp_size
    in_fp8 = {name: weight.detach().clone() for name, weight in layers.items()}
    run.model._force_wait_all_gather()  # what saving does first
    for name, weight in layers.items():
        master = run.optimizer.get_working_to_master_map()[id(weight)]  # the data parallel group has one rank
        assert torch.equal(weight.view(-1), master.bfloat16()), name
        assert not torch.equal(weight, in_fp8[name]), name
