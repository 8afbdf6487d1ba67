from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fp8booster.checkpoints import checkpoints_in, new_checkpoint, newest_checkpoint
from fp8booster.cli.metrics import MetricsLog, StepMetrics, read_metrics
from fp8booster.cli.train import branches
from fp8booster.cli.train.branches import left_behind, set_aside
from fp8booster.cli.train.options import TrainOptions
from fp8booster.cli.train.resume import find_resume, write_run_file
from fp8booster.cli.train.run import _is_finished, run
from fp8booster.cli.train.task import Task
from fp8booster.cli.train.tokens import TokenFile
from tests.cli.train.test_resume import checkpoint

LAST = 9
SUMMARY = ("summary.md", "summary.json", "loss.png")


def figures(step: int) -> StepMetrics:
    return StepMetrics(
        step=step, loss=1.0, lr=1e-3, grad_norm=1.0, tokens_per_second=1.0, seconds=1.0, peak_memory=1, wire_bytes=1
    )


def make_run(out: Path) -> Path:
    """A finished run in both precisions with checkpoints at steps 3, 6 and 9."""
    out.mkdir()
    options = TrainOptions(out=str(out), steps=LAST)
    write_run_file(options, {"command": "fp8booster train"})
    values = json.loads((out / "run.json").read_text())["options"]
    for precision in ("bf16", "fp8"):
        folder = out / precision
        for step in (3, 6, LAST):
            checkpoint(folder / "checkpoints", step, values)
        (folder / "result.json").write_text(json.dumps({"step": LAST}))
        log = MetricsLog(folder, 0)
        for step in range(1, LAST + 1):
            log.write(figures(step))
        log.close()
    columns = [{"precision": precision, "steps": LAST} for precision in ("bf16", "fp8")]
    for name in SUMMARY:
        (out / name).write_text(json.dumps({"columns": columns}))
    return out


@pytest.fixture
def out(tmp_path) -> Path:
    return make_run(tmp_path / "run")


def checkpoint_at(out: Path, step: int) -> Path:
    return out / "fp8" / "checkpoints" / f"step-{step:08d}"


def go_on(out: Path, resume: Path) -> tuple[Path | None, list[str]]:
    """The folder that FP8's run in `out` sets aside when it goes on from `resume`, and what is told."""
    tokens = TokenFile(out, "text", "", 512, 0)
    options = TrainOptions(out=str(out), steps=LAST)
    task = Task(options=options, precision="fp8", tokens=tokens, resume=str(resume))
    said: list[str] = []
    return set_aside(task, said.append), said


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_what_came_after_the_checkpoint_is_set_aside_whole(out):
    before = contents(out)
    aside, said = go_on(out, checkpoint_at(out, 3))
    assert aside == out / "abandoned-00000004-1"
    assert said == [
        f"The run goes on from {checkpoint_at(out, 3)}; what {out / 'fp8'} held of another branch is set aside in "
        f"{aside}."
    ]
    assert newest_checkpoint(out / "fp8" / "checkpoints") == checkpoint_at(out, 3)
    assert names(checkpoints_in(aside / "fp8" / "checkpoints")) == ["step-00000006", "step-00000009"]
    assert not (out / "fp8" / "result.json").exists()
    MetricsLog(out / "fp8", 3).close()
    assert [line.step for line in read_metrics(out / "fp8" / "metrics.jsonl")] == [1, 2, 3]
    # nothing is lost, and the other precision stays where it is
    kept, moved = contents(out), contents(aside)
    for path, content in before.items():
        if path.name not in ("run.json", "metrics.jsonl"):
            assert {**moved, **kept}[path] == content
    assert moved[Path("fp8", "metrics.jsonl")] == before[Path("fp8", "metrics.jsonl")]
    assert {path: kept[path] for path in before if path.parts[0] == "bf16"} == {
        path: content for path, content in before.items() if path.parts[0] == "bf16"
    }


def test_what_is_set_aside_is_a_run_that_can_go_on(out):
    aside, _ = go_on(out, checkpoint_at(out, 3))
    resume = find_resume(str(aside))
    assert resume.options.precision == "fp8"
    assert resume.checkpoints == {"fp8": str(checkpoint_at(aside, LAST))}
    assert find_resume(str(checkpoint_at(aside, 6))).options.out == str(aside)


def test_going_on_from_the_newest_checkpoint_changes_nothing(out):
    before = contents(out)
    assert go_on(out, checkpoint_at(out, LAST)) == (None, [])
    assert contents(out) == before


def test_steps_that_a_killed_run_took_after_its_newest_checkpoint_are_no_branch(out):
    shutil.rmtree(checkpoint_at(out, LAST))
    (out / "fp8" / "result.json").unlink()
    (out / "summary.json").unlink()
    assert go_on(out, checkpoint_at(out, 6)) == (None, [])


def test_a_result_of_later_steps_goes_though_its_checkpoint_is_gone(out):
    shutil.rmtree(checkpoint_at(out, LAST))
    aside, _ = go_on(out, checkpoint_at(out, 6))
    assert (aside / "fp8" / "result.json").exists()
    assert not any((out / name).exists() for name in SUMMARY)


def test_a_summary_of_the_steps_before_stays(out):
    for file, values in (
        (out / "summary.json", {"columns": [{"precision": "fp8", "steps": 3}]}),
        (out / "fp8" / "result.json", {"step": 3}),
    ):
        file.write_text(json.dumps(values))
    go_on(out, checkpoint_at(out, 3))
    assert (out / "summary.md").exists()
    assert (out / "fp8" / "result.json").exists()


def test_each_branch_gets_a_folder_of_its_own(out):
    first, _ = go_on(out, checkpoint_at(out, 3))
    checkpoint(out / "fp8" / "checkpoints", 6, {})
    second, _ = go_on(out, checkpoint_at(out, 3))
    assert second == out / "abandoned-00000004-2"
    assert checkpoint_at(first, 6).exists()
    assert checkpoint_at(second, 6).exists()


@pytest.mark.parametrize("moves", range(6))
def test_a_kill_halfway_leaves_a_run_that_ended_earlier_and_the_rest_goes_next(out, monkeypatch, moves):
    move = shutil.move
    left = iter(range(moves))

    def killed(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return move(*arguments)

    monkeypatch.setattr(branches.shutil, "move", killed)
    with pytest.raises(KeyboardInterrupt):
        go_on(out, checkpoint_at(out, 3))
    monkeypatch.undo()
    newest = newest_checkpoint(out / "fp8" / "checkpoints")
    assert newest == checkpoint_at(out, max(3, LAST - 3 * moves))
    go_on(out, checkpoint_at(out, 3))
    assert left_behind(checkpoint_at(out, 3), out / "fp8") == []
    asides = list(out.glob("abandoned-*"))
    for step in (6, LAST):
        assert sum(checkpoint_at(aside, step).exists() for aside in asides) == 1
    assert any(len(read_metrics(aside / "fp8" / "metrics.jsonl")) == LAST for aside in asides)


def test_checkpoints_set_aside_do_not_count_among_those_that_are_kept(out):
    aside, _ = go_on(out, checkpoint_at(out, 3))
    with new_checkpoint(out / "fp8" / "checkpoints", 4, keep=1):
        pass
    assert names(checkpoints_in(out / "fp8" / "checkpoints")) == ["step-00000004"]
    assert len(checkpoints_in(aside / "fp8" / "checkpoints")) == 2


def test_another_runs_checkpoint_sets_all_aside(out, tmp_path):
    other = make_run(tmp_path / "other")
    before = contents(other)
    aside, _ = go_on(out, checkpoint_at(other, 6))
    assert aside == out / "abandoned-00000001-1"
    assert newest_checkpoint(out / "fp8" / "checkpoints") is None
    assert len(checkpoints_in(aside / "fp8" / "checkpoints")) == 3
    assert not (out / "fp8" / "metrics.jsonl").exists()
    assert any((aside / "fp8" / "tensorboard").iterdir())
    assert contents(other) == before


def test_an_empty_folder_has_nothing_to_set_aside(out, tmp_path):
    new = tmp_path / "new"
    (new / "fp8").mkdir(parents=True)
    assert go_on(new, checkpoint_at(out, 3)) == (None, [])


def test_checkpoints_on_another_disk_are_its_own_by_way_of_a_link(out, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (out / "fp8" / "checkpoints").rename(elsewhere)
    (out / "fp8" / "checkpoints").symlink_to(elsewhere)
    aside, _ = go_on(out, elsewhere / "step-00000006")
    assert names(checkpoints_in(aside / "fp8" / "checkpoints")) == ["step-00000009"]
    assert names(checkpoints_in(elsewhere)) == ["step-00000003", "step-00000006"]


def test_another_runs_last_checkpoint_leaves_nothing_to_sum_up(out, tmp_path):
    other = make_run(tmp_path / "other")
    with pytest.raises(ValueError, match="has done 9 steps and --steps is 9; give more --steps"):
        run({"out": str(out)}, str(checkpoint_at(other, LAST)), "fp8booster train")


def test_a_run_that_is_asked_to_end_at_an_earlier_checkpoint_is_not_finished(out):
    assert _is_finished(str(checkpoint_at(out, LAST)), out / "fp8", LAST)
    assert not _is_finished(str(checkpoint_at(out, 3)), out / "fp8", 3)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("fp8/result.json", "[]", r"result\.json holds a list where an object belongs; remove the file"),
        ("fp8/result.json", '{"step": null}', r"'step' in .*result\.json is null where a whole number belongs"),
        ("summary.json", '{"columns": [1]}', r"summary\.json is no object; remove the file"),
        ("summary.json", '{"columns": [{"steps": 1}]}', r"summary\.json has no 'precision'; remove the file"),
    ],
)
def test_a_result_that_is_wrong_is_named_with_the_remedy(out, file, text, says):
    (out / file).write_text(text)
    with pytest.raises(ValueError, match=says):
        left_behind(checkpoint_at(out, 3), out / "fp8")


@pytest.mark.parametrize("line", ["{}", "nan", '{"step": 1}'])
def test_a_line_of_figures_that_is_wrong_is_named(out, line):
    file = out / "fp8" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n")
    with pytest.raises(ValueError, match=r"Line 3 of .*metrics\.jsonl .*; put it right, or move the file away"):
        read_metrics(file)
