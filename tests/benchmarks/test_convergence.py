from __future__ import annotations

import json
import math
import os
import struct
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import convergence
from benchmarks.training import campaign, kinds
from benchmarks.training.campaign import places, work_off
from benchmarks.training.convergence import (
    Difference,
    Findings,
    course_table,
    differences,
    end_table,
    forward_table,
    kind_table,
    part_table,
    plot,
    tenths,
)
from benchmarks.training.curves import curve_table, equal_loss_table, timed_tables, tokens_to
from benchmarks.training.data import gather_text, tokens_of
from benchmarks.training.job import Job
from benchmarks.training.kinds import kind_of_text
from benchmarks.training.runs import HELD_OUT, NOT_FINITE, Run, RunFolder
from benchmarks.training.samples import recorded, recorded_table
from benchmarks.training.variants import BF16, FUSED, VARIANTS, chosen, forwards
from fp8booster.cli.train.data import load_tokenizer
from fp8booster.monitor.scales import ScaleRow
from fp8booster.monitor.sinks import JsonLines
from tests.distributed import TEST_SECONDS
from tests.programs import run_program

LABELS = [BF16, "BF16, fused blocks", "FP8"]
STEPS = 20
FLAT = [4.0] * STEPS
LOSSES = {
    0: {BF16: FLAT, "FP8": [4.0] * 18 + [4.04] * 2},
    1: {BF16: [2.0] * STEPS, "FP8": [2.0] * 18 + [1.99, 2.03]},
    2: {"FP8": FLAT},
}


def test_differences_are_means_over_the_seeds_that_have_both() -> None:
    found = differences(LOSSES, "FP8", BF16)
    assert len(found) == 10
    assert (found[0].mean, found[0].error) == (0.0, 0.0)
    assert found[-1].mean == pytest.approx((0.01 + 0.005) / 2)
    assert found[-1].error == pytest.approx(0.0025)  # half the distance of two values
    assert str(found[-1]) == "+0.75 ± 0.25 %"
    assert differences(LOSSES, "BF16, fused blocks", BF16) == []


def test_one_seed_has_no_error() -> None:
    one = Difference.of([-0.002])
    assert math.isnan(one.error)
    assert str(one) == "-0.20 %"


def test_fewer_steps_than_ten() -> None:
    assert tenths([3.0, 1.0]) == [3.0, 1.0]
    assert tenths([float(step) for step in range(20)])[-1] == 18.5


def test_tables() -> None:
    ends = end_table(Findings(LOSSES), LABELS)
    assert [[column.show(record) for column in ends.columns] for record in ends.records] == [
        ["0", "4.0000", "-", "4.0400 (+1.00 %)"],
        ["1", "2.0000", "-", "2.0100 (+0.50 %)"],
        ["2", "-", "-", "4.0000"],
        ["all", "", "", "+0.75 ± 0.25 %"],
    ]
    course = course_table(LOSSES, LABELS)
    rows = [[column.show(record) for column in course.columns] for record in course.records]
    assert rows[0] == ["1 to 2", "-", "+0.00 ± 0.00 %"]
    assert rows[-1] == ["19 to 20", "-", "+0.75 ± 0.25 %"]
    assert len(rows) == 10


def test_each_part_is_compared_with_bf16_and_with_what_it_changes() -> None:
    moments = "FP8, 8-bit moments"
    found = Findings(
        {seed: {BF16: FLAT, "FP8": [4.04] * STEPS, moments: [4.0804] * STEPS} for seed in (0, 1)},
        {
            0: {BF16: {"own": 4.0, "BF16": 4.0}, "FP8": {"own": 4.4, "BF16": 4.2}, moments: {"own": 4.4, "BF16": 4.2}},
            1: {BF16: {"own": 2.0, "BF16": 2.0}, "FP8": {"own": 2.1, "BF16": 2.1}},
        },
        not_finite={2: {moments: 7}},
    )
    labels = [BF16, "BF16, fused blocks", "FP8", moments]
    table = part_table(found, labels)
    assert [[column.show(record) for column in table.columns] for record in table.records] == [
        ["BF16, fused blocks", BF16, "-", "-", "-", "0 of 0"],
        ["FP8", BF16, "+1.00 ± 0.00 %", "+7.50 ± 2.50 %", "+5.00 ± 0.00 %", "2 of 2"],
        ["FP8", "BF16, fused blocks", "-", "-", "-", "2 of 2"],
        [moments, BF16, "+2.01 ± 0.00 %", "+10.00 %", "+5.00 %", "2 of 3"],
        [moments, "FP8", "+1.00 ± 0.00 %", "+0.00 %", "+0.00 %", "2 of 3"],
    ]
    (row,) = [record for record in end_table(found, [BF16, "FP8", moments]).records if record["seed"] == "2"]
    assert row["not_finite"] == {moments: 7}


def test_text_of_each_kind_has_a_column_a_row_and_points(tmp_path) -> None:
    def both(own: float) -> dict[str, float]:
        return {"own": own, "BF16": 9.0}

    found = Findings(
        {seed: {BF16: FLAT, "FP8": FLAT} for seed in (0, 1)},
        {seed: {BF16: both(3.0), "FP8": both(3.0)} for seed in (0, 1)},
        {
            0: {BF16: {"de": both(4.0)}, "FP8": {"de": both(4.4)}},
            1: {BF16: {"de": both(2.0)}, "FP8": {"de": both(2.1)}},
        },
    )
    parts, texts = part_table(found, [BF16, "FP8"]), kind_table(found, [BF16, "FP8"])
    (row,) = [[column.show(record) for column in parts.columns] for record in parts.records]
    assert dict(zip([column.title for column in parts.columns], row, strict=True))["text of de"] == "+7.50 ± 2.50 %"
    assert [[column.show(record) for column in texts.columns] for record in texts.records] == [
        ["held out", "3.0000", "+0.00 ± 0.00 %"],
        ["held out, weights run in BF16", "9.0000", "+0.00 ± 0.00 %"],
        ["de", "3.0000", "+7.50 ± 2.50 %"],
        ["de, weights run in BF16", "9.0000", "+0.00 ± 0.00 %"],
    ]
    assert len(plot(tmp_path / "a", found, [BF16, "FP8"], "title")) == 2


def test_a_forward_is_compared_with_the_same_weights_in_bf16() -> None:
    ends = [
        {"own": own, "error": 0.1, BF16: 2.0, **others} for own, others in ((2.2, {"FP8, exact sums": 2.1}), (2.4, {}))
    ]
    found = Findings(
        {seed: {BF16: FLAT, "FP8": FLAT} for seed in (0, 1)},
        {seed: {BF16: {"own": 3.0, BF16: 3.0}, "FP8": ends[seed]} for seed in (0, 1)},
    )
    table = forward_table(found, [BF16, "FP8"])
    assert [column.title for column in table.columns[2:]] == ["run as trained", "run as FP8, exact sums"]
    assert [[column.show(record) for column in table.columns] for record in table.records] == [
        ["FP8", HELD_OUT, "+15.00 ± 5.00 %", "+5.00 %"]
    ]
    with pytest.raises(ValueError, match="--evaluate-as is 'bf16'; use one of fp8, "):
        forwards(["fp8", "bf16"], Job())


def test_tokens_to_a_loss_lie_between_evaluations() -> None:
    curve = [(10, 5.0, 0.1), (20, 4.0, 0.1), (30, 4.2, 0.1), (40, 3.2, 0.1)]
    assert tokens_to(3.2, curve) == 40
    assert tokens_to(3.7, curve) == pytest.approx(35)
    assert tokens_to(4.1, curve) == pytest.approx(31)  # not where it rises again
    assert tokens_to(3.0, curve) is None
    assert tokens_to(5.0, curve) is None


def test_equal_loss_counts_tokens_and_time() -> None:
    bf16 = {HELD_OUT: [(100, 5.0, 0.2), (200, 4.0, 0.1)]}
    worse = {HELD_OUT: [(100, 5.0, 0.2), (200, 4.2, 0.1)]}  # BF16 has its last loss after 180 tokens
    better = {HELD_OUT: [(100, 5.0, 0.2), (200, 3.0, 0.1)]}  # and it has BF16's after 150
    curves = {0: {BF16: bf16, "FP8": worse, "FP8, rowwise": better}, 1: {BF16: bf16, "FP8": worse}}
    found = Findings(curves=curves, speeds={seed: {BF16: 100.0, "FP8": 125.0} for seed in (0, 1)})
    table = equal_loss_table(found, [BF16, "FP8", "FP8, rowwise"])
    assert [[column.show(record) for column in table.columns] for record in table.records] == [
        [
            "FP8",
            "2",
            "0.0002, 0.00018",
            "0.02667, 0.03",
            "+5.00 ± 0.00 %",
            "+11.11 ± 0.00 %",
            "+25.00 ± 0.00 %",
            "-11.11 ± 0.00 %",
        ],
        ["FP8, rowwise", "1", "0.00015, 0.0002", "-", "-25.00 %", "-25.00 %", "-", "-"],
    ]
    course = curve_table(found, [BF16, "FP8", "FP8, rowwise"])
    assert [[column.show(record) for column in course.columns] for record in course.records] == [
        [HELD_OUT, "0.0001", "5.0000 ± 0.2000", "+0.00 ± 0.00 %", "+0.00 %"],
        [HELD_OUT, "0.0002", "4.0000 ± 0.1000", "+5.00 ± 0.00 %", "-25.00 %"],
    ]
    end_alone = {0: {name: {HELD_OUT: curve[HELD_OUT][-1:]} for name, curve in ((BF16, bf16), ("FP8", worse))}}
    assert timed_tables(Findings(curves=end_alone), [BF16, "FP8"]) == []


def test_recorded_figures_have_a_column_for_each_tenth(tmp_path) -> None:
    def row(step: int, layer: str, outlier: float | None) -> ScaleRow:
        same = {"amax": 1.0, "scale": 1.0, "saturated": 0.0, "snr_db": None, "non_finite": 0, "kurtosis": 3.0}
        own = {"step": step, "layer": layer, "flushed": 0.01 * step, "outlier": outlier}
        return ScaleRow(role="input", format="e4m3", ranks=1, **same, **own)

    sink = JsonLines(tmp_path / "scales.jsonl")
    sink.begin({"fp8booster": "0", "kind": "scales", "every": 1, "config": {}, "layers": {}}, 0)
    sink.write([row(1, "a", 4.0), row(1, "b", 8.0), row(1, "c", None), row(20, "a", 6.0)])
    sink.close()
    table = recorded_table([("seed 0, FP8", recorded(tmp_path / "scales.jsonl", 20))])
    assert [[column.show(record) for column in table.columns] for record in table.records] == [
        ["seed 0, FP8", "input", "kurtosis", "3, 3", *["-"] * 8, "3, 3"],
        ["seed 0, FP8", "input", "amax / root mean square", "6, 8", *["-"] * 8, "6, 6"],
        ["seed 0, FP8", "input", "became zero", "1, 1 %", *["-"] * 8, "20, 20 %"],
    ]
    assert table.records[1]["tenths"][1]["layer"] == "b"
    assert recorded(tmp_path / "none.jsonl", 20) == []


def test_variants_differ_in_options_and_optimizer() -> None:
    base = Job(model="micro", fp8_options=("always=true",))
    lean = VARIANTS["fp8-lean"].job(base, seed=5)
    assert (lean.seed, lean.optimizer, lean.fp8_options) == (
        5,
        "adamw-8bit",
        ("always=true", "activations.saved=8-bit"),
    )
    assert VARIANTS["bf16"].job(base, seed=0) == base
    also = chosen(["fp8"], ["formats.gradient=e4m3"])
    assert [variant.label for variant in also] == ["FP8", "FP8, formats.gradient=e4m3"]
    assert also[1].base == "FP8"
    assert len(chosen([], [])) == len(VARIANTS)


def test_plot(tmp_path) -> None:
    held_out = {0: {BF16: {"own": 4.0, "BF16": 4.0}, "FP8": {"own": 4.4, "BF16": 4.2}}}
    assert plot(tmp_path / "torch-2.1", Findings(LOSSES, held_out), LABELS, "title") == [
        "torch-2.1.png",
        "torch-2.1-end.png",
    ]
    for name in ("torch-2.1.png", "torch-2.1-end.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert plot(tmp_path / "b", Findings(LOSSES), LABELS, "title") == ["b.png"]
    assert plot(tmp_path / "c", Findings({0: {BF16: FLAT}}), LABELS, "title") == []
    assert not (tmp_path / "c.png").exists()


def test_without_bf16_all_is_compared_with_bf16_that_is_fused(tmp_path) -> None:
    labels = [FUSED, "FP8"]
    losses = {0: {FUSED: [4.0] * STEPS, "FP8": [4.2] * STEPS}}
    held_out = {0: {FUSED: {"own": 4.0, "BF16": 4.0}, "FP8": {"own": 4.4, "BF16": 4.2}}}
    curves = {0: {name: {HELD_OUT: [(100, 5.0, 0.1), (200, last, 0.1)]} for name, last in ((FUSED, 4.0), ("FP8", 4.4))}}
    found = Findings(losses, held_out, curves=curves)
    (*_, last), (equal,) = curve_table(found, labels).records, equal_loss_table(found, labels).records
    assert last["differences"]["FP8"]["shown"] == "+10.00 %"
    assert (equal["variant"], equal["loss"]["shown"]) == ("FP8", "+10.00 %")
    course, ends = course_table(losses, labels), end_table(found, labels)
    assert [column.title for column in course.columns] == ["steps", "FP8"]
    assert ends.columns[2].show(ends.records[0]) == "4.2000 (+5.00 %)"
    assert plot(tmp_path / "a", found, labels, "title") == ["a.png", "a-held-out.png", "a-end.png"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--also", "rowwise"], "error: --also 'rowwise' has no '='; write it as key=value"),
        (["--model", "8b"], "error: --model is '8b'; use one of"),
        (["--also", "scales=two"], "error:"),
        (["--fp8-option", "rowwise"], "error:"),
        (["--variant", "fp4"], "error: --variant is 'fp4'; use one of bf16, bf16-fused, fp8,"),
        (["--minutes", "5"], "error: --minutes ends runs that are to go on, and there is no --runs to go on from"),
        (["--outlier", "7"], "error: --outlier is '7'; write it as CHANNEL:FACTOR, as 7:200"),
        (["--model", "micro", "--outlier", "96:2"], "error: --outlier names channel 96; micro has 0 to 95"),
        (["--gradient-scale", "0"], "error: --gradient-scale is 0.0; it must be above 0"),
        (["--fp32-start", "--variant", "fp8-lean"], "error: --fp32-start is for master weights in FP32"),
        (["--tokenizer", "nowhere"], "error: --tokenizer nowhere holds no tokenizer"),
        (["--data", "nowhere"], "error: --data nowhere does not exist"),
        (["--evaluate-every", "-1"], "error: --evaluate-every is -1; give the steps between evaluations"),
        (["--held-out", "1"], "error: --held-out is 1.0; give the share of the text"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(convergence.app, ["--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert result.output.startswith(sentence)


def write(
    path: Path,
    seed: int,
    steps: int = STEPS,
    labels: Sequence[str] = (BF16, "FP8"),
    text: str = "mixed",
    digest: str | None = None,
    left_out: Mapping[str, str] | None = None,
) -> str:
    head = ({} if digest is None else {"text": f"{text}, 9 tokens of 4 kinds, digest {digest}"}) | {
        "GPU": "CPU",
        "ranks": "1",
        "training": f"model micro, text of {text}, {steps} steps",
        "date": "2026-11-22",
        "torch": "2",
        "command": f"`first-seed {seed}`",
    }
    losses = {BF16: [4.0] * steps, "FP8": [4.0 + 0.04 * seed] * steps, "FP8, rowwise": [5.0] * steps}
    held_out = {"own": 4.0, "BF16": 4.0}
    kurtosis = {"tenth": 1, "role": "input", "kurtosis": {"median": 3.0, "largest": 4.0}}
    curves = {label: {HELD_OUT: [(100, 5.0, 0.1), (200, 4.0 + 0.2 * (label != BF16), 0.1)]} for label in labels}
    found = Findings(
        {seed: {label: losses[label] for label in labels}},
        {seed: dict.fromkeys(labels, held_out)},
        curves={seed: curves},
        speeds={seed: {label: 100.0 + 10 * (label != BF16) for label in labels}},
        recorded={seed: {label: [kurtosis] for label in labels if label != BF16}},
    )
    _, written = convergence.deliver("convergence", "", head, found, list(labels), left_out or {}, None, path)
    return str(*written)


def test_results_of_several_seeds_are_joined(tmp_path) -> None:
    files = [write(tmp_path / f"{seed}.json", seed) for seed in (2, 0)]
    joined = tmp_path / "joined.json"
    result = CliRunner().invoke(convergence.app, ["join", *files, "--json", str(joined), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    zero, two, over_all = json.loads(joined.read_text())["tables"]["ends"]
    assert (zero["seed"], two["seed"]) == ("0", "2")
    assert over_all["differences"]["FP8"]["shown"] == "+1.00 ± 1.00 %"
    tables = json.loads(joined.read_text())["tables"]
    (equal,) = tables["equal loss"]
    assert (equal["seeds"], equal["tokens"]["shown"], equal["speed"]["shown"]) == (
        2,
        "+11.11 ± 0.00 %",
        "+10.00 ± 0.00 %",
    )
    assert [row["run"] for row in tables["recorded"]] == ["seed 0, FP8", "seed 2, FP8"]
    assert list(tmp_path.glob("*.png"))
    (written,) = tmp_path.glob("*.md")
    assert written.read_text().startswith("# Losses of 2 seeds, each on 1 rank\n")
    assert "first-seed 2" in written.read_text()


def test_what_another_file_has_is_not_left_out(tmp_path) -> None:
    left_out = dict.fromkeys(("seed 1, FP8", "seed 2, FP8"), "4 of 9 steps so far")
    files = [
        write(tmp_path / "a.json", 1, labels=[BF16], left_out=left_out),
        write(tmp_path / "b.json", 1, labels=["FP8"]),
    ]
    joined = tmp_path / "joined.json"
    result = CliRunner().invoke(convergence.app, ["join", *files, "--json", str(joined)])
    assert result.exit_code == 0, result.output
    assert list(json.loads(joined.read_text())["left_out"]) == ["seed 2, FP8"]


def test_results_of_one_text_are_joined_whatever_it_was_called(tmp_path) -> None:
    files = [write(tmp_path / f"{text}.json", seed, text=text, digest="f1") for seed, text in enumerate(("a", "b"))]
    result = CliRunner().invoke(convergence.app, ["join", *files])
    assert result.exit_code == 0, result.output


def test_results_of_several_variants_are_joined(tmp_path) -> None:
    files = [
        write(tmp_path / "a.json", 1, labels=["FP8, rowwise", "FP8"]),
        write(tmp_path / "b.json", 1, labels=[BF16]),
    ]
    joined = tmp_path / "joined.json"
    result = CliRunner().invoke(convergence.app, ["join", *files, "--json", str(joined)])
    assert result.exit_code == 0, result.output
    tables = json.loads(joined.read_text())["tables"]
    assert [record["variant"] for record in tables["parts"]] == ["FP8", "FP8, rowwise", "FP8, rowwise"]
    assert tables["parts"][1]["last"]["shown"] == "+25.00 %"
    assert tables["parts"][1]["held_out_own"]["shown"] == "+0.00 %"


def test_what_cannot_be_joined_is_one_sentence(tmp_path) -> None:
    one, same = write(tmp_path / "a.json", 0), write(tmp_path / "b.json", 0)
    longer = write(tmp_path / "c.json", 1, steps=30)
    (tmp_path / "d.json").write_text("{}")
    for files, sentence in [
        ([one, same], "has seed 0 of BF16, which another file has too"),
        ([one, longer], "differs in training"),
        ([one, write(tmp_path / "e.json", 1, text="another")], "differs in training"),
        (
            [write(tmp_path / f"{digest}.json", seed, digest=digest) for seed, digest in enumerate(("f1", "f2"))],
            "differs in training",
        ),
        ([one, str(tmp_path / "d.json")], "is not a result of `benchmarks.convergence --json`"),
    ]:
        result = CliRunner().invoke(convergence.app, ["join", *files])
        assert result.exit_code == 2
        assert sentence in result.output


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(1500)))
    return folder / "text.txt"


def train(runs: Sequence[Run], *, until: float = math.inf, at_once: int = 2) -> dict[str, str | None]:
    """Work them off, by name why each failed."""
    outcomes: dict[str, str | None] = {}
    work_off(
        runs,
        places(at_once, 1, "cpu"),
        until=until,
        limit_s=TEST_SECONDS,
        before_run=lambda run: None,
        after_run=lambda run, reason: outcomes.update({run.name: reason}),
    )
    return outcomes


def test_runs_go_on_bit_for_bit(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    job = Job(
        model="micro",
        sequence=32,
        steps=12,
        warm_up=0,
        lr=1e-2,
        max_norm=0.0,
        held_out=0.1,
        device="cpu",
        fp8_options=("always=true", "emulate=true"),
    )
    tokens = tokens_of(str(text), "text", job)
    (other := tmp_path / "other.txt").write_text("eleven and twelve are twenty-three.\n" * 300)
    evaluated = [kind_of_text(each, str(text), tokens, "text") for each in (f"words={other}", "seen")]
    job = replace(job, tokens=tokens, kinds=tuple(evaluated), forwards=forwards(["fp8", "fp8-rowwise"], job))
    variants = chosen(["bf16", "fp8-delayed", "fp8-lean"], [])
    watched = replace(job, evaluate_every=5, record=1)
    whole, parts = (Run.of(tmp_path / name, variants, [3], watched) for name in ("whole", "parts"))
    unwatched = Run.of(tmp_path / "unwatched", variants, [3], job)
    (unevaluated,) = Run.of(tmp_path / "unevaluated", variants[-1:], [3], replace(job, record=1))
    tiny, broken, between = (
        Run.of(tmp_path / name, variants[:1], [3], replace(job, **changes))
        for name, changes in (
            ("tiny", {"gradient_scale": 2.0**-20}),
            ("broken", {"outlier": (5, 1e38)}),
            ("between", {"fp32_start": True}),
        )
    )
    assert set(train([*whole, *unwatched, unevaluated, *tiny, *broken, *between]).values()) == {None}
    no_layer = (("ends", ("high_precision_ends=1", "emulate=true")),)
    refused = Run.of(tmp_path / "refused", variants[:1], [3], replace(job, forwards=no_layer))
    assert "no layer of the model would compute in FP8" in str(*train(refused).values())
    assert not refused[0].folder.losses()
    # late after the last step, a run evaluates when it is begun again
    for steps, ended in ((5, False), (10, False), (12, False), (12, True)):
        with monkeypatch.context() as patch:
            # it is late for the runs as soon as they look, not for who begins them
            patch.setattr(campaign, "time", Mock(wraps=time, time=lambda: 0.0))
            train(parts, until=1.0)
        assert [len(run.folder.losses()) for run in parts] == [steps] * len(parts)
        assert all((run.folder.checkpoint_bytes > 0) == (not ended) for run in parts)
        assert all((run.folder.end() is not None) == ended for run in parts)
    for one, other, plain in zip(whole, parts, unwatched, strict=True):
        assert one.folder.losses() == plain.folder.losses()  # to evaluate and to record changes nothing
        assert one.folder.end() == plain.folder.end()
        curves = one.folder.curves()
        assert other.folder.curves() == curves
        assert [tokens for tokens, _, _ in curves[HELD_OUT]] == [5 * 64, 10 * 64, 12 * 64]
        assert list(curves) == [HELD_OUT, "words", "seen"]
        assert curves[HELD_OUT][0][1] > curves[HELD_OUT][-1][1] > 0 < curves[HELD_OUT][0][2]
        assert recorded(one.folder.scales, 12) == recorded(other.folder.scales, 12)
        assert one.folder.scales.exists() == (one.variant.label != BF16)
        assert one.folder.losses() == other.folder.losses()
        assert one.folder.end() == other.folder.end()
        assert one.folder.end()["end"] == HELD_OUT
        assert not other.folder.checkpoints.exists()
    rows = recorded(whole[-1].folder.scales, 12)
    assert rows == recorded(unevaluated.folder.scales, 12)  # evaluations are not recorded
    assert sum(row["samples"] for row in rows if row["role"] == "input") == 12
    bf16, _, lean = (run.folder.end() for run in whole)
    assert bf16["held_out"]["own"] == bf16["held_out"]["BF16"]  # the same weights in the same precision
    assert bf16["held_out"]["own"] < whole[0].folder.losses()[0]
    assert lean["held_out"]["own"] == pytest.approx(lean["held_out"]["BF16"], rel=1e-2)
    assert lean["held_out"]["own"] != lean["held_out"]["BF16"]
    for end in (bf16, lean):  # the weights of either, in FP8 as neither trains
        for text in (end["held_out"], *end["kinds"].values()):
            assert text["FP8, rowwise"] == pytest.approx(text["BF16"], rel=1e-2)
            assert len({text[way] for way in ("BF16", "FP8", "FP8, rowwise")}) == 3
    assert "14 of 15" in lean["layers"]
    assert bf16["kinds"]["words"]["own"] > bf16["held_out"]["own"] + 1  # it has not seen such text
    assert bf16["kinds"]["seen"]["own"] < bf16["kinds"]["words"]["own"] - 1
    assert lean["kinds"]["words"]["own"] == pytest.approx(bf16["kinds"]["words"]["own"], rel=0.1)
    assert lean["kinds"] != bf16["kinds"]

    # masters between 16-bit values begin with the same weights in 16 bits, and go elsewhere
    (run,) = between
    first, *rest = run.folder.losses()
    assert first == whole[0].folder.losses()[0]
    assert rest != whole[0].folder.losses()[1:]
    assert rest == pytest.approx(whole[0].folder.losses()[1:], rel=0.05)

    # gradients a million times smaller train as before, and what is not finite ends a run
    (run,) = tiny
    assert run.folder.losses() == whole[0].folder.losses()
    (run,) = broken
    assert run.folder.end() == {"end": NOT_FINITE, "at_step": 1}
    found, left_out = Findings.of([*whole, *broken])
    assert found.not_finite == {3: {BF16: 1}}
    assert left_out == {"seed 3, BF16": "its loss is not finite at step 1"}

    # an FP8 run without a layer in FP8 is told of
    (none,) = Run.of(tmp_path / "none", [VARIANTS["fp8"]], [3], job)
    none.folder.path.mkdir(parents=True)
    none.folder.append(end=HELD_OUT, held_out={"own": 4.0, "error": 0.1}, kinds={}, layers=None)
    assert Findings.of([none, whole[0]])[0].facts == {"FP8": "no layer, as their logs say why"}

    # the folder of a run is its own
    (other,) = Run.of(tmp_path / "whole", variants[:1], [3], replace(job, lr=1e-3))
    with pytest.raises(ValueError, match="holds a run of other options or another text; give another --runs"):
        train([other])


def test_masters_between_16_bits_round_to_the_same_16_bits() -> None:
    from benchmarks.training.colossal import put_between_16_bits

    torch.manual_seed(0)
    values = torch.cat([torch.randn(10000), 2.0 ** torch.arange(-20.0, 4.0), torch.zeros(3)]).bfloat16()
    masters = values.float()
    put_between_16_bits([masters])
    assert torch.equal(masters.bfloat16(), values)
    moved = masters != values.float()
    assert moved[: len(values) - 3].float().mean() > 0.99
    assert not moved[-3:].any()
    # evenly, up to half a spacing, which is at least 2^-9 of a value
    apart = ((masters - values.float()) / values.float()).abs()[moved]
    assert 2.0**-9 < apart.max() <= 2.0**-8
    assert apart.mean() > 2.0**-11


def test_runs_share_the_gpus(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")

    def gpus(at_once: int | None, ranks: int) -> list[str]:
        return [place.environment["CUDA_VISIBLE_DEVICES"] for place in places(at_once, ranks, "cuda")]

    assert gpus(3, 1) == ["4", "7", "4"]
    assert gpus(None, 1) == ["4", "7"]
    assert gpus(2, 2) == ["4,7", "4,7"]
    with pytest.raises(ValueError, match="--processes is 3, and there are 2 GPUs; give at most as many"):
        places(1, 3, "cuda")


def test_steps_after_the_checkpoint_are_forgotten(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    folder.append(step=10, losses=[1.0] * 10, tokens=1000, seconds=4.0)
    folder.append(step=20, losses=[2.0] * 10, tokens=1000, seconds=8.0)
    with (tmp_path / "losses.jsonl").open("a") as stream:
        stream.write('{"step": 30, "lo')  # a kill
    assert len(folder.losses()) == 20
    assert folder.speed(10) == 1000 / 8.0
    assert folder.speed() == (125.0 + 250.0) / 2
    assert folder.speed(20) is None
    folder.cut(10)
    assert folder.losses() == [1.0] * 10


def test_a_run_that_fails_says_why(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    job = Job(model="micro", sequence=32, steps=1, warm_up=0, held_out=0.001, device="cpu")
    job = replace(job, tokens=tokens_of(str(text), "text", job))
    runs = Run.of(tmp_path, chosen(["bf16"], []), [0], job)
    (reason,) = train(runs).values()
    assert reason.startswith("ValueError: --held-out 0.001 of the text is")
    assert runs[0].folder.end() is None


def test_a_tokenizer_that_is_there_is_taken(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    job = Job(model="micro")
    trained = tokens_of(str(text), "text", job)
    taken = tokens_of(str(text), "text", job, trained.tokenizer)
    assert taken.folder != trained.folder
    assert (taken.open() == trained.open()).all()
    assert tokens_of(str(taken.folder), "text", job) == taken


def test_kinds_of_text_that_a_machine_has(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    packages = tmp_path / "packages"
    folder = packages / "de" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    (folder / "damaged.mo").write_bytes(b"no catalogue")
    message = "Die Datei wurde nicht gefunden; bitte geben Sie eine andere an."
    (folder / "program.mo").write_bytes(catalogue({"": "Content-Type: text/plain; charset=UTF-8\n", "a": message}))
    monkeypatch.setattr(kinds, "distributions", lambda: [SimpleNamespace(metadata=Message())])
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(packages)})
    tokens = tokens_of(str(text), "text", Job(model="micro"))
    name, found = kind_of_text("de", str(text), tokens, "text")
    assert (name, found.vocabulary) == ("de", tokens.vocabulary)
    assert message in load_tokenizer(str(found.tokenizer)).decode(found.open())
    assert kind_of_text("seen", str(text), tokens, "text") == ("seen", tokens)
    with pytest.raises(ValueError, match="--kind is 'tlh', and this machine has no messages of programs in a language"):
        kind_of_text("tlh", str(text), tokens, "text")
    (header := packages / "include" / "a.cuh").parent.mkdir()
    header.write_text("#pragma once // a header")
    (header.parent / "latin.h").write_bytes(b"\xe4")
    assert list(kinds._headers()) == ["#pragma once // a header"]
    with pytest.raises(ValueError, match="--kind is 'prose', and this machine has no descriptions"):
        kind_of_text("prose", str(text), tokens, "text")
    with pytest.raises(ValueError, match="--kind code is the text that --data python trains on"):
        kind_of_text("code", "python", tokens, "text")


def catalogue(messages: dict[str, str]) -> bytes:
    """A file of translations in gettext's format."""
    keys, values = (b"".join(text.encode() + b"\0" for text in texts) for texts in (messages, messages.values()))
    tables, begin = [], 28 + 16 * len(messages)
    for texts in (messages, messages.values()):
        for each in texts:
            tables += [len(each.encode()), begin]
            begin += len(each.encode()) + 1
    head = (0x950412DE, 0, len(messages), 28, 28 + 8 * len(messages), 0, begin)
    return struct.pack(f"<{7 + len(tables)}I", *head, *tables) + keys + values


def test_text_is_gathered_once_and_in_an_order_of_its_own(tmp_path) -> None:
    packages = tmp_path / "packages"
    (packages / "a").mkdir(parents=True)
    for name, content in {"a/x.py": b"x", "same.py": b"x", "y.md": b"y", "latin.py": b"\xe4", "z.so": b"z"}.items():
        (packages / name).write_bytes(content)
    folder = gather_text([packages, packages], tmp_path / "cache")
    assert sorted(path.read_text() for path in folder.iterdir()) == ["x", "y"]
    # the order is that of digests, wherever a file lies
    (packages / "same.py").rename(packages / "a" / "moved.py")
    (packages / "y.md").rename(packages / "first.md")
    assert gather_text([packages], tmp_path / "cache") == folder
    with pytest.raises(ValueError, match="give --data another folder"):
        gather_text([tmp_path / "none"], tmp_path / "cache")


def test_mixed_text_is_that_of_a_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.md").write_text(f"text {number} " * 50)
    tokens = tokens_of(f"mixed={tmp_path / 'texts'}", "text", Job(model="micro"))
    assert tokens.count > 100


def test_the_whole_command(text, tmp_path) -> None:
    command = ["benchmarks.convergence", "--device", "cpu", "--processes", "2", "--held-out", "0.1"]
    command += ["--model", "micro", "--sequence", "32", "--data", str(text), "--lr", "1e-2"]
    command += ["--variant", "bf16", "--steps", "12", "--seeds", "2", "--first-seed", "3"]
    command += ["--fp8-option", "emulate=true"]
    command += ["--also", "formats.gradient=e4m3", "--out", str(tmp_path), "--json", str(tmp_path / "a.json")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(text.parent / "cache")}
    done = run_program(*command, environment=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["left_out"] == {}
    also = "FP8, formats.gradient=e4m3"
    *by_seed, over_all = found["tables"]["ends"]
    assert [record["seed"] for record in by_seed] == ["3", "4"]
    for record in by_seed:
        assert list(record["losses"]) == [BF16, also]
        assert {len(losses) for losses in record["losses"].values()} == {12}
        assert record["held_out"][also]["own"] == pytest.approx(record["held_out"][BF16]["own"], rel=0.02)
        assert record["last"][also] == pytest.approx(record["last"][BF16], rel=0.02)
        assert record["last"][also] < record["losses"][also][0]
    assert by_seed[0]["losses"][BF16] != by_seed[1]["losses"][BF16]
    assert abs(over_all["differences"][also]["mean"]) < 0.02
    (markdown,) = tmp_path.glob("convergence-micro-2-seeds-3-4_*.md")
    images = list(tmp_path.glob("convergence-micro-2-seeds-3-4_*.png"))
    assert len(images) == 2
    assert all(image.name in markdown.read_text() for image in images)
