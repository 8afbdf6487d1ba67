from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8booster.checkpoints import write_manifest
from fp8booster.cli.train.checkpoints import find_resume, origins, require_resumable, write_run_file
from fp8booster.cli.train.options import TrainOptions
from fp8booster.cli.train.run import _is_finished, run


def checkpoint(folder: Path, step: int, options: dict) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    state = {"step": step, "position": 0, "world_size": 2, "precision": "fp8", "tokens": "", "options": options}
    (path / "state.json").write_text(json.dumps(state))
    return path


@pytest.fixture
def out(tmp_path) -> Path:
    """A run in both precisions that has come to FP8's step 20."""
    out = tmp_path / "run"
    out.mkdir()
    options = TrainOptions(out=str(out), steps=30, decay=30, batch=8)
    write_run_file(options, {})
    values = json.loads((out / "run.json").read_text())["options"]
    for step in (10, 20):
        checkpoint(out / "fp8" / "checkpoints", step, values)
    (out / "fp8" / "checkpoints" / ".step-00000030.fp8booster-partial").mkdir()
    return out


def test_a_run_goes_on_from_the_newest_whole_checkpoint_with_its_own_options(out):
    resume = find_resume(str(out))
    assert resume.options.batch == 8
    assert resume.options.precision == "compare"
    assert resume.checkpoints == {"fp8": str(out / "fp8" / "checkpoints" / "step-00000020")}


def test_a_checkpoint_goes_on_in_its_own_precision_and_run(out):
    path = out / "fp8" / "checkpoints" / "step-00000010"
    resume = find_resume(str(path))
    assert resume.options.precision == "fp8"
    assert resume.options.out == str(out)
    assert resume.checkpoints == {"fp8": str(path)}


def test_a_run_that_has_saved_nothing_yet_goes_on_from_where_it_began(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    origin = out / "fp8" / "checkpoints" / "step-00000010"
    other = tmp_path / "other"
    other.mkdir()
    options = TrainOptions(out="other", precision="fp8")
    write_run_file(options, origins({"fp8": str(origin.relative_to(tmp_path))}))
    monkeypatch.chdir(out)
    assert find_resume(str(other)).checkpoints == {"fp8": str(origin)}
    own = checkpoint(other / "fp8" / "checkpoints", 12, {})
    assert find_resume(str(other)).checkpoints == {"fp8": str(own)}
    own.rename(other / "elsewhere")
    origin.rename(tmp_path / "gone")
    with pytest.raises(ValueError, match="which is gone, and has saved nothing since; start a new run"):
        find_resume(str(other))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lora": 8}, "was trained without --lora; resume it without another --lora"),
        ({"model": "1b"}, "was trained with --model tiny; resume it without another --model"),
        ({"precision": "bf16"}, "was trained with --precision compare; resume it without another --precision"),
    ],
)
def test_what_cannot_change_is_told(out, given, says):
    with pytest.raises(ValueError, match=says):
        run(given, str(out), "fp8booster train")


def test_a_folder_that_is_no_run_is_told(tmp_path):
    with pytest.raises(ValueError, match="neither a run nor a checkpoint"):
        find_resume(str(tmp_path))


def change(file: Path, text: str | None = None, **changes: object) -> None:
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | changes) if text is None else text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text": "{"}, r"state\.json is not JSON, or not all of it; copy the checkpoint again"),
        ({"step": 10}, r"state\.json is of step 10, and its folder of step 20; copy the checkpoint again"),
        ({"position": -3}, r"state\.json tells of no run"),
        ({"precision": "fp4"}, r"state\.json tells of no run"),
        ({"layout": 2}, r"state\.json has 'layout', which fp8booster .* does not know; use the version of"),
        ({"options": {"flux": 1}}, r"state\.json has 'flux', which fp8booster .* does not know"),
        ({"options": {"steps": "x"}}, r"'steps' in .*state\.json is text where a whole number or null belongs"),
        ({"options": {"steps": 0}}, r"The options in .*state\.json are wrong \(--steps is 0; it must be"),
        ({"options": {"fp8_options": [1]}}, r"'fp8_options' in .*state\.json are not all text"),
    ],
    ids=str,
)
def test_a_state_that_is_wrong_is_named_with_its_fault_and_the_remedy(out, changes, says):
    path = out / "fp8" / "checkpoints" / "step-00000020"
    change(path / "state.json", **changes)
    with pytest.raises(ValueError, match=says):
        find_resume(str(path))
    with pytest.raises(ValueError, match=says):
        run({}, str(out), "fp8booster train")


def test_a_checkpoint_of_an_older_version_has_the_defaults_of_newer_options(out):
    path = out / "fp8" / "checkpoints" / "step-00000020"
    change(path / "state.json", options={"batch": 3})
    assert find_resume(str(path)).options == TrainOptions(batch=3, precision="fp8", out=str(out))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text": "["}, r"run\.json is not JSON, or not all of it; put it right, or --resume one of the run's"),
        ({"options": {"steps": True}}, r"'steps' in .*run\.json is true or false where a whole number"),
        ({"options": {"precision": "fp4"}}, r"The options in .*run\.json are wrong \(--precision is 'fp4'"),
        ({"resumed": ["a"]}, r"'resumed' in .*run\.json is no object of paths"),
    ],
    ids=str,
)
def test_a_run_file_that_is_wrong_is_named(out, changes, says):
    change(out / "run.json", **changes)
    with pytest.raises(ValueError, match=says):
        find_resume(str(out))


def test_a_checkpoint_without_its_state_is_not_passed_over(out):
    (out / "fp8" / "checkpoints" / "step-00000020" / "state.json").unlink()
    with pytest.raises(ValueError, match=r"step-00000020/state\.json is missing; copy the checkpoint again"):
        run({}, str(out), "fp8booster train")


def test_a_run_does_not_resume_below_checkpoints_that_do_not_lead_to_its_own(out, tmp_path):
    first, second = sorted((out / "fp8" / "checkpoints").glob("step-*"))
    for path in (first, second):
        write_manifest(path)
    require_resumable(second, out / "fp8", "raise")
    with pytest.raises(ValueError, match="would not lead to; give another --out"):
        require_resumable(first, out / "fp8", "raise")
    require_resumable(first, tmp_path / "new" / "fp8", "raise")
    # by way of a link they are its own too
    (out / "fp8" / "checkpoints").rename(tmp_path / "elsewhere")
    (out / "fp8" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    require_resumable(tmp_path / "elsewhere" / second.name, out / "fp8", "raise")
    other = checkpoint(tmp_path / "other" / "fp8" / "checkpoints", 30, {})
    write_manifest(other)
    with pytest.raises(ValueError, match="give another --out"):
        require_resumable(other, out / "fp8", "raise")


def test_a_precision_is_finished_with_the_result_of_its_newest_checkpoint_alone(out):
    folder, newest = out / "fp8", str(out / "fp8" / "checkpoints" / "step-00000020")
    with pytest.raises(ValueError, match="has done 20 steps and --steps is 20; give more --steps"):
        _is_finished(newest, folder, 20)  # without its metrics there is nothing to sum up
    (folder / "metrics.jsonl").touch()
    assert not _is_finished(newest, folder, 20)
    for step, finished in ((30, False), (20, True)):
        (folder / "result.json").write_text(json.dumps({"step": step}))
        assert _is_finished(newest, folder, 20) is finished
    assert not _is_finished(newest, folder, 30)
    (folder / "result.json").write_text('{"step": null}')
    with pytest.raises(ValueError, match=r"'step' in .*result\.json is null where a whole number belongs"):
        _is_finished(newest, folder, 20)
    with pytest.raises(ValueError, match="has done 20 steps and --steps is 10; give more --steps"):
        _is_finished(newest, folder, 10)


def test_a_stray_folder_is_no_checkpoint_of_a_run(out):
    stray = out / "fp8" / "checkpoints" / "step-abc"
    stray.mkdir()
    (stray / "state.json").write_text("{}")
    assert find_resume(str(out)).checkpoints["fp8"].endswith("step-00000020")


def test_a_checkpoint_in_bf16_of_a_run_in_both_goes_on_without_what_fp8_alone_reads(out):
    path = out / "fp8" / "checkpoints" / "step-00000020"
    change(path / "state.json", precision="bf16", options={"level": "O2", "record": 5, "fp8_options": ["always=true"]})
    assert find_resume(str(path)).options == TrainOptions(precision="bf16", out=str(out))
