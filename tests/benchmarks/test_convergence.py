"""The tables of `benchmarks.convergence`, and results that are joined."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import convergence
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
from benchmarks.training.job import Job
from benchmarks.training.output import describe
from benchmarks.training.runs import HELD_OUT
from benchmarks.training.samples import recorded, recorded_table
from benchmarks.training.variants import BF16, FUSED, VARIANTS, chosen, forwards
from fp8booster.monitor.scales import ScaleRow
from fp8booster.monitor.sinks import JsonLines

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
    not_finite: Sequence[str] = (),
    lines: Mapping[str, str] | None = None,
) -> str:
    head = ({} if digest is None else {"text": f"{text}, 9 tokens of 4 kinds, digest {digest}"}) | {
        "GPU": "CPU",
        "ranks": "1",
        "training": f"model micro, text of {text}, {steps} steps",
        "date": "2026-11-22",
        "torch": "2",
        "command": f"`first-seed {seed}`",
    }
    head |= lines or {}
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
        not_finite={seed: dict.fromkeys(not_finite, 3)},
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


def test_versions_of_all_that_is_joined_are_told(tmp_path) -> None:
    files = [
        write(tmp_path / f"{name}.json", seed, lines={"commit": commit, "date": f"2026-11-{day}", "in FP8, FP8": "84"})
        for name, seed, commit, day in (("new", 0, "f00d", 30), ("old", 1, "beef", 28))
    ]
    joined = tmp_path / "joined.json"
    result = CliRunner().invoke(convergence.app, ["join", *files, "--json", str(joined)])
    assert result.exit_code == 0, result.output
    head = json.loads(joined.read_text())["head"]
    assert (head["commit"], head["date"], head["in FP8, FP8"]) == ("f00d; beef", "2026-11-30", "84")
    assert head["runs"] == "new 2026-11-30, f00d; old 2026-11-28, beef"
    assert head["command of the first run"] == "`first-seed 0`"


def test_weights_run_in_other_ways_are_the_same_training() -> None:
    job = Job(model="micro")
    assert describe(replace(job, forwards=forwards(["fp8-exact"], job))) == describe(job)


def test_texts_of_other_kinds_are_compared_where_both_have_them(tmp_path) -> None:
    a, b, c = (
        write(tmp_path / f"{seed}.json", seed, lines={f"text of {kind}": f"{name}, 9 tokens, digest {digest}"})
        for seed, (kind, name, digest) in enumerate((("k", "x", "f1"), ("k", "y", "f1"), ("seen", "z", "f2")))
    )
    result = CliRunner().invoke(convergence.app, ["join", a, b, c])
    assert result.exit_code == 0, result.output
    other = write(tmp_path / "other.json", 3, lines={"text of k": "x, 9 tokens, digest f2"})
    result = CliRunner().invoke(convergence.app, ["join", c, a, other])
    assert (result.exit_code, f"differs in text of k from {a}: f2 and f1" in result.output) == (2, True)


def test_what_cannot_be_joined_is_one_sentence(tmp_path) -> None:
    one, same = write(tmp_path / "a.json", 0), write(tmp_path / "b.json", 0)
    diverged = write(tmp_path / "f.json", 0, labels=[], not_finite=["FP8"])
    for name, text in (("g", "[1]"), ("h", "{"), ("i", '{"tables": {"ends": []}}')):
        (tmp_path / f"{name}.json").write_text(text)
    longer = write(tmp_path / "c.json", 1, steps=30)
    (tmp_path / "d.json").write_text("{}")
    for files, sentence in [
        ([one, same], f"has seed 0 of BF16, which {one} has too"),
        ([one, diverged], f"has seed 0 of FP8, which {one} has too"),
        ([diverged, one], f"has seed 0 of FP8, which {diverged} has too"),
        *(([one, str(tmp_path / f"{name}.json")], f"{name}.json is not a result") for name in "ghi"),
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
