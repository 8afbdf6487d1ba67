"""A step whose gradients are not finite ends a run, is left out or is taken, on all ranks, and its culprit is named."""

from __future__ import annotations

import dataclasses
import math
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from fp8booster.cli.train.defaults import resolve
from fp8booster.cli.train.options import TrainOptions
from fp8booster.cli.train.task import Task
from fp8booster.cli.train.tokens import TokenFile, prepare_tokens
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


def train_with_fault(options: TrainOptions, tokens: TokenFile) -> tuple[str | None, list[int], list[str], bool]:
    """(what ended the run, steps that were kept, notices, whether the weights are finite)."""
    import fp8booster.colossal  # noqa: F401  isort: skip
    from fp8booster.cli.train.loop import NotFinite, Trainer
    from fp8booster.monitor.traffic import count_traffic

    task = Task(options=options, precision="fp8", tokens=tokens, resume=None)
    task.folder.mkdir(parents=True, exist_ok=True)
    said, ended = Said(), None
    with count_traffic() as traffic:
        trainer = Trainer(task, said, lambda: False, traffic)
        overflowing(trainer)
        try:
            trainer.run()
        except NotFinite as error:
            ended = str(error)
        model = trainer._boosted.model
        finite = all(bool(each.isfinite().all()) for each in model.parameters() if each.numel() and any(each.stride()))
    steps = [event["step"] for event in said.events if event["kind"] == "step"]
    return ended, steps, [event["text"] for event in said.events if event["kind"] == "notice"], finite


def run(prepared: tuple[TrainOptions, TokenFile], folder: Path, rule: str, **options: Any) -> list[Any]:
    given, tokens = prepared
    given = dataclasses.replace(given, out=str(folder), on_nonfinite=rule, **options)
    return on_ranks(2, train_with_fault, options=given, tokens=tokens)


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


def test_a_bad_step_is_taken_where_one_asks_for_it(prepared, tmp_path) -> None:
    first, _ = run(prepared, tmp_path, "warn", steps=BAD)
    assert first[1] == [1, 2]
    assert first[2][0].endswith("The step is taken.")
    assert not first[3]


def test_without_a_record_nobody_is_named(prepared, tmp_path) -> None:
    first, _ = run(prepared, tmp_path, "skip", record=0)
    assert first[2] == [f"The gradient norm became nan at step {BAD}. The step is left out."]
