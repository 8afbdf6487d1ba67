"""A step whose gradients are not finite ends a run, is left out or is taken, on all ranks, and its culprit is named."""

from __future__ import annotations

import dataclasses
import math
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fp8booster.cli.train.checkpoints import require_resumable
from fp8booster.cli.train.data import TokenFile, prepare_tokens
from fp8booster.cli.train.defaults import resolve
from fp8booster.cli.train.launch import Task
from fp8booster.cli.train.options import TrainOptions
from fp8booster.nn.recording import plain_name
from tests.cli.train.plugin_ranks import Said
from tests.colossal.models import tiny_llama
from tests.distributed import on_ranks

BAD = 2
"""The step in which a gradient overflows."""

CULPRIT = "output gradient of model.layers.1.mlp.down_proj on rank 0 is the first tensor that is not"
PLUGINS = {
    "low_level_zero": {},
    "gemini": {"plugin": "gemini"},
    "hybrid": {"plugin": "hybrid", "stage": 0, "tp": 2},
    "ddp": {"plugin": "ddp"},
    "fsdp": {"plugin": "fsdp"},
}
SAVED_OFTEN = {**PLUGINS, "hybrid": {"plugin": "hybrid", "stage": 0}}
"""Not tensor parallel, whose second save in a process was seen to wait for ever."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainOptions, TokenFile]:
    folder = tmp_path_factory.mktemp("nonfinite")
    shutil.copy(Path(sysconfig.get_paths()["stdlib"], "ast.py"), folder / "text.py")
    tiny_llama(vocab_size=336).config.save_pretrained(folder / "model")
    given = TrainOptions(
        model=str(folder / "model"),
        data=str(folder / "text.py"),
        vocabulary=336,
        cache=str(folder / "cache"),
        out=str(folder),
        steps=4,
        batch=2,
        sequence=32,
        nproc=2,
        record=1000,
    )
    options = resolve(given, launched=False)
    return options, prepare_tokens(options, lambda text: None)


def overflowing(trainer: Any) -> None:
    """Let one gradient overflow in the step `BAD`, on all ranks that compute it."""
    found = [
        module
        for name, module in trainer._boosted.model.unwrap().named_modules()
        if plain_name(name) == "model.layers.1.mlp.down_proj"
    ]
    for module in found:
        module.register_full_backward_pre_hook(
            lambda _, gradients: (gradients[0] * math.inf,) if trainer._step + 1 == BAD else None
        )


def with_infinite_inputs(trainer: Any) -> None:
    """Let the inputs of a feed-forward block be infinite in the step `BAD`, and so the loss NaN."""
    for name, module in trainer._boosted.model.unwrap().named_modules():
        if plain_name(name) == "model.layers.1.mlp":
            module.register_forward_pre_hook(
                lambda _, inputs: (inputs[0] * math.inf,) if trainer._step + 1 == BAD else None
            )


def train_with_fault(
    options: TrainOptions, tokens: TokenFile, fault: Callable[[Any], None]
) -> tuple[str | None, list[int], list[str], bool]:
    """(what ended the run, steps that were kept, notices, whether the weights are finite)."""
    import fp8booster.colossal  # noqa: F401  isort: skip
    from fp8booster.cli.train.loop import NotFinite, Trainer
    from fp8booster.monitor.traffic import count_traffic

    task = Task(options=options, precision="fp8", tokens=tokens, resume=None)
    task.folder.mkdir(parents=True, exist_ok=True)
    said, ended = Said(), None
    with count_traffic() as traffic:
        trainer = Trainer(task, said.show, lambda: False, traffic)
        fault(trainer)
        try:
            trainer.run()
        except NotFinite as error:
            ended = str(error)
        model = trainer._boosted.model
        finite = all(bool(each.isfinite().all()) for each in model.parameters() if each.numel() and any(each.stride()))
    steps = [event["step"] for event in said.events if event["kind"] == "step"]
    return ended, steps, [event["text"] for event in said.events if event["kind"] == "notice"], finite


def run(
    prepared: tuple[TrainOptions, TokenFile],
    folder: Path,
    rule: str,
    fault: Callable[[Any], None] = overflowing,
    **options: Any,
) -> list[Any]:
    given, tokens = prepared
    given = dataclasses.replace(given, out=str(folder), on_nonfinite=rule, **options)
    return on_ranks(2, train_with_fault, options=given, tokens=tokens, fault=fault)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_bad_step_is_left_out_on_all_ranks_and_training_goes_on(prepared, plugin, tmp_path) -> None:
    first, second = run(prepared, tmp_path, "skip", **PLUGINS[plugin])
    assert (first[0], second[0]) == (None, None)
    assert first[1] == [1, 3, 4]
    (notice,) = first[2]
    assert notice.startswith(f"The gradient norm became nan at step {BAD}. Step {BAD} is not finite, and {CULPRIT}")
    assert notice.endswith("The step is left out.")
    assert first[3]
    assert second[3]
    assert second[2] == []


def test_a_bad_step_ends_the_run_on_all_ranks_with_its_culprit(prepared, tmp_path) -> None:
    for ended, steps, notices, finite in run(prepared, tmp_path, "raise"):
        assert CULPRIT in ended
        assert f"step-{BAD - 1:08d}; resume from there" in ended
        assert steps in ([1], [])
        assert not notices
        assert finite


def kept(folder: Path, step: int) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, Any]]]:
    """(weights and masters, amaxes on each rank) of the checkpoint of a step."""
    checkpoint = folder / "fp8" / "checkpoints" / f"step-{step:08d}"
    files = [file for part in ("model", "masters") for file in sorted((checkpoint / part).glob("*.safetensors"))]
    states = [torch.load(file, weights_only=True) for file in sorted((checkpoint / "random").iterdir())]
    return [load_file(file) for file in files], [state["amaxes"] for state in states]


@pytest.mark.parametrize(
    ("plugin", "scaling"),
    [*((plugin, "smooth-swiglu") for plugin in PLUGINS), ("low_level_zero", "delayed"), ("ddp", "delayed")],
)
def test_what_is_saved_after_a_bad_step_is_the_state_before_it(prepared, plugin, scaling, tmp_path) -> None:
    options = {**SAVED_OFTEN[plugin], "record": 0, "fp8_options": (f"scaling={scaling}", "always=true")}
    run(prepared, tmp_path / "before", "raise", steps=BAD - 1, **options)
    expected = kept(tmp_path / "before", BAD - 1)
    assert all(expected[1])
    for ended, *_ in run(prepared, tmp_path / "raise", "raise", with_infinite_inputs, **options):
        assert ended.startswith(f"The loss became nan at step {BAD}. The state before it is in ")
    torch.testing.assert_close(kept(tmp_path / "raise", BAD - 1), expected, rtol=0, atol=0)
    for ended, _, _, finite in run(prepared, tmp_path / "skip", "skip", with_infinite_inputs, steps=BAD, **options):
        assert ended is None
        assert finite
    found = kept(tmp_path / "skip", BAD)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_bad_step_is_taken_where_one_asks_for_it(prepared, tmp_path) -> None:
    first, _ = run(prepared, tmp_path, "warn", steps=BAD, record=0)
    assert first[1] == [1, 2]
    # without a record nobody is named
    assert first[2][0] == f"The gradient norm became nan at step {BAD}. The step is taken."
    assert not first[3]


def poison(trainer: Any, what: str) -> None:
    """Make one value of rank 1's NaN, of the second moments or of the weights that the optimizer trains."""
    optimizer = trainer._boosted.optimizer
    if what == "weight":
        last = optimizer.unwrap().param_groups[-1]["params"][-1]
        chunk = getattr(optimizer, "param_to_chunk16", {}).get(last)
        found = last.detach() if chunk is None else chunk.paired_chunk.payload
    else:
        state = list(optimizer.unwrap().state.values())[-1]
        found = state.codes["exp_avg_amax"] if hasattr(state, "codes") else state["exp_avg_sq"]
    found.view(-1)[0] = math.nan


def train_and_poison(
    options: TrainOptions, tokens: TokenFile, what: str, resume: str | None = None, signalled: bool = False
) -> tuple[str | None, list[str], list[str], list[str]]:
    """(what ended the run, checkpoints, those that are marked, notices); a value is poisoned in the step `BAD`."""
    import fp8booster.colossal  # noqa: F401  isort: skip
    import torch.distributed as dist

    from fp8booster.checkpoints import checkpoints_in, is_finite
    from fp8booster.cli.train.loop import Trainer
    from fp8booster.monitor.traffic import count_traffic

    task = Task(options=options, precision="fp8", tokens=tokens, resume=resume)
    task.folder.mkdir(parents=True, exist_ok=True)
    said, ended = Said(), None
    with count_traffic() as traffic:
        try:
            trainer = Trainer(task, said.show, lambda: signalled and trainer._step + 1 == BAD, traffic)
            update = trainer._boosted.update

            def update_badly(max_norm: float) -> None:
                update(max_norm)
                if trainer._step + 1 == BAD and dist.get_rank() == 1:
                    poison(trainer, what)

            if what:
                trainer._boosted.update = update_badly
            trainer.run()
        except ValueError as error:
            ended = str(error)
    dist.barrier()
    left = checkpoints_in(task.checkpoints)
    notices = [event["text"] for event in said.events if event["kind"] == "notice"]
    return ended, [path.name for path in left], [path.name for path in left if not is_finite(path)], notices


def run_poisoned(prepared: tuple[TrainOptions, TokenFile], folder: Path, what: str, **options: Any) -> list[Any]:
    given, tokens = prepared
    more = {name: options.pop(name) for name in ("resume", "signalled") if name in options}
    given = dataclasses.replace(given, out=str(folder), record=0, **{"steps": 3, "save": 1, "keep": 1, **options})
    return on_ranks(2, train_and_poison, options=given, tokens=tokens, what=what, **more)


GOOD, WORSE = "step-00000001", f"step-{BAD:08d}"
POISONED = [(plugin, "moment") for plugin in PLUGINS] + [("low_level_zero", "weight"), ("gemini", "weight")]


@pytest.mark.parametrize(("plugin", "what"), POISONED)
def test_values_that_are_not_finite_are_not_saved_and_do_not_cost_the_last_that_are(
    prepared, plugin, what, tmp_path
) -> None:
    for ended, left, marked, _ in run_poisoned(prepared, tmp_path, what, **SAVED_OFTEN[plugin]):
        assert ended.startswith(f"After step {BAD} weights or optimizer states are NaN or infinite, and not saved.")
        assert f"finite values is {tmp_path / 'fp8' / 'checkpoints' / GOOD}; resume from there with a lower" in ended
        assert (left, marked) == ([GOOD], [])


def test_at_the_end_they_are_not_saved_either(prepared, tmp_path) -> None:
    for ended, left, _, _ in run_poisoned(prepared, tmp_path, "moment", steps=BAD, optimizer="adamw-8bit"):
        assert f"{GOOD}; resume from there" in ended
        assert left == [GOOD]


def test_nor_after_a_signal(prepared, tmp_path) -> None:
    first, second = run_poisoned(prepared, tmp_path, "moment", signalled=True)
    assert first[0] is None
    assert first[1:3] == second[1:3] == ([GOOD], [])
    (notice,) = first[3]
    assert "not saved" in notice
    assert GOOD in notice


def test_the_state_before_a_bad_step_is_not_saved_where_it_is_bad_too(prepared, tmp_path) -> None:
    for ended, left, _, _ in run_poisoned(prepared, tmp_path, "weight", save=0, steps=4):
        assert "Before it, weights or optimizer states were NaN or infinite already." in ended
        assert ended.endswith(
            "No checkpoint has finite ones; train anew with a lower --lr or another --seed, and another --out."
        )
        assert left == []


def test_where_bad_steps_are_taken_bad_states_are_marked_and_the_last_good_one_stays(prepared, tmp_path) -> None:
    first, _ = run_poisoned(prepared, tmp_path, "moment", on_nonfinite="warn")
    last = "step-00000003"
    assert first[:3] == (None, [GOOD, last], [last])
    assert f"After step {BAD} weights or optimizer states are NaN or infinite, and saved as such." in first[3][0]
    assert GOOD in first[3][0]
    marked = tmp_path / "fp8" / "checkpoints" / last
    with pytest.raises(ValueError, match=f"{last} has weights or .* NaN or infinite; resume .*--resume .*{GOOD}, with"):
        require_resumable(marked, tmp_path / "fp8", "skip")
    require_resumable(marked, tmp_path / "fp8", "warn")
    require_resumable(marked.with_name(GOOD), tmp_path / "other" / "fp8", "raise")


def test_a_checkpoint_that_became_bad_is_refused_after_it_was_loaded(prepared, tmp_path) -> None:
    run_poisoned(prepared, tmp_path, "", steps=2, keep=2)
    checkpoint = tmp_path / "fp8" / "checkpoints" / WORSE
    (masters,) = (checkpoint / "masters").glob("rank-00001-*")
    tensors, metadata = load_file(masters), safe_open(masters, framework="pt").metadata()
    next(iter(tensors.values())).view(-1)[0] = math.inf
    save_file(tensors, masters, metadata)
    for ended, left, _, _ in run_poisoned(prepared, tmp_path, "", resume=str(checkpoint)):
        assert ended.startswith(f"{checkpoint} has weights or optimizer states that are NaN or infinite; resume from")
        assert f"--resume {checkpoint.with_name(GOOD)}, with a lower --lr" in ended
        assert left == [GOOD, WORSE]
    first, _ = run_poisoned(prepared, tmp_path, "", resume=str(checkpoint), on_nonfinite="warn")
    assert first[0] is None
    assert first[3][0].startswith(f"{checkpoint} has weights or optimizer states that are NaN or infinite")
